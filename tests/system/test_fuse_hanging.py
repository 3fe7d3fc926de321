"""Two stores of one daemon, of which one hangs: the file system it is on does not answer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dsec_layers.errors import NotFound, StoreError
from dsec_layers.fuse.client.host import Host
from dsec_layers.linux.mount import umount
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import daemon, eventually, needs_fanotify, processes_of, unmount_below
from tests.kit.store_samples import content, make_layer

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.logs("/a hangs; it is left alone", r"/a\)?: (not here after|the cache is closed)"),
]

HANGING = {f"a{number:02}": content(number, 30_000) for number in range(40)}
HEALTHY = {f"b{number:02}": content(100 + number, 30_000) for number in range(8)}
READERS = 30
DEADLINE = 2


class StoppableStore:
    """A store on a file system whose server can be stopped."""

    def __init__(self, place: Path) -> None:
        self._mounted = place / "a"
        self._mounted.mkdir()
        self.sample = make_layer(PosixStore(place / "behind"), HANGING, per_segment=1)
        command = [sys.executable, "-m", "tests.kit.stopped_fs", str(place / "behind"), str(self._mounted)]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = self._mounted.as_uri()
        eventually(lambda: self._mounted.is_mount() and (self._mounted / "dsec-store.json").exists())

    def stop(self) -> None:
        for path in (self._mounted / "blobs").rglob("*"):
            if path.is_file():  # else what the kernel has read ahead is answered all the same
                with path.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        with suppress(NotFound):
            umount(self._mounted, lazy=True)
        self._server.kill()
        self._server.wait()


class Readers:
    """Threads that read one file each."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.outcomes: list[int] = []
        for name in names:
            threading.Thread(target=self._read, args=(root / name,), daemon=True).start()

    def _read(self, path: Path) -> None:
        try:
            right = path.read_bytes() == HANGING[path.name]
            self.outcomes.append(0 if right else -1)
        except OSError as error:
            self.outcomes.append(error.errno or -1)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    needs_fanotify(tmp_path / "cache")
    if not os.path.exists("/dev/fuse"):  # noqa: PTH110
        pytest.skip("no /dev/fuse")
    yield tmp_path
    unmount_below(tmp_path)


@pytest.fixture
def hanging(place: Path) -> Iterator[StoppableStore]:
    store = StoppableStore(place)
    yield store
    store.end()


@pytest.mark.parametrize("driver", ["fanotify", "fuse"])
def test_b2_a_store_that_hangs_keeps_nobody_from_another(place: Path, hanging: StoppableStore, driver: str) -> None:
    healthy = PosixStore(place / "b")
    sample = make_layer(healthy, HEALTHY, per_segment=1)
    names = sorted(HANGING)
    with daemon(place / "cache", ["--deadline", str(DEADLINE), "--linger", "0"]) as host:
        with ExitStack() as leases:
            (first,) = leases.enter_context(host.attach(hanging.url, [hanging.sample.digest], driver=driver)).paths
            (second,) = leases.enter_context(host.attach(healthy, [sample.digest], driver=driver)).paths
            hanging.stop()
            readers = Readers(first, names[:READERS])
            time.sleep(0.5)  # until they hang
            began = time.monotonic()
            assert {path.name: path.read_bytes() for path in second.iterdir()} == HEALTHY
            assert time.monotonic() - began < 2
            assert not readers.outcomes
            eventually(lambda: len(readers.outcomes) == READERS, DEADLINE)  # though the kernel asks again, even page by page
            assert set(readers.outcomes) == {errno.EIO}, "at the deadline"
            hanging.go_on()
            assert (first / names[READERS]).read_bytes() == HANGING[names[READERS]], "the first read after it is healed"
            if driver == "fanotify":  # by FUSE the kernel has read some segments ahead
                hanging.stop()
                readers = Readers(first, names[-2:])
                eventually(lambda: readers.outcomes == [errno.EIO] * 2, 2 * DEADLINE)
        began = time.monotonic()
        host.stop()
        assert time.monotonic() - began < 10, "the threads that hang keep nobody from stopping"


def test_a_mount_from_a_store_that_hangs_fails_at_the_deadline(place: Path, hanging: StoppableStore) -> None:
    """Nothing of the store is known yet: even to open it hangs."""
    healthy = PosixStore(place / "b")
    sample = make_layer(healthy, HEALTHY, per_segment=1)
    with daemon(place / "cache", ["--deadline", str(DEADLINE), "--linger", "0"]) as host:
        hanging.stop()
        failed: list[float] = []

        def attach() -> None:
            began = time.monotonic()
            with Host(place / "cache") as other, pytest.raises(StoreError, match=f"{hanging.url}.*not here after {DEADLINE} s"):
                other.attach(hanging.url, [hanging.sample.digest])
            failed.append(time.monotonic() - began)

        threads = [threading.Thread(target=attach, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        with host.attach(healthy, [sample.digest]) as lease:
            assert {path.name: path.read_bytes() for path in lease.paths[0].iterdir()} == HEALTHY
            assert time.monotonic() - began < 1.5
        eventually(lambda: len(failed) == len(threads), 2 * DEADLINE)
        assert all(DEADLINE - 0.1 < seconds < DEADLINE + 1 for seconds in failed)
        hanging.go_on()
        host.attach(hanging.url, [hanging.sample.digest]).release()
        host.stop()


@pytest.mark.parametrize("verb", ["attach", "mount"])
def test_the_daemon_stops_while_a_mount_waits_for_a_store_that_hangs(place: Path, hanging: StoppableStore, verb: str) -> None:
    with daemon(place / "cache", ["--deadline", "60"]) as host:
        hanging.stop()
        (place / "target").mkdir()
        failed: list[str] = []

        def ask() -> None:
            with Host(place / "cache") as other, pytest.raises(StoreError) as raised:
                if verb == "attach":
                    other.attach(hanging.url, [hanging.sample.digest])
                else:
                    other.mount(hanging.url, hanging.sample.digest, place / "target")
            failed.append(raised.value.message)

        threading.Thread(target=ask, daemon=True).start()
        time.sleep(0.3)
        began = time.monotonic()
        host.stop()
        assert time.monotonic() - began < 5
        eventually(lambda: len(failed) == 1, 5)
        assert hanging.url in failed[0] and "closed" in failed[0]
        assert processes_of(place / "cache") == []
