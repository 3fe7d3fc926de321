"""Segments on their way into blobs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zstandard

from dsec_layers.builders.pack import output as pack_output
from dsec_layers.builders.pack.output import BlobOutput, Written
from dsec_layers.digest import content_digest
from dsec_layers.errors import NoSpace
from dsec_layers.layers.tables import parse_segments
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from tests.kit.pack_inputs import noise, text
from tests.kit.store_faulty import Fault, FaultyStore

KIB = 1 << 10


def data(count: int) -> list[bytes]:
    """Segments of different sizes, some compressible."""
    return [(noise if nth % 3 else text)(nth, 4096 * (1 + nth * 7 % 40)) for nth in range(count)]


def write(store: Store, segments: list[bytes], *, workers: int = 2, limit: int = 4 << 30) -> Written:
    with BlobOutput(store, workers=workers, blob_limit=limit) as output:
        for segment in segments:
            buffer = output.acquire(max(len(segment), 64 * KIB))
            buffer.view[: len(segment)] = segment
            output.submit(buffer, len(segment))
        return output.result()


def read(store: Store, written: Written) -> Iterator[bytes]:
    table = parse_segments(_packed(written), tuple(blob.size for blob in written.blobs))
    for record in table:
        frame = store.read(written.blobs[int(record["blob"])].digest, int(record["offset"]), int(record["stored"]))
        segment = zstandard.ZstdDecompressor().decompress(frame, max_output_size=int(record["size"]))
        assert content_digest(segment) == record["digest"].tobytes()
        yield segment


def _packed(written: Written) -> bytes:
    from dsec_layers.layers.tables import pack_segments

    return pack_segments(written.records)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_order_and_bytes_do_not_depend_on_the_workers(workers: int) -> None:
    store, segments = MemoryStore(), data(60)
    written = write(store, segments, workers=workers)
    assert list(read(store, written)) == segments
    assert written.blobs == write(MemoryStore(), segments, workers=3).blobs
    assert len(written.blobs) == 1


def test_a_full_blob_is_followed_by_another() -> None:
    store, segments = MemoryStore(), data(60)
    limit = 700 * KIB
    written = write(store, segments, limit=limit)
    assert len(written.blobs) > 3
    assert all(blob.size <= limit for blob in written.blobs)
    assert list(read(store, written)) == segments


def test_the_limit_of_a_blob_counts_its_seek_table() -> None:
    sizes = [blob.size for blob in write(MemoryStore(), data(4)).blobs]
    assert len(write(MemoryStore(), data(4), limit=sizes[0]).blobs) == 1
    assert len(write(MemoryStore(), data(4), limit=sizes[0] - 1).blobs) == 2


def test_no_segments_no_blob() -> None:
    store = MemoryStore()
    written = write(store, [])
    assert written.blobs == [] and len(written.records) == 0
    assert list(store.list()) == []


@pytest.mark.parametrize("operation", ["write", "commit"])
def test_an_error_of_the_store_reaches_the_caller_who_waits(operation: str) -> None:
    store = FaultyStore(MemoryStore())
    store.add(Fault(operation, error=NoSpace("full"), skip=3 if operation == "write" else 0))
    with pytest.raises(NoSpace):
        write(store, data(500))
    assert list(store.list()) == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pack-")]


def test_an_exception_leaves_no_blob_and_no_thread() -> None:
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), BlobOutput(store) as output:
        for segment in data(10):
            buffer = output.acquire(200 * KIB)
            buffer.view[: len(segment)] = segment
            output.submit(buffer, len(segment))
        raise ZeroDivisionError
    assert list(store.list()) == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pack-")]


def test_memory_is_bounded_when_the_store_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_output, "IN_FLIGHT", 5 * 64 * KIB)
    gate = threading.Event()
    store = FaultyStore(MemoryStore())
    store.add(Fault("write", until=gate))
    buffers = set()
    with BlobOutput(store, workers=2) as output:
        for nth in range(200):
            if nth == 5:
                gate.set()
            buffer = output.acquire(64 * KIB)
            buffers.add(id(buffer))
            output.submit(buffer, 4096)
        output.result()
    assert len(buffers) <= 6
