"""A connection's byte stream, in clear or over TLS.

One thread receives; any thread may send while it holds the connection's send lock (sender.py), so that messages are never mixed.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from dsec_layers.digest import Buffer

__all__ = ["PlainTransport", "TlsTransport", "Transport"]

_RECORDS = 1 << 18
"""Clear text encrypted before it is sent on, so that a large reply is not held twice."""


class Transport(Protocol):
    """What the protocol needs of a stream. Every method raises OSError when the stream is broken."""

    @property
    def can_send_files(self) -> bool:
        """Whether ``send_file`` works here."""

    def recv_into(self, buffer: memoryview) -> int:
        """Bytes received, at least one; 0 at the end of the stream."""

    def send(self, parts: Sequence[Buffer], *, more: bool = False) -> None:
        """Send all bytes of all parts, at most 1024 of them. ``more`` says that something follows at once."""

    def send_file(self, fd: int, offset: int, length: int) -> tuple[int, int]:
        """Send a range of a file. Returns (bytes sent, errno of the failed file read or 0); fewer bytes and 0: the file ends there."""

    def finish(self) -> None:
        """Say goodbye, as far as the protocol below has a word for it."""


class PlainTransport:
    """The socket itself."""

    can_send_files = True

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.recv_into = sock.recv_into

    def send(self, parts: Sequence[Buffer], *, more: bool = False) -> None:
        """See Transport."""
        flags = socket.MSG_MORE if more else 0
        if len(parts) == 1:
            sent = self._socket.send(parts[0], flags)
        else:
            sent = self._socket.sendmsg(parts, (), flags)
        if sent != sum(map(len, parts)):
            self._send_rest(parts, sent, flags)

    def _send_rest(self, parts: Sequence[Buffer], sent: int, flags: int) -> None:
        for part in parts:
            view = memoryview(part)[sent:]
            sent = max(0, sent - len(part))
            while view:
                view = view[self._socket.send(view, flags) :]

    def send_file(self, fd: int, offset: int, length: int) -> tuple[int, int]:
        """See Transport."""
        out = self._socket.fileno()
        done = 0
        while done < length:
            try:
                sent = os.sendfile(out, fd, offset + done, length - done)
            except ConnectionError:
                raise
            except OSError as error:
                return done, error.errno or 0
            if sent == 0:
                break
            done += sent
        return done, 0

    def finish(self) -> None:
        """See Transport."""


class TlsTransport:
    """TLS over the socket.

    The engine works on memory under its own lock, and the socket is used outside of it: one thread can wait for data while another sends,
    which an ssl.SSLSocket does not allow. Answers of the engine to what it received (a key update) leave with the next message.
    """

    can_send_files = False

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._socket = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._lock = threading.Lock()
        self._cipher = bytearray(1 << 16)

    def handshake(self, arm: Callable[[], None]) -> None:
        """Agree with the client on keys. ``arm`` is called before each step that may wait, to set the socket's time-out or raise."""
        while True:
            arm()
            try:
                self._engine.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill():
                    raise ConnectionError("the client left during the TLS handshake") from None
            except ssl.SSLError:
                self._flush()  # the alert that tells the client why
                raise
            else:
                self._flush()
                return

    def recv_into(self, buffer: memoryview) -> int:
        """See Transport."""
        while True:
            with self._lock:
                try:
                    return int(self._engine.read(len(buffer), buffer))
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            if not self._fill():
                return 0  # without close_notify; the protocol above knows where its messages end

    def send(self, parts: Sequence[Buffer], *, more: bool = False) -> None:
        """See Transport."""
        for part in parts:
            view = memoryview(part)
            while view:
                with self._lock:
                    taken = self._engine.write(view[:_RECORDS])
                view = view[taken:]
                if self._outgoing.pending >= _RECORDS:
                    self._flush()
        self._flush()

    def send_file(self, fd: int, offset: int, length: int) -> tuple[int, int]:
        """See Transport."""
        raise OSError("files cannot be sent over TLS without a copy")

    def finish(self) -> None:
        """See Transport."""
        with self._lock:
            try:
                self._engine.unwrap()
            except ssl.SSLError:
                pass
        self._flush()

    def _fill(self) -> bool:
        count = self._socket.recv_into(self._cipher)
        with self._lock:
            self._incoming.write(memoryview(self._cipher)[:count])
        return count > 0

    def _flush(self) -> None:
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._socket.sendall(data)
