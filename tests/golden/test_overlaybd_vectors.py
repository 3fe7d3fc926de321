"""OverlayBD files against those of the official tools, both ways."""

from __future__ import annotations

import hashlib

import pytest

from dsec_layers.blocksource import BytesSource
from dsec_layers.errors import UsageError
from dsec_layers.overlaybd import Algorithm, Disk, Packing, ZFile, ZFileOptions, commit, merge, open_layer, open_upper_pair, zfile_writes
from dsec_layers.overlaybd import zfile_writer as writer
from dsec_layers.overlaybd.config import parse_config
from tests.kit.overlaybd_vectors import DISKS, EXPECTED, STEMS, UUIDS, assemble, layer, script_bytes, sha256, vector

KINDS = (".lsmt", ".zfile-lz4-4k", ".zfile-zstd-4k", ".zfile-lz4-4k.tar")


def packing(number: int, **options: object) -> Packing:
    return Packing(UUIDS[number], UUIDS[number - 1] if number else None, STEMS[number].encode(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("kind", KINDS)
def test_index_and_header(stem: str, kind: str) -> None:
    opened = layer(stem + kind)
    rows = [
        f"off {lba} len {end - lba} moff {moffset} zeroed {int(zeroed)} tag 0"
        for lba, end, moffset, _, zeroed in opened.segments.pieces(0, 1 << 50)
    ]
    number = STEMS.index(stem)
    assert rows == vector(stem + ".index.txt").decode().splitlines()[1:]
    assert (opened.header.uuid, opened.header.user_tag, opened.header.virtual_size) == (UUIDS[number], stem.encode(), 64 << 20)
    assert opened.header.parent_uuid == (UUIDS[number - 1] if number else "00000000-0000-0000-0000-000000000000")
    assert opened.nesting == {".lsmt": ("lsmt",), ".zfile-lz4-4k.tar": ("tar", "zfile", "lsmt")}.get(kind, ("zfile", "lsmt"))
    assert opened.sources[0].pread(0, opened.sources[0].size) == vector(stem + ".lsmt")


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_disk(kind: str) -> None:
    layers = [layer(stem + kind) for stem in STEMS]
    assert [sha256(Disk(layers[:count])) for count in (1, 2, 3)] == [EXPECTED[name] for name in DISKS]


@pytest.mark.parametrize("step", [512, 777, 4096, 65536])
def test_stacked_disk_in_steps(step: int) -> None:
    disk = Disk([layer(stem + ".zfile-lz4-4k") for stem in STEMS])
    start, length = 1 << 20, 2 << 20
    whole = disk.pread(start, length)
    assert b"".join(disk.pread(start + at, min(step, length - at)) for at in range(0, length, step)) == whole


def test_unsealed_pairs() -> None:
    layers = [open_upper_pair(BytesSource(vector(stem + ".rw.data")), BytesSource(vector(stem + ".rw.index"))) for stem in STEMS]
    assert [sha256(Disk(layers[:count])) for count in (1, 2, 3)] == [EXPECTED[name] for name in DISKS]


def test_configuration_names_the_layers() -> None:
    config = parse_config(vector("blk-64m.lsmt.config.v1.json"))
    assert sha256(Disk([layer(lower.file) for lower in config.lowers])) == EXPECTED[DISKS[2]]


def test_ext4_disk() -> None:
    layers = [layer(f"ext4-64m-layer{number}.zfile-lz4-4k.tar") for number in (1, 2)]
    assert sha256(Disk(layers[:1])) == EXPECTED["ext4-64m.expected-layer1.raw"]
    disk = Disk(layers)
    assert sha256(disk) == EXPECTED["ext4-64m.expected.raw"]
    assert disk.pread(1024 + 56, 2) == b"\x53\xef"  # the ext4 superblock's magic


def test_base_layer_of_2021() -> None:
    blob = vector("ext4_64")
    assert hashlib.sha256(blob).hexdigest() == "c3a417552a6cf9ffa959b541850bab7d7f08f4255425bf8b48c85f7b36b378d9"
    opened = open_layer(BytesSource(blob))
    assert opened.header.virtual_size == 64 << 30
    assert (opened.header.index_size, len(opened.segments), int(opened.segments.zeroed.sum())) == (8448, 8323, 8209)
    disk = Disk([opened])
    assert disk.pread(1024 + 56, 2) == b"\x53\xef"
    blocks, block = (int.from_bytes(disk.pread(1024 + at, 4), "little") for at in (4, 24))
    assert blocks << (10 + block) == disk.size
    assert disk.pread(disk.size - 4096, 4096) == bytes(4096)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_commit_of_an_upper_is_the_official_file(number: int) -> None:
    stem = STEMS[number]
    pair = open_upper_pair(BytesSource(vector(stem + ".rw.data")), BytesSource(vector(stem + ".rw.index")))
    assert assemble(commit(pair, packing(number))) == vector(stem + ".lsmt")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_commit_of_a_sealed_layer_changes_nothing(number: int) -> None:
    assert assemble(commit(layer(STEMS[number] + ".zfile-lz4-4k.tar"), packing(number))) == vector(STEMS[number] + ".lsmt")


def test_commit_of_an_ext4_layer_changes_nothing() -> None:
    opened = layer("ext4-64m-layer1.zfile-lz4-4k.tar")
    again = commit(opened, Packing(opened.header.uuid, None, opened.header.user_tag))
    assert assemble(again) == opened.sources[0].pread(0, opened.sources[0].size)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_zstd_file_is_the_official_file(number: int) -> None:
    options = ZFileOptions(Algorithm.ZSTD)
    assert assemble(commit(layer(STEMS[number] + ".lsmt"), packing(number, zfile=options))) == vector(STEMS[number] + ".zfile-zstd-4k")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_lz4_file_and_tar_are_the_official_ones_but_for_the_encoder(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # LZ4 1.8.3, which the official tools carry, makes other (equally valid) blocks than today's: take its blocks, compare all the rest.
    official = ZFile(BytesSource(vector(STEMS[number] + ".zfile-lz4-4k")))
    blocks = {}
    for block in range(official.header.blocks):
        start, stop = official._starts.item(block), official._starts.item(block + 1) - 4
        blocks[official.pread(block * 4096, min(4096, official.size - block * 4096))] = official._source.pread(start, stop - start)
    monkeypatch.setattr(writer, "lz4_compress", lambda part, store_size: blocks[bytes(part)])
    opened = layer(STEMS[number] + ".lsmt")
    assert assemble(commit(opened, packing(number, zfile=ZFileOptions()))) == vector(STEMS[number] + ".zfile-lz4-4k")
    assert assemble(commit(opened, packing(number, zfile=ZFileOptions(), tar=True))) == vector(STEMS[number] + ".zfile-lz4-4k.tar")


def test_merge_is_the_official_file() -> None:
    # Packed by LZ4 1.8.3 these bytes have the digest 'blk-64m-merged.zfile-lz4-4k' of overlaybd-merge: b3685ee5e343e22e7551cf20363d2e5d…
    merged = assemble(merge([layer(stem + ".lsmt") for stem in STEMS]))
    assert hashlib.sha256(merged).hexdigest() == "50d5585b3056b8ada3345121bd0afa49e90e0c21519e3d29b21ab53b20ffae30"
    assert sha256(Disk([open_layer(BytesSource(merged))])) == EXPECTED[DISKS[2]]


@pytest.mark.parametrize("name", ["plain.lz4-4k.zfile", "plain.lz4-64k.zfile", "plain.zstd-4k.zfile", "plain.zstd-64k.zfile"])
def test_plain_zfile(name: str) -> None:
    opened = ZFile(BytesSource(vector(name)))
    assert opened.size == 150_001
    assert opened.pread(0, opened.size) == vector("plain.bin")
    assert opened.pread(65_530, 12) == vector("plain.bin")[65_530:65_542]
    assert opened.pread(150_000, 1) == vector("plain.bin")[150_000:]


def test_plain_zstd_zfile_is_the_official_file() -> None:
    options = ZFileOptions(Algorithm.ZSTD, rewrite_header=False)
    assert assemble(zfile_writes([vector("plain.bin")], options)) == vector("plain.zstd-4k.zfile")


def test_64k_blocks_that_the_official_reader_fails_on_are_read_and_not_written() -> None:
    opened = ZFile(BytesSource(vector("peerbug-lz4-64k-incompressible.zfile")))
    assert opened.header.block_size == 65536
    assert len(opened.pread(0, opened.size)) == opened.size  # every block matches its checksum and decompresses to its size
    with pytest.raises(UsageError, match="64 KiB are not written"):
        ZFileOptions(block_size=65536)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_scripts_are_understood(number: int) -> None:
    disk = bytearray(64 << 20)
    for stem in STEMS[: number + 1]:
        for offset, what in script_bytes(stem):
            data = bytes(what) if isinstance(what, int) else what
            disk[offset : offset + len(data)] = data
    assert hashlib.sha256(disk).hexdigest() == EXPECTED[DISKS[number]]
