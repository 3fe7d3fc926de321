"""Which chunks a layer has already: digest -> extent, with bounded memory for the bookkeeping of each chunk.

A dict of bytes and ints costs about 200 bytes a chunk. Here it only holds the most recent ones; older ones are frozen into sorted arrays of 40 bytes
a chunk, and what a window needs of them is recalled for the whole window at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["ChunkIndex"]

RECENT: Final = 1 << 18
"""Chunks in the dict: some 50 MB."""


class ChunkIndex:
    """Digest -> extent. New chunks go into ``recent``; a window looks there and in what ``recall`` gives for it."""

    def __init__(self, recent: int = RECENT) -> None:
        self.recent: dict[bytes, int] = {}
        self._most = recent
        self._frozen: list[_Frozen] = []

    def recall(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """What is known of ``digests`` besides ``recent``. Call it before each window: only here do entries leave ``recent``."""
        if len(self.recent) >= self._most:
            self._freeze()
        found: dict[bytes, int] = {}
        if self._frozen:
            wanted = [digest for digest in digests if digest not in self.recent]
            heads = _heads(b"".join(wanted))
            for frozen in self._frozen:
                frozen.look(wanted, heads, found)
        return found

    def _freeze(self) -> None:
        raw = b"".join(self.recent)
        parts = [_Frozen(_heads(raw), np.frombuffer(raw, "V32"), np.fromiter(self.recent.values(), np.uint64, len(self.recent)))]
        self.recent.clear()
        # Like the digits of a binary number: merging equals keeps the number of arrays logarithmic.
        while self._frozen and len(self._frozen[-1].heads) <= 2 * sum(len(part.heads) for part in parts):
            parts.append(self._frozen.pop())
        heads = np.concatenate([part.heads for part in parts])
        order = np.argsort(heads, kind="stable")
        whole = np.concatenate([part.whole for part in parts])[order]
        extents = np.concatenate([part.extents for part in parts])[order]
        self._frozen.append(_Frozen(heads[order], whole, extents))


@dataclass(slots=True)
class _Frozen:
    """Chunks sorted by the first eight bytes of their digests."""

    heads: npt.NDArray[np.uint64]
    whole: npt.NDArray[np.void]
    extents: npt.NDArray[np.uint64]

    def look(self, wanted: list[bytes], heads: npt.NDArray[np.uint64], found: dict[bytes, int]) -> None:
        """Add to ``found`` what is here of ``wanted``, whose first bytes are ``heads``."""
        first = np.searchsorted(self.heads, heads)
        alike = self.heads[np.minimum(first, len(self.heads) - 1)] == heads
        for index in np.flatnonzero(alike).tolist():
            at = int(first[index])
            # Digests that only begin alike are next to each other: 64 equal bits are no proof of equal content.
            while at < len(self.heads) and self.heads[at] == heads[index]:
                if self.whole[at].tobytes() == wanted[index]:
                    found[wanted[index]] = int(self.extents[at])
                at += 1


def _heads(digests: bytes) -> npt.NDArray[np.uint64]:
    """The first eight bytes of each digest as a number."""
    return np.frombuffer(digests, "<u8")[::4].copy()
