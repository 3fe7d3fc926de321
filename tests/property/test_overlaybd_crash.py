"""What survives a crash: every acknowledged write, and of the others each sector whole or not at all.

Two ways. A power cut is played through: every write the upper makes is recorded, and from any prefix of the record an adversary decides which writes that were
not yet synced reached the disk, whole, in part or not. And a writing child is killed for real.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_layers.digest import Buffer
from dsec_layers.fsio import pwrite_all
from dsec_layers.linux.fallocate import punch_hole
from dsec_layers.overlaybd import Disk, Upper

UPPER = "dsec_layers.overlaybd.upper"
SIZE = 64 << 10
SECTORS = SIZE // 512


@dataclass
class Recorder:
    """All that happens to the two files, in order: ("write", file, offset, data), ("sync", file), ("size", file, size), ("ack", operation number)."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def attach(self, patch: pytest.MonkeyPatch) -> None:
        def write(fd: int, data: Buffer, offset: int) -> None:
            self.events.append(("write", self.names[fd], offset, bytes(data)))
            pwrite_all(fd, data, offset)

        def punch(fd: int, offset: int, length: int) -> None:
            self.events.append(("write", self.names[fd], offset, bytes(length)))
            punch_hole(fd, offset, length)

        def sync(fd: int) -> None:
            self.events.append(("sync", self.names[fd]))

        def truncate(fd: int, size: int) -> None:
            self.events.append(("size", self.names[fd], size))
            os.truncate(fd, size)

        patch.setattr(f"{UPPER}.pwrite_all", write)
        patch.setattr(f"{UPPER}.punch_hole", punch)
        for name, replacement in (("fsync", sync), ("fdatasync", sync), ("ftruncate", truncate)):
            patch.setattr(os, name, replacement)

    def cut(self, until: int, rng: random.Random) -> dict[str, bytearray]:
        """The files as a power cut after ``until`` events may leave them."""
        files = {name: bytearray() for name in self.names.values()}
        waiting: list[tuple[object, ...]] = []
        for event in self.events[:until]:
            if event[0] == "sync":
                for old in [old for old in waiting if old[1] == event[1]]:
                    apply(files, old)
                    waiting.remove(old)
            elif event[0] != "ack":
                waiting.append(event)
        for event in waiting:
            fate = rng.random()
            if fate < 0.4:
                apply(files, event)
            elif fate < 0.7 and event[0] == "write":  # sectors of it, in no order
                data = event[3]
                assert isinstance(data, bytes) and isinstance(event[2], int)
                for at in range(0, len(data), 512):
                    if rng.random() < 0.5:
                        apply(files, ("write", event[1], event[2] + at, data[at : at + 512]))
        return files


def apply(files: dict[str, bytearray], event: tuple[object, ...]) -> None:
    kind, name, number, *rest = event
    assert isinstance(name, str) and isinstance(number, int)
    file = files[name]
    if kind == "size":
        file.extend(bytes(max(0, number - len(file))))
        del file[number:]
        return
    (data,) = rest
    assert isinstance(data, bytes)
    file.extend(bytes(max(0, number + len(data) - len(file))))
    file[number : number + len(data)] = data


def operations(rng: random.Random, count: int) -> Iterator[tuple[str, int, int]]:
    for _ in range(count):
        kind = rng.choices(["write", "trim", "flush"], [6, 2, 2])[0]
        first = rng.randrange(SECTORS)
        length = min(rng.choice([1, 2, 8, 8, 16, 24]), SECTORS - first)
        yield kind, first, length


def play(seed: int, folder: Path, recorder: Recorder) -> list[tuple[int, list[tuple[int, bytes]]]]:
    """Random operations on a new upper. Returns for each operation its place among the events and the sectors it wrote."""
    rng = random.Random(seed)
    history: list[tuple[int, list[tuple[int, bytes]]]] = []
    with ExitStack() as stack:
        fds = []
        for name in ("data", "index"):
            fd = os.open(folder / name, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
            stack.callback(os.close, fd)
            recorder.names[fd] = name
            fds.append(fd)
        upper = Upper.create(fds[0], fds[1], SIZE)
        disk = Disk([], upper)
        recorder.events.append(("ack", 0))
        for number, (kind, first, length) in enumerate(operations(rng, 40), 1):
            if kind == "write":
                data = rng.randbytes(length * 512)
                disk.pwrite(first * 512, data)
                history.append((number, [(first + i, data[i * 512 : i * 512 + 512]) for i in range(length)]))
            elif kind == "trim":
                disk.trim(first * 512, length * 512)
                history.append((number, [(first + i, bytes(512)) for i in range(length)]))
            else:
                disk.flush()
                recorder.events.append(("ack", number))
    return history


def check(
    disk: Disk, history: list[tuple[int, list[tuple[int, bytes]]]], acknowledged: int
) -> None:  # fmt: skip
    allowed = [{bytes(512)} for _ in range(SECTORS)]
    for number, sectors in history:
        for sector, data in sectors:
            if number <= acknowledged:
                allowed[sector] = {data}
            else:
                allowed[sector].add(data)
    for sector in range(SECTORS):
        assert disk.pread(sector * 512, 512) in allowed[sector], f"sector {sector} after operation {acknowledged}"


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1 << 32))
def test_a_power_cut_at_any_point(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{UPPER}.MAX_PENDING", 6)
        recorder.attach(patch)
        history = play(seed, folder, recorder)
    rng = random.Random(seed)
    born = recorder.events.index(("ack", 0)) + 1
    for until in range(born, len(recorder.events) + 1):
        acknowledged = max(event[1] for event in recorder.events[:until] if event[0] == "ack")  # type: ignore[type-var]
        assert isinstance(acknowledged, int)
        for name, data in recorder.cut(until, rng).items():
            (folder / name).write_bytes(data)
        with (folder / "data").open("r+b") as data_file, (folder / "index").open("r+b") as index_file:
            upper = Upper.open(data_file.fileno(), index_file.fileno())
            disk = Disk([], upper)
            check(disk, history, acknowledged)
            disk.pwrite(0, b"x" * 512)
            disk.flush()
        with (folder / "data").open("r+b") as data_file, (folder / "index").open("r+b") as index_file:
            again = Upper.open(data_file.fileno(), index_file.fileno())
            assert again.recovery.reason == ""
            assert Disk([], again).pread(0, 512) == b"x" * 512


CHILD = """
import os, random, sys
from dsec_layers.overlaybd import Disk, Upper
from tests.property.test_overlaybd_crash import SIZE, SECTORS
folder, seed = sys.argv[1], int(sys.argv[2])
fds = [os.open(f"{folder}/{name}", os.O_CREAT | os.O_RDWR, 0o600) for name in ("data", "index")]
disk = Disk([], Upper.create(fds[0], fds[1], SIZE))
rng = random.Random(seed)
number = 0
while True:
    number += 1
    first = rng.randrange(SECTORS)
    length = min(rng.choice([1, 2, 8, 16]), SECTORS - first)
    disk.pwrite(first * 512, b"".join(b"%16d" % (number * 1000 + first + i) * 32 for i in range(length)))
    if rng.random() < 0.1:
        disk.flush()
        os.write(1, b"%d\\n" % number)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_writer_loses_nothing_that_was_flushed(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    wanted = rng.randrange(1, 60)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), str(seed)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(wanted)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split()]  # it may have flushed on until the signal came
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    last = acknowledged[-1]
    model = random.Random(seed)
    newest = [0] * SECTORS  # the number of the last acknowledged write to each sector
    for number in range(1, last + 1):
        first = model.randrange(SECTORS)
        for i in range(min(model.choice([1, 2, 8, 16]), SECTORS - first)):
            newest[first + i] = number
        model.random()
    with (tmp_path / "data").open("r+b") as data_file, (tmp_path / "index").open("r+b") as index_file:
        disk = Disk([], Upper.open(data_file.fileno(), index_file.fileno()))
        for sector in range(SECTORS):
            data = disk.pread(sector * 512, 512)
            if data == bytes(512):
                assert newest[sector] == 0
                continue
            number, written = divmod(int(data[:16]), 1000)
            assert data == data[:16] * 32 and written == sector
            assert number >= newest[sector]
