"""Replies on their way out: one at a time, in the order of their completion, without a thread of its own.

Whoever finishes a reply queues it and sends what is queued, unless somebody is at it already, who will then send this one too. So replies that
are ready at the same time leave in one system call, and a client that does not read holds one thread, not all.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence

from dsec_layers.digest import Buffer
from dsec_layers.fuse.nbd.exports import Piece
from dsec_layers.fuse.nbd.transport import Transport

__all__ = ["Sender"]

_MAX_PARTS = 512
_PADDING = bytes(1 << 16)


class Sender:
    """The sending half of a connection. ``settled`` is told the cost of each queued reply once it has left or was dropped; ``broken`` says that
    nothing leaves any more."""

    def __init__(self, transport: Transport, settled: Callable[[int], None], broke: Callable[[], None]) -> None:
        self._transport = transport
        self._settled = settled
        self._broke = broke
        self._lock = threading.Lock()
        self._queue: deque[tuple[Sequence[Buffer], int]] = deque()
        self.broken = False

    def post(self, parts: Sequence[Buffer], cost: int) -> None:
        """Queue a whole reply and send what is queued if nobody else is sending. Never raises: a broken stream is ``broke``'s affair."""
        self._queue.append((parts, cost))
        self._pump()

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send whole replies now, after those already queued. Raises OSError."""
        with self._lock:
            self._transport.send(parts)
        if self._queue:
            self._pump()

    def send_file(self, header: bytes, pieces: Sequence[Piece], *, pad: bool) -> tuple[int, int]:
        """Send ``header`` and the bytes of ``pieces``. Returns (bytes that were good, errno) where errno is 0 when all of them were.

        With ``pad`` the announced length is completed with zeros after a failed read, so that the stream stays in step; without it a failure
        raises ConnectionError, there being no other way to tell the client.
        """
        with self._lock:
            self._transport.send([header], more=True)
            good, error = self._send_pieces(pieces)
            missing = sum(length for _, _, length in pieces) - good
            if missing and not pad:
                raise ConnectionError("a read failed after its reply had begun")
            while missing > 0:
                self._transport.send([_PADDING[:missing]])
                missing -= len(_PADDING)
        if self._queue:
            self._pump()
        return good, error

    def close(self) -> None:
        """Send nothing any more; waits for a send that is going on. A late reply must not find the number of a descriptor that was given away."""
        with self._lock:
            self.broken = True

    def _send_pieces(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        good = 0
        for descriptor, offset, length in pieces:
            sent, error = self._transport.send_file(descriptor.__index__(), offset, length)
            good += sent
            if sent != length:
                return good, error or errno.EIO
        return good, 0

    def _pump(self) -> None:
        """Send until the queue is empty. The look at the queue after the lock was given back is what catches a reply queued just before."""
        while self._queue:
            if not self._lock.acquire(blocking=False):
                return
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._queue:
            parts: list[Buffer] = []
            cost = []
            while self._queue and len(parts) < _MAX_PARTS:
                reply, price = self._queue.popleft()
                parts.extend(reply)
                cost.append(price)
            try:
                if not self.broken:
                    self._transport.send(parts)
            except OSError:
                self.broken = True
                self._broke()
            for price in cost:
                self._settled(price)
