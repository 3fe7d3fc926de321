"""A blob of a store as a block source that is fetched in verified pieces of 256 KiB through the cache."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Self

from dsec_layers.blocksource import check_range
from dsec_layers.cache.flat import PieceOpener
from dsec_layers.cache.piece import Piece
from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError
from dsec_layers.fsio import map_os_error, pread_exact
from dsec_layers.layers.disk import PIECE_SIZE

__all__ = ["PieceSource"]

_OPEN_PIECES: Final = 256


class PieceSource:
    """``size`` bytes of ``blob``; ``digests`` are those of its pieces. A BlockSource. Thread-safe. Close it.

    Descriptors of the pieces used last stay open, so that a read of what is here costs one pread.
    """

    def __init__(self, opener: PieceOpener, store: str, blob: Digest, size: int, digests: Sequence[bytes]) -> None:
        self.size = size
        self._opener = opener
        self._store = store
        self._blob = blob
        self._digests = digests
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Shared] = OrderedDict()

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. UsageError outside the blob; the fetch's errors."""
        check_range(offset, length, self.size)
        first, within = divmod(offset, PIECE_SIZE)
        if within + length <= PIECE_SIZE:
            return self._read(first, within, length)
        parts = []
        while length:
            count = min(length, PIECE_SIZE - within)
            parts.append(self._read(first, within, count))
            first, within, length = first + 1, 0, length - count
        return b"".join(parts)

    def piece(self, number: int) -> Piece:
        """Where piece ``number`` is and what it must be."""
        offset = number * PIECE_SIZE
        count = min(PIECE_SIZE, self.size - offset)
        return Piece(self._digests[number], count, self._store, self._blob, offset, count, "raw")

    def close(self) -> None:
        """Close all descriptors."""
        with self._lock:
            held, self._open = list(self._open.values()), OrderedDict()
        for shared in held:
            shared.drop()

    def _read(self, number: int, offset: int, length: int) -> bytes:
        if not length:
            return b""
        shared = self._take(number)
        try:
            return pread_exact(shared.fd, length, offset)
        except EOFError as error:
            raise CorruptError(f"{self.piece(number)}: {error}") from error
        except OSError as error:
            raise map_os_error(error, str(self.piece(number))) from error
        finally:
            shared.drop()

    def _take(self, number: int) -> _Shared:
        with self._lock:
            found = self._open.get(number)
            if found is not None:
                self._open.move_to_end(number)
                return found.take()
        opened = _Shared(self._opener.open(self.piece(number)))
        evicted: list[_Shared] = []
        with self._lock:
            before = self._open.pop(number, None)
            if before is not None:
                evicted.append(before)
            self._open[number] = opened.take()
            if len(self._open) > _OPEN_PIECES:
                evicted.append(self._open.popitem(last=False)[1])
        for shared in evicted:
            shared.drop()
        return opened


class _Shared:
    """A descriptor that is closed when its last user lets go."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._users = 1
        self._lock = threading.Lock()

    def take(self) -> Self:
        with self._lock:
            self._users += 1
        return self

    def drop(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self.fd)
