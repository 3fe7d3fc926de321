"""Overlayfs uppers stacked into one tree that keeps whiteouts and opaque directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsec_layers.builders.overlay.stack import overlay_xattr, stack_uppers
from dsec_layers.builders.sources.directory import OverlaySource
from dsec_layers.erofs.overlay import OPAQUE_XATTR, is_opaque, is_whiteout
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError
from tests.kit.oracle import MemorySink


def tree(spec: dict[str, object]) -> Tree:
    """A tree from nested dicts: a dict is a directory (with the key "=" an opaque one), a string a file's content, None a whiteout."""

    def inode(value: object) -> Inode:
        if value is None:
            return Inode(stat.S_IFCHR)
        if isinstance(value, str):
            made = Inode(stat.S_IFREG | 0o644)
            made.data = value.encode()
            return made
        assert isinstance(value, dict)
        made = Inode(stat.S_IFDIR | 0o755)
        assert made.children is not None
        for name, child in value.items():
            if name == "=":
                made.xattrs = ((OPAQUE_XATTR, b"y"),)
            else:
                made.children[name.encode()] = inode(child)
        return made

    return Tree(inode(spec))


def spec(inode: Inode) -> object:
    """The dicts a tree was made of."""
    if is_whiteout(inode):
        return None
    if inode.children is None:
        return (inode.data or b"").decode()
    return {name.decode(): spec(child) for name, child in inode.children.items()} | ({"=": ""} if is_opaque(inode) else {})


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([{"a": "1"}, {"b": "2"}], {"a": "1", "b": "2"}),
        ([{"a": "1"}, {"a": "2"}], {"a": "2"}),
        ([{"a": "1"}, {"a": None}], {"a": None}),
        ([{"a": None}, {"a": "2"}], {"a": "2"}),
        ([{"d": {"a": "1"}}, {"d": {"b": "2"}}], {"d": {"a": "1", "b": "2"}}),
        ([{"d": {"a": "1"}}, {"d": {"=": "", "b": "2"}}], {"d": {"=": "", "b": "2"}}),
        ([{"d": {"=": "", "a": "1"}}, {"d": {"b": "2"}}], {"d": {"=": "", "a": "1", "b": "2"}}),
        # a directory over a whiteout or a file hides what is deeper still
        ([{"d": None}, {"d": {"b": "2"}}], {"d": {"=": "", "b": "2"}}),
        ([{"d": "file"}, {"d": {"b": "2"}}], {"d": {"=": "", "b": "2"}}),
        ([{"d": {"a": "1"}}, {"d": None}, {"d": {}}], {"d": {"=": ""}}),
        # a whiteout of a name that is not here is for the layers below
        ([{"a": "1"}, {"z": None, "d": {"y": None}}], {"a": "1", "z": None, "d": {"y": None}}),
        # marks where nothing below shows say nothing
        ([{"d": {"=": "", "a": None, "e": {"=": "", "x": None, "f": "1"}}}], {"d": {"=": "", "e": {"f": "1"}}}),
        ([{"d": {"=": "", "a": "1"}}, {"d": {"a": None}}], {"d": {"=": ""}}),
        ([{"d": {"e": {"f": "1"}}}, {"d": {"=": "", "e": {"g": "2"}}}], {"d": {"=": "", "e": {"g": "2"}}}),
        ([{"d": {"a": "1", "b": "1"}}, {"d": {"a": None}}, {"d": {"a": {"c": "3"}}}], {"d": {"a": {"=": "", "c": "3"}, "b": "1"}}),
        ([], {}),
    ],
)
def test_stacking(layers: list[dict[str, object]], wanted: dict[str, object]) -> None:
    assert spec(stack_uppers([tree(layer) for layer in layers]).root) == wanted


def test_attributes_are_those_of_the_highest() -> None:
    low, high = tree({"d": {"a": "1"}}), tree({"d": {}})
    assert low.root.children is not None and high.root.children is not None
    low.root.children[b"d"].uid = 1
    high.root.children[b"d"].uid = 2
    high.root.mode = stat.S_IFDIR | 0o700
    high.root.children[b"d"].xattrs = ((b"user.x", b"1"),)
    result = stack_uppers([low, high])
    assert result.root.children is not None
    found = result.root.children[b"d"]
    assert (found.uid, found.xattrs, result.root.mode & 0o777) == (2, ((b"user.x", b"1"),), 0o700)


def test_overlayfs_notes() -> None:
    for note in (b"origin", b"impure", b"nlink", b"upper", b"uuid"):
        assert overlay_xattr(b"d", True, b"trusted.overlay." + note, b"x") is None
        assert overlay_xattr(b"d", True, b"user.overlay." + note, b"x") is None
    assert overlay_xattr(b"d", True, b"user.overlay.opaque", b"y") == OPAQUE_XATTR
    assert overlay_xattr(b"d", False, b"user.other", b"y") == b"user.other"
    assert overlay_xattr(b"d", False, b"btrfs.compression", b"y") is None
    assert overlay_xattr(b"d", True, b"trusted.overlay.overlay.opaque", b"y") == b"trusted.overlay.overlay.opaque"
    for name, value, is_dir in (
        (b"redirect", b"/x", True),
        (b"metacopy", b"", False),
        (b"opaque", b"x", True),
        (b"opaque", b"y", False),
        (b"new", b"", True),
    ):
        with pytest.raises(InputError, match="'some/path' has the overlayfs attribute"):
            overlay_xattr(b"some/path", is_dir, b"trusted.overlay." + name, value)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: character devices and trusted attributes")
def test_uppers_in_directories(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    for path in (one / "d", two / "d"):
        path.mkdir(parents=True)
    (one / "d/gone").write_bytes(b"not to be packed")
    (one / "d/kept").write_bytes(b"kept")
    os.link(one / "d/kept", one / "kept2")
    os.mknod(one / "w1", stat.S_IFCHR, 0)
    os.link(one / "w1", one / "w2")  # overlayfs shares one inode among whiteouts
    os.mknod(two / "d/gone", stat.S_IFCHR | 0o644, 0)
    os.setxattr(two / "d", "trusted.overlay.origin", b"\0" * 29)
    os.setxattr(one, "trusted.overlay.impure", b"y")
    sink = MemorySink()
    result = OverlaySource([one, two]).ingest(sink)
    assert [data for pieces in sink.pieces.values() for _, data in pieces] == [b"kept"]
    assert result.root.children is not None and result.root.xattrs == ((b"trusted.overlay.origin", b""),)
    root = result.root.children
    directory = root[b"d"].children
    origin = ((b"trusted.overlay.origin", b""),)  # both have whiteouts
    assert directory is not None and root[b"kept2"] is directory[b"kept"] and root[b"d"].xattrs == origin
    # A11: a whiteout with two names would be malformed, so each is an inode of its own
    assert is_whiteout(root[b"w1"]) and is_whiteout(root[b"w2"]) and root[b"w1"] is not root[b"w2"]
    for white in (root[b"w1"], directory[b"gone"]):
        assert (white.mode, white.uid, white.gid, white.mtime, white.xattrs) == (stat.S_IFCHR, 0, 0, 0, ())
    os.setxattr(two / "d", "trusted.overlay.redirect", b"/elsewhere")
    with pytest.raises(InputError, match="'d' has the overlayfs attribute"):
        OverlaySource([one, two]).ingest(MemorySink())
    assert OverlaySource([one]).describe() == {"kind": "overlay", "name": str(one)} and OverlaySource([one]).image_config is None
