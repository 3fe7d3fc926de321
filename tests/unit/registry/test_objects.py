"""Objects by name and digest: published only when whole, found, and never trusted beyond their digests and sizes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dsec_layers.digest import Digest
from dsec_layers.errors import Conflict, CorruptError, ImageError, LimitError, NotFound, UsageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.manifest import Environment, Layer, LayerConfig
from dsec_layers.registry import objects
from dsec_layers.registry.objects import (
    find_objects,
    load_chunks,
    load_config,
    load_layer,
    load_metadata,
    load_object,
    publish_object,
    reach,
    resolve,
    set_tag,
)
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.store_count import CountStore
from tests.kit.store_faulty import Fault, FaultyStore, flipped
from tests.kit.store_samples import Sample, content, make_environment, make_layer, publish_config


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def load_environment(store: Store, digest: Digest) -> Environment:
    found = load_object(store, digest)
    assert isinstance(found, Environment)
    return found


@pytest.fixture
def sample(store: MemoryStore) -> Sample:
    return make_layer(store, {"a": content(1, 300_000), "b": b"small"})


def test_a_layer_is_loaded_part_by_part(store: MemoryStore, sample: Sample) -> None:
    layer = load_layer(store, sample.digest)
    assert layer == sample.layer
    assert load_config(store, layer).name == "sample"
    _, segments = load_metadata(store, layer)
    assert segments.tobytes() == sample.segments.tobytes()
    chunks = load_chunks(store, layer, segments)
    assert sorted(chunks["digest"].tolist()) == sorted(sample.chunks["digest"].tolist())
    without = Layer(layer.kind, layer.config, layer.metadata, None, layer.segments)
    assert len(load_chunks(store, without, segments)) == 0


def test_b9_a_layer_without_data(store: MemoryStore) -> None:
    empty = make_layer(store, {"nothing": b""})
    assert empty.layer.segments == ()
    assert len(load_metadata(store, empty.layer)[1]) == 0
    set_tag(store, "empty:1", empty.digest)


def test_an_environment_is_walked_from_the_bottom(store: MemoryStore, sample: Sample) -> None:
    tool = make_layer(store, {"t": b"tool"}, kind=Kind.TOOLKIT)
    digest = make_environment(store, [sample, tool, tool])
    assert [found for found, _ in reach(store, digest)] == [sample.digest, tool.digest, digest]
    assert len(load_environment(store, digest).layers) == 3
    assert isinstance(load_object(store, digest), Environment)


# Names


def test_resolve_by_name_digest_and_prefix(store: MemoryStore, sample: Sample) -> None:
    set_tag(store, "base/python:3", sample.digest)
    set_tag(store, "plain", sample.digest)
    digits = sample.digest[7:]
    for text in ("base/python:3", "plain", "plain:latest", sample.digest, f"sha256:{digits[:6]}", digits[:6], digits[:63]):
        assert resolve(store, text) == (sample.digest, sample.layer)


def test_a_name_goes_before_digits(store: MemoryStore, sample: Sample) -> None:
    other = make_layer(store, {"other": b"x"})
    set_tag(store, sample.digest[7:15], other.digest)
    assert resolve(store, sample.digest[7:15])[0] == other.digest
    assert resolve(store, f"sha256:{sample.digest[7:15]}")[0] == sample.digest


def test_digits_that_begin_several_digests_are_refused(store: MemoryStore, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_layer(store, {"other": b"x"})
    found = [(store.stat(item.digest), item.layer) for item in (sample, other)]
    monkeypatch.setattr(objects, "find_objects", lambda _store, _prefix: iter(found))
    with pytest.raises(UsageError, match="begins 2 digests"):
        resolve(store, "sha256:abcdef")


def test_only_manifests_are_found_by_digits(store: MemoryStore, sample: Sample) -> None:
    for item in sample.layer.blobs():
        with pytest.raises(NotFound):
            resolve(store, item.digest[7:27])


@pytest.mark.parametrize("text", ["sha256:", "sha256:12345", "sha256:xyzxyz", "sha256:" + "0" * 65, "UPPER", "a b", "", "abcdef@x"])
def test_what_is_no_reference_is_a_usage_error(store: MemoryStore, text: str) -> None:
    with pytest.raises(UsageError):
        resolve(store, text)


def test_near_misses_are_named(store: MemoryStore, sample: Sample) -> None:
    for name in ("base/python:3.11", "base/python:3.12", "workspace:1"):
        set_tag(store, name, sample.digest)
    for text, hint in (
        ("base/python:4", "base/python:3.11, base/python:3.12"),
        ("base/pyhton:3.11", "base/python:3.11"),
        ("zzz", "3 names"),
    ):
        with pytest.raises(NotFound) as caught:
            resolve(store, text)
        assert hint in (caught.value.hint or "")


def test_find_objects_leaves_out_what_is_none(store: MemoryStore, sample: Sample) -> None:
    environment = make_environment(store, [sample])
    put_bytes(store, b"{}")
    put_bytes(store, b"{" + b"x" * 100)
    put_bytes(store, json.dumps({"artifactType": d.LAYER}).encode())
    assert {info.digest for info, _ in find_objects(store)} == {sample.digest, environment}
    faulty = FaultyStore(store)
    faulty.add(Fault("read", change=flipped, when=lambda digest: digest == environment))
    assert {info.digest for info, _ in find_objects(faulty)} == {sample.digest}


# Publishing


def test_tags_move(store: MemoryStore, sample: Sample) -> None:
    other = make_layer(store, {"other": b"x"})
    assert set_tag(store, "a:1", sample.digest) is None
    assert set_tag(store, "a:1", other.digest) == sample.digest
    assert set_tag(store, "a:1", other.digest) == other.digest
    assert store.get_ref("a:1").digest == other.digest


def test_a_tag_moved_by_others_meanwhile_is_moved_again(store: MemoryStore, sample: Sample) -> None:
    faulty = FaultyStore(store)
    faulty.add(Fault("set_ref", error=Conflict("first"), times=3))
    assert set_tag(faulty, "a:1", sample.digest) is None
    faulty.add(Fault("set_ref", error=Conflict("always")))
    with pytest.raises(Conflict):
        set_tag(faulty, "b:1", sample.digest)


def test_nothing_is_published_or_named_that_is_not_whole(store: MemoryStore, sample: Sample) -> None:
    environment = make_environment(store, [sample])
    layers = load_environment(store, environment)
    store.delete(sample.own.digest)
    calls: tuple[Callable[[], object], ...] = (
        lambda: publish_object(store, sample.layer),
        lambda: publish_object(store, layers),
        lambda: set_tag(store, "a:1", sample.digest),
        lambda: set_tag(store, "a:1", environment),
        lambda: set_tag(store, "a:1", "sha256:" + "0" * 64),
    )
    for call in calls:
        with pytest.raises(NotFound):
            call()
    assert list(store.list_refs()) == []


def test_a_descriptor_of_the_wrong_size_is_not_published(store: MemoryStore, sample: Sample) -> None:
    layer = sample.layer
    wrong = Layer(
        layer.kind, layer.config, Descriptor(d.METADATA, layer.metadata.digest, layer.metadata.size + 1), layer.chunks, layer.segments
    )
    with pytest.raises(CorruptError):
        publish_object(store, wrong)


def test_publishing_touches_everything(sample: Sample, store: MemoryStore) -> None:
    environment = load_environment(store, make_environment(store, [sample]))
    counted = CountStore(store)
    publish_object(counted, environment)
    assert counted.counts.touches == 1 + len(sample.layer.blobs())


# Distrust


def replaced(store: MemoryStore, digest: Digest, data: bytes) -> Store:
    """A store in which a blob has other bytes than its digest says."""
    store._blobs[digest] = (data, 0.0)
    return store


def test_bytes_that_do_not_match_are_corrupt(store: MemoryStore, sample: Sample) -> None:
    replaced(store, sample.digest, sample.layer.to_json() + b" ")
    with pytest.raises(CorruptError):
        load_layer(store, sample.digest)
    item = sample.layer.metadata
    replaced(store, item.digest, bytes(item.size))
    with pytest.raises(CorruptError):
        load_metadata(store, sample.layer)


def test_a_blob_that_is_no_manifest_is_named(store: MemoryStore) -> None:
    digest = put_bytes(store, b"{}").digest
    for load in (load_layer, load_object):
        with pytest.raises(ImageError, match=digest):
            load(store, digest)


def test_what_is_too_large_is_not_read(store: MemoryStore, sample: Sample) -> None:
    digest = put_bytes(store, b"{" + b" " * (16 << 20)).digest
    faulty = FaultyStore(store)
    faulty.add(Fault("read", error=AssertionError("read")))
    with pytest.raises(LimitError):
        load_object(faulty, digest)
    large = Layer(Kind.BASE, sample.layer.config, Descriptor(d.METADATA, digest, 5 << 30))
    with pytest.raises(LimitError):
        load_metadata(faulty, large)


def test_a_config_of_another_kind_is_corrupt(store: MemoryStore, sample: Sample) -> None:
    config = publish_config(store, LayerConfig(Kind.TOOLKIT))
    with pytest.raises(CorruptError):
        load_config(store, Layer(Kind.BASE, config, sample.layer.metadata))
