"""A tree as columns: every inode once, every directory entry once, in the order in which an image holds them.

The order is that of the paths: directories depth first, and the inodes that a directory names next to each other, so that reading a directory and
looking at what it names touches neighbouring blocks. The tree is checked on the way: what leaves here can be written.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import Ints, Mask, Narrow
from dsec_layers.erofs.overlay import whiteout_columns
from dsec_layers.erofs.tree import BLOCK, Inode, Tree, find_path, show_path
from dsec_layers.errors import ImageCode, ImageError, LimitError

__all__ = ["Flat", "flatten"]


@dataclass(slots=True)
class Flat:
    """The columns. ``inodes[0]`` is the root; all arrays but the ``entry``/``dir`` ones are parallel to ``inodes``."""

    root: Inode
    inodes: list[Inode]
    names: list[bytes]
    """Names of all directories' entries, ``.`` and ``..`` among them, sorted within each directory."""
    entry_inode: Ints
    dir_inode: Ints
    dir_first: Ints
    """First entry of each directory, and one more: the number of entries."""
    nlink: Ints
    mode: Narrow
    uid: Narrow
    gid: Narrow
    mtime: Ints
    mtime_ns: Narrow
    size: Ints
    i_rdev: Narrow
    """Device numbers as the image spells them; 0 for what is not a device."""
    has_data: Mask
    extent_at: Ints
    extent_count: Ints
    """Chunks; 0 for what is not chunk-based."""
    chunk_bits: Narrow

    def refuse(self, bad: Mask, what: str, *, limit: bool = False) -> None:
        """Raise ImageError, or LimitError for a ``limit``, with the path of the first inode for which ``bad`` holds, if any does."""
        if bad.any():
            inode = self.inodes[int(np.flatnonzero(bad)[0])]
            text = f"{show_path(find_path(self.root, inode))}: {what}"
            raise LimitError(text) if limit else ImageError(text, code=ImageCode.INCONSISTENT)


def flatten(tree: Tree) -> Flat:
    """The columns of a tree. Raises ImageError for a tree that makes no sense and LimitError for one that EROFS cannot express, naming the path."""
    names, entries, dots, counts = _walk(tree.root)
    _check_names(tree.root, names, entries)
    first_seen, entry_inode = _number([tree.root, *entries])
    inodes = [tree.root if at == 0 else entries[at - 1] for at in first_seen.tolist()]
    entry_inode = entry_inode[1:]
    firsts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=firsts[1:])
    flat = Flat(
        tree.root, inodes, names, entry_inode,
        dir_inode=entry_inode[dots], dir_first=firsts, nlink=np.bincount(entry_inode, minlength=len(inodes)),
        mode=_column(inodes, "mode"), uid=_column(inodes, "uid"), gid=_column(inodes, "gid"),
        mtime=_column(inodes, "mtime"), mtime_ns=_column(inodes, "mtime_ns"), size=_column(inodes, "size"),
        i_rdev=np.zeros(len(inodes), np.uint32), has_data=np.array([inode.data is not None for inode in inodes], np.bool_),
        extent_at=_column(inodes, "extent_at"), extent_count=_column(inodes, "extent_count"), chunk_bits=_column(inodes, "chunk_bits"),
    )  # fmt: skip
    _check_attributes(flat)
    _check_content(flat)
    _check_chunks(flat, len(tree.extents))
    return flat


def _walk(root: Inode) -> tuple[list[bytes], list[Inode], list[int], list[int]]:
    """All directory entries: names, the inodes they name, where each directory's ``.`` is, and how many entries each directory has."""
    names: list[bytes] = []
    entries: list[Inode] = []
    dots: list[int] = []
    counts: list[int] = []
    seen = {id(root)}
    stack = [(root, root, 0)]
    while stack:
        directory, parent, depth = stack.pop()
        children = directory.children
        if children is None:
            raise ImageError("the root of a tree must be a directory", code=ImageCode.INCONSISTENT)
        if b"." in children or b".." in children:
            raise ImageError(f"{show_path(find_path(root, directory))}: a name '.' or '..'", code=ImageCode.BAD_ENCODING)
        order = sorted(children)
        targets = list(map(children.__getitem__, order))
        below = [target for target in targets if target.children is not None]
        for target in below:
            if id(target) in seen:
                raise ImageError(f"{show_path(find_path(root, target))}: a directory with two names", code=ImageCode.INCONSISTENT)
            seen.add(id(target))
        if below and depth >= fmt.MAX_DEPTH:
            raise LimitError(f"{show_path(find_path(root, directory))}: directories nested deeper than {fmt.MAX_DEPTH}")
        stack.extend((target, directory, depth + 1) for target in reversed(below))
        for name, target in ((b".", directory), (b"..", parent)):
            at = bisect_left(order, name)
            order.insert(at, name)
            targets.insert(at, target)
        dots.append(len(names) + order.index(b"."))
        counts.append(len(order))
        names += order
        entries += targets
        if len(names) - 2 * len(counts) >= fmt.MAX_ENTRIES:
            raise LimitError(f"more than {fmt.MAX_ENTRIES} names")
    return names, entries, dots, counts


def _check_names(root: Inode, names: list[bytes], entries: list[Inode]) -> None:
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    joined = b"".join(names)
    if lengths.min() > 0 and lengths.max() <= fmt.MAX_NAME and b"/" not in joined and b"\0" not in joined:
        return
    for name, inode in zip(names, entries, strict=True):
        path = show_path(find_path(root, inode))
        if len(name) > fmt.MAX_NAME:
            raise LimitError(f"{path}: a name of {len(name)} bytes; the limit is {fmt.MAX_NAME}")
        if not name or b"/" in name or b"\0" in name:
            raise ImageError(f"{path}: not a file name: {name!r}", code=ImageCode.BAD_ENCODING)


def _number(entries: list[Inode]) -> tuple[Ints, Ints]:
    """Numbers for the inodes by first appearance: where each appears first, and the number of each entry's inode."""
    identities = np.fromiter(map(id, entries), np.uint64, len(entries))
    _, first, inverse = np.unique(identities, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(first), np.int64)
    rank[order] = np.arange(len(first))
    return first[order].astype(np.int64), rank[inverse.reshape(-1)]


def _column(inodes: list[Inode], name: str) -> Ints:
    get: Callable[[Inode], int] = attrgetter(name)
    try:
        return np.fromiter(map(get, inodes), np.int64, len(inodes))
    except OverflowError:
        raise LimitError(f"a {name} that does not fit 64 bits") from None


def _check_attributes(flat: Flat) -> None:
    mode = flat.mode
    flat.refuse((mode < 0) | (mode > 0xFFFF), "mode out of range")
    flat.refuse(fmt.FILE_TYPE_OF_MODE[mode >> 12] == fmt.FT_UNKNOWN, "mode without a file type")
    is_dir = np.zeros(len(flat.inodes), np.bool_)
    is_dir[flat.dir_inode] = True
    flat.refuse(((mode & 0o170000) == stat.S_IFDIR) != is_dir, "mode and children disagree on whether this is a directory")
    for name, column in (("uid", flat.uid), ("gid", flat.gid)):
        flat.refuse((column < 0) | (column > fmt.MAX_ID), f"{name} outside 0..{fmt.MAX_ID}", limit=True)
    flat.refuse((flat.mtime_ns < 0) | (flat.mtime_ns >= 1_000_000_000), "nanoseconds out of range")
    flat.refuse(flat.nlink > fmt.MAX_LINKS, f"more than {fmt.MAX_LINKS} links", limit=True)
    for at in np.flatnonzero(np.isin(mode & 0o170000, (stat.S_IFCHR, stat.S_IFBLK))).tolist():
        device = flat.inodes[at].rdev
        if device < 0 or os.major(device) > fmt.MAX_MAJOR or os.minor(device) > fmt.MAX_MINOR:
            path = show_path(find_path(flat.root, flat.inodes[at]))
            raise LimitError(f"{path}: device number {device:#x}; the limits are major {fmt.MAX_MAJOR}, minor {fmt.MAX_MINOR}")
        flat.i_rdev[at] = fmt.encode_dev(device)
    whiteout = whiteout_columns(mode, flat.i_rdev)
    flat.refuse(whiteout & (flat.nlink > 1), "a whiteout with two names; overlayfs allows one")
    flat.mode = mode.astype(np.int32)
    flat.uid, flat.gid, flat.mtime_ns = (column.astype(np.uint32) for column in (flat.uid, flat.gid, flat.mtime_ns))


def _check_content(flat: Flat) -> None:
    """Sizes and inline data of links and small files."""
    kind = flat.mode & 0o170000
    regular, link = kind == stat.S_IFREG, kind == stat.S_IFLNK
    flat.refuse((flat.size < 0) | ((flat.size > 0) & ~(regular | link)), "a size where none belongs")
    flat.refuse(flat.has_data & ~(regular | link), "inline data where none belongs")
    flat.refuse(link & ~flat.has_data, "a symbolic link without a target")
    at = np.flatnonzero(flat.has_data)
    contents = [flat.inodes[i].data or b"" for i in at.tolist()]
    lengths = np.zeros(len(flat.inodes), np.int64)
    lengths[at] = np.fromiter(map(len, contents), np.int64, len(contents))
    flat.refuse(flat.has_data & (lengths != flat.size), "inline data of another length than the size")
    flat.refuse(flat.has_data & regular & (lengths >= BLOCK), "inline data of a block or more")
    flat.refuse(link & (lengths > fmt.MAX_TARGET), f"a link target longer than {fmt.MAX_TARGET} bytes", limit=True)
    nul = np.zeros(len(flat.inodes), np.bool_)
    nul[at] = np.fromiter((b"\0" in content for content in contents), np.bool_, len(contents))
    flat.refuse(link & ((lengths == 0) | nul), "a link target that is empty or has a NUL byte")


def _check_chunks(flat: Flat, total: int) -> None:
    """Slices of the tree's extents; clears the columns of what is not chunk-based."""
    chunked = ((flat.mode & 0o170000) == stat.S_IFREG) & ~flat.has_data & (flat.size > 0)
    flat.refuse(~chunked & (flat.extent_count != 0), "extents where none belong")
    bits = np.where(chunked, flat.chunk_bits, 12)
    flat.refuse((bits < 12) | (bits > fmt.MAX_CHUNK_BITS), f"chunk_bits outside 12..{fmt.MAX_CHUNK_BITS}")
    need = np.where(chunked, (flat.size - 1 >> bits) + 1, 0)
    flat.refuse(need != flat.extent_count, "another number of extents than the size asks for")
    flat.refuse(chunked & ((flat.extent_at < 0) | (flat.extent_at > total - need)), "extents outside the tree's array")
    flat.chunk_bits = bits.astype(np.int8)
