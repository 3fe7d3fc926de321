"""The tree a metadata image is written from and read back into: plain values, no I/O, no EROFS layout.

One ``Inode`` object is one inode; a hard link is the same object under two names. File data is named by *extents*: 64-bit values
``device << 32 | block`` kept in one array for the whole tree, so that millions of them cost eight bytes each and whole-array operations
(renumbering devices, encoding) are vectorised.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["BLOCK", "HOLE", "Inode", "Tree", "find_path", "show_path"]

BLOCK = 4096
"""Bytes in a block; the only block size this project writes."""

HOLE = 0xFFFFFFFF
"""The extent of a hole: device 0, block 0xFFFFFFFF (the kernel's EROFS_NULL_ADDR)."""


class Inode:
    """One file, directory, link or device.

    ``mode`` has the type bits. ``data`` is: for a symbolic link its target (bytes); for a small regular file its whole content, which is then
    stored inline behind the inode (bytes, shorter than a block); for any other regular file None, and ``extent_at``/``extent_count`` name a slice of the
    tree's extents, one for each ``1 << chunk_bits`` bytes. ``children`` is a dict of names for a directory and None otherwise.
    ``xattrs`` are (full name, value) pairs as getxattr(2) spells them, sorted by name.
    """

    __slots__ = (
        "children", "chunk_bits", "data", "extent_at", "extent_count", "gid", "mode", "mtime", "mtime_ns", "rdev", "size", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime: int = 0, mtime_ns: int = 0) -> None:
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime = mtime
        self.mtime_ns = mtime_ns
        self.rdev = 0  # as os.makedev spells it
        self.size = 0  # of a regular file or the length of a link's target; 0 for the rest
        self.xattrs: tuple[tuple[bytes, bytes], ...] = ()
        self.data: bytes | None = None
        self.extent_at = 0
        self.extent_count = 0
        self.chunk_bits = 16
        self.children: dict[bytes, Inode] | None = {} if stat.S_ISDIR(mode) else None

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return self.children is not None


@dataclass(slots=True)
class Tree:
    """A whole file system tree."""

    root: Inode = field(default_factory=lambda: Inode(stat.S_IFDIR | 0o755))
    extents: array[int] = field(default_factory=lambda: array("Q"))

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every (path, inode), parents first, names in byte order; the root's path is empty. A hard link is met under each of its names."""
        return _walk(self.root)


def _walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """Depth first. Paths are made when they are yielded, so that a deep and wide tree does not keep a million long paths at once.

    A directory is entered once, so that this ends on a tree that is none.
    """
    yield b"", root
    stack = [(b"", root, iter(sorted(root.children or ())))]
    entered = {id(root)}
    while stack:
        path, directory, names = stack[-1]
        for name in names:
            inode = (directory.children or {})[name]
            below = path + b"/" + name if path else name
            yield below, inode
            if inode.children is not None and id(inode) not in entered:
                entered.add(id(inode))
                stack.append((below, inode, iter(sorted(inode.children))))
                break
        else:
            stack.pop()


def find_path(root: Inode, inode: Inode) -> bytes:
    """The first path under which ``inode`` is found below ``root``: for messages, so slow."""
    return next((path for path, here in _walk(root) if here is inode), b"?")


def show_path(path: bytes) -> str:
    """A path for a message: absolute, bytes that are not text escaped, cut to 300 characters."""
    text = "/" + path.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)[:300]
