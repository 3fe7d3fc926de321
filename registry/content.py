"""A layer read straight from its store: its tree, and the bytes of its files, segment by segment and verified.

For verbs that look at whole layers (export, diff, inspect). Mounts go through the cache and the kernel instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property

from dsec_layers.digest import Buffer, Digest
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import BLOCK, HOLE, Inode, Tree
from dsec_layers.errors import CorruptError, InputError
from dsec_layers.layers.manifest import Layer
from dsec_layers.registry.objects import load_layer, load_metadata
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store

__all__ = ["LayerContent", "open_layer"]

_KEEP_SEGMENTS = 16


class LayerContent:
    """A layer of the ``segments`` layout opened for reading. One thread."""

    def __init__(self, store: Store, digest: Digest, layer: Layer) -> None:
        if layer.compressed:
            raise InputError(
                f"layer {digest} has the compressed layout, whose files only a mount can read", hint="mount it and read the files there"
            )
        self.store = store
        self.digest = digest
        self.layer = layer
        self.image, self.table = load_metadata(store, layer)
        self._segments: OrderedDict[int, Buffer] = OrderedDict()

    @cached_property
    def tree(self) -> Tree:
        """The layer's own tree, whiteouts and all."""
        return Image(self.image).tree()

    def place(self, index: int) -> Segment:
        """What segment ``index`` of the segment table is, and where."""
        return Segment.of_record(self.store.url, self.layer, self.table, index)

    def segment(self, index: int) -> Buffer:
        """The verified bytes of segment ``index`` of the segment table. Raises CorruptError."""
        if index in self._segments:
            self._segments.move_to_end(index)
            return self._segments[index]
        data = read_segment(self.store, self.place(index))
        self._segments[index] = data
        if len(self._segments) > _KEEP_SEGMENTS:
            self._segments.popitem(last=False)
        return data

    def extents(self, inode: Inode) -> Iterator[tuple[int, int, int]]:
        """(device, block, bytes) of each chunk of a regular file; device 0 is a hole."""
        chunk, left = 1 << inode.chunk_bits, inode.size
        for extent in self.tree.extents[inode.extent_at : inode.extent_at + inode.extent_count]:
            length = min(chunk, left)
            yield (0, 0, length) if extent == HOLE else (extent >> 32, extent & 0xFFFFFFFF, length)
            left -= length

    def regions(self, inode: Inode) -> list[tuple[int, int]]:
        """The (offset, length) parts of a regular file that are not holes, joined where they touch."""
        if inode.data is not None:
            return [(0, inode.size)]
        found: list[tuple[int, int]] = []
        at = 0
        for device, _, length in self.extents(inode):
            if device:
                if found and sum(found[-1]) == at:
                    found[-1] = (found[-1][0], found[-1][1] + length)
                else:
                    found.append((at, length))
            at += length
        return found

    def pieces(self, inode: Inode) -> Iterator[bytes | memoryview | int]:
        """The content of a regular file in order; an int is a hole of that many bytes."""
        if inode.data is not None:
            yield inode.data
            return
        hole = 0
        for device, block, length in self.extents(inode):
            if device == 0:
                hole += length
                continue
            if hole:
                yield hole
                hole = 0
            data = memoryview(self.segment(device - 1))[block * BLOCK : block * BLOCK + length]
            if len(data) != length:
                raise CorruptError(f"layer {self.digest}: a file's chunk leaves segment {device - 1}")
            yield data
        if hole:
            yield hole


def open_layer(store: Store, digest: Digest) -> LayerContent:
    """The layer with this manifest digest, opened for reading."""
    return LayerContent(store, digest, load_layer(store, digest))
