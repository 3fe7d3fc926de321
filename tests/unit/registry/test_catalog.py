"""The catalog: what it finds, and that losing it, damaging it or racing for it loses nothing but time."""

from __future__ import annotations

import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from dsec_layers.digest import content_digest
from dsec_layers.erofs.tree import BLOCK
from dsec_layers.errors import Conflict, StoreError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.frames import decompress
from dsec_layers.proc import PIPE, clean_environment, spawn
from dsec_layers.registry import index_file
from dsec_layers.registry.catalog import Catalog, ChunkAt, Indexed
from dsec_layers.registry.objects import set_tag
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from tests.kit.store_count import CountStore
from tests.kit.store_faulty import Fault, FaultyStore, zeros
from tests.kit.store_samples import Heard, Sample, content, make_environment, make_layer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog" / "chunks.sqlite"


def digests(sample: Sample) -> list[bytes]:
    return [bytes(digest) for digest in sample.chunks["digest"]]


def fetched(store: MemoryStore, digest: bytes, at: ChunkAt) -> None:
    """A catalog's answer leads to the bytes."""
    segment = at.segment
    data = decompress(store.read(segment.blob, segment.offset, segment.stored), segment.size)
    assert content_digest(data) == segment.digest
    assert content_digest(data[at.block * BLOCK : at.block * BLOCK + at.size]) == digest
    assert at.blocks == -(-at.size // BLOCK)


def test_chunks_are_found_where_they_are(path: Path) -> None:
    store = MemoryStore()
    one = make_layer(store, {"a": content(1, 700_000)})
    two = make_layer(store, {"b": content(2, 300_001)}, kind=Kind.TOOLKIT, borrow=one)
    with Catalog(path) as catalog:
        assert catalog.lookup(digests(one)) == {}
        assert catalog.add_layer(store, one.digest)
        assert not catalog.add_layer(store, one.digest)
        catalog.add_tables(two.digest, two.layer, two.segments, two.chunks)
        found = catalog.lookup([*digests(one), *digests(two), b"\0" * 32, b"\xff" * 32])
        assert found.keys() == set(digests(one)) | set(digests(two))
        for digest, at in found.items():
            fetched(store, digest, at)
        assert {at.segment.blob for at in found.values()} == {one.own.digest, two.own.digest}
        assert catalog.holds() == Indexed(2, 2, len(one.segments) + len(two.segments) - 1, len(found))
    with Catalog(path) as again:
        assert again.lookup(digests(one)) == {digest: found[digest] for digest in digests(one)}


def test_an_empty_catalog_says_so(path: Path) -> None:
    store = MemoryStore()
    with Catalog(path) as catalog:
        said = [catalog.empty]
        catalog.add_layer(store, make_layer(store, {"a": b"x"}).digest)
        said.append(catalog.empty)
    assert said == [True, False]


def test_a_digest_that_shares_its_first_bytes_is_not_mistaken(path: Path) -> None:
    store = MemoryStore()
    sample = make_layer(store, {"a": content(1, 100)})
    twin = digests(sample)[0][:8] + bytes(24)
    with Catalog(path) as catalog:
        catalog.add_layer(store, sample.digest)
        assert catalog.lookup([twin]) == {}
        assert list(catalog.lookup([twin, digests(sample)[0]])) == digests(sample)


def test_more_digests_than_one_query_takes(path: Path) -> None:
    store = MemoryStore()
    sample = make_layer(store, {"a": content(1, 500_000)})
    noise = [bytes(row) for row in np.random.default_rng(1).integers(0, 256, (40_000, 32), np.uint8)]
    with Catalog(path) as catalog:
        catalog.add_layer(store, sample.digest)
        assert catalog.lookup([*noise, *digests(sample)]).keys() == set(digests(sample))


def test_what_was_in_a_blob_that_is_gone_is_forgotten(path: Path) -> None:
    store = MemoryStore()
    one = make_layer(store, {"a": content(1, 700_000)})
    two = make_layer(store, {"b": content(2, 300_001)}, borrow=one)
    with Catalog(path) as catalog, Catalog(path) as other:
        for sample in (one, two):
            catalog.add_layer(store, sample.digest)
        assert other.lookup(digests(one))
        catalog.forget_blob(one.own.digest)
        for view in (catalog, other):
            assert view.lookup(digests(one)) == {}
            assert len(view.lookup(digests(two))) == len(two.chunks) - 1
        assert catalog.add_layer(store, one.digest)  # it came back
        assert len(other.lookup(digests(one))) == len(one.chunks)


def test_rebuild_finds_what_is_named_and_what_is_not(path: Path) -> None:
    store = MemoryStore()
    base = make_layer(store, {"a": content(1, 200_000)})
    tool = make_layer(store, {"t": content(2, 70_000)}, kind=Kind.TOOLKIT)
    loose = make_layer(store, {"l": content(3, 70_000)})
    set_tag(store, "env:1", make_environment(store, [base, tool]))
    with Catalog(path) as catalog:
        assert catalog.update(store).layers == 2
        assert catalog.update(store) == Indexed(0, 0, 0, 0)
        assert catalog.lookup(digests(loose)) == {}
        made = catalog.rebuild(store)
        assert made == catalog.holds()
        assert made.layers == 3
        assert len(catalog.lookup(digests(loose))) == len(loose.chunks)
        before = CountStore(store)
        catalog.update(before)
        assert before.counts.bytes_read < 3000  # manifests only


def test_layers_that_cannot_be_read_are_left_out_and_told(path: Path) -> None:
    store = MemoryStore()
    good = make_layer(store, {"a": content(1, 200_000)})
    bad = make_layer(store, {"b": content(2, 200_000)})
    for name, sample in (("good:1", good), ("bad:1", bad)):
        set_tag(store, name, sample.digest)
    set_tag(store, "broken:1", make_layer(store, {"c": b"x"}).digest)
    store.delete(store.get_ref("broken:1").digest)
    faulty, heard = FaultyStore(store), Heard()
    faulty.add(Fault("read", change=zeros, when=lambda digest: digest == bad.layer.metadata.digest))
    with Catalog(path, progress=heard) as catalog:
        made = catalog.rebuild(faulty)
        assert made.layers == 1
        assert set(made.skipped) == {bad.digest, store.get_ref("broken:1").digest}
        assert len(heard.lines) >= 2
        assert catalog.lookup(digests(good))


@pytest.mark.parametrize("damage", ["junk", "truncated", "page", "version", "tables", "empty"])
def test_a_damaged_file_is_put_aside_and_made_anew(path: Path, damage: str) -> None:
    store = PosixStore(path.parent.parent / "store")
    sample = make_layer(store, {"a": content(1, 20_000_00)}, per_segment=1)
    set_tag(store, "a:1", sample.digest)
    with Catalog(path, store=store) as catalog:
        assert catalog.holds().layers == 1  # made, and filled at once
    raw = path.read_bytes()
    if damage == "junk":
        path.write_bytes(b"junk" * 5000)
    elif damage == "truncated":
        path.write_bytes(raw[: len(raw) // 2 // 4096 * 4096])
    elif damage == "page":
        path.write_bytes(raw[:4096] + b"\x07" * (len(raw) - 4096))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        with sqlite3.connect(path) as sql:
            sql.execute("PRAGMA user_version = 99" if damage == "version" else "PRAGMA user_version = 0")
        sql.close()
    heard = Heard()
    with Catalog(path, store=store, progress=heard) as catalog:
        catalog.lookup(digests(sample))
        if catalog.holds() == Indexed(0, 0, 0, 0):  # found damaged only when it was used
            catalog.rebuild(store)
        assert len(catalog.lookup(digests(sample))) == len(sample.chunks)
    assert (damage == "empty") == (heard.lines == [])
    aside = list(path.parent.glob("*.damaged-*"))
    assert len(aside) == (damage != "empty")


def test_a_file_damaged_under_an_open_catalog_gives_misses_not_errors(path: Path) -> None:
    store = MemoryStore()
    sample = make_layer(store, {"a": content(1, 20_000_00)}, per_segment=1)
    heard = Heard()
    with Catalog(path, progress=heard) as catalog:
        catalog.add_layer(store, sample.digest)
        catalog._file.run(lambda sql: sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall(), [])
        path.write_bytes(b"junk" * 100_000)
        with Catalog(path, progress=heard) as other:
            assert other.lookup(digests(sample)) == {}
            catalog.rebuild(store)
            assert len(heard.lines) >= 1


def test_a_lock_that_is_never_given_back_is_a_conflict(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    sample = make_layer(store, {"a": b"x"})
    monkeypatch.setattr(index_file, "_BUSY", 0.05)
    with Catalog(path) as catalog:
        sql = sqlite3.connect(path, isolation_level=None)
        sql.execute("BEGIN IMMEDIATE")
        assert catalog.lookup(digests(sample)) == {}  # readers go on
        with pytest.raises(Conflict):
            catalog.add_layer(store, sample.digest)
        sql.execute("ROLLBACK")
        sql.close()
        assert catalog.add_layer(store, sample.digest)


def test_a_catalog_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        Catalog(tmp_path / "file" / "catalog")
    with pytest.raises(StoreError):
        Catalog(tmp_path)


def test_threads_share_a_catalog(path: Path) -> None:
    store = MemoryStore()
    samples = [make_layer(store, {"a": content(number, 150_000)}) for number in range(8)]
    with Catalog(path) as catalog:

        def work(sample: Sample) -> None:
            catalog.add_layer(store, sample.digest)
            assert len(catalog.lookup(digests(sample))) == len(sample.chunks)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, samples * 2))
        assert catalog.holds().layers == 8


def test_processes_share_a_catalog(path: Path, tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    samples = [make_layer(store, {"a": content(number, 150_000)}) for number in range(12)]
    program = (
        "import sys; from pathlib import Path; from dsec_layers.store.open import open_store; from dsec_layers.registry.catalog import Catalog\n"
        "store = open_store(sys.argv[1])\n"
        "for digest in sys.argv[3:]:\n"
        "    with Catalog(Path(sys.argv[2])) as catalog: print(catalog.add_layer(store, digest))\n"
    )
    with ExitStack() as stack:
        argv = [sys.executable, "-c", program, store.url, str(path), *(sample.digest for sample in samples)]
        workers = [stack.enter_context(spawn(argv, stdout=PIPE, cwd=ROOT, env=clean_environment())) for _ in range(3)]
        assert [worker.wait() for worker in workers] == [0, 0, 0]
    with Catalog(path) as catalog:
        assert catalog.holds().layers == 12
        for sample in samples:
            assert len(catalog.lookup(digests(sample))) == len(sample.chunks)
