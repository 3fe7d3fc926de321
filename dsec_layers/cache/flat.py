"""The flat image: a layer's metadata image and then its segments, seen as one self-contained EROFS image of fixed size that nobody stores."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator
from typing import Final, Protocol, Self

from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.cache.piece import Piece
from dsec_layers.descriptors import Descriptors
from dsec_layers.errors import CorruptError, UsageError
from dsec_layers.fsio import map_os_error, pread_exact

__all__ = ["FlatImage", "PieceOpener"]

_OPEN_SEGMENTS: Final = 64


class PieceOpener(Protocol):
    """What a flat image needs of a cache: ``SegmentCache``, or one that asks the daemon."""

    def open(self, piece: Piece) -> int:
        """A descriptor of the complete segment, fetched first if need be."""

    def open_present(self, piece: Piece) -> int | None:
        """The same if it is here, else None."""


class FlatImage:
    """A layer as one range of bytes (``BlockSource``); a segment is fetched when it is first touched. Thread-safe. Close it.

    Descriptors of the segments used last stay open.
    """

    def __init__(self, files: LayerFiles, cache: PieceOpener) -> None:
        self._files = files
        self._cache = cache
        try:
            self._image_fd = os.open(files.image, os.O_RDONLY | os.O_CLOEXEC)
            image = os.fstat(self._image_fd).st_size
        except OSError as error:
            raise map_os_error(error, str(files.image)) from error
        self._starts = [0, *itertools.accumulate(files.sizes, initial=image)]
        self.size: int = self._starts[-1]
        self._kept = Descriptors[int](_OPEN_SEGMENTS)

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``. UsageError outside the image; the fetch's errors."""
        parts = [self._read(part, at, count) for part, at, count in self._parts(offset, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sendable(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """(descriptor, offset in it, bytes) of the present parts from the front of a range, for sendfile(2); stops at the first absent one.

        The caller closes each descriptor.
        """
        found = []
        for part, at, count in self._parts(offset, length):
            if part == 0:
                fd: int | None = os.dup(self._image_fd)
            else:
                fd = self._cache.open_present(self._files.piece(part - 1))
            if fd is None:
                break
            found.append((fd, at, count))
        return found

    def close(self) -> None:
        """Close all descriptors."""
        self._kept.close()
        os.close(self._image_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(part, offset in it, bytes): part 0 is the metadata image, part i segment i - 1."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UsageError(f"{length} bytes at {offset} are not within the {self.size} bytes of the image")
        part = bisect.bisect_right(self._starts, offset, hi=len(self._starts) - 1) - 1
        while length:
            at = offset - self._starts[part]
            count = min(length, self._starts[part + 1] - offset)
            if count:
                yield part, at, count
            offset += count
            length -= count
            part += 1

    def _read(self, part: int, at: int, count: int) -> bytes:
        try:
            if part == 0:
                return pread_exact(self._image_fd, count, at)
            file = self._kept.take(part, lambda: self._cache.open(self._files.piece(part - 1)))
            return pread_exact(file.fd, count, at)
        except EOFError as error:
            raise CorruptError(f"{self._files.digest}: {error}") from error
        except OSError as error:
            raise map_os_error(error, f"cached part of {self._files.digest}") from error
