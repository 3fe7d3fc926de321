"""A layer's metadata blob opened: the EROFS image and the segment table, checked against the manifest and against each other."""

from __future__ import annotations

import numpy as np

from dsec_layers.digest import Buffer
from dsec_layers.erofs.reader import Image
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.layers.frames import MAX_METADATA, split_metadata
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.tables import BLOCK, Table, parse_segments

__all__ = ["open_metadata"]


def open_metadata(blob: Buffer, layer: Layer, *, limit: int = MAX_METADATA) -> tuple[bytes, Table]:
    """(EROFS metadata image, segment table) of a layer of the ``segments`` layout; the image may have ``limit`` bytes.

    Record i is device i + 1 of the image's device table: same count, same blocks, and the unified addresses follow one another behind the metadata,
    so that metadata and segments in a row are the flat image. Raises ImageError.
    """
    if layer.compressed:
        raise ImageError("a layer of the compressed layout has no metadata blob", code=ImageCode.INCONSISTENT)
    image, raw = split_metadata(blob, limit)
    table = parse_segments(raw, tuple(item.size for item in layer.segments))
    devices = Image(image).devices
    if len(devices) != len(table):
        raise ImageError(f"the image has {len(devices)} devices, the segment table {len(table)} records", code=ImageCode.INCONSISTENT)
    if len(image) % BLOCK:
        raise ImageError("the metadata image does not end at a block", code=ImageCode.INCONSISTENT)
    blocks = np.array([device.blocks for device in devices], np.int64)
    mapped = np.array([device.mapped_blkaddr for device in devices], np.int64)
    if (blocks * BLOCK != table["size"]).any():
        raise ImageError("device table and segment table differ in a segment's size", code=ImageCode.INCONSISTENT)
    if (mapped != len(image) // BLOCK + np.cumsum(blocks) - blocks).any():
        raise ImageError("the devices' unified addresses do not follow one another behind the metadata", code=ImageCode.INCONSISTENT)
    return image, table
