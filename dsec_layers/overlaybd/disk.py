"""A disk: read-only layers on top of each other and, if it is to be written, an upper on top of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex, TypeAlias

from dsec_layers.blocksource import BlockSource, check_range
from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError, LimitError, UsageError
from dsec_layers.overlaybd.layer import LsmtLayer
from dsec_layers.overlaybd.packing import stack_layers, virtual_size
from dsec_layers.overlaybd.segments import MAX_SOURCES, SECTOR, Segments, stack
from dsec_layers.overlaybd.upper import Upper

__all__ = ["Disk", "Extent"]

_LOOK = 256  # mapped pieces looked at in one go
_MAX_TRIMS = 64  # a discard is split around what is zero already, but not into more parts than this
_MAX_SEEN = 4096  # nor after looking at more pieces than this

Kind: TypeAlias = Literal["data", "zero", "hole"]
Place: TypeAlias = tuple[SupportsIndex, int, int]


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a disk, in bytes: ``data``, ``zero`` (a layer says that it is zero) or ``hole`` (no layer has it; it reads as zeros)."""

    offset: int
    length: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class _State:
    """What reads go by; replaced whole, so that a read needs no lock."""

    mapping: Segments
    sources: tuple[BlockSource, ...]
    upper: Upper | None

    def read(self, first: int, end: int) -> list[bytes]:
        """The parts of sectors ``[first, end)``, to be joined."""
        if self.upper is None:
            return self._below(first, end)
        parts: list[bytes] = []
        for lba, stop, data in self.upper.read(first, end):
            if lba > first:
                parts += self._below(first, lba)
            parts.append(bytes((stop - lba) * SECTOR) if data is None else data)
            first = stop
        return parts + self._below(first, end) if first < end else parts

    def _below(self, first: int, end: int) -> list[bytes]:
        mapping = self.mapping
        at = int(mapping.lba.searchsorted(first, "right")) - 1
        if at >= 0 and mapping.end.item(at) >= end and not mapping.zeroed.item(at):  # the common case: one segment has it all
            moffset = mapping.moffset.item(at) + first - mapping.lba.item(at)
            return [self.sources[mapping.source.item(at)].pread(moffset * SECTOR, (end - first) * SECTOR)]
        parts: list[bytes] = []
        wanted = (-1, 0, 0)  # source, moffset, end: what is to be read next, as long as it continues
        for lba, stop, moffset, source, zeroed in mapping.pieces(first, end):
            if lba == first and not zeroed and wanted[0] == source and wanted[2] == moffset:
                wanted = (source, wanted[1], moffset + stop - lba)
            else:
                self._take(wanted, parts)
                wanted = (-1, 0, 0) if zeroed else (source, moffset, moffset + stop - lba)
                gap = (stop if zeroed else lba) - first
                if gap:
                    parts.append(bytes(gap * SECTOR))
            first = stop
        self._take(wanted, parts)
        if first < end:
            parts.append(bytes((end - first) * SECTOR))
        return parts

    def _take(self, wanted: tuple[int, int, int], parts: list[bytes]) -> None:
        source, moffset, end = wanted
        if source >= 0:
            parts.append(self.sources[source].pread(moffset * SECTOR, (end - moffset) * SECTOR))

    def places(self, first: int, end: int) -> list[Place] | None:
        """Where sectors ``[first, end)`` lie in files, byte for byte; None if they do not."""
        found: list[Place] = []
        if self.upper is not None:
            mapped, file = self.upper.places(first, end)
            for lba, stop, moffset, zeroed in mapped:
                if zeroed or file is None or (lba > first and not self._places_below(first, lba, found)):
                    return None
                found.append((file, moffset * SECTOR, (stop - lba) * SECTOR))
                first = stop
        return found if first == end or self._places_below(first, end, found) else None

    def _places_below(self, first: int, end: int, found: list[Place]) -> bool:
        for lba, stop, moffset, source, zeroed in self.mapping.pieces(first, end):
            sendable = getattr(self.sources[source], "sendable", None)
            if lba > first or zeroed or sendable is None:
                return False
            places = sendable(moffset * SECTOR, (stop - lba) * SECTOR)
            if places is None:
                return False
            found += places
            first = stop
        return first == end

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, Kind]]:
        """``[first, end)`` without gaps: (sector, end sector, kind)."""
        while first < end and self.upper is not None:
            found = self.upper.mapped(first, end, _LOOK)
            for lba, stop, zeroed in found:
                yield from self._pieces_below(first, lba)
                yield lba, stop, "zero" if zeroed else "data"
                first = stop
            if len(found) < _LOOK:
                break
        yield from self._pieces_below(first, end)

    def _pieces_below(self, first: int, end: int) -> Iterator[tuple[int, int, Kind]]:
        if first >= end:
            return
        for lba, stop, _, _, zeroed in self.mapping.pieces(first, end):
            if lba > first:
                yield first, lba, "hole"
            yield lba, stop, "zero" if zeroed else "data"
            first = stop
        if first < end:
            yield first, end, "hole"


class Disk:
    """A block device made of layers, bottom first, and an optional upper. A WritableSource if there is an upper. Thread-safe.

    Its size is what the topmost layer says that says something. Raises ImageError when none does, UsageError without any layer, LimitError for more
    than 255 layers.
    """

    def __init__(self, layers: Sequence[LsmtLayer], upper: Upper | None = None) -> None:
        if not layers and upper is None:
            raise UsageError("a disk needs at least one layer")
        mapping, sources = stack_layers(layers) if layers else (stack([]), ())
        self.size = (upper.virtual_size if upper is not None else 0) or virtual_size(layers)
        if not self.size:
            raise ImageError("no layer states the size of the disk", code=ImageCode.INCONSISTENT)
        self._state = _State(mapping, sources, upper)
        self._lock = threading.Lock()  # one change at a time: a write of part of a sector reads the sector first

    @property
    def writable(self) -> bool:
        """Whether there is an upper."""
        return self._state.upper is not None

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        if not length:
            return b""
        first, end = offset // SECTOR, -(-(offset + length) // SECTOR)
        parts = self._state.read(first, end)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(data) == length:
            return data
        skip = offset - first * SECTOR
        return data[skip : skip + length]

    def sendable(self, offset: int, length: int) -> list[Place] | None:
        """The (file, offset in it, length) of the parts that a range lies in, one behind the other; None unless all of it lies plainly in files that are here.

        A file is an int, or an object whose ``__index__`` gives a descriptor; it must be held until the bytes were taken. Never waits for a source.
        """
        check_range(offset, length, self.size)
        if (offset | length) % SECTOR or not length:
            return None
        return self._state.places(offset // SECTOR, (offset + length) // SECTOR)

    def pwrite(self, offset: int, data: Buffer) -> None:
        """See WritableSource. Whole sectors are appended as they are; a part of a sector is completed by what the disk has there."""
        check_range(offset, len(data), self.size)
        with self._lock:
            self._write(offset, data)

    def flush(self) -> None:
        """See WritableSource."""
        self._upper().flush()

    def trim(self, offset: int, length: int) -> None:
        """See WritableSource: whole sectors then read as zeros, parts of sectors stay. Costs nothing where there is no data."""
        check_range(offset, length, self.size)
        whole = offset + length == self.size  # a disk may end within a sector
        first, end = -(-offset // SECTOR), -(-(offset + length) // SECTOR) if whole else (offset + length) // SECTOR
        with self._lock:
            self._discard(first, end)

    def write_zeroes(self, offset: int, length: int) -> None:
        """See WritableSource."""
        check_range(offset, length, self.size)
        first, end = -(-offset // SECTOR), (offset + length) // SECTOR
        with self._lock:
            if first >= end:
                self._write(offset, bytes(length))
                return
            self._write(offset, bytes(first * SECTOR - offset))
            self._discard(first, end)
            self._write(end * SECTOR, bytes(offset + length - end * SECTOR))

    def extents(self, offset: int, length: int) -> Iterator[Extent]:
        """What the range consists of, in order and without gaps; neighbours differ in kind."""
        check_range(offset, length, self.size)
        until = offset + length
        at, last = offset, None
        for lba, _, kind in self._state.pieces(offset // SECTOR, -(-until // SECTOR)) if length else ():
            here = max(offset, lba * SECTOR)
            if kind != last:
                if last is not None:
                    yield Extent(at, here - at, last)
                at, last = here, kind
        if last is not None:
            yield Extent(at, until - at, last)

    def snapshot(self, fresh: Upper) -> LsmtLayer:
        """Freeze the present upper and go on writing to ``fresh``. Returns the frozen upper as a layer, which can be committed at leisure.

        Everything written before is durable when this returns. Reads and writes go on meanwhile or wait; none is lost.
        """
        with self._lock:
            state = self._state
            if fresh is state.upper or fresh.virtual_size not in (0, self.size):
                raise UsageError("the new upper is the present one, or made for a disk of another size")
            if len(state.sources) >= MAX_SOURCES:
                raise LimitError(f"a disk of more than {MAX_SOURCES} layers", hint="merge some of them into one")
            layer = self._upper().freeze()
            mapping = stack([state.mapping, layer.segments.renumber(len(state.sources))])
            self._state = _State(mapping, (*state.sources, *layer.sources), fresh)
        return layer

    def _upper(self) -> Upper:
        upper = self._state.upper
        if upper is None:
            raise UsageError("the disk is read-only: it has no upper")
        return upper

    def _write(self, offset: int, data: Buffer) -> None:
        if not len(data):
            return
        first, end = offset // SECTOR, -(-(offset + len(data)) // SECTOR)
        head, tail = offset - first * SECTOR, end * SECTOR - offset - len(data)
        if head or tail:
            before = b"".join(self._state.read(first, first + 1))[:head]
            behind = b"".join(self._state.read(end - 1, end))[SECTOR - tail :] if tail else b""
            data = before + bytes(data) + behind
        self._upper().write(first, data)

    def _discard(self, first: int, end: int) -> None:
        """Make sectors read as zeros where they do not yet."""
        upper = self._upper()
        if first >= end:
            return
        ranges: list[tuple[int, int]] = []
        for seen, (lba, stop, kind) in enumerate(self._state.pieces(first, end)):
            if kind != "data":
                continue
            if seen >= _MAX_SEEN or len(ranges) >= _MAX_TRIMS:
                stop = end
            if ranges and ranges[-1][1] == lba:
                lba = ranges.pop()[0]
            ranges.append((lba, stop))
            if stop == end:
                break
        for lba, stop in ranges:
            upper.discard(lba, stop)
