"""Prove that an image says what a tree says: read its bytes back and compare every path, attribute, link and extent.

This is what stands between a bug in the writer and a published layer, so it uses nothing of the writer's: the bytes are decoded by the reader, and
the tree is walked anew.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from dsec_layers.digest import Buffer
from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import Ints, Mask, slices
from dsec_layers.erofs.inodes import decode_chunks
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.scan import Scan
from dsec_layers.erofs.tree import BLOCK, Inode, Tree, find_path, show_path
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["compare"]


def compare(tree: Tree, image: Buffer, devices: Sequence[int]) -> None:
    """Raise ImageError, naming the first path that differs, unless ``image`` holds exactly ``tree`` on ``devices`` (block counts)."""
    read = Image(image)
    _compare_devices(read, devices)
    found = read.scan()
    if read.superblock.inos != len(found.inodes.nid):
        raise ImageError(f"the image counts {read.superblock.inos} inodes but has {len(found.inodes.nid)}", code=ImageCode.INCONSISTENT)
    expected = _match_names(tree, found)
    _compare_attributes(tree, expected, found)
    _compare_extents(tree, expected, read, found)
    _compare_contents(tree, expected, read, found)
    _compare_xattrs(tree, expected, read, found)


def _differ(tree: Tree, inode: Inode, what: str) -> ImageError:
    return ImageError(f"{show_path(find_path(tree.root, inode))}: the image says something else: {what}", code=ImageCode.INCONSISTENT)


def _compare_devices(read: Image, devices: Sequence[int]) -> None:
    at = read.superblock.blocks
    if len(devices) != len(read.devices):
        raise ImageError(f"the image names {len(read.devices)} devices, not {len(devices)}", code=ImageCode.INCONSISTENT)
    for number, (blocks, device) in enumerate(zip(devices, read.devices, strict=True), 1):
        if (device.blocks, device.mapped_blkaddr) != (blocks, at):
            raise ImageError(
                f"device {number}: the image says {device.blocks} blocks at {device.mapped_blkaddr}, not {blocks} at {at}",
                code=ImageCode.INCONSISTENT,
            )
        at += blocks


def _match_names(tree: Tree, found: Scan) -> list[Inode]:
    """The tree's inode for each inode of the image, by walking both from the root; checks names and link structure."""
    expected: list[Inode | None] = [None] * len(found.inodes.nid)
    root = int(found.dir_inode[0])
    expected[root] = tree.root
    firsts = found.first.tolist()
    for nth, at in enumerate(found.dir_inode.tolist()):
        directory = expected[at]
        children = directory.children if directory is not None else None
        first, last = firsts[nth], firsts[nth + 1]
        names = found.names[first:last]
        if directory is None or children is None or sorted(children) != names:
            raise _differ(tree, directory or tree.root, "other names in the directory")
        for name, kid in zip(names, found.child[first:last].tolist(), strict=True):
            inode = children[name]
            other = expected[kid]
            if other is None:
                expected[kid] = inode
            elif other is not inode:
                raise _differ(tree, inode, "other hard links")
    matched = [inode for inode in expected if inode is not None]
    identities = np.fromiter(map(id, matched), np.uint64, len(matched))
    order = np.argsort(identities)
    twice = np.flatnonzero(np.diff(identities[order]) == 0)  # one inode of the tree is several of the image
    if len(twice):
        raise _differ(tree, matched[int(order[twice[0]])], "other hard links")
    return matched


def _column(expected: list[Inode], name: str) -> Ints:
    get: Any = attrgetter(name)
    return np.fromiter(map(get, expected), np.int64, len(expected))


def _compare_attributes(tree: Tree, expected: list[Inode], found: Scan) -> None:
    table = found.inodes
    kind = table.mode & 0o170000
    sized = (kind == stat.S_IFREG) | (kind == stat.S_IFLNK)
    is_device = (kind == stat.S_IFCHR) | (kind == stat.S_IFBLK)
    i_u = table.i_u.copy()
    rdev = np.zeros(len(i_u), np.int64)
    for at in np.flatnonzero(is_device).tolist():
        rdev[at] = fmt.decode_dev(int(i_u[at]))
    columns = {
        "mode": table.mode, "uid": table.uid, "gid": table.gid, "mtime": table.mtime, "mtime_ns": table.mtime_ns,
        "size": np.where(sized, table.size, 0), "rdev": rdev,
    }  # fmt: skip
    for name, column in columns.items():
        wanted = _column(expected, name)
        if name == "rdev":
            wanted[~is_device] = 0
        _refuse(tree, expected, wanted != column, name)
    _refuse(tree, expected, table.nlink != found.links, "number of links")


def _refuse(tree: Tree, expected: list[Inode], bad: Mask, what: str) -> None:
    if bad.any():
        raise _differ(tree, expected[int(np.flatnonzero(bad)[0])], what)


def _compare_extents(tree: Tree, expected: list[Inode], read: Image, found: Scan) -> None:
    table = found.inodes
    count = _column(expected, "extent_count")
    chunked = count > 0
    _refuse(tree, expected, count != table.chunks, "number of chunks")
    _refuse(tree, expected, chunked & (_column(expected, "chunk_bits") != table.chunk_bits), "chunk size")
    got = decode_chunks(read.geometry, table)
    at = _column(expected, "extent_at")
    _refuse(tree, expected, chunked & ((at < 0) | (at + count > len(tree.extents))), "the tree's own extents are missing")
    wanted = np.asarray(tree.extents, np.uint64)[slices(at, count)]
    wrong = np.flatnonzero(wanted != got)
    if len(wrong):
        owner = int(np.searchsorted(np.cumsum(count), wrong[0], "right"))
        raise _differ(tree, expected[owner], f"an extent ({int(got[wrong[0]]):#x}, not {int(wanted[wrong[0]]):#x})")


def _compare_contents(tree: Tree, expected: list[Inode], read: Image, found: Scan) -> None:
    """Link targets and small files."""
    table = found.inodes
    kind = table.mode & 0o170000
    held = ((kind == stat.S_IFREG) | (kind == stat.S_IFLNK)) & (table.chunks == 0)
    _refuse(tree, expected, held & (table.size >= BLOCK), "data in the image itself")
    compressed = (table.layout != fmt.FLAT_PLAIN) & (table.layout != fmt.FLAT_INLINE)
    _refuse(tree, expected, held & compressed & (table.size > 0), "compressed data")
    for at, data in read.small_data(table, np.flatnonzero(held)):
        inode = expected[at]
        if (inode.data or b"") != data:
            raise _differ(tree, inode, "content")


def _compare_xattrs(tree: Tree, expected: list[Inode], read: Image, found: Scan) -> None:
    got = dict(read.xattr_lists(found.inodes))
    for at, inode in enumerate(expected):
        if inode.xattrs or at in got:
            pairs = tuple(sorted(inode.xattrs))
            if pairs != got.get(at, ()):
                raise _differ(tree, inode, "extended attributes")
