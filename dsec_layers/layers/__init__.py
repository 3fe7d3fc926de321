"""Layers, environments and disks as values: manifests, segment and chunk tables, zstd framing (docs/formats/layer.md).

Bytes in, values out; no input or output. Parsers raise ImageError and nothing else, whatever the bytes.

Face::

    descriptor  Descriptor, Kind, MANIFEST
    disk        DISK_CONFIG, DiskConfig, DiskImage, DiskLayer, LAYER_TAR, pack_pieces, parse_pieces, PIECE_SIZE, PIECES, UUID
    frames      Bound, CHUNKS_BOUND, compress, decompress, decompress_into, MAX_METADATA, METADATA_BOUND, SeekTable, skippable,
                split_metadata, unpack
    image       check_image, compose_image, one_layer, overlay_image
    manifest    canonical_json, Environment, FOREIGN, Layer, LayerConfig, MAX_DESCRIPTORS, MAX_JSON, Object, parse_config,
                parse_disk, parse_layer, parse_object
    metadata    open_metadata
    tables      BLOCK, CHUNK, dump_segments, MAX_CHUNKS_BYTES, MAX_SEGMENT, MAX_SEGMENTS, MAX_STORED, pack_chunks, pack_segments,
                parse_chunks, parse_segments, SEGMENT, Table
"""
