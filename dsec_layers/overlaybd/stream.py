"""What the writers of this package produce: writes, in order, for whoever owns the file.

Most writes follow each other; formats that state a size at their start end with a write to the start. So the target must be seekable, but no
format code ever sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from dsec_layers.digest import Buffer

__all__ = ["Write", "batches", "sequential"]

Write: TypeAlias = tuple[int, bytes]
"""(offset, data): these bytes belong there. A later write wins."""


def sequential(chunks: Iterable[bytes], start: int = 0) -> Iterator[Write]:
    """The chunks one behind the other."""
    for chunk in chunks:
        yield start, chunk
        start += len(chunk)


def batches(chunks: Iterable[Buffer], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of ``size``; the last may be shorter, none is empty."""
    parts: list[Buffer] = []
    have = 0
    for chunk in chunks:
        view = memoryview(chunk)
        while have + len(view) >= size:
            parts.append(view[: size - have])
            view = view[size - have :]
            yield b"".join(parts)
            parts, have = [], 0
        if view:
            parts.append(view)
            have += len(view)
    if have:
        yield b"".join(parts)
