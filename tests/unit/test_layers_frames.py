"""zstd framing: metadata blobs, frame boundaries, bombs, and a metadata blob checked against the image in it."""

from __future__ import annotations

import random
import struct

import pytest
import zstandard

from dsec_layers.errors import ImageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.frames import compress, decompress, frame_length, join_metadata, skippable, split_metadata, unpack
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.metadata import open_metadata
from dsec_layers.layers.tables import pack_segments
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import read_blob
from tests.store_samples import Sample, content, make_layer


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
