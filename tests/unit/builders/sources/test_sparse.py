"""Sparse files in tars (B8): the four encodings of GNU tar, maps that lie, and a file of 5 GiB of which next to nothing is stored."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.builders.names import Limits
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.blocks import StreamBlocks
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.builders.sources.merge import merge_layers
from dsec_layers.builders.sources.tar import TarReader
from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import InputError, LimitError
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_tars, snapshot_tree
from tests.kit.tars import ingest
from tests.unit.builders.sources.test_tar import END, pax, raw_header

ENCODINGS = {
    "S": ["--format=gnu"],
    "0.0": ["--format=posix", "--sparse-version=0.0"],
    "0.1": ["--format=posix", "--sparse-version=0.1"],
    "1.0": ["--format=posix", "--sparse-version=1.0"],
}
GIB = 1 << 30
PROBES = {0: b"first" * 1000, 4 * GIB - 1: b"below and above the 32-bit line" * 200, 5 * GIB + 12345 - 7: b"the end"}


def sparse_tree(root: Path) -> None:
    with open(root / "big", "wb") as stream:
        stream.truncate(5 * GIB + 12345)
        for offset, data in PROBES.items():
            os.pwrite(stream.fileno(), data, offset)
    with open(root / "many", "wb") as stream:
        for number in range(150):
            os.pwrite(stream.fileno(), b"%d" % number * 100, number * 65536)
        stream.truncate(150 * 65536 + 999)
    with open(root / "hole", "wb") as stream:
        stream.truncate(1 << 22)
    (root / "z-plain").write_bytes(b"after all of them")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sparse")
    sparse_tree(root)
    return root


@pytest.mark.parametrize("encoding", ["directory", *ENCODINGS])
def test_b8_sparse_files_beyond_4_gib(tree: Path, tmp_path: Path, encoding: str) -> None:
    sink = MemorySink()
    if encoding == "directory":
        root = DirectorySource(tree).ingest(sink).root
    else:
        archive = tmp_path / "a.tar"
        proc.run(["tar", "-C", tree, "-S", *ENCODINGS[encoding], "-cf", archive, "big", "many", "hole", "z-plain"])
        assert archive.stat().st_size < 4 << 20
        root = TarSource(archive).ingest(sink).root
    assert root.children is not None
    big, many, hole, plain = (root.children[name] for name in (b"big", b"many", b"hole", b"z-plain"))
    assert big.size == 5 * GIB + 12345 and hole.size == 1 << 22
    for offset, data in PROBES.items():
        at, piece = next((at, piece) for at, piece in sink.pieces[big] if at <= offset < at + len(piece))
        found = piece[offset - at :] + b"".join(more for start, more in sink.pieces[big] if start > at)
        assert found.startswith(data)
    stored = sum(len(piece) for _, piece in sink.pieces[big])
    assert stored < 1 << 20 and sink.holes[big] == big.size - stored
    assert sink.pieces[hole] == [] and sink.holes[hole] == 1 << 22
    assert sink.content(many) == (tree / "many").read_bytes() and sink.holes[many] > 0
    assert sink.content(plain) == b"after all of them"


def same(data: bytes) -> Snapshot:
    tree, sink, found = ingest(data)
    assert diff(found, snapshot_tars([data])) == []
    return snapshot_tree(tree, sink.content)


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def version_1(text: bytes, data: bytes = b"", real: bytes = b"20") -> bytes:
    body = block(text) + data
    head = pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", b"f"), (b"GNU.sparse.realsize", real))
    return head + raw_header(b"./GNUSparseFile.1/f", b"%011o\0" % len(body)) + block(body) + END


def version_0(sparse: bytes, data: bytes = b"", real: bytes = b"20", count: bytes = b"1") -> bytes:
    head = pax((b"GNU.sparse.size", real), (b"GNU.sparse.numblocks", count), (b"GNU.sparse.map", sparse))
    return head + raw_header(b"f", b"%011o\0" % len(data)) + block(data) + END


def old(*entries: tuple[int, int], real: int = 20, data: bytes = b"", more: bool = False) -> bytes:
    text = b"".join(b"%011o\0%011o\0" % entry for entry in entries)
    fields = {"at386": text, "at482": bytes([more]), "at483": b"%011o\0" % real}
    return raw_header(b"f", b"%011o\0" % len(data), b"S", b"ustar  \0", **fields) + block(data) + END


def test_maps_by_hand() -> None:
    for data in (
        version_1(b"2\n3\n2\n10\n4\n", b"abcdef"),
        version_0(b"3,2,10,4", b"abcdef", count=b"2"),
        old((3, 2), (10, 4), data=b"abcdef"),
        version_0(b"3,2,10,4,20,0", b"abcdef", count=b"3"),
        old((3, 2), (10, 4), (20, 0), data=b"abcdef"),
    ):
        found = same(data)
        assert found[b"f"].size == 20
    assert ingest(version_0(b"", real=b"7"))[2][b"f"].size == 7  # tarfile trips over the empty list
    assert same(version_1(b"0\n", real=b"9"))[b"f"].size == 9
    assert same(old(real=11))[b"f"].size == 11


@pytest.mark.parametrize(
    "data",
    [
        version_0(b"0,5,3,5", b"x" * 10),  # overlap
        version_0(b"10,5,0,5", b"x" * 10),  # order
        version_0(b"18,5", b"x" * 5),  # beyond the end
        version_0(b"0,5", b"x" * 6),  # more stored
        version_0(b"0,5", b"x" * 4),  # less stored
        version_0(b"0,5,9", b"x" * 5),
        version_0(b"0,-5", b""),
        version_0(b"0,five", b"x" * 5),
        version_0(b"0,5", b"x" * 5, real=b"-1"),
        version_1(b"1\n0\n5", b"x" * 5),
        version_1(b"2000000\n", b""),
        version_1(b"-1\n", b""),
        version_1(b"1\n0\n5\n", b"x" * 5, real=b""),
        version_1(b"1\n" + b"0" * 600, b"x" * 1000),
        version_1(b"1\n18446744073709551615\n5\n", b"x" * 5),
        old((0, 5), (3, 5), data=b"x" * 10),
        old((0, 5), data=b"x" * 6),
        old((1 << 32, 5), data=b"x" * 5),
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.offset", b"0")) + raw_header(b"f") + END,
        pax((b"GNU.sparse.major", b"2"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.realsize", b"20")) + raw_header(b"f") + END,
        pax(
            (b"GNU.sparse.realsize", b"20"),
        )
        + raw_header(b"f")
        + END,
        pax(
            (b"SCHILY.realsize", b"20"),
        )
        + raw_header(b"f")
        + END,
    ],
)
def test_maps_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        ingest(data)


def test_a_truncated_sparse_file_is_noticed() -> None:
    data = version_1(b"1\n0\n20\n", b"x" * 20)
    for cut in range(len(pax((b"a", b"b"))), len(data) - len(END), 64):
        if cut % 512:
            with pytest.raises(InputError):
                TarSource(io.BytesIO(data[:cut])).ingest(MemorySink())


def holes(count: int, real: int) -> bytes:
    """That many files of ``real`` bytes of which nothing is stored, a kilobyte each."""
    return (
        b"".join(raw_header(b"f%d" % n, b"%011o\0" % 0, b"S", b"ustar  \0", at483=b"\x80" + real.to_bytes(11)) for n in range(count)) + END
    )


class Counting(MemorySink):
    """Counts files instead of keeping them."""

    files = 0

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        assert sum(piece if isinstance(piece, int) else len(piece) for piece in pieces) == size
        self.files += 1


def test_b1_holes_are_bounded_in_their_sum() -> None:
    """64 TiB of holes cost 32 MiB of extents; eight such files are all that the default allows."""
    whole = 64 << 40
    for count in (8, 9):
        sink = Counting()
        source = TarSource(io.BytesIO(holes(count, whole)), "x.tar")
        if count == 8:
            source.ingest(sink)
        else:
            with pytest.raises(LimitError, match=r"x.tar: 'f8' with its \d+ bytes of holes goes over") as caught:
                source.ingest(sink)
            assert caught.value.hint is not None and "--limit holes=" in caught.value.hint
        assert sink.files == 8
    TarSource(io.BytesIO(holes(9, whole)), limits=Limits.of({"holes": 9 << 22})).ingest(Counting())


def test_b1_holes_are_summed_over_the_layers_of_an_image_and_in_directories(tmp_path: Path) -> None:
    limits = Limits.of({"holes": 100})
    names = [raw_header(b"%d" % n, b"%011o\0" % 0, b"S", b"ustar  \0", at483=b"%011o\0" % (60 << 16)) + END for n in range(2)]

    class Layer:
        def __init__(self, data: bytes) -> None:
            self.data = data

        @contextmanager
        def open(self) -> Iterator[TarReader]:
            yield TarReader(StreamBlocks(io.BytesIO(self.data), "layer"), "layer")

    merge_layers([Layer(names[0]), Layer(names[0])], Counting(), limits)
    with pytest.raises(LimitError, match="limit of 100 chunks"):
        merge_layers([Layer(data) for data in names], Counting(), limits)
    for name in ("a", "b"):
        with open(tmp_path / name, "wb") as stream:
            stream.truncate(60 << 16)
    with pytest.raises(LimitError, match="'b' with its"):
        DirectorySource(tmp_path, limits=limits).ingest(Counting())
