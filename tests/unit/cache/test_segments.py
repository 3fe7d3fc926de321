"""The cache directory: what is trusted, what is healed, what is removed. No root needed."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from dsec_layers.cache import directory as directory_module
from dsec_layers.cache.directory import CacheDirectory, stamp_of
from dsec_layers.cache.fetch import Fetcher, FetchLimits
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.digest import Buffer
from dsec_layers.errors import Conflict, CorruptError, DsecError, NoSpace, StoreError
from dsec_layers.segment import Segment
from dsec_layers.store.memory import MemoryStore
from tests.kit.cache_kit import eventually, open_cache, put_piece
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import content

MIB = 1 << 20


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


def wanted(cache: SegmentCache, piece: Segment, fd: int) -> DsecError | None:
    """Have the file behind ``fd`` filled, as for a reader in the kernel."""
    outcome: list[DsecError | None] = []
    done = threading.Event()

    def waiter(error: DsecError | None) -> None:
        outcome.append(error)
        done.set()

    cache.want([piece], waiter, fd)
    assert done.wait(20)
    return outcome[0]


def test_a_segment_is_present_once_and_then_read_from_the_disk(tmp_path: Path, store: FaultyStore) -> None:
    data = content(1, MIB)
    piece = put_piece(store, data)
    with open_cache(tmp_path, store) as cache:
        assert cache.open_present(piece) is None
        assert cache.read(piece, 10, 20) == data[10:30]
        store.add(Fault("read", error=StoreError("away")))
        assert cache.read(piece, 0, MIB) == data
        assert cache.usage().segments == 1 and cache.usage().bytes >= MIB
        with pytest.raises(CorruptError):
            cache.read(piece, MIB - 1, 2)


def test_a_raw_piece_of_odd_size(tmp_path: Path, store: FaultyStore) -> None:
    """Disks are cut into 256 KiB pieces, the last of which may have any size."""
    data = content(2, 256 * 1024 - 1234)
    piece = put_piece(store, data, raw=True)
    with open_cache(tmp_path, store) as cache:
        assert cache.read(piece, 0, len(data)) == data


@pytest.mark.parametrize("damage", ["flip", "truncate", "junk", "empty"])
def test_d3_a_damaged_segment_heals_itself(tmp_path: Path, store: FaultyStore, damage: str) -> None:
    data = content(3, MIB)
    piece = put_piece(store, data)
    with open_cache(tmp_path, store) as cache:
        cache.fetch(piece)
    path = tmp_path / "present" / piece.name
    body = path.read_bytes()
    changed = {"flip": body[:777] + bytes([body[777] ^ 1]) + body[778:], "truncate": body[:-4096], "junk": b"junk", "empty": b""}[damage]
    path.write_bytes(changed)
    with open_cache(tmp_path, store) as cache:
        assert cache.read(piece, 0, MIB) == data
        assert cache.counters().segments == 1
        assert cache.read(piece, 0, MIB) == data
        assert cache.counters().segments == 1
    path.write_bytes(changed)
    store.add(Fault("read", change=lambda raw: bytes(len(raw))))
    with open_cache(tmp_path, store) as cache, pytest.raises(CorruptError):
        cache.read(piece, 0, MIB)
    assert not path.exists()


def _boots(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(directory_module, "boot_id", lambda: name)


def test_c4_segments_of_a_boot_that_did_not_end_well_are_hashed(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may leave the name and size of a segment, but not its data."""
    good, lost = content(4, MIB), content(5, MIB)
    pieces = [put_piece(store, good), put_piece(store, lost)]
    _boots(monkeypatch, "first")
    with open_cache(tmp_path, store) as cache:
        for piece in pieces:
            cache.fetch(piece)
    path = tmp_path / "present" / pieces[1].name
    times = path.stat()
    path.write_bytes(bytes(MIB))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a journal would leave it
    _boots(monkeypatch, "second")
    with open_cache(tmp_path, store) as cache:
        assert cache.open_present(pieces[0]) is None
        assert cache.read(pieces[0], 0, MIB) == good
        assert cache.counters().segments == 0, "a right segment is not fetched again"
        assert cache.read(pieces[1], 0, MIB) == lost
        assert (cache.counters().segments, cache.counters().healed) == (1, 1)


def test_segments_of_a_boot_that_ended_well_are_trusted(tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = put_piece(store, content(6, MIB))
    _boots(monkeypatch, "first")
    with open_cache(tmp_path, store) as cache:
        cache.fetch(piece)
        cache.directory.end()
    _boots(monkeypatch, "second")
    with open_cache(tmp_path, store) as cache:
        fd = cache.open_present(piece)
        assert fd is not None
        os.close(fd)
    _boots(monkeypatch, "first")  # the same boot goes on: what is written from now on may be lost again
    with open_cache(tmp_path, store):
        pass
    _boots(monkeypatch, "third")
    with open_cache(tmp_path, store) as cache:
        assert cache.open_present(piece) is None


def test_junk_in_the_record_of_boots_only_makes_segments_suspect(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(7, MIB)
    piece = put_piece(store, data)
    _boots(monkeypatch, "first")
    with open_cache(tmp_path, store) as cache:
        cache.fetch(piece)
        cache.directory.end()
    for junk in (b"", b"{", b'{"a": 1}', b"[1, null]"):
        (tmp_path / "state" / "boots.json").write_bytes(junk)
        _boots(monkeypatch, "second")
        with open_cache(tmp_path, store) as cache:
            assert cache.read(piece, 0, MIB) == data


def test_stamps_differ_between_boots_and_are_whole_seconds() -> None:
    stamps = {stamp_of(str(number)) for number in range(1000)}
    assert len(stamps) == 1000
    assert all(stamp % 10**9 == 0 and 10**18 <= stamp < 14 * 10**17 for stamp in stamps)


def test_d5_a_second_user_of_the_cache_is_refused(tmp_path: Path, store: FaultyStore) -> None:
    piece = put_piece(store, content(8, MIB))
    with open_cache(tmp_path, store) as cache:
        cache.fetch(piece)
        with pytest.raises(Conflict, match=str(os.getpid())):
            CacheDirectory(tmp_path)
        assert cache.open_present(piece) is not None
    with CacheDirectory(tmp_path):
        pass


def test_the_file_that_a_mount_holds_is_the_one_that_is_filled(tmp_path: Path, store: FaultyStore) -> None:
    data = content(9, MIB)
    piece = put_piece(store, data)
    with open_cache(tmp_path, store) as cache:
        with cache.devices([piece.name], [piece.size]) as (path,):
            held = os.open(path, os.O_RDWR)
        assert path == str(tmp_path / "absent" / piece.name) and os.fstat(held).st_size == 0
        assert cache.read(piece, 0, MIB) == data  # a reader in user space comes first
        assert os.pread(held, MIB, 0) == data
        with cache.devices([piece.name], [piece.size]) as (path,):
            assert os.path.samestat(Path(path).stat(), os.fstat(held))
        os.close(held)


def test_a_file_that_lost_its_name_is_filled_all_the_same(tmp_path: Path, store: FaultyStore) -> None:
    """Somebody deleted the cache by hand while a mount had it open."""
    data = content(10, MIB)
    piece = put_piece(store, data)
    with open_cache(tmp_path, store) as cache:
        with cache.devices([piece.name], [piece.size]) as (path,):
            held = os.open(path, os.O_RDWR)
        Path(path).unlink()
        for _ in range(2):
            assert wanted(cache, piece, held) is None
            assert os.pread(held, MIB, 0) == data
        assert cache.counters().segments == 1
        with cache.devices([piece.name], [piece.size]) as (path,):
            assert Path(path).stat().st_size == 0, "the nameless file did not become the present one"
        os.close(held)


def test_an_absent_file_is_filled_from_the_present_one(tmp_path: Path, store: FaultyStore) -> None:
    """A reader in user space stored the segment before a mount opened an absent file of it."""
    data = content(11, MIB)
    piece = put_piece(store, data)
    with open_cache(tmp_path, store) as cache:
        cache.fetch(piece)
        path = tmp_path / "absent" / piece.name
        path.write_bytes(b"")
        held = os.open(path, os.O_RDWR)
        assert wanted(cache, piece, held) is None
        assert os.pread(held, MIB, 0) == data
        assert cache.counters().segments == 1
        assert not path.exists()
        os.close(held)


def test_two_files_of_one_segment_are_both_filled(tmp_path: Path, store: FaultyStore) -> None:
    data = content(12, MIB)
    piece = put_piece(store, data)
    gate = threading.Event()
    store.add(Fault("read", until=gate))
    paths = [tmp_path / "one", tmp_path / "two"]
    with open_cache(tmp_path / "cache", store) as cache:
        held = []
        for path in paths:
            path.write_bytes(b"")
            held.append(os.open(path, os.O_RDWR))
        outcomes: list[DsecError | None] = []
        for fd in held:
            cache.want([piece], outcomes.append, fd)
        gate.set()
        eventually(lambda: len(outcomes) == 2)
        assert outcomes == [None, None]
        assert [os.pread(fd, MIB, 0) == data for fd in held] == [True, True]
        for fd in held:
            os.close(fd)


@pytest.mark.parametrize("holes", [False, True])
def test_a_failed_write_leaves_nothing_that_looks_complete(tmp_path: Path, store: FaultyStore, holes: bool) -> None:
    import resource
    import signal

    data = content(13, MIB)
    piece = put_piece(store, data)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open_cache(tmp_path, store, holes=holes) as cache:
        with cache.devices([piece.name], [piece.size]) as (path,):
            held = os.open(path, os.O_RDWR)
        empty = os.fstat(held).st_size
        assert empty == (MIB if holes else 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, before[1]))
        try:
            assert wanted(cache, piece, held) is not None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        status = os.fstat(held)
        assert status.st_blocks == 0
        assert not cache.directory.is_trusted(status, MIB)
        assert wanted(cache, piece, held) is None
        assert os.pread(held, MIB, 0) == data
        os.close(held)


def test_clear_keeps_what_is_in_use(tmp_path: Path, store: FaultyStore) -> None:
    pieces = [put_piece(store, content(20 + at, MIB)) for at in range(3)]
    with open_cache(tmp_path, store) as cache:
        for piece in pieces:
            cache.fetch(piece)
        with cache.devices(["ab" * 32], [4096]):
            pass
        freed = cache.clear({pieces[0].name})
        assert freed.segments == 2 and freed.bytes >= 2 * MIB
        assert cache.usage().segments == 1
        assert list((tmp_path / "absent").iterdir()) == []


def test_devices_of_the_wrong_size_or_stamp_are_not_taken_for_complete(tmp_path: Path, store: FaultyStore) -> None:
    pieces = [put_piece(store, content(30 + at, MIB)) for at in range(3)]
    with open_cache(tmp_path, store) as cache:
        for piece in pieces:
            cache.fetch(piece)
        os.truncate(tmp_path / "present" / pieces[1].name, MIB - 4096)
        (tmp_path / "present" / pieces[2].name).touch()
        with cache.devices([piece.name for piece in pieces], [MIB] * 3) as paths:
            assert [Path(path).parent.name for path in paths] == ["present", "absent", "absent"]
            assert [Path(path).stat().st_size for path in paths] == [MIB, 0, MIB]
        assert cache.counters().healed == 1


def test_f1_what_came_first_and_is_not_in_use_goes_first(tmp_path: Path, store: FaultyStore) -> None:
    pieces = [put_piece(store, content(40 + at, MIB)) for at in range(4)]
    with open_cache(tmp_path, store) as cache:
        for piece in pieces:
            cache.fetch(piece)
        assert cache.evict(MIB + 1, {pieces[0].name}) >= 2 * MIB
        assert [cache.open_present(piece) is None for piece in pieces[:3]] == [False, True, True]
        assert cache.usage().segments == 2
        assert cache.evict(100 * MIB, {piece.name for piece in pieces}) == 0


def test_a_full_disk_makes_room_once(tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(50, MIB)
    piece = put_piece(store, data)
    asked: list[int] = []

    def write(fd: int, body: Buffer) -> None:
        if len(asked) < 1:
            raise OSError(errno.ENOSPC, "full")
        os.pwrite(fd, body, 0)

    monkeypatch.setattr("dsec_layers.cache.segments.write_whole", write)
    with open_cache(tmp_path, store) as cache:
        with pytest.raises(NoSpace):
            cache.fetch(piece)

        def make_room(wanted: int) -> int:
            asked.append(wanted)
            return 1

        cache.make_room = make_room
        assert cache.read(piece, 0, MIB) == data
        assert len(asked) == 1


def test_a_store_that_hangs_keeps_nobody_from_another_and_works_again_when_it_is_healed(tmp_path: Path) -> None:
    free = threading.Event()
    first, second = FaultyStore(MemoryStore("mem://a")), MemoryStore("mem://b")
    first.add(Fault("read", until=free))
    pieces = [put_piece(first, content(60 + at, 100_000)) for at in range(30)]
    data = content(59, 100_000)
    there, after = put_piece(second, data), put_piece(first, data[::-1])
    outcomes: list[DsecError | None] = []
    with CacheDirectory(tmp_path) as directory:
        fetcher = Fetcher(lambda url: first if url == "mem://a" else second, FetchLimits(deadline=1.0))
        cache = SegmentCache(directory, fetcher)
        try:
            for piece in pieces:
                cache.want([piece], outcomes.append)
            eventually(lambda: first.hits > 0)
            began = time.monotonic()
            assert cache.read(there, 0, 100_000) == data
            assert time.monotonic() - began < 0.9
            eventually(lambda: len(outcomes) == 30)
            assert all(isinstance(outcome, StoreError) for outcome in outcomes)
            first.clear()
            assert cache.read(after, 0, 100_000) == data[::-1]
            began = time.monotonic()
            fetcher.close()
            assert time.monotonic() - began < 2
        finally:
            free.set()


def test_a_waiter_that_raises_leaves_nobody_waiting(tmp_path: Path, store: FaultyStore) -> None:
    data = content(61, MIB)
    piece = put_piece(store, data)
    gate = threading.Event()
    store.add(Fault("read", until=gate))
    outcomes: list[DsecError | None] = []

    def fail(_: DsecError | None) -> None:
        raise ZeroDivisionError("broken")

    with open_cache(tmp_path, store) as cache:
        cache.want([piece], fail)
        cache.want([piece], outcomes.append)
        gate.set()
        eventually(lambda: outcomes == [None])
        assert cache.read(piece, 0, MIB) == data


def test_a_reader_whose_file_is_gone_when_it_joins_is_answered(tmp_path: Path, store: FaultyStore) -> None:
    piece = put_piece(store, content(62, MIB))
    gate = threading.Event()
    store.add(Fault("read", until=gate))
    outcomes: list[DsecError | None] = []
    with open_cache(tmp_path, store) as cache:
        cache.want([piece], lambda _: None)
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        cache.want([piece], outcomes.append, fd)
        os.close(fd)
        gate.set()
        eventually(lambda: len(outcomes) == 1)
        assert isinstance(outcomes[0], StoreError)
