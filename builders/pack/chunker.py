"""Where to cut: files into chunks, runs of chunks into segments. Pure rules, so that the same input gives the same cuts for any number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from dsec_layers.digest import Buffer, content_digest
from dsec_layers.erofs.tree import BLOCK
from dsec_layers.errors import InputError, LimitError
from dsec_layers.layers.tables import MAX_SEGMENT, MAX_SEGMENTS

__all__ = ["CHUNK", "CHUNK_BITS", "Hole", "SegmentRule", "chunk_bits_of", "cut", "zeros_digest"]

CHUNK_BITS: Final = 16
CHUNK: Final = 1 << CHUNK_BITS
"""Bytes in a chunk of an ordinary file."""

MAX_CHUNK_BITS: Final = 24
"""A chunk lies within one segment, so none is larger than the largest segment."""

FILE_CHUNKS: Final = 1 << 20
"""Chunks a file may have before its chunks grow: 64 GiB of ordinary ones."""

MAX_FILE_CHUNKS: Final = 1 << 22
"""Chunks a file may have at all: 64 TiB of the largest ones."""

SEGMENT: Final = 1 << 20
"""Mean size of a segment, in bytes; cuts lie between half and twice of it."""

_STEPS: Final = (1, 2, 4, 8, 16)
_STEP: Final = MAX_SEGMENTS // len(_STEPS)


class Hole(int):
    """A run of this many whole chunks that are holes."""


def chunk_bits_of(size: int) -> int:
    """The chunk size (as a power of two) for a file of ``size`` bytes: 64 KiB, and for huge sparse files as much as bounds the number of extents.

    Raises LimitError for a file that would need too many even so.
    """
    bits = max(CHUNK_BITS, ((size - 1) // FILE_CHUNKS).bit_length()) if size else CHUNK_BITS
    if bits <= MAX_CHUNK_BITS:
        return bits
    if size > MAX_FILE_CHUNKS << MAX_CHUNK_BITS:
        raise LimitError(f"a file of {size} bytes; the limit is {MAX_FILE_CHUNKS << MAX_CHUNK_BITS}")
    return MAX_CHUNK_BITS


@lru_cache(maxsize=1024)
def zeros_digest(length: int) -> bytes:
    """The content digest of ``length`` zero bytes."""
    return content_digest(bytes(length))


class SegmentRule:
    """Decides after which chunk a segment ends.

    The last chunk's own digest decides, with a probability in proportion to its size, once the segment has half its mean size; so the cuts depend on
    content, not on what lies before, and two similar trees meet again after a difference. ``closed`` counts this layer's segments: the mean doubles
    with every fifth of the segments that a layer can have, up to whole segments of 16 MiB in the last fifth, so that a huge layer still fits.
    """

    __slots__ = ("_next", "_shift", "closed", "largest", "least", "mean")

    def __init__(self) -> None:
        self.closed = 0
        self._next = 0
        self._shift = 0
        self.mean = self.least = self.largest = 0
        self._grow()

    def ends(self, used: int, digest: bytes, blocks: int) -> bool:
        """Whether a segment that now has ``used`` bytes ends after the chunk of this digest and number of blocks."""
        if used < self.least:
            return False
        return used >= self.largest or int.from_bytes(digest[:4], "little") < blocks << self._shift

    def count(self) -> None:
        """One more segment is closed."""
        self.closed += 1
        if self.closed >= self._next:
            self._grow()

    def _grow(self) -> None:
        step = min(self._next // _STEP, len(_STEPS) - 1)
        self.mean = mean = SEGMENT * _STEPS[step]
        self._next += _STEP
        self.least = mean // 2 if mean < MAX_SEGMENT else mean
        self.largest = min(mean * 2, MAX_SEGMENT)
        # With p = blocks / 2**(32 - shift) the mean distance from the least size to the cut is half the mean size.
        self._shift = 32 - (mean // 2 // BLOCK).bit_length() + 1


def cut(pieces: Iterable[Buffer | int], size: int, chunk: int) -> Iterator[Buffer | Hole]:
    """The chunks of a file from pieces of any size: buffers of ``chunk`` bytes (the last as long as it is) and runs of holes.

    A chunk that lies in one piece is a view of it. A chunk that is partly data and partly hole is data. Raises InputError if the pieces do not
    add up to ``size`` bytes.
    """
    held = bytearray()
    done = 0
    for piece in pieces:
        length = piece if isinstance(piece, int) else len(piece)
        done += length
        if length < 0 or done > size:
            raise InputError(f"a file of {size} bytes has more content than that")
        at = 0
        if held:
            at = min(chunk - len(held), length)
            held += bytes(at) if isinstance(piece, int) else memoryview(piece)[:at]
            if len(held) < chunk:
                continue
            yield bytes(held)
            held.clear()
        whole, rest = divmod(length - at, chunk)
        if isinstance(piece, int):
            if whole:
                yield Hole(whole)
            held += bytes(rest)
            continue
        view = memoryview(piece)
        for start in range(at, at + whole * chunk, chunk):
            yield view[start : start + chunk]
        held += view[length - rest :]
    if done != size:
        raise InputError(f"a file of {size} bytes ends after {done}")
    if held:
        yield bytes(held)
