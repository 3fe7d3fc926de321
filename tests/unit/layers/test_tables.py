"""Segment and chunk tables: canonical bytes out, only sound and canonical bytes in."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dsec_layers.errors import ImageError
from dsec_layers.layers.tables import CHUNK, MAX_SEGMENTS, SEGMENT, Table, pack_chunks, pack_segments, parse_chunks, parse_segments

SIZES = (10_000, 500)


def segments() -> Table:
    return np.array(
        [(b"a" * 32, 1 << 20, 0, 0, 4000, 0), (b"b" * 32, 4096, 0, 4000, 6000, 0), (b"c" * 32, 16 << 20, 1, 100, 400, 0)],
        SEGMENT,
    )


def chunks(count: int = 20) -> Table:
    rng = random.Random(count)
    rows = [(rng.randbytes(32), 0, 16 * (number % 16), 16, 65536 - number) for number in range(count)]
    return np.array(rows, CHUNK)


def test_record_sizes_are_those_of_the_format() -> None:
    assert (SEGMENT.itemsize, CHUNK.itemsize) == (56, 48)
    assert len(pack_segments(segments())) == 20 + 3 * 56
    assert len(pack_chunks(chunks())) == 20 + 20 * 48


def test_tables_come_back() -> None:
    assert parse_segments(pack_segments(segments()), SIZES).tobytes() == segments().tobytes()
    raw = pack_chunks(chunks())
    found = parse_chunks(raw, segments())
    assert sorted(found["digest"].tolist()) == found["digest"].tolist()
    assert pack_chunks(found) == raw


def test_empty_tables_are_fine() -> None:
    """B9: a layer without data."""
    empty = parse_segments(pack_segments(np.zeros(0, SEGMENT)), ())
    assert len(empty) == 0
    assert len(parse_chunks(pack_chunks(np.zeros(0, CHUNK)), empty)) == 0


def test_the_order_of_chunks_does_not_matter_and_a_digest_is_kept_once() -> None:
    table = chunks()
    table["digest"][3] = b"\0" * 31 + b"\x80"  # digests that end or begin in zeros sort as bytes do
    table["digest"][4] = b"\0" * 32
    table["digest"][5] = b"\xff" * 31 + b"\0"
    shuffled = table[np.random.default_rng(1).permutation(len(table))]
    assert pack_chunks(shuffled) == pack_chunks(table)
    doubled = np.concatenate([table, table[:5]])
    assert pack_chunks(doubled) == pack_chunks(table)
    parse_chunks(pack_chunks(table), segments())


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (0, "size", 0),
        (0, "size", 4097),
        (0, "size", (16 << 20) + 4096),
        (0, "blob", 2),
        (0, "stored", 0),
        (0, "stored", 4001),
        (1, "offset", 3999),
        (1, "offset", 0),
        (2, "offset", 101),
        (2, "offset", 2**64 - 1),
        (2, "blob", 0),
        (0, "blob", 1),
        (1, "flags", 1),
    ],
)
def test_unsound_segments_are_refused(record: int, field: str, value: int) -> None:
    table = segments()
    table[field][record] = value
    with pytest.raises(ImageError):
        parse_segments(pack_segments(table), SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment", 3),
        ("block", 4095),
        ("block", 2**32 - 1),
        ("blocks", 0),
        ("blocks", 17),
        ("size", 0),
        ("size", 65537),
        ("size", 61440),
        ("segment", 1),
    ],
)
def test_unsound_chunks_are_refused(field: str, value: int) -> None:
    table = chunks()
    table[field][7] = value
    with pytest.raises(ImageError):
        parse_chunks(pack_chunks(table), segments())


def test_chunks_out_of_order_or_twice_are_refused() -> None:
    raw = pack_chunks(chunks())
    for swapped in (raw[:20] + raw[68:116] + raw[20:68] + raw[116:], raw[:20] + raw[20:68] * 2 + raw[116:]):
        with pytest.raises(ImageError):
            parse_chunks(swapped, segments())


def test_headers_are_checked() -> None:
    raw = pack_segments(segments())
    for bad in (
        b"",
        raw[:19],
        raw[:-1],
        raw + b"\0",
        b"DCHK" + raw[4:],
        raw[:4] + b"\2" + raw[5:],
        raw[:6] + b"\x39" + raw[7:],
        raw[:12] + b"\1" + raw[13:],
    ):
        with pytest.raises(ImageError):
            parse_segments(bad, SIZES)
    with pytest.raises(ImageError):
        parse_segments(pack_segments(np.zeros(MAX_SEGMENTS + 1, SEGMENT)), SIZES)


def test_b1_a_frame_longer_than_its_segment_can_make_it_is_refused() -> None:
    table = segments()[:1]
    blobs = (1 << 33,)
    table["stored"] = (1 << 20) + (1 << 14)
    assert len(parse_segments(pack_segments(table), blobs)) == 1
    for stored in (1 << 30, (1 << 32) - 1):
        table["stored"] = stored
        with pytest.raises(ImageError, match="longer than its segment"):
            parse_segments(pack_segments(table), blobs)
