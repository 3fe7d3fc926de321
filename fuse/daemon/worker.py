"""The worker: everything the daemon does apart from staying alive (fuse/events/keeper.py starts it, and it becomes the keeper if that dies).

    events thread ──> fetcher threads ──> answers to the kernel
    control thread ─> one thread a connection ──> manager ──> mounts
    main thread: waits for a signal, for the keeper's death, for the next sweep

Nothing here reads through the daemon's own mounts.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import logging.handlers
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from dsec_layers.cache.directory import CacheDirectory, note_holder
from dsec_layers.cache.fetch import Fetcher, FetchLimits
from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.cache.pages import PageDropper
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.cache.stock import Stock
from dsec_layers.errors import DsecError, HostError
from dsec_layers.fuse.client.options import Options
from dsec_layers.fuse.daemon.service import Service
from dsec_layers.fuse.events.keeper import EXIT_PARKED, EXIT_STOPPED, Hand, become_keeper, notify
from dsec_layers.fuse.events.probe import fails_closed
from dsec_layers.fuse.events.serve import EventServer
from dsec_layers.fuse.mounts.aftermath import remember_holes, warnings_of
from dsec_layers.fuse.mounts.layers import LayerMounts, Mounter, Stores
from dsec_layers.fuse.mounts.manager import Manager
from dsec_layers.fuse.records import Records
from dsec_layers.fuse.server.mount import FlatMounter
from dsec_layers.linux.mount import mount_erofs
from dsec_layers.linux.mountinfo import read_mounts
from dsec_layers.linux.process import set_descriptor_limit, set_oom_score

__all__ = ["main"]

_log = logging.getLogger(__name__)

_LOG_BYTES: Final = 1 << 20
_SWEEP: Final = 5.0
_DROP_ALL: Final = 20
"""All pages that are cached twice are given back after so many times ``--drop``, too: a reader may have been slower than the first time."""
_LAST_ANSWERS: Final = 5.0
"""Seconds to answer requests that are under way when the daemon ends."""
_DESCRIPTORS: Final = 65_536
_PR_SET_NAME: Final = 15


def main(spec: dict[str, Any]) -> int:
    """Run until told to stop; returns the exit code for the keeper. ``spec`` as in fuse/events/keeper.py, with ``cache`` (path), ``options``, ``unusable``, ``aftermath``."""
    keeper = os.getppid()
    set_oom_score(0)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"dsec-worker", 0, 0, 0)
    _open_log(Path(spec["log"]))
    note_holder(spec["lock"], keeper)
    try:
        return _Worker(spec, keeper).run()
    except DsecError as error:
        _log.error("%s", error.message)
        sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the keeper starts another; why must be in the log
        _log.exception("the worker failed")
    return 1


class _Worker:
    def __init__(self, spec: dict[str, Any], keeper: int) -> None:
        self._spec = spec
        self._keeper = os.pidfd_open(keeper)
        if os.getppid() != keeper:
            raise HostError("the keeper died while the worker started")
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self._fetched = -1
        signal.signal(signal.SIGTERM, self._on_signal)
        descriptors = set_descriptor_limit(_DESCRIPTORS)
        self._options = options = Options(**spec["options"])
        self._directory = CacheDirectory(Path(spec["cache"]), lock_fd=spec["lock"])
        self._fetcher = Fetcher(Stores().get, FetchLimits(fetches=options.fetches, deadline=options.deadline))
        holes = spec["group"] >= 0 and (options.holes or not fails_closed(self._directory))
        remember_holes(self._directory, holes)
        self._stock = Stock(self._directory) if spec["group"] >= 0 and not holes else None
        self._cache = SegmentCache(self._directory, self._fetcher, holes=holes, stock=self._stock)
        records = Records(self._directory.state, self._directory.boot)
        self._flat = FlatMounter(self._directory.root)
        mounters: dict[str, Mounter] = {"fuse": self._flat}
        if spec["group"] >= 0:
            mounters["fanotify"] = _DeviceMounter(self._cache, options.direct)
        self._cache.make_room = self._make_room
        self._dropper = PageDropper(self._directory, options.drop)
        self._cache.published = self._dropper.later
        self._pause = max(options.drop, 0.05)
        self._next_drop = time.monotonic() + _DROP_ALL * self._pause
        self._layers = LayerMounts(self._directory, self._cache, records, mounters, linger=options.linger)
        self._manager = Manager(self._directory, self._cache, records, self._layers)
        self._events: EventServer | None = None
        if spec["group"] >= 0:
            self._events = EventServer(spec["group"], Hand(spec["hand"]), self._cache, self._layers.find, descriptors=descriptors)
        listening = socket.socket(fileno=os.dup(spec["listen"]))
        self._service = Service(listening, self._manager, self._layers, self._cache, self._events, self._pick, self._stop, self._warnings)

    def run(self) -> int:
        """Serve until stopped."""
        aftermath = self._spec["aftermath"]
        self._manager.recover(poisoned=aftermath.get("holes", False))
        # Mounts are poisoned once: a worker that follows this one finds that in the records.
        self._spec["aftermath"] = {**aftermath, "holes": False, "orphans": []} if aftermath.get("holes") else aftermath
        for warning in self._warnings():
            _log.error("%s", warning)
        if self._events is not None:
            self._events.start()
        self._service.start()
        gc.collect()
        gc.freeze()  # what is loaded now stays: no need to look at it again and again between two segments
        self._say_ready()
        self._wait()
        return self._end()

    def _say_ready(self) -> None:
        _log.info("worker %d serves %s", os.getpid(), self._directory.root)
        Hand(self._spec["hand"]).set_ready()
        if self._spec["ready"] >= 0:
            os.write(self._spec["ready"], b"ready\n")
            os.close(self._spec["ready"])
            self._spec["ready"] = -1
        if self._spec["group"] >= 0:
            notify("FDSTORE=1\nFDNAME=group", [self._spec["group"]])
            notify("FDSTORE=1\nFDNAME=hand", [self._spec["hand"]])
        notify(f"READY=1\nMAINPID={os.getppid()}")

    def _wait(self) -> None:
        """Until the daemon is to end. Does not return if the keeper dies: then this process becomes the keeper."""
        poll = select.poll()
        poll.register(self._keeper, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while not self._stopping:
            ready = dict(poll.poll(min(_SWEEP, self._options.idle or _SWEEP, self._pause) * 1000))
            if self._keeper in ready:
                _log.error("the keeper died; this process takes its place and starts another worker")
                become_keeper({**self._spec, "ready": -1})
            try:
                self._manager.sweep()
                self._keep_limit()
                self._drop_pages()
            except (DsecError, OSError) as error:
                _log.error("sweep: %s", error)
            if self._is_idle():
                _log.info("nothing is mounted and nobody asks; ending")
                return

    def _is_idle(self) -> bool:
        return self._options.idle > 0 and self._service.end_if_quiet(self._options.idle, self._manager.is_idle)

    def _make_room(self, wanted: int) -> int:
        """Remove segments that no mounted layer has, the oldest first."""
        return self._cache.evict(wanted, self._layers.segments_in_use())

    def _drop_pages(self) -> None:
        """Give back doubly cached pages: of what was fetched a while ago, and now and then of all that the mounted layers have."""
        self._dropper.run()
        if time.monotonic() >= self._next_drop:
            self._next_drop = time.monotonic() + _DROP_ALL * self._pause
            self._dropper.drop(self._layers.segments_in_use())

    def _keep_limit(self) -> None:
        """Keep what the segments take below the limit, if there is one and something was fetched."""
        fetched = self._fetcher.snapshot().segments
        if self._options.limit and fetched != self._fetched:
            self._fetched = fetched
            over = self._cache.usage().bytes - self._options.limit
            if over > 0:
                self._make_room(over)

    def _end(self) -> int:
        if self._stock is not None:
            self._stock.close()
        if not self._manager.holds_nothing():
            try:
                self._layers.sweep(now=True)
            except DsecError as error:
                _log.error("%s", error.message)
        self._layers.close()
        if self._events is not None:
            self._events.stop()
        if self._manager.holds_nothing():
            # Whoever waits for a store gets an error now; with that, what he was about to mount is over.
            self._fetcher.close()
            self._service.finish(_LAST_ANSWERS)
        if not self._manager.is_idle():
            _log.warning("stopping with mounts in place")
            return EXIT_PARKED  # the events in hand stay unanswered: the next worker goes on with them
        self._flat.stop()
        self._directory.end()
        _log.info("ended")
        return EXIT_STOPPED

    def _warnings(self) -> list[str]:
        return warnings_of(self._spec["aftermath"], {mount.target for mount in read_mounts()}, self._manager.poisoned())

    def _stop(self) -> None:
        self._stopping = True
        os.write(self._wake_write, b"x")

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop()

    def _pick(self, driver: str) -> str:
        """The driver for a request: the one that it names, or the best that works here."""
        unusable = self._spec["unusable"]
        if driver in ("", "fanotify") and not unusable:
            return "fanotify"
        if driver == "fanotify":
            raise HostError(unusable["message"], hint=unusable["hint"])
        return driver or "fuse"


class _DeviceMounter:
    """The fanotify driver: the metadata image, and one file of the cache for each segment."""

    def __init__(self, cache: SegmentCache, direct: bool) -> None:
        self._cache = cache
        self._flags = ("directio",) if direct else ()

    def mount(self, files: LayerFiles, target: Path) -> None:
        if files.layer.compressed:
            mount_erofs(files.image, target)
            return
        with self._cache.devices(files.names, files.sizes) as devices:
            mount_erofs(files.image, target, devices, self._flags)

    def check(self) -> None:
        """Whoever serves the files, the mounts stay good."""


def _open_log(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.raiseExceptions = False  # a full disk is no reason for a traceback
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
