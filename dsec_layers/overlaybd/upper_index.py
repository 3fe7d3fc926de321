"""The mapping of a disk that is being written: a large array that is searched, and a small sorted list of what came since.

An insert costs a few microseconds whatever the size; every so often the list is merged into the array, in time proportional to the array, so rarely
enough that this stays below the cost of the inserts. No lock in here: the owner serialises.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from dsec_layers.overlaybd.segments import Ints, Segments, no_segments, overlay

__all__ = ["UpperIndex", "dead_blocks"]

_MIN_RECENT = 2048
_SHARE = 64  # the list may hold this fraction of the array before it is merged

Span: TypeAlias = tuple[int, int, bool]
"""(end sector, moffset, zeroed)."""


class UpperIndex:
    """A mapping that grows. Segments stay as they were inserted, but for what later ones cover: nothing is joined."""

    def __init__(self, base: Segments | None = None) -> None:
        self._base = base if base is not None else no_segments()
        self._starts: list[int] = []  # of the recent segments, sorted
        self._spans: dict[int, Span] = {}

    def __len__(self) -> int:
        return len(self._base) + len(self._starts)  # an upper bound between two merges

    def insert(self, lba: int, end: int, moffset: int, zeroed: bool) -> None:
        """Map ``[lba, end)`` anew."""
        starts, spans = self._starts, self._spans
        low = bisect_left(starts, lba)
        if low:
            before = starts[low - 1]
            stop, place, empty = spans[before]
            if stop > lba:
                spans[before] = (lba, place, empty)
                if stop > end:
                    spans[end] = (stop, place if empty else place + end - before, empty)
                    starts.insert(low, end)
        high = low
        while high < len(starts) and starts[high] < end:
            start = starts[high]
            stop, place, empty = spans.pop(start)
            high += 1
            if stop > end:
                spans[end] = (stop, place if empty else place + end - start, empty)
                starts.insert(high, end)
        spans[lba] = (end, moffset, zeroed)
        starts[low:high] = [lba]
        if len(starts) > max(_MIN_RECENT, len(self._base) // _SHARE):
            self.settle()

    def extend(self, lba: int, old_end: int, end: int) -> bool:
        """Let the data segment that was inserted as ``[lba, old_end)`` reach to ``end``, if it is still whole and recent. ``[old_end, end)`` is mapped anew."""
        span = self._spans.get(lba)
        if span is None or span[0] != old_end or span[2]:
            return False
        moffset = span[1]
        self.insert(lba, end, moffset, False)
        return True

    def settle(self) -> Segments:
        """The whole mapping as arrays, which the index goes on with."""
        if self._starts:
            spans = [self._spans[start] for start in self._starts]
            recent = Segments(
                np.array(self._starts, np.int64),
                np.array([span[0] for span in spans], np.int64),
                np.array([span[1] for span in spans], np.int64),
                np.zeros(len(spans), np.int16),
                np.array([span[2] for span in spans], np.bool_),
            )
            self._base = overlay(self._base, recent)
            self._starts, self._spans = [], {}
        return self._base

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
        """The mapped parts of ``[first, end)`` in order, cut to it: (lba, end, moffset, zeroed)."""
        starts, spans = self._starts, self._spans
        at = bisect_right(starts, first)
        if at and spans[starts[at - 1]][0] > first:
            at -= 1
        while first < end:
            start = starts[at] if at < len(starts) else end
            if start > first:
                stop = min(start, end)
                if len(self._base):
                    yield from ((lba, cut, moffset, zeroed) for lba, cut, moffset, _, zeroed in self._base.pieces(first, stop))
                first = stop
                continue
            stop, moffset, zeroed = spans[start]
            cut = min(stop, end)
            yield first, cut, moffset if zeroed else moffset + first - start, zeroed
            first = cut
            at += 1


def dead_blocks(mapping: Segments, freed: Ints, start: int, end: int, block: int) -> Ints:
    """The runs of whole ``block`` sectors in ``[start, end)`` of a data file that no segment maps and that ``freed`` does not have yet.

    ``freed`` and the result are arrays of (first, end) rows, ``freed`` in multiples of ``block``.
    """
    data = mapping.take(~mapping.zeroed)
    used = np.concatenate([np.stack([data.moffset, data.moffset + data.end - data.lba], axis=1), freed, [[end, end]]])
    used = used[np.argsort(used[:, 0], kind="stable")]
    reached = np.maximum.accumulate(np.concatenate([[start], used[:-1, 1]]))
    first = -(-reached // block) * block
    last = np.minimum(used[:, 0], end) // block * block
    gaps = np.stack([first, last], axis=1)
    dead: Ints = gaps[last > first]
    return dead
