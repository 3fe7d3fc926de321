"""From a frame to verified bytes: one answer for everybody who reads segments."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest

from dsec_layers.builders.pack.foreign import ForeignSegment, check_segment
from dsec_layers.digest import Digest, content_digest
from dsec_layers.errors import CorruptError, ImageError
from dsec_layers.layers.frames import compress, skippable
from dsec_layers.registry.catalog import SegmentAt
from dsec_layers.registry.content import open_layer
from dsec_layers.registry.objects import load_layer, load_metadata
from dsec_layers.registry.verify import verify
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import content, make_layer

MIB = 1 << 20


class Watched(FaultyStore):
    """Remembers which blobs were suspected."""

    def __init__(self) -> None:
        super().__init__(MemoryStore("mem://watched"))
        self.suspected: list[Digest] = []

    def suspect(self, digest: Digest) -> None:
        """See Store."""
        self.suspected.append(digest)


def stored(store: Watched, data: bytes, frame: bytes, **change: Any) -> Segment:
    blob = put_bytes(store, b"before" + frame + b"after").digest
    return dataclasses.replace(Segment(content_digest(data), len(data), store.url, blob, 6, len(frame)), **change)


@pytest.mark.parametrize("size", [1, 4096, MIB, (1 << 17) + 1, 16 * MIB])
@pytest.mark.parametrize("codec", ["zstd", "raw"])
@pytest.mark.parametrize("room", [None, 0, 100])
def test_the_right_frame_gives_the_right_bytes(size: int, codec: str, room: int | None) -> None:
    store, data = Watched(), content(1, size)
    segment = stored(store, data, data if codec == "raw" else compress(data), codec=codec)
    buffer = None if room is None else memoryview(bytearray(size + room))
    assert read_segment(store, segment, None if buffer is None else lambda _: buffer) == data
    assert store.suspected == []


@pytest.mark.parametrize(
    "frame",
    [
        lambda data: compress(data)[:-1],
        lambda data: compress(data) + b"x",
        lambda data: compress(data) + skippable(b"x"),
        lambda data: compress(data) + compress(data),
        lambda data: compress(data[1:]),
        lambda data: compress(data + b"x"),
        lambda data: compress(bytes(len(data))),
        lambda data: data,
        lambda data: b"x",
    ],
    ids=["short", "a byte more", "a skippable frame more", "twice", "less content", "more content", "other content", "no frame", "a byte"],
)
@pytest.mark.parametrize("into", [False, True])
def test_a_wrong_frame_is_named_and_its_blob_suspected_once(frame: Callable[[bytes], bytes], into: bool) -> None:
    store, data = Watched(), content(2, MIB)
    segment = stored(store, data, frame(data))
    with pytest.raises(CorruptError) as caught:
        read_segment(store, segment, (lambda size: memoryview(bytearray(size))) if into else None)
    assert segment.name[:12] in caught.value.message and segment.blob in caught.value.message
    assert store.suspected == [segment.blob]


@pytest.mark.parametrize(
    "change",
    [{"size": 0}, {"size": 16 * MIB + 1}, {"size": 1 << 40}, {"stored": 0}, {"stored": 1 << 32}, {"offset": -1}, {"size": -4096}],
    ids=str,
)
def test_sizes_that_no_segment_has_are_refused_before_anything_is_read(change: dict[str, int]) -> None:
    store, data = Watched(), content(3, 4096)
    segment = stored(store, data, compress(data), **change)
    store.add(Fault("read", error=AssertionError("was read")))
    with pytest.raises(CorruptError, match="no segment has"):
        read_segment(store, segment)
    with pytest.raises(ImageError):
        segment.decode(compress(data))


BLOB = "sha256:" + "1" * 64
GOOD = {"digest": "ab" * 32, "size": 4096, "store": "mem://x", "blob": BLOB, "offset": 7, "stored": 100, "codec": "zstd"}


@pytest.mark.parametrize("codec", ["zstd", "raw"])
def test_a_segment_passes_through_a_message(codec: Literal["zstd", "raw"]) -> None:
    segment = Segment(bytes(range(32)), 4096, "mem://x", BLOB, 7, 4096, codec)
    assert Segment.of_message(json.loads(json.dumps(segment.message()))) == segment


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4 << 30}, {"size": -1}, {"size": "4096"}, {"size": True}, {"size": 4096.0}, {"size": None},
        {"stored": 1 << 31}, {"stored": 0}, {"offset": -1}, {"codec": "lz4"}, {"codec": "raw"}, {"codec": None},
        {"digest": "ab"}, {"digest": "ab" * 33}, {"digest": "xy" * 32}, {"digest": 7}, {"blob": "../../etc/passwd"}, {"blob": 7}, {"store": None}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_b7_a_message_that_describes_no_segment_is_refused(change: dict[str, Any]) -> None:
    assert Segment.of_message(GOOD).message() == GOOD
    with pytest.raises(ImageError):
        Segment.of_message(GOOD | change)


def test_export_packing_and_the_cache_say_the_same_of_a_wrong_segment() -> None:
    store = Watched()
    sample = make_layer(store, {"a": content(4, 200_000), "b": content(5, 70_000)}, per_segment=1)
    layer = load_layer(store, sample.digest)
    _, table = load_metadata(store, layer)
    content_ = open_layer(store, sample.digest)
    segment = Segment.of_record(store.url, layer, table, 0)
    assert content_.place(0) == segment
    store.add(Fault("read", change=lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])))
    at = SegmentAt(segment.blob, segment.offset, segment.stored, segment.size, segment.digest)
    said = []
    for read in (lambda: content_.segment(0), lambda: check_segment(store, ForeignSegment(at)), lambda: read_segment(store, segment)):
        store.suspected.clear()
        with pytest.raises(CorruptError) as caught:
            read()
        said.append(caught.value.message)
        assert store.suspected == [segment.blob]
    assert len(set(said)) == 1 and str(segment) in said[0]
    store.clear()
    assert verify(store, sample.digest, deep=True).ok
