"""Blocks, decompression and read-ahead: members and frames in a row, truncation, junk, bombs, threads that end."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import random
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator

import pytest
import zstandard

from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.blocks import BLOCK, FileBlocks, PipeBlocks, ReadAhead, StreamBlocks, Window
from dsec_layers.builders.sources.decompress import beginning, compression_of, decompressed
from dsec_layers.errors import InputError
from tests.kit.oracle import MemorySink, snapshot_tree
from tests.kit.tars import file, make_tar

_zstd = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "xz": lzma.compress, "bzip2": bz2.compress, "zstd": _zstd}
DATA = random.Random(1).randbytes(40_000) * 30 + bytes(300_000)


@contextlib.contextmanager
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def unpacked(data: bytes, kind: str) -> bytes:
    blocks = decompressed(StreamBlocks(io.BytesIO(data), "input"), kind, "input")
    parts = []
    while block := blocks.block():
        assert len(block) <= 2 * BLOCK
        parts.append(block)
    assert blocks.block() == b"" and blocks.skip(5) == 0
    return b"".join(parts)


@pytest.mark.parametrize("kind", PACKERS)
def test_formats_are_told_apart_and_unpacked(kind: str) -> None:
    packed = PACKERS[kind](DATA)
    assert compression_of(packed) == kind
    assert unpacked(packed, kind) == DATA
    assert unpacked(PACKERS[kind](b""), kind) == b""
    assert DATA.startswith(beginning(packed, kind)) and len(beginning(packed, kind)) > 1000
    assert beginning(b"\x1f\x8b\x08junk" * 10, kind) == b""


@pytest.mark.parametrize("kind", PACKERS)
def test_b6_several_members_are_one_stream(kind: str) -> None:
    pack = PACKERS[kind]
    assert unpacked(pack(DATA) + pack(b"") + pack(b"more"), kind) == DATA + b"more"


@pytest.mark.parametrize("kind", ["gzip", "xz", "bzip2"])
def test_zero_padding_behind_members(kind: str) -> None:
    pack = PACKERS[kind]
    assert unpacked(pack(b"one") + bytes(1024) + pack(b"two") + bytes(200_000), kind) == b"onetwo"


def test_junk_behind_gzip_is_passed_over_as_gzip_does() -> None:
    assert unpacked(gzip.compress(b"one") + b"junk" * 50_000, "gzip") == b"one"
    with pytest.raises(InputError, match="damaged gzip"):
        unpacked(gzip.compress(b"one") + b"\x1f\x8b\x08broken member here", "gzip")


@pytest.mark.parametrize("kind", ["xz", "bzip2", "zstd"])
def test_junk_behind_others_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=f"damaged {kind}|truncated"):
        unpacked(PACKERS[kind](b"one") + b"junk" * 50_000, kind)


def test_zstd_frames_of_every_shape_in_a_row() -> None:
    big = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compressobj()
    skippable = (0x184D2A5F).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"12345"
    empty_skippable = (0x184D2A50).to_bytes(4, "little") + bytes(4)
    parts = [skippable, _zstd(b"a" * 500_000), empty_skippable, big.compress(DATA) + big.flush(), _zstd(b"tiny"), skippable]
    data = b"".join(parts)
    assert compression_of(data) == "zstd"
    assert unpacked(data, "zstd") == b"a" * 500_000 + DATA + b"tiny"


@pytest.mark.parametrize("kind", PACKERS)
def test_truncation_is_noticed_everywhere(kind: str) -> None:
    packed = PACKERS[kind](b"some content, not much" * 20) + PACKERS[kind](b"and a second part")
    first = len(PACKERS[kind](b"some content, not much" * 20))
    for cut in range(1, len(packed)):
        if cut == first:
            assert unpacked(packed[:cut], kind)
            continue
        with pytest.raises(InputError):
            unpacked(packed[:cut], kind)


@pytest.mark.parametrize("kind", PACKERS)
def test_damage_is_noticed(kind: str) -> None:
    packed = bytearray(PACKERS[kind](DATA))
    packed[len(packed) // 2] ^= 0x10
    with pytest.raises(InputError):
        unpacked(bytes(packed), kind)


def test_a_wrong_checksum_of_gzip_is_noticed_behind_the_end_of_the_tar() -> None:
    packed = bytearray(gzip.compress(make_tar(file("f", b"x"))))
    packed[-6] ^= 1
    with no_thread_stays(), pytest.raises(InputError, match="damaged gzip"):
        TarSource(io.BytesIO(bytes(packed))).ingest(MemorySink())


@pytest.mark.parametrize("kind", PACKERS)
def test_a_bomb_comes_in_blocks(kind: str) -> None:
    packed = PACKERS[kind](bytes(24 << 20))
    assert len(packed) < 200_000
    blocks = decompressed(StreamBlocks(io.BytesIO(packed), "bomb"), kind, "bomb")
    total = 0
    while block := blocks.block():
        assert len(block) <= 2 * BLOCK
        total += len(block)
    assert total == 24 << 20


def test_a_tar_whose_first_name_looks_like_a_magic_is_a_tar() -> None:
    data = make_tar(file("BZh9-name", b"x"))
    assert compression_of(data) == ""
    sink = MemorySink()
    tree = TarSource(io.BytesIO(data)).ingest(sink)
    assert b"BZh9-name" in snapshot_tree(tree, sink.content)


def test_an_xz_stream_that_wants_too_much_memory_is_refused() -> None:
    packed = lzma.compress(b"x" * 100, format=lzma.FORMAT_XZ, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}])
    assert unpacked(packed, "xz") == b"x" * 100
    # a dictionary of 1.5 GiB, said in the block header (xz specification, 5.3.1), with its CRC32 put right
    block = bytearray(packed[12:24])
    block[4] = 39
    block[8:12] = zlib.crc32(block[:8]).to_bytes(4, "little")
    with pytest.raises(InputError, match="damaged xz"):
        unpacked(packed[:12] + bytes(block) + packed[24:], "xz")


# -- threads, pipes, windows


def test_read_ahead_passes_errors_on_and_ends() -> None:
    with no_thread_stays():
        ahead = ReadAhead(decompressed(StreamBlocks(io.BytesIO(gzip.compress(DATA)[:-20]), "x"), "gzip", "x"))
        with pytest.raises(InputError, match="truncated"):
            while ahead.block():
                pass
        assert ahead.block() == b""
        ahead.close()


def test_read_ahead_is_bounded_and_can_be_left_early() -> None:
    class Endless:
        produced = 0

        def block(self) -> bytes:
            self.produced += 1
            return b"x" * 1000

        def skip(self, count: int) -> int:
            return 0

        def close(self) -> None:
            self.closed = True

    endless = Endless()
    with no_thread_stays():
        ahead = ReadAhead(endless)
        assert ahead.block() and ahead.skip(10) == 0
        ahead.close()
    assert endless.closed and endless.produced <= 8


def test_an_error_ends_the_wait_for_a_pipe_that_says_nothing() -> None:
    reader, writer = os.pipe()
    os.write(writer, gzip.compress(b"this is no tar" * 200_000)[:-8])
    try:
        with no_thread_stays(), pytest.raises(InputError):
            TarSource(reader, "pipe").ingest(MemorySink())  # the writer never closes its end
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pipe_gives_what_it_has() -> None:
    reader, writer = os.pipe()
    pipe = PipeBlocks(reader, "pipe")
    os.write(writer, b"abc")
    assert pipe.block() == b"abc" and pipe.skip(3) == 0
    os.close(writer)
    assert pipe.block() == b""
    pipe.close()
    pipe.close()
    os.close(reader)


class Small:
    """Blocks of odd sizes."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size

    def block(self) -> bytes:
        part, self.data = self.data[: self.size], self.data[self.size :]
        return part

    def skip(self, count: int) -> int:
        return 0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [1, 7, 512, 1000, 5000])
def test_a_window_over_blocks_of_any_size(size: int) -> None:
    data = random.Random(2).randbytes(5000)
    window = Window(Small(data, size), "input")
    assert window.take(10) == data[:10] and window.offset == 10
    assert window.peek(700) == data[10:710] and window.offset == 10
    window.skip(1000)
    assert window.take(1500) == data[1010:2510]
    got = b""
    while len(got) < 2000:
        got += window.piece(2000 - len(got))
    assert got == data[2510:4510] and window.offset == 4510
    assert window.peek(10_000) == data[4510:]
    with pytest.raises(InputError, match="input is truncated at byte 5000"):
        window.skip(491)


def test_a_file_that_shrinks_is_truncated() -> None:
    with tempfile.TemporaryFile() as stream:
        stream.write(b"x" * 100)
        stream.flush()
        blocks = FileBlocks(stream.fileno(), 50, 100, "f")
        assert blocks.block() == b"x" * 50 and blocks.block() == b""
        assert blocks.skip(80) == 50
