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

from dsec_layers.errors import NotFound
from dsec_layers.linux.mount import umount
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import daemon, eventually, needs_fanotify, unmount_below
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
            if driver == "fanotify":
                eventually(lambda: len(readers.outcomes) > 0, 30)
                assert set(readers.outcomes) == {errno.EIO}, "at the deadline"
            else:
                time.sleep(2 * DEADLINE)  # the kernel asks again for each page, so that it takes its readers many deadlines
            hanging.go_on()
            assert (first / names[READERS]).read_bytes() == HANGING[names[READERS]], "the first read after it is healed"
            eventually(lambda: len(readers.outcomes) == READERS, 30)
            assert set(readers.outcomes) <= {0, errno.EIO}
            if driver == "fanotify":
                hanging.stop()
                readers = Readers(first, names[-2:])
                eventually(lambda: readers.outcomes == [errno.EIO] * 2, 30)
        began = time.monotonic()
        host.stop()
        assert time.monotonic() - began < 10, "the threads that hang keep nobody from stopping"
