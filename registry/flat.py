"""The flat EROFS image of a layer or environment: one metadata image, and after it every segment it uses."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import BinaryIO

from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import BLOCK, HOLE, Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.layers.manifest import Layer
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.content import LayerContent, open_layer
from dsec_layers.registry.objects import resolve
from dsec_layers.registry.view import Entry, open_view
from dsec_layers.store.base import Store

__all__ = ["flat_image", "write_flat"]


def write_flat(store: Store, text: str, stream: BinaryIO, progress: Progress = SILENT) -> int:
    """Write the flat image of the layer or environment that ``text`` names; the bytes written."""
    image, segments = flat_image(store, text)
    written = 0
    with progress.task(f"exporting {text}") as task:
        for piece in chain([image], (owner.segment(index) for owner, index in segments)):
            stream.write(piece)
            written += len(piece)
            task.advance(len(piece))
    return written


def flat_image(store: Store, text: str) -> tuple[Buffer, list[tuple[LayerContent, int]]]:
    """The metadata of a flat image, and the segments that follow it in order.

    It has no device table, so that every kernel with chunk-based files (Linux >= 5.15) mounts it; the images that layers are mounted by need 6.4 for that.
    """
    digest, found = resolve(store, text)
    if not isinstance(found, Layer):
        return _merged_image(open_view(store, text))
    layer = open_layer(store, digest)
    blocks = (layer.table["size"] // BLOCK).tolist()
    return render(layer.tree, blocks, joined=True), [(layer, index) for index in range(len(blocks))]


def _merged_image(root: Entry) -> tuple[Buffer, list[tuple[LayerContent, int]]]:
    """One metadata image of a merged view, and the segments that are its devices in order. The same segment in two layers is one device."""
    devices: dict[bytes, int] = {}
    segments: list[tuple[LayerContent, int]] = []
    tree = Tree(root=Inode(root.inode.mode))
    made: dict[tuple[int, int], Inode] = {}

    def device_of(layer: LayerContent, device: int) -> int:
        key = layer.table[device - 1]["digest"].tobytes()
        if key not in devices:
            segments.append((layer, device - 1))
            devices[key] = len(segments)
        return devices[key]

    def copy(entry: Entry) -> Inode:
        if entry.children is None and entry.identity in made:
            return made[entry.identity]
        inode = _copy_inode(entry)
        extents = entry.layer.tree.extents[entry.inode.extent_at : entry.inode.extent_at + entry.inode.extent_count]
        inode.extent_at = len(tree.extents)
        tree.extents.extend(array("Q", (e if e == HOLE else device_of(entry.layer, e >> 32) << 32 | e & 0xFFFFFFFF for e in extents)))
        made[entry.identity] = inode
        return inode

    tree.root = copy(root)
    stack = [(root, tree.root)]
    while stack:
        entry, inode = stack.pop()
        assert inode.children is not None
        for name in sorted(entry.children or {}):
            child = (entry.children or {})[name]
            inode.children[name] = made_child = copy(child)
            if child.children is not None:
                stack.append((child, made_child))
    return render(tree, [int(layer.table[index]["size"]) // BLOCK for layer, index in segments], joined=True), segments


def _copy_inode(entry: Entry) -> Inode:
    old = entry.inode
    inode = Inode(old.mode, old.uid, old.gid, old.mtime, old.mtime_ns)
    inode.rdev, inode.size, inode.data, inode.xattrs = old.rdev, old.size, old.data, entry.xattrs
    inode.extent_count, inode.chunk_bits = old.extent_count, old.chunk_bits
    return inode
