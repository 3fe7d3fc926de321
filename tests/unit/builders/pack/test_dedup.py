"""Packing beside other layers: chunks used where they lie, capping, lies and losses of the catalog, the same input again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.pack import foreign as pack_foreign
from dsec_layers.builders.pack.foreign import HELD, REPAID
from dsec_layers.builders.pack.layer import PackResult
from dsec_layers.digest import Digest
from dsec_layers.erofs.tree import Tree
from dsec_layers.errors import Conflict
from dsec_layers.layers.manifest import FOREIGN
from dsec_layers.progress import Progress, Task
from dsec_layers.registry.catalog import Catalog, ChunkAt
from dsec_layers.registry.objects import load_chunks, load_metadata
from dsec_layers.store.memory import MemoryStore
from tests.kit.pack_inputs import Files, contents, noise, pack, text
from tests.kit.store_faulty import Fault, FaultyStore, flipped

KIB, MIB = 1 << 10, 1 << 20

BASE = {f"d{nth % 7}/f{nth}": (noise if nth % 2 else text)(nth, 1000 + nth * 977 % 90_000) for nth in range(150)} | {
    "large": noise(1000, 5 * MIB),
    "z": noise(1001, 300 * KIB),
}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(tmp_path / "catalog.sqlite") as opened:
        yield opened


class Warnings:
    """A Progress that keeps what it was warned of."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> AbstractContextManager[Task]:
        raise AssertionError

    def info(self, message: str) -> None:
        self.said.append(message)

    debug = info
    warning = info


def own_blobs(result: PackResult) -> list[Digest]:
    return [item.digest for item in result.layer.segments if FOREIGN not in item.annotations]


def foreign_blobs(result: PackResult) -> list[Digest]:
    return [item.digest for item in result.layer.segments if FOREIGN in item.annotations]


def test_a_similar_layer_stores_only_what_is_new(catalog: Catalog) -> None:
    store = MemoryStore()
    one = pack(store, BASE, catalog=catalog)
    changed = BASE | {"d3/f3": noise(7777, 100_000), "new": noise(7778, 50_000)}
    two = pack(store, changed, catalog=catalog)
    assert contents(store, two.digest) == Files(changed).sha256()
    assert two.unique == 150_000 and two.against + two.unique + two.inline + two.within == two.content
    assert foreign_blobs(two) == own_blobs(one) and len(own_blobs(two)) == 1
    assert two.foreign_segments <= one.segments and two.stored < 200_000
    _, table = load_metadata(store, two.layer)
    chunks = load_chunks(store, two.layer, table)
    assert int(chunks["size"].sum()) == two.unique and (table["blob"][chunks["segment"]] == 0).all()


def test_foreign_segments_come_after_own_ones_by_blob_and_offset(catalog: Catalog) -> None:
    store = MemoryStore()
    parts = [{f"p{part}/{nth}": noise(100 * part + nth, 60_000) for nth in range(30)} for part in range(4)]
    for part in parts:
        pack(store, part, catalog=catalog)
    merged = {f"x{nth}": noise(9000 + nth, 60_000) for nth in range(5)}
    for part in reversed(parts):
        merged |= part
    result = pack(store, merged, catalog=catalog)
    assert contents(store, result.digest) == Files(merged).sha256()
    assert len(own_blobs(result)) == 1 and len(foreign_blobs(result)) == 4
    assert foreign_blobs(result) == sorted(foreign_blobs(result))
    _, table = load_metadata(store, result.layer)
    assert sorted(table[["blob", "offset"]].tolist()) == table[["blob", "offset"]].tolist()


def test_a_segment_that_does_not_repay_itself_is_not_used(catalog: Catalog) -> None:
    store = MemoryStore()
    one = pack(store, {f"f{nth}": noise(nth, 30_000) for nth in range(200)}, catalog=catalog)
    assert one.segments >= 4
    few = {f"f{nth}": noise(nth, 30_000) for nth in range(0, 200, 60)}
    two = pack(store, few, catalog=catalog)
    assert two.foreign_segments == 0 and two.unique == 4 * 30_000
    assert contents(store, two.digest) == Files(few).sha256()


def test_a_segment_that_repays_itself_late_is_used_for_what_was_held_as_well(catalog: Catalog) -> None:
    store = MemoryStore()
    old = {f"f{nth}": noise(nth, 30_000) for nth in range(17)}
    pack(store, old, catalog=catalog)
    spread: dict[str, bytes] = {}
    for nth in range(17):  # far apart, so that they are looked up in different windows
        spread |= {f"f{nth}": old[f"f{nth}"], f"again{nth}": old[f"f{nth}"], f"new{nth}": bytes([nth + 1]) * 17 * MIB}
    two = pack(store, spread, catalog=catalog)
    assert two.against == 17 * 30_000 and two.foreign_segments == 1
    assert contents(store, two.digest) == Files(spread).sha256()


def test_a_small_segment_repays_itself_by_a_quarter(catalog: Catalog) -> None:
    store = MemoryStore()
    pack(store, {f"f{nth}": noise(nth, 4096) for nth in range(8)}, catalog=catalog)
    assert pack(store, {"f0": noise(0, 4096), "n": noise(90, 4096)}, catalog=catalog).foreign_segments == 0
    assert pack(store, {"f0": noise(0, 4096), "f5": noise(5, 4096)}, catalog=catalog).foreign_segments == 1


def test_a_segment_of_tiny_files_repays_itself_by_its_blocks(catalog: Catalog) -> None:
    store = MemoryStore()
    tiny = {f"f{nth}": noise(nth, 200) for nth in range(300)}
    pack(store, tiny, catalog=catalog)
    again = pack(store, tiny | {"new": noise(1000, 5000)}, catalog=catalog)
    assert again.unique == 5000 and again.against == 300 * 200


def test_what_is_held_is_bounded_and_stored_in_the_end(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    files = {f"f{nth}": noise(nth, 60_000) for nth in range(400)}
    pack(store, files, catalog=catalog)
    monkeypatch.setattr(pack_foreign, "HELD", 200_000)
    some = {f"f{nth}": files[f"f{nth}"] for nth in range(0, 400, 20)} | {"f0again": files["f0"]}
    result = pack(store, some, catalog=catalog)
    assert result.foreign_segments == 0 and result.unique == 20 * 60_000 and result.within == 60_000
    assert contents(store, result.digest) == Files(some).sha256()
    assert HELD > 100 * REPAID


def test_the_same_input_gives_the_layer_that_is_there(catalog: Catalog) -> None:
    store = MemoryStore()
    one = pack(store, BASE, catalog=catalog)
    two = pack(store, BASE, catalog=catalog)
    assert two.reused and not one.reused
    assert (two.digest, two.layer, two.stored) == (one.digest, one.layer, 0)


def test_the_same_input_gives_the_layer_that_is_there_though_capping_laid_it_out_otherwise(catalog: Catalog) -> None:
    store = MemoryStore()
    pack(store, BASE, catalog=catalog)
    mixed = {name: data for nth, (name, data) in enumerate(BASE.items()) if nth % 11 == 0} | {
        f"n{nth}": noise(5000 + nth, 70_000) for nth in range(40)
    }
    one = pack(store, mixed, catalog=catalog)
    assert one.foreign_segments > 0
    again = pack(store, mixed, catalog=catalog)
    assert again.reused and again.digest == one.digest
    assert pack(store, mixed, catalog=catalog, previous=one.digest).digest == one.digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"epoch": 5},
        {"recipe": {"x": 1}},
        {"env": {"A": "B"}},
        {"parent": f"sha256:{'0' * 64}"},
    ],
)
def test_other_settings_give_another_layer(catalog: Catalog, change: dict[str, object]) -> None:
    store = MemoryStore()
    one = pack(store, BASE, catalog=catalog)
    two = pack(store, BASE, catalog=catalog, **change)
    assert not two.reused and two.digest != one.digest and two.unique == 0
    assert contents(store, two.digest) == Files(BASE).sha256()


@pytest.mark.parametrize("name", ["d1/f1", "z"])
def test_a_file_of_the_same_size_with_other_content_gives_another_layer(catalog: Catalog, name: str) -> None:
    store = MemoryStore()
    one = pack(store, BASE, catalog=catalog)
    swapped = BASE | {name: noise(4242, len(BASE[name]))}
    two = pack(store, swapped, catalog=catalog, previous=one.digest)
    assert not two.reused
    assert contents(store, two.digest) == Files(swapped).sha256()
    # Every chunk is known by now, so that only the comparison of contents can tell the layers apart.
    three = pack(store, BASE, catalog=catalog, previous=two.digest)
    assert three.reused and three.digest == one.digest
    assert pack(store, swapped, catalog=catalog, previous=one.digest).digest == two.digest


def test_previous_alone_is_enough_to_store_only_what_is_new() -> None:
    store = MemoryStore()
    one = pack(store, BASE)
    changed = BASE | {"d3/f3": noise(7777, 100_000)}
    two = pack(store, changed, previous=one.digest)
    assert two.unique == 100_000 and foreign_blobs(two) == own_blobs(one)
    assert contents(store, two.digest) == Files(changed).sha256()
    assert pack(store, BASE, previous=one.digest).reused


def test_previous_wins_over_the_catalog(catalog: Catalog) -> None:
    store = MemoryStore()
    pack(store, BASE, catalog=catalog, name="first")
    here = pack(store, BASE, name="second", level=4)  # the same chunks in another blob, which the catalog does not know
    assert own_blobs(here) != []
    changed = BASE | {"new": noise(1, 10_000)}
    assert foreign_blobs(pack(store, changed, catalog=catalog, previous=here.digest)) == own_blobs(here)


def test_a_previous_layer_that_cannot_be_read_is_not_built_upon(catalog: Catalog) -> None:
    store, progress = MemoryStore(), Warnings()
    result = pack(store, BASE, previous=f"sha256:{'1' * 64}", progress=progress)
    assert result.against == 0 and "cannot be read" in progress.said[0]


def lost(store: MemoryStore, catalog: Catalog, one: PackResult) -> None:
    store.delete(own_blobs(one)[0])


def lie_about_blocks(store: MemoryStore, catalog: Catalog, one: PackResult) -> None:
    rows = catalog._file.run(lambda sql: sql.execute("UPDATE chunks SET block = block + 1 WHERE block < 20").rowcount, 0)
    assert rows > 10


def lie_about_segments(store: MemoryStore, catalog: Catalog, one: PackResult) -> None:
    catalog._file.run(lambda sql: sql.execute("UPDATE segments SET digest = ?", (bytes(32),)), None)


def lie_about_offsets(store: MemoryStore, catalog: Catalog, one: PackResult) -> None:
    catalog._file.run(lambda sql: sql.execute("UPDATE segments SET offset = offset + 10000000000"), None)


@pytest.mark.parametrize("harm", [lost, lie_about_blocks, lie_about_segments, lie_about_offsets])
def test_a_catalog_that_is_wrong_costs_time_and_never_a_byte(
    catalog: Catalog, harm: Callable[[MemoryStore, Catalog, PackResult], None]
) -> None:
    store, progress = MemoryStore(), Warnings()
    one = pack(store, BASE, catalog=catalog)
    harm(store, catalog, one)
    files = Files(BASE | {"new": b"n" * 5000})
    two = pack(store, files, catalog=catalog, progress=progress)
    assert contents(store, two.digest) == files.sha256()
    assert foreign_blobs(two) == [] and files.times == 2
    assert "packing again without it" in progress.said[0]
    three = pack(store, files, catalog=catalog)
    assert three.reused and files.times == 3


def test_a_foreign_blob_with_a_wrong_bit_is_not_used(catalog: Catalog) -> None:
    inner = MemoryStore()
    one = pack(inner, BASE, catalog=catalog)
    bad = own_blobs(one)[0]
    store, progress = FaultyStore(inner), Warnings()
    store.add(Fault("read", change=flipped, when=lambda digest: digest == bad))
    changed = BASE | {"new": b"n" * 5000}
    two = pack(store, changed, catalog=catalog, progress=progress)
    assert foreign_blobs(two) == [] and bad in progress.said[0]


class Vanishing(Files):
    """A source while whose reading a blob is collected."""

    def __init__(self, files: dict[str, bytes], store: MemoryStore, blob: Digest) -> None:
        super().__init__(files)
        self.store, self.blob = store, blob

    def ingest(self, sink: ContentSink, progress: Progress) -> Tree:
        tree = super().ingest(sink, progress)
        self.store.delete(self.blob)
        return tree


def test_a_blob_that_vanishes_meanwhile_is_done_without(catalog: Catalog) -> None:
    store = MemoryStore()
    one = pack(store, BASE, catalog=catalog)
    files = Vanishing(BASE | {"new": b"n" * 5000}, store, own_blobs(one)[0])
    two = pack(store, files, catalog=catalog)
    assert foreign_blobs(two) == [] and files.times == 2
    assert contents(store, two.digest) == files.sha256()


def test_a_blob_that_vanishes_at_the_last_moment_is_done_without(catalog: Catalog) -> None:
    inner = MemoryStore()
    one = pack(inner, BASE, catalog=catalog)
    blob = own_blobs(one)[0]
    store = FaultyStore(inner)
    calls = 0

    def third(digest: str) -> bool:
        nonlocal calls
        calls += digest == blob
        if calls == 3:
            inner.delete(blob)
        return False

    store.add(Fault("touch", when=third))
    files = Files(BASE | {"new": b"n" * 5000})
    two = pack(store, files, catalog=catalog)
    assert calls == 4 and files.times == 2 and foreign_blobs(two) == []
    assert contents(store, two.digest) == files.sha256()


class Failing(Catalog):
    """A catalog that another process keeps locked, from the ``n``-th call on."""

    def __init__(self, inner: Catalog, n: int) -> None:
        self.inner, self.left = inner, n

    def __getattribute__(self, name: str) -> object:
        own = object.__getattribute__
        if name in ("inner", "left", "__class__", "__dict__"):
            return own(self, name)
        self.left -= 1
        if self.left < 0:
            raise Conflict("locked")
        return getattr(own(self, "inner"), name)


@pytest.mark.parametrize("n", range(8))
def test_a_catalog_that_fails_at_any_call_only_costs_dedup(catalog: Catalog, n: int) -> None:
    store, progress = MemoryStore(), Warnings()
    one = pack(store, BASE, catalog=catalog)
    files = Files(BASE | {"new": b"n" * 5000})
    two = pack(store, files, catalog=Failing(catalog, n), previous=one.digest if n % 2 else None, progress=progress)
    assert contents(store, two.digest) == files.sha256()
    assert n > 3 or any("catalog" in message for message in progress.said)


def test_a_catalog_that_missed_the_layer_is_told_later(catalog: Catalog) -> None:
    store = MemoryStore()
    one = pack(store, BASE)
    assert pack(store, BASE, previous=one.digest, catalog=catalog).reused
    assert catalog.holds().layers == 1


@contextmanager
def hostile(catalog: Catalog, at: Callable[[ChunkAt], ChunkAt]) -> Iterator[Catalog]:
    class Hostile(Catalog):
        def __init__(self) -> None:
            self.inner = catalog

        empty = False

        def lookup(self, digests: object) -> dict[bytes, ChunkAt]:
            return {digest: at(found) for digest, found in catalog.lookup(digests).items()}  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            return getattr(catalog, name)

    yield Hostile()


@pytest.mark.parametrize("field", ["block", "blocks", "size"])
@pytest.mark.parametrize("value", [-1, 0, 1, 255, 1 << 31, 1 << 62])
def test_impossible_answers_of_a_catalog_are_survived(catalog: Catalog, field: str, value: int) -> None:
    store = MemoryStore()
    pack(store, BASE, catalog=catalog)
    files = Files(BASE)

    def change(at: ChunkAt) -> ChunkAt:
        values = {"block": at.block, "blocks": at.blocks, "size": at.size} | {field: value}
        return ChunkAt(at.segment, **values)

    with hostile(catalog, change) as liar:
        result = pack(store, files, catalog=liar, name="new")
    assert contents(store, result.digest) == files.sha256()
