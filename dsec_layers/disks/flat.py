"""A layer's or an environment's flat EROFS image for NBD: metadata that is here, then segments that are fetched when they are first touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsec_layers.blocksource import check_range
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.cache.piece import Piece
from dsec_layers.descriptors import Descriptors, OpenFile
from dsec_layers.digest import Buffer
from dsec_layers.disks.pieces import OPEN_PIECES, PieceSource
from dsec_layers.fsio import map_os_error, pread_exact, pwrite_all

__all__ = ["FlatSource"]

_SECTOR = 512


class FlatSource:
    """``image`` and then ``pieces``, as a BlockSource whose size is a whole number of sectors. ``spool``: a directory for a nameless file. Close it."""

    blocking = False

    def __init__(self, image: Buffer, pieces: Sequence[Piece], opener: PieceOpener, spool: Path) -> None:
        self._kept = Descriptors[bytes](OPEN_PIECES)
        self._rest = PieceSource(pieces, opener, self._kept)
        self._length = len(image)
        self.size = -(-(self._length + self._rest.size) // _SECTOR) * _SECTOR
        try:
            with tempfile.TemporaryFile(dir=spool) as stream:
                pwrite_all(stream.fileno(), image, 0)
                self._image = OpenFile(os.dup(stream.fileno()))
        except OSError as error:
            raise map_os_error(error, f"spool file in {spool}") from error

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        head, at, body = self._split(offset, length)
        parts = [pread_exact(self._image.fd, head, offset)] if head else []
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
        return [(self._image, offset, head), *rest] if head else rest

    def cache(self, offset: int, length: int) -> None:
        """See fuse.nbd.PrefetchSource."""
        self.pread(offset, length)

    def close(self) -> None:
        """Let go of the pieces."""
        self._kept.close()

    def _split(self, offset: int, length: int) -> tuple[int, int, int]:
        """(bytes of the image, where in the pieces, bytes of them) of a range."""
        head = max(0, min(length, self._length - offset))
        at = max(0, offset - self._length)
        return head, at, max(0, min(length - head, self._rest.size - at))
