"""OverlayBD formats piece by piece: headers, sealed, sparse and warp layers, ZFile, tar."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from dsec_layers.blocksource import BytesSource
from dsec_layers.errors import ImageError, LimitError, StoreError, UsageError
from dsec_layers.overlaybd import (
    Algorithm,
    BlockCache,
    Disk,
    LsmtLayer,
    Packing,
    ZFile,
    ZFileOptions,
    commit,
    merge,
    open_layer,
    open_sparse,
    open_upper_pair,
    zfile_writes,
)
from dsec_layers.overlaybd.lsmt import MAX_LENGTH, NIL_UUID, PAD, SPACE, Flags, Header, encode_entries
from dsec_layers.overlaybd.segments import Segments, no_segments
from dsec_layers.overlaybd.stream import batches
from dsec_layers.overlaybd.tarwrap import tar_writes, unwrap
from dsec_layers.overlaybd.zfile_format import ZHeader, block_bound, raw_crc32c
from tests.kit.overlaybd_vectors import assemble, vector

Row = tuple[int, int, int, int, bool]


def segments(*rows: Row) -> Segments:
    """From (lba, end, moffset, tag, zeroed)."""
    table = np.array(rows, np.int64).reshape(-1, 5)
    return Segments(table[:, 0], table[:, 1], table[:, 2], table[:, 3].astype(np.int16), table[:, 4].astype(np.bool_))


def sealed(data: bytes, *rows: Row, vsize: int = 1 << 20, pads: int = 0, **changes: Any) -> bytes:
    """A sealed LSMT file with these sectors of data and this index."""
    header = Header(Flags.LAYER_HEADER, virtual_size=vsize)
    trailer = Header(Flags.LAYER_TRAILER, SPACE + len(data), len(rows) + pads, vsize)
    return header.render() + data + PAD * pads + encode_entries(segments(*rows)) + replace(trailer, **changes).render()


def opened(blob: bytes) -> LsmtLayer:
    return open_layer(BytesSource(blob))


DATA = bytes(range(256)) * 8  # four sectors


# headers


def test_header_survives_its_stored_form() -> None:
    header = Header(6, 123_456, 7, 1 << 40, "C02FB491-B4D4-4904-8684-A014D032AF78", NIL_UUID, bytes(range(1, 256)) + b"x")
    raw = header.render()
    assert len(raw) == 4096 and raw[390:] == bytes(3706)
    assert Header.parse(raw) == header


def test_foreign_spellings_of_uuids() -> None:
    raw = bytearray(Header(7, uuid="c02fb491-b4d4-4904-8684-a014d032af78").render())
    assert raw[56:92] == b"C02FB491-B4D4-4904-8684-A014D032AF78"  # as the official tools write
    raw[56:92] = raw[56:92].lower()
    raw[93:130] = bytes(37)
    assert Header.parse(raw).uuid == "c02fb491-b4d4-4904-8684-a014d032af78"
    assert Header.parse(raw).parent_uuid == NIL_UUID


@pytest.mark.parametrize(
    "changes", [{"uuid": "x"}, {"uuid": NIL_UUID + "\n"}, {"user_tag": bytes(257)}, {"virtual_size": -1}, {"virtual_size": 1 << 60}]
)
def test_headers_that_cannot_be_stored(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(Header(7), **changes).render()


def test_raw_crc() -> None:
    assert raw_crc32c(b"123456789") == 0x58E3FA20
    assert raw_crc32c(bytes(100)) == 0


# sealed layers


def test_zeroed_masks_what_is_below_and_tags_are_ignored() -> None:
    lower = opened(sealed(DATA, (0, 4, 8, 0, False)))
    upper = opened(sealed(DATA, (1, 2, 8, 7, True), (3, 4, 9, 1, False), vsize=0))
    disk = Disk([lower, upper])
    assert disk.size == 1 << 20  # the upper layer does not say
    assert disk.pread(0, 3072) == DATA[:512] + bytes(512) + DATA[1024:1536] + DATA[512:1024] + bytes(1024)
    assert [(extent.offset // 512, extent.kind) for extent in disk.extents(0, 4096)] == [(0, "data"), (1, "zero"), (2, "data"), (4, "hole")]


def test_pads_are_dropped_anywhere() -> None:
    blob = sealed(DATA, (0, 1, 8, 0, False), (2, 3, 9, 0, False), pads=3)
    assert opened(blob).segments.lba.tolist() == [0, 2]


def test_empty_layer() -> None:
    blob = assemble(commit(opened(sealed(b""))))
    assert len(blob) == 8192
    assert Disk([opened(blob)]).pread(0, 1 << 20) == bytes(1 << 20)


@pytest.mark.parametrize(
    "row",
    [
        (0, 1, 7, 0, False),  # in the header
        (0, 5, 8, 0, False),  # into the index
        (0, 1, 12, 0, False),
        (0, 1, 13, 0, True),
        (0, 0, 8, 0, False),  # empty
        (0, 1, (1 << 55) - 1, 0, False),
        ((1 << 50) - 2, (1 << 50) + 100, 8, 0, True),  # beyond the last sector
    ],
)
def test_segments_that_cannot_be(row: Row) -> None:
    with pytest.raises(ImageError, match="outside of the layer"):
        opened(sealed(DATA, row))


@pytest.mark.parametrize(
    "rows", [((1, 2, 8, 0, False), (0, 1, 9, 0, False)), ((0, 2, 8, 0, False), (1, 3, 10, 0, False)), ((0, 1, 8, 0, True),) * 2]
)
def test_order_and_overlap(rows: tuple[Row, ...]) -> None:
    with pytest.raises(ImageError, match="overlaps"):
        opened(sealed(DATA, *rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": 7}, "not those of a sealed layer"),
        ({"flags": 2}, "not those of a sealed layer"),
        ({"flags": 4}, "not those of a sealed layer"),
        ({"index_offset": 0}, "outside of the file"),
        ({"index_offset": 1 << 60}, "outside of the file"),
        ({"index_size": 2}, "outside of the file"),
        ({"index_size": 1_000_001}, "more than 1000000"),
        ({"index_size": (1 << 64) - 1}, "more than 1000000"),
        ({"virtual_size": 1}, "different disk sizes"),
    ],
)
def test_lying_trailers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        opened(sealed(DATA, (0, 1, 8, 0, False), **changes))


def test_disk_size_is_said_by_some_layer() -> None:
    with pytest.raises(ImageError, match="no layer states the size"):
        Disk([opened(sealed(b"", vsize=0))])


def test_a_stack_of_255_layers_and_no_more() -> None:
    layers = [opened(sealed(bytes([number]) * 512, (number, number + 1, 8, 0, False))) for number in range(256)]
    disk = Disk(layers[:255])
    assert disk.pread(0, 255 * 512) == b"".join(bytes([number]) * 512 for number in range(255))
    with pytest.raises(LimitError, match="256 layers"):
        Disk(layers)
    merged = opened(assemble(merge(layers[:255])))
    assert Disk([merged, layers[255]]).pread(0, 256 * 512) == b"".join(bytes([number]) * 512 for number in range(256))


# packing


def run(length: int, *, zeroed: bool = False, piece: int = MAX_LENGTH) -> LsmtLayer:
    """A layer with one run of ``length`` sectors, in segments of ``piece`` sectors."""
    starts = range(0, length, piece)
    rows = [(lba, min(lba + piece, length), 8 + (0 if zeroed else lba), 0, zeroed) for lba in starts]
    data = BytesSource(bytes(SPACE + length * 512))
    return LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=1 << 30), segments(*rows), (data,))


@pytest.mark.parametrize(
    ("layer", "lengths"),
    [
        (run(16_382), [16_382]),
        (run(16_383), [16_320, 63]),  # 255 pieces of 64 sectors and the rest stay below the limit only apart
        (run(16_384), [16_320, 64]),
        (run(40_000, piece=8192), [16_320, 16_320, 7_360]),
        (run(40_000), [16_320, 16_319, 7_361]),  # the second segment of the source starts with a cut
        (run(16_383, zeroed=True), [16_383]),
        (run(32_766, zeroed=True), [16_383, 16_383]),
        (run(20_000, piece=10), [16_380, 3_620]),
        (run(20_000, zeroed=True, piece=10), [16_380, 3_620]),
        (run(0), []),
    ],
)
def test_how_neighbours_are_joined(layer: LsmtLayer, lengths: list[int]) -> None:
    packed = opened(assemble(commit(layer)))
    assert (packed.segments.end - packed.segments.lba).tolist() == lengths
    assert packed.header.index_size == -(-len(lengths) // 256) * 256


def test_too_fragmented_to_seal() -> None:
    count = 1_000_000  # not a multiple of 256: the pads make it too many
    lba = np.arange(count) * 2
    mapping = Segments(lba, lba + 1, np.full(count, 8), np.zeros(count, np.int16), np.ones(count, np.bool_))
    layer = LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=1 << 31), mapping, (BytesSource(b""),))
    with pytest.raises(LimitError, match="1000192 index entries"):
        next(commit(layer))
    most = 999_936
    small = replace(layer, segments=mapping.take(slice(0, most)))
    assert opened(assemble(commit(small))).header.index_size == most


def test_parents_are_inherited() -> None:
    names = [f"11111111-2222-3333-4444-5555555555{number:02d}" for number in range(4)]
    low = replace(run(1), header=Header(3, virtual_size=512, uuid=names[1], parent_uuid=names[0]))
    high = replace(run(1), header=Header(3, virtual_size=0, uuid=names[2], parent_uuid=names[1]))
    merged = opened(assemble(merge([low, high], Packing(uuid=names[3]))))
    assert (merged.header.uuid, merged.header.parent_uuid, merged.header.virtual_size) == (names[3], names[0], 512)
    assert opened(assemble(commit(high, Packing(parent_uuid=names[3])))).header.parent_uuid == names[3]


# sparse and warp layers


def test_sparse_upper() -> None:
    header = Header(Flags.SPARSE_DATA, virtual_size=8192).render()
    content = b"a" * 1024 + bytes(3072) + b"b" * 4096
    layer = open_sparse(BytesSource(header + content), [(0, 4096 + 1024), (8192, 4096)])
    assert [piece[:3] for piece in layer.segments.pieces(0, 100)] == [(0, 2, 8), (8, 16, 16)]
    assert Disk([layer]).pread(0, 8192) == content
    assert Disk([opened(assemble(commit(layer)))]).pread(0, 8192) == content
    with pytest.raises(ImageError, match="flags"):
        open_sparse(BytesSource(vector("blk-64m-layer3.rw.data")), [])
    with pytest.raises(ImageError, match="flags"):
        open_upper_pair(BytesSource(header), BytesSource(header))


WARP: tuple[Row, ...] = ((0, 2, 8, 0, False), (2, 5, 1, 1, False), (6, 7, 10, 0, True))
TARGET = b"".join(bytes([65 + number]) * 512 for number in range(6))


@pytest.mark.parametrize("lowest", [0, 3])
def test_warp_layer_reads_from_the_original_tar(lowest: int) -> None:
    rows = [(lba, end, moffset, tag + lowest, zeroed) for lba, end, moffset, tag, zeroed in WARP]
    layer = open_layer(BytesSource(sealed(DATA, *rows)), target=BytesSource(TARGET))
    want = DATA[:1024] + TARGET[512:2048] + bytes(1024)
    assert Disk([layer]).pread(0, 7 * 512) == want
    native = opened(assemble(commit(layer)))  # a warp layer can be turned into an ordinary one
    assert Disk([native]).pread(0, 7 * 512) == want


def test_warp_layer_beyond_its_target() -> None:
    with pytest.raises(ImageError, match="outside of the target"):
        open_layer(BytesSource(sealed(DATA, *WARP)), target=BytesSource(TARGET[:-1025]))
    with pytest.raises(ImageError, match="outside of the layer"):
        open_layer(BytesSource(sealed(DATA, (0, 1, 50, 0, False))), target=BytesSource(TARGET))
    with pytest.raises(ImageError, match="unknown tag 2"):
        open_layer(BytesSource(sealed(DATA, (0, 1, 8, 0, False), (1, 2, 8, 2, False))), target=BytesSource(TARGET))


# ZFile


def lines(count: int) -> bytes:
    return b"".join(b"%d green bottles hanging on the wall\n" % number for number in range(count))


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("block_size", [4096, 8192, 16384, 32768])
@pytest.mark.parametrize("crc", [True, False])
def test_zfile_round_trip(algorithm: Algorithm, block_size: int, crc: bool) -> None:
    noise = np.random.default_rng(1).bytes(70_000)
    for plain in (b"", b"x", lines(4000) + noise, noise[:block_size], noise[: 2 * block_size]):
        blob = assemble(zfile_writes([plain], ZFileOptions(algorithm, block_size, crc)))
        read = ZFile(BytesSource(blob))
        assert (read.size, read.header.crc, read.header.block_size) == (len(plain), crc, block_size)
        assert read.pread(0, len(plain)) == plain
        for at in range(0, len(plain), 9999):
            assert read.pread(at, min(5000, len(plain) - at)) == plain[at : at + 5000]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_zfile_depends_on_the_bytes_alone(algorithm: Algorithm) -> None:
    plain = lines(100_000)
    want = assemble(zfile_writes([plain], ZFileOptions(algorithm, workers=1)))
    pieces = [plain[at : at + 12_345] for at in range(0, len(plain), 12_345)]
    assert assemble(zfile_writes(pieces, ZFileOptions(algorithm, workers=3))) == want
    writes = list(zfile_writes(pieces, ZFileOptions(algorithm, rewrite_header=False)))
    assert [at for at, _ in writes] == sorted(at for at, _ in writes)  # strictly forward


@pytest.mark.parametrize("block_size", [0, 512, 4095, 12288, 65536, 131072])
def test_block_sizes_that_are_not_written(block_size: int) -> None:
    with pytest.raises(UsageError):
        ZFileOptions(block_size=block_size)


class CountingSource(BytesSource):
    """Remembers what was read of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads: list[tuple[int, int]] = []

    def pread(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return super().pread(offset, length)


def test_only_what_is_needed_is_read() -> None:
    plain = lines(60_000)
    source = CountingSource(assemble(zfile_writes([plain], ZFileOptions())))
    read = ZFile(source, BlockCache(1 << 20))
    assert len(source.reads) == 2  # the header and the jump table
    source.reads.clear()
    assert read.pread(1_000_000, 100) == plain[1_000_000:1_000_100]
    assert len(source.reads) == 1 and source.reads[0][1] < 4096
    read.pread(1_000_010, 100)
    assert len(source.reads) == 1  # cached
    read.pread(1_000_000 // 4096 * 4096 - 4096, 3 * 4096)
    assert len(source.reads) == 3  # the blocks on both sides
    source.reads.clear()
    assert read.pread(0, len(plain)) == plain
    assert len(source.reads) == -(-len(plain) // (1 << 20))  # a scan comes in large reads


def test_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = BlockCache(10_000)
    for key in range(4):
        cache.put(key, bytes(3000))
        cache.get(0)
    assert cache.used == 9000
    assert [cache.get(key) is not None for key in range(4)] == [True, False, True, True]
    cache.put(9, bytes(10_001))
    assert cache.get(9) is None and cache.used == 9000
    cache.put(0, bytes(2))
    assert cache.used == 6002


def test_one_cache_serves_many_files() -> None:
    cache = BlockCache(1 << 16)
    files = [ZFile(BytesSource(assemble(zfile_writes([bytes([n]) * 5000], ZFileOptions()))), cache) for n in range(3)]
    for _ in range(2):
        assert [file.pread(100, 10) for file in files] == [bytes([n]) * 10 for n in range(3)]


def zstd_zfile(frame: bytes, size: int) -> bytes:
    """A ZFile without digests or checksums, of one hand-made zstd block."""
    header = ZHeader(3, Algorithm.ZSTD, 4096, False)
    trailer = replace(header, flags=6, index_offset=512 + len(frame), blocks=1, size=size)
    return header.render() + frame + len(frame).to_bytes(4, "little") + trailer.render()


def test_zstd_frames_that_state_another_size_are_not_believed() -> None:
    good = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 4000)
    assert ZFile(BytesSource(zstd_zfile(good, 4000))).pread(0, 4000) == b"x" * 4000
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    assert len(bomb) < block_bound(Algorithm.ZSTD, 4096)
    for frame, size in ((bomb, 4000), (good, 3999), (good, 4001), (zstandard.ZstdCompressor().compress(b"x" * 10), 4000)):
        with pytest.raises(ImageError):
            ZFile(BytesSource(zstd_zfile(frame, size))).pread(0, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 3000}, "power of two"),
        ({"block_size": 1 << 17}, "power of two"),
        ({"size": 1 << 62}, "cannot hold"),
        ({"blocks": 2}, "cannot hold"),
        ({"index_offset": 5}, "outside of the file"),
        ({"index_offset": 1 << 40}, "outside of the file"),
        ({"index_offset": 520}, "jump table"),
        ({"dict_size": 8}, "the blocks end"),
        ({"flags": 7}, "not those of a finished file"),
        ({"flags": 2}, "not those of a finished file"),
    ],
)
def test_lying_zfile_trailers(changes: dict[str, Any], message: str) -> None:
    blob = assemble(zfile_writes([b"x" * 4096], ZFileOptions(rewrite_header=False)))
    trailer = replace(ZHeader.parse(blob[-512:]), flags=Flags.LAYER_TRAILER)
    with pytest.raises(ImageError, match=message):
        ZFile(BytesSource(blob[:-512] + replace(trailer, **changes).render()))


def test_batches() -> None:
    assert list(batches([b"abc", b"", memoryview(b"defgh"), b"i"], 4)) == [b"abcd", b"efgh", b"i"]
    assert list(batches([b"abcd"], 4)) == [b"abcd"]
    assert list(batches([], 4)) == []


class FailingSource(BytesSource):
    """Fails when told to."""

    fail = False

    def pread(self, offset: int, length: int) -> bytes:
        if self.fail:
            raise StoreError("time-out")
        return super().pread(offset, length)


@pytest.mark.parametrize("kind", [".lsmt", ".zfile-lz4-4k", ".zfile-zstd-4k", ".zfile-lz4-4k.tar"])
def test_d1_a_failed_read_is_an_error_and_not_zeros(kind: str) -> None:
    source = FailingSource(vector("blk-64m-layer3" + kind))
    disk = Disk([open_layer(source)])
    places = [(8192, 4096), (8192, 100), (1_052_672, 8192), (0, 1 << 21)]
    for offset, length in places:
        source.fail = True
        for _ in range(3):
            with pytest.raises(StoreError):
                disk.pread(offset, length)
        source.fail = False
        assert disk.pread(8192, 4096) == b"\xcc" * 4096
        disk = Disk([open_layer(source)])  # with an empty cache
    assert disk.pread(0, 8192) == bytes(8192)


# tar


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 12_345])
def test_tar_is_one_to_others(size: int) -> None:
    payload = lines(500)[:size]
    blob = assemble(tar_writes([(0, payload)]))
    assert len(blob) == 1536 + -(-size // 512) * 512 + 1024
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.size, member.mode & 0o7777, member.uname) == ("overlaybd.commit", size, 0o644, "root")
        content = archive.extractfile(member)
        assert content is not None and content.read() == payload
    if size:
        assert unwrap(BytesSource(blob)).pread(0, size) == payload


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_others(style: int) -> None:
    layer = vector("blk-64m-layer3.zfile-zstd-4k")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=style) as archive:
        member = tarfile.TarInfo("overlaybd.commit")
        member.size, member.mode, member.mtime = len(layer), 0o444, 1.5 if style == tarfile.PAX_FORMAT else 1
        archive.addfile(member, io.BytesIO(layer))
    if style == tarfile.GNU_FORMAT:  # "ustar  ": the official reader does not take it for a tar either
        with pytest.raises(ImageError, match="no LSMT header"):
            opened(stream.getvalue())
    else:
        assert opened(stream.getvalue()).nesting == ("tar", "zfile", "lsmt")


def test_tar_with_something_else_first() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with pytest.raises(ImageError, match="not a file"):
        opened(stream.getvalue())


@pytest.mark.parametrize(
    "record", [b"13 size=16x5\n", b"14 size=1645\n", b"3 size=1645\n\0", b"size=1645\n\0\0\0", b"99999 size=16\n", b"13 siz\0=1645\n"]
)
def test_malformed_pax_records(record: bytes) -> None:
    blob = bytearray(vector("blk-64m-layer3.zfile-lz4-4k.tar"))
    blob[512 : 512 + len(record)] = record
    with pytest.raises(ImageError):
        opened(bytes(blob))


def test_what_is_no_layer() -> None:
    for blob in (b"", b"x", bytes(10_000), b"LSMT\0\1\2\0", b"ZFile\0\1\0" + bytes(1000), lines(1000)):
        with pytest.raises(ImageError):
            opened(blob)


def test_empty_ranges() -> None:
    disk = Disk([opened(sealed(DATA, (0, 4, 8, 0, False)))])
    for offset in (0, 1, 511, 512, disk.size):
        assert (disk.pread(offset, 0), list(disk.extents(offset, 0))) == (b"", [])


def test_no_layers_and_no_segments() -> None:
    with pytest.raises(UsageError):
        Disk([])
    assert len(no_segments()) == 0
