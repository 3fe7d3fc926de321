"""Layer mounts and the cache below them, with a driver that mounts nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dsec_layers.cache.fetch import FetchLimits
from dsec_layers.cache.metadata import LayerFiles, layer_files
from dsec_layers.cache.segments import Usage
from dsec_layers.errors import Conflict, DsecError, StoreError
from dsec_layers.fuse.mounts import layers as module
from dsec_layers.fuse.mounts import manager
from dsec_layers.fuse.records import Holder
from dsec_layers.linux.mountinfo import MountPoint
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from tests.kit.cache_kit import Stage, eventually
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import content, make_layer


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


def test_b5_a_mounted_layer_whose_segments_nobody_knows_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    path = stage.layers.use(stage.use)
    (files,) = stage.driver.mounted
    monkeypatch.setattr(module, "read_mounts", lambda: [MountPoint(1, "0:1", "/", str(path), "erofs", "x")])

    def busy(target: Path, lazy: bool = False) -> None:
        raise Conflict("in use")

    monkeypatch.setattr(module, "umount", busy)
    files.image.write_bytes(b"damaged")
    after_restart = stage.again()
    after_restart.recover()
    with pytest.raises(Conflict, match=r"metadata of .* is damaged"):
        after_restart.clear()
    assert all((stage.directory.absent / name).exists() for name in files.names)
    stage.close()


def test_a_mount_through_a_loop_device_is_known_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel mounts no files, the mount table names a loop device: the mount is known by the layer's device."""
    stage = Stage(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr(manager, "mount_bind", lambda *_: None)
    made = stage.manager.mount(stage.use.store, stage.sample.digest, str(target), "", "test")
    number = (tmp_path / "cache/layers").stat().st_dev  # where the layer would be mounted
    device = f"{os.major(number)}:{os.minor(number)}"
    for seen, expected in ((device, [made]), ("0:999", [])):
        mount = MountPoint(1, seen, "/", str(target), "erofs", "/dev/loop7")
        monkeypatch.setattr(manager, "read_mounts", lambda mount=mount: [mount])
        monkeypatch.setattr(manager, "is_mount_point", lambda _, mount=mount: mount)
        assert stage.manager.mounts() == expected
    stage.close()


@pytest.mark.parametrize("where", ["opening", "reading"])
def test_a_store_that_hangs_fails_a_mount_at_the_deadline_and_keeps_no_other_store_waiting(tmp_path: Path, where: str) -> None:
    free = threading.Event()
    healthy, inner = MemoryStore("mem://healthy"), MemoryStore("mem://hangs")
    bad = FaultyStore(inner)

    def opener(url: str) -> Store:
        if url == "mem://healthy":
            return healthy
        if where == "opening":
            free.wait()
        return bad

    stage = Stage(tmp_path, opener, FetchLimits(fetches=16, deadline=1.0))
    there = make_layer(healthy, {"a": content(1, 10_000)})
    layers = [make_layer(inner, {"a": content(2 + number, 10_000)}).digest for number in range(10)]
    if where == "reading":
        bad.add(Fault("stat", until=free))
    holder = Holder(pid=os.getpid())
    errors: list[DsecError] = []

    def attach(number: int) -> None:
        with pytest.raises(StoreError, match=r"mem://hangs.*not here after 1 s") as raised:
            stage.manager.attach(f"a{number}", "mem://hangs", layers, holder, "test")
        errors.append(raised.value)

    began = time.monotonic()
    threads = [threading.Thread(target=attach, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert stage.manager.attach("b", "mem://healthy", [there.digest], holder, "test")
    assert time.monotonic() - began < 0.8 and not errors
    for thread in threads:
        thread.join(5)
    assert len(errors) == 3
    assert time.monotonic() - began < 2.0, "one deadline, whoever waits for whom"
    free.set()
    bad.clear()
    eventually(lambda: not stage.fetcher._slots.hangs("mem://hangs"))
    assert len(stage.manager.attach("c", "mem://hangs", layers, holder, "test")) == 10, "the first after it is healed"
    stage.close()
