"""The flat image behind the NBD server: present segments leave their files by themselves, absent ones are fetched, no descriptor stays behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest

from dsec_layers.cache.flat import FlatImage
from dsec_layers.fuse.nbd import Export, Server
from dsec_layers.segment import Segment
from tests.kit.descriptors import open_files, opened_since
from tests.kit.nbd_client import Client

SEGMENTS = 100
SIZES = [random.Random(number).randint(1, 8) * 4096 for number in range(SEGMENTS)]


class Cache:
    """Segments in a directory; an absent one is made when it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[int] = []

    def content(self, number: int) -> bytes:
        """What segment ``number`` holds."""
        return random.Random(-number - 1).randbytes(SIZES[number])

    def open(self, piece: Segment) -> int:
        """See PieceOpener."""
        path = self.folder / piece.name
        if not path.exists():
            self.fetched.append(piece.offset)
            path.write_bytes(self.content(piece.offset))
        return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("structured", [True, False])
def test_a_flat_image_is_served(tmp_path: Path, structured: bool) -> None:
    before = open_files()
    cache = Cache(tmp_path)
    metadata = random.Random(0).randbytes(50_000 // 4096 * 4096)
    pieces = [Segment(number.to_bytes(32, "big"), SIZES[number], "", "", number, SIZES[number]) for number in range(SEGMENTS)]
    whole = metadata + b"".join(cache.content(number) for number in range(SEGMENTS))
    source = FlatImage.spooled(metadata, pieces, cache, tmp_path)
    with Server([Export(source)], unix=tmp_path / "s") as server, Client(server.address) as client:
        client.greet()
        client.go(structured=structured)
        assert client.size == len(whole)
        rng = random.Random(1)
        for _ in range(200):
            offset = rng.randrange(len(whole))
            length = min(rng.choice([1, 4096, 4096, 20_000, 200_000]), len(whole) - offset)
            assert client.read(offset, length) == whole[offset : offset + length]
        assert client.read(0, len(whole)) == whole
        assert sorted(cache.fetched) == sorted(set(cache.fetched))
        for number in cache.fetched:
            (tmp_path / pieces[number].name).unlink()  # evicted: what is open can be read, the rest is fetched again
        for _ in range(50):
            offset = rng.randrange(len(whole) - 100_000)
            assert client.read(offset, 100_000) == whole[offset : offset + 100_000]
    source.close()
    del source, server
    gc.collect()
    assert opened_since(before, tmp_path) == []
