"""Array types and index arithmetic that the reader and the writer share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "Mask", "chunk_lengths", "slices"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def slices(at: Ints, count: Ints) -> Ints:
    """The indexes of the slices ``at[i] : at[i] + count[i]``, one after another."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(at - (ends - count), count) + np.arange(total)


def chunk_lengths(size: Ints, bits: Ints, count: Ints) -> Ints:
    """Blocks that each chunk of each file needs: whole chunks, and what is left of the size for the last one."""
    blocks = np.repeat(np.int64(1) << (bits - 12), count)
    used = count > 0
    last = np.cumsum(count)[used] - 1
    blocks[last] = ((size[used] - 1) >> 12) + 1 - ((count[used] - 1) << (bits[used] - 12))
    return blocks
