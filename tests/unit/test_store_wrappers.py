"""The wrappers: what each adds to the contract that the conformance suite checks already."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import Conflict, CorruptError, NoSpace, NotFound, StoreError
from dsec_layers.store.base import Store, as_local
from dsec_layers.store.count import CountStore
from dsec_layers.store.fallback import FallbackStore
from dsec_layers.store.faulty import Fault, FaultyStore, flipped, half, other, zeros
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.retry import RetryStore
from dsec_layers.store.transfer import put_bytes, read_ahead, read_blob, read_pieces
from dsec_layers.store.verify import VerifyStore
from tests.store_samples import Heard

DATA = b"0123456789" * 1000
DIGEST = sha256_digest(DATA)
OTHER = sha256_digest(b"other")


@pytest.fixture
def faulty() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    put_bytes(store, DATA)
    return store


def quick(store: Store, **options: float) -> RetryStore:
    return RetryStore(store, first=0.001, longest=0.002, **options)  # type: ignore[arg-type]


# Faults


def test_faults_are_counted_skipped_and_aimed(faulty: FaultyStore) -> None:
    faulty.add(Fault("read", error=StoreError("third"), skip=2, times=1))
    faulty.add(Fault("stat", error=StoreError("never"), when=lambda digest: digest == OTHER))
    for expected in (True, True, False, True):
        if expected:
            assert faulty.read(DIGEST, 0, 3) == b"012"
        else:
            with pytest.raises(StoreError, match="third"):
                faulty.read(DIGEST, 0, 3)
    assert faulty.stat(DIGEST).size == len(DATA)
    assert faulty.hits == 1
    faulty.clear()
    faulty.add(Fault("read", change=zeros))
    assert faulty.read(DIGEST, 0, 3) == b"\0\0\0"


def test_faults_of_writers_and_refs(faulty: FaultyStore) -> None:
    for operation in ("write", "commit"):
        faulty.clear()
        faulty.add(Fault(operation, error=NoSpace("full")))
        with pytest.raises(NoSpace):
            put_bytes(faulty, b"more")
    faulty.add(Fault("set_ref", error=StoreError("lost answer"), late=True, times=1))
    with pytest.raises(StoreError):
        faulty.set_ref("a:1", DIGEST, expected=None)
    assert faulty.get_ref("a:1").digest == DIGEST


def test_a_fault_waits_for_an_event(faulty: FaultyStore) -> None:
    go = threading.Event()
    put_bytes(faulty, b"other")
    faulty.add(Fault("read", until=go, when=lambda digest: digest == DIGEST))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(faulty.read(DIGEST, 0, 3)))
    reader.start()
    assert faulty.read(OTHER, 0, 5) == b"other"
    assert not got
    go.set()
    reader.join()
    assert got == [b"012"]


# Retry


def test_d1_errors_that_pass_are_not_seen(faulty: FaultyStore) -> None:
    faulty.add(Fault("read", error=StoreError("reset"), times=3))
    faulty.add(Fault("list", error=StoreError("reset"), times=2))
    store = quick(faulty)
    assert store.read(DIGEST, 0, 5) == b"01234"
    assert [info.digest for info in store.list()] == [DIGEST]
    assert faulty.hits == 5


def test_d7_wrong_bytes_are_asked_for_again_then_reported(faulty: FaultyStore) -> None:
    faulty.add(Fault("read", change=flipped, times=1))
    store = quick(VerifyStore(faulty))
    assert store.read(DIGEST, 0, len(DATA)) == DATA
    faulty.clear()
    faulty.add(Fault("read", change=flipped))
    before = faulty.hits
    with pytest.raises(CorruptError, match=DIGEST):
        store.read(DIGEST, 0, len(DATA))
    assert faulty.hits - before == 3


def test_answers_are_not_retried_and_deadlines_hold(faulty: FaultyStore) -> None:
    store = quick(faulty, deadline=0.05)
    with pytest.raises(NotFound):
        store.stat(OTHER)
    for error in (Conflict("no"), NoSpace("full")):
        faulty.clear()
        faulty.add(Fault("read", error=error))
        before = faulty.hits
        with pytest.raises(type(error)):
            store.read(DIGEST, 0, 1)
        assert faulty.hits == before + 1
    faulty.clear()
    faulty.add(Fault("read", error=StoreError("down")))
    with pytest.raises(StoreError, match="down"):
        store.read(DIGEST, 0, 1)


def test_a_stop_ends_the_waiting(faulty: FaultyStore) -> None:
    stopping = threading.Event()
    stopping.set()
    faulty.add(Fault("read", error=StoreError("down")))
    with pytest.raises(StoreError):
        RetryStore(faulty, deadline=3600, first=600, stopping=stopping).read(DIGEST, 0, 1)


def test_a_swap_whose_answer_was_lost_is_a_success(faulty: FaultyStore) -> None:
    store = quick(faulty)
    faulty.add(Fault("set_ref", error=StoreError("lost answer"), late=True, times=1))
    store.set_ref("a:1", DIGEST, expected=None)
    faulty.add(Fault("set_ref", error=StoreError("lost answer"), late=True, times=1))
    store.set_ref("a:1", None, expected=DIGEST)
    with pytest.raises(NotFound):
        store.get_ref("a:1")
    faulty.add(Fault("set_ref", error=StoreError("lost request"), times=1))
    faulty.inner.set_ref("a:1", OTHER, expected=None)
    with pytest.raises(Conflict):
        store.set_ref("a:1", DIGEST, expected=None)
    with pytest.raises(Conflict):
        store.set_ref("a:1", OTHER, expected=None)  # nothing failed before: the first answer counts


# Verify


@pytest.mark.parametrize("change", [zeros, half, flipped, other, lambda data: b"", lambda data: data + b"x"])
def test_d2_no_wrong_whole_blob_passes(faulty: FaultyStore, change: object) -> None:
    faulty.add(Fault("read", change=change))  # type: ignore[arg-type]
    store = VerifyStore(faulty)
    with pytest.raises(CorruptError):
        store.read(DIGEST, 0, len(DATA))
    for call in (lambda: read_blob(faulty, DIGEST, limit=1 << 20), lambda: list(read_pieces(faulty, DIGEST, len(DATA), 3000))):
        with pytest.raises(CorruptError):
            call()


def test_a_part_must_have_its_length_and_lie_inside(faulty: FaultyStore) -> None:
    store = VerifyStore(faulty)
    assert store.read(DIGEST, 5, 3) == b"567"
    with pytest.raises(CorruptError):
        store.read(DIGEST, len(DATA) - 1, 2)
    faulty.add(Fault("read", change=half))
    with pytest.raises(CorruptError):
        store.read(DIGEST, 5, 4)


def test_a_size_that_changes_is_corrupt() -> None:
    inner = MemoryStore()
    put_bytes(inner, DATA)
    store = VerifyStore(inner)
    store.stat(DIGEST)
    inner._blobs[DIGEST] = (DATA[:10], 0.0)
    with pytest.raises(CorruptError, match="10000 bytes, now it has 10"):
        store.stat(DIGEST)
    assert store.stat(DIGEST).size == 10  # the doubt was reported once; what is there now counts


# Fallback


@pytest.fixture
def pair(faulty: FaultyStore) -> tuple[FallbackStore, FaultyStore, Heard]:
    second = MemoryStore("mem://second")
    put_bytes(second, DATA)
    heard = Heard()
    return FallbackStore(VerifyStore(faulty), second, progress=heard), faulty, heard


@pytest.mark.parametrize("error", [NotFound("404"), StoreError("timed out"), CorruptError("bad")])
def test_d8_the_second_store_is_used_and_the_failure_told(pair: tuple[FallbackStore, FaultyStore, Heard], error: Exception) -> None:
    store, faulty, heard = pair
    for operation in ("read", "stat"):
        faulty.add(Fault(operation, error=error))
    for _ in range(3):
        assert store.read(DIGEST, 0, 5) == b"01234"
        assert store.stat(DIGEST).size == len(DATA)
    assert heard.lines == [f"{error}; falling back to the other store"]


def test_d8_wrong_bytes_are_read_from_the_second_store(pair: tuple[FallbackStore, FaultyStore, Heard]) -> None:
    store, faulty, heard = pair
    faulty.add(Fault("read", change=flipped))
    assert store.read(DIGEST, 0, len(DATA)) == DATA
    assert store.read(DIGEST, 0, 5) != b"01234"  # a part has no digest that the store knows
    store.suspect(DIGEST)
    assert store.read(DIGEST, 0, 5) == b"01234"
    assert "mem://second" in heard.lines[-1]
    store.suspect(DIGEST)  # the second was no better
    assert store.read(DIGEST, 0, 5) != b"01234"


def test_unknown_in_one_and_absent_in_the_other_is_unknown(pair: tuple[FallbackStore, FaultyStore, Heard]) -> None:
    store, faulty, _ = pair
    with pytest.raises(NotFound):
        store.stat(OTHER)
    faulty.add(Fault("stat", error=StoreError("down")))
    with pytest.raises(StoreError, match="down"):
        store.stat(OTHER)


def test_changes_go_to_the_first_alone(pair: tuple[FallbackStore, FaultyStore, Heard]) -> None:
    store, _, _ = pair
    info = put_bytes(store, b"new")
    store.set_ref("a:1", info.digest, expected=None)
    with pytest.raises(NotFound):
        store.second.stat(info.digest)
    store.second.set_ref("b:1", DIGEST, expected=None)
    assert store.get_ref("b:1").digest == DIGEST
    store.delete(DIGEST)
    assert store.second.stat(DIGEST).size == len(DATA)


# Count, local files, streams


def test_counts(faulty: FaultyStore) -> None:
    store = CountStore(faulty)
    with pytest.raises(RuntimeError), store.writer() as writer:
        writer.write(b"given up")
        raise RuntimeError
    put_bytes(store, b"12345")
    store.read(DIGEST, 0, 100)
    store.stat(DIGEST)
    store.touch(DIGEST)
    list(store.list())
    store.set_ref("a:1", DIGEST, expected=None)
    list(store.list_refs())
    store.delete(DIGEST)
    counts = store.reset()
    assert (counts.reads, counts.bytes_read, counts.blobs_written, counts.bytes_written) == (1, 100, 1, 5)
    assert counts.requests == 8
    assert store.counts.requests == 0


def test_what_must_see_every_read_hides_local_files(tmp_path: Path) -> None:
    inner = PosixStore(tmp_path / "store")
    assert as_local(VerifyStore(RetryStore(inner))) is not None
    for wrapped in (CountStore(inner), FaultyStore(inner), FallbackStore(inner, MemoryStore())):
        assert as_local(wrapped) is None
    for call in (VerifyStore(MemoryStore()).local_path, VerifyStore(MemoryStore()).open_fd):
        with pytest.raises(StoreError):
            call(DIGEST)


def test_read_ahead_gives_the_pieces_in_order_and_stops_early(faulty: FaultyStore) -> None:
    assert b"".join(read_ahead(faulty, DIGEST, len(DATA), 999)) == DATA
    counted = CountStore(faulty)
    pieces = read_ahead(counted, DIGEST, len(DATA), 10)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert counted.counts.reads < 10
    faulty.add(Fault("read", error=StoreError("down"), skip=3))
    with pytest.raises(StoreError):
        list(read_ahead(faulty, DIGEST, len(DATA), 999))
