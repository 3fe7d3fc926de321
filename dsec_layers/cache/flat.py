"""Segments or pieces in a row as one range of bytes, fetched when first touched; and the flat EROFS image: metadata, then segments, that nobody stores."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol, Self

from dsec_layers.blocksource import FileSource, check_range
from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.descriptors import Descriptors, OpenFile
from dsec_layers.digest import Buffer
from dsec_layers.errors import CorruptError
from dsec_layers.fsio import map_os_error, pread_exact, pwrite_all
from dsec_layers.segment import Segment

__all__ = ["OPEN_PIECES", "FlatImage", "PieceOpener", "PieceSource"]

OPEN_PIECES: Final = 1024
"""Pieces that one disk or image keeps open where it has a server of its own, so that a read of what is here costs one pread."""

_OPEN_OF_LAYER: Final = 64
_SECTOR: Final = 512


class PieceOpener(Protocol):
    """What these sources need of a cache: ``SegmentCache``, or one that asks the daemon."""

    def open(self, piece: Segment) -> int:
        """A descriptor of the complete segment, fetched first if need be."""


class PieceSource:
    """Pieces one behind the other, as a BlockSource. Thread-safe. ``kept``: descriptors by digest, which sources may share."""

    def __init__(self, pieces: Sequence[Segment], opener: PieceOpener, kept: Descriptors[bytes]) -> None:
        self._pieces = pieces
        self._opener = opener
        self._kept = kept
        self._starts = [0, *accumulate(piece.size for piece in pieces)]
        self.size = self._starts[-1]

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. UsageError outside of the source; the fetch's errors."""
        check_range(offset, length, self.size)
        parts = [self._read(number, at, count) for number, at, count in self._split(offset, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sendable(self, offset: int, length: int) -> list[tuple[OpenFile, int, int]] | None:
        """(descriptor, offset in it, length) of the parts of a range, if all of them are open already; None else. Never waits."""
        found = []
        for number, at, count in self._split(offset, length):
            file = self._kept.here(self._pieces[number].digest)
            if file is None:
                return None
            found.append((file, at, count))
        return found

    def _split(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        number = bisect_right(self._starts, offset) - 1
        parts = []
        while length:
            at = offset - self._starts[number]
            count = min(length, self._starts[number + 1] - offset)
            if count:
                parts.append((number, at, count))
            offset, length, number = offset + count, length - count, number + 1
        return parts

    def _read(self, number: int, offset: int, length: int) -> bytes:
        piece = self._pieces[number]
        file = self._kept.take(piece.digest, lambda: self._opener.open(piece))
        try:
            return pread_exact(file.fd, length, offset)
        except EOFError as error:
            raise CorruptError(f"{piece}: {error}") from error
        except OSError as error:
            raise map_os_error(error, str(piece)) from error


class FlatImage:
    """``image`` and then ``segments``, as a BlockSource whose size is a whole number of sectors. Thread-safe. Close it, or use it as a context.

    ``keep``: how many segments stay open. ``image`` is closed when nothing refers to it any more.
    """

    blocking = False

    def __init__(
        self, image: OpenFile, segments: Sequence[Segment], opener: PieceOpener, *, name: str = "metadata image", keep: int = OPEN_PIECES
    ) -> None:
        self._file = image
        self._image = FileSource(image.fd, name=name)
        self._kept = Descriptors[bytes](keep)
        self._rest = PieceSource(segments, opener, self._kept)
        self.size = -(-(self._image.size + self._rest.size) // _SECTOR) * _SECTOR

    @classmethod
    def of_layer(cls, files: LayerFiles, opener: PieceOpener, *, keep: int = _OPEN_OF_LAYER) -> Self:
        """The flat image of a layer whose metadata is in the cache."""
        try:
            image = OpenFile(os.open(files.image, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise map_os_error(error, str(files.image)) from error
        return cls(image, files.pieces(), opener, name=str(files.image), keep=keep)

    @classmethod
    def spooled(cls, image: Buffer, segments: Sequence[Segment], opener: PieceOpener, spool: Path) -> Self:
        """The same of a metadata image in memory, which goes to a nameless file in the directory ``spool``."""
        try:
            with tempfile.TemporaryFile(dir=spool) as stream:
                pwrite_all(stream.fileno(), image, 0)
                file = OpenFile(os.dup(stream.fileno()))
        except OSError as error:
            raise map_os_error(error, f"spool file in {spool}") from error
        return cls(file, segments, opener)

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource. Raises what the fetch raises."""
        check_range(offset, length, self.size)
        head, at, body = self._split(offset, length)
        parts = [self._image.pread(offset, head)] if head else []
        if body:
            parts.append(self._rest.pread(at, body))
        if head + body < length:
            parts.append(bytes(length - head - body))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sendable(self, offset: int, length: int) -> list[tuple[OpenFile, int, int]] | None:
        """See fuse.nbd.Sendable."""
        head, at, body = self._split(offset, length)
        if head + body < length:
            return None
        rest = self._rest.sendable(at, body) if body else []
        if rest is None:
            return None
        return [(self._file, offset, head), *rest] if head else rest

    def cache(self, offset: int, length: int) -> None:
        """See fuse.nbd.PrefetchSource."""
        self.pread(offset, length)

    def close(self) -> None:
        """Let go of the segments."""
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _split(self, offset: int, length: int) -> tuple[int, int, int]:
        """(bytes of the image, where in the segments, bytes of them) of a range."""
        head = max(0, min(length, self._image.size - offset))
        at = max(0, offset - self._image.size)
        return head, at, max(0, min(length - head, self._rest.size - at))
