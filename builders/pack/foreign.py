"""Chunks that other layers have: used where they lie if their segment repays itself, stored again if not (capping, ADR 0010).

A foreign segment costs a device, and a fetch of all of it for what is used of it. How much that will be is only known at the end of the input; so
chunks found in a segment that has not repaid itself yet are *held*, with their bytes, until it has (then the bytes are dropped) or until too much is held
or the input ends (then they are stored again). Memory is bounded, and nothing depends on time.

What a catalog says is an index somebody built from tables that somebody wrote: before a layer relies on it, ``check`` reads each segment in question
and compares the digests of exactly the chunks that are used.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np

from dsec_layers.digest import Buffer, Digest, content_digest
from dsec_layers.erofs.tree import BLOCK
from dsec_layers.errors import CorruptError, DsecError, NotFound
from dsec_layers.layers.tables import MAX_SEGMENT, MAX_SEGMENTS, Table
from dsec_layers.registry.catalog import ChunkAt, SegmentAt
from dsec_layers.registry.objects import load_chunks, load_layer, load_metadata
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store

__all__ = ["MOST", "ForeignChecks", "ForeignChunks", "ForeignSegment", "Held", "Lookup", "PreviousFirst", "check_segment"]

REPAID: Final = 128 << 10
"""Bytes of a segment that a layer must use for the segment to repay itself; a quarter is enough of a small one."""

HELD: Final = 48 << 20
"""Bytes of chunks held back at most."""

MOST: Final = MAX_SEGMENTS // 2
"""Foreign segments a layer may use; the rest is left for its own."""


class Lookup(Protocol):
    """The part of a catalog that is needed here."""

    def lookup(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        """Where chunks are, for those that are known."""


@dataclass(slots=True)
class Held:
    """A chunk held back: the extents (``slots``) wait for its place."""

    digest: bytes
    at: ChunkAt
    data: bytes
    slots: list[int]


@dataclass(slots=True)
class ForeignSegment:
    """A segment of another layer and what this layer uses of it, in bytes of whole blocks; ``number`` is 0 until it has repaid itself."""

    at: SegmentAt
    number: int = 0
    used: int = 0
    window: int = 0
    """When it was last used."""
    held: list[Held] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)
    """Of the chunks in use, one after another; ``blocks`` and ``sizes``: where they begin and their bytes."""
    blocks: array[int] = field(default_factory=lambda: array("I"))
    sizes: array[int] = field(default_factory=lambda: array("I"))

    def use(self, digest: bytes, at: ChunkAt) -> None:
        """One more chunk of it is in use."""
        self.digests += digest
        self.blocks.append(at.block)
        self.sizes.append(at.size)

    def chunks(self) -> Iterator[tuple[bytes, int, int]]:
        """Digest, first block and bytes of each chunk that is in use now; more may come meanwhile, by another thread."""
        for nth in range(len(self.sizes)):
            yield bytes(self.digests[32 * nth : 32 * nth + 32]), self.blocks[nth], self.sizes[nth]

    @property
    def repaid(self) -> bool:
        """Whether enough of it is used."""
        return self.used >= min(REPAID, self.at.size // 4)


class PreviousFirst:
    """Looks chunks up in the chunk table of layer ``previous``, and those that are not there in ``catalog``.

    The layer that is about to be replaced comes before the catalog, which keeps one place of a chunk, and that need not be in this layer.
    """

    def __init__(self, store: Store, previous: Digest, catalog: Lookup | None) -> None:
        self._catalog = catalog
        layer = load_layer(store, previous)
        self._chunks: Table | None = None
        if layer.chunks is not None:
            _, table = load_metadata(store, layer)
            self._chunks = load_chunks(store, layer, table)
            self._keys = _keys(np.ascontiguousarray(self._chunks["digest"]))
            columns = (table[name].tolist() for name in ("blob", "offset", "stored", "size", "digest"))
            self._segments = [
                SegmentAt(layer.segments[blob].digest, offset, stored, size, digest)
                for blob, offset, stored, size, digest in zip(*columns, strict=True)
            ]

    def lookup(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        """Where chunks are, for those that are known."""
        found = self._look(digests)
        if self._catalog is not None:
            found |= self._catalog.lookup([digest for digest in digests if digest not in found])
        return found

    def _look(self, digests: Sequence[bytes]) -> dict[bytes, ChunkAt]:
        if self._chunks is None or not len(self._chunks) or not digests:
            return {}
        found: dict[bytes, ChunkAt] = {}
        at = np.minimum(np.searchsorted(self._keys, _keys(np.frombuffer(b"".join(digests), "V32"))), len(self._keys) - 1)
        for digest, row in zip(digests, self._chunks[at].tolist(), strict=True):
            # Of chunks whose digests begin with the same eight bytes only the first is found; the others are taken for unknown.
            if row[0] == digest:
                _, segment, block, blocks, size = row
                found[digest] = ChunkAt(self._segments[segment], block, blocks, size)
        return found


def _keys(digests: Table) -> np.typing.NDArray[np.uint64]:
    """The first eight bytes of each digest, as numbers that compare as the bytes do."""
    return digests.view(">u8").reshape(-1, 4)[:, 0].astype(np.uint64)


class ForeignChunks:
    """What is known of chunks elsewhere, for one layer being packed. A catalog that fails knows nothing more from then on; ``warn`` is told."""

    def __init__(self, catalog: Lookup, checks: ForeignChecks, warn: Callable[[str], None]) -> None:
        self._catalog: Lookup | None = catalog
        self._checks = checks
        self._warn = warn
        self._window = 0
        self._warm: dict[tuple[Digest, int], ForeignSegment] = {}
        self._found: dict[bytes, ChunkAt] = {}
        self._segments: dict[tuple[Digest, int], ForeignSegment] = {}
        self._held: dict[bytes, Held] = {}
        self._bytes = 0
        self.count = 0
        """Foreign segments in use."""

    def look(self, digests: Sequence[bytes]) -> None:
        """Look up the chunks of a window. Segments in use that the last window did not use are checked meanwhile."""
        self._window += 1
        for key, segment in list(self._warm.items()):
            if segment.window < self._window - 1:
                del self._warm[key]
                self._checks.start(segment)
        self._found = {}
        if self._catalog is not None:
            try:
                self._found = self._catalog.lookup(digests)
            except DsecError as error:
                self._catalog = None
                self._warn(f"the catalog fails, the rest is stored without it: {error}")

    def offer(self, digest: bytes, data: Buffer, slot: int) -> ForeignSegment | None:
        """Whether a chunk is elsewhere: the segment, which may be in use (``number``) or not yet; then the chunk is held and its extent stays open."""
        held = self._held.get(digest)
        if held is not None:
            held.slots.append(slot)
            return self._segments[held.at.segment.blob, held.at.segment.offset]
        at = self._found.get(digest)
        if at is None or not _sound(at, len(data)):
            return None
        key = (at.segment.blob, at.segment.offset)
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = ForeignSegment(at.segment)
        segment.window = self._window
        if segment.number:
            segment.use(digest, at)
            self._warm[key] = segment
            return segment
        held = self._held[digest] = Held(digest, at, bytes(data), [slot])
        self._bytes += at.size
        segment.used += (at.size + BLOCK - 1) & -BLOCK
        segment.held.append(held)
        return segment

    def accept(self, segment: ForeignSegment, number: int) -> list[Held]:
        """Use a segment from now on under the provisional ``number``; returns its held chunks, whose places are now known."""
        segment.number = number
        self.count += 1
        self._warm[segment.at.blob, segment.at.offset] = segment
        for held in segment.held:
            segment.use(held.digest, held.at)
        return self._release(segment)

    def give_up(self, all_of_it: bool) -> Iterator[Held]:
        """Chunks to be stored again: those held longest while too many bytes are held, or all of them."""
        for segment in list(self._segments.values()):
            if not all_of_it and self._bytes <= HELD // 2:
                return
            if not segment.number:
                del self._segments[segment.at.blob, segment.at.offset]
                yield from self._release(segment)

    @property
    def full(self) -> bool:
        """Whether too much is held."""
        return self._bytes > HELD

    def used(self) -> list[ForeignSegment]:
        """The segments in use."""
        return [segment for segment in self._segments.values() if segment.number]

    def _release(self, segment: ForeignSegment) -> list[Held]:
        held, segment.held = segment.held, []
        for item in held:
            del self._held[item.digest]
            self._bytes -= item.at.size
        return held


def _sound(at: ChunkAt, size: int) -> bool:
    """Whether a catalog's answer is possible at all."""
    segment = at.segment
    inside = at.block >= 0 and at.block * BLOCK + size <= segment.size
    return at.size == size and inside and 0 < segment.size <= MAX_SEGMENT and segment.size % BLOCK == 0 and segment.stored > 0


def check_segment(store: Store, segment: ForeignSegment) -> None:
    """Read a foreign segment and compare it, and the chunks that are used of it, with their digests. CorruptError, NotFound."""
    at = segment.at
    data = memoryview(read_segment(store, Segment(at.digest, at.size, store.url, at.blob, at.offset, at.stored)))
    for digest, block, size in segment.chunks():
        if content_digest(data[block * BLOCK : block * BLOCK + size]) != digest:
            store.suspect(at.blob)
            raise CorruptError(f"{at.blob}: the segment at {at.offset} has another chunk at block {block} than the catalog says")


class ForeignChecks:
    """``check_segment`` by threads, while the input is read. Use as a context."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="pack-check")
        self._started: dict[tuple[Digest, int], tuple[int, Future[str | None]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, segment: ForeignSegment) -> None:
        """Check a segment of which no more is expected to be used; if it is, ``finish`` checks it again."""
        self._started[segment.at.blob, segment.at.offset] = len(segment.sizes), self._pool.submit(self._check, segment)

    def finish(self, segments: Iterable[ForeignSegment]) -> tuple[Digest, str] | None:
        """Wait until all these are checked as they are now: the first blob that cannot be used, and why; None if all can."""
        segments = list(segments)
        for segment in segments:
            if self._started.get((segment.at.blob, segment.at.offset), (0, None))[0] != len(segment.sizes):
                self.start(segment)
        for segment in segments:
            trouble = self._started[segment.at.blob, segment.at.offset][1].result()
            if trouble:
                return segment.at.blob, trouble
        return None

    def _check(self, segment: ForeignSegment) -> str | None:
        try:
            check_segment(self._store, segment)
        except (CorruptError, NotFound) as error:
            return error.message
        return None
