"""How a layer says what the layers below it no longer have: overlayfs' marks in a tree, and their names in a tar. Facts and predicates, nothing else.

Kernel: Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories". OCI image specification: layer.md, "Whiteouts".
"""

from __future__ import annotations

import stat
from typing import Final

from dsec_layers.erofs.columns import Ints, Mask
from dsec_layers.erofs.tree import Inode

__all__ = [
    "OPAQUE_NAME",
    "OPAQUE_XATTR",
    "ORIGIN_XATTR",
    "RESERVED_PREFIX",
    "TRUSTED_PREFIX",
    "USER_PREFIX",
    "WHITEOUT_DEVICE",
    "WHITEOUT_PREFIX",
    "is_device_whiteout",
    "is_opaque",
    "is_whiteout",
    "opaque_name",
    "whiteout_columns",
    "whiteout_name",
    "without_overlay",
]

WHITEOUT_DEVICE: Final = 0
"""The number, as os.makedev spells it, of the character device that is a whiteout: 0/0."""

TRUSTED_PREFIX: Final = b"trusted.overlay."
"""What overlayfs' own attributes start with."""

USER_PREFIX: Final = b"user.overlay."
"""What they start with in unprivileged mounts (``userxattr``)."""

OPAQUE_XATTR: Final = b"trusted.overlay.opaque"
"""On a directory, with the value ``y``: nothing of the layers below shows in it."""

ORIGIN_XATTR: Final = b"trusted.overlay.origin"
"""On a directory that has whiteouts, with an empty value ("origin unknown"): where no lower layer has the directory, overlayfs does not merge it, and then it
filters whiteouts out of its listing only if this attribute is there (fs/overlayfs/inode.c, ovl_get_inode)."""

WHITEOUT_PREFIX: Final = b".wh."
"""Prefix of a whiteout's name in a tar (OCI, from AUFS)."""

RESERVED_PREFIX: Final = b".wh..wh."
"""Prefix of the names in a tar that are AUFS' own and hide no file."""

OPAQUE_NAME: Final = b".wh..wh..opq"
"""Name of the tar entry that hides everything lower layers have in its directory."""


def is_device_whiteout(mode: int, rdev: int) -> bool:
    """Whether ``mode`` and ``rdev``, as stat(2) gives them, are a whiteout's."""
    return stat.S_ISCHR(mode) and rdev == WHITEOUT_DEVICE


def whiteout_columns(mode: Ints, rdev: Ints) -> Mask:
    """``is_device_whiteout`` of whole columns."""
    found: Mask = ((mode & 0o170000) == stat.S_IFCHR) & (rdev == WHITEOUT_DEVICE)
    return found


def is_whiteout(inode: Inode) -> bool:
    """Whether this inode is overlayfs' mark for a deleted name."""
    return is_device_whiteout(inode.mode, inode.rdev)


def is_opaque(inode: Inode) -> bool:
    """Whether this is a directory that hides what is below."""
    return inode.is_dir and (OPAQUE_XATTR, b"y") in inode.xattrs


def without_overlay(inode: Inode) -> tuple[tuple[bytes, bytes], ...]:
    """The attributes a mounted overlay shows: all but overlayfs' own."""
    return tuple(pair for pair in inode.xattrs if not pair[0].startswith(TRUSTED_PREFIX))


def whiteout_name(path: bytes) -> bytes:
    """The name of the tar entry that deletes ``path``."""
    directory, slash, name = path.rpartition(b"/")
    return directory + slash + WHITEOUT_PREFIX + name


def opaque_name(directory: bytes) -> bytes:
    """The name of the tar entry that makes ``directory`` (empty: the root) opaque."""
    return directory + b"/" + OPAQUE_NAME if directory else OPAQUE_NAME
