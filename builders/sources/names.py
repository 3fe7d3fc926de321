"""Rules for names, attributes and sizes that every source shares, and how messages spell them. Names are bytes from end to end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, LimitError, UsageError
from dsec_layers.layers.frames import METADATA_BOUND, Bound

__all__ = [
    "LIMIT_NAMES",
    "MAX_NAME",
    "MAX_PATH",
    "MAX_XATTR_NAME",
    "MAX_XATTR_VALUE",
    "Limits",
    "Overrides",
    "apply_overrides",
    "check_name",
    "check_xattr",
    "keeps_xattr",
    "over_limit",
    "shown",
]

MAX_NAME: Final = 255
"""Bytes in one name (NAME_MAX)."""

MAX_PATH: Final = 4096
"""Bytes in one path (PATH_MAX)."""

MAX_XATTR_NAME: Final = 255
"""Bytes in the full name of an extended attribute (XATTR_NAME_MAX)."""

MAX_XATTR_VALUE: Final = 65535
"""Bytes in a value: EROFS stores the length in 16 bits (struct erofs_xattr_entry), one less than XATTR_SIZE_MAX."""

MAX_ID: Final = (1 << 32) - 2
"""The largest user or group id; 2**32 - 1 means "leave as is" to chown(2)."""

_KEPT = (b"user.", b"trusted.", b"security.")
_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_ODD = re.compile(r"[^ -~\u00a1-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one build may take in. A few kilobytes of compressed headers can name millions of files: these bound the memory and disk that costs.

    ``inodes``: files, directories and the rest, implied directories included. ``attribute_bytes``: names and values of extended attributes, all in all.
    ``hole_chunks``: chunks (64 KiB, more in files over 64 GiB) of the holes in sparse files, eight bytes of memory and of the metadata image each.
    ``spool_bytes``: of the temporary copy of an image that cannot be read in place; None: what honest images need for their compressed size (SPOOL_BOUND).
    """

    inodes: int = 20_000_000
    attribute_bytes: int = 1 << 30
    hole_chunks: int = METADATA_BOUND.free // 8
    spool_bytes: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, int]) -> Limits:
        """The limits with those of LIMIT_NAMES changed that ``values`` names. Raises UsageError."""
        for name, value in values.items():
            if name not in LIMIT_NAMES:
                raise UsageError(f"there is no limit {name[:40]!r}", hint=f"the limits are {', '.join(LIMIT_NAMES)}")
            if value < 0:
                raise UsageError(f"the limit {name} is negative: {value}")
        return replace(cls(), **{LIMIT_NAMES[name]: value for name, value in values.items()})

    @property
    def spool(self) -> Bound:
        """How many bytes the temporary copy may have for the bytes that were read."""
        return SPOOL_BOUND if self.spool_bytes is None else Bound(self.spool_bytes, self.spool_bytes, 0)


SPOOL_BOUND: Final = Bound(64 << 30, 512 << 20, 32)
"""Layers are a third of their content when compressed, seldom less than a tenth; 512 MiB of anything are free."""

LIMIT_NAMES: Final[Mapping[str, str]] = {
    "entries": "inodes",
    "attributes": "attribute_bytes",
    "holes": "hole_chunks",
    "spool": "spool_bytes",
}
"""What people call the limits: ``--limit NAME=SIZE``."""


def over_limit(message: str, name: str) -> LimitError:
    """The error of an input that goes over the limit called ``name``."""
    return LimitError(message, hint=f"if you trust the input, allow more: --limit {name}=SIZE")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Attributes forced on every inode: ``uid``, ``gid``, and ``epoch``, the latest modification time (seconds; later ones become it)."""

    uid: int | None = None
    gid: int | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        for what, value in (("uid", self.uid), ("gid", self.gid)):
            if value is not None and not 0 <= value <= MAX_ID:
                raise UsageError(f"{what} {value} is not between 0 and {MAX_ID}")
        if self.epoch is not None and not 0 <= self.epoch < 1 << 62:
            raise UsageError(f"epoch {self.epoch} is not a time in seconds since 1970")


def apply_overrides(tree: Tree, overrides: Overrides) -> None:
    """Force the owner and the latest time on every inode of ``tree``, in place."""
    uid, gid, epoch = overrides.uid, overrides.gid, overrides.epoch
    if uid is None and gid is None and epoch is None:
        return
    stack: list[Inode] = [tree.root]
    while stack:
        inode = stack.pop()
        if uid is not None:
            inode.uid = uid
        if gid is not None:
            inode.gid = gid
        if epoch is not None and (inode.mtime, inode.mtime_ns) > (epoch, 0):
            inode.mtime, inode.mtime_ns = epoch, 0
        if inode.children:
            stack.extend(inode.children.values())


def shown(name: bytes) -> str:
    """``name`` for a message: quoted, cut at 200 bytes, bytes that are no printable text escaped."""
    text = name[:200].decode("utf-8", "backslashreplace")
    return "'" + _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text) + ("…'" if len(name) > 200 else "'")


def check_name(name: bytes, path: bytes) -> None:
    """Refuse a component of ``path`` that no file system can hold. Raises InputError."""
    if len(name) > MAX_NAME:
        raise InputError(f"{shown(path)}: the name {shown(name)} has {len(name)} bytes, over the limit of {MAX_NAME}")


def keeps_xattr(name: bytes) -> bool:
    """Whether an attribute belongs in a layer: user, trusted, security and POSIX ACL ones do, but not those overlayfs keeps for itself.

    ``trusted.overlay.*`` tells overlayfs how a directory sits on the one below; carried into a layer it would hide or redirect names there.
    """
    return name in _ACLS or (name.startswith(_KEPT) and not name.startswith(b"trusted.overlay."))


def check_xattr(path: bytes, name: bytes, value: bytes) -> None:
    """Refuse an attribute that cannot be stored exactly. Raises InputError for a malformed name, LimitError for one too large."""
    if b"\0" in name or name.endswith(b"."):
        raise InputError(f"{shown(path)}: malformed extended attribute name {shown(name)}")
    if len(name) > MAX_XATTR_NAME:
        raise LimitError(
            f"{shown(path)}: the extended attribute name {shown(name)} has {len(name)} bytes, over the limit of {MAX_XATTR_NAME}"
        )
    if len(value) > MAX_XATTR_VALUE:
        raise LimitError(f"{shown(path)}: the extended attribute {shown(name)} has {len(value)} bytes, over the limit of {MAX_XATTR_VALUE}")
