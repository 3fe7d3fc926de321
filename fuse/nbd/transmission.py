"""The transmission phase of one connection: requests in, replies out.

One thread receives. It parses all requests that one receive brought, answers what it can without waiting (reads of cached pages, sources that never
wait) into one buffer, and sends that with one call; large reads of local files leave by sendfile. Whatever may wait (a fetch, a disk, a flush) goes
to the connection's worker threads and answers when it is done, in any order, as the protocol allows.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsec_layers.digest import Buffer
from dsec_layers.fuse.nbd.exports import Piece
from dsec_layers.fuse.nbd.negotiation import Session
from dsec_layers.fuse.nbd.perform import Performer
from dsec_layers.fuse.nbd.protocol import (
    DATA_CHUNK,
    NBD_CMD_DISC,
    NBD_CMD_FLAG_FUA,
    NBD_CMD_READ,
    NBD_CMD_WRITE,
    NBD_EIO,
    NBD_REPLY_FLAG_DONE,
    NBD_REPLY_TYPE_OFFSET_DATA,
    NBD_REQUEST_MAGIC,
    NBD_SIMPLE_REPLY_MAGIC,
    NBD_STRUCTURED_REPLY_MAGIC,
    REQUEST,
    SIMPLE_REPLY,
    ProtocolError,
    data_header,
    done_chunk,
    error_offset_chunk,
)
from dsec_layers.fuse.nbd.requests import Request, refusal
from dsec_layers.fuse.nbd.sender import Sender
from dsec_layers.fuse.nbd.transport import Transport
from dsec_layers.fuse.nbd.workers import Workers

__all__ = ["Limits", "Transmission"]

_RECEIVE = 1 << 16
_SLAB = 1 << 18
_COPIED = 1 << 16
"""Reads up to this length are copied into the reply buffer; longer ones leave by sendfile where that is possible."""
_BATCH_BYTES = 1 << 20
_BATCH_PARTS = 500
_LAST_ROUNDS = 64
"""Receives after ``stop``: enough for everything a socket can hold, few enough to end under a client that goes on sending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients can make a server hold.

    ``connections`` at a time (a client in its handshake makes room for a new one); ``handshake_seconds`` from connecting to the transmission phase; for each connection ``workers`` threads,
    ``requests`` in flight and ``payload`` bytes in flight (one request may have 32 MiB).
    """

    connections: int = 64
    handshake_seconds: float = 30.0
    workers: int = 16
    requests: int = 128
    payload: int = 64 << 20


class _Batch:
    """Replies that are ready, in the order of their requests: headers and small data in one slab, other data as it came."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.slab = bytearray(_SLAB)
        self.view = memoryview(self.slab)
        self.end = 0
        self._start = 0
        self._parts: list[Buffer] = []
        self._bytes = 0

    def reserve(self, size: int) -> int:
        """Where the next ``size`` bytes go in the slab; they count once ``end`` is moved past them."""
        if self.end + size > _SLAB:
            self.flush()
        return self.end

    def append(self, parts: Sequence[Buffer]) -> None:
        """A whole reply that was made elsewhere."""
        if self.end > self._start:
            self._parts.append(self.view[self._start : self.end])
            self._start = self.end
        for part in parts:
            self._parts.append(part)
            self._bytes += len(part)
        if self._bytes > _BATCH_BYTES or len(self._parts) > _BATCH_PARTS:
            self.flush()

    def flush(self) -> None:
        """Send what is there."""
        if self.end > self._start:
            self._parts.append(self.view[self._start : self.end])
        if self._parts:
            parts = self._parts
            self._parts = []
            self._start = self.end = self._bytes = 0
            self._sender.send(parts)


class Transmission:
    """One connection's transmission phase. ``broke`` is called when sending fails; it must make receiving end."""

    def __init__(self, session: Session, transport: Transport, limits: Limits, performer: Performer, broke: Callable[[], None]) -> None:
        self._session = session
        self._transport = transport
        self._performer = performer
        name = threading.current_thread().name
        self._workers = Workers(name, threads=limits.workers, requests=limits.requests, payload=limits.payload)
        self._sender = Sender(transport, self._workers.settle, broke)
        self._batch = _Batch(self._sender)
        self._buffer = bytearray(_RECEIVE)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._have = 0
        self._payload = bytearray(_RECEIVE)
        self._sendable = session.export.sendable
        self._inline_writes = not session.export.blocking
        # A source with ``sendable`` has said by now which reads need not wait: what is left is absent, or not in the page cache.
        self._inline_reads = self._inline_writes and self._sendable is None
        self._no_wait = os.RWF_NOWAIT
        self._stopping = False

    def stop(self) -> None:
        """End after the requests that have arrived. The caller makes the receiving side of the stream end."""
        self._stopping = True

    def abort(self) -> None:
        """Do not wait for requests in flight any longer. The caller breaks the stream."""
        self._workers.abort()

    def run(self) -> None:
        """Serve until the client leaves or the stream ends. Raises OSError and ProtocolError; what is in flight is finished first in any case."""
        try:
            self._serve()
        finally:
            self._workers.finish()
            self._sender.close()

    def _serve(self) -> None:
        rounds = 0
        while rounds < _LAST_ROUNDS:
            rounds += self._stopping
            count = self._transport.recv_into(self._view[self._have :])
            if count == 0:
                return
            self._have += count
            self._at = 0
            going_on = self._requests()
            self._batch.flush()
            if not going_on:
                return
            rest = self._have - self._at
            if rest:
                self._buffer[:rest] = self._buffer[self._at : self._have]
            self._have = rest

    def _requests(self) -> bool:
        """Take up every whole request in the buffer; False after NBD_CMD_DISC."""
        session = self._session
        size = session.size
        copied = _COPIED if self._sendable is not None and session.export.minimum_block == 1 else -1
        unpack = REQUEST.unpack_from
        while self._have - self._at >= REQUEST.size:
            magic, flags, command, cookie, offset, length = unpack(self._buffer, self._at)
            if magic != NBD_REQUEST_MAGIC:
                raise ProtocolError(f"bad request magic {magic:#x}")
            self._at += REQUEST.size
            # The common case first and without detours: a small read within the export. Everything else is looked at with care below.
            if command == NBD_CMD_READ and flags == 0 and 0 < length <= copied and offset + length <= size:
                if self._read_cached(cookie, offset, length):
                    continue
                self._read(Request(flags, command, cookie, offset, length))
            elif command == NBD_CMD_DISC:
                return False
            else:
                self._request(Request(flags, command, cookie, offset, length))
        return True

    def _request(self, request: Request) -> None:
        refused = refusal(self._session, request)
        if refused is not None:
            if request.command == NBD_CMD_WRITE:
                self._skip(request.length)
            self._batch.append(self._performer.refuse(request, refused))
        elif request.command == NBD_CMD_WRITE:
            self._write(request)
        elif request.command == NBD_CMD_READ:
            if not self._read_local(request):
                self._read(request)
        else:
            self._make_room(0)
            self._submit(request, b"", 0)

    def _read(self, request: Request) -> None:
        """A read through the source: here when that cannot wait, else in a worker."""
        if self._inline_reads:
            self._batch.append(self._performer.perform(request, b""))
        else:
            self._make_room(request.length)
            self._submit(request, b"", request.length)

    def _make_room(self, cost: int) -> None:
        if not self._workers.has_room(cost):
            self._batch.flush()
            self._workers.wait_for_room(cost)

    def _submit(self, request: Request, payload: Buffer, cost: int) -> None:
        def job() -> None:
            if self._sender.broken:  # nobody is there to answer: what was never begun need not be done
                self._workers.settle(cost)
            else:
                self._sender.post(self._performer.perform(request, payload), cost)

        self._workers.submit(cost, job)

    def _read_local(self, request: Request) -> bool:
        """Answer a read from local files; False when that cannot be done at once."""
        if self._sendable is None or request.length == 0:
            return False
        if request.length <= _COPIED:
            return self._read_cached(request.cookie, request.offset, request.length)
        return self._transport.can_send_files and self._read_file(request)

    def _read_cached(self, cookie: int, offset: int, length: int) -> bool:
        """Answer a small read from the page cache of local files; False when the bytes are not there, or not at once."""
        batch = self._batch
        structured = self._session.structured
        head = DATA_CHUNK.size if structured else SIMPLE_REPLY.size
        start = batch.reserve(head + length)
        at = start + head
        try:
            pieces = self._sendable(offset, length) if self._sendable is not None else None
            if pieces is None:
                return False
            for descriptor, position, part in pieces:
                if os.preadv(descriptor.__index__(), [batch.view[at : at + part]], position, self._no_wait) != part:
                    return False
                at += part
        except Exception as error:  # noqa: BLE001 - the slow way meets the same failure, or none, and reports it
            self._note_failure(error)
            return False
        if at - start - head != length:
            return False
        if structured:
            DATA_CHUNK.pack_into(
                batch.slab, start, NBD_STRUCTURED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_REPLY_TYPE_OFFSET_DATA, cookie, length + 8, offset
            )
        else:
            SIMPLE_REPLY.pack_into(batch.slab, start, NBD_SIMPLE_REPLY_MAGIC, 0, cookie)
        batch.end = at
        return True

    def _note_failure(self, error: Exception) -> None:
        """A file system that cannot tell whether a read would wait (FUSE, tmpfs on old kernels) is always left to the workers."""
        if isinstance(error, OSError) and error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            self._sendable = None

    def _read_file(self, request: Request) -> bool:
        """Answer a large read with sendfile; False when the bytes are not in local files, or would have to be waited for."""
        try:
            pieces = self._sendable(request.offset, request.length) if self._sendable is not None else None
            if pieces is None or sum(length for _, _, length in pieces) != request.length or not self._is_cached(pieces):
                return False
        except Exception as error:  # noqa: BLE001 - the slow way meets the same failure, or none, and reports it
            self._note_failure(error)
            return False
        self._batch.flush()
        structured = self._session.structured
        # A data chunk that may still fail is not the final one; in a simple reply a failure can only end the connection.
        header = data_header(request.cookie, request.offset, request.length, structured=structured, done=False)
        good, error_number = self._sender.send_file(header, pieces, pad=structured)
        if error_number:
            self._performer.report(request, OSError(error_number, os.strerror(error_number)))
            self._batch.append([error_offset_chunk(request.cookie, NBD_EIO, request.offset + good)])
        elif structured:
            self._batch.append([done_chunk(request.cookie)])
        return True

    def _is_cached(self, pieces: Sequence[Piece]) -> bool:
        """Whether the ends of the pieces are in the page cache. If not, the whole range is asked for, so that reads in a queue overlap."""
        byte = bytearray(1)
        for descriptor, offset, length in pieces:
            fd = descriptor.__index__()
            for position in (offset, offset + length - 1):
                try:
                    if os.preadv(fd, [byte], position, self._no_wait) == 1:
                        continue
                except BlockingIOError:
                    pass
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
                return False
        return True

    def _write(self, request: Request) -> None:
        if self._inline_writes and not request.flags & NBD_CMD_FLAG_FUA:
            self._batch.append(self._performer.perform(request, self._inline_payload(request.length)))
            return
        self._make_room(request.length)
        payload = bytearray(request.length)
        self._receive(memoryview(payload))
        self._submit(request, payload, request.length)

    def _inline_payload(self, length: int) -> memoryview:
        """A write's data, valid until the next call: where it was received when all of it was, else in a buffer that is used again."""
        if length <= self._have - self._at:
            self._at += length
            return self._view[self._at - length : self._at]
        buffer = bytearray(length) if length > _BATCH_BYTES else self._payload
        if len(buffer) < length:
            buffer = self._payload = bytearray(length)
        view = memoryview(buffer)[:length]
        self._receive(view)
        return view

    def _receive(self, target: memoryview) -> None:
        """Fill ``target`` from the buffer, then from the stream."""
        done = min(len(target), self._have - self._at)
        target[:done] = self._view[self._at : self._at + done]
        self._at += done
        if done < len(target):
            self._batch.flush()
        while done < len(target):
            count = self._transport.recv_into(target[done:])
            if count == 0:
                raise ProtocolError("the stream ends within a write's data")
            done += count

    def _skip(self, length: int) -> None:
        """Receive and forget the data of a refused write, so that the stream stays in step."""
        while length:
            piece = min(length, len(self._payload))
            self._receive(memoryview(self._payload)[:piece])
            length -= piece
