"""The EROFS on-disk format: constants, structures and limits, named as the kernel's ``fs/erofs/erofs_fs.h`` names them.

All integers are little-endian and of fixed width; structures are numpy record types, so that one inode and a million inodes are read by the
same code. Nothing here interprets: ranges and enumerations are checked by the reader and the writer.
"""

from __future__ import annotations

import os
import stat
from typing import Final

import numpy as np

SUPER_OFFSET: Final = 1024
SUPER_MAGIC: Final = 0xE0F5E1E2

# feature_compat: a reader that does not know the bit may go on
FEATURE_COMPAT_SB_CHKSUM: Final = 0x0001
FEATURE_COMPAT_MTIME: Final = 0x0002

# feature_incompat: a reader that does not know the bit must refuse. Bits 1 and 3 and 5 each have two meanings in the header.
FEATURE_INCOMPAT_ZERO_PADDING: Final = 0x0001
FEATURE_INCOMPAT_COMPR_CFGS: Final = 0x0002
FEATURE_INCOMPAT_CHUNKED_FILE: Final = 0x0004
FEATURE_INCOMPAT_DEVICE_TABLE: Final = 0x0008
FEATURE_INCOMPAT_ZTAILPACKING: Final = 0x0010
FEATURE_INCOMPAT_FRAGMENTS: Final = 0x0020
FEATURE_INCOMPAT_XATTR_PREFIXES: Final = 0x0040
FEATURE_INCOMPAT_48BIT: Final = 0x0080
FEATURE_INCOMPAT_METABOX: Final = 0x0100
FEATURE_INCOMPAT_KNOWN: Final = 0x007F
"""What the reader understands: everything up to 48-bit addresses, whose inodes and indexes have another shape."""

SUPER_BLOCK: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("checksum", "<u4"),
        ("feature_compat", "<u4"),
        ("blkszbits", "u1"),
        ("sb_extslots", "u1"),
        ("root_nid", "<u2"),
        ("inos", "<u8"),
        ("build_time", "<i8"),
        ("build_time_nsec", "<u4"),
        ("blocks", "<u4"),
        ("meta_blkaddr", "<u4"),
        ("xattr_blkaddr", "<u4"),
        ("uuid", "V16"),
        ("volume_name", "V16"),
        ("feature_incompat", "<u4"),
        ("available_compr_algs", "<u2"),
        ("extra_devices", "<u2"),
        ("devt_slotoff", "<u2"),
        ("dirblkbits", "u1"),
        ("xattr_prefix_count", "u1"),
        ("xattr_prefix_start", "<u4"),
        ("packed_nid", "<u8"),
        ("xattr_filter_reserved", "u1"),
        ("reserved2", "V23"),
    ]
)

DEVICE_SLOT: Final = np.dtype([("tag", "V64"), ("blocks", "<u4"), ("mapped_blkaddr", "<u4"), ("reserved", "V56")])

INODE_COMPACT: Final = np.dtype(
    [
        ("i_format", "<u2"),
        ("i_xattr_icount", "<u2"),
        ("i_mode", "<u2"),
        ("i_nlink", "<u2"),
        ("i_size", "<u4"),
        ("i_reserved", "<u4"),
        ("i_u", "<u4"),
        ("i_ino", "<u4"),
        ("i_uid", "<u2"),
        ("i_gid", "<u2"),
        ("i_reserved2", "<u4"),
    ]
)

INODE_EXTENDED: Final = np.dtype(
    [
        ("i_format", "<u2"),
        ("i_xattr_icount", "<u2"),
        ("i_mode", "<u2"),
        ("i_reserved", "<u2"),
        ("i_size", "<u8"),
        ("i_u", "<u4"),
        ("i_ino", "<u4"),
        ("i_uid", "<u4"),
        ("i_gid", "<u4"),
        ("i_mtime", "<i8"),
        ("i_mtime_nsec", "<u4"),
        ("i_nlink", "<u4"),
        ("i_reserved2", "V16"),
    ]
)

ISLOT_BITS: Final = 5
"""An inode starts at ``meta_blkaddr * 4096 + (nid << 5)``."""

I_VERSION_EXTENDED: Final = 0x0001
I_DATALAYOUT_BIT: Final = 1
I_DATALAYOUT_MASK: Final = 0x07
I_ALL: Final = 0x000F

FLAT_PLAIN: Final = 0
COMPRESSED_FULL: Final = 1
FLAT_INLINE: Final = 2
COMPRESSED_COMPACT: Final = 3
CHUNK_BASED: Final = 4

CHUNK_FORMAT_BLKBITS_MASK: Final = 0x001F
CHUNK_FORMAT_INDEXES: Final = 0x0020
CHUNK_FORMAT_48BIT: Final = 0x0040
CHUNK_FORMAT_KNOWN: Final = CHUNK_FORMAT_BLKBITS_MASK | CHUNK_FORMAT_INDEXES

NULL_ADDR: Final = 0xFFFFFFFF
"""The block address of a hole, and of an inode that has no blocks."""

DIRENT: Final = np.dtype([("nid", "<u8"), ("nameoff", "<u2"), ("file_type", "u1"), ("reserved", "u1")])

XATTR_IBODY_HEADER: Final = 12
"""Bytes before the shared ids of an inode's xattrs: h_name_filter u32, h_shared_count u8, 7 reserved."""

XATTR_ENTRY_HEADER: Final = 4
"""Bytes before the name of one xattr: e_name_len u8, e_name_index u8, e_value_size u16."""

XATTR_LONG_PREFIX: Final = 0x80

XATTR_PREFIXES: Final[dict[int, bytes]] = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    5: b"lustre.",
    6: b"security.",
}
"""e_name_index to the prefix it stands for. Indexes 2 and 3 are whole names."""

FT_UNKNOWN: Final = 0

FILE_TYPES: Final[dict[int, int]] = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
"""The type bits of a mode to the file_type of a directory entry (EROFS_FT_*)."""

FILE_TYPE_OF_MODE: Final = np.zeros(16, np.uint8)
"""``FILE_TYPE_OF_MODE[mode >> 12]`` is the file_type, 0 for a mode that is no type at all."""
for _format, _type in FILE_TYPES.items():
    FILE_TYPE_OF_MODE[_format >> 12] = _type

# Limits, and why
MAX_NAME: Final = 255  # EROFS_NAME_LEN
MAX_XATTR_NAME: Final = 255  # XATTR_NAME_MAX: the kernel cannot be asked for a longer one
MAX_XATTR_VALUE: Final = 0xFFFF  # e_value_size
MAX_XATTR_ICOUNT: Final = 0xFFFF  # i_xattr_icount, in units of 4 bytes after the first
MAX_SHARED_XATTRS: Final = 128  # an inode; h_shared_count above that was reserved in older headers
MAX_TARGET: Final = 4095  # of a symbolic link: PATH_MAX with its NUL
MAX_DEVICES: Final = 0xFFFF  # extra_devices, device_id
MAX_BLOCKS: Final = 0xFFFFFFFF  # image and devices together: block addresses are 32 bit and the last one means "hole"
MAX_DEPTH: Final = 2048  # directories below each other: PATH_MAX has no room for more names
MAX_ENTRIES: Final = 1 << 26  # names in one image: about what a host with 32 GiB of memory can hold as a tree
MAX_CHUNK_BITS: Final = 12 + CHUNK_FORMAT_BLKBITS_MASK
MAX_ID: Final = 0xFFFFFFFE  # of a user or group: 2^32 - 1 is "no id" to the kernel, which then refuses access to the inode
MAX_LINKS: Final = 0xFFFFFFFF
MAX_ROOT_NID: Final = 0xFFFF
MAX_MAJOR: Final = 0xFFF  # i_rdev holds 12 bits of major number and 20 of minor
MAX_MINOR: Final = 0xFFFFF


def encode_dev(device: int) -> int:
    """``i_rdev`` of a device number as os.makedev spells it (the kernel's new_encode_dev). The caller has checked the limits."""
    major, minor = os.major(device), os.minor(device)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def decode_dev(i_rdev: int) -> int:
    """The device number, as os.makedev spells it, of an ``i_rdev`` (the kernel's new_decode_dev)."""
    return os.makedev((i_rdev & 0xFFF00) >> 8, (i_rdev & 0xFF) | ((i_rdev >> 12) & 0xFFF00))
