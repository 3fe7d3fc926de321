"""The serving side of the control protocol (fuse/client/control.py): connections in, one function's answers out."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dsec_layers.errors import DsecError, HostError, UsageError
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.control import Message, close_all, error_message, receive, send

__all__ = ["MessageServer", "Reply"]

_log = logging.getLogger(__name__)
_PAUSE: Final = 0.1
_ROOT: Final = 0
_REFUSAL: Final = 1.0
"""Seconds for which a refused client may say what it wanted: closing at once could take the refusal from it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with descriptors, which are closed once they are sent, and with what is to be done ``then``: when the answer is on its way, not if it cannot be."""

    value: Any = None
    fds: tuple[int, ...] = ()
    then: Callable[[], None] = lambda: None


class MessageServer:
    """Serves control connections, each in a thread of its own: of the user this process runs as, and of root. Others are refused.

    ``answer`` gives what a request is answered with: a value, or a Reply. The DsecErrors that it raises go to the client; KeyError, TypeError and
    ValueError are taken for an improper request. ``greeting``: what is said first, if anything. ``silence``: seconds after which a connection that asks
    nothing is closed. The listening socket is this object's to close.
    """

    def __init__(
        self,
        listening: socket.socket,
        answer: Callable[[Message], Any],
        *,
        greeting: Callable[[], Message] | None = None,
        silence: float | None = None,
    ) -> None:
        self._listening = listening
        self._answer = answer
        self._greeting = greeting
        self._silence = silence
        self._lock = threading.Lock()
        self._active = 0
        self._ending = False
        self._closed = False
        self._last_request = time.monotonic()

    def start(self) -> None:
        """Accept connections in a thread."""
        self._listening.setblocking(False)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; nobody can who shares the listening socket. Those that are open are served on."""
        self._closed = True
        self._listening.shutdown(socket.SHUT_RDWR)  # the thread that accepts wakes up, and closes it

    def end_if_quiet(self, seconds: float, is_idle: Callable[[], bool]) -> bool:
        """Answer no more requests, if none was made for so long and nothing is held; whether that is so. Who asks all the same is cut off, and asks again."""
        with self._lock:
            if self._active or time.monotonic() - self._last_request < seconds or not is_idle():
                return False
            self._ending = True
            return True

    def finish(self, seconds: float) -> None:
        """Answer no more requests; wait so long for the answers to those that were made."""
        due = time.monotonic() + seconds
        with self._lock:
            self._ending = True
        while self._active and time.monotonic() < due:
            time.sleep(0.005)

    def _accept(self) -> None:
        poll = select.poll()  # select() knows no descriptor above 1023, and a daemon has those
        poll.register(self._listening, select.POLLIN)
        while True:
            poll.poll()
            if self._closed:  # seen before accepting: a socket that was shut down is always ready, and says EAGAIN
                self._listening.close()
                return
            try:
                channel, _ = self._listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                _log.error("cannot accept a connection: %s", error)
                time.sleep(_PAUSE)  # out of descriptors: let some connections end
                continue
            try:
                threading.Thread(target=self._converse, args=(channel,), name="control", daemon=True).start()
            except RuntimeError as error:  # no thread to be had: this client is cut off, the next may be luckier
                _log.error("cannot serve a connection: %s", error)
                channel.close()

    def _converse(self, channel: socket.socket) -> None:
        try:
            with channel:
                if control.peer_uid(channel) not in (os.geteuid(), _ROOT):
                    _refuse(channel)
                    return
                channel.settimeout(self._silence)
                if self._greeting is not None:
                    send(channel, self._greeting())
                while (received := receive(channel)) is not None:
                    message, fds = received
                    close_all(fds)  # no request brings any
                    with self._lock:
                        if self._ending:
                            return
                        self._active += 1
                    try:
                        self._serve(channel, message)
                    finally:
                        with self._lock:
                            self._active -= 1
                            self._last_request = time.monotonic()
        except (OSError, ValueError) as error:
            _log.debug("a control connection ended: %s", error)

    def _serve(self, channel: socket.socket, message: Message) -> None:
        operation = str(message.get("op"))[:40]
        try:
            answer = self._answer(message)
        except DsecError as error:
            send(channel, error_message(error))
        except (KeyError, TypeError, ValueError) as error:
            send(channel, error_message(UsageError(f"improper request {operation!r}: {error!r}")))
        except Exception as error:  # noqa: BLE001 - the client must hear of it
            _log.exception("unexpected failure in %s", operation)
            send(channel, error_message(DsecError(f"{operation} failed in the server: {error!r}", hint="its log says where")))
        else:
            reply = answer if isinstance(answer, Reply) else Reply(answer)
            try:
                send(channel, {"ok": reply.value}, reply.fds)
            finally:
                close_all(reply.fds)
            reply.then()


def _refuse(channel: socket.socket) -> None:
    channel.settimeout(_REFUSAL)
    refusal = HostError(f"this server belongs to another user (uid {os.geteuid()})", hint="ask as that user, or as root")
    send(channel, error_message(refusal))
    with suppress(OSError, ValueError):
        close_all((receive(channel) or ({}, []))[1])
