"""Bytes that are fetched in verified pieces: a blob of a store in pieces of 256 KiB, or any other row of pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from dsec_layers.blocksource import check_range
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.cache.piece import Piece
from dsec_layers.descriptors import Descriptors, OpenFile
from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError
from dsec_layers.fsio import map_os_error, pread_exact
from dsec_layers.layers.disk import PIECE_SIZE

__all__ = ["OPEN_PIECES", "PieceSource", "blob_pieces"]

OPEN_PIECES: Final = 1024
"""Pieces that a disk or an image keeps open, so that a read of what is here costs one pread."""


class PieceSource:
    """Pieces one behind the other, as a BlockSource. Thread-safe. ``kept``: descriptors by digest, which sources may share."""

    def __init__(self, pieces: Sequence[Piece], opener: PieceOpener, kept: Descriptors[bytes]) -> None:
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


def blob_pieces(store: str, blob: Digest, size: int, digests: Sequence[bytes]) -> list[Piece]:
    """The pieces of 256 KiB that make up a blob of ``size`` bytes; ``digests`` are theirs."""
    pieces = []
    for number, digest in enumerate(digests):
        offset = number * PIECE_SIZE
        count = min(PIECE_SIZE, size - offset)
        pieces.append(Piece(digest, count, store, blob, offset, count, "raw"))
    return pieces
