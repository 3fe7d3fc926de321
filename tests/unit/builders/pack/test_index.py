"""The index of a layer's own chunks, in and out of its frozen part."""

from __future__ import annotations

import random

from dsec_layers.builders.pack.index import ChunkIndex


def test_everything_put_in_is_found_again_however_often_it_was_frozen() -> None:
    generator = random.Random(3)
    index = ChunkIndex(recent=50)
    known: dict[bytes, int] = {}
    for _ in range(60):
        window = [generator.randbytes(32) for _ in range(30)] + generator.sample(sorted(known), min(20, len(known)))
        recalled = index.recall(window)
        for digest in window:
            found = index.recent.get(digest, recalled.get(digest))
            assert found == known.get(digest)
            if found is None:
                known[digest] = index.recent[digest] = generator.getrandbits(48)
    assert len(index._frozen) <= 8
    assert len(known) == 1800


def test_digests_that_begin_alike_are_told_apart() -> None:
    index = ChunkIndex(recent=1)
    alike = [b"\7" * 8 + bytes([nth]) * 24 for nth in range(5)]
    for nth, digest in enumerate(alike[:4]):
        assert index.recall([digest]) == {}
        index.recent[digest] = nth
    index.recall([b"\0" * 32])
    assert index.recall(alike) == {digest: nth for nth, digest in enumerate(alike[:4])}
    assert index.recall([b"\xff" * 32]) == {}
