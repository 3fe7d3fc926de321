"""Layer mounts and the cache below them, with a driver that mounts nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.fetch import Fetcher, Limits
from dsec_layers.cache.metadata import LayerFiles, layer_files
from dsec_layers.cache.segments import SegmentCache, Usage
from dsec_layers.fuse import layers as module
from dsec_layers.fuse.layers import LayerMounts, Stores
from dsec_layers.fuse.manager import Manager
from dsec_layers.fuse.records import LayerUse, Records
from dsec_layers.store.posix import PosixStore
from tests.store_samples import content, make_layer


class Driver:
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
    def __init__(self, place: Path) -> None:
        store = PosixStore(place / "store")
        self.sample = make_layer(store, {"a": content(1, 100_000)})
        self.use = LayerUse(self.sample.digest, store.url, "test")
        self.directory = CacheDirectory(place / "cache")
        stores = Stores()
        self.fetcher = Fetcher(stores.get, Limits())
        self.cache = SegmentCache(self.directory, self.fetcher)
        records = Records(self.directory.state, self.directory.boot)
        self.driver = Driver(self.cache)
        self.layers = LayerMounts(self.directory, self.cache, stores, records, {"test": self.driver}, linger=600)
        self.manager = Manager(self.directory, self.cache, stores, records, self.layers)

    def close(self) -> None:
        self.fetcher.close()
        self.directory.close()

    def is_whole(self) -> bool:
        """Whether the segments of the layer, and what describes it, are in the cache by name."""
        (files,) = self.driver.mounted
        folders = (self.directory.absent, self.directory.present)
        segments = all(any((folder / name).exists() for folder in folders) for name in files.names)
        return segments and files.image.exists() and len(list(self.directory.metadata.iterdir())) == 3


def test_b5_the_cache_is_cleared_when_a_layer_was_fetched_but_not_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    fetch = layer_files
    cleared: list[Usage] = []

    def fetch_and_clear(*arguments: object) -> LayerFiles:
        files: LayerFiles = fetch(*arguments)  # type: ignore[arg-type]
        if not cleared:
            cleared.append(stage.manager.clear())
        return files

    monkeypatch.setattr(module, "layer_files", fetch_and_clear)
    stage.layers.use(stage.use)
    assert cleared and stage.is_whole()
    stage.close()


def test_b5_a_layer_is_mounted_while_the_cache_is_being_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    clear = stage.cache.clear
    mounting = threading.Thread(target=lambda: stage.layers.use(stage.use))

    def mount_and_clear(keep: set[str]) -> Usage:
        mounting.start()
        mounting.join(0.5)  # has to wait, or is done: what was found not to be in use is removed now
        return clear(keep)

    with monkeypatch.context() as patched:
        patched.setattr(stage.cache, "clear", mount_and_clear)
        stage.manager.clear()
    mounting.join(20)
    assert stage.is_whole()
    stage.manager.clear()
    assert stage.is_whole()
    stage.close()
