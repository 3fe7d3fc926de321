"""Tree to image and back, case by case."""

from __future__ import annotations

import os
import stat
from array import array

from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import HOLE, Inode, Tree
from dsec_layers.erofs.writer import render


def small_tree() -> tuple[Tree, list[int]]:
    """One of everything, on two devices."""
    tree = Tree()
    tree.extents = array("Q", [1 << 32, 1 << 32 | 16, HOLE, 2 << 32 | 3])
    names = tree.root.children
    assert names is not None
    small = Inode(stat.S_IFREG | 0o644, 1, 2, 1_700_000_000, 5)
    small.data, small.size = b"hello\n", 6
    chunked = Inode(stat.S_IFREG | 0o755, 70_000, 70_001, -5, 999_999_999)
    chunked.size, chunked.extent_at, chunked.extent_count = 3 * 65536 + 1, 0, 4
    link = Inode(stat.S_IFLNK | 0o777)
    link.data, link.size = b"../target", 9
    device = Inode(stat.S_IFCHR | 0o600)
    device.rdev = os.makedev(4, 70_000)
    sub = Inode(stat.S_IFDIR | 0o1777, mtime=7)
    small.xattrs = ((b"security.capability", b"\x01\0\0\x02"), (b"user.x", b""))
    names.update({b"a": small, b"-dash": chunked, b"link": link, b"null": device, b"sub": sub, b"\xff\x01": Inode(stat.S_IFIFO | 0o600)})
    assert sub.children is not None
    sub.children[b"again"] = small
    return tree, [32, 4]


def assert_same(one: Tree, other: Tree) -> None:
    """Equal in every path, attribute, link and extent."""
    left, right = list(one.walk()), list(other.walk())
    assert [path for path, _ in left] == [path for path, _ in right]
    pairs: dict[int, int] = {}
    for (path, a), (_, b) in zip(left, right, strict=True):
        for name in ("mode", "uid", "gid", "mtime", "mtime_ns", "rdev", "size", "xattrs", "extent_count"):
            assert getattr(a, name) == getattr(b, name), (path, name)
        assert (a.data or b"") == (b.data or b""), path
        if a.extent_count:
            assert a.chunk_bits == b.chunk_bits, path
            mine = one.extents[a.extent_at : a.extent_at + a.extent_count]
            assert mine == other.extents[b.extent_at : b.extent_at + b.extent_count], path
        assert pairs.setdefault(id(a), id(b)) == id(b), path
    assert len(set(pairs.values())) == len(pairs)


def test_one_of_everything_comes_back() -> None:
    tree, devices = small_tree()
    image = render(tree, devices)
    back = Image(image).tree()
    assert_same(tree, back)
    assert render(back, devices) == image
