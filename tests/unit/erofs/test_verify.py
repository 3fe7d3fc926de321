"""compare() notices everything: each kind of difference, and names the path."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest

from dsec_layers.erofs.tree import HOLE, Inode, Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render
from dsec_layers.errors import ImageError
from tests.kit.erofs_samples import SAMPLES, add, patched, regular

Change = Callable[[Tree], None]


def get(tree: Tree, path: bytes) -> Inode:
    return dict(tree.walk())[path]


def set_field(path: bytes, name: str, value: object) -> Change:
    return lambda tree: setattr(get(tree, path), name, value)


def set_extent(nth: int, value: int) -> Change:
    return lambda tree: tree.extents.__setitem__(get(tree, b"-dash").extent_at + nth, value)


def unlink(tree: Tree, name: bytes) -> Inode:
    assert tree.root.children is not None
    return tree.root.children.pop(name)


def break_link(tree: Tree) -> None:
    copy = regular(get(tree, b"sub"), b"again", b"hello\n")
    original = get(tree, b"a")
    for name in ("mode", "uid", "gid", "mtime", "mtime_ns", "xattrs"):
        setattr(copy, name, getattr(original, name))


def make_link(tree: Tree) -> None:
    unlink(tree, b"socket")
    add(tree.root, b"socket", get(tree, b"\xff\x01"))


CHANGES: dict[str, tuple[Change, str]] = {
    "mode": (set_field(b"link", "mode", stat.S_IFLNK | 0o776), "/link"),
    "type": (set_field(b"socket", "mode", stat.S_IFIFO | 0o755), "/socket"),
    "uid": (set_field(b"-dash", "uid", 1), "/-dash"),
    "gid": (set_field(b"sub", "gid", 1), "/sub"),
    "mtime": (set_field(b"", "mtime", 1), "/"),
    "mtime_ns": (set_field(b"a", "mtime_ns", 6), "/a"),
    "size": (set_field(b"-dash", "size", 196608 + 2), "/-dash"),
    "rdev": (set_field(b"null", "rdev", os.makedev(4, 4)), "/null"),
    "target": (set_field(b"link", "data", b"../tarzan"), "/link"),
    "content": (set_field(b"a", "data", b"hallo\n"), "/a"),
    "attribute": (set_field(b"a", "xattrs", ((b"user.x", b""),)), "/a"),
    "no attribute": (set_field(b"a", "xattrs", ()), "/a"),
    "another attribute": (set_field(b"link", "xattrs", ((b"trusted.x", b""),)), "/link"),
    "extent": (set_extent(1, 1 << 32 | 15), "/-dash"),
    "no hole": (set_extent(2, 1 << 32), "/-dash"),
    "hole": (set_extent(0, HOLE), "/-dash"),
    "chunk size": (set_field(b"-dash", "chunk_bits", 17), "/-dash"),
    "chunks": (set_field(b"-dash", "extent_count", 3), "/-dash"),
    "foreign extents": (set_field(b"-dash", "extent_at", 1), "/-dash"),
    "missing name": (lambda tree: (unlink(tree, b"disk"), None)[1], "/"),
    "new name": (lambda tree: (regular(get(tree, b"sub"), b"new", b""), None)[1], "/sub"),
    "broken link": (break_link, "/sub/again"),
    "new link": (make_link, "/socket"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named_by_path(change: str) -> None:
    tree, devices = SAMPLES["everything"]()
    image = render(tree, devices)
    compare(tree, image, devices)
    apply, path = CHANGES[change]
    apply(tree)
    with pytest.raises(ImageError) as caught:
        compare(tree, image, devices)
    assert caught.value.message.split(":")[0] in (path, "/\\xff\\x01")


@pytest.mark.parametrize("devices", [[32], [32, 5], [32, 4, 1], [4, 32]])
def test_other_devices_are_noticed(devices: list[int]) -> None:
    tree, right = SAMPLES["everything"]()
    with pytest.raises(ImageError, match="device"):
        compare(tree, render(tree, right), devices)


def test_a_wrong_link_or_inode_count_is_noticed() -> None:
    tree, devices = SAMPLES["same_time"]()
    image = render(tree, devices)
    with pytest.raises(ImageError, match="inodes"):
        compare(tree, patched(image, 1024 + 16, b"\1"), devices)
    root = 1024 + 128 * 3  # the device table ends there, and the root is the first inode
    with pytest.raises(ImageError, match="number of links"):
        compare(tree, patched(image, root + 6, b"\7"), devices)
