"""Layer mounts: each layer mounted once on this host, below <cache>/layers/, however many use it.

A layer that nobody uses any more stays mounted for a while: the next sandbox on it finds its pages still cached.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.metadata import LayerFiles, files_of, layer_files, local_layer_files
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, DsecError, HostError, NotFound, StoreError
from dsec_layers.fsio import map_os_error
from dsec_layers.fuse.records import LayerUse, Records
from dsec_layers.linux.mount import umount
from dsec_layers.linux.mountinfo import read_mounts
from dsec_layers.segment import Segment
from dsec_layers.store.base import Store
from dsec_layers.store.open import open_store

__all__ = ["LayerMounts", "Mounter", "Stores"]

_log = logging.getLogger(__name__)

_MOST_SOURCES: Final = 4
_MOST_OUTSIDE: Final = 16
"""Layers that are not mounted here and whose tables are kept all the same, because somebody read a segment of theirs."""


class Mounter(Protocol):
    """One driver."""

    def mount(self, files: LayerFiles, target: Path) -> None:
        """Mount a layer at a directory."""

    def check(self) -> None:
        """Detach the mounts of this driver that cannot be read any more, if there are any."""


class Stores:
    """Stores by URL, each opened once."""

    def __init__(self, opener: Callable[[str], Store] = lambda url: open_store(url, create=False)) -> None:
        self._opener = opener
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def get(self, url: str) -> Store:
        """The store at ``url``."""
        with self._lock:
            store = self._open.get(url)
        if store is not None:
            return store
        opened = self._opener(url)  # may take long: not under the lock
        with self._lock:
            return self._open.setdefault(url, opened)


@dataclass(slots=True)
class _Layer:
    use: LayerUse
    path: Path
    files: LayerFiles | None = None
    users: int = 0
    mounted: bool = False
    idle_since: float = 0.0
    failed: tuple[float, DsecError] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class LayerMounts:
    """The layers that are mounted. Thread-safe. ``mounters``: by driver name."""

    def __init__(
        self,
        directory: CacheDirectory,
        cache: SegmentCache,
        records: Records,
        mounters: Mapping[str, Mounter],
        *,
        linger: float,
    ) -> None:
        self._directory = directory
        self._cache = cache
        self._records = records
        self._mounters = mounters
        self._linger = linger
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._closed = False
        self._layers: dict[tuple[Digest, str], _Layer] = {}
        self._files: dict[Digest, LayerFiles] = {}  # of the layers in _layers
        self._outside: OrderedDict[Digest, LayerFiles] = OrderedDict()  # of others, those used last at the end
        self._device = directory.layers.stat().st_dev

    def use(self, use: LayerUse) -> Path:
        """Where the layer is mounted; it is fetched and mounted first if need be, and stays until ``unuse`` was called as often."""
        if use.driver not in self._mounters:
            raise HostError(f"there is no driver {use.driver!r} here", hint=f"drivers: {', '.join(self._mounters)}")
        with self._lock:
            layer = self._layers.get((use.digest, use.driver))
            if layer is None:
                layer = self._layers[use.digest, use.driver] = _Layer(use, self._path(use))
            layer.users += 1
        came = time.monotonic()
        try:
            with layer.lock:
                if layer.failed and layer.failed[0] > came:
                    raise layer.failed[1]  # who waited while it failed is not to wait for the same again
                try:
                    self._ensure(layer)
                except DsecError as error:
                    layer.failed = (time.monotonic(), error)
                    raise
        except BaseException:
            with self._lock:
                layer.users -= 1
                if not layer.users and not layer.mounted:
                    self._forget(use)
            raise
        return layer.path

    def unuse(self, use: LayerUse) -> None:
        """One user less."""
        with self._lock:
            layer = self._layers[use.digest, use.driver]
            layer.users -= 1
            layer.idle_since = time.monotonic()

    def sweep(self, *, now: bool = False) -> None:
        """Unmount the layers that nobody has used for a while, with ``now`` all that nobody uses."""
        before = time.monotonic() - (0 if now else self._linger)
        with self._lock:
            idle = [layer for layer in self._layers.values() if not layer.users and layer.idle_since <= before]
        for layer in idle:
            with layer.lock:
                self._leave(layer)

    def find(self, digest: bytes) -> Sequence[Segment]:
        """Where a segment can be had, by the layers known here."""
        return _sources(list(self._files.values()), digest) or self._find_outside(digest)

    def adopt(self, *, poisoned: bool = False) -> set[Digest]:
        """Take over the mounts that a worker before made: unused until somebody says that he uses them.

        With ``poisoned``, those that lack a segment are detached instead; returns their digests.
        """
        detached = set()
        prefix = f"{self._directory.layers}/"
        stores = dict(self._records.known())
        for mount in read_mounts():
            if not mount.target.startswith(prefix):
                continue
            name, _, driver = mount.target[len(prefix) :].partition(".")
            digest = f"sha256:{name}"
            if digest not in stores:
                _log.warning("%s is mounted, but no record says from which store", mount.target)
                continue
            use = LayerUse(digest, stores[digest], driver or "fanotify")
            files = self._read_files(use)
            if poisoned and use.driver == "fanotify" and not (files and self._cache.has_all(files.names, files.sizes)):
                umount(mount.target, lazy=True)
                detached.add(digest)
                continue
            if files is not None:
                self._files[digest] = files
            self._layers[digest, use.driver] = _Layer(use, Path(mount.target), files, mounted=True, idle_since=time.monotonic())
        return detached

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """No further layer's files come into use while the context lasts: what is not in use may be removed. Fetching goes on."""
        with self._taking:
            yield

    def close(self) -> None:
        """No further layer's files come into use from now on."""
        with self._taking:
            self._closed = True

    def segments_in_use(self) -> set[str]:
        """The names of all segments of mounted layers."""
        with self._lock:
            return {name for layer in self._layers.values() if layer.files for name in layer.files.names}

    def without_files(self) -> list[Digest]:
        """The layers that are mounted although nobody knows their segments: what a worker before mounted, and whose metadata is damaged since."""
        with self._lock:
            return [layer.use.digest for layer in self._layers.values() if layer.mounted and layer.files is None]

    def files_in_use(self) -> set[Path]:
        """The files in metadata/ and images/ that mounted layers need."""
        with self._lock:
            return {path for layer in self._layers.values() if layer.files for path in files_of(self._directory, layer.files)}

    def rows(self) -> Iterator[tuple[LayerUse, Path, int, int]]:
        """(layer, mount point, users, segments) of the layers that are mounted, or about to be: their files are here."""
        with self._lock:
            layers = [layer for layer in self._layers.values() if layer.files or layer.mounted]
        for layer in layers:
            yield layer.use, layer.path, layer.users, len(layer.files.names) if layer.files else 0

    def device_of(self, use: LayerUse) -> str | None:
        """The device (major:minor, as in the mount table) of what is at a layer's mount point; None if there is no such place."""
        try:
            number = self._path(use).stat().st_dev
        except OSError:
            return None
        return f"{os.major(number)}:{os.minor(number)}"

    def forget_files(self) -> list[Digest]:
        """Drop what is remembered of layers that are not mounted; returns the digests of those that are."""
        with self._lock:
            mounted = [digest for digest, _ in self._layers]
            self._files = {digest: files for digest, files in self._files.items() if digest in mounted}
            self._outside.clear()
        return mounted

    def _path(self, use: LayerUse) -> Path:
        name = use.digest.removeprefix("sha256:")
        return self._directory.layers / (name if use.driver == "fanotify" else f"{name}.{use.driver}")

    def _ensure(self, layer: _Layer) -> None:
        """Mount a layer unless it is; under its lock."""
        use = layer.use
        if layer.files is None:
            layer.files = self._take_files(layer)
        self._files[use.digest] = layer.files
        try:
            self._mounters[use.driver].check()
            layer.path.mkdir(mode=0o755, exist_ok=True)
            if (
                layer.path.stat().st_dev == self._device
            ):  # else mounted by an earlier use, or by a worker that was killed before it could note it
                self._records.remember(use.digest, use.store)
                self._mounters[use.driver].mount(layer.files, layer.path)
            layer.mounted = True
        except OSError as error:
            raise map_os_error(error, str(layer.path)) from error

    def _take_files(self, layer: _Layer) -> LayerFiles:
        """A layer's files, in use from now on; fetched again if the cache was cleared before that could be said."""
        use = layer.use
        while True:
            files = layer_files(self._directory, use.store, use.digest, self._cache.fetcher)
            with self._taking:
                if self._closed:
                    raise StoreError(f"the daemon of cache {self._directory.root} ends")
                if all(path.exists() for path in files_of(self._directory, files)):
                    layer.files = files
                    return files

    def _leave(self, layer: _Layer) -> None:
        """Unmount a layer if still nobody uses it; under its lock, for which a new user waits."""
        with self._lock:
            if layer.users:
                return
        try:
            umount(layer.path)
        except NotFound:
            pass
        except DsecError as error:  # Conflict: somebody stands in it; tried again later
            _log.log(logging.INFO if isinstance(error, Conflict) else logging.ERROR, "%s", error.message)
            layer.idle_since = time.monotonic()
            return
        with suppress(OSError):
            layer.path.rmdir()
        with self._lock:
            if not layer.users:
                self._forget(layer.use)

    def _forget(self, use: LayerUse) -> None:
        """Drop a layer that is not mounted, and its tables unless the other driver has it mounted; under the lock."""
        self._layers.pop((use.digest, use.driver), None)
        if all(digest != use.digest for digest, _ in self._layers):
            self._files.pop(use.digest, None)

    def _find_outside(self, digest: bytes) -> list[Segment]:
        """By all layers whose metadata is in the cache: an image may live on in another mount namespace. What they hold is kept for those that had it."""
        with self._lock:
            kept = dict(self._outside)
        found = _sources(kept.values(), digest)
        if not found:
            for known, store in self._records.known():
                if known not in kept and known not in self._files:
                    files = self._read_files(LayerUse(known, store, ""))
                    if files is not None and digest in files.index:
                        kept[known] = files
            found = _sources(kept.values(), digest)
        with self._lock:
            for known, files in kept.items():
                if digest in files.index:
                    self._outside[known] = files
                    self._outside.move_to_end(known)
            while len(self._outside) > _MOST_OUTSIDE:
                self._outside.popitem(last=False)
        return found

    def _read_files(self, use: LayerUse) -> LayerFiles | None:
        try:
            return local_layer_files(self._directory, use.store, use.digest)
        except (DsecError, OSError) as error:
            _log.warning("metadata of %s: %s", use.digest, error)
            return None


def _sources(layers: Iterable[LayerFiles], digest: bytes) -> list[Segment]:
    """Where a segment can be had by these layers; a few places are enough."""
    found: dict[tuple[str, str, int], Segment] = {}
    for files in layers:
        number = files.index.get(digest)
        if number is not None:
            piece = files.piece(number)
            found[piece.store, piece.blob, piece.offset] = piece
            if len(found) == _MOST_SOURCES:
                break
    return list(found.values())
