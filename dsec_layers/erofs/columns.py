"""Array types and index arithmetic that the reader and the writer share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "Mask", "Narrow", "chunk_lengths", "slices"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Narrow = npt.NDArray[Any]
"""Integers of fewer than eight bytes, as a column of a million has them. Together with Ints they give Ints; shifted left by themselves they overflow."""


def slices(at: Ints, count: Ints) -> Ints:
    """The indexes of the slices ``at[i] : at[i] + count[i]``, one after another."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(at - (ends - count), count) + np.arange(total)


def chunk_lengths(size: Ints, bits: Narrow, count: Ints) -> Ints:
    """Blocks that each chunk of each file needs: whole chunks, and what is left of the size for the last one."""
    bits = bits.astype(np.int64)
    blocks = np.repeat(np.int64(1) << (bits - 12), count)
    used = count > 0
    last = np.cumsum(count)[used] - 1
    blocks[last] = ((size[used] - 1) >> 12) + 1 - ((count[used] - 1) << (bits[used] - 12))
    return blocks
