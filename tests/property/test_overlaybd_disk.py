"""Disks under random writes, discards, snapshots, commits and reopenings, against plain bytes in memory."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dsec_layers.blocksource import BytesSource, FileSource, MemoryDisk
from dsec_layers.overlaybd import (
    Algorithm,
    BlockCache,
    Disk,
    LsmtLayer,
    Packing,
    Upper,
    ZFileOptions,
    commit,
    merge,
    open_layer,
    open_upper_pair,
)
from tests.kit.overlaybd_vectors import assemble

SIZE = 256 << 10
PACKINGS = (
    Packing(),
    Packing(tar=True),
    Packing(zfile=ZFileOptions()),
    Packing(zfile=ZFileOptions(Algorithm.ZSTD, 16384), tar=True),
    Packing(zfile=ZFileOptions(crc=False, rewrite_header=False)),
)
TIGHT = {  # limits so small that everything that happens rarely happens all the time
    "upper.MAX_PENDING": 4, "upper._MAX_WRITE": 16, "upper.MAX_LENGTH": 50, "upper._PUNCHES": 2,
    "upper_index._MIN_RECENT": 3, "disk._MAX_TRIMS": 2, "disk._MAX_SEEN": 4, "disk._LOOK": 2,
    "segments._FOLD": 10, "segments._ROWS": 3, "segments._FEW": 2, "layer._LOG_CHUNK": 3, "packing._ROWS": 2, "packing._READ": 2048, "zfile._CACHED": 8192, "zfile._READ": 16384,
}  # fmt: skip
offsets = st.one_of(
    st.integers(0, SIZE), st.integers(0, SIZE // 512).map(lambda n: n * 512), st.integers(0, SIZE // 4096).map(lambda n: n * 4096)
)
lengths = st.one_of(st.integers(0, 9000), st.integers(1, 4).map(lambda n: n * 4096), st.just(100_000))


class Files:
    """Pairs of files of uppers in a folder that goes away."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="overlaybd-")
        self.fds: list[int] = []
        self.count = 0

    def pair(self) -> tuple[int, int]:
        self.count += 1
        return self.open(self.count)

    def open(self, number: int) -> tuple[int, int]:
        base = Path(self.folder.name) / str(number)
        fds = tuple(os.open(f"{base}.{name}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600) for name in ("data", "index"))
        self.fds += fds
        return fds[0], fds[1]

    def close(self, fds: tuple[int, int]) -> None:
        for fd in fds:
            self.fds.remove(fd)
            os.close(fd)

    def done(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.folder.cleanup()


class DiskMachine(RuleBasedStateMachine):
    """The disk under test beside its model."""

    @initialize(lower=st.booleans(), tight=st.booleans())
    def start(self, lower: bool, tight: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        for name, value in TIGHT.items() if tight else ():
            self.patch.setattr(f"dsec_layers.overlaybd.{name}", value)
        self.files = Files()
        self.model = MemoryDisk(SIZE)
        self.layers: list[LsmtLayer] = []
        self.cache = BlockCache(64 << 10)
        self.fds = self.files.pair()
        self.upper = Upper.create(*self.fds, SIZE)
        self.disk = Disk([], self.upper)
        if lower:
            self.write(1000, 60_000, 1)
            self.commit_upper(PACKINGS[2])

    @rule(offset=offsets, length=lengths, seed=st.integers(0, 2**32))
    def write(self, offset: int, length: int, seed: int) -> None:
        data = random.Random(seed).randbytes(min(length, SIZE - offset))
        self.model.pwrite(offset, data)
        self.disk.pwrite(offset, data)

    @rule(offset=offsets, length=lengths)
    def write_zeroes(self, offset: int, length: int) -> None:
        length = min(length, SIZE - offset)
        self.model.write_zeroes(offset, length)
        self.disk.write_zeroes(offset, length)

    @rule(offset=offsets, length=lengths)
    def trim(self, offset: int, length: int) -> None:
        length = min(length, SIZE - offset)
        first, end = -(-offset // 512) * 512, (offset + length) // 512 * 512
        if first < end:
            self.model.write_zeroes(first, end - first)
        self.disk.trim(offset, length)

    @rule()
    def flush(self) -> None:
        self.disk.flush()

    @rule()
    def snapshot(self) -> None:
        self.fds = self.files.pair()
        self.upper = Upper.create(*self.fds, 0)
        self.layers.append(self.disk.snapshot(self.upper))

    @rule(packing=st.sampled_from(PACKINGS))
    def commit_upper(self, packing: Packing) -> None:
        """The upper becomes a sealed blob, and the disk goes on over it."""
        blob = assemble(commit(self.upper.freeze(), packing))
        self.layers.append(open_layer(BytesSource(blob), cache=self.cache))
        self.renew()

    @rule(packing=st.sampled_from(PACKINGS))
    def merge_layers(self, packing: Packing) -> None:
        self.disk.flush()
        if self.layers:
            self.layers = [open_layer(BytesSource(assemble(merge(self.layers, packing))), cache=self.cache)]
            self.disk = Disk(self.layers, self.upper)

    @rule()
    def seal(self) -> None:
        """The upper is sealed in place and read back as a layer."""
        sealed = self.upper.seal()
        opened = open_layer(FileSource(self.fds[0]))
        for name in ("lba", "end", "moffset", "zeroed"):
            assert getattr(opened.segments, name).tolist() == getattr(sealed.segments, name).tolist()
        self.layers.append(opened)
        self.renew()

    @rule()
    def reopen(self) -> None:
        self.disk.flush()
        number = self.files.count
        self.files.close(self.fds)
        self.fds = self.files.open(number)
        self.upper = Upper.open(*self.fds)
        assert (self.upper.recovery.dropped, self.upper.recovery.reason) == (0, "")
        self.disk = Disk(self.layers, self.upper)

    @rule(offset=offsets, length=lengths)
    def read(self, offset: int, length: int) -> None:
        length = min(length, SIZE - offset)
        assert self.disk.pread(offset, length) == self.model.pread(offset, length)

    @invariant()
    def same(self) -> None:
        assert self.disk.pread(0, SIZE) == self.model.pread(0, SIZE)

    @rule(offset=offsets, length=lengths)
    def extents(self, offset: int, length: int) -> None:
        length = min(length, SIZE - offset)
        at = offset
        for extent in self.disk.extents(offset, length):
            assert extent.offset == at and extent.length > 0
            at += extent.length
            if extent.kind != "data":
                assert not any(self.model.pread(extent.offset, extent.length))
        assert at == offset + length

    @rule()
    def the_files_say_what_memory_says(self) -> None:
        self.disk.flush()
        told = open_upper_pair(FileSource(self.fds[0]), FileSource(self.fds[1])).segments
        held = self.upper._index.settle()
        for name in ("lba", "end", "moffset", "zeroed"):
            assert getattr(told, name).tolist() == getattr(held, name).tolist()

    def renew(self) -> None:
        self.fds = self.files.pair()
        self.upper = Upper.create(*self.fds, SIZE)
        self.disk = Disk(self.layers, self.upper)

    def teardown(self) -> None:
        self.patch.undo()
        self.files.done()


DiskMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDisk = pytest.mark.slow(DiskMachine.TestCase)
