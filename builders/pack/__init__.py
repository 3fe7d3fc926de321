"""Content becomes chunks, chunks become segments, segments and metadata become a published layer. ``layer.pack_layer`` is the way in.

One pass over the input; what other layers have is used where it lies; same input, same digest.

Face::

    chunker  chunk_bits_of
    layer    Ingest, pack_layer, PackResult
"""
