"""Whether what was just packed is a layer that the store has already, laid out differently perhaps.

Which segments a layer consists of depends on what the catalog knew when it was built. So when the same input is packed again (nothing changed, or a
build was killed after its manifest was published) the result is the layer that is there, and its digest, not a copy that points into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.erofs.columns import slices
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.errors import DsecError, ImageError
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.tables import BLOCK
from dsec_layers.registry.objects import hold, load_chunks, load_layer, load_metadata
from dsec_layers.store.base import Store

__all__ = ["Content", "find_same"]

Places: TypeAlias = Mapping[tuple[int, int], bytes]
"""(device, block) -> digest of the chunk that begins there."""

Extents: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Content:
    """Extents and what they name: the digest of each device's segment, and (worked out when asked for) of the chunks in them."""

    extents: Extents
    segments: list[bytes]
    chunks: Callable[[], Places]


def find_same(store: Store, candidates: Iterable[Digest], config: bytes, tree: Tree, content: Content) -> tuple[Digest, Layer] | None:
    """The first of the candidate layers that has this config and this content; all it refers to is there and has been touched.

    A candidate that cannot be read is none.
    """
    wanted = sha256_digest(config)
    for digest in dict.fromkeys(candidates):
        try:
            layer = load_layer(store, digest)
            if layer.config.digest == wanted and not layer.compressed and _same(store, layer, tree, content):
                hold(store, layer)
                store.touch(digest)
                return digest, layer
        except DsecError:
            continue
    return None


def _same(store: Store, layer: Layer, tree: Tree, content: Content) -> bool:
    image, table = load_metadata(store, layer)
    theirs = Image(image).tree()
    pairs = _pair(tree.root, theirs.root)
    if pairs is None:
        return False
    places = np.array([(mine.extent_at, other.extent_at, mine.extent_count) for mine, other in pairs], np.int64).reshape(-1, 3)
    ours_at = slices(places[:, 0], places[:, 2])
    other = np.asarray(theirs.extents, np.uint64)[slices(places[:, 1], places[:, 2])]

    def chunks() -> Places:
        records = load_chunks(store, layer, table)
        return {(segment + 1, block): digest for digest, segment, block in records[["digest", "segment", "block"]].tolist()}

    if not _equal(replace(content, extents=content.extents[ours_at]), Content(other, table["digest"].tolist(), chunks)):
        return False
    moved = content.extents.copy()
    moved[ours_at] = other
    copy = Tree(tree.root)
    copy.extents.frombytes(moved.tobytes())
    try:
        compare(copy, image, [size // BLOCK for size in table["size"].tolist()])
    except ImageError:
        return False
    return True


def _pair(ours: Inode, theirs: Inode) -> list[tuple[Inode, Inode]] | None:
    """The files with extents of both trees, name by name; None if they cannot be the same tree. Attributes are compared later."""
    pairs: dict[int, tuple[Inode, Inode]] = {}
    stack = [(ours, theirs)]
    while stack:
        mine, other = stack.pop()
        if mine.children is not None:
            if other.children is None or mine.children.keys() != other.children.keys():
                return None
            stack += [(child, other.children[name]) for name, child in mine.children.items()]
        elif (mine.extent_count, mine.size) != (other.extent_count, other.size):
            return None
        elif mine.extent_count:
            pairs[id(mine)] = (mine, other)
    return list(pairs.values())


def _equal(ours: Content, theirs: Content) -> bool:
    """Whether extents name the same content in two numberings: the same place of an equal segment, or chunks of the same digest."""
    numbers: dict[bytes, int] = {}
    shift, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    common: list[Extents] = []
    for content in (ours, theirs):
        known = np.array([0, *(numbers.setdefault(digest, len(numbers) + 1) for digest in content.segments)], np.uint64)
        common.append(known[content.extents >> shift] << shift | content.extents & low)
    differ = common[0] != common[1]
    if not differ.any():
        return True
    left, right = ours.chunks(), theirs.chunks()
    for at, to in {*zip(ours.extents[differ].tolist(), theirs.extents[differ].tolist(), strict=True)}:
        digest = left.get((at >> 32, at & 0xFFFFFFFF))
        if digest is None or digest != right.get((to >> 32, to & 0xFFFFFFFF)):
            return False
    return True
