"""The mount daemon as its users see it: ``open_host(cache)`` starts it if need be and gives a ``Host``.

with open_host(Path("/var/cache/dsec-layers")) as host:
    lease = host.attach(store, [base, workspace])     # lease.paths: one mounted directory a layer
    host.mount(store, environment, Path("/mnt/dev"))
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dsec_layers.cache.directory import CacheView, lock
from dsec_layers.cache.segments import open_present
from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, DsecError, HostError, NoSpace, NotFound, StoreError, UsageError
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.options import LOG, QUIET
from dsec_layers.fuse.records import Holder
from dsec_layers.linux.process import mount_namespace, start_time
from dsec_layers.proc import inherited_environment, run
from dsec_layers.segment import Segment
from dsec_layers.store.base import Store

__all__ = ["CacheReport", "Cleared", "Holder", "Host", "HostPool", "Lease", "Mounted", "MountedLayer", "open_host"]

_ATTEMPTS: Final = 5
_ANSWER: Final = 600.0
_END: Final = 20.0
_PER_STORE: Final = 64
"""Connections of a pool that ask for segments of one store: more than the daemon fetches of it at once, so that it is always busy."""
_IDLE: Final = 16
"""Connections that a pool keeps when nobody asks."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount: ``target``, the object mounted there, the label its maker gave, the driver, its layers, when (seconds since the epoch).

    ``poisoned``: it may have read zeros when nobody held its readers back, and is served no more: unmount it (fuse/mounts/aftermath.py).
    """

    target: str
    digest: Digest
    store: str
    label: str
    driver: str
    layers: tuple[Digest, ...]
    since: float
    poisoned: bool = False


@dataclass(frozen=True, slots=True)
class MountedLayer:
    """A layer that is mounted in the cache: where, by which driver, how many leases are on it, how many segments it has."""

    digest: Digest
    store: str
    driver: str
    path: str
    users: int
    segments: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache holds and what the daemon did since its worker started.

    ``segments``, ``bytes``: complete segments and what they take on the disk. ``fetched``, ``fetched_bytes``: from stores. ``events``: readers that the kernel stopped.
    """

    segments: int
    bytes: int
    layers: tuple[MountedLayer, ...]
    leases: int
    fetched: int
    fetched_bytes: int
    retries: int
    bad_answers: int
    failures: int
    healed: int
    last_error: str
    events: int
    pid: int
    keeper: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was removed from the cache."""

    segments: int
    bytes: int


class Lease:
    """Mounted layers. They stay mounted until the lease is released, or until its holder is gone. Use as a context, or call ``release``."""

    def __init__(self, host: Host, identifier: str, paths: tuple[Path, ...]) -> None:
        self.identifier = identifier
        self.paths = paths
        self._host = host

    def release(self) -> None:
        """Give the layers back; a second time does nothing."""
        self._host.release(self.identifier)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Host:
    """The daemon of one cache. Thread-safe. Every method starts the daemon again if it has ended since."""

    def __init__(self, cache: Path, options: Sequence[str] = ()) -> None:
        self.cache = Path(os.path.abspath(cache))  # noqa: PTH100 - the daemon sees the same path
        self.warnings: tuple[str, ...] = ()
        self._view = CacheView(self.cache)
        self._options = tuple(options)
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._interrupted = False

    def attach(self, store: str | Store, layers: Sequence[Digest], holder: Holder | None = None, *, driver: str | None = None) -> Lease:
        """Mount layers (digests of their manifests), each once on this host, until the lease ends. ``lease.paths`` are in the order of ``layers``.

        ``holder``: whose death ends the lease (default: this process). ``driver``: ``fanotify``, ``fuse``, or None for the best that works here.
        Only metadata is transferred now. Raises NotFound, StoreError, CorruptError, HostError.
        """
        identifier = os.urandom(16).hex()
        holder = holder or Holder(pid=os.getpid(), starttime=start_time(os.getpid()) or 0)
        answer = self._ask(
            "attach",
            identifier=identifier,
            store=_url(store),
            layers=list(layers),
            holder=asdict(holder),
            driver=driver or "",
            namespace=mount_namespace(),
        )
        return Lease(self, identifier, tuple(map(Path, answer["paths"])))

    def release(self, identifier: str) -> None:
        """End the lease with this identifier, if there is one."""
        self._ask("release", identifier=identifier)

    def mount(self, store: str | Store, digest: Digest, target: Path, *, label: str = "", driver: str | None = None) -> Mounted:
        """Mount a layer, or all layers of an environment as one tree, read-only at the existing directory ``target``; stays until ``umount``.

        Raises NotFound (no such directory, object), UsageError (not a directory), Conflict (something is mounted there), LimitError (more than 500 layers), and as
        ``attach``. A call that was killed may be repeated.
        """
        answer = self._ask(
            "mount",
            store=_url(store),
            digest=digest,
            target=os.path.realpath(target),
            label=label,
            driver=driver or "",
            namespace=mount_namespace(),
        )
        return _mounted(answer)

    def umount(self, target: Path, *, lazy: bool = False) -> None:
        """Unmount what ``mount`` made. NotFound if that is nothing; Conflict if it is in use, unless ``lazy``: then it goes when its last user does."""
        self._ask("umount", target=os.path.realpath(target), lazy=lazy)

    def mounts(self) -> list[Mounted]:
        """What is mounted, oldest first."""
        return [_mounted(row) for row in self._ask("mounts")]

    def show(self) -> CacheReport:
        """What the cache holds, and what was fetched."""
        answer = self._ask("show")
        counters = answer["counters"]
        return CacheReport(
            segments=answer["segments"],
            bytes=answer["bytes"],
            layers=tuple(MountedLayer(**row) for row in answer["layers"]),
            leases=len(answer["leases"]),
            fetched=counters["segments"],
            fetched_bytes=counters["bytes"],
            **{name: counters[name] for name in ("retries", "bad_answers", "failures", "healed", "last_error")},
            **{name: answer[name] for name in ("events", "pid", "keeper")},
            warnings=tuple(answer["warnings"]),
        )

    def clear(self) -> Cleared:
        """Remove everything from the cache that no live mount uses."""
        return Cleared(**self._ask("clear"))

    def stop(self, *, force: bool = False) -> None:
        """End the daemon. Conflict if something is mounted, unless ``force``: then that is unmounted first (Conflict if it is in use)."""
        channel = control.connect(self.cache, _ANSWER)  # one of its own: another thread may be waiting for an answer on the usual one
        if channel is None:
            return
        with channel:
            hello, fds = control.receive(channel) or ({}, [])
            control.close_all(fds)
            self._greet(hello)
            control.send(channel, {"op": "stop", "force": force})
            answer, fds = control.receive(channel) or ({}, [])
            control.close_all(fds)
            if "error" in answer:
                raise control.error_from(answer["error"])
            control.receive(channel)  # the end of the connection
        self.close()
        self._await_end()

    def open(self, piece: Segment) -> int:
        """A read-only descriptor of a complete segment, which the daemon fetches first if need be; the caller closes it."""
        present = self.open_present(piece)
        if present is not None:
            return present
        fds: list[int] = []
        self._ask("open", fds, piece=piece.message())
        if len(fds) != 1:
            control.close_all(fds)
            raise HostError(
                f"the daemon of cache {self.cache} sent {len(fds)} descriptors, not one", hint="stop the daemon: it is not of this version"
            )
        return fds[0]

    def open_present(self, piece: Segment) -> int | None:
        """As ``open``, but None if the segment is absent or suspect. Does not ask the daemon."""
        return open_present(self._view, piece)

    def close(self) -> None:
        """Close the connection. The daemon and its mounts stay. A thread that waits for an answer gets a HostError."""
        if not self._lock.acquire(blocking=False):
            self._interrupted = True
            channel = self._channel
            if channel is not None:
                with suppress(OSError):
                    channel.shutdown(socket.SHUT_RDWR)
            self._lock.acquire()
        try:
            self._interrupted = False
            self._drop()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _await_end(self) -> None:
        """Until the daemon has let go of the cache."""
        due = time.monotonic() + _END
        while time.monotonic() < due:
            try:
                os.close(lock(self.cache))
                return
            except Conflict:
                time.sleep(0.005)
        raise HostError(f"the daemon of cache {self.cache} does not end", hint=f"see {self.cache / LOG}")

    def _ask(self, operation: str, fds: list[int] | None = None, /, **arguments: Any) -> Any:
        """One request. Sent again if the daemon's worker died before it answered: every request may be repeated."""
        with self._lock:
            for _ in range(_ATTEMPTS):
                received = self._try({"op": operation, **arguments})
                if received is not None:
                    break
                if self._interrupted:
                    raise HostError(f"the connection to the daemon of cache {self.cache} was closed before it answered")
                self._drop()
            else:
                raise HostError(f"the daemon of cache {self.cache} closes every connection", hint=f"see {self.cache / LOG}")
        answer, descriptors = received
        if fds is None or "error" in answer:
            control.close_all(descriptors)
        else:
            fds += descriptors
        if "error" in answer:
            raise control.error_from(answer["error"])
        return answer.get("ok")

    def _try(self, message: control.Message) -> tuple[control.Message, list[int]] | None:
        """Send a request, or only connect if it is empty; None if the connection broke."""
        try:
            channel = self._connected()
            if not message:
                return {}, []
            control.send(channel, message)
            return control.receive(channel)
        except TimeoutError as error:
            self._drop()
            raise HostError(f"the daemon of cache {self.cache} does not answer", hint=f"see {self.cache / LOG}") from error
        except (OSError, ValueError):
            return None

    def connect(self) -> None:
        """Connect to the daemon, which is started if it does not run."""
        with self._lock:
            for _ in range(_ATTEMPTS):
                if self._try({}) is not None:
                    return
                self._drop()
        raise HostError(f"the daemon of cache {self.cache} closes every connection", hint=f"see {self.cache / LOG}")

    def _connected(self) -> socket.socket:
        if self._channel is None:
            channel = control.connect(self.cache, _ANSWER)
            if channel is None:
                _start(self.cache, self._options)
                channel = control.connect(self.cache, _ANSWER)
            if channel is None:
                raise ConnectionResetError("it ended at once")
            try:
                hello = control.receive(channel)
                if hello is None:
                    raise ConnectionResetError("no greeting")
                control.close_all(hello[1])
                self._greet(hello[0])
            except BaseException:
                channel.close()
                raise
            self._channel = channel
        return self._channel

    def _greet(self, hello: control.Message) -> None:
        if "error" in hello:
            raise control.error_from(hello["error"])
        if hello.get("version") != control.VERSION:
            raise HostError(
                f"the daemon of cache {self.cache} speaks version {hello.get('version')} of the protocol, this program {control.VERSION}",
                hint="stop the daemon (its mounts stay)",
            )
        self.warnings = tuple(hello.get("warnings", ()))

    def _drop(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.close()
            self._channel = None


class HostPool:
    """Segments from the daemon of a cache, over as many connections as threads ask, within bounds for each store. Thread-safe. Close it.

    ``first``: a connection to begin with. Whoever waits for a store that hangs does not keep others from another store.
    """

    def __init__(self, cache: Path, first: Host | None = None) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._rooms: dict[str, threading.Semaphore] = {}
        self._idle = [] if first is None else [first]
        self._busy: set[Host] = set()
        self._closed = False
        self._view = CacheView(cache)

    def open(self, piece: Segment) -> int:
        """A read-only descriptor of a complete segment, which is fetched first if need be; the caller closes it."""
        present = self.open_present(piece)
        if present is not None:
            return present
        with self._lock:
            room = self._rooms.setdefault(piece.store, threading.Semaphore(_PER_STORE))
        with room:
            host = self._take()
            try:
                return host.open(piece)
            finally:
                self._give_back(host)

    def open_present(self, piece: Segment) -> int | None:
        """As ``open``, but None if the segment is absent or suspect. Does not ask the daemon."""
        return open_present(self._view, piece)

    def close(self) -> None:
        """Close the connections. Threads that wait for an answer get a HostError."""
        with self._lock:
            self._closed = True
            hosts = [*self._idle, *self._busy]
            self._idle.clear()
        for host in hosts:
            host.close()

    def _take(self) -> Host:
        with self._lock:
            if self._closed:
                raise HostError(f"the connections to the daemon of cache {self._cache} are closed")
            host = self._idle.pop() if self._idle else Host(self._cache)
            self._busy.add(host)
            return host

    def _give_back(self, host: Host) -> None:
        with self._lock:
            self._busy.discard(host)
            keep = not self._closed and len(self._idle) < _IDLE
            if keep:
                self._idle.append(host)
        if not keep:
            host.close()


def open_host(cache: Path, *, options: Sequence[str] = ()) -> Host:
    """The daemon of ``cache``, started if it does not run. ``options``: of its command line, for when it is started now (fuse/daemon/__main__.py).

    Raises HostError, saying what this host lacks and which driver works without it, or with the end of the daemon's log.
    """
    host = Host(cache, options)
    host.connect()
    return host


def _start(cache: Path, options: Sequence[str]) -> None:
    done = run(
        [sys.executable, "-P", "-m", "dsec_layers.fuse.daemon", "--cache", cache, *options],
        check=False,
        env=inherited_environment() | QUIET,
        timeout=120,
    )
    if done.code != 0:
        message, _, hint = done.stderr.decode(errors="replace").strip().partition("\n")
        kind = {each.exit_code: each for each in (Conflict, HostError, NoSpace, NotFound, StoreError, UsageError)}.get(done.code, DsecError)
        raise kind(message or "the daemon did not start", hint=hint or None)


def _url(store: str | Store) -> str:
    return store if isinstance(store, str) else store.url


def _mounted(row: control.Message) -> Mounted:
    return Mounted(
        **{name: row[name] for name in ("target", "digest", "store", "label", "driver", "since", "poisoned")}, layers=tuple(row["layers"])
    )
