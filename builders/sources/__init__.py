"""Inputs of a build (tar, directory, OCI image): each becomes a Tree and calls to a ContentSink. ``detect.detect`` tells them apart.

Inputs are hostile: every length has a bound, no name leaves the tree. Nothing is unpacked to disk.

Face::

    archive    TarSource
    base       ImageConfig, Source
    detect     detect
    directory  DirectorySource, OverlaySource
    scan       Directory
"""
