"""Overlayfs' marks, known in one place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

import dsec_layers
from dsec_layers.erofs.overlay import (
    OPAQUE_XATTR,
    ORIGIN_XATTR,
    is_device_whiteout,
    is_opaque,
    is_whiteout,
    opaque_name,
    whiteout_columns,
    whiteout_name,
    without_overlay,
)
from dsec_layers.erofs.tree import Inode


@pytest.mark.parametrize(
    ("kind", "major", "minor", "expected"),
    [
        (stat.S_IFCHR, 0, 0, True),
        (stat.S_IFCHR, 0, 1, False),
        (stat.S_IFCHR, 1, 0, False),
        (stat.S_IFBLK, 0, 0, False),
        (stat.S_IFREG, 0, 0, False),
        (stat.S_IFIFO, 0, 0, False),
    ],
)
def test_only_a_character_device_0_0_is_a_whiteout(kind: int, major: int, minor: int, expected: bool) -> None:
    inode = Inode(kind | 0o644)
    inode.rdev = os.makedev(major, minor)
    assert is_whiteout(inode) is expected
    assert is_device_whiteout(inode.mode, inode.rdev) is expected
    assert whiteout_columns(np.array([inode.mode]), np.array([inode.rdev])).tolist() == [expected]


def test_only_a_directory_is_opaque_and_only_by_a_y() -> None:
    for mode, value, expected in ((0o040755, b"y", True), (0o040755, b"x", False), (0o040755, b"", False), (0o100644, b"y", False)):
        inode = Inode(mode)
        inode.xattrs = ((OPAQUE_XATTR, value),)
        assert is_opaque(inode) is expected, (oct(mode), value)


def test_what_a_mounted_overlay_shows_has_no_marks() -> None:
    inode = Inode(0o040755)
    inode.xattrs = ((OPAQUE_XATTR, b"y"), (ORIGIN_XATTR, b""), (b"user.a", b"1"))
    assert without_overlay(inode) == ((b"user.a", b"1"),)


def test_names_in_a_tar() -> None:
    assert (whiteout_name(b"a"), whiteout_name(b"a/b")) == (b".wh.a", b"a/.wh.b")
    assert (opaque_name(b""), opaque_name(b"a/b")) == (b".wh..wh..opq", b"a/b/.wh..wh..opq")


def test_the_marks_are_spelled_in_one_module() -> None:
    root = Path(dsec_layers.__file__).parents[1]
    spelled = [
        path.relative_to(root).as_posix()
        for folder in ("dsec_layers", "builders", "fuse", "registry")
        for path in sorted((root / folder).rglob("*.py"))
        if any(text in path.read_text() for text in ('".wh.', '"trusted.overlay.', '"user.overlay.'))
    ]
    assert sorted(set(spelled)) == ["dsec_layers/erofs/overlay.py"]
