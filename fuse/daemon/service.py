"""What the daemon answers on its control socket: requests in, calls of the manager, values out."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from dsec_layers.cache.segments import SegmentCache
from dsec_layers.errors import Conflict, UsageError
from dsec_layers.fuse.client.control import VERSION, Message
from dsec_layers.fuse.client.controlserver import MessageServer, Reply
from dsec_layers.fuse.daemon.requests import a_digest, a_flag, a_holder, a_segment, a_text, digests
from dsec_layers.fuse.events.serve import EventServer
from dsec_layers.fuse.mounts.layers import LayerMounts
from dsec_layers.fuse.mounts.manager import Manager
from dsec_layers.linux.process import mount_namespace

__all__ = ["Service"]

_Handler = Callable[[Message], Any]
_SILENCE: Final = 600.0
"""Seconds after which a connection that asks nothing is closed."""


class Service:
    """Answers control connections. ``pick``: the driver for a request that names none (raises if the named one cannot work here)."""

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
            "open": self._open,
            "umount": self._umount,
            "mounts": self._list_mounts,
            "show": self._show,
            "clear": self._clear,
            "stop": self._stop_daemon,
        }
        self._server = MessageServer(listening, self._answer, greeting=self._greeting, silence=_SILENCE)

    def start(self) -> None:
        """Accept connections in a thread."""
        self._server.start()

    def end_if_quiet(self, seconds: float, is_idle: Callable[[], bool]) -> bool:
        """See MessageServer."""
        return self._server.end_if_quiet(seconds, is_idle)

    def finish(self, seconds: float) -> None:
        """See MessageServer."""
        self._server.finish(seconds)

    def _greeting(self) -> Message:
        return {"version": VERSION, "pid": os.getpid(), "warnings": self._warnings(), "namespace": self._namespace}

    def _answer(self, message: Message) -> Any:
        operation = str(message.get("op"))
        handler = self._handlers.get(operation)
        if handler is None:
            raise UsageError(f"this daemon does not know the request {operation!r}", hint="stop the daemon: it is older than this program")
        return handler(message)

    def _attach(self, message: Message) -> Message:
        identifier, store, layers = a_text(message, "identifier", least=1), a_text(message, "store", least=1), digests(message, "layers")
        holder = a_holder(message, "holder")
        driver = self._pick(a_text(message, "driver"))
        self._same_namespace(message)
        paths = self._manager.attach(identifier, store, layers, holder, driver)
        return {"paths": [str(path) for path in paths]}

    def _release(self, message: Message) -> None:
        self._manager.release(a_text(message, "identifier"))

    def _mount(self, message: Message) -> Reply:
        store, digest = a_text(message, "store", least=1), a_digest(message, "digest")
        target, label = a_text(message, "target", least=1), a_text(message, "label")
        driver = self._pick(a_text(message, "driver"))
        self._same_namespace(message)
        record = self._manager.mount(store, digest, target, label, driver)
        return Reply(asdict(record), then=lambda: self._manager.answered(record.identifier))

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

    def _stop_daemon(self, message: Message) -> Reply:
        mounts, leases = self._manager.mounts(), self._manager.leases()
        if a_flag(message, "force"):
            self._manager.release_all()
        elif mounts or len(leases) > len(mounts):
            raise Conflict(
                f"{len(mounts)} mounts and {len(leases) - len(mounts)} other leases are held", hint="unmount them first, or stop with force"
            )
        else:
            self._manager.release_all()
        return Reply(then=self._stop)

    def _open(self, message: Message) -> Reply:
        """The only request that is answered with a descriptor: a complete segment."""
        return Reply(fds=(self._cache.open(a_segment(message, "piece")),))

    def _same_namespace(self, message: Message) -> None:
        if message["namespace"] != self._namespace:
            raise UsageError(
                "the daemon mounts in another mount namespace than this process's", hint="use a cache (and so a daemon) of its own here"
            )
