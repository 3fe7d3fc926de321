"""The wrappers that tests use, and what passes a digest."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import CorruptError, NoSpace, StoreError
from dsec_layers.store.base import as_local
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes, read_ahead, read_blob, read_pieces
from tests.kit.store_count import CountStore
from tests.kit.store_faulty import Fault, FaultyStore, flipped, half, other, zeros
from tests.kit.store_wrapper import Wrapper

DATA = b"0123456789" * 1000
DIGEST = sha256_digest(DATA)
OTHER = sha256_digest(b"other")


@pytest.fixture
def faulty() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    put_bytes(store, DATA)
    return store


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


# Whole blobs


@pytest.mark.parametrize("change", [zeros, half, flipped, other, lambda data: b"", lambda data: data + b"x"])
def test_d2_no_wrong_whole_blob_passes(faulty: FaultyStore, change: object) -> None:
    faulty.add(Fault("read", change=change))  # type: ignore[arg-type]
    for call in (lambda: read_blob(faulty, DIGEST, limit=1 << 20), lambda: list(read_pieces(faulty, DIGEST, len(DATA), 3000))):
        with pytest.raises(CorruptError):
            call()


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
    for wrapped in (CountStore(inner), FaultyStore(inner)):
        assert as_local(wrapped) is None
    assert as_local(Wrapper(inner)) is not None
    for call in (Wrapper(MemoryStore()).local_path, Wrapper(MemoryStore()).open_fd):
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
