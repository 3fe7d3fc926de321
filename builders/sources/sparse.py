"""What sparse files cost. GNU sparse maps: the old ``S`` header, and PAX sparse formats 0.0, 0.1 and 1.0 (GNU tar manual, "Storing Sparse Files"). No I/O.

A map is a list of (offset, length) of the data that is stored; the rest of the file is holes.
"""

from __future__ import annotations

from typing import Final

from dsec_layers.builders.names import Limits, over_limit, shown
from dsec_layers.builders.pack.chunker import chunk_bits_of
from dsec_layers.builders.sources.header import RECORD, Records, decimal, number
from dsec_layers.errors import InputError

__all__ = ["MAX_EXTENTS", "Holes", "Map", "Map1", "check_map", "map_0", "old_entries"]

MAX_EXTENTS: Final = 1 << 20
"""Stored pieces of one sparse file."""

Map = list[tuple[int, int]]


class Holes:
    """Counts the chunks of holes in one input. Each costs an extent of eight bytes, of which a header of 1 KiB can ask for 32 MiB: only the sum bounds them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._chunks = 0

    def add(self, what: str, name: bytes, size: int, holes: int) -> None:
        """A file of ``size`` bytes, ``holes`` of them not stored. Raises LimitError if the sum gets too large, or the file is."""
        self._chunks += holes >> chunk_bits_of(size)
        if self._chunks > self._limits.hole_chunks:
            raise over_limit(
                f"{what}: {shown(name)} with its {holes} bytes of holes goes over the limit of {self._limits.hole_chunks} chunks of holes",
                "holes",
            )


def check_map(sparse: Map, real: int, stored: int) -> Map:
    """``sparse`` without empty pieces, if it is in order, inside ``real`` bytes and adds up to the ``stored`` bytes. Raises InputError."""
    if len(sparse) > MAX_EXTENTS:
        raise InputError(f"sparse map has {len(sparse)} pieces, over the limit of {MAX_EXTENTS}")
    at = 0
    for offset, length in sparse:
        if offset < at or length < 0 or offset + length > real:
            raise InputError(f"sparse map is out of order or leaves the file: {length} bytes at {offset} of {real}")
        at = offset + length
    if sum(length for _, length in sparse) != stored:
        raise InputError(f"sparse map does not add up to the {stored} bytes stored")
    return [(offset, length) for offset, length in sparse if length]


def old_entries(buffer: bytes, at: int, count: int) -> Map:
    """``count`` entries of an ``S`` header or of its continuation, those unused left out."""
    entries = []
    for start in range(at, at + 24 * count, 24):
        if not buffer[start + 12]:
            break
        entries.append((number(buffer[start : start + 12]), number(buffer[start + 12 : start + 24])))
    return entries


def map_0(records: Records) -> Map | None:
    """The map of PAX sparse 0.1 (one list) or 0.0 (a record for each number), None without one."""
    listed = dict(records).get(b"GNU.sparse.map")
    if listed is not None:
        numbers = [decimal(item) for item in listed.split(b",")] if listed else []
        if len(numbers) % 2:
            raise InputError("sparse map has an offset without a length")
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    offsets = [decimal(value) for keyword, value in records if keyword == b"GNU.sparse.offset"]
    lengths = [decimal(value) for keyword, value in records if keyword == b"GNU.sparse.numbytes"]
    if len(offsets) != len(lengths):
        raise InputError("sparse map has an offset without a length")
    return list(zip(offsets, lengths, strict=True)) if offsets or b"GNU.sparse.size" in dict(records) else None


class Map1:
    """Collects the map of PAX sparse 1.0, which precedes the data: decimal lines, a count and then offset and length in turn, padded to a block."""

    def __init__(self) -> None:
        self._rest = b""
        self._numbers: list[int] = []

    def feed(self, block: bytes) -> Map | None:
        """Take one 512-byte block; the map once it is complete."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            self._numbers.append(decimal(line))
            if self._numbers[0] < 0 or self._numbers[0] > MAX_EXTENTS:
                raise InputError(f"sparse map has {self._numbers[0]} pieces, over the limit of {MAX_EXTENTS}")
            if len(self._numbers) == 1 + 2 * self._numbers[0]:
                return list(zip(self._numbers[1::2], self._numbers[2::2], strict=True))
        if len(self._rest) > RECORD:
            raise InputError("malformed sparse map: a number without an end")
        return None
