"""Bytes that are fetched in verified pieces: a blob of a store in pieces of 256 KiB, or any other row of pieces."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from dsec_layers.blocksource import check_range
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.cache.piece import Piece
from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError
from dsec_layers.fsio import map_os_error, pread_exact
from dsec_layers.layers.disk import PIECE_SIZE

__all__ = ["HeldFd", "OpenPieces", "PieceSource", "blob_pieces"]

_OPEN: Final = 1024


class HeldFd:
    """A descriptor that is closed when the last reference to this object goes; usable where a descriptor is."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __index__(self) -> int:
        return self.fd

    def __del__(self) -> None:
        os.close(self.fd)


class OpenPieces:
    """Descriptors of the pieces used last, so that a read of what is here costs one pread. Thread-safe; shared by the layers of a disk."""

    def __init__(self, opener: PieceOpener, limit: int = _OPEN) -> None:
        self._opener = opener
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[bytes, HeldFd] = OrderedDict()

    def take(self, piece: Piece) -> HeldFd:
        """The piece, complete; fetched first if it is absent. Raises what the opener raises."""
        held = self.here(piece.digest)
        if held is not None:
            return held
        held = HeldFd(self._opener.open(piece))
        with self._lock:
            self._open[piece.digest] = held
            evicted = self._open.popitem(last=False) if len(self._open) > self._limit else None
        del evicted  # outside of the lock: closing may take a moment
        return held

    def here(self, digest: bytes) -> HeldFd | None:
        """The piece if its descriptor is open."""
        with self._lock:
            held = self._open.get(digest)
            if held is not None:
                self._open.move_to_end(digest)
            return held

    def close(self) -> None:
        """Let go of all descriptors."""
        with self._lock:
            self._open.clear()


class PieceSource:
    """Pieces one behind the other, as a BlockSource. Thread-safe."""

    def __init__(self, pieces: Sequence[Piece], open_pieces: OpenPieces) -> None:
        self._pieces = pieces
        self._open = open_pieces
        self._starts = [0, *accumulate(piece.size for piece in pieces)]
        self.size = self._starts[-1]

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. UsageError outside of the source; the fetch's errors."""
        check_range(offset, length, self.size)
        parts = [self._read(number, at, count) for number, at, count in self._split(offset, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def sendable(self, offset: int, length: int) -> list[tuple[HeldFd, int, int]] | None:
        """(descriptor, offset in it, length) of the parts of a range, if all of them are open already; None else. Never waits."""
        found = []
        for number, at, count in self._split(offset, length):
            held = self._open.here(self._pieces[number].digest)
            if held is None:
                return None
            found.append((held, at, count))
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
        held = self._open.take(piece)
        try:
            return pread_exact(held.fd, length, offset)
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
