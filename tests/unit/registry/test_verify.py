"""Verification finds what is missing and corrupt, names who needs it, and repair restores it from a replica."""

from __future__ import annotations

import numpy as np
import pytest

from dsec_layers.digest import Digest, content_digest
from dsec_layers.errors import NotFound, StoreError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers import disk
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.frames import compress, join_metadata, split_metadata
from dsec_layers.layers.manifest import Layer, LayerConfig
from dsec_layers.layers.tables import pack_chunks, pack_segments
from dsec_layers.registry.collect import sweep
from dsec_layers.registry.objects import publish_object, put_blob, set_tag
from dsec_layers.registry.verify import Problem, orphans, repair, verify
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes, read_blob
from tests.kit.store_faulty import Fault, FaultyStore, flipped
from tests.kit.store_samples import Heard, Sample, content, make_environment, make_layer, publish_config


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def sample(store: MemoryStore) -> Sample:
    return make_layer(store, {"a": content(1, 700_000), "b": content(2, 10_001)})


def damage(store: MemoryStore, digest: Digest, at: int = -1) -> None:
    """Flip a bit of a blob where it lies."""
    data, modified = store._blobs[digest]
    out = bytearray(data)
    out[at if at >= 0 else len(out) // 2] ^= 4
    store._blobs[digest] = bytes(out), modified


def problems(store: MemoryStore, digest: Digest, *, deep: bool = True) -> list[tuple[Problem, Digest, Digest]]:
    return [(finding.problem, finding.digest, finding.owner) for finding in verify(store, digest, deep=deep).findings]


@pytest.mark.parametrize("deep", [False, True])
def test_what_is_whole_is_found_whole(store: MemoryStore, sample: Sample, deep: bool) -> None:
    tool = make_layer(store, {"t": content(3, 70_000)}, kind=Kind.TOOLKIT, borrow=sample)
    environment = make_environment(store, [sample, tool])
    report = verify(store, environment, deep=deep)
    assert report.ok
    assert report.findings == ()
    assert report.blobs == len(list(store.list()))
    assert report.bytes == sum(info.size for info in store.list())


def test_empty_and_compressed_layers(store: MemoryStore) -> None:
    assert verify(store, make_layer(store, {"nothing": b""}).digest, deep=True).ok
    image = put_blob(store, d.EROFS, content(5, 5_000_000))
    layer = publish_object(store, Layer(Kind.TOOLKIT, publish_config(store, LayerConfig(Kind.TOOLKIT, layout="compressed")), image))
    assert verify(store, layer, deep=True).ok
    damage(store, image.digest)
    assert problems(store, layer) == [(Problem.CORRUPT, image.digest, layer)]


def test_f7_missing_corrupt_and_orphan_are_told_apart_and_repaired(store: MemoryStore, sample: Sample) -> None:
    replica = MemoryStore()
    other = make_layer(store, {"o": content(4, 70_000)}, borrow=sample)
    environment = make_environment(store, [sample, other])
    set_tag(store, "env:1", environment)
    for info in store.list():
        put_bytes(replica, read_blob(store, info.digest, limit=1 << 30))
    orphan = put_bytes(store, b"orphan").digest
    missing, corrupt = other.layer.metadata.digest, sample.own.digest
    store.delete(missing)
    damage(store, corrupt)
    assert problems(store, environment, deep=False) == [(Problem.MISSING, missing, other.digest)]
    found = problems(store, environment)
    assert (Problem.MISSING, missing, other.digest) in found
    assert (Problem.CORRUPT, corrupt, sample.digest) in found
    assert [info.digest for info in orphans(store)] == [orphan]
    sweep(store)  # beside a collection
    heard = Heard()
    assert set(repair(store, replica, verify(store, environment, deep=True).findings, progress=heard)) == {missing, corrupt}
    assert heard.lines == []
    assert verify(store, environment, deep=True).ok


def test_each_blob_is_checked(store: MemoryStore, sample: Sample) -> None:
    for item in sample.layer.blobs():
        before = store._blobs[item.digest]
        damage(store, item.digest)
        assert {finding[:2] for finding in problems(store, sample.digest)} == {(Problem.CORRUPT, item.digest)}
        store._blobs[item.digest] = before[0][:-1], before[1]
        assert problems(store, sample.digest, deep=False) == [(Problem.CORRUPT, item.digest, sample.digest)]
        del store._blobs[item.digest]
        assert problems(store, sample.digest) == [(Problem.MISSING, item.digest, sample.digest)]
        store._blobs[item.digest] = before
    assert verify(store, sample.digest, deep=True).ok


def test_the_seek_table_behind_the_segments_counts_too(store: MemoryStore, sample: Sample) -> None:
    damage(store, sample.own.digest, sample.own.size - 1)
    (finding,) = verify(store, sample.digest, deep=True).findings
    assert "digest" in finding.detail
    assert str(finding).startswith(f"corrupt {sample.own.digest}, needed by {sample.digest}")


def test_a_missing_manifest_and_one_that_is_none(store: MemoryStore, sample: Sample) -> None:
    environment = make_environment(store, [sample])
    store.delete(sample.digest)
    assert problems(store, environment) == [(Problem.MISSING, sample.digest, environment)]
    junk = put_bytes(store, b"{}").digest
    assert problems(store, junk) == [(Problem.MALFORMED, junk, junk)]


def test_a_store_that_does_not_answer_is_unknown_not_missing(store: MemoryStore, sample: Sample) -> None:
    faulty = FaultyStore(store)
    faulty.add(Fault("read", error=StoreError("timed out"), when=lambda digest: digest == sample.own.digest))
    report = verify(faulty, sample.digest, deep=True)
    assert [(finding.problem, finding.digest) for finding in report.findings] == [(Problem.UNREADABLE, sample.own.digest)]
    assert repair(store, MemoryStore(), report.findings) == ()
    assert store.stat(sample.own.digest)


# Blobs that are what their digests say, and wrong all the same


def rebuilt(store: MemoryStore, sample: Sample, **changes: Descriptor) -> Digest:
    layer = sample.layer
    return publish_object(
        store, Layer(layer.kind, layer.config, changes.get("metadata", layer.metadata), changes.get("chunks", layer.chunks), layer.segments)
    )


def test_tables_that_lie_are_found(store: MemoryStore, sample: Sample) -> None:
    image, _ = split_metadata(read_blob(store, sample.layer.metadata.digest, limit=1 << 30))
    segments = sample.segments.copy()
    segments["digest"][1] = b"\1" * 32
    metadata = put_blob(store, d.METADATA, join_metadata(image, pack_segments(segments)))
    report = verify(store, rebuilt(store, sample, metadata=metadata), deep=True)
    assert [finding.detail for finding in report.findings] == [f"the segment at {segments['offset'][1]}: the bytes do not match the digest"]
    chunks = sample.chunks.copy()
    chunks["digest"][2] = b"\2" * 32
    table = put_blob(store, d.CHUNKS, compress(pack_chunks(chunks)))
    (finding,) = verify(store, rebuilt(store, sample, chunks=table), deep=True).findings
    assert "the chunk at block" in finding.detail
    short = sample.chunks.copy()
    short["size"][np.argmin(short["size"])] -= 1
    table = put_blob(store, d.CHUNKS, compress(pack_chunks(short)))
    assert len(verify(store, rebuilt(store, sample, chunks=table), deep=True).findings) == 1


def test_metadata_that_does_not_parse_is_malformed(store: MemoryStore, sample: Sample) -> None:
    image, table = split_metadata(read_blob(store, sample.layer.metadata.digest, limit=1 << 30))
    metadata = put_blob(store, d.METADATA, join_metadata(image[:2048] + b"\xff" * (len(image) - 2048), table))
    digest = rebuilt(store, sample, metadata=metadata)
    assert (Problem.MALFORMED, metadata.digest, digest) in problems(store, digest)
    chunks = put_blob(store, d.CHUNKS, b"no zstd")
    digest = rebuilt(store, sample, chunks=chunks)
    assert problems(store, digest) == [(Problem.MALFORMED, chunks.digest, digest)]


# Repair


def test_repair_trusts_a_replica_no_further_than_its_digests(store: MemoryStore, sample: Sample) -> None:
    replica = FaultyStore(MemoryStore())
    put_bytes(replica, read_blob(store, sample.own.digest, limit=1 << 30))
    replica.add(Fault("read", change=flipped))
    damage(store, sample.own.digest)
    heard = Heard()
    findings = verify(store, sample.digest, deep=True).findings
    assert repair(store, replica, findings, progress=heard) == ()
    assert len(heard.lines) == 1
    assert store.stat(sample.own.digest).size == sample.own.size  # nothing was removed for nothing
    replica.clear()
    assert repair(store, replica, findings) == (sample.own.digest,)
    store.delete(sample.layer.config.digest)
    assert repair(store, replica, verify(store, sample.digest).findings, progress=heard) == ()
    with pytest.raises(NotFound):
        store.stat(sample.layer.config.digest)


def test_a_disk_whose_pieces_list_says_other_digests_is_found_by_reading_its_blob() -> None:
    store = MemoryStore()
    data = content(7, 2 * disk.PIECE_SIZE + 5000)
    right = [content_digest(data[at : at + disk.PIECE_SIZE]) for at in range(0, len(data), disk.PIECE_SIZE)]
    config = put_bytes(store, disk.DiskConfig(1 << 20).to_json())
    blob = put_bytes(store, data)

    def found(digests: list[bytes]) -> list[str]:
        listed = put_bytes(store, disk.pack_pieces(len(data), digests))
        layer = disk.DiskLayer(Descriptor(disk.LAYER_TAR, blob.digest, blob.size), Descriptor(disk.PIECES, listed.digest, listed.size))
        value = disk.DiskImage(Descriptor(disk.DISK_CONFIG, config.digest, config.size), (layer,))
        return [str(finding) for finding in verify(store, put_bytes(store, value.to_json()).digest, deep=True).findings]

    assert found(right) == []
    (wrong,) = found([right[0], right[0], right[2]])
    assert wrong.startswith(f"corrupt {blob.digest}") and f"the segment at {disk.PIECE_SIZE}" in wrong
