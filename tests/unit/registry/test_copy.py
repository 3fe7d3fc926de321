"""Copies: only what is missing moves, verified, children first, and a copy that was stopped goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError, Interrupted, NotFound, StoreError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.registry.copy import Copied, copy_object
from dsec_layers.registry.objects import set_tag
from dsec_layers.registry.verify import verify
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.store_count import CountStore
from tests.kit.store_faulty import Fault, FaultyStore, flipped
from tests.kit.store_samples import Sample, content, make_environment, make_layer


@pytest.fixture
def source() -> MemoryStore:
    return MemoryStore("mem://source")


@pytest.fixture
def members(source: MemoryStore) -> list[Sample]:
    base = make_layer(source, {"a": content(1, 700_000)})
    return [base, make_layer(source, {"t": content(2, 300_000)}, kind=Kind.TOOLKIT, borrow=base)]


@pytest.fixture
def environment(source: MemoryStore, members: list[Sample]) -> Digest:
    return make_environment(source, members)


def blobs(store: Store) -> dict[Digest, int]:
    return {info.digest: info.size for info in store.list()}


def test_everything_below_moves_and_moves_once(source: MemoryStore, environment: Digest, tmp_path: Path) -> None:
    put_bytes(source, b"not part of it")
    with_count = CountStore(source)
    target = PosixStore(tmp_path / "target")
    done = copy_object(with_count, target, environment, name="env:1")
    assert target.get_ref("env:1").digest == environment
    assert verify(target, environment, deep=True).ok
    assert len(blobs(target)) == len(blobs(source)) - 1
    assert (done.present, done.copied) == (0, len(blobs(target)) - 3)
    again = copy_object(source, target, environment)
    assert again == Copied(environment, 0, 0, done.copied, done.copied_bytes)


def test_only_what_is_missing_moves(source: MemoryStore, members: list[Sample], environment: Digest) -> None:
    target = MemoryStore()
    copy_object(source, target, members[0].digest)
    counted = CountStore(source)
    done = copy_object(counted, target, environment)
    own = {item.digest for item in members[1].layer.blobs()} - {item.digest for item in members[0].layer.blobs()}
    assert done.copied == len(own)
    assert done.copied_bytes == sum(source.stat(digest).size for digest in own)
    assert counted.counts.bytes_read < done.copied_bytes + 20_000  # and manifests


def test_a_copy_that_fails_leaves_nothing_half_and_goes_on(source: MemoryStore, members: list[Sample], environment: Digest) -> None:
    target = MemoryStore()
    faulty = FaultyStore(source)
    failures = 0
    for skip in range(3, 40):
        faulty.clear()
        faulty.add(Fault("read", error=StoreError("reset"), skip=skip))
        try:
            copy_object(faulty, target, environment, name="env:1", jobs=1)
        except StoreError:
            failures += 1
        else:
            break
        assert list(target.list_refs()) == []
        for digest, size in blobs(target).items():
            assert source.read(digest, 0, size) == target.read(digest, 0, size)
        for member in (*(sample.digest for sample in members), environment):
            if member in blobs(target):
                assert verify(target, member, deep=True).ok
    assert failures >= 5
    assert target.get_ref("env:1").digest == environment
    assert verify(target, environment, deep=True).ok


def test_wrong_bytes_do_not_arrive(source: MemoryStore, members: list[Sample]) -> None:
    target, faulty = MemoryStore(), FaultyStore(source)
    faulty.add(Fault("read", change=flipped, when=lambda digest: digest == members[0].own.digest))
    with pytest.raises(CorruptError):
        copy_object(faulty, target, members[0].digest)
    assert members[0].own.digest not in blobs(target)
    assert members[0].digest not in blobs(target)
    copy_object(source, target, members[0].digest)
    assert verify(target, members[0].digest, deep=True).ok


def test_a_blob_that_goes_meanwhile_is_noticed_before_the_manifest_appears(source: MemoryStore, members: list[Sample]) -> None:
    target = FaultyStore(MemoryStore())
    target.add(Fault("touch", error=NotFound("collected"), skip=1, when=lambda digest: digest == members[0].own.digest))
    with pytest.raises(NotFound):
        copy_object(source, target, members[0].digest)
    assert members[0].digest not in blobs(target)


def test_a_full_target_stops_the_other_transfers(source: MemoryStore, environment: Digest) -> None:
    target = FaultyStore(MemoryStore())
    target.add(Fault("write", error=StoreError("gone"), skip=1))
    with pytest.raises((StoreError, Interrupted)):
        copy_object(source, target, environment, jobs=4)


def test_a_manifest_is_copied_byte_for_byte(source: MemoryStore, members: list[Sample]) -> None:
    """One that another tool wrote, in another spelling, keeps its digest."""
    spelled = json.dumps(json.loads(members[0].layer.to_json()), indent=2).encode()
    digest = put_bytes(source, spelled).digest
    target = MemoryStore()
    set_tag(source, "a:1", digest)
    copy_object(source, target, digest, name="b:1")
    assert target.read(digest, 0, len(spelled)) == spelled


def test_what_is_not_in_the_source_is_not_found(source: MemoryStore, members: list[Sample]) -> None:
    with pytest.raises(NotFound):
        copy_object(source, MemoryStore(), "sha256:" + "0" * 64)
    source.delete(members[0].own.digest)
    with pytest.raises(NotFound):
        copy_object(source, MemoryStore(), members[0].digest)
