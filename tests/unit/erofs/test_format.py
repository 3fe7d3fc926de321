"""The structures are the kernel's: sizes and places of fields from ``fs/erofs/erofs_fs.h``."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.tree import HOLE


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(fmt.SUPER_BLOCK, 128), (fmt.DEVICE_SLOT, 128), (fmt.INODE_COMPACT, 32), (fmt.INODE_EXTENDED, 64), (fmt.DIRENT, 12)],
)
def test_sizes_are_those_the_header_asserts(dtype: np.dtype[np.void], size: int) -> None:
    assert dtype.itemsize == size


@pytest.mark.parametrize(
    ("dtype", "field", "offset"),
    [
        (fmt.SUPER_BLOCK, "checksum", 4),
        (fmt.SUPER_BLOCK, "root_nid", 14),
        (fmt.SUPER_BLOCK, "blocks", 36),
        (fmt.SUPER_BLOCK, "meta_blkaddr", 40),
        (fmt.SUPER_BLOCK, "uuid", 48),
        (fmt.SUPER_BLOCK, "feature_incompat", 80),
        (fmt.SUPER_BLOCK, "extra_devices", 86),
        (fmt.SUPER_BLOCK, "devt_slotoff", 88),
        (fmt.DEVICE_SLOT, "mapped_blkaddr", 68),
        (fmt.INODE_COMPACT, "i_u", 16),
        (fmt.INODE_COMPACT, "i_uid", 24),
        (fmt.INODE_EXTENDED, "i_u", 16),
        (fmt.INODE_EXTENDED, "i_mtime", 32),
        (fmt.INODE_EXTENDED, "i_nlink", 44),
        (fmt.DIRENT, "nameoff", 8),
    ],
)
def test_fields_are_where_the_header_has_them(dtype: np.dtype[np.void], field: str, offset: int) -> None:
    assert dtype.fields is not None
    assert dtype.fields[field][1] == offset


@pytest.mark.parametrize(("major", "minor"), [(0, 0), (1, 3), (8, 255), (8, 256), (259, 70_000), (fmt.MAX_MAJOR, fmt.MAX_MINOR)])
def test_device_numbers_go_both_ways(major: int, minor: int) -> None:
    device = os.makedev(major, minor)
    i_rdev = fmt.encode_dev(device)
    assert i_rdev == (minor & 0xFF) | (major << 8) | ((minor >> 8) << 20)
    assert fmt.decode_dev(i_rdev) == device


def test_a_hole_is_the_same_in_memory_and_on_disk() -> None:
    assert HOLE == fmt.NULL_ADDR
