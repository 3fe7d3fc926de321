"""The daemon's side of the control protocol: connections in, calls of the manager, answers out."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from dsec_layers.cache.segments import SegmentCache
from dsec_layers.errors import Conflict, DsecError, UsageError
from dsec_layers.fuse.control import VERSION, Message, close_all, error_message, peer_uid, receive, send
from dsec_layers.fuse.events import EventServer
from dsec_layers.fuse.layers import LayerMounts
from dsec_layers.fuse.manager import Manager
from dsec_layers.fuse.requests import a_digest, a_flag, a_holder, a_piece, a_text, digests
from dsec_layers.linux.process import mount_namespace

__all__ = ["Service"]

_log = logging.getLogger(__name__)

_Handler = Callable[[Message], Any]
_SILENCE: Final = 600.0
"""Seconds after which a connection that asks nothing is closed."""


class Service:
    """Serves control connections, each in a thread of its own. ``pick``: the driver for a request that names none (raises if the named one cannot work here)."""

    def __init__(
        self,
        listening: socket.socket,
        manager: Manager,
        layers: LayerMounts,
        cache: SegmentCache,
        events: EventServer | None,
        pick: Callable[[str], str],
        stop: Callable[[], None],
        warnings: Callable[[], list[str]],
    ) -> None:
        self._listening = listening
        self._manager = manager
        self._layers = layers
        self._cache = cache
        self._events = events
        self._pick = pick
        self._stop = stop
        self._warnings = warnings
        self._began = time.time()
        self._namespace = mount_namespace()
        self._handlers: dict[str, _Handler] = {
            "attach": self._attach,
            "release": self._release,
            "mount": self._mount,
            "umount": self._umount,
            "mounts": self._list_mounts,
            "show": self._show,
            "clear": self._clear,
            "stop": self._stop_daemon,
        }
        self._lock = threading.Lock()
        self._active = 0
        self._ending = False
        self._last_request = time.monotonic()

    def start(self) -> None:
        """Accept connections in a thread."""
        self._listening.setblocking(False)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def end_if_quiet(self, seconds: float, is_idle: Callable[[], bool]) -> bool:
        """Answer no more requests, if none was made for so long and nothing is held; whether that is so. Who asks all the same is cut off, and asks again."""
        with self._lock:
            if self._active or time.monotonic() - self._last_request < seconds or not is_idle():
                return False
            self._ending = True
            return True

    def _accept(self) -> None:
        while True:
            select.select([self._listening], [], [])
            try:
                channel, _ = self._listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                _log.error("cannot accept a connection: %s", error)
                time.sleep(0.1)  # out of descriptors: let some connections end
                continue
            threading.Thread(target=self._converse, args=(channel,), name="control", daemon=True).start()

    def _converse(self, channel: socket.socket) -> None:
        try:
            with channel:
                channel.settimeout(_SILENCE)
                if peer_uid(channel) != os.geteuid():
                    return
                send(channel, {"version": VERSION, "pid": os.getpid(), "warnings": self._warnings(), "namespace": self._namespace})
                while (received := receive(channel)) is not None:
                    message, fds = received
                    close_all(fds)  # no request brings any
                    with self._lock:
                        if self._ending:
                            return
                        self._active += 1
                    try:
                        self._answer(channel, message)
                    finally:
                        with self._lock:
                            self._active -= 1
                            self._last_request = time.monotonic()
        except (OSError, ValueError) as error:
            _log.debug("a control connection ended: %s", error)

    def _answer(self, channel: socket.socket, message: Message) -> None:
        operation = str(message.get("op"))
        try:
            if operation == "open":
                self._open(channel, message)
                return
            handler = self._handlers.get(operation)
            if handler is None:
                raise UsageError(
                    f"this daemon does not know the request {operation!r}", hint="stop the daemon: it is older than this program"
                )
            answer = {"ok": handler(message)}
        except DsecError as error:
            answer = error_message(error)
        except (KeyError, TypeError, ValueError) as error:
            answer = error_message(UsageError(f"improper request {operation!r}: {error!r}"))
        except Exception as error:  # noqa: BLE001 - the client must hear of it
            _log.exception("unexpected failure in %s", operation)
            answer = error_message(DsecError(f"{operation} failed in the daemon: {error!r}", hint="see daemon.log in the cache directory"))
        send(channel, answer)
        if operation == "mount" and "ok" in answer:
            self._manager.answered(answer["ok"]["identifier"])
        if operation == "stop" and "ok" in answer:
            self._stop()

    def _attach(self, message: Message) -> Message:
        identifier, store, layers = a_text(message, "identifier", least=1), a_text(message, "store", least=1), digests(message, "layers")
        holder = a_holder(message, "holder")
        driver = self._pick(a_text(message, "driver"))
        self._same_namespace(message)
        paths = self._manager.attach(identifier, store, layers, holder, driver)
        return {"paths": [str(path) for path in paths]}

    def _release(self, message: Message) -> None:
        self._manager.release(a_text(message, "identifier"))

    def _mount(self, message: Message) -> Message:
        store, digest = a_text(message, "store", least=1), a_digest(message, "digest")
        target, label = a_text(message, "target", least=1), a_text(message, "label")
        driver = self._pick(a_text(message, "driver"))
        self._same_namespace(message)
        record = self._manager.mount(store, digest, target, label, driver)
        return asdict(record)

    def _umount(self, message: Message) -> None:
        self._manager.umount(a_text(message, "target", least=1), lazy=a_flag(message, "lazy"))

    def _list_mounts(self, _: Message) -> list[Message]:
        return [asdict(record) for record in self._manager.mounts()]

    def _show(self, _: Message) -> Message:
        self._manager.sweep()
        usage = self._cache.usage()
        return {
            "segments": usage.segments,
            "bytes": usage.bytes,
            "layers": [
                {"digest": use.digest, "store": use.store, "driver": use.driver, "path": str(path), "users": users, "segments": segments}
                for use, path, users, segments in self._layers.rows()
            ],
            "leases": [asdict(lease) for lease in self._manager.leases()],
            "counters": asdict(self._cache.counters()),
            "events": self._events.events if self._events else 0,
            "since": self._began,
            "pid": os.getpid(),
            "keeper": os.getppid(),
            "warnings": self._warnings(),
        }

    def _clear(self, _: Message) -> Message:
        usage = self._manager.clear()
        return {"segments": usage.segments, "bytes": usage.bytes}

    def _stop_daemon(self, message: Message) -> None:
        mounts, leases = self._manager.mounts(), self._manager.leases()
        if a_flag(message, "force"):
            self._manager.release_all()
        elif mounts or len(leases) > len(mounts):
            raise Conflict(
                f"{len(mounts)} mounts and {len(leases) - len(mounts)} other leases are held", hint="unmount them first, or stop with force"
            )
        else:
            self._manager.release_all()

    def _open(self, channel: socket.socket, message: Message) -> None:
        """The only request that is answered with a descriptor: a complete segment."""
        fd = self._cache.open(a_piece(message, "piece"))
        try:
            with suppress(BrokenPipeError):
                send(channel, {"ok": None}, [fd])
        finally:
            os.close(fd)

    def _same_namespace(self, message: Message) -> None:
        if message["namespace"] != self._namespace:
            raise UsageError(
                "the daemon mounts in another mount namespace than this process's", hint="use a cache (and so a daemon) of its own here"
            )
