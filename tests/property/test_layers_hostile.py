"""Whatever the bytes are, the readers of manifests, tables and frames answer with a value or ImageError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec_layers.errors import ImageError
from dsec_layers.layers.frames import decompress, frame_length, join_metadata, split_metadata, unpack
from dsec_layers.layers.manifest import parse_config, parse_environment, parse_layer, parse_object
from dsec_layers.layers.metadata import open_metadata
from dsec_layers.layers.tables import CHUNK, SEGMENT, pack_chunks, pack_segments, parse_chunks, parse_segments
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import read_blob
from tests.kit.store_samples import content, make_environment, make_layer

STORE = MemoryStore()
SAMPLE = make_layer(STORE, {"a": content(1, 100_000), "b": b"x" * 5000}, per_segment=1)
METADATA = read_blob(STORE, SAMPLE.layer.metadata.digest, limit=1 << 30)
SEGMENTS = pack_segments(SAMPLE.segments)
CHUNKS = pack_chunks(SAMPLE.chunks)
MANIFESTS = [
    SAMPLE.layer.to_json(),
    read_blob(STORE, make_environment(STORE, [SAMPLE]), limit=1 << 20),
    read_blob(STORE, SAMPLE.layer.config.digest, limit=1 << 20),
]
SIZES = tuple(item.size for item in SAMPLE.layer.segments)
PARSERS: list[Callable[[bytes], object]] = [parse_object, parse_layer, parse_environment, parse_config]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["base", "sha256:" + "0" * 64, 2, "segments"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def only_image_error(call: Callable[[], object]) -> None:
    try:
        call()
    except ImageError:
        pass


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Sound bytes with a few bytes changed, cut short or made longer."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out) - 1))
        out[at : at + draw(st.sampled_from((0, 1, 2, 4, 8)))] = draw(st.binary(max_size=8))
        if not out:
            break
    return bytes(out[: draw(st.integers(0, len(out)))]) if draw(st.booleans()) else bytes(out)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [place for item in value.values() for place in places(item)]
    if isinstance(value, list):
        return [(value, at) for at in range(len(value))] + [place for item in value for place in places(item)]
    return []


@given(st.binary(max_size=200) | st.sampled_from(MANIFESTS).flatmap(mutated))
def test_manifests_of_any_bytes(data: bytes) -> None:
    for parse in PARSERS:
        only_image_error(lambda parse=parse: parse(data))  # type: ignore[misc]


@given(st.sampled_from(MANIFESTS), st.data())
def test_manifests_with_any_values(data: bytes, draw: st.DataObject) -> None:
    value = json.loads(data)
    container, key = draw.draw(st.sampled_from(places(value)))
    container[key] = draw.draw(json_values)
    raw = json.dumps(value).encode()
    for parse in PARSERS:
        only_image_error(lambda parse=parse: parse(raw))  # type: ignore[misc]


@given(st.binary(max_size=200) | mutated(SEGMENTS))
def test_segment_tables(data: bytes) -> None:
    only_image_error(lambda: parse_segments(data, SIZES))


@given(st.binary(max_size=200) | mutated(CHUNKS))
def test_chunk_tables(data: bytes) -> None:
    only_image_error(lambda: parse_chunks(data, SAMPLE.segments))


@given(st.binary(max_size=200) | mutated(METADATA))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_metadata_blobs(data: bytes) -> None:
    for call in (
        frame_length,
        split_metadata,
        lambda raw: unpack(raw, 1 << 20),
        lambda raw: decompress(raw, 100),
        lambda raw: open_metadata(raw, SAMPLE.layer),
    ):
        only_image_error(lambda call=call: call(data))  # type: ignore[misc]


@given(mutated(split_metadata(METADATA)[0]), mutated(SEGMENTS))
def test_metadata_blobs_with_sound_frames(image: bytes, table: bytes) -> None:
    only_image_error(lambda: open_metadata(join_metadata(image, table, 1), SAMPLE.layer))


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 3), st.integers(0, 12), st.integers(1, 65536)), max_size=30))
def test_any_chunks_come_back_in_order(rows: list[tuple[bytes, int, int, int]]) -> None:
    table = np.array([(digest, segment, block, -(-size // 4096), size) for digest, segment, block, size in rows], CHUNK)
    segments = np.zeros(4, SEGMENT)
    segments["size"] = 1 << 20
    found = parse_chunks(pack_chunks(table), segments)
    assert found["digest"].tolist() == sorted({row[0] for row in rows})
    first: dict[bytes, tuple[bytes, int, int, int]] = {}
    for row in rows:
        first.setdefault(row[0], row)
    assert [(bytes(r["digest"]), int(r["segment"]), int(r["block"]), int(r["size"])) for r in found] == [
        first[key] for key in sorted(first)
    ]
