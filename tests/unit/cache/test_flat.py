"""The flat image: metadata and segments as one range of bytes."""

from __future__ import annotations

import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_layers.cache.fetch import FetchLimits
from dsec_layers.cache.flat import FlatImage
from dsec_layers.cache.metadata import LayerFiles, layer_files, local_layer_files
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.erofs.reader import Image
from dsec_layers.errors import CorruptError, ImageError, NotFound, StoreError, UsageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor
from dsec_layers.layers.frames import decompress, skippable
from dsec_layers.layers.manifest import Layer
from dsec_layers.registry.objects import load_layer
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import PIECE, put_bytes
from tests.kit.cache_kit import in_threads, open_cache
from tests.kit.descriptors import open_files, opened_since
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import Sample, content, make_environment, make_layer, zeros_frame

FILES = {"a": content(1, 200_000), "b": content(2, 70_000), "c": content(3, 4096), "d": content(4, 65_536)}


class Made:
    """A layer in a store, and its flat image put together by hand."""

    def __init__(self) -> None:
        self.store = FaultyStore(MemoryStore("mem://made"))
        self.sample: Sample = make_layer(self.store, FILES, per_segment=2)

    def files(self, cache: SegmentCache) -> LayerFiles:
        return layer_files(cache.directory, "mem://made", self.sample.digest, cache.fetcher)

    def flat(self, files: LayerFiles) -> bytes:
        parts = [files.image.read_bytes()]
        for record in self.sample.segments:
            raw = self.store.read(self.sample.own.digest, int(record["offset"]), int(record["stored"]))
            parts.append(decompress(raw, int(record["size"])))
        return b"".join(parts)


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def test_it_is_metadata_and_then_the_segments(tmp_path: Path, made: Made) -> None:
    with open_cache(tmp_path, made.store) as cache:
        files = made.files(cache)
        wanted = made.flat(files)
        with FlatImage.of_layer(files, cache) as image:
            assert image.size == len(wanted)
            assert image.pread(0, image.size) == wanted
            assert image.pread(image.size, 0) == b""
            assert cache.counters().segments == len(made.sample.segments)
        assert Image(wanted).tree(metadata_only=True).root.children is not None


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_range(tmp_path_factory: pytest.TempPathFactory, made: Made, data: st.DataObject) -> None:
    with open_cache(tmp_path_factory.mktemp("cache"), made.store) as cache:
        files = made.files(cache)
        wanted = made.flat(files)
        with FlatImage.of_layer(files, cache) as image:
            for _ in range(8):
                offset = data.draw(st.integers(0, len(wanted)))
                length = data.draw(st.integers(0, min(len(wanted) - offset, 300_000)))
                assert image.pread(offset, length) == wanted[offset : offset + length]
                parts = image.sendable(offset, length)
                assert parts is not None
                assert b"".join(os.pread(file.fd, count, at) for file, at, count in parts) == wanted[offset : offset + length], (
                    "all of it is present now"
                )


def test_what_leaves_the_image_is_refused(tmp_path: Path, made: Made) -> None:
    with open_cache(tmp_path, made.store) as cache, FlatImage.of_layer(made.files(cache), cache) as image:
        for offset, length in ((-1, 1), (0, -1), (0, image.size + 1), (image.size, 1)):
            with pytest.raises(UsageError):
                image.pread(offset, length)


def test_sendable_is_all_of_a_range_or_nothing(tmp_path: Path, made: Made) -> None:
    with open_cache(tmp_path, made.store) as cache:
        files = made.files(cache)
        with FlatImage.of_layer(files, cache) as image:
            metadata = files.image.stat().st_size
            assert [(at, count) for _, at, count in image.sendable(10, 20) or []] == [(10, 20)]
            assert image.sendable(10, metadata) is None, "the first segment is absent"
            image.pread(metadata, 1)
            parts = image.sendable(10, metadata) or []
            assert [(at, count) for _, at, count in parts] == [(10, metadata - 10), (0, 10)]
            assert image.sendable(10, image.size - 10) is None, "the second one still is"


def test_many_threads_and_few_descriptors(tmp_path: Path, made: Made) -> None:
    with open_cache(tmp_path, made.store) as cache:
        files = made.files(cache)
        wanted = made.flat(files)
        before = open_files()

        def read_all() -> None:
            with FlatImage.of_layer(files, cache, keep=1) as image:

                def read(number: int) -> None:
                    for at in range(number * 1000, image.size - 5000, 50_000):
                        assert image.pread(at, 5000) == wanted[at : at + 5000]

                assert in_threads(8, read) == []

        read_all()
        assert opened_since(before) == []


def test_d1_an_error_of_the_store_is_an_error_and_the_next_read_is_right(tmp_path: Path) -> None:
    made = Made()
    with open_cache(tmp_path, made.store) as cache:
        files = made.files(cache)
        wanted = made.flat(files)
        with FlatImage.of_layer(files, cache) as image:
            made.store.add(Fault("read", change=lambda raw: bytes(len(raw))))
            with pytest.raises(CorruptError):
                image.pread(image.size - 10, 10)
            made.store.clear()
            assert image.pread(image.size - 10, 10) == wanted[-10:]


def test_metadata_is_retried_and_verified(tmp_path: Path) -> None:
    made = Made()
    made.store.add(Fault("read", error=StoreError("down"), times=2))
    made.store.add(Fault("read", change=lambda raw: raw[::-1], times=2, skip=3))
    with open_cache(tmp_path, made.store) as cache:
        files = made.files(cache)
        assert local_layer_files(cache.directory, "mem://made", made.sample.digest) is not None
        assert files.table.tobytes() == made.sample.segments.tobytes()
        made.store.add(Fault("read", error=StoreError("down")))
        assert made.files(cache).names == files.names, "what is here needs no store"


def test_metadata_that_stays_wrong_is_named(tmp_path: Path) -> None:
    made = Made()
    made.store.add(Fault("read", change=lambda raw: raw[::-1]))
    with open_cache(tmp_path, made.store) as cache:
        with pytest.raises(CorruptError, match="mem://made"):
            made.files(cache)
        assert list(cache.directory.metadata.iterdir()) == []


def test_b1_a_layer_that_is_a_bomb_takes_no_memory_and_leaves_nothing(tmp_path: Path) -> None:
    """Metadata of a gigabyte of zeros in 32 KiB, and a compressed image larger than the format has."""
    made = Made()
    layer = load_layer(made.store, made.sample.digest)
    metadata = put_bytes(made.store, zeros_frame(1 << 30) + skippable(b"table"))
    bombs = [
        replace(layer, metadata=Descriptor(d.METADATA, metadata.digest, metadata.size)),
        Layer(layer.kind, layer.config, Descriptor(d.EROFS, metadata.digest, (4 << 30) + 1)),
    ]
    with open_cache(tmp_path, made.store) as cache:
        for bomb in bombs:
            digest = put_bytes(made.store, bomb.to_json()).digest
            tracemalloc.start()
            try:
                with pytest.raises(ImageError, match="limit"):
                    layer_files(cache.directory, "mem://made", digest, cache.fetcher)
                assert tracemalloc.get_traced_memory()[1] < 16 << 20
            finally:
                tracemalloc.stop()
        assert {path.suffix for path in cache.directory.metadata.iterdir()} == {".json"}
        assert list(cache.directory.images.iterdir()) == []


def test_what_is_no_layer_is_refused(tmp_path: Path) -> None:
    made = Made()
    environment = make_environment(made.store, [made.sample])
    with open_cache(tmp_path, made.store) as cache:
        with pytest.raises(ImageError, match="environment"):
            layer_files(cache.directory, "mem://made", environment, cache.fetcher)
        with pytest.raises(ImageError):
            layer_files(cache.directory, "mem://made", made.sample.own.digest, cache.fetcher)
        with pytest.raises(NotFound):
            layer_files(cache.directory, "mem://made", "sha256:" + "0" * 64, cache.fetcher)


def test_an_image_that_takes_longer_than_the_deadline_arrives_as_long_as_it_comes(tmp_path: Path) -> None:
    made = Made()
    image = content(300, 5 * PIECE)
    info = put_bytes(made.store, image)
    layer = replace(
        load_layer(made.store, made.sample.digest), metadata=Descriptor(d.EROFS, info.digest, info.size), segments=(), chunks=None
    )
    digest = put_bytes(made.store, layer.to_json()).digest
    made.store.add(Fault("read", delay=0.3, when=lambda digest: digest == info.digest))
    with open_cache(tmp_path, made.store, FetchLimits(deadline=0.8, pause=0.01)) as cache:
        began = time.monotonic()
        files = layer_files(cache.directory, "mem://made", digest, cache.fetcher)
        assert files.image.read_bytes() == image and time.monotonic() - began > 1.4
