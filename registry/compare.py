"""What differs between two merged views."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass

from dsec_layers.registry.content import LayerContent
from dsec_layers.registry.view import Entry, walk

__all__ = ["Change", "compare"]


@dataclass(frozen=True, slots=True)
class Change:
    """A path that differs: ``change`` is added, removed, content, attributes or type; sizes in bytes before and after."""

    path: str
    change: str
    before: int
    after: int


def compare(left: Entry, right: Entry) -> Iterator[Change]:
    """Every path that differs, in byte order. Content is fetched only where its chunks are not the same stored bytes."""
    before, after = dict(walk(left)), dict(walk(right))
    for path in sorted(before.keys() | after.keys()):
        kind = _compare(before.get(path), after.get(path))
        if kind:
            yield Change(path.decode(errors="backslashreplace") or "/", kind, _size(before.get(path)), _size(after.get(path)))


def _compare(left: Entry | None, right: Entry | None) -> str | None:
    if left is None or right is None:
        return "added" if left is None else "removed"
    a, b = left.inode, right.inode
    if stat.S_IFMT(a.mode) != stat.S_IFMT(b.mode):
        return "type"
    if a.size != b.size or (stat.S_ISLNK(a.mode) and a.data != b.data) or (stat.S_ISREG(a.mode) and not _same_content(left, right)):
        return "content"
    attributes = ("mode", "uid", "gid", "mtime", "mtime_ns", "rdev")
    if any(getattr(a, name) != getattr(b, name) for name in attributes) or left.xattrs != right.xattrs:
        return "attributes"
    return None


def _same_content(left: Entry, right: Entry) -> bool:
    chunked = left.inode.data is None and right.inode.data is None and left.inode.chunk_bits == right.inode.chunk_bits
    return (chunked and _places(left) == _places(right)) or _bytes_equal(left, right)


def _places(entry: Entry) -> list[tuple[bytes, int, int]]:
    table = entry.layer.table
    return [
        (table[device - 1]["digest"].tobytes() if device else b"", block, length)
        for device, block, length in entry.layer.extents(entry.inode)
    ]


def _bytes_equal(left: Entry, right: Entry) -> bool:
    sides = [_ByteReader(left.layer, left), _ByteReader(right.layer, right)]
    remaining = left.inode.size
    while remaining:
        count = min(remaining, 1 << 20)
        if sides[0].read(count) != sides[1].read(count):
            return False
        remaining -= count
    return True


class _ByteReader:
    def __init__(self, layer: LayerContent, entry: Entry) -> None:
        self._pieces = layer.pieces(entry.inode)
        self._rest: bytes | memoryview | int = b""

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            size = self._rest if isinstance(self._rest, int) else len(self._rest)
            if not size:
                self._rest = next(self._pieces)
                continue
            take = min(count, size)
            if isinstance(self._rest, int):
                parts.append(bytes(take))
                self._rest -= take
            else:
                parts.append(bytes(self._rest[:take]))
                self._rest = self._rest[take:]
            count -= take
        return b"".join(parts)


def _size(entry: Entry | None) -> int:
    return 0 if entry is None or entry.children is not None else entry.inode.size
