"""The writable layer: what is durable when, what is refused, where space comes back."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_layers.blocksource import BytesSource, FileSource, MemoryDisk
from dsec_layers.errors import Conflict, ImageError, LimitError, NoSpace, StoreError, UsageError
from dsec_layers.fsio import pread_exact
from dsec_layers.overlaybd import Disk, LsmtLayer, Packing, Upper, commit, open_layer, open_upper_pair
from dsec_layers.overlaybd.lsmt import SPACE, Header
from tests.kit.overlaybd_vectors import DISKS, EXPECTED, STEMS, UUIDS, assemble, script_bytes, sha256, vector

UPPER = "dsec_layers.overlaybd.upper"
SIZE = 1 << 20


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


class Pair:
    """The two files of an upper, opened anew as often as wanted."""

    def __init__(self, folder: Path, name: str = "upper") -> None:
        self.paths = (folder / f"{name}.data", folder / f"{name}.index")
        self.fds: list[int] = []

    def open(self) -> tuple[int, int]:
        self.close()
        self.fds = [os.open(path, os.O_CREAT | os.O_RDWR, 0o600) for path in self.paths]
        return self.fds[0], self.fds[1]

    def create(self, size: int = SIZE) -> Upper:
        return Upper.create(*self.open(), size)

    def reopen(self) -> Upper:
        return Upper.open(*self.open())

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    pairs: list[Pair] = []

    def one(name: str) -> Pair:
        pairs.append(Pair(tmp_path, name))
        return pairs[-1]

    yield one
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(make: Callable[[str], Pair]) -> Pair:
    return make("upper")


def test_official_layers_come_out_of_their_scripts(make: Callable[[str], Pair]) -> None:
    layers: list[LsmtLayer] = []
    for number, stem in enumerate(STEMS):
        upper = make(stem).create(64 << 20)
        disk = Disk(layers, upper)
        for offset, what in script_bytes(stem):
            if isinstance(what, int):
                upper.discard(offset // 512, (offset + what) // 512)  # the disk would leave out what is zero already
            else:
                disk.pwrite(offset, what)
        assert sha256(disk) == EXPECTED[DISKS[number]]
        packing = Packing(UUIDS[number], UUIDS[number - 1] if number else None, stem.encode())
        blob = assemble(commit(upper.freeze(), packing))
        assert blob == vector(stem + ".lsmt")
        layers.append(open_layer(BytesSource(blob)))


def test_official_uppers_can_be_written_on(pair: Pair) -> None:
    for path, kind in zip(pair.paths, ("data", "index"), strict=True):
        path.write_bytes(vector(f"{STEMS[0]}.rw.{kind}"))
    disk = Disk([], pair.reopen())
    assert sha256(disk) == EXPECTED[DISKS[0]]
    disk.pwrite(1 << 20, b"new" * 1000)
    disk.flush()
    disk = Disk([], pair.reopen())
    assert disk.pread(1 << 20, 3000) == b"new" * 1000
    assert disk.pread(0, 14) == b"superblock-lik"


def test_headers_of_a_new_upper(pair: Pair) -> None:
    Upper.create(*pair.open(), SIZE, uuid=UUIDS[0], parent_uuid=UUIDS[1], user_tag=b"tag")
    data, index = (Header.parse(path.read_bytes()) for path in pair.paths)
    assert (data.flags, data.index_offset, index.flags, index.index_offset) == (3, 0, 1, 4096)
    for header in (data, index):
        assert (header.uuid, header.parent_uuid, header.user_tag, header.virtual_size) == (UUIDS[0], UUIDS[1], b"tag", SIZE)
    assert [path.stat().st_size for path in pair.paths] == [SPACE, SPACE]


def test_what_is_not_flushed_is_not_in_the_index(pair: Pair) -> None:
    upper = pair.create()
    upper.write(0, b"a" * 512)
    assert pair.paths[1].stat().st_size == SPACE
    upper.flush()
    assert pair.paths[1].stat().st_size == SPACE + 16
    assert Disk([], pair.reopen()).pread(0, 512) == b"a" * 512


def test_successive_writes_share_an_entry(pair: Pair) -> None:
    upper = pair.create(64 << 20)
    for block in range(3000):  # 12 MB: three entries of 4 MiB at most
        upper.write(block * 8, bytes([block % 251]) * 4096)
    upper.flush()
    assert pair.paths[1].stat().st_size == SPACE + 3 * 16
    disk = Disk([], pair.reopen())
    assert all(disk.pread(block * 4096, 4096) == bytes([block % 251]) * 4096 for block in range(0, 3000, 7))


def test_many_pending_entries_are_flushed_by_themselves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{UPPER}.MAX_PENDING", 10)
    upper = pair.create()
    for number in range(25):
        upper.write(number * 2, b"x" * 512)
    assert pair.paths[1].stat().st_size == SPACE + 20 * 16


def test_two_openings_exclude_each_other(pair: Pair) -> None:
    upper = pair.create()
    upper.flush()
    other = [os.open(path, os.O_RDWR) for path in pair.paths]
    try:
        with pytest.raises(Conflict, match="open elsewhere"):
            Upper.open(other[0], other[1])
    finally:
        for fd in other:
            os.close(fd)


def test_files_that_are_not_empty_are_not_overwritten(pair: Pair) -> None:
    pair.create()
    with pytest.raises(Conflict, match="empty files"):
        Upper.create(*pair.open(), SIZE)


@pytest.mark.parametrize("torn", [1, 15, 16, 24, 64])
def test_a_torn_end_is_cut_off_and_reported(pair: Pair, torn: int) -> None:
    upper = pair.create()
    upper.write(0, b"a" * 1024)
    upper.flush()
    pair.close()
    with pair.paths[1].open("ab") as index:
        index.write(bytes(torn))  # what a file that grew and was not written reads as
    upper = pair.reopen()
    assert (upper.recovery.entries, upper.recovery.dropped) == (1, torn // 16)
    assert upper.recovery.reason
    assert pair.paths[1].stat().st_size == SPACE + 16
    assert Disk([], upper).pread(0, 1024) == b"a" * 1024
    assert pair.reopen().recovery.reason == ""


def test_entries_beyond_the_data_are_cut_off(pair: Pair) -> None:
    upper = pair.create()
    upper.write(0, b"a" * 4096)
    upper.flush()
    upper.write(8, b"b" * 4096)
    upper.flush()
    pair.close()
    os.truncate(pair.paths[0], SPACE + 4096 + 100)
    upper = pair.reopen()
    assert (upper.recovery.entries, upper.recovery.dropped) == (1, 1)
    disk = Disk([], upper)
    assert disk.pread(0, 8192) == b"a" * 4096 + bytes(4096)
    disk.trim(0, 512)  # names the end of the data, which was in the middle of a sector
    disk.flush()
    assert pair.reopen().recovery.reason == ""


def test_more_damage_than_a_crash_can_do_is_refused(pair: Pair) -> None:
    upper = pair.create()
    for number in range(10):
        upper.write(number * 2, b"x" * 512)
    upper.flush()
    with pair.paths[1].open("r+b") as index:
        index.seek(SPACE + 32)
        index.write(bytes(16))
    with pytest.raises(ImageError, match="8 entries would be lost"):
        Upper.open(*pair.open(), max_dropped=7)
    assert pair.paths[1].stat().st_size == SPACE + 160  # untouched
    assert Upper.open(*pair.open(), max_dropped=8).recovery.entries == 2


def test_files_of_different_uppers_are_no_pair(make: Callable[[str], Pair]) -> None:
    one, two = make("one"), make("two")
    one.create()
    two.create()
    with pytest.raises(ImageError, match="different uppers"):
        Upper.open(one.fds[0], two.fds[1])


def test_a_full_disk_is_survived(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    upper = pair.create()
    disk = Disk([], upper)
    disk.pwrite(0, b"a" * 4096)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(f"{UPPER}.pwrite_all", raiser(full))
        with pytest.raises(NoSpace):
            disk.pwrite(4096, b"b" * 4096)
        with pytest.raises(NoSpace):
            disk.flush()
    assert disk.pread(0, 8192) == b"a" * 4096 + bytes(4096)
    disk.pwrite(8192, b"c" * 512)
    disk.flush()
    disk = Disk([], pair.reopen())
    assert disk.pread(0, 8704) == b"a" * 4096 + bytes(4096) + b"c" * 512


@pytest.mark.parametrize("which", [0, 1])
def test_after_a_failed_sync_nothing_more_is_promised(pair: Pair, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    upper = pair.create()
    upper.write(0, b"a" * 512)
    bad = pair.fds[which]
    real = os.fdatasync
    with monkeypatch.context() as patch:
        patch.setattr(f"{UPPER}.os.fdatasync", lambda fd: raiser(OSError(errno.EIO, "I/O error"))() if fd == bad else real(fd))
        with pytest.raises(StoreError):
            upper.flush()
    actions: tuple[Callable[[], object], ...] = (upper.flush, upper.freeze, lambda: upper.write(0, bytes(512)), lambda: upper.discard(0, 1))
    for action in actions:
        with pytest.raises(StoreError, match="could not be flushed"):
            action()
    assert upper.read(0, 1) == [(0, 1, b"a" * 512)]


def used(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_discarded_and_overwritten_space_comes_back(pair: Pair) -> None:
    disk = Disk([], pair.create(8 << 20))
    disk.pwrite(0, random.Random(1).randbytes(4 << 20))
    disk.flush()
    full = used(pair.paths[0])
    assert full >= 4 << 20
    disk.trim(0, 2 << 20)
    assert used(pair.paths[0]) == full  # not before it is durable
    disk.flush()
    assert used(pair.paths[0]) <= full - (2 << 20) + 8192
    for _ in range(5):
        disk.pwrite(2 << 20, random.Random(2).randbytes(2 << 20))
        disk.flush()
    assert used(pair.paths[0]) <= (2 << 20) + 65536
    assert disk.pread(0, 4 << 20) == bytes(2 << 20) + random.Random(2).randbytes(2 << 20)
    disk = Disk([], pair.reopen())
    assert disk.pread(0, 4 << 20) == bytes(2 << 20) + random.Random(2).randbytes(2 << 20)


def test_a_block_comes_back_when_its_last_sector_dies(pair: Pair) -> None:
    disk = Disk([], pair.create())
    disk.pwrite(0, b"a" * 65536)
    disk.flush()
    full = used(pair.paths[0])
    for sector in (0, 3, 1, 2, 7, 6, 4):
        disk.trim(sector * 512, 512)
        disk.flush()
        assert used(pair.paths[0]) == full
    disk.trim(5 * 512, 512)
    disk.flush()
    assert used(pair.paths[0]) <= full - 4096


def test_a_read_under_way_keeps_its_data(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    upper = pair.create()
    upper.write(0, b"old!" * 16384)
    upper.flush()

    def slow(fd: int, length: int, offset: int) -> bytes:
        monkeypatch.setattr(f"{UPPER}.pread_exact", pread_exact)
        upper.write(0, b"new!" * 16384)
        upper.flush()
        upper.flush()
        return pread_exact(fd, length, offset)

    monkeypatch.setattr(f"{UPPER}.pread_exact", slow)
    assert upper.read(0, 128) == [(0, 128, b"old!" * 16384)]
    before = used(pair.paths[0])
    upper.flush()  # now nobody reads there any more
    assert used(pair.paths[0]) <= before - 65536
    assert upper.read(0, 128) == [(0, 128, b"new!" * 16384)]


def test_a_file_system_without_holes_only_costs_space(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{UPPER}.punch_hole", raiser(OSError(errno.EOPNOTSUPP, "not supported")))
    disk = Disk([], pair.create())
    for number in range(3):
        disk.pwrite(0, bytes([number]) * 65536)
        disk.flush()
    assert disk.pread(0, 65536) == b"\2" * 65536


def test_freeze_ends_writing(pair: Pair) -> None:
    upper = pair.create()
    upper.write(3, b"x" * 512)
    layer = upper.freeze()
    assert list(layer.segments.pieces(0, 100)) == [(3, 4, 8, 0, False)]
    assert upper.freeze().segments.lba.tolist() == [3]
    with pytest.raises(StoreError, match="is frozen"):
        upper.write(0, bytes(512))
    with pytest.raises(StoreError, match="is frozen"):
        upper.discard(0, 1)


def test_seal_in_place(pair: Pair) -> None:
    disk = Disk([], pair.create())
    disk.pwrite(4096, b"s" * 5000)
    layer = disk._upper().seal()
    assert (layer.header.flags, layer.header.index_size, layer.header.index_offset % 512) == (6, 1, 0)
    source = FileSource(pair.fds[0])
    assert source.size == layer.header.index_offset + 512 + SPACE
    opened = open_layer(source)
    assert Disk([opened]).pread(0, SIZE) == disk.pread(0, SIZE)
    assert Header.parse(source.pread(0, SPACE)).flags == 3  # as the official tool leaves it
    with pytest.raises(ImageError, match="has been sealed"):
        pair.reopen()


def test_a_guest_cannot_make_its_upper_look_sealed(pair: Pair) -> None:
    disk = Disk([], pair.create())
    disk.pwrite(0, vector(STEMS[2] + ".lsmt")[-4096:])  # ends the data file with a genuine trailer
    disk.flush()
    disk = Disk([], pair.reopen())
    assert disk.pread(0, 4) == b"LSMT"


def test_seal_of_too_many_segments_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_layers.overlaybd.packing.MAX_RO_ENTRIES", 2)
    upper = pair.create()
    for lba in (0, 2, 4):
        upper.write(lba, b"x" * 512)
    with pytest.raises(LimitError):
        upper.seal()
    assert pair.reopen().read(0, 1) == [(0, 1, b"x" * 512)]


def test_an_unsealed_upper_is_no_layer(pair: Pair) -> None:
    upper = pair.create()
    upper.write(0, b"x" * 8192)
    upper.flush()
    with pytest.raises(ImageError, match="unsealed upper"):
        open_layer(FileSource(pair.fds[0]))


def test_snapshot_goes_on_with_a_new_upper(make: Callable[[str], Pair]) -> None:
    disk, model = Disk([], make("0").create()), MemoryDisk(SIZE)
    layers = []
    for number in range(1, 5):
        for target in (disk, model):
            target.pwrite(number * 1000, bytes([number]) * 30_000)
            target.write_zeroes(number * 5000, 3000)
        layers.append(disk.snapshot(make(str(number)).create(0)))
        assert disk.pread(0, SIZE) == model.pread(0, SIZE)
    assert Disk(layers).pread(0, SIZE) == model.pread(0, SIZE)
    blobs = [open_layer(BytesSource(assemble(commit(layer)))) for layer in layers]
    assert Disk(blobs).pread(0, SIZE) == model.pread(0, SIZE)


def test_snapshot_onto_a_wrong_upper_changes_nothing(make: Callable[[str], Pair]) -> None:
    disk = Disk([], make("0").create())
    with pytest.raises(UsageError):
        disk.snapshot(make("1").create(SIZE // 2))
    disk.pwrite(0, b"still writable")


def test_threads_read_write_flush_and_snapshot(make: Callable[[str], Pair]) -> None:
    disk = Disk([], make("0").create())
    part = SIZE // 4

    def work(number: int) -> int:
        rng, model = random.Random(number), bytearray(part)
        for step in range(250):
            at, size = rng.randrange(part), rng.choice([100, 512, 4096, 9000])
            size = min(size, part - at)
            data = rng.randbytes(size) if step % 3 else bytes(size)
            model[at : at + size] = data
            if step % 3:
                disk.pwrite(number * part + at, data)
            else:
                disk.write_zeroes(number * part + at, size)
            if step % 40 == number:
                disk.flush()
            assert disk.pread(number * part, part) == model
        return number

    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, number) for number in range(4)]
        for number in range(1, 4):
            disk.snapshot(make(str(number)).create())
        assert [future.result() for future in done] == [0, 1, 2, 3]


def test_an_open_pair_can_be_looked_at(pair: Pair) -> None:
    upper = pair.create()
    upper.write(0, b"x" * 512)
    upper.flush()
    with pair.paths[0].open("rb") as data, pair.paths[1].open("rb") as index:
        layer = open_upper_pair(FileSource(data.fileno()), FileSource(index.fileno()))
        assert Disk([layer]).pread(0, 1024) == b"x" * 512 + bytes(512)


def test_entry_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{UPPER}.MAX_SEGMENTS", 2)
    upper = pair.create()
    for lba in (0, 2, 4):
        upper.write(lba, b"x" * 512)
    with pytest.raises(LimitError):
        upper.flush()


def test_b8_disks_beyond_16_tib(pair: Pair) -> None:
    size = 32 << 40
    disk = Disk([], pair.create(size))
    places = (0, (4 << 30) - 512, 4 << 30, (16 << 40) - 100, size - 4096)
    for number, place in enumerate(places, 1):
        disk.pwrite(place, bytes([number]) * 4096)
    disk.write_zeroes(1 << 40, 20 << 40)  # zeros over what was written at 16 TiB
    disk.flush()
    want = [bytes([number]) * 4096 for number in range(1, 6)]
    want[1] = bytes([2]) * 512 + bytes([3]) * 3584
    want[3] = bytes(4096)
    for seen in (disk, Disk([], pair.reopen()), Disk([open_layer(BytesSource(assemble(commit(pair.reopen().freeze()))))])):
        assert [seen.pread(place, 4096) for place in places] == want
        assert seen.size == size
    assert used(pair.paths[0]) < 1 << 20
