"""Fetching with bounds, deadlines and wrong answers."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers.cache.fetch import Fetch, Fetcher, FetchLimits, State
from dsec_layers.cache.segments import errno_of
from dsec_layers.cache.slots import StoreSlots
from dsec_layers.digest import Buffer, content_digest
from dsec_layers.errors import CorruptError, DsecError, NoSpace, NotFound, StoreError, UsageError
from dsec_layers.layers.frames import compress
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from tests.kit.cache_kit import QUICK, eventually, in_threads, open_cache, put_piece
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import content

MIB = 1 << 20


class Outcome:
    """The place of a fetch, in memory, and its waiter."""

    def __init__(self, *pieces: Segment) -> None:
        self.data: bytes | None = None
        self.outcomes: list[DsecError | None] = []
        self.ends = 0
        self.done = threading.Event()
        self.ended = threading.Event()
        self.fetch = Fetch(pieces, self, [self._done])

    def is_here(self) -> bool:
        return False

    def keep(self, data: Buffer) -> None:
        self.data = bytes(data)

    def _done(self, error: DsecError | None) -> None:
        self.outcomes.append(error)
        self.done.set()

    def close(self) -> None:
        self.ends += 1
        self.ended.set()

    def error(self) -> DsecError:
        assert self.done.wait(30)
        (error,) = self.outcomes
        assert error is not None
        return error


def run(store: Store, *pieces: Segment, limits: FetchLimits = QUICK) -> Outcome:
    fetcher = Fetcher(lambda _: store, limits)
    outcome = Outcome(*pieces)
    try:
        fetcher.submit(outcome.fetch)
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
        fetcher.submit(outcome.fetch)
        assert outcome.done.wait(10)
        fetcher.close()
        assert outcome.data == data


def test_a_store_that_stays_away_gives_an_error_at_the_deadline() -> None:
    store = FaultyStore(MemoryStore())
    piece = put_piece(store, content(5, MIB))
    store.add(Fault("read", error=StoreError("no route")))
    began = time.monotonic()
    outcome = run(store, piece, limits=FetchLimits(deadline=0.3, pause=0.01, longest_pause=0.05))
    assert 0.2 < time.monotonic() - began < 5
    assert "no route" in outcome.error().message and store.hits > 3


def test_a_read_that_hangs_does_not_hold_the_reader_beyond_the_deadline() -> None:
    store = FaultyStore(MemoryStore())
    data = content(6, MIB)
    piece = put_piece(store, data)
    gate = threading.Event()
    store.add(Fault("read", until=gate, times=1))
    fetcher = Fetcher(lambda _: store, FetchLimits(deadline=0.2))
    outcome = Outcome(piece)
    fetcher.submit(outcome.fetch)
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
    limits = FetchLimits(fetches=8, bytes=4 * MIB)
    fetcher = Fetcher(lambda _: store, limits)
    outcomes = [Outcome(piece) for piece in pieces]
    for outcome in outcomes:
        fetcher.submit(outcome.fetch)
    assert all(outcome.done.wait(30) for outcome in outcomes)
    fetcher.close()
    assert all(
        outcome.data is not None and content_digest(outcome.data) == piece.digest for outcome, piece in zip(outcomes, pieces, strict=True)
    )
    assert fetcher.snapshot().peak_bytes <= limits.bytes
    assert 1 < most <= limits.fetches


def test_something_larger_than_the_bound_runs_alone() -> None:
    slots = StoreSlots(4, 10)
    order: list[str] = []
    go, over = threading.Event(), threading.Event()

    def large() -> bool:
        go.wait(10)
        order.append("large")
        return True

    def small() -> bool:
        order.append("small")
        over.set()
        return True

    slots.submit("mem://a", 25, large)
    slots.submit("mem://a", 1, small)
    assert not over.wait(0.05)
    go.set()
    assert over.wait(10)
    assert order == ["large", "small"]


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

    setattr(outcome, "keep", full)  # noqa: B010 - not a method of its class
    fetcher = Fetcher(lambda _: store, QUICK)
    fetcher.submit(outcome.fetch)
    error = outcome.error()
    fetcher.close()
    assert isinstance(error, NoSpace) and errno_of(error) == errno.ENOSPC


def test_closing_answers_those_who_wait() -> None:
    store = FaultyStore(MemoryStore())
    piece = put_piece(store, content(10, MIB))
    store.add(Fault("read", error=StoreError("down")))
    fetcher = Fetcher(lambda _: store, FetchLimits(deadline=60, pause=30, longest_pause=30))
    outcome = Outcome(piece)
    fetcher.submit(outcome.fetch)
    eventually(lambda: store.hits == 1)
    fetcher.close()
    assert isinstance(outcome.error(), StoreError)


def _same(got: bytes, wanted: bytes) -> None:
    assert got == wanted


class Two:
    """Two stores, the first of which hangs until ``heal``; those reads go on hanging until ``free``."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.first, self.second = FaultyStore(MemoryStore("mem://a")), MemoryStore("mem://b")
        self.first.add(Fault("read", until=self.free))

    def opener(self, url: str) -> Store:
        return self.first if url == "mem://a" else self.second

    def heal(self) -> None:
        self.first.clear()


def setting(event: threading.Event) -> bool:
    event.set()
    return True


@pytest.fixture
def two() -> Iterator[Two]:
    stores = Two()
    yield stores
    stores.free.set()


def test_a_store_that_hangs_takes_nothing_from_another(two: Two) -> None:
    hanging = [Outcome(put_piece(two.first, content(200 + at, MIB))) for at in range(30)]
    fetcher = Fetcher(two.opener, FetchLimits(bytes=4 * MIB))
    for outcome in hanging:
        fetcher.submit(outcome.fetch)
    eventually(lambda: two.first.hits > 0)
    healthy = [Outcome(put_piece(two.second, content(300 + at, MIB))) for at in range(8)]
    for outcome in healthy:
        fetcher.submit(outcome.fetch)
    assert all(outcome.done.wait(1) and outcome.outcomes == [None] for outcome in healthy)
    assert not any(outcome.done.is_set() for outcome in hanging)
    began = time.monotonic()
    fetcher.close()
    assert time.monotonic() - began < 2
    assert all(isinstance(outcome.error(), StoreError) for outcome in hanging)


def test_the_first_read_after_a_store_is_healed_succeeds_though_the_old_ones_hang(two: Two) -> None:
    hanging = [Outcome(put_piece(two.first, content(200 + at, MIB))) for at in range(30)]
    fetcher = Fetcher(two.opener, FetchLimits(deadline=0.3))
    for outcome in hanging:
        fetcher.submit(outcome.fetch)
    assert all("not here after 0.3 s" in outcome.error().message for outcome in hanging)
    assert 16 <= two.first.hits <= 24, "no more than a few try a store that hangs"
    two.heal()
    data = content(199, MIB)
    first = Outcome(put_piece(two.first, data))
    fetcher.submit(first.fetch)
    assert first.done.wait(5) and first.outcomes == [None] and first.data == data
    assert [outcome.ends for outcome in hanging].count(0) == two.first.hits
    two.free.set()
    assert all(outcome.ended.wait(5) for outcome in hanging)
    fetcher.close()


def test_threads_left_to_hang_are_bounded(two: Two) -> None:
    slots = StoreSlots(2, 100)
    begun: list[int] = []

    def hang() -> bool:
        begun.append(1)
        return two.free.wait()

    for _ in range(40):
        slots.write_off(slots.submit("mem://a", 1, hang))
    for _ in range(10):
        slots.submit("mem://a", 1, hang)
    eventually(lambda: len(begun) >= 8)
    done = threading.Event()
    slots.submit("mem://b", 1, lambda: setting(done))
    assert done.wait(1), "another store has its own"
    assert len(begun) <= 10
    two.free.set()
    again = threading.Event()
    slots.submit("mem://a", 1, lambda: setting(again))
    assert again.wait(5)


def test_each_store_has_a_slot_whatever_all_others_hold(two: Two) -> None:
    slots = StoreSlots(2, 100)
    for store in range(20):
        for _ in range(4):
            slots.submit(f"mem://{store}", 50, two.free.wait)
    done = threading.Event()
    slots.submit("mem://b", 50, lambda: setting(done))
    assert done.wait(1)


def test_what_a_store_brings_after_the_end_is_not_kept(two: Two) -> None:
    outcome = Outcome(put_piece(two.first, content(210, MIB)))
    fetcher = Fetcher(two.opener, QUICK)
    fetcher.submit(outcome.fetch)
    eventually(lambda: two.first.hits == 1)
    fetcher.close()
    two.free.set()
    assert outcome.ended.wait(5) and outcome.ends == 1
    assert outcome.data is None
    late = Outcome(put_piece(two.second, content(211, MIB)))
    fetcher.submit(late.fetch)
    assert isinstance(late.error(), StoreError) and late.ended.wait(5)


@pytest.mark.parametrize("broken", ["is_here", "keep", "close"])
def test_a_place_that_raises_what_nobody_expects_is_an_error_and_the_next_fetch_works(broken: str) -> None:
    store = MemoryStore()
    outcome, after = (Outcome(put_piece(store, content(220 + at, MIB))) for at in range(2))
    raised = threading.Event()

    def fail(*_: object) -> None:
        raised.set()
        raise ZeroDivisionError("broken")

    setattr(outcome, broken, fail)
    fetcher = Fetcher(lambda _: store, FetchLimits(fetches=1))
    fetcher.submit(outcome.fetch)
    fetcher.submit(after.fetch)
    assert after.done.wait(5) and after.outcomes == [None] and raised.is_set()
    assert outcome.done.wait(5) and len(outcome.outcomes) == 1
    assert (outcome.outcomes == [None]) == (broken == "close")
    assert broken == "close" or outcome.ended.wait(5)
    fetcher.close()


def test_a_waiter_that_raises_does_not_keep_the_outcome_from_the_others() -> None:
    store = FaultyStore(MemoryStore())
    outcome, after = (Outcome(put_piece(store, content(230 + at, MIB))) for at in range(2))

    def fail(_: DsecError | None) -> None:
        raise ZeroDivisionError("broken")

    outcome.fetch.waiters.insert(0, fail)
    fetcher = Fetcher(lambda _: store, FetchLimits(deadline=0.2))
    fetcher.submit(outcome.fetch)
    assert outcome.done.wait(5) and outcome.outcomes == [None] and outcome.ended.wait(5)
    never = threading.Event()
    store.add(Fault("read", until=never, times=2))
    late = [Outcome(put_piece(store, content(240 + at, MIB))) for at in range(2)]
    for each in late:  # told by the timer
        each.fetch.waiters.insert(0, fail)
        fetcher.submit(each.fetch)
    assert all(isinstance(each.error(), StoreError) for each in late)
    fetcher.submit(after.fetch)
    assert after.done.wait(5) and after.outcomes == [None]
    never.set()
    fetcher.close()


def test_nobody_joins_a_fetch_whose_outcome_is_known() -> None:
    outcome = run(MemoryStore(), put_piece(MemoryStore(), content(250, MIB)), limits=FetchLimits(bad_answers=1))
    assert outcome.fetch.state is State.GIVEN_UP
    assert not outcome.fetch.join(lambda _: None)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "directory", "link"])
def test_what_is_no_blob_is_asked_for_once_and_another_source_is_used(tmp_path: Path, make: Callable[[Path], None]) -> None:
    stores = {store.url: store for store in (PosixStore(tmp_path / "a"), PosixStore(tmp_path / "b"))}
    bad, good = stores.values()
    data = content(260, MIB)
    pieces = [put_piece(store, data) for store in (bad, good)]
    path = bad.local_path(pieces[0].blob)
    path.unlink()
    make(path)
    counted = FaultyStore(bad)
    counted.add(Fault("read", change=lambda raw: raw))
    fetcher = Fetcher(lambda url: counted if url == bad.url else good, FetchLimits(pause=5))
    alone, both = Outcome(pieces[0]), Outcome(*pieces)
    for outcome in (alone, both):
        fetcher.submit(outcome.fetch)
    assert alone.done.wait(1) and isinstance(alone.error(), CorruptError) and "not a blob" in alone.error().message
    assert both.done.wait(1) and both.data == data
    fetcher.close()
    assert counted.hits == 2, "each asked once"


def test_an_error_that_no_second_question_can_heal_is_told_at_once() -> None:
    def opener(url: str) -> Store:
        raise UsageError(f"not a store: {url}")

    fetcher = Fetcher(opener, FetchLimits(pause=5))
    outcome = Outcome(put_piece(MemoryStore(), content(261, MIB)))
    fetcher.submit(outcome.fetch)
    assert outcome.done.wait(1) and isinstance(outcome.error(), UsageError)
    fetcher.close()


def test_the_next_source_is_asked_when_the_first_took_its_share_of_the_deadline(two: Two) -> None:
    data = content(262, MIB)
    fetcher = Fetcher(two.opener, FetchLimits(deadline=4))
    began = time.monotonic()
    outcome, other = (Outcome(put_piece(two.first, each), put_piece(two.second, each)) for each in (data, content(263, MIB)))
    fetcher.submit(outcome.fetch)
    assert outcome.done.wait(3) and outcome.outcomes == [None] and outcome.data == data
    assert 1.9 < time.monotonic() - began < 3
    eventually(lambda: fetcher._slots.hangs("mem://a"), 5)
    fetcher.submit(other.fetch)
    assert other.done.wait(1) and other.outcomes == [None], "a store that is known to hang is not waited for"
    two.free.set()
    assert outcome.ended.wait(5) and outcome.ends == 1
    fetcher.close()


def test_who_asks_again_at_once_for_what_was_given_up_is_told_at_once(two: Two) -> None:
    piece = put_piece(two.first, content(264, MIB))
    fetcher = Fetcher(two.opener, FetchLimits(deadline=1.0))
    first, again, later, healed = (Outcome(piece) for _ in range(4))
    fetcher.submit(first.fetch)
    assert "not here after 1 s" in first.error().message
    fetcher.submit(again.fetch)
    assert again.done.wait(0.3) and again.error() is first.error()
    time.sleep(0.5)
    fetcher.submit(later.fetch)
    assert not later.done.wait(0.3), "remembered for half of the deadline"
    assert "not here" in later.error().message
    two.heal()
    two.free.set()
    assert first.ended.wait(5)
    eventually(lambda: not fetcher._slots.hangs("mem://a"))
    fetcher.submit(healed.fetch)
    assert healed.done.wait(0.3) and healed.outcomes == [None], "the store has answered since"
    fetcher.close()
