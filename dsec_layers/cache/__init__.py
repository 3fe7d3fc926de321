"""Segments on local disk: absent or present, fetched once, verified before they are visible.

Knows stores and layers, not who reads: kernel events, FUSE, NBD and disks all end here. Mounts nothing.

Face::

    directory  CacheDirectory, CacheView, lock, note_holder
    fetch      Fetcher, FetchLimits
    flat       FlatImage, OPEN_PIECES, PieceOpener, PieceSource
    metadata   files_of, layer_files, LayerFiles, local_layer_files, manifest
    pages      PageDropper
    segments   errno_of, open_present, SegmentCache, Usage
    stock      Stock
"""
