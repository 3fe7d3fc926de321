"""What the mount daemon and the FUSE server remember of layers ends with the layers' use."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mfusepy
import pytest

from dsec_layers.cache.metadata import LayerFiles
from dsec_layers.errors import HostError, NotFound
from dsec_layers.fuse.events import serve as events
from dsec_layers.fuse.events.serve import EventServer
from dsec_layers.fuse.mounts import layers
from dsec_layers.fuse.mounts.layers import LayerMounts
from dsec_layers.fuse.records import LayerUse
from dsec_layers.fuse.server import flat
from dsec_layers.fuse.server.flat import FlatFiles

IMAGE = b"image" * 100


def digest_of(number: int) -> str:
    """The digest of a test's layer."""
    return f"sha256:{number:064x}"


class Image:
    """Stands for a FlatImage."""

    opened = 0

    def __init__(self, files: object, cache: object) -> None:
        self.size = len(IMAGE)
        self.closed = False
        Image.opened += 1

    @classmethod
    def of_layer(cls, files: object, cache: object) -> Image:
        """As FlatImage."""
        return cls(files, cache)

    def pread(self, offset: int, length: int) -> bytes:
        """As FlatImage."""
        assert not self.closed
        return IMAGE[offset : offset + length]

    def close(self) -> None:
        """As FlatImage."""
        assert not self.closed
        self.closed = True
        Image.opened -= 1


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlatFiles]:
    """The file system's operations; every layer is there."""
    monkeypatch.setattr(flat, "source_of", lambda state, digest: "store")
    monkeypatch.setattr(flat, "local_layer_files", lambda view, store, digest: object())
    monkeypatch.setattr(flat, "FlatImage", Image)
    monkeypatch.setattr(Image, "opened", 0)
    yield FlatFiles(tmp_path)


def name(number: int) -> str:
    """The file of a layer."""
    return f"/{number:064x}.erofs"


def test_b6_images_that_nobody_has_open_are_closed(files: FlatFiles) -> None:
    for number in range(100):
        assert files.getattr(name(number))["st_size"] == len(IMAGE)
        fh = files.open(name(number), os.O_RDONLY)
        assert files.read(name(number), 10, 5, fh) == IMAGE[5:15]
        files.release(name(number), fh)
    assert Image.opened <= 16
    assert len(files.readdir("/", 0)) <= 18


def test_b6_an_image_stays_while_a_file_is_open(files: FlatFiles) -> None:
    for _ in range(2):
        files.open(name(1), os.O_RDONLY)
    files.release(name(1), 0)
    for number in range(2, 100):
        files.getattr(name(number))
    assert files.read(name(1), 10, 0, 0) == IMAGE[:10]
    assert name(1)[1:] in files.readdir("/", 0)
    files.release(name(1), 0)
    for number in range(2, 100):
        files.getattr(name(number))
    assert name(1)[1:] not in files.readdir("/", 0)
    assert files.read(name(1), 10, 0, 0) == IMAGE[:10]


def test_b6_a_file_that_is_not_there_leaves_nothing(files: FlatFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "local_layer_files", lambda view, store, digest: None)
    with pytest.raises(mfusepy.FuseOSError) as caught:
        files.open(name(1), os.O_RDONLY)
    assert caught.value.errno == errno.ENOENT
    assert files.readdir("/", 0) == [".", ".."]


class Tables:
    """Stands for LayerFiles: one segment, whose digest is the layer's number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.index = {bytes([number]): 0}
        self.names = [f"{number}"]

    def piece(self, at: int) -> SimpleNamespace:
        """As LayerFiles."""
        return SimpleNamespace(store="store", blob=digest_of(self.number), offset=at)


class Mounter:
    """A driver that mounts nothing."""

    broken = False

    def mount(self, files: LayerFiles, target: Path) -> None:
        """As Mounter."""
        if self.broken:
            raise HostError("broken", hint="mend it")

    def check(self) -> None:
        """As Mounter."""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LayerMounts:
    """Layer mounts whose metadata is made up, and of which the records know 200 layers."""

    def made(directory: object, store: str, digest: str, *rest: object) -> Tables:
        return Tables(int(digest[7:], 16))

    def gone(*arguments: object, **options: object) -> None:
        raise NotFound("nothing is mounted", hint="none")

    monkeypatch.setattr(layers, "layer_files", made)
    monkeypatch.setattr(layers, "local_layer_files", made)
    monkeypatch.setattr(layers, "umount", gone)
    monkeypatch.setattr(layers, "files_of", lambda directory, files: set())
    (tmp_path / "layers").mkdir()
    known = [(digest_of(number), "store") for number in range(200)]
    records = SimpleNamespace(remember=lambda digest, store: None, known=lambda: iter(known))
    cache = SimpleNamespace(fetcher=None)
    drivers = {"fanotify": Mounter(), "fuse": Mounter()}
    return LayerMounts(cast(Any, SimpleNamespace(layers=tmp_path / "layers")), cast(Any, cache), cast(Any, records), drivers, linger=0)


def remembered(mounts: LayerMounts) -> int:
    """For how many layers tables are in memory."""
    return len(mounts._files) + len(getattr(mounts, "_outside", ()))


def test_b6_tables_go_with_the_last_mount(mounts: LayerMounts) -> None:
    for number in range(50):
        for driver in ("fanotify", "fuse"):
            mounts.use(LayerUse(digest_of(number), "store", driver))
    assert remembered(mounts) == 50
    for number in range(50):
        mounts.unuse(LayerUse(digest_of(number), "store", "fuse"))
    mounts.sweep(now=True)
    assert remembered(mounts) == 50  # the other driver's mounts need them
    assert mounts.find(bytes([7]))
    for number in range(50):
        mounts.unuse(LayerUse(digest_of(number), "store", "fanotify"))
    mounts.sweep(now=True)
    assert remembered(mounts) == 0


def test_b6_tables_of_a_layer_that_could_not_be_mounted_go(mounts: LayerMounts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mounter, "broken", True)
    for number in range(20):
        with pytest.raises(HostError):
            mounts.use(LayerUse(digest_of(number), "store", "fuse"))
    assert remembered(mounts) == 0


def test_b6_few_tables_are_kept_of_layers_mounted_elsewhere(mounts: LayerMounts) -> None:
    assert not mounts.find(b"unknown")
    assert remembered(mounts) == 0
    for number in range(200):
        assert [piece.blob for piece in mounts.find(bytes([number]))] == [digest_of(number)]
    assert remembered(mounts) <= 16
    mounts.forget_files()
    assert remembered(mounts) == 0


def test_b6_a_dead_group_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(events._log, "error", lambda text, *arguments: lines.append(text % arguments))
    group, other = os.pipe()
    hand = SimpleNamespace(numbers=dict, buffer=memoryview(bytearray(100)), clear_buffer=lambda: None)
    folder = SimpleNamespace(absent=Path("/a"), present=Path("/p"))
    server = EventServer(group, cast(Any, hand), cast(Any, SimpleNamespace(directory=folder)), lambda digest: [])
    os.close(group)
    os.close(other)
    server.start()
    server._thread.join(1)
    server.stop()
    assert len(lines) == 1


def test_b6_failing_reads_are_not_repeated_at_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(events._log, "error", lambda text, *arguments: lines.append(text % arguments))
    group, other = os.pipe()
    hand = SimpleNamespace(numbers=dict, buffer=memoryview(bytearray(100)), clear_buffer=lambda: None)
    folder = SimpleNamespace(absent=Path("/a"), present=Path("/p"))
    server = EventServer(group, cast(Any, hand), cast(Any, SimpleNamespace(directory=folder)), lambda digest: [])

    def fail() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(server, "_read", fail)
    os.write(other, b"event")
    server.start()
    server._thread.join(0.5)
    server.stop()
    for fd in (group, other):
        os.close(fd)
    assert 1 <= len(lines) <= 5
