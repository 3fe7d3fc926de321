"""ext4 on an attached disk, mounted through QEMU's storage daemon (NBD in, FUSE out) and a loop device: the public cases E6 and G4."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest

from dsec_layers.linux.mount import umount
from dsec_layers.proc import PIPE, Process, inherited_environment, run, spawn
from tests.kit.tools import need

pytestmark = [pytest.mark.root, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("qemu-storage-daemon", "losetup", "mount", "e2fsck")


def dsec(root: Path, *argv: str | Path, code: int = 0) -> str:
    """The command line on a store and cache below ``root``; its standard output."""
    done = run([sys.executable, "-m", "dsec_layers", *argv], check=False, env=environment(root), cwd=ROOT, timeout=120)
    assert done.code == code, done.stderr.decode()
    return done.stdout.decode()


def environment(root: Path) -> dict[str, str]:
    return inherited_environment() | {"DSEC_STORE": str(root / "store"), "DSEC_CACHE": str(root / "cache")}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    need(*TOOLS)
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        pytest.skip("no /dev/fuse or loop devices here")
    yield tmp_path
    dsec(tmp_path, "cache", "stop")


class Server:
    """``disk attach`` in a process of its own, which can be killed and started again."""

    def __init__(self, stack: ExitStack, root: Path, disk: Path) -> None:
        self._stack = stack
        self._root = root
        self._disk = disk
        self.process = self.start()

    def start(self) -> Process:
        argv = [sys.executable, "-m", "dsec_layers", "disk", "attach", str(self._disk)]
        process = self.process = self._stack.enter_context(spawn(argv, stdout=PIPE, env=environment(self._root), cwd=ROOT))
        self._stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"nbd+unix:")
        return process

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL


@contextmanager
def as_file(root: Path, socket: Path) -> Iterator[Path]:
    """The export as a file, by a client that connects again for up to 60 s."""
    target = root / "nbd"
    target.touch()
    argv = [
        "qemu-storage-daemon",
        *("--blockdev", f"driver=nbd,node-name=disk,server.type=unix,server.path={socket},reconnect-delay=60,discard=unmap"),
        *("--export", f"type=fuse,id=file,node-name=disk,mountpoint={target},writable=on"),
        *("--chardev", f"socket,id=monitor,path={root / 'qmp'},server=on,wait=off", "--monitor", "chardev=monitor"),
    ]
    with spawn(argv) as process:
        due = time.monotonic() + 20
        while not os.path.ismount(target):
            assert process.poll() is None and time.monotonic() < due
            time.sleep(0.01)
        try:
            yield target
        finally:
            umount(target)
            process.kill()  # QEMU 7.2, once it has connected again, does not end when it is asked to


@contextmanager
def mounted(image: Path, target: Path, options: str = "errors=remount-ro") -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    run(["mount", "-t", "ext4", "-o", f"loop,{options}", image, target])
    try:
        yield target
    finally:
        umount(target)


class Writer:
    """Writes files of its own, fsyncs each, and remembers those whose fsync returned: name -> digest."""

    def __init__(self, folder: Path) -> None:
        self.durable: dict[str, str] = {}
        self.error: BaseException | None = None
        self._count = 0
        self._folder = folder
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def wait_for(self, more: int) -> dict[str, str]:
        """Wait until ``more`` files more are durable; what is durable then."""
        with self._changed:
            wanted = self._count + more
            assert self._changed.wait_for(lambda: self._count >= wanted or self.error, 90)
            assert self.error is None, self.error
            return dict(self.durable)

    def _run(self) -> None:
        try:
            number = 0
            while not self._stopping.is_set():
                self._write(f"f{number % 400}-{number}", number)
                number += 1
        except BaseException as error:  # noqa: BLE001 - reported by wait_for
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _write(self, name: str, number: int) -> None:
        data = hashlib.shake_128(number.to_bytes(8, "big")).digest(1000 + number * 7919 % 200_000)
        path = self._folder / name
        with open(path, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        old = next(iter(self.durable)) if len(self.durable) > 300 else None
        with self._changed:
            self.durable[name] = hashlib.sha256(data).hexdigest()
            self._count += 1
            if old is not None:  # deletions and reuse of blocks belong to the load
                del self.durable[old]
            self._changed.notify_all()
        if old is not None:
            (self._folder / old).unlink()


def check(folder: Path, durable: dict[str, str]) -> None:
    for name, digest in durable.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_e6_server_killed_under_a_mounted_file_system(place: Path) -> None:
    disk = place / "disk"
    dsec(place, "disk", "create", disk, "--size", "256M", "--mkfs", "ext4")
    dsec(place, "disk", "commit", disk, "--name", "empty:1")
    with ExitStack() as stack:
        server = Server(stack, place, disk)
        image = stack.enter_context(as_file(place, disk / "nbd.sock"))
        with mounted(image, place / "mnt") as folder, Writer(folder) as writer:
            for _ in range(3):
                writer.wait_for(20)
                server.kill()
                server.start()
                writer.wait_for(5)
            durable = writer.wait_for(1)
            options = next(line.split()[3] for line in Path("/proc/mounts").read_text().splitlines() if f" {folder} " in line)
            assert "rw" in options.split(",")
            check(folder, {name: digest for name, digest in durable.items() if (folder / name).exists()})
        last = dict(writer.durable)
        with mounted(image, place / "mnt", "ro") as folder:
            check(folder, last)
    dsec(place, "disk", "commit", disk, "--name", "after:1")
    dsec(place, "disk", "convert", "after:1", "-o", place / "raw")
    assert run(["e2fsck", "-fn", place / "raw"], check=False).code == 0


def test_g4_snapshots_of_a_file_system_under_write_load(place: Path) -> None:
    disk = place / "disk"
    dsec(place, "disk", "create", disk, "--size", "256M", "--mkfs", "ext4")
    dsec(place, "disk", "attach", disk, "--detach")
    before: list[dict[str, str]] = []
    after: list[dict[str, str]] = []
    with as_file(place, disk / "nbd.sock") as image, mounted(image, place / "mnt") as folder, Writer(folder) as writer:
        for number in range(4):
            before.append(writer.wait_for(15))
            dsec(place, "disk", "snapshot", disk, *(("--name", f"snap:{number}") if number % 2 else ()))
            after.append(writer.wait_for(0))
            if not number % 2:
                dsec(place, "disk", "convert", disk, "--name", f"snap:{number}")
    dsec(place, "disk", "detach", disk)
    for number in (1, 3):
        raw = place / f"raw{number}"
        dsec(place, "disk", "convert", f"snap:{number}", "-o", raw)
        assert run(["e2fsck", "-E", "journal_only", "-p", raw], check=False).code in (0, 1)
        assert run(["e2fsck", "-fn", raw], check=False).code == 0
        with mounted(raw, place / "mnt", "ro") as folder:
            kept = {name: digest for name, digest in before[number].items() if name in after[number]}  # the others were deleted meanwhile
            assert kept
            check(folder, kept)


def test_a_full_disk_below_an_upper(place: Path) -> None:
    """ENOSPC for the guest's writes; what was durable stays; when there is room again, all goes on."""
    small = place / "small"
    small.mkdir()
    with open(place / "small.img", "wb") as stream:
        stream.truncate(64 << 20)
    run(["mkfs.ext4", "-q", "-F", place / "small.img"])
    with mounted(place / "small.img", small, "nodelalloc") as folder:
        dsec(place, "disk", "create", folder / "disk", "--size", "256M")
        dsec(place, "disk", "attach", folder / "disk", "--detach")
        uri = f"nbd+unix:///?socket={folder / 'disk/nbd.sock'}"
        model: dict[int, int] = {}
        full = 0
        for number in range(0, 80, 4):  # 80 MiB cannot fit
            done = run(["qemu-io", "-f", "raw", "-c", f"write -P {number + 1} {number}M 4M", "-c", "flush", uri], check=False)
            if b"No space left" in done.stdout + done.stderr:
                full += 1
            elif done.code == 0:
                model[number] = number + 1
        assert full >= 3 and len(model) >= 8
        ballast = sorted(model)[:3]
        commands = [item for number in ballast for item in ("-c", f"discard {number}M 4M")]
        assert run(["qemu-io", "-f", "raw", *commands, "-c", "flush", uri], check=False).code == 0
        for number in ballast:
            model[number] = 0
        for number in range(100, 108, 4):
            assert run(["qemu-io", "-f", "raw", "-c", f"write -P {number} {number}M 4M", "-c", "flush", uri], check=False).code == 0
            model[number] = number
        for _ in range(2):
            commands = [item for number, value in model.items() for item in ("-c", f"read -P {value} {number}M 4M")]
            done = run(["qemu-io", "-f", "raw", *commands, uri], check=False)
            assert done.code == 0 and b"verification failed" not in done.stdout, done.stdout
            status = json.loads(dsec(place, "--json", "disk", "show", folder / "disk"))
            assert status["uri"]
            dsec(place, "disk", "detach", folder / "disk")
            dsec(place, "disk", "attach", folder / "disk", "--detach")
        dsec(place, "disk", "detach", folder / "disk")
