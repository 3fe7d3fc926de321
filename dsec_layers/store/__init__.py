"""Blob stores: immutable blobs named by SHA-256, small refs changed by compare-and-swap. ``base`` is the contract, a file a backend, ``open`` makes one from its URL.

Knows nothing of layers.

Face::

    base      BlobInfo, check_ref, Ref, Store
    open      open_store
    transfer  PIECE, put_bytes, put_stream, read_ahead, read_blob, read_pieces
"""
