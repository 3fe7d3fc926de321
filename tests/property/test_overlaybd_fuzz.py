"""Damaged and hostile OverlayBD files: the right bytes or ImageError, and no other exception, ever.

LSMT has no checksum, so a flipped bit in a plain layer may go unseen; within a ZFile every byte that matters is covered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_layers.blocksource import BlockSource, BytesSource
from dsec_layers.errors import ImageError
from dsec_layers.oci import parse_descriptor
from dsec_layers.overlaybd import Algorithm, Disk, ZFile, ZFileOptions, commit, open_layer, open_sparse, open_upper_pair, zfile_writes
from dsec_layers.overlaybd.config import parse_config, render_config
from dsec_layers.overlaybd.oci import blob_info, layer_descriptor
from tests.kit.overlaybd_vectors import assemble, vector

relaxed = settings(deadline=None)
STEM = "blk-64m-layer3"


def content(blob: bytes) -> list[tuple[int, int, bytes]] | None:
    """All that a layer maps, as the disk reads it; None if it is refused."""
    try:
        disk = Disk([open_layer(BytesSource(blob))])
        total = 0
        pieces = []
        for extent in disk.extents(0, disk.size):
            total += extent.length if extent.kind == "data" else 0
            if extent.kind == "data" and total < 1 << 22:
                pieces.append((extent.offset, extent.length, disk.pread(extent.offset, extent.length)))
        return pieces
    except ImageError:
        return None


def flips(size: int, thorough: Iterable[range]) -> list[tuple[int, int]]:
    """Every bit of the thorough ranges, one bit of every other byte."""
    every = {at for part in thorough for at in part}
    rng = random.Random(size)
    return [(at, bit) for at in range(size) for bit in (range(8) if at in every else (rng.randrange(8),))]


def flipped(blob: bytes, at: int, bit: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1 << bit]) + blob[at + 1 :]


@pytest.mark.slow
def test_no_flipped_bit_of_a_registry_blob_gives_wrong_data() -> None:
    blob = vector(STEM + ".zfile-lz4-4k.tar")
    want = content(blob)
    assert want
    payload = 1536
    parts = [
        range(124, 160),
        range(256, 264),
        range(512, 530),
        range(payload, payload + 96),
        range(payload + 1105, payload + 1105 + 28 + 96),
    ]
    outcomes = [content(flipped(blob, at, bit)) for at, bit in flips(len(blob), parts)]
    assert all(outcome is None or outcome == want for outcome in outcomes)
    assert sum(outcome is None for outcome in outcomes) > 2000  # most of them are seen


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("rewrite", [True, False])
def test_no_flipped_bit_of_a_zfile_gives_wrong_data(algorithm: Algorithm, rewrite: bool) -> None:
    plain = b"".join(b"%d bottles of beer on the wall\n" % n for n in range(600))
    blob = assemble(zfile_writes([plain], ZFileOptions(algorithm, rewrite_header=rewrite)))
    seen = 0
    for at, bit in flips(len(blob), [range(96), range(len(blob) - 540, len(blob) - 416)]):
        try:
            opened = ZFile(BytesSource(flipped(blob, at, bit)))
            assert opened.pread(0, opened.size) == plain, (at, bit)
        except ImageError:
            seen += 1
    assert seen > 2000


@pytest.mark.slow
def test_flipped_bits_of_a_plain_layer_are_refused_or_read() -> None:
    blob = vector(STEM + ".lsmt")
    index = int.from_bytes(blob[-4096 + 32 : -4096 + 40], "little")
    for at, bit in flips(4096, [range(390)]) + [(index + at, bit) for at, bit in flips(len(blob) - index, [range(96), range(4096, 4486)])]:
        content(flipped(blob, at, bit))  # ImageError is the only exception it lets through unseen
    assert content(flipped(blob, 0, 0)) is None
    assert content(flipped(blob, index + 5, 7)) is None  # a segment far outside of everything, out of order


@pytest.mark.parametrize("name", [STEM + ".lsmt", STEM + ".zfile-lz4-4k", STEM + ".zfile-zstd-4k", STEM + ".zfile-lz4-4k.tar"])
def test_no_truncation_is_accepted(name: str) -> None:
    blob = vector(name)
    end = 1536 + 1645 if name.endswith(".tar") else len(blob)  # what follows is tar padding
    cuts = sorted({*range(min(end, 700)), *range(0, end, 97), end - 1})
    want = content(blob)
    for cut in cuts:
        assert content(blob[:cut]) is None, cut
    assert content(blob[:end]) == want


edits = st.lists(st.tuples(st.integers(0, 30_000), st.binary(min_size=1, max_size=16)), min_size=1, max_size=4)
words = st.sampled_from([0, 1, 7, 8, 255, 4095, 4096, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, 1 << 50, (1 << 63) - 1, (1 << 64) - 1])


def edited(blob: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(blob)
    for at, new in changes:
        at %= len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    return bytes(data)


@relaxed
@given(st.sampled_from([".lsmt", ".zfile-lz4-4k", ".zfile-zstd-4k", ".zfile-lz4-4k.tar"]), edits)
def test_edited_layers(kind: str, changes: list[tuple[int, bytes]]) -> None:
    content(edited(vector(STEM + kind), changes))


@relaxed
@given(st.lists(st.tuples(st.integers(0, 45), words), min_size=1, max_size=4), st.booleans())
def test_lying_numbers_in_headers(changes: list[tuple[int, int]], trailer: bool) -> None:
    blob = vector(STEM + ".lsmt")
    base = len(blob) - 4096 if trailer else 0
    content(edited(blob, [(base + 8 * at, word.to_bytes(8, "little")) for at, word in changes]))


@relaxed
@given(st.lists(st.tuples(st.integers(5, 11), words), max_size=3), st.lists(st.tuples(st.integers(0, 6), words), max_size=3), st.booleans())
def test_lying_numbers_in_old_zfiles(fields: list[tuple[int, int]], lengths: list[tuple[int, int]], crc: bool) -> None:
    # Without digests, as in the blobs of 2021: no checksum gives the lies away.
    blob = bytearray(assemble(zfile_writes([bytes(range(256)) * 100], ZFileOptions(crc=crc, rewrite_header=False))))
    table = len(blob) - 512 - 7 * 4
    blob[32] &= ~16
    blob[-480] &= ~16
    changes = [(len(blob) - 512 + 8 * at, word.to_bytes(8, "little")) for at, word in fields]
    changes += [(table + 4 * at, (word % (1 << 32)).to_bytes(4, "little")) for at, word in lengths]
    try:
        opened = ZFile(BytesSource(edited(bytes(blob), changes)))
        for at in range(0, min(opened.size, 1 << 20), 4096):
            assert len(opened.pread(at, min(4096, opened.size - at))) == min(4096, opened.size - at)
    except ImageError:
        assert changes


entries = st.lists(st.tuples(words, words).map(lambda pair: b"".join(word.to_bytes(8, "little") for word in pair)), max_size=20)


@relaxed
@given(entries, st.lists(st.binary(min_size=16, max_size=16), max_size=4), st.integers(0, 15))
def test_hostile_logs(absurd: list[bytes], noise: list[bytes], torn: int) -> None:
    data, index = vector(STEM + ".rw.data"), vector(STEM + ".rw.index")
    log = index + b"".join(absurd + noise) + bytes(torn)
    try:
        opened = open_upper_pair(BytesSource(data), BytesSource(log))
    except ImageError:
        return
    assert not torn
    read_all(opened.segments.pieces(0, 1 << 50), opened.sources)
    assemble(commit(opened))


@relaxed
@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=8))
def test_hostile_extents(extents: list[tuple[int, int]]) -> None:
    header = bytearray(vector(STEM + ".rw.data")[:4096])
    header[28] = 0x13
    data = BytesSource(bytes(header) + bytes(range(256)) * 64)
    try:
        opened = open_sparse(data, extents)
    except ImageError:
        return
    read_all(opened.segments.pieces(0, 1 << 50), opened.sources)


def read_all(pieces: Iterable[tuple[int, int, int, int, bool]], sources: tuple[BlockSource, ...]) -> None:
    for lba, end, moffset, source, zeroed in pieces:
        if not zeroed:
            assert len(sources[source].pread(moffset * 512, (end - lba) * 512)) == (end - lba) * 512


@relaxed
@given(st.sampled_from(["data", "index"]), edits)
def test_edited_uppers(which: str, changes: list[tuple[int, bytes]]) -> None:
    files = {name: vector(f"{STEM}.rw.{name}") for name in ("data", "index")}
    files[which] = edited(files[which], changes)
    try:
        opened = open_upper_pair(BytesSource(files["data"]), BytesSource(files["index"]))
    except ImageError:
        return
    read_all(opened.segments.pieces(0, 1 << 50), opened.sources)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["repoBlobUrl", "lowers", "upper", "resultFile", "download", "accelerationLayer", "file", "dir", "size", "vsize", "x"]
)


@relaxed
@given(st.dictionaries(names, json_values | st.lists(st.dictionaries(names, json_values, max_size=4), max_size=3), max_size=6))
def test_configurations(value: dict[str, object]) -> None:
    try:
        config = parse_config(json.dumps(value).encode())
    except ImageError:
        return
    assert parse_config(render_config(config)) == config


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"nonsense", b"\xff", b"[" * 100_000, b'{"lowers": 3}', b'{"lowers": [3]}', b'{"upper": "x"}']
)
def test_what_is_no_configuration(text: bytes) -> None:
    with pytest.raises(ImageError):
        parse_config(text)


@relaxed
@given(st.dictionaries(st.sampled_from(["digest", "size", "annotations", "mediaType"]), json_values, max_size=4))
def test_descriptors(value: dict[str, object]) -> None:
    try:
        found = blob_info(parse_descriptor(value, "a document", typed=False))
    except ImageError:
        return
    assert found is None or blob_info(layer_descriptor(found)) == found
