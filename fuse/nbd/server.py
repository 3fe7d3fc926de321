"""The server: listens, gives each client a thread, stops without dropping what it has taken on.

Life cycle::

    Server(...)  checks its arguments, reads certificates and keys; nothing is open yet
        |
    start()      binds and listens: clients can connect from here on
        |            each client: handshake -> transmission -> end
    stop()       no new clients; requests that have arrived are answered; connections end, at the latest after the grace time
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.parse import quote

from dsec_layers.errors import UsageError
from dsec_layers.fuse.nbd.connection import Connection
from dsec_layers.fuse.nbd.exports import Export, export_table
from dsec_layers.fuse.nbd.listen import listen_tcp, listen_unix, remove_socket, socket_identity
from dsec_layers.fuse.nbd.negotiation import TlsMode
from dsec_layers.fuse.nbd.tls import Tls
from dsec_layers.fuse.nbd.transmission import Limits
from dsec_layers.progress import SILENT, Progress

__all__ = ["Server", "serve"]

_ACCEPT_PAUSE = 0.1
_ABORT_SECONDS = 2.0
_TRANSIENT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """Serves exports over NBD on a Unix socket or a TCP port.

    Give ``unix``, the path of the socket (mode 0600), or ``port`` (0 lets the kernel choose). Addresses other than the loopback's are refused
    unless TLS is required. ``read_only`` makes every export read-only. The sources stay the caller's, who closes them after ``stop``.
    Used as a context manager it starts and stops.
    """

    def __init__(
        self,
        exports: Iterable[Export],
        *,
        unix: Path | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        tls: Tls | None = None,
        read_only: bool = False,
        limits: Limits | None = None,
        progress: Progress = SILENT,
    ) -> None:
        if (unix is None) == (port is None):
            raise UsageError("an NBD server listens either on a Unix socket or on a port")
        self._exports = export_table(replace(export, read_only=True) if read_only else export for export in exports)
        self._mode = tls.mode if tls is not None else TlsMode.OFF
        self._context = tls.context() if tls is not None and tls.mode is not TlsMode.OFF else None
        self._unix = unix
        self._host = host
        self._port = port
        self._limits = limits or Limits()
        self._progress = progress
        self._listener: socket.socket | None = None
        self._identity = (0, 0)
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}  # in the order of their coming
        self._leaving: dict[threading.Thread, Connection] = {}  # those that had to make room, whose threads are about to end
        self._ending: list[threading.Thread] = []  # of connections that are over
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def address(self) -> Path | tuple[str, int]:
        """Where the server listens: the socket's path, or host and port. Valid after ``start``."""
        if self._unix is not None:
            return self._unix
        if self._listener is None:
            raise UsageError("the NBD server is not listening")
        host, port, *_ = self._listener.getsockname()
        return host, port

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._connections)

    def uri(self, export: str = "") -> str:
        """The NBD URI of an export (as libnbd, QEMU and nbdkit write them)."""
        scheme = "nbds" if self._mode is TlsMode.REQUIRE else "nbd"
        address = self.address
        if isinstance(address, Path):
            return f"{scheme}+unix:///{quote(export, safe='')}?socket={quote(str(address.absolute()))}"
        host, port = address
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{quote(export, safe='')}"

    def start(self) -> None:
        """Listen. Raises UsageError, Conflict or HostError when that cannot be done at the given address."""
        if self._listener is not None or self._stopping.is_set():
            raise UsageError("an NBD server starts once")
        if self._unix is not None:
            self._listener = listen_unix(self._unix)
            self._identity = socket_identity(self._unix)
        else:
            self._listener = listen_tcp(self._host, self._port or 0, anywhere=self._mode is TlsMode.REQUIRE)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), name="nbd-accept", daemon=True)
        self._acceptor.start()

    def stop(self, grace: float = 10.0) -> bool:
        """Stop: no new clients, answers for what has arrived, then the end of every connection.

        Connections that are not done after ``grace`` seconds are cut. Returns whether none had to be; if so nobody uses the sources any more, else a
        call into a source may still be going on. Calling it again does nothing.
        """
        self._stopping.set()
        listener, self._listener = self._listener, None
        if listener is None or self._acceptor is None:
            return True
        if self._unix is not None:
            remove_socket(self._unix, self._identity)
        listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        listener.close()
        with self._lock:
            open_connections = self._connections | self._leaving
            threads = [*open_connections, *self._ending]
        for connection in open_connections.values():
            connection.stop()
        if _join(threads, time.monotonic() + grace):
            return True
        for thread, connection in open_connections.items():
            if thread.is_alive():
                connection.abort()
        _join(threads, time.monotonic() + _ABORT_SECONDS)
        return False

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                if error.errno in _TRANSIENT:
                    self._progress.warning(f"NBD: cannot accept a client: {error}")
                    self._stopping.wait(_ACCEPT_PAUSE)
                continue
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        connection = Connection(sock, self._exports, mode=self._mode, context=self._context, limits=self._limits, progress=self._progress)
        thread = threading.Thread(target=self._run, args=(connection,), name="nbd-client", daemon=True)
        with self._lock:
            self._ending = [ending for ending in self._ending if ending.is_alive()]
            room = len(self._connections) < self._limits.connections or self._make_room()
            if room:
                self._connections[thread] = connection
        if not room:
            self._progress.warning(f"NBD: a client was turned away, {self._limits.connections} are connected")
            sock.close()
            return
        try:
            thread.start()
        except RuntimeError as error:
            self._progress.warning(f"NBD: a client was turned away: {error}")
            with self._lock:
                del self._connections[thread]
            sock.close()

    def _make_room(self) -> bool:
        """Drop the client that has been at its handshake for longest; under the lock. False if all have finished theirs, who keep their places."""
        for thread, connection in self._connections.items():
            if connection.make_room():
                del self._connections[thread]
                self._leaving[thread] = connection
                return True
        return False

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:  # not forgotten yet: this thread refers to the sources up to its very end, for which ``stop`` waits
                me = threading.current_thread()
                self._connections.pop(me, None)
                self._leaving.pop(me, None)
                self._ending.append(me)


def serve(
    exports: Iterable[Export],
    *,
    unix: Path | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    tls: Tls | None = None,
    read_only: bool = False,
    limits: Limits | None = None,
    progress: Progress = SILENT,
    grace: float = 10.0,
    ready: Callable[[Server], None] = lambda server: None,
) -> bool:
    """Serve in the foreground until SIGTERM or SIGINT, then stop gracefully; for the main thread of a program.

    ``ready`` is called once clients can connect. A second signal has its usual effect. Returns what ``Server.stop`` returns.
    """
    server = Server(exports, unix=unix, host=host, port=port, tls=tls, read_only=read_only, limits=limits, progress=progress)
    with _signals(signal.SIGTERM, signal.SIGINT) as event:
        try:
            server.start()
            ready(server)
            select.select([event], [], [])
        finally:
            done = server.stop(grace)
    return done


@contextmanager
def _signals(*numbers: signal.Signals) -> Iterator[int]:
    """An eventfd that becomes readable with the first of the signals, which from then on act as before.

    The handler only writes to a descriptor: a lock taken in a handler could be held by the very code that it interrupted.
    """
    event = os.eventfd(0, os.EFD_CLOEXEC)
    before: dict[signal.Signals, object] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def handle(number: int, frame: FrameType | None) -> None:
        os.eventfd_write(event, 1)
        restore()

    try:
        for number in numbers:
            before[number] = signal.signal(number, handle)
        yield event
    finally:
        restore()
        os.close(event)


def _join(threads: Iterable[threading.Thread], deadline: float) -> bool:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
