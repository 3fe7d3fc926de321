"""One client from connecting to leaving: handshake, transmission, farewell. Whatever the client does, only its own connection ends."""

from __future__ import annotations

import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
import time
import traceback
from collections.abc import Mapping

from dsec_layers.fuse.nbd.exports import Export
from dsec_layers.fuse.nbd.negotiation import Negotiation, Next, Session, TlsMode
from dsec_layers.fuse.nbd.perform import Performer
from dsec_layers.fuse.nbd.protocol import MAX_OPTION, OPTION, ProtocolError, greeting, parse_client_flags, parse_option
from dsec_layers.fuse.nbd.transmission import Limits, Transmission
from dsec_layers.fuse.nbd.transport import PlainTransport, TlsTransport, Transport
from dsec_layers.progress import Progress

__all__ = ["Connection"]

_SEND_BUFFER = 1 << 20
_FAREWELL_SECONDS = 5.0


class _Deadline:
    """Keeps the sum of a handshake's waits under a bound, however slowly the client speaks."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._socket = sock
        self._end = time.monotonic() + seconds

    def arm(self) -> None:
        """Give the next operation what is left. Raises TimeoutError when nothing is."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        self._socket.settimeout(left)


class Connection:
    """A client's connection; ``run`` is the body of its thread, the other methods may be called from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        exports: Mapping[str, Export],
        *,
        mode: TlsMode,
        context: ssl.SSLContext | None,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self._socket = sock
        self._exports = exports
        self._mode = mode
        self._context = context
        self._limits = limits
        self._progress = progress
        self._deadline = _Deadline(sock, limits.handshake_seconds)
        self._transport: Transport = PlainTransport(sock)
        self._negotiation: Negotiation | None = None
        self._transmission: Transmission | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._finished = False
        self._dropped = False

    def run(self) -> None:
        """Serve the client until it leaves, breaks the rules, or is told to."""
        try:
            self._tune()
            session = self._handshake()
            if session is not None:
                self._transmit(session)
            self._farewell()
        except (OSError, ProtocolError) as error:
            self._progress.debug(f"NBD: a connection ended: {error}")
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, only this client's connection ends
            self._progress.warning(f"NBD: a connection failed: {error}\n" + "".join(traceback.format_exception(error)))
        finally:
            self._socket.close()
            self._transmission = None  # it refers to this object: its buffers are freed now, not when garbage is collected

    def stop(self) -> None:
        """Answer what has arrived, then end."""
        self._stopping = True
        if self._negotiation is not None:
            self._negotiation.stopping = True
        transmission = self._transmission
        if transmission is not None:
            transmission.stop()
        self._shutdown(socket.SHUT_RD)

    def make_room(self) -> bool:
        """End at once if the handshake is not finished; whether that was so (also: by an earlier call). A client that has finished it is left alone."""
        with self._lock:
            if self._finished:
                return False
            self._dropped = True
        self._cut()
        return True

    def abort(self) -> None:
        """End without waiting for anything."""
        transmission = self._transmission
        if transmission is not None:
            transmission.abort()
        self._cut()

    def _cut(self) -> None:
        self._shutdown(socket.SHUT_RDWR)

    def _shutdown(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            pass  # it has ended by itself

    def _tune(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _handshake(self) -> Session | None:
        """Agree on an export; None when the client leaves, or has to."""
        self._send(greeting())
        fixed, no_zeroes = parse_client_flags(self._receive(4))
        negotiation = Negotiation(self._exports, self._mode, fixed=fixed, no_zeroes=no_zeroes)
        self._negotiation = negotiation
        negotiation.stopping = self._stopping
        while True:
            option, length = parse_option(self._receive(OPTION.size))
            reply, then = negotiation.answer(option, self._option_data(length))
            if then is Next.TRANSMISSION:
                self._finish_handshake()  # before the reply: whom it reaches has a place
            if reply:
                self._send(reply)
            if then is Next.TLS:
                self._start_tls()
                negotiation.secured()
            elif then is Next.TRANSMISSION:
                return negotiation.session
            elif then is Next.CLOSE:
                return None

    def _finish_handshake(self) -> None:
        with self._lock:
            if self._dropped:
                raise ProtocolError("the client had to make room during the handshake")
            self._finished = True

    def _start_tls(self) -> None:
        """Nothing of the clear text can have been received beyond the option: the handshake never reads ahead."""
        assert self._context is not None
        transport = TlsTransport(self._socket, self._context)
        transport.handshake(self._deadline.arm)
        self._transport = transport

    def _transmit(self, session: Session) -> None:
        self._socket.settimeout(None)
        performer = Performer(session, self._progress)
        self._transmission = Transmission(session, self._transport, self._limits, performer, self._cut)
        if self._stopping:
            self._transmission.stop()
        self._transmission.run()

    def _option_data(self, length: int) -> bytes | None:
        if length <= MAX_OPTION:
            return self._receive(length)
        while length:
            length -= len(self._receive(min(length, MAX_OPTION)))
        return None

    def _receive(self, length: int) -> bytes:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            self._deadline.arm()
            count = self._transport.recv_into(view)
            if count == 0:
                raise ProtocolError("the client left during the handshake")
            view = view[count:]
        return bytes(buffer)

    def _send(self, data: bytes) -> None:
        self._deadline.arm()
        self._transport.send([data])

    def _farewell(self) -> None:
        self._socket.settimeout(_FAREWELL_SECONDS)
        self._transport.finish()
        if self._stopping and self._socket.family != socket.AF_UNIX:
            self._wait_until_sent()

    def _wait_until_sent(self) -> None:
        """Closing a TCP socket that holds unread data drops what was not sent yet: first let the client's kernel have all replies."""
        self._socket.shutdown(socket.SHUT_WR)
        end = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < end and struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0]:
            select.select([], [], [], 0.005)
