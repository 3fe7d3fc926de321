"""Judged by others: zstd -d on metadata and segments blobs, and an independent reader of the seekable format."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dsec_layers.layers.frames import split_metadata
from dsec_layers.proc import run
from dsec_layers.registry.objects import load_metadata
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import read_blob
from tests.kit.store_samples import Sample, content, make_layer
from tests.kit.tools import module, tool


@pytest.fixture
def parts() -> tuple[MemoryStore, Sample, bytes]:
    """A layer, and its flat image put together from its segments."""
    store = MemoryStore()
    sample = make_layer(store, {"a": content(1, 700_000), "b": content(2, 70_001), "c": b""})
    image, _ = load_metadata(store, sample.layer)
    files = (content(1, 700_000), content(2, 70_001))
    flat = image + b"".join(data + bytes(-len(data) % 4096) for data in files)
    return store, sample, flat


def test_zstd_gives_the_flat_image(parts: tuple[MemoryStore, Sample, bytes], tmp_path: Path) -> None:
    store, sample, flat = parts
    paths = []
    for item in (sample.layer.metadata, sample.own):
        paths.append(tmp_path / f"{item.digest[7:]}.zst")
        paths[-1].write_bytes(read_blob(store, item.digest, limit=1 << 30))
    assert run([tool("zstd"), "-dc", *paths]).stdout == flat


def test_the_seek_table_is_read_by_pyzstd(parts: tuple[MemoryStore, Sample, bytes]) -> None:
    pyzstd = module("pyzstd")
    store, sample, flat = parts
    blob = read_blob(store, sample.own.digest, limit=1 << 30)
    data = flat[len(split_metadata(read_blob(store, sample.layer.metadata.digest, limit=1 << 30))[0]) :]
    assert pyzstd.SeekableZstdFile.is_seekable_format_file(io.BytesIO(blob))
    with pyzstd.SeekableZstdFile(io.BytesIO(blob)) as stream:
        for offset, length in ((0, 10), (500_000, 100_000), (262_143, 2), (len(data) - 5, 5)):
            stream.seek(offset)
            assert stream.read(length) == data[offset : offset + length]
        stream.seek(0)
        assert stream.read() == data
