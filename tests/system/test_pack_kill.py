"""Builds that are killed, run out of disk, or race: the store stays whole and the same command finishes the work."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.api.build import import_source
from dsec_layers.api.session import Session
from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.builders.sources.detect import detect
from dsec_layers.errors import NoSpace
from dsec_layers.layers.descriptor import Kind
from dsec_layers.registry.objects import find_objects
from dsec_layers.registry.verify import verify
from dsec_layers.store.posix import PosixStore
from tests.kit.pack_inputs import noise, text

SERVER = """
import os, signal, sys
from dsec_layers.api.build import import_source
from dsec_layers.api.session import Session
from dsec_layers.errors import DsecError

def dying(function):
    def call(*args, **kwargs):
        global deadly
        deadly -= 1
        if deadly == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

def build(source, store):
    with Session(store, store + ".cache") as session:
        session.catalog
        for name in ("fsync", "link", "rename", "replace", "unlink", "utime"):
            setattr(os, name, dying(getattr(os, name)))
        return import_source(session, source, kind="base", name="some:thing", workers=2).digest

for line in sys.stdin:
    source, store, deadly = line.split()
    deadly = int(deadly)
    child = os.fork()
    if child == 0:
        answer = "failed"
        try:
            answer = build(source, store)
        finally:
            print(answer, flush=True)
            os._exit(0)
    print("ready", child, flush=True)
    if os.waitpid(child, 0)[1]:
        print("killed", flush=True)
"""


class Builder:
    """A process that has everything imported and forks for each build. ``deadly``: the child kills itself at that call that changes the file system."""

    def __init__(self, process: proc.Process, source: Path) -> None:
        assert process.stdin and process.stdout
        self.requests, self.answers = process.stdin, process.stdout
        self.source = source

    def start(self, store: Path, deadly: int = 0) -> int:
        """Start a build; its process id."""
        self.requests.write(f"{self.source} {store} {deadly}\n".encode())
        self.requests.flush()
        ready, child = self.answers.readline().split()
        assert ready == b"ready"
        return int(child)

    def outcome(self) -> str:
        """``killed``, ``failed``, or the digest."""
        return self.answers.readline().decode().strip()

    def build(self, store: Path, deadly: int = 0) -> str:
        """Start a build and wait for its end."""
        self.start(store, deadly)
        return self.outcome()


@pytest.fixture
def builder(source: Path) -> Iterator[Builder]:
    """A builder of the source."""
    with proc.spawn([sys.executable, "-c", SERVER], stdin=proc.PIPE, stdout=proc.PIPE) as process:
        yield Builder(process, source)
        assert process.stdin
        process.stdin.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight files, a large one among them."""
    root = tmp_path_factory.mktemp("input")
    for nth in range(8):
        (root / f"f{nth}").write_bytes(noise(nth, 200_000) + text(nth, 300_000))
    (root / "large").write_bytes(noise(99, 6 << 20))
    for path in [root, *root.iterdir()]:
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return root


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest in an empty store."""
    store = PosixStore(tmp_path_factory.mktemp("whole") / "store")
    packed = import_source(Session(store.url, tmp_path_factory.mktemp("cache")), source, kind="base", name="some:thing")
    return packed.digest


def check_whole(root: Path) -> int:
    """Every name leads to a whole layer, every blob is what its digest says; how many manifests there are."""
    store = PosixStore(root)
    for ref in store.list_refs():
        assert verify(store, ref.digest, deep=True).findings == ()
    for info in store.list():
        assert hashlib.sha256(store.local_path(info.digest).read_bytes()).hexdigest() == info.digest[7:]
    manifests = list(find_objects(store))
    for info, _ in manifests:
        assert verify(store, info.digest, deep=True).findings == ()
    store.close()
    return len(manifests)


@pytest.mark.slow
def test_killed_at_any_change_of_the_file_system(builder: Builder, tmp_path: Path, expected: str) -> None:
    """Before each fsync, link, rename and so on, one after the other, in a store of its own."""
    outcomes: list[str] = []
    while not outcomes or outcomes[-1] == "killed":
        assert len(outcomes) < 100
        where = tmp_path / str(len(outcomes))
        outcomes.append(builder.build(where / "store", len(outcomes) + 1))
        check_whole(where / "store")
        assert builder.build(where / "store") == expected
        assert check_whole(where / "store") == 1
        shutil.rmtree(where)
    assert outcomes[-1] == expected and len(outcomes) > 10


@pytest.mark.slow
def test_killed_at_random_moments_in_one_store(builder: Builder, tmp_path: Path, expected: str) -> None:
    began = time.monotonic()
    assert builder.build(tmp_path / "warm") == expected
    whole = time.monotonic() - began
    generator = random.Random(os.environ.get("DSEC_TEST_SEED", "1"))
    store = tmp_path / "store"
    for _ in range(12):
        child = builder.start(store)
        time.sleep(generator.uniform(0, whole))  # not to wait for anything: the moment of the kill is what is random
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        assert builder.outcome() in ("killed", expected)
        if (store / "dsec-store.json").exists():
            check_whole(store)
    assert builder.build(store) == expected
    assert check_whole(store) == 1


def test_two_builds_of_one_name_at_the_same_time(source: Path, tmp_path: Path, expected: str) -> None:
    outcomes: list[str] = []

    def run(start: threading.Barrier) -> None:
        with Session(f"{tmp_path}/store", tmp_path / "cache") as session:
            start.wait()
            outcomes.append(import_source(session, source, kind="base", name="some:thing").digest)

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(barrier,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [expected] * 3
    with closing(PosixStore(tmp_path / "store")) as store:
        assert [(ref.name, ref.digest) for ref in store.list_refs()] == [("some:thing", expected)]
    check_whole(tmp_path / "store")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    proc.run(["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=10000", "tmpfs", point])
    try:
        yield point
    finally:
        proc.run(["umount", point])


@pytest.mark.root
def test_a_full_disk_leaves_nothing_behind(source: Path, tmp_path: Path, small_disk: Path, expected: str) -> None:
    store = PosixStore(small_disk / "store")
    before = free(small_disk)
    with pytest.raises(NoSpace):
        pack_layer(store, detect(source).ingest, kind=Kind.BASE, workers=2)
    assert list(store.list()) == [] and list(store.list_refs()) == []
    assert free(small_disk) >= before - 65536
    proc.run(["mount", "-o", "remount,size=40m", small_disk])
    with Session(store.url, tmp_path / "cache") as session:
        assert import_source(session, source, kind="base", name="some:thing").digest == expected


def free(path: Path) -> int:
    """Free bytes."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
