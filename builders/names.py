"""Rules for names, attributes and sizes that every source shares, and how messages spell them. Names are bytes from end to end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dsec_layers.erofs.overlay import TRUSTED_PREFIX
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError, LimitError, UsageError
from dsec_layers.layers.frames import METADATA_BOUND, Bound

__all__ = [
    "LIMIT_NAMES",
    "MAX_NAME",
    "MAX_PATH",
    "MAX_XATTR_NAME",
    "MAX_XATTR_VALUE",
    "MEMORY_BOUND",
    "Limits",
    "Overrides",
    "apply_overrides",
    "check_name",
    "check_xattr",
    "keeps_xattr",
    "memory_of",
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
    ``memory_bytes``: what tree and metadata of tars may take, reckoned by ``memory_of``; None: what honest input needs for its size (MEMORY_BOUND).
    ``spool_bytes``: of the temporary copy of an image that cannot be read in place; None: what honest images need for their compressed size (SPOOL_BOUND).
    """

    inodes: int = 20_000_000
    attribute_bytes: int = 1 << 30
    hole_chunks: int = METADATA_BOUND.free // 8
    memory_bytes: int | None = None
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
    def memory(self) -> Bound:
        """How many bytes of memory the entries of a tar may take for its bytes."""
        return MEMORY_BOUND if self.memory_bytes is None else Bound(self.memory_bytes, self.memory_bytes, 0)

    @property
    def spool(self) -> Bound:
        """How many bytes the temporary copy may have for the bytes that were read."""
        return SPOOL_BOUND if self.spool_bytes is None else Bound(self.spool_bytes, self.spool_bytes, 0)


SPOOL_BOUND: Final = Bound(64 << 30, 512 << 20, 32)
"""Layers are a third of their content when compressed, seldom less than a tenth; 512 MiB of anything are free."""

MEMORY_BOUND: Final = Bound(32 << 30, 512 << 20, 32)
"""An entry of an honest tar takes some 30 compressed bytes at least; some 500,000 entries of anything are free."""

_ENTRY_MEMORY: Final = 800
_DIRECTORY_MEMORY: Final = 300
_INLINE: Final = 4096

LIMIT_NAMES: Final[Mapping[str, str]] = {
    "entries": "inodes",
    "attributes": "attribute_bytes",
    "holes": "hole_chunks",
    "memory": "memory_bytes",
    "spool": "spool_bytes",
}
"""What people call the limits: ``--limit NAME=SIZE``."""


def memory_of(name: bytes, inode: Inode | None) -> int:
    """Bytes of memory that an entry takes at the height of a build, measured: the tree, its columns, the image and what is read back of it.

    A hard link has no ``inode``. What a link leads to, small files and attributes are in the tree and in the image.
    """
    cost = _ENTRY_MEMORY + 4 * len(name)
    if inode is not None:
        if inode.children is not None:
            cost += _DIRECTORY_MEMORY
        elif inode.size <= _INLINE:
            cost += 3 * inode.size
        if inode.xattrs:
            cost += 3 * sum(len(key) + len(value) for key, value in inode.xattrs)
    return cost


def over_limit(message: str, name: str) -> LimitError:
    """The error of an input that goes over the limit called ``name``."""
    return LimitError(message, hint=f"if you trust the input, allow more: --limit {name}=SIZE of import and build")


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
    return name in _ACLS or (name.startswith(_KEPT) and not name.startswith(TRUSTED_PREFIX))


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
