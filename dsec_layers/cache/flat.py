"""The flat image: a layer's metadata image and then its segments, seen as one self-contained EROFS image of fixed size that nobody stores."""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Protocol, Self, SupportsIndex

from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.cache.piece import Piece
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
            self._image = _Descriptor(os.open(files.image, os.O_RDONLY | os.O_CLOEXEC))
            image = os.fstat(self._image.fd).st_size
        except OSError as error:
            raise map_os_error(error, str(files.image)) from error
        self._starts = [0, *itertools.accumulate(files.sizes, initial=image)]
        self.size: int = self._starts[-1]
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Descriptor] = OrderedDict()

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``. UsageError outside the image; the fetch's errors."""
        parts = [self._read(part, at, count) for part, at, count in self._parts(offset, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sendable(self, offset: int, length: int) -> list[tuple[SupportsIndex, int, int]] | None:
        """(descriptor, offset in it, bytes) of the parts that are the range, for sendfile(2); None if one of them is absent. Never fetches.

        A descriptor is an object that has its number as ``__index__`` and stays open as long as it is held, even after ``close``.
        """
        found: list[tuple[SupportsIndex, int, int]] = []
        for part, at, count in self._parts(offset, length):
            descriptor = self._image if part == 0 else self._present(part - 1)
            if descriptor is None:
                return None
            found.append((descriptor, at, count))
        return found

    def close(self) -> None:
        """Let go of all descriptors; the image is not to be read any more."""
        with self._lock:
            self._open.clear()
        del self._image

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
            descriptor = self._image if part == 0 else self._segment(part - 1)
            return pread_exact(descriptor.fd, count, at)
        except EOFError as error:
            raise CorruptError(f"{self._files.digest}: {error}") from error
        except OSError as error:
            raise map_os_error(error, f"cached part of {self._files.digest}") from error

    def _segment(self, number: int) -> _Descriptor:
        return self._known(number) or self._keep(number, self._cache.open(self._files.piece(number)))

    def _present(self, number: int) -> _Descriptor | None:
        known = self._known(number)
        if known is not None:
            return known
        fd = self._cache.open_present(self._files.piece(number))
        return self._keep(number, fd) if fd is not None else None

    def _known(self, number: int) -> _Descriptor | None:
        with self._lock:
            descriptor = self._open.get(number)
            if descriptor is not None:
                self._open.move_to_end(number)
            return descriptor

    def _keep(self, number: int, fd: int) -> _Descriptor:
        descriptor = _Descriptor(fd)
        with self._lock:
            self._open[number] = descriptor
            if len(self._open) > _OPEN_SEGMENTS:
                self._open.popitem(last=False)
        return descriptor


class _Descriptor:
    """A descriptor that is closed when nobody holds it any more, so that it cannot be closed, and its number given away, under a reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __index__(self) -> int:
        return self.fd

    def __del__(self) -> None:
        os.close(self.fd)
