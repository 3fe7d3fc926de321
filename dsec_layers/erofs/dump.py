"""A text dump of an image that accounts for every byte: the golden format of the tests and the way to look at a layer.

Each line that does not start with ``#`` is ``offset+size what``; the lines are in order and leave nothing out. Two images with the same dump are the same
image: names, values and unclaimed bytes are written out, and whole blocks of file data by their BLAKE3 digest.
"""

from __future__ import annotations

import stat
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np

from dsec_layers.digest import Buffer, content_digest
from dsec_layers.erofs import format as fmt
from dsec_layers.erofs.columns import chunk_lengths
from dsec_layers.erofs.inodes import InodeTable, decode_chunks
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.scan import Scan
from dsec_layers.erofs.tree import BLOCK, HOLE
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["dump"]

Fields = Iterator[tuple[int, str]]
"""(bytes, text) of consecutive fields."""

_DATA_LINE = 1 << 20
_HEX = frozenset({"magic", "checksum", "feature_compat", "feature_incompat", "i_format"})
_OCTAL = frozenset({"i_mode"})


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of bytes that belongs together; ``fields`` describes exactly ``size`` bytes."""

    at: int
    size: int
    title: str
    fields: Callable[[], Fields]


def dump(buffer: Buffer) -> Iterator[str]:
    """The lines of the dump, without line ends. Raises ImageError for an image that is not well-formed or has parts that overlap."""
    image = Image(buffer)
    raw = memoryview(buffer).cast("B")
    found = image.scan()
    parts = [*_fixed_parts(raw, image), *_inode_parts(raw, image, found), *_directory_parts(raw, found), *_shared_parts(raw, image, found)]
    data = _data_runs(image, found)
    parts.sort(key=lambda part: (part.at, part.size))
    at = 0
    for part in parts:
        if part.at < at:
            raise ImageError(f"{part.title}: overlaps what is before it at {part.at:#x}", code=ImageCode.INCONSISTENT)
        yield from _between(raw, at, part.at, data)
        yield f"# {part.title}"
        at = part.at
        for size, text in part.fields():
            yield f"{at:08x}+{size} {text}"
            at += size
    yield from _between(raw, at, len(raw), data)


# --- what no structure claims ------------------------------------------------------------------------------------------------------------------


def _between(raw: memoryview, at: int, end: int, data: list[tuple[int, int]]) -> Iterator[str]:
    """Lines for the bytes between two parts: file data, padding, or bytes that nothing refers to."""
    nth = bisect_right(data, at, key=itemgetter(1))
    while at < end:
        start, stop = data[nth] if nth < len(data) else (end, end)
        if at < start:
            yield from _unclaimed(raw, at, min(start, end))
        at = max(at, start)
        while at < min(stop, end):
            size = min(_DATA_LINE, stop - at, end - at)
            yield f"{at:08x}+{size} data {content_digest(raw[at : at + size]).hex()}"
            at += size
        nth += 1


def _unclaimed(raw: memoryview, at: int, end: int) -> Iterator[str]:
    """Zeros in one line; other bytes written out, a block at a time."""
    while at < end:
        stop = at
        while stop < end and not bytes(raw[stop : min(end, stop + BLOCK)]).strip(b"\0"):
            stop = min(end, stop + BLOCK)
        if stop > at:
            yield f"{at:08x}+{stop - at} zero"
        else:
            stop = min(end, at + BLOCK)
            yield f"{at:08x}+{stop - at} unclaimed {raw[at:stop].hex()}"
        at = stop


def _data_runs(image: Image, found: Scan) -> list[tuple[int, int]]:
    """Byte ranges of this buffer that files have their data in, merged and sorted."""
    table = found.inodes
    runs = {(start * BLOCK, (start + blocks) * BLOCK) for start, blocks in _plain_runs(table)}
    extents = decode_chunks(image.geometry, table)
    need = chunk_lengths(table.size, table.chunk_bits, table.chunks)
    for extent, blocks in zip(extents.tolist(), need.tolist(), strict=True):
        device, block = extent >> 32, extent & 0xFFFFFFFF
        mapped = image.devices[device - 1].mapped_blkaddr if device else 0
        if extent != HOLE and (not device or mapped):
            runs.add(((mapped + block) * BLOCK, (mapped + block + blocks) * BLOCK))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _plain_runs(table: InodeTable) -> Iterator[tuple[int, int]]:
    files = (table.mode & 0o170000) != stat.S_IFDIR
    for at in np.flatnonzero(files & (table.whole > 0) & (table.i_u != fmt.NULL_ADDR)).tolist():
        yield int(table.i_u[at]), int(table.whole[at])


# --- structures --------------------------------------------------------------------------------------------------------------------------------


def _record(raw: memoryview, at: int, dtype: np.dtype[np.void]) -> Fields:
    """The fields of one on-disk structure."""
    record = np.frombuffer(raw, dtype, 1, at)[0]
    assert dtype.names is not None
    for name in dtype.names:
        value = record[name]
        if isinstance(value, np.void):
            data = value.tobytes()
            text = data.hex() if any(data) else "0"
        elif name in _HEX:
            text = hex(value)
        elif name in _OCTAL:
            text = oct(value)
        else:
            text = str(value)
        yield value.nbytes, f"{name} {text}"


def _fixed_parts(raw: memoryview, image: Image) -> Iterator[_Part]:
    yield _Part(fmt.SUPER_OFFSET, fmt.SUPER_BLOCK.itemsize, "superblock", partial(_record, raw, fmt.SUPER_OFFSET, fmt.SUPER_BLOCK))
    size = fmt.DEVICE_SLOT.itemsize
    for number in range(len(image.devices)):
        at = image.superblock.devt_slotoff * size + number * size
        yield _Part(at, size, f"device {number + 1}", partial(_record, raw, at, fmt.DEVICE_SLOT))


def _inode_parts(raw: memoryview, image: Image, found: Scan) -> Iterator[_Part]:
    table = found.inodes
    titles = _titles(found)
    chunks = decode_chunks(image.geometry, table)
    first = np.cumsum(table.chunks) - table.chunks
    inline = np.where((table.mode & 0o170000) == stat.S_IFDIR, 0, table.inline)  # a directory's is a part of its own
    size = table.body_at + inline + table.chunks * table.unit - table.pos
    for at, title in enumerate(titles):
        extents = chunks[int(first[at]) : int(first[at]) + int(table.chunks[at])].tolist()
        part = partial(_inode_fields, raw, table, at, extents, int(inline[at]))
        yield _Part(int(table.pos[at]), int(size[at]), f"inode {table.nid[at]}: {title}", part)


def _inode_fields(raw: memoryview, table: InodeTable, nth: int, extents: list[int], inline: int) -> Fields:
    pos, area_at, body = int(table.pos[nth]), int(table.area_at[nth]), int(table.body_at[nth])
    area_end = area_at + int(table.area[nth])
    yield from _record(raw, pos, fmt.INODE_EXTENDED if area_at - pos == fmt.INODE_EXTENDED.itemsize else fmt.INODE_COMPACT)
    if area_end > area_at:
        yield from _xattr_area(raw, area_at, area_end)
    if body > area_end:
        yield body - area_end, f"alignment {raw[area_end:body].hex()}"
    yield from _chunk_fields(raw, body, extents, int(table.unit[nth]))
    if inline:
        yield inline, f"inline {bytes(raw[body : body + inline])!r}"


def _titles(found: Scan) -> list[str]:
    """One name of each inode and the directory that has it: not the path, which may be long for each of many."""
    titles = ["the root"] * len(found.inodes.nid)
    owner = np.repeat(found.inodes.nid[found.dir_inode], np.diff(found.first))
    for kid, name, directory in zip(reversed(found.child.tolist()), reversed(found.names), reversed(owner.tolist()), strict=True):
        titles[kid] = f"{name!r} in {directory}"
    return titles


def _chunk_fields(raw: memoryview, at: int, extents: list[int], unit: int) -> Fields:
    for nth, extent in enumerate(extents):
        text = "hole" if extent == HOLE else f"device {extent >> 32} block {extent & 0xFFFFFFFF}"
        yield unit, f"chunk {nth} {text} ({raw[at + unit * nth : at + unit * (nth + 1)].hex()})"


def _xattr_area(raw: memoryview, at: int, end: int) -> Fields:
    filter_, count = struct.unpack_from("<IB", raw, at)
    yield 4, f"h_name_filter {filter_:#x}"
    yield 1, f"h_shared_count {count}"
    yield 7, f"h_reserved2 {raw[at + 5 : at + 12].hex()}"
    at += fmt.XATTR_IBODY_HEADER
    for _ in range(count):
        yield 4, f"h_shared_xattrs {struct.unpack_from('<I', raw, at)[0]}"
        at += 4
    while at < end:
        for size, text in _xattr_entry(raw, at):
            yield size, text
            at += size


def _xattr_entry(raw: memoryview, at: int) -> Fields:
    length, index, size = struct.unpack_from("<BBH", raw, at)
    yield 1, f"e_name_len {length}"
    yield 1, f"e_name_index {index} ({fmt.XATTR_PREFIXES.get(index, b'?').decode()})"
    yield 2, f"e_value_size {size}"
    at += fmt.XATTR_ENTRY_HEADER
    if length:
        yield length, f"e_name {bytes(raw[at : at + length])!r}"
    if size:
        yield size, f"e_value {bytes(raw[at + length : at + length + size])!r}"
    padding = -(length + size) % 4
    if padding:
        yield padding, f"padding {raw[at + length + size : at + length + size + padding].hex()}"


def _shared_parts(raw: memoryview, image: Image, found: Scan) -> Iterator[_Part]:
    ids: set[int] = set()
    table = found.inodes
    image.xattr_lists(table)  # checks what the loops below and _xattr_entry take for granted
    for at in np.flatnonzero(table.area > 0).tolist():
        place = int(table.area_at[at])
        ids.update(struct.unpack_from(f"<{raw[place + 4]}I", raw, place + fmt.XATTR_IBODY_HEADER))
    for id_ in sorted(ids):
        at = image.geometry.xattr_at + 4 * id_
        size = sum(size for size, _ in _xattr_entry(raw, at))
        yield _Part(at, size, f"shared xattr {id_}", partial(_xattr_entry, raw, at))


def _directory_parts(raw: memoryview, found: Scan) -> Iterator[_Part]:
    table = found.inodes
    for at in found.dir_inode.tolist():
        whole, size = int(table.whole[at]), int(table.size[at])
        for nth in range(whole + (table.inline[at] > 0)):
            place = (int(table.i_u[at]) + nth) * BLOCK if nth < whole else int(table.body_at[at])
            used = min(BLOCK, size - nth * BLOCK)
            title = f"directory {table.nid[at]} block {nth}"
            yield _Part(place, used, title, partial(_dirents, raw, place, used))


def _dirents(raw: memoryview, at: int, used: int) -> Fields:
    count = struct.unpack_from("<H", raw, at + 8)[0] // fmt.DIRENT.itemsize
    entries = np.frombuffer(raw, fmt.DIRENT, count, at)
    for entry in entries:
        yield (
            fmt.DIRENT.itemsize,
            f"dirent nid {entry['nid']} nameoff {entry['nameoff']} type {entry['file_type']} reserved {entry['reserved']}",
        )
    offsets = [*entries["nameoff"].tolist(), used]
    for start, stop in pairwise(offsets):
        yield stop - start, f"name {bytes(raw[at + start : at + stop])!r}"
