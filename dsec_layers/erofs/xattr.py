"""Extended attributes: encoding and decoding of names, entries and the area behind an inode.

An inode's xattr area is a header, the ids of *shared* attributes (their offset from ``xattr_blkaddr`` in units of 4 bytes), then inline entries.
An entry is name length, name index (a common prefix), value length, name without prefix, value, padded to 4 bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dsec_layers.digest import Buffer
from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import ImageCode, ImageError, LimitError

__all__ = ["Pair", "XattrPlan", "decode_area", "decode_entry", "encode_entry", "plan_xattrs"]

Pair = tuple[bytes, bytes]
"""Full name and value."""

_WRITABLE = [(index, prefix) for index, prefix in fmt.XATTR_PREFIXES.items() if prefix != b"lustre."]  # the kernel lists no lustre. names
_ENTRY = struct.Struct("<BBH")
_HEADER = struct.Struct("<IB7x")


@dataclass(frozen=True, slots=True)
class XattrPlan:
    """``areas`` are (inode number, bytes behind the inode); ``shared`` is the block of shared entries."""

    areas: list[tuple[int, bytes]]
    shared: bytes


def encode_entry(name: bytes, value: bytes) -> bytes:
    """One padded entry. Raises LimitError without a path: the caller knows whose attribute it is."""
    shown = name[:80].decode("utf-8", "backslashreplace")
    if len(name) > fmt.MAX_XATTR_NAME:
        raise LimitError(f"attribute {shown}…: a name of {len(name)} bytes; the limit is {fmt.MAX_XATTR_NAME}")
    if len(value) > fmt.MAX_XATTR_VALUE:
        raise LimitError(f"attribute {shown}: a value of {len(value)} bytes; the limit is {fmt.MAX_XATTR_VALUE}")
    index = next((index for index, prefix in _WRITABLE if _fits(name, prefix)), None)
    if index is None:
        raise LimitError(f"attribute {shown}: EROFS has no such name space", hint="user., trusted., security. and POSIX ACLs can be stored")
    if b"\0" in name:
        raise ImageError(f"attribute {shown!r}: a NUL byte in the name", code=ImageCode.BAD_ENCODING)
    rest = name[len(fmt.XATTR_PREFIXES[index]) :]
    entry = _ENTRY.pack(len(rest), index, len(value)) + rest + value
    return entry + bytes(-len(entry) % 4)


def _fits(name: bytes, prefix: bytes) -> bool:
    return name.startswith(prefix) and prefix.endswith(b".") == (len(name) > len(prefix))


def plan_xattrs(inodes: list[Inode], start: int, path_of: Callable[[Inode], str]) -> XattrPlan:
    """Encode the attributes of all inodes, those that pay for it shared. ``start`` is the byte offset at which the shared entries will be.

    Raises LimitError or ImageError naming path and attribute for what cannot be stored; nothing is ever cut.
    """
    carriers = [(at, inode.xattrs) for at, inode in enumerate(inodes) if inode.xattrs]
    if not carriers:
        return XattrPlan([], b"")
    lists = Counter(pairs for _, pairs in carriers)
    first = {pairs: at for at, pairs in reversed(carriers)}
    uses: Counter[Pair] = Counter()
    entries: dict[Pair, bytes] = {}
    for at, pairs in sorted((at, pairs) for pairs, at in first.items()):
        for pair in pairs:
            uses[pair] += lists[pairs]
            if pair not in entries:
                entries[pair] = _encode_of(inodes[at], pair, path_of)
        if len({name for name, _ in pairs}) != len(pairs):
            raise ImageError(f"{path_of(inodes[at])}: an attribute twice", code=ImageCode.INCONSISTENT)
    ids: dict[Pair, int] = {}
    shared = bytearray()
    for pair in sorted(entries):
        entry = entries[pair]
        if uses[pair] * len(entry) > len(entry) + 4 * uses[pair]:
            ids[pair] = (start % 4096 + len(shared)) // 4
            shared += entry
    areas = {pairs: _area(inodes[at], pairs, entries, ids, path_of) for pairs, at in first.items()}
    return XattrPlan([(at, areas[pairs]) for at, pairs in carriers], bytes(shared))


def _encode_of(inode: Inode, pair: Pair, path_of: Callable[[Inode], str]) -> bytes:
    try:
        return encode_entry(*pair)
    except (LimitError, ImageError) as error:
        raise error.located(path_of(inode)) from None


def _area(
    inode: Inode, pairs: tuple[Pair, ...], entries: dict[Pair, bytes], ids: dict[Pair, int], path_of: Callable[[Inode], str]
) -> bytes:
    """The bytes behind one inode."""
    order = sorted(pairs)
    by_id = [ids[pair] for pair in order if pair in ids][: fmt.MAX_SHARED_XATTRS]
    named = set(by_id)
    area = bytearray(_HEADER.pack(0, len(by_id)) + struct.pack(f"<{len(by_id)}I", *by_id))
    limit = fmt.XATTR_IBODY_HEADER + 4 * (fmt.MAX_XATTR_ICOUNT - 1)
    for pair in order:
        if ids.get(pair) not in named:
            area += entries[pair]
            if len(area) > limit:
                shown = pair[0].decode("utf-8", "backslashreplace")
                raise LimitError(
                    f"{path_of(inode)}: attribute {shown}: together the attributes need more than {limit} bytes, which is the limit"
                )
    return bytes(area)


def decode_entry(data: Buffer, at: int, end: int) -> tuple[Pair, int]:
    """The attribute at ``at`` and where the next one starts. ``end`` bounds both. Raises ImageError without saying where."""
    if end - at < fmt.XATTR_ENTRY_HEADER:
        raise ImageError("an extended attribute does not fit its area", code=ImageCode.INCONSISTENT)
    length, index, size = _ENTRY.unpack_from(data, at)
    name_at = at + fmt.XATTR_ENTRY_HEADER
    value_at = name_at + length
    after = value_at + size + (-(value_at + size - at) % 4)
    if after > end:
        raise ImageError("an extended attribute does not fit its area", code=ImageCode.INCONSISTENT)
    if index & fmt.XATTR_LONG_PREFIX:
        raise ImageError("long extended attribute prefixes are not supported", code=ImageCode.UNKNOWN_FEATURE)
    prefix = fmt.XATTR_PREFIXES.get(index)
    if prefix is None or prefix.endswith(b".") != bool(length):
        raise ImageError(f"an extended attribute with name index {index} and a name of {length} bytes", code=ImageCode.BAD_ENCODING)
    rest = bytes(data[name_at:value_at])
    if b"\0" in rest:
        raise ImageError("an extended attribute with a NUL byte in its name", code=ImageCode.BAD_ENCODING)
    return (prefix + rest, bytes(data[value_at : value_at + size])), after


def decode_area(area: bytes) -> tuple[tuple[int, ...], list[Pair]]:
    """Shared ids and inline attributes of one inode's xattr area. Raises ImageError."""
    _, count = _HEADER.unpack_from(area)
    at = fmt.XATTR_IBODY_HEADER + 4 * count
    if at > len(area):
        raise ImageError("more shared extended attributes than their area holds", code=ImageCode.INCONSISTENT)
    ids = struct.unpack_from(f"<{count}I", area, fmt.XATTR_IBODY_HEADER)
    pairs: list[Pair] = []
    while at < len(area):
        pair, at = decode_entry(area, at, len(area))
        pairs.append(pair)
    return ids, pairs
