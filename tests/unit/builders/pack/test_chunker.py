"""Where files and segments are cut."""

from __future__ import annotations

import random

import pytest

from dsec_layers.builders.pack.chunker import CHUNK, CHUNK_BITS, MAX_CHUNK_BITS, Hole, SegmentRule, chunk_bits_of, cut, zeros_digest
from dsec_layers.digest import content_digest
from dsec_layers.errors import InputError, LimitError
from dsec_layers.layers.tables import MAX_SEGMENT, MAX_SEGMENTS

MIB = 1 << 20
TIB = 1 << 40


@pytest.mark.parametrize(
    ("size", "bits"),
    [(0, 16), (1, 16), (64 << 30, 16), ((64 << 30) + 1, 17), (128 << 30, 17), (16 * TIB, 24), (64 * TIB, 24)],
)
def test_chunks_grow_with_the_file(size: int, bits: int) -> None:
    assert chunk_bits_of(size) == bits


def test_a_file_with_too_many_chunks_is_refused_with_its_size() -> None:
    size = 64 * TIB + 1
    with pytest.raises(LimitError, match=str(size)):
        chunk_bits_of(size)


@pytest.mark.parametrize("size", [1, 4095, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_pieces_of_any_size_give_the_same_chunks(size: int) -> None:
    data = random.Random(size).randbytes(size)
    wanted = [data[at : at + CHUNK] for at in range(0, size, CHUNK)]
    for step in (1000, 65536, 70001, 1 << 20):
        pieces = [data[at : at + step] for at in range(0, size, step)]
        assert [bytes(chunk) for chunk in cut(pieces, size, CHUNK) if not isinstance(chunk, Hole)] == wanted


def test_a_chunk_within_a_piece_is_a_view_of_it() -> None:
    data = bytes(3 * CHUNK)
    first = next(iter(cut([data], len(data), CHUNK)))
    assert isinstance(first, memoryview) and first.obj is data


def test_whole_chunks_of_holes_stay_holes_and_others_become_zeros() -> None:
    size = 2 * CHUNK + 100 + 7 * CHUNK
    chunks = list(cut([b"x" * CHUNK, CHUNK + 50, b"y", 49 + 7 * CHUNK], size, CHUNK))
    assert [chunk if isinstance(chunk, Hole) else len(chunk) for chunk in chunks] == [CHUNK, 1, CHUNK, 6, 100]
    assert isinstance(chunks[1], Hole) and isinstance(chunks[3], Hole)
    data = chunks[2]
    assert not isinstance(data, Hole) and bytes(data[:51]) == bytes(50) + b"y" and not any(data[51:])


@pytest.mark.parametrize("pieces", [[b"12345"], [b"123", 2], [b"1234567"], [4, 4], [], [-1], [b"12", -2, b"34"]])
def test_pieces_that_do_not_add_up_are_refused(pieces: list[bytes | int]) -> None:
    with pytest.raises(InputError, match="of 6 bytes"):
        list(cut(pieces, 6, CHUNK))


def test_zeros_digest() -> None:
    assert zeros_digest(12345) == content_digest(bytes(12345))


def lengths(rule: SegmentRule, chunks: int, blocks: int, seed: int) -> list[int]:
    """Sizes of the segments that so many chunks of so many blocks give."""
    generator, found, used = random.Random(seed), [], 0
    for _ in range(chunks):
        used += blocks * 4096
        if rule.ends(used, generator.randbytes(32), blocks):
            found.append(used)
            used = 0
    return found


@pytest.mark.parametrize("blocks", [1, 3, 16])
def test_segments_are_about_a_mebibyte(blocks: int) -> None:
    found = lengths(SegmentRule(), 400_000 // blocks, blocks, seed=1)
    assert min(found) >= MIB // 2
    assert max(found) <= 2 * MIB + CHUNK
    assert 0.85 * MIB < sum(found) / len(found) < 1.15 * MIB


def test_cuts_meet_again_after_a_difference() -> None:
    generator = random.Random(2)
    digests = [generator.randbytes(32) for _ in range(2000)]

    def cuts(sequence: list[bytes]) -> set[bytes]:
        rule, used, found = SegmentRule(), 0, set()
        for digest in sequence:
            used += CHUNK
            if rule.ends(used, digest, 16):
                found.add(digest)
                used = 0
        return found

    one, two = cuts(digests), cuts(digests[3:])
    assert len(one & two) >= len(two) - 6


def test_a_huge_layer_gets_larger_segments_and_still_fits() -> None:
    rule = SegmentRule()
    means: list[int] = []
    for _ in range(MAX_SEGMENTS):
        if not means or means[-1] != rule.mean:
            means.append(rule.mean)
        assert rule.least <= rule.mean <= rule.largest <= MAX_SEGMENT
        rule.count()
    assert means == [MIB << step for step in range(5)]
    assert rule.least == rule.largest == MAX_SEGMENT == 1 << MAX_CHUNK_BITS
    assert CHUNK == 1 << CHUNK_BITS
