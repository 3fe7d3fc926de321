"""The FUSE driver: layers as flat images, and EROFS on them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.fetch import Fetcher
from dsec_layers.cache.metadata import LayerFiles, layer_files
from dsec_layers.fuse.server.mount import FlatMounter
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.frames import decompress
from dsec_layers.linux.mount import umount
from dsec_layers.linux.process import start_time
from dsec_layers.proc import run
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import QUICK, daemon, eventually, in_threads, kill, needs_fanotify, unmount_below
from tests.kit.store_samples import content, make_environment, make_layer

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

FILES = {f"f{number}": content(number, 400_000 + number) for number in range(12)}
TOOL = {"agent": content(77, 90_000)}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    needs_fanotify(tmp_path / "cache")
    if not os.path.exists("/dev/fuse"):  # noqa: PTH110
        pytest.skip("no /dev/fuse")
    (tmp_path / "target").mkdir()
    yield tmp_path
    unmount_below(tmp_path)


@pytest.fixture
def store(place: Path) -> PosixStore:
    return PosixStore(place / "store")


def read_tree(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def server_of(cache: Path) -> int:
    """The pid of the FUSE server."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"dsec_layers.fuse.server.flat" in command and os.fsencode(cache) in command:
                return int(entry.name)
    raise AssertionError("no FUSE server runs")


def test_an_environment_by_the_fuse_driver(place: Path, store: PosixStore) -> None:
    samples = [make_layer(store, FILES), make_layer(store, TOOL, kind=Kind.TOOLKIT)]
    with daemon(place / "cache", ["--linger", "0"]) as host:
        made = host.mount(store, make_environment(store, samples), place / "target", driver="fuse")
        assert made.driver == "fuse"
        assert host.show().fetched == 0, "only metadata at first"
        assert read_tree(place / "target") == FILES | TOOL
        report = host.show()
        assert report.fetched == sum(len(sample.segments) for sample in samples)
        assert report.events == 0
        pid = server_of(place / "cache")
        host.umount(place / "target")
        host.stop()
        eventually(lambda: start_time(pid) is None)


def test_the_file_is_the_flat_image(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, FILES)
    with daemon(place / "cache") as host, host.attach(store, [sample.digest], driver="fuse"):
        (image,) = (place / "cache" / "metadata").glob("*.erofs")
        parts = [image.read_bytes()]
        for record in sample.segments:
            blob = sample.layer.segments[int(record["blob"])].digest
            parts.append(decompress(store.read(blob, int(record["offset"]), int(record["stored"])), int(record["size"])))
        path = place / "cache" / "flat" / f"{sample.digest[7:]}.erofs"
        assert path.read_bytes() == b"".join(parts)
        with open(path, "rb") as stream:
            for offset in (0, 4095, len(parts[0]) - 5, len(parts[0]), path.stat().st_size - 3, path.stat().st_size):
                assert os.pread(stream.fileno(), 10_000, offset) == b"".join(parts)[offset : offset + 10_000]
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        with pytest.raises(OSError, match="Read-only"):
            os.open(path, os.O_RDWR)
        with pytest.raises(FileNotFoundError):
            (path.parent / ("0" * 64 + ".erofs")).stat()


def test_both_drivers_share_one_cache(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, FILES)
    with (
        daemon(place / "cache") as host,
        host.attach(store, [sample.digest], driver="fanotify") as first,
        host.attach(store, [sample.digest], driver="fuse") as second,
    ):
        assert first.paths != second.paths
        roots = [first.paths[0], second.paths[0]] * 4
        assert in_threads(8, lambda number: _check(roots[number])) == []
        assert host.show().fetched == len(sample.segments), "each segment once"


def _check(root: Path) -> None:
    assert read_tree(root) == FILES


def test_through_a_loop_device_as_on_older_kernels(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, FILES)
    with daemon(place / "cache") as host, host.attach(store, [sample.digest], driver="fuse") as lease:
        files = layer_files_of(place, store, sample.digest)
        FlatMounter(place / "cache", loop=True).mount(files, place / "target")
        assert read_tree(place / "target") == FILES == read_tree(lease.paths[0])
        assert b"/dev/loop" in Path("/proc/self/mounts").read_bytes().split(os.fsencode(place / "target"))[0].splitlines()[-1]
        umount(place / "target")


def layer_files_of(place: Path, store: PosixStore, digest: str) -> LayerFiles:
    with CacheDirectory(place / "other") as directory:
        return layer_files(directory, store.url, digest, Fetcher(lambda _: store, QUICK))


@pytest.mark.logs("is not a store", "the worker died", r"taking over \d+ events")
def test_e1_the_worker_is_killed_under_readers(place: Path, store: PosixStore) -> None:
    """The server asks again; readers wait."""
    sample = make_layer(store, FILES)
    with daemon(place / "cache") as host, host.attach(store, [sample.digest], driver="fuse") as lease:
        elsewhere = store.root.with_name("elsewhere")
        store.root.rename(elsewhere)
        outcome: list[dict[str, bytes]] = []
        reader = threading.Thread(target=lambda: outcome.append(read_tree(lease.paths[0])), daemon=True)
        reader.start()
        eventually(lambda: host.show().retries > 0)
        kill(host.show().pid)
        elsewhere.rename(store.root)
        reader.join(60)
        assert outcome == [FILES]


@pytest.mark.logs("the FUSE server of .* died")
def test_e1_the_server_is_killed_it_fails_closed_and_a_new_mount_works(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, FILES)
    with daemon(place / "cache", ["--linger", "0"]) as host:
        lease = host.attach(store, [sample.digest], driver="fuse")
        root = os.open(lease.paths[0], os.O_PATH)
        assert (lease.paths[0] / "f0").read_bytes() == FILES["f0"]
        kill(server_of(place / "cache"))
        wrong = 0
        for name, wanted in FILES.items():
            fd = os.open(name, os.O_RDONLY, dir_fd=root)
            try:
                got = os.read(fd, len(wanted))
                wrong += got != wanted[: len(got)]
            except OSError:
                pass
            finally:
                os.close(fd)
        assert wrong == 0
        with host.attach(store, [sample.digest], driver="fuse") as again:
            assert read_tree(again.paths[0]) == FILES
        lease.release()
        os.close(root)


@pytest.mark.logs("bad zstd frame")
def test_d7_a_corrupt_segment_is_an_error(place: Path, store: PosixStore) -> None:
    sample = make_layer(store, FILES)
    blob = store.local_path(sample.own.digest)
    blob.chmod(0o600)
    good = blob.read_bytes()
    blob.write_bytes(bytes(len(good)))
    with daemon(place / "cache") as host, host.attach(store, [sample.digest], driver="fuse") as lease:
        with open(lease.paths[0] / "f3", "rb", buffering=0) as stream, pytest.raises(OSError, match="Input/output"):
            stream.read(100)
        blob.write_bytes(good)
        assert hashlib.sha256((lease.paths[0] / "f3").read_bytes()).digest() == hashlib.sha256(FILES["f3"]).digest()


def test_c5_the_fuse_driver_works_where_fanotify_cannot(place: Path, store: PosixStore) -> None:
    memory = place / "memory"
    memory.mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", memory])
    sample = make_layer(store, FILES)
    with daemon(memory / "cache") as host, host.attach(store, [sample.digest]) as lease:
        assert read_tree(lease.paths[0]) == FILES
        assert host.show().layers[0].driver == "fuse"
