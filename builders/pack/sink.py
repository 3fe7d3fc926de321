"""The ContentSink that packs: chunks, digests, dedup, and the layout of own segments. One thread, no I/O of its own.

Chunks wait in a window until there are enough to look up together, then each becomes an extent: that of the same chunk seen before, of a foreign
segment that repays itself, or of a place in an open segment. Extents name segments by *provisional* numbers, counted as segments come up; when
all segments are known ``numbering`` gives each its device number.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from dsec_layers.builders.pack.chunker import CHUNK, CHUNK_BITS, Hole, SegmentRule, chunk_bits_of, cut, zeros_digest
from dsec_layers.builders.pack.foreign import MOST, ForeignChunks, Held
from dsec_layers.builders.pack.index import ChunkIndex
from dsec_layers.builders.pack.output import SegmentBuffer, SegmentOutput
from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import BLOCK, HOLE, Inode
from dsec_layers.errors import LimitError
from dsec_layers.layers.tables import CHUNK as CHUNK_RECORD
from dsec_layers.layers.tables import MAX_SEGMENTS, Table

__all__ = ["INLINE", "PackSink", "PackSums"]

INLINE: Final = 128
"""Files of at most this many bytes are stored in the metadata (ADR 0011)."""

WINDOW: Final = 1 << 20
"""Bytes of content that wait before they are placed."""

LOOKUP_WINDOW: Final = 16 << 20
"""The same when they are looked up in a catalog, which is fast for many at once."""

RUN: Final = 2
"""A file of at least this many mean segments gets segments of its own."""

_FILE_COST: Final = 1024
"""Bytes that a file keeps in memory besides its content, about: a view may keep alive all that was read with it, tar headers and such."""

_ZEROS: Final = bytes(BLOCK)


@dataclass(slots=True)
class PackSums:
    """What went into a layer, in bytes of file content unless said otherwise."""

    files: int = 0
    inline: int = 0
    holes: int = 0
    within: int = 0
    """Chunks that this layer had already."""
    against: int = 0
    """Chunks in foreign segments."""
    unique: int = 0
    """Chunks in segments of its own."""

    @property
    def total(self) -> int:
        """All of it: what the files' sizes add up to."""
        return self.inline + self.holes + self.within + self.against + self.unique


_Pending: TypeAlias = tuple[bytes, Buffer, int, bool]
"""A chunk in the window: digest, bytes, the extent to fill in (-1: no chunk, a large file ends here), whether it belongs to a large file."""


@dataclass(slots=True)
class _Open:
    """A segment being filled: digest, first block and bytes of each chunk."""

    number: int
    buffer: SegmentBuffer
    view: memoryview
    used: int = 0
    digests: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Closed:
    """What is remembered of a full segment."""

    number: int
    size: int
    digests: bytes
    starts: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]


class PackSink:
    """Takes files, fills in their inodes and ``extents``, and hands full segments to ``output``. See ``builders/content.py`` for the contract.

    Small files share segments in the order they come; each large file has a run of segments of its own, so that the same file in another tree
    gives the same segments. ``foreign``: what other layers have.
    """

    def __init__(self, output: SegmentOutput, *, foreign: ForeignChunks | None = None, inline: int = INLINE) -> None:
        self.extents: array[int] = array("Q")
        self.sums = PackSums()
        self._output = output
        self._foreign = foreign
        self._inline = inline
        self._rule = SegmentRule()
        self._index = ChunkIndex()
        self._window = LOOKUP_WINDOW if foreign else WINDOW
        self._pending: list[_Pending] = []
        self._held = 0
        self._numbers = 1  # provisional numbers; 0 stays the device of holes
        self._open: dict[bool, _Open] = {}
        self._closed: list[_Closed] = []

    def whole(self, inode: Inode, data: Buffer) -> None:
        """A file whose whole content is at hand."""
        size = len(data)
        if inode.size != size:  # else a source's number stays, which inodes of one size share
            inode.size = size
        self.sums.files += 1
        if size > CHUNK:
            self._add(inode, size, CHUNK_BITS, cut((data,), size, CHUNK))
            return
        self._held += size + _FILE_COST
        if size > self._inline:
            inode.extent_at = len(self.extents)
            inode.extent_count = 1
            self.extents.append(HOLE)
            self._chunk(data, inode.extent_at, False)
        elif size:
            inode.data = bytes(data)
            self.sums.inline += size
        if self._held >= self._window:
            self._flush()

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        """A large or sparse file in pieces. Raises InputError if they do not add up, LimitError if the file is too large."""
        bits = chunk_bits_of(size)
        chunks = cut(pieces, size, 1 << bits)
        if size <= self._inline:
            self.whole(inode, b"".join(data for data in chunks if not isinstance(data, Hole)))
            return
        inode.size = size
        self.sums.files += 1
        self._add(inode, size, bits, chunks)

    def finish(self) -> None:
        """No more files come: place and hand over what is left."""
        self._flush()
        self._give_up(all_of_it=True)
        for run in (False, True):
            self._close(run)

    def _add(self, inode: Inode, size: int, bits: int, chunks: Iterable[Buffer | Hole]) -> None:
        extents = self.extents
        run = size >= RUN * self._rule.mean
        inode.chunk_bits = bits
        inode.extent_at = len(extents)
        for chunk in chunks:
            if isinstance(chunk, Hole):
                extents.extend(array("Q", (HOLE,)) * chunk)
                self.sums.holes += chunk << bits
                continue
            extents.append(HOLE)
            self._chunk(chunk, len(extents) - 1, run)
            self._held += len(chunk)
            if self._held >= self._window:
                self._flush()
        if run:
            self._pending.append((b"", b"", -1, True))
        inode.extent_count = len(extents) - inode.extent_at

    def _chunk(self, data: Buffer, slot: int, run: bool) -> None:
        digest = blake3(data).digest()
        if not data[0] and digest == zeros_digest(len(data)):
            self.sums.holes += len(data)
            return
        self._pending.append((digest, data, slot, run))

    def _flush(self) -> None:
        """Turn the window's chunks into extents."""
        pending, self._pending, self._held = self._pending, [], 0
        recent, extents, sums, foreign = self._index.recent, self.extents, self.sums, self._foreign
        digests = [digest for digest, _, slot, _ in pending if slot >= 0]
        recalled = self._index.recall(digests)
        if foreign is not None:
            foreign.look([digest for digest in digests if digest not in recent and digest not in recalled])
        for digest, data, slot, run in pending:
            extent = recent.get(digest)
            if extent is not None or (extent := recalled.get(digest)) is not None:
                sums.within += len(data)
                extents[slot] = extent
            elif slot < 0:
                self._close(True)
            elif foreign is None or not self._is_foreign(foreign, digest, data, slot):
                extents[slot] = recent[digest] = self._store(digest, data, run)
                sums.unique += len(data)
        self._give_up(all_of_it=False)

    def _is_foreign(self, foreign: ForeignChunks, digest: bytes, data: Buffer, slot: int) -> bool:
        """Whether another layer has the chunk. Then its extent is filled in, now or later."""
        segment = foreign.offer(digest, data, slot)
        if segment is None:
            return False
        if segment.number:
            self.extents[slot] = self._index.recent[digest] = segment.number << 32 | segment.blocks[-1]
            self.sums.against += len(data)
        elif segment.repaid and foreign.count < MOST:
            number = self._number()
            for held in foreign.accept(segment, number):
                self._settle(held, number << 32 | held.at.block)
                self.sums.against += held.at.size
        return True

    def _give_up(self, *, all_of_it: bool) -> None:
        """Store again what is held of foreign segments that do not repay themselves: all of it, or when too much is held."""
        if self._foreign is not None and (all_of_it or self._foreign.full):
            for held in self._foreign.give_up(all_of_it):
                self._settle(held, self._store(held.digest, held.data, False))
                self.sums.unique += held.at.size

    def _settle(self, held: Held, extent: int) -> None:
        self._index.recent[held.digest] = extent
        for slot in held.slots:
            self.extents[slot] = extent
        self.sums.within += (len(held.slots) - 1) * held.at.size

    def _store(self, digest: bytes, data: Buffer, run: bool) -> int:
        """The extent of a new chunk, which goes into the open segment of its sort."""
        size = len(data)
        need = (size + BLOCK - 1) & -BLOCK
        segment = self._open.get(run)
        if segment is not None and segment.used + need > len(segment.view):
            self._close(run)
            segment = None
        if segment is None:
            segment = self._begin(run, need)
        at = segment.used
        end = at + size
        used = segment.used = at + need
        segment.view[at:end] = data
        if end != used:
            segment.view[end:used] = _ZEROS[: used - end]  # the buffer has been used before
        segment.digests.append(digest)
        segment.starts.append(at >> 12)
        segment.sizes.append(size)
        if self._rule.ends(used, digest, need >> 12):
            self._close(run)
        return segment.number << 32 | at >> 12

    def _begin(self, run: bool, need: int) -> _Open:
        total = len(self._closed) + len(self._open) + (self._foreign.count if self._foreign else 0)
        if total >= MAX_SEGMENTS:
            raise LimitError(f"a layer of more than {MAX_SEGMENTS} segments")
        capacity = max(self._rule.largest, need)
        buffer = self._output.acquire(capacity)
        segment = self._open[run] = _Open(self._number(), buffer, buffer.view[:capacity])
        return segment

    def _number(self) -> int:
        number = self._numbers
        self._numbers += 1
        return number

    def _close(self, run: bool) -> None:
        segment = self._open.pop(run, None)
        if segment is not None:
            self._output.submit(segment.buffer, segment.used)
            starts, sizes = np.array(segment.starts, np.uint32), np.array(segment.sizes, np.uint32)
            self._closed.append(_Closed(segment.number, segment.used, b"".join(segment.digests), starts, sizes))
            self._rule.count()

    @property
    def sizes(self) -> list[int]:
        """Bytes of each own segment, in order."""
        return [segment.size for segment in self._closed]

    def chunk_records(self) -> Table:
        """The chunk table of the own segments."""
        records = np.zeros(sum(len(segment.starts) for segment in self._closed), CHUNK_RECORD)
        if len(records):
            records["digest"] = np.frombuffer(b"".join(segment.digests for segment in self._closed), "V32")
            records["segment"] = np.repeat(np.arange(len(self._closed)), [len(segment.starts) for segment in self._closed])
            records["block"] = np.concatenate([segment.starts for segment in self._closed])
            records["size"] = np.concatenate([segment.sizes for segment in self._closed])
            records["blocks"] = (records["size"] + np.uint32(BLOCK - 1)) // BLOCK
        return records

    def numbered(self, foreign: Mapping[int, int]) -> array[int]:
        """The extents with device numbers: own segments from 1 on, and ``foreign`` (provisional number -> device) for the others."""
        devices = np.zeros(self._numbers, np.uint64)
        for device, segment in enumerate(self._closed, 1):
            devices[segment.number] = device
        for number, device in foreign.items():
            devices[number] = device
        extents = np.frombuffer(self.extents, np.uint64)
        low = np.uint64(0xFFFFFFFF)
        final = devices[extents >> np.uint64(32)] << np.uint64(32) | extents & low
        result: array[int] = array("Q")
        result.frombytes(final.tobytes())
        return result
