"""Inputs of a build (tar, directory, OCI image): each becomes a Tree and calls to a ContentSink. ``detect.detect`` tells them apart."""
