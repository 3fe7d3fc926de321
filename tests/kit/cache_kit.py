"""Caches, pieces and daemons for tests of the on-demand driver."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.fetch import Fetcher, FetchLimits
from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.digest import content_digest
from dsec_layers.errors import DsecError
from dsec_layers.fuse.client.host import Host, open_host
from dsec_layers.fuse.mounts.layers import LayerMounts, Stores
from dsec_layers.fuse.mounts.manager import Manager
from dsec_layers.fuse.records import LayerUse, Records
from dsec_layers.layers.frames import compress
from dsec_layers.linux.mount import umount
from dsec_layers.linux.mountinfo import read_mounts
from dsec_layers.linux.process import start_time
from dsec_layers.segment import Segment
from dsec_layers.store.base import Store
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.store_samples import content, make_layer

QUICK = FetchLimits(fetches=4, deadline=20.0, pause=0.01, longest_pause=0.05)


def put_piece(store: Store, data: bytes, *, raw: bool = False) -> Segment:
    """A blob that holds just one piece, between bytes that are none of it."""
    stored = data if raw else compress(data)
    info = put_bytes(store, b"before" + stored + b"after")
    return Segment(content_digest(data), len(data), store.url, info.digest, 6, len(stored), "raw" if raw else "zstd")


@contextmanager
def open_cache(root: Path, store: Store, limits: FetchLimits = QUICK, *, holes: bool = False) -> Iterator[SegmentCache]:
    """A cache that takes everything from one store."""
    with CacheDirectory(root) as directory:
        fetcher = Fetcher(lambda _: store, limits)
        try:
            yield SegmentCache(directory, fetcher, holes=holes)
        finally:
            fetcher.close()


def in_threads(count: int, function: Callable[[int], None]) -> list[BaseException]:
    """Run ``function(0 … count - 1)``, each in a thread, at the same time; returns what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def call(number: int) -> None:
        start.wait()
        try:
            function(number)
        except BaseException as error:  # noqa: BLE001 - reported by the caller
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a reader hangs"
    return errors


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds; fail the test if it does not in time."""
    due = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < due, "it did not come to pass in time"
        time.sleep(0.005)


def needs_fanotify(cache: Path) -> None:
    """Skip the test where the fanotify driver cannot work."""
    from dsec_layers.fuse.daemon.requirements import check_fanotify, check_root

    try:
        check_root()
        cache.mkdir(parents=True, exist_ok=True)
        check_fanotify(cache)
    except DsecError as error:
        pytest.skip(error.message)


@contextmanager
def daemon(cache: Path, options: Sequence[str] = ()) -> Iterator[Host]:
    """The daemon of a cache. Afterwards nothing of it is left: no mount, no process."""
    host = open_host(cache, options=("--idle", "60", *options))
    try:
        yield host
    finally:
        _end(cache, host)


def log_of(cache: Path) -> str:
    """What the daemon wrote to its log."""
    return "".join(path.read_text(errors="replace") for path in sorted(cache.glob("daemon.log*")))


def processes_of(cache: Path) -> list[int]:
    """The pids of the keeper and the worker, known by the descriptors they share: whoever has the cache's lock open."""
    wanted = str(cache / "lock")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if any(str(link.readlink()) == wanted for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    """Kill a process at once, and wait until it is gone."""
    started = start_time(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: start_time(pid) != started)


def _end(cache: Path, host: Host) -> None:
    unmount_below(cache.parent)
    with suppress(DsecError):
        host.stop(force=True)
    host.close()
    for pid in processes_of(cache):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    unmount_below(cache.parent)


def unmount_below(folder: Path) -> None:
    """Detach every mount below a directory."""
    for mount in reversed(read_mounts()):
        if mount.target.startswith(f"{folder}/"):
            with suppress(DsecError):
                umount(mount.target, lazy=True)


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache (cachestat(2), Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb") as stream:
        if libc.syscall(451, stream.fileno(), span, found, 0) != 0:
            pytest.skip("this kernel has no cachestat(2)")
    return 4096 * int(found[0])


class DryDriver:
    """Does what the fanotify driver does up to the mount itself."""

    def __init__(self, cache: SegmentCache) -> None:
        self._cache = cache
        self.mounted: list[LayerFiles] = []

    def mount(self, files: LayerFiles, target: Path) -> None:
        assert files.image.exists()
        with self._cache.devices(files.names, files.sizes) as devices:
            assert all(Path(device).exists() for device in devices)
        self.mounted.append(files)

    def check(self) -> None:
        pass


class Stage:
    """One layer in a store, and the mount daemon's manager without the daemon."""

    def __init__(self, place: Path, opener: Callable[[str], Store] | None = None, limits: FetchLimits = QUICK) -> None:
        store = PosixStore(place / "store")
        self.sample = make_layer(store, {"a": content(1, 100_000)})
        self.use = LayerUse(self.sample.digest, store.url, "test")
        self.directory = CacheDirectory(place / "cache")
        self.fetcher = Fetcher(opener or Stores().get, limits)
        self.cache = SegmentCache(self.directory, self.fetcher)
        self.driver = DryDriver(self.cache)
        self.manager = self.again()

    def again(self) -> Manager:
        """The manager of a worker that is started anew; ``layers`` are its."""
        records = Records(self.directory.state, self.directory.boot)
        self.layers = LayerMounts(self.directory, self.cache, records, {"test": self.driver}, linger=600)
        return Manager(self.directory, self.cache, records, self.layers)

    def close(self) -> None:
        self.fetcher.close()
        self.directory.close()

    def is_whole(self) -> bool:
        """Whether the segments of the layer, and what describes it, are in the cache by name."""
        (files,) = self.driver.mounted
        folders = (self.directory.absent, self.directory.present)
        segments = all(any((folder / name).exists() for folder in folders) for name in files.names)
        return segments and files.image.exists() and len(list(self.directory.metadata.iterdir())) == 3
