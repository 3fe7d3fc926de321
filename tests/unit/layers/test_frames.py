"""zstd framing: metadata blobs, frame boundaries, bombs, and a metadata blob checked against the image in it."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
import zstandard

from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.writer import render
from dsec_layers.errors import CorruptError, ImageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.frames import (
    CHUNKS_BOUND,
    MAX_METADATA,
    METADATA_BOUND,
    compress,
    decompress,
    frame_length,
    join_metadata,
    skippable,
    split_metadata,
    unpack,
)
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.metadata import open_metadata
from dsec_layers.layers.tables import pack_segments
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes, read_blob
from tests.kit.store_samples import Sample, content, make_layer, zeros_frame


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 17, (1 << 17) + 1, 3 << 20])
@pytest.mark.parametrize("kind", ["zeros", "random", "text"])
def test_a_frame_ends_where_zstd_says(size: int, kind: str) -> None:
    data = {"zeros": bytes(size), "random": random.Random(1).randbytes(size), "text": content(1, size)}[kind]
    for frame in (compress(data), compress(data, 9), zstandard.ZstdCompressor(write_checksum=True).compress(data)):
        assert frame_length(frame + b"more") == len(frame)
        assert decompress(frame, size) == data
        assert unpack(frame, size) == data


def test_metadata_blob_comes_apart_as_it_was_joined() -> None:
    image, table = content(1, 300_000), b"DSEG" + bytes(50)
    assert split_metadata(join_metadata(image, table)) == (image, table)
    assert split_metadata(bytearray(join_metadata(image, b""))) == (image, b"")


def test_damaged_metadata_blobs_are_refused() -> None:
    blob = join_metadata(content(1, 300_000), b"table")
    end = frame_length(blob)
    for bad in (
        b"",
        blob[: end // 2],
        blob[:end],
        blob[:-1],
        blob + b"x",
        blob[:end] + skippable(b"table", 0x184D2A51),
        blob[:end] + blob,
        skippable(b"table"),
        b"\0" * 100,
    ):
        with pytest.raises(ImageError):
            split_metadata(bad)
    with pytest.raises(ImageError):
        split_metadata(blob, limit=299_999)


def test_a_frame_that_says_too_much_or_nothing_is_refused_before_memory_is_taken() -> None:
    lying = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 1 << 40) + b"\x01\x00\x00"
    for limit in (1 << 20, 1 << 50):
        with pytest.raises(ImageError):
            unpack(lying, limit)
    stream = zstandard.ZstdCompressor().compressobj()
    with pytest.raises(ImageError):
        unpack(stream.compress(b"x") + stream.flush(), 100)
    with pytest.raises(ImageError):
        decompress(compress(b"x" * 10), 11)


def test_b1_a_frame_of_zeros_takes_no_memory_beyond_what_its_kind_can_need() -> None:
    assert unpack(zeros_frame(1 << 20), 1 << 20) == bytes(1 << 20)
    frame = zeros_frame(1 << 30)
    chunks = zeros_frame(1 << 28)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=f"{len(frame)} bytes says that it holds {1 << 30} bytes, the limit is"):
            split_metadata(frame + skippable(b"table"))
        with pytest.raises(ImageError, match="the limit is"):
            unpack(chunks, 1 << 29, CHUNKS_BOUND)
        with pytest.raises(ImageError, match="cannot hold"):
            decompress(frame[:20], 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_b1_what_honest_metadata_reaches_is_within_its_bound() -> None:
    tree = Tree()
    assert tree.root.children is not None
    for number in range(20_000):
        tree.root.children[b"file-%06d" % number] = Inode(0o100644, mtime=1)
    image = render(tree, [])
    assert 2 * len(image) < METADATA_BOUND.ratio * len(compress(image, 9))
    holes = b"\xff\xff\xff\xff\0\0\0\0" * ((1 << 40) // (1 << 16))
    assert split_metadata(join_metadata(holes, b"table", 1)) == (holes, b"table")
    assert METADATA_BOUND.most(1 << 40) == MAX_METADATA


def test_b1_a_blob_that_is_shorter_than_its_manifest_says_is_not_made_room_for() -> None:
    store = MemoryStore()
    info = put_bytes(store, b"small")
    with pytest.raises(CorruptError, match=f"has 5 bytes, not {1 << 32}"):
        read_blob(store, info.digest, limit=1 << 32, size=1 << 32)


def test_trailing_bytes_behind_a_single_frame_are_refused() -> None:
    frame = compress(b"x" * 1000)
    for extra in (b"x", frame, skippable(b"")):
        with pytest.raises(ImageError):
            decompress(frame + extra, 1000)


@pytest.fixture
def opened() -> tuple[Sample, bytes]:
    store = MemoryStore()
    sample = make_layer(store, {"a": content(1, 200_000), "b": content(2, 400_000)})
    return sample, read_blob(store, sample.layer.metadata.digest, limit=1 << 30)


def test_a_metadata_blob_that_fits_its_layer_opens(opened: tuple[Sample, bytes]) -> None:
    sample, blob = opened
    image, table = open_metadata(blob, sample.layer)
    assert table.tobytes() == sample.segments.tobytes()
    assert len(image) % 4096 == 0


def test_an_image_and_a_table_that_differ_are_refused(opened: tuple[Sample, bytes]) -> None:
    sample, blob = opened
    image, _ = split_metadata(blob)
    fewer = sample.segments[:-1]
    other = sample.segments.copy()
    other["size"][0] += 4096
    for raw in (
        join_metadata(image, pack_segments(fewer)),
        join_metadata(image, pack_segments(other)),
        join_metadata(image + bytes(4096), pack_segments(sample.segments)),
    ):
        with pytest.raises(ImageError):
            open_metadata(raw, sample.layer)
    small = Layer(sample.layer.kind, sample.layer.config, sample.layer.metadata, None, (Descriptor(d.SEGMENTS, sample.own.digest, 10),))
    with pytest.raises(ImageError):
        open_metadata(blob, small)
    with pytest.raises(ImageError):
        open_metadata(blob, Layer(sample.layer.kind, sample.layer.config, Descriptor(d.EROFS, sample.own.digest, 10)))
