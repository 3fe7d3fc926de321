"""A text dump of an OverlayBD file for looking at and for ``diff``: every field by its on-disk name, one fact a line, in a fixed order.

A line that does not start with ``#`` is ``offset+size what``, offsets in the file, or, within a ZFile, in the content of it. Fields come as they are
stored, before anything is checked, so that a damaged file shows as much as there is; then the dump ends with the ImageError of the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from dsec_layers.blocksource import BlockSource
from dsec_layers.digest import content_digest
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.overlaybd import lsmt, zfile_format
from dsec_layers.overlaybd.layer import check_layer
from dsec_layers.overlaybd.lsmt import ENTRY, MAX_LBA, Header, looks_like_lsmt
from dsec_layers.overlaybd.segments import SECTOR
from dsec_layers.overlaybd.tarwrap import looks_like_tar, unwrap
from dsec_layers.overlaybd.zfile import ZFile, read_header
from dsec_layers.overlaybd.zfile_format import BLOCK_CRC, Flags, ZHeader, block_crc, looks_like_zfile, parse_table, raw_crc32c

__all__ = ["DumpKind", "dump"]

_PROBE: Final = 512
_DATA_LINE: Final = 1 << 20  # bytes of data that one line tells the digest of
_BATCH: Final = 1 << 14  # entries of a table that are read at once

_Spec: TypeAlias = tuple[tuple[str, int, str], ...]
"""(name, bytes, how it is shown) of consecutive fields."""

_LSMT: Final[_Spec] = (
    ("magic", 24, "raw"), ("size", 4, "int"), ("flags", 4, "hex"), ("index_offset", 8, "int"), ("index_size", 8, "int"),
    ("virtual_size", 8, "int"), ("uuid", 37, "text"), ("parent_uuid", 37, "text"), ("reserved", 2, "raw"), ("version", 1, "int"),
    ("sub_version", 1, "int"), ("user_tag", 256, "text"), ("padding", lsmt.SPACE - 390, "raw"),
)  # fmt: skip
_ZFILE: Final[_Spec] = (
    ("magic", 24, "raw"), ("size", 4, "int"), ("digest", 4, "hex"), ("flags", 8, "hex"), ("index_offset", 8, "int"), ("index_size", 8, "int"),
    ("original_file_size", 8, "int"), ("index_crc", 4, "hex"), ("reserved_0", 4, "int"), ("block_size", 4, "int"), ("algorithm", 1, "int"),
    ("level", 1, "int"), ("use_dict", 1, "int"), ("padding", 1, "raw"), ("args", 4, "int"), ("dict_size", 4, "int"), ("verify", 1, "int"),
    ("padding", 7, "raw"), ("padding", zfile_format.SPACE - 96, "raw"),
)  # fmt: skip


class DumpKind(StrEnum):
    """What is dumped of a file whose wrappings hold one another: all of them, or one."""

    AUTO = "auto"
    LSMT = "lsmt"
    ZFILE = "zfile"


def dump(source: BlockSource, kind: DumpKind = DumpKind.AUTO) -> Iterator[str]:
    """The lines, without line ends. Raises ImageError where the reader would, after the lines of what comes before."""
    if looks_like_tar(_probe(source)):
        inner = unwrap(source)
        yield f"# tar around {inner.size} bytes; offsets are from the start of these"
        source = inner
    if looks_like_zfile(_probe(source)):
        if kind is not DumpKind.LSMT:
            yield from _zfile(source)
        if kind is DumpKind.ZFILE:
            return
        source = ZFile(source)
        yield f"# ZFile of {source.size} bytes; offsets are in these"
    elif kind is DumpKind.ZFILE:
        raise ImageError("not a ZFile", code=ImageCode.BAD_MAGIC)
    if looks_like_lsmt(_probe(source)):
        yield from _lsmt(source)
    elif isinstance(source, ZFile) and kind is DumpKind.AUTO:
        yield "# no LSMT header"
        yield from _data(source, 0, source.size)
    else:
        raise ImageError("neither LSMT nor ZFile", code=ImageCode.BAD_MAGIC)


# --- ZFile -------------------------------------------------------------------------------------------------------------------------------------


def _zfile(source: BlockSource) -> Iterator[str]:
    end = max(0, source.size - zfile_format.SPACE)
    yield from _zfile_fields(source, 0, "ZFile header")
    if end and looks_like_zfile(source.pread(end, 24)):
        yield from _zfile_fields(source, end, "ZFile trailer")
    header = read_header(source)
    yield "# ZFile jump table"
    for first, lengths in _words(source, header.index_offset, header.blocks):
        for number, length in enumerate(lengths, first):
            yield f"{header.index_offset + 4 * number:08x}+4 block {number} length {length}"
    table = source.pread(header.index_offset, 4 * header.blocks)
    yield f"# jump table checksum {_agreement(header.index_crc, raw_crc32c(table), bool(header.flags & Flags.DIGEST))}"
    starts = parse_table(table, header)
    yield "# ZFile blocks"
    for number in range(header.blocks):
        yield from _block(source, number, starts.item(number), starts.item(number + 1), header)


def _zfile_fields(source: BlockSource, at: int, what: str) -> Iterator[str]:
    data = _space(source, at, zfile_format.SPACE, what)
    yield from _fields(data, at, _ZFILE, what)
    flags = int.from_bytes(data[32:40], "little")
    blank = data[:28] + bytes(4) + data[32:]
    yield f"# {what} checksum {_agreement(int.from_bytes(data[28:32], 'little'), raw_crc32c(blank), bool(flags & Flags.DIGEST))}"


def _block(source: BlockSource, number: int, start: int, end: int, header: ZHeader) -> Iterator[str]:
    stored = source.pread(start, end - start)
    body = stored[:-BLOCK_CRC] if header.crc else stored
    yield f"{start:08x}+{len(body)} block {number} data {content_digest(body).hex()}"
    if header.crc:
        crc = int.from_bytes(stored[-BLOCK_CRC:], "little")
        yield f"{end - BLOCK_CRC:08x}+{BLOCK_CRC} block {number} checksum {_agreement(crc, block_crc(body), True)}"


def _agreement(stored: int, computed: int, used: bool) -> str:
    if not used:
        return "is not used"
    return f"{stored:#010x} right" if stored == computed else f"{stored:#010x} WRONG, computed {computed:#010x}"


def _words(source: BlockSource, at: int, count: int) -> Iterator[tuple[int, list[int]]]:
    """(number of the first, numbers) for each batch of ``count`` 32-bit integers."""
    for first in range(0, count, _BATCH):
        yield first, np.frombuffer(source.pread(at + 4 * first, 4 * min(_BATCH, count - first)), "<u4").tolist()


# --- LSMT --------------------------------------------------------------------------------------------------------------------------------------


def _lsmt(source: BlockSource) -> Iterator[str]:
    """A sealed layer, or the data or index file of an unsealed upper."""
    what = "LSMT header"
    data = _space(source, 0, lsmt.SPACE, what)
    yield from _fields(data, 0, _LSMT, what)
    header = Header.parse(data)
    end = source.size - lsmt.SPACE
    if header.flags & lsmt.Flags.LAYER_HEADER == lsmt.Flags.HEADER:
        yield "# index of an unsealed upper, in the order of writing"
        count = end // ENTRY
        yield from _entries(source, lsmt.SPACE, count)
        yield from _rest(source, lsmt.SPACE + count * ENTRY, source.size)
        return
    if end < lsmt.SPACE or not looks_like_lsmt(source.pread(end, 24)):
        yield "# data, without a trailer"
        yield from _data(source, lsmt.SPACE, source.size)
        if header.flags & lsmt.Flags.SEALED:
            raise ImageError("LSMT: a sealed layer without a trailer", code=ImageCode.TRUNCATED)
        return
    last = source.pread(end, lsmt.SPACE)
    try:
        trailer = Header.parse(last, "LSMT trailer")
    except ImageError:
        yield from _fields(last, end, _LSMT, "LSMT trailer")
        raise
    index_end = trailer.index_offset + ENTRY * trailer.index_size
    if trailer.index_offset >= lsmt.SPACE and index_end <= end:
        yield "# LSMT data"
        yield from _data(source, lsmt.SPACE, trailer.index_offset)
        yield "# LSMT index"
        yield from _entries(source, trailer.index_offset, trailer.index_size)
        yield from _rest(source, index_end, end)
    yield from _fields(last, end, _LSMT, "LSMT trailer")
    check_layer(source)


def _entries(source: BlockSource, at: int, count: int) -> Iterator[str]:
    """Index entries as they are stored; ``lba``, ``length`` and ``moffset`` are in sectors."""
    for first in range(0, count, _BATCH):
        words = np.frombuffer(source.pread(at + ENTRY * first, ENTRY * min(_BATCH, count - first)), "<u8").tolist()
        for number, (low, high) in enumerate(zip(words[::2], words[1::2], strict=True), first):
            lba, length, moffset, zeroed, tag = low & MAX_LBA, low >> 50, high & (1 << 55) - 1, high >> 55 & 1, high >> 56
            text = (
                f"lba {lba} length {length} moffset {moffset} zeroed {zeroed} tag {tag}"
                if lba != MAX_LBA
                else f"pad length {length} {high:#x}"
            )
            yield f"{at + ENTRY * number:08x}+{ENTRY} segment_mapping {number} {text}"


# --- both --------------------------------------------------------------------------------------------------------------------------------------


def _probe(source: BlockSource) -> bytes:
    return source.pread(0, min(_PROBE, source.size))


def _space(source: BlockSource, at: int, size: int, what: str) -> bytes:
    if at + size > source.size:
        raise ImageError(f"{what} is cut short", code=ImageCode.TRUNCATED)
    return source.pread(at, size)


def _fields(data: bytes, at: int, spec: _Spec, what: str) -> Iterator[str]:
    yield f"# {what}"
    place = 0
    for name, size, style in spec:
        raw = data[place : place + size]
        yield f"{at + place:08x}+{size} {name} {_shown(raw, style)}"
        place += size


def _shown(raw: bytes, style: str) -> str:
    if style == "text":
        return repr(raw.rstrip(b"\0"))
    if style == "raw":
        return raw.hex() if any(raw) else "0"
    number = int.from_bytes(raw, "little")
    return hex(number) if style == "hex" else str(number)


def _data(source: BlockSource, at: int, end: int) -> Iterator[str]:
    """Digests of what nothing says more of; zeros in one line."""
    zeros = at
    while at < end:
        data = source.pread(at, min(_DATA_LINE, end - at))
        if data.strip(b"\0"):
            if at > zeros:
                yield f"{zeros:08x}+{at - zeros} zero"
            yield f"{at:08x}+{len(data)} data {content_digest(data).hex()}"
            zeros = at + len(data)
        at += len(data)
    if at > zeros:
        yield f"{zeros:08x}+{at - zeros} zero"


def _rest(source: BlockSource, at: int, end: int) -> Iterator[str]:
    """What lies behind an index: padding up to a sector, or an entry that is not all there; digests if it is more."""
    if 0 < end - at < SECTOR and (data := source.pread(at, end - at)).strip(b"\0"):
        yield f"{at:08x}+{end - at} unclaimed {data.hex()}"
    else:
        yield from _data(source, at, end)
