"""Fetching with bounds, deadlines and wrong answers."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from dsec_layers.cache.fetch import Fetcher, Gate, Job, Limits
from dsec_layers.cache.segments import errno_of
from dsec_layers.digest import Buffer, content_digest
from dsec_layers.errors import CorruptError, DsecError, NoSpace, NotFound, StoreError
from dsec_layers.layers.frames import compress
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from tests.cache_kit import QUICK, eventually, in_threads, open_cache, put_piece
from tests.kit.store_faulty import Fault, FaultyStore
from tests.store_samples import content

MIB = 1 << 20


class Outcome:
    """A job that keeps its data in memory."""

    def __init__(self, *pieces: Segment) -> None:
        self.data: bytes | None = None
        self.outcomes: list[DsecError | None] = []
        self.ends = 0
        self.done = threading.Event()
        self.ended = threading.Event()
        self.job = Job(pieces, lambda: False, self._keep, self._done, self._end)

    def _keep(self, data: Buffer) -> None:
        self.data = bytes(data)

    def _done(self, error: DsecError | None) -> None:
        self.outcomes.append(error)
        self.done.set()

    def _end(self) -> None:
        self.ends += 1
        self.ended.set()

    def error(self) -> DsecError:
        assert self.done.wait(30)
        (error,) = self.outcomes
        assert error is not None
        return error


def run(store: Store, *pieces: Segment, limits: Limits = QUICK) -> Outcome:
    fetcher = Fetcher(lambda _: store, limits)
    outcome = Outcome(*pieces)
    try:
        fetcher.submit(outcome.job)
        assert outcome.done.wait(30) and outcome.ended.wait(30)
    finally:
        fetcher.close()
    assert outcome.ends == 1
    assert len(outcome.outcomes) == 1
    return outcome


@pytest.mark.parametrize("raw", [False, True])
def test_a_piece_arrives_whole(raw: bool) -> None:
    store = MemoryStore()
    data = content(1, MIB)
    outcome = run(store, put_piece(store, data, raw=raw))
    assert outcome.outcomes == [None] and outcome.data == data


@pytest.mark.parametrize("fault", [StoreError("time-out"), ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError("timed out")])
def test_d1_three_failures_of_the_store_then_the_right_bytes(fault: Exception) -> None:
    store = FaultyStore(MemoryStore())
    data = content(2, MIB)
    piece = put_piece(store, data)
    store.add(Fault("read", error=fault, times=3))
    assert run(store, piece).data == data
    assert store.hits == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: data[1:] + b"x",
        lambda data: data + b"more",
        lambda data: compress(bytes(MIB)),
        lambda data: compress(content(77, MIB)),
    ],
    ids=["empty", "half", "zeros", "shifted", "longer", "frame of zeros", "another frame"],
)
def test_d2_d7_a_wrong_answer_is_asked_again_and_never_kept(change: object) -> None:
    store = FaultyStore(MemoryStore())
    data = content(3, MIB)
    piece = put_piece(store, data)
    store.add(Fault("read", change=change, times=1))  # type: ignore[arg-type]
    assert run(store, piece).data == data
    store.clear()
    store.add(Fault("read", change=change))  # type: ignore[arg-type]
    outcome = run(store, piece)
    assert outcome.data is None
    error = outcome.error()
    assert isinstance(error, CorruptError)
    assert piece.blob in error.message and piece.name[:12] in error.message
    assert errno_of(error) == errno.EIO


def test_d2_all_zero_bytes_with_an_all_zero_digest_do_not_pass() -> None:
    store = MemoryStore()
    piece = put_piece(store, bytes(4096), raw=True)
    hostile = Segment(bytes(32), piece.size, piece.store, piece.blob, piece.offset, piece.stored, "raw")
    with pytest.raises(CorruptError):
        read_segment(store, hostile)


def test_b1_a_piece_of_gigabytes_is_refused_before_anything_is_read() -> None:
    store = FaultyStore(MemoryStore())
    piece = put_piece(store, bytes(4096))
    store.add(Fault("read", error=AssertionError("it was read")))
    for size, stored in ((4 << 30, piece.stored), (piece.size, 4 << 30), (-1, piece.stored)):
        with pytest.raises(CorruptError, match="no segment has"):
            read_segment(store, Segment(piece.digest, size, piece.store, piece.blob, piece.offset, stored))


def test_d8_another_source_is_used_when_the_first_is_bad() -> None:
    first, second = FaultyStore(MemoryStore("mem://a")), MemoryStore("mem://b")
    data = content(4, MIB)
    there = put_piece(second, data)
    for fault in (
        Fault("read", error=NotFound("no such blob")),
        Fault("read", error=StoreError("down")),
        Fault("read", change=bytes.upper),
    ):
        first.clear()
        put_piece(first, data)
        first.add(fault)
        fetcher = Fetcher(lambda url: first if url == "mem://a" else second, QUICK)
        outcome = Outcome(Segment(there.digest, there.size, "mem://a", there.blob, there.offset, there.stored), there)
        fetcher.submit(outcome.job)
        assert outcome.done.wait(10)
        fetcher.close()
        assert outcome.data == data


def test_a_store_that_stays_away_gives_an_error_at_the_deadline() -> None:
    store = FaultyStore(MemoryStore())
    piece = put_piece(store, content(5, MIB))
    store.add(Fault("read", error=StoreError("no route")))
    began = time.monotonic()
    outcome = run(store, piece, limits=Limits(deadline=0.3, pause=0.01, longest_pause=0.05))
    assert 0.2 < time.monotonic() - began < 5
    assert "no route" in outcome.error().message and store.hits > 3


def test_a_read_that_hangs_does_not_hold_the_reader_beyond_the_deadline() -> None:
    store = FaultyStore(MemoryStore())
    data = content(6, MIB)
    piece = put_piece(store, data)
    gate = threading.Event()
    store.add(Fault("read", until=gate, times=1))
    fetcher = Fetcher(lambda _: store, Limits(deadline=0.2))
    outcome = Outcome(piece)
    fetcher.submit(outcome.job)
    assert isinstance(outcome.error(), StoreError)
    assert outcome.ends == 0
    gate.set()  # what arrives late is kept for the next reader, and told to nobody
    assert outcome.ended.wait(10)
    assert outcome.data == data and len(outcome.outcomes) == 1
    fetcher.close()


def test_a_missing_blob_fails_soon() -> None:
    store = MemoryStore()
    piece = put_piece(store, content(7, MIB))
    store.delete(piece.blob)
    began = time.monotonic()
    assert isinstance(run(store, piece).error(), NotFound)
    assert time.monotonic() - began < 5


def test_d11_fetches_and_bytes_in_flight_are_bounded() -> None:
    """64 readers of as many segments: at most so many fetches, so many bytes, whatever they ask."""
    store = FaultyStore(MemoryStore())
    pieces = [put_piece(store, content(100 + at, MIB)) for at in range(64)]
    running, most, lock = 0, 0, threading.Lock()

    def slow(data: bytes) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return data

    store.add(Fault("read", change=slow))
    limits = Limits(fetches=8, bytes=4 * MIB)
    fetcher = Fetcher(lambda _: store, limits)
    outcomes = [Outcome(piece) for piece in pieces]
    for outcome in outcomes:
        fetcher.submit(outcome.job)
    assert all(outcome.done.wait(30) for outcome in outcomes)
    fetcher.close()
    assert all(
        outcome.data is not None and content_digest(outcome.data) == piece.digest for outcome, piece in zip(outcomes, pieces, strict=True)
    )
    assert fetcher.snapshot().peak_bytes <= limits.bytes
    assert 1 < most <= limits.fetches


def test_the_gate_lets_something_larger_than_itself_pass_alone() -> None:
    gate = Gate(10)
    with gate.hold(25):
        blocked = threading.Thread(target=lambda: gate.hold(1).__enter__(), daemon=True)
        blocked.start()
        blocked.join(0.05)
        assert blocked.is_alive()
    blocked.join(5)
    assert not blocked.is_alive()


def test_many_readers_of_one_segment_make_one_fetch(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    data = content(8, MIB)
    piece = put_piece(store, data)
    gate = threading.Event()
    store.add(Fault("read", until=gate))
    with open_cache(tmp_path / "cache", store) as cache:
        threading.Timer(0.1, gate.set).start()
        assert in_threads(50, lambda number: _same(cache.read(piece, number * 100, 100), data[number * 100 : number * 100 + 100])) == []
        assert store.hits == 1
        assert cache.counters().segments == 1


def test_a_full_disk_is_told_as_such() -> None:
    store = MemoryStore()
    outcome = Outcome(put_piece(store, content(9, MIB)))

    def full(_: Buffer) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    outcome.job.keep = full
    fetcher = Fetcher(lambda _: store, QUICK)
    fetcher.submit(outcome.job)
    error = outcome.error()
    fetcher.close()
    assert isinstance(error, NoSpace) and errno_of(error) == errno.ENOSPC


def test_closing_answers_those_who_wait() -> None:
    store = FaultyStore(MemoryStore())
    piece = put_piece(store, content(10, MIB))
    store.add(Fault("read", error=StoreError("down")))
    fetcher = Fetcher(lambda _: store, Limits(deadline=60, pause=30, longest_pause=30))
    outcome = Outcome(piece)
    fetcher.submit(outcome.job)
    eventually(lambda: store.hits == 1)
    fetcher.close()
    assert isinstance(outcome.error(), StoreError)


def _same(got: bytes, wanted: bytes) -> None:
    assert got == wanted
