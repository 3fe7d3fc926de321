"""Which sector of a disk lies where: sorted, non-overlapping segments in parallel arrays, and how layers and write logs become them.

A segment maps ``[lba, end)`` of the disk to ``moffset`` onward in one of several sources, or to zeros. Everything is counted in sectors of 512 bytes.
One segment costs 27 bytes. ``paint`` resolves any set of intervals in which later ones cover earlier ones (a stack of layers, a write log) in
O(n log n) whole-array steps whatever the overlap, so that hostile indexes cost no more than honest ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dsec_layers.errors import LimitError

__all__ = [
    "MAX_SEGMENTS",
    "MAX_SOURCES",
    "SECTOR",
    "Bools",
    "Ints",
    "Segments",
    "concatenate",
    "no_segments",
    "overlay",
    "paint",
    "resolve",
    "stack",
]

SECTOR = 512

MAX_SOURCES = 255
"""Sources in one mapping, so layers in a stack; the official tools stop there too."""

MAX_SEGMENTS = 128_000_000
"""Segments in one mapping (MAX_LSMT_INDEX_SIZE of the official tools)."""

_FOLD = 4_000_000  # segments painted in one go: bounds the temporary arrays to some hundred megabytes
_ROWS = 1024
_FEW = 8

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
_T = TypeVar("_T", np.int64, np.int16, np.bool_)


@dataclass(frozen=True, slots=True)
class Segments:
    """A mapping: arrays of equal length, ``lba < end <= next lba``.

    ``source`` numbers the source that the segment came from, also where ``zeroed`` says that nothing is read there.
    """

    lba: Ints
    end: Ints
    moffset: Ints
    source: npt.NDArray[np.int16]
    zeroed: Bools

    def __len__(self) -> int:
        return len(self.lba)

    @property
    def nbytes(self) -> int:
        """Memory the arrays take, in bytes."""
        return int(self.lba.nbytes + self.end.nbytes + self.moffset.nbytes + self.source.nbytes + self.zeroed.nbytes)

    def take(self, index: Ints | Bools | slice) -> Segments:
        """The chosen segments."""
        return Segments(self.lba[index], self.end[index], self.moffset[index], self.source[index], self.zeroed[index])

    def renumber(self, first: int) -> Segments:
        """The same segments with ``first`` added to their source numbers."""
        return replace(self, source=(self.source + first).astype(np.int16)) if first else self

    def cut(self, owner: Ints, lba: Ints, end: Ints) -> Segments:
        """Parts of segments: of segment ``owner[i]`` the part ``[lba[i], end[i])``, which must lie within it."""
        whole = self.take(owner)
        moved = whole.moffset + np.where(whole.zeroed, 0, lba - whole.lba)
        return replace(whole, lba=lba, end=end, moffset=moved)

    def span(self, first: int, end: int) -> tuple[int, int]:
        """The half-open range of indexes of the segments that touch ``[first, end)``."""
        low = int(self.lba.searchsorted(first, "right"))
        if low and self.end.item(low - 1) > first:
            low -= 1
        return low, max(low, int(self.lba.searchsorted(end, "left")))

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """The mapped parts of ``[first, end)`` in order, cut to it: (lba, end, moffset, source, zeroed)."""
        if first >= end:
            return
        low, high = self.span(first, end)
        rows = self._few_rows(low, high) if high - low <= _FEW else self._rows(low, high)
        for lba, stop, moffset, source, zeroed in rows:
            if lba < first:
                moffset += 0 if zeroed else first - lba
                lba = first
            yield lba, min(stop, end), moffset, source, zeroed

    def _few_rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """As ``_rows``, cheaper for a handful."""
        for at in range(low, high):
            yield self.lba.item(at), self.end.item(at), self.moffset.item(at), self.source.item(at), self.zeroed.item(at)

    def _rows(self, low: int, high: int) -> Iterator[tuple[int, int, int, int, bool]]:
        for at in range(low, high, _ROWS):  # a caller may stop early
            part = self.take(slice(at, min(at + _ROWS, high)))
            yield from zip(
                part.lba.tolist(), part.end.tolist(), part.moffset.tolist(), part.source.tolist(), part.zeroed.tolist(), strict=True
            )


def no_segments() -> Segments:
    """The empty mapping."""
    none = np.empty(0, np.int64)
    return Segments(none, none, none, np.empty(0, np.int16), np.empty(0, np.bool_))


def concatenate(parts: Sequence[Segments]) -> Segments:
    """The segments of all parts one after the other, as they are."""
    if len(parts) == 1:
        return parts[0]
    return Segments(
        np.concatenate([part.lba for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.moffset for part in parts]),
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.zeroed for part in parts]),
    )


def paint(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Lay the intervals over each other, later ones on top: (start, end, index of the interval seen) of the visible parts, sorted, all disjoint.

    The borders cut the line into cells. Each interval is the union of two (overlapping) runs of 2**k cells, so it marks two places in level k of a table;
    going down the levels, a mark of level k is passed on to its two halves. That is a sparse table for range maxima, run backwards.
    """
    if len(start) == 0:
        return start, end, np.empty(0, np.int64)
    edges, first, last = _cells(start, end)
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
    seen = np.full(len(edges) - 1, -1, np.int64)
    for k in range(int(level.max()), -1, -1):
        if k < int(level.max()):
            half = 1 << k
            upper = seen
            seen = upper.copy()
            np.maximum(seen[half:], upper[:-half], out=seen[half:])
        here = by_level[bounds[k] : bounds[k + 1]]
        if len(here):
            np.maximum.at(seen, first[here], here)
            np.maximum.at(seen, last[here] - (1 << k), here)
    border = np.flatnonzero(np.diff(seen, prepend=-2, append=-2))
    owner = seen[border[:-1]]
    shown = owner >= 0
    return edges[border[:-1]][shown], edges[border[1:]][shown], owner[shown]


def _cells(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """The distinct borders in order, and for each interval the indexes of its first cell and of the cell behind its last."""
    both = np.concatenate([start, end])
    order = np.argsort(both)
    ordered = both[order]
    new = np.empty(len(both), np.bool_)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    rank = np.empty(len(both), np.int64)
    rank[order] = np.cumsum(new) - 1
    return ordered[new], rank[: len(start)], rank[len(start) :]


def resolve(log: Segments) -> Segments:
    """The mapping that a log of writes leaves: later segments cover earlier ones, order and overlap are free."""
    if len(log) == 0 or bool(np.all(log.end[:-1] <= log.lba[1:])):
        return log
    lba, end, owner = paint(log.lba, log.end)
    return log.cut(owner, lba, end)


def stack(layers: Sequence[Segments]) -> Segments:
    """The mapping seen through a stack of mappings, bottom first. Raises LimitError beyond MAX_SEGMENTS segments."""
    done = no_segments()
    waiting: list[Segments] = []
    for layer in layers:
        waiting.append(layer)
        if sum(map(len, waiting)) >= _FOLD:
            done = resolve(concatenate([done, *waiting]))
            waiting.clear()
    done = resolve(concatenate([done, *waiting]))
    if len(done) > MAX_SEGMENTS:
        raise LimitError(f"the stack has {len(done)} segments, more than {MAX_SEGMENTS}")
    return done


def overlay(lower: Segments, upper: Segments) -> Segments:
    """``stack([lower, upper])`` for an upper mapping that is small beside the lower: only what it touches is worked out anew."""
    first = lower.end.searchsorted(upper.lba, "right")
    behind = lower.lba.searchsorted(upper.end, "left")
    depth = np.zeros(len(lower) + 1, np.int64)
    np.add.at(depth, first, 1)
    np.add.at(depth, np.maximum(first, behind), -1)
    touched = np.cumsum(depth[:-1]) > 0
    mixed = resolve(concatenate([lower.take(touched), upper]))
    kept = lower.take(~touched)
    at = kept.lba.searchsorted(mixed.lba) + np.arange(len(mixed))
    place = np.zeros(len(kept) + len(mixed), np.bool_)
    place[at] = True

    def weave(old: npt.NDArray[_T], new: npt.NDArray[_T]) -> npt.NDArray[_T]:
        both = np.empty(len(place), old.dtype)
        both[at] = new
        both[~place] = old
        return both

    return Segments(
        weave(kept.lba, mixed.lba),
        weave(kept.end, mixed.end),
        weave(kept.moffset, mixed.moffset),
        weave(kept.source, mixed.source),
        weave(kept.zeroed, mixed.zeroed),
    )
