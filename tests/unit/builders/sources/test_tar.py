"""The tar reader: formats and spellings, judged by ``tarfile``; limits; hostile input."""

from __future__ import annotations

import base64
import gzip
import io
import os
import stat
import sys
import tarfile
import threading
from pathlib import Path
from typing import Literal

import pytest
import zstandard

from dsec_layers import proc
from dsec_layers.builders import names
from dsec_layers.builders.names import MEMORY_BOUND, Limits, Overrides, memory_of
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.merge import Merger
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import DsecError, InputError, LimitError, UsageError
from dsec_layers.layers.frames import Bound
from dsec_layers.progress import Task
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_tars
from tests.kit.tars import Entry, directory, entry, file, hard_link, ingest, make_tar, node, symlink

Format = Literal[0, 1, 2]
ROOT = Path(__file__).resolve().parents[4]
_FORMATS = (0, 1, 2)  # ustar, GNU, PAX


def same(data: bytes) -> Snapshot:
    """The snapshot of an archive, after it was found equal to the reference's."""
    _, _, found = ingest(data)
    assert diff(found, snapshot_tars([data])) == []
    return found


def refused(data: bytes, *words: str) -> DsecError:
    with pytest.raises((InputError, LimitError)) as caught:
        ingest(data)
    for word in words:
        assert word in caught.value.message
    return caught.value


def raw_header(name: bytes, size: bytes = b"00000000000\0", kind: bytes = b"0", magic: bytes = b"ustar\x0000", **fields: bytes) -> bytes:
    """A header from raw fields, with the right checksum; ``fields`` are offset and bytes, as in ``at345=b"..."``."""
    block = bytearray(512)
    for at, text in (
        (0, name),
        (100, b"0000644\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, size),
        (136, b"00000000000\0"),
        (156, kind),
        (257, magic),
    ):
        block[at : at + len(text)] = text
    for key, text in fields.items():
        at = int(key[2:])
        block[at : at + len(text)] = text
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """An extended header from raw records."""
    body = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        body += b"%d" % length + rest
    return raw_header(b"pax", b"%011o\0" % len(body), kind) + body + bytes(-len(body) % 512)


END = bytes(1024)


@pytest.mark.parametrize("form", _FORMATS)
def test_every_kind_of_entry(form: Format) -> None:
    found = same(
        make_tar(
            directory("./", mode=0o711, mtime=5),
            directory("./d", mode=0o1777, uid=1000, gid=2000, mtime=77),
            file("./d/f", b"content" * 999, mode=0o4755, uid=7, gid=8, mtime=1234567890),
            file("./d/empty"),
            hard_link("./d/hard", "./d/f"),
            symlink("./s", "../outside/d"),
            node("./c", tarfile.CHRTYPE, 5, 259),
            node("./b", tarfile.BLKTYPE, 259, 70000),
            node("./p", tarfile.FIFOTYPE),
            form=form,
        )
    )
    assert found[b"d/f"].nlink == 2 and found[b"d/f"].names == (b"d/f", b"d/hard")
    assert found[b"c"].rdev == (5, 259) and found[b"b"].rdev == (259, 70000)
    assert (found[b""].mode, found[b""].mtime) == (0o711, 5 * 10**9)


@pytest.mark.parametrize("form", _FORMATS)
def test_long_names(form: Format) -> None:
    deep = "/".join(["directory" * 3] * 5)
    entries = [file(f"{deep}/{'n' * 90}", b"x"), file("short", b"y")]
    if form:
        entries += [file("é" * 127, b"z"), symlink("link", "t" * 3000), hard_link("hard" * 30, f"{deep}/{'n' * 90}")]
    same(make_tar(*entries, form=form))


def test_fractions_of_a_second_and_times_before_1970() -> None:
    found = same(make_tar(*(file(f"f{i}", mtime=0, pax={"mtime": text}) for i, text in enumerate(
        ["1.5", "1.000000001", "1.0000000019", "-1.5", "-0.25", "-2", "12345678901.123456789", "3.", "1e-05", "1.5e3", "-1e-9"]
    ))))  # fmt: skip
    assert found[b"f3"].mtime == -1_500_000_000
    assert [found[b"f%d" % i].mtime % 10**9 for i in range(3)] == [500_000_000, 1, 1]


def test_base_256_numbers() -> None:
    big = (0o1 << 31).to_bytes(12)
    block = raw_header(b"f", b"\x80" + (5).to_bytes(11), at108=b"\x80" + (3_000_000_000).to_bytes(7), at136=b"\x80" + big[1:])
    old = raw_header(b"g", at136=b"\xff" * 11 + b"\xfe")
    found = same(block + b"hello".ljust(512, b"\0") + old + END)
    assert (found[b"f"].uid, found[b"f"].size, found[b"f"].mtime) == (3_000_000_000, 5, (1 << 31) * 10**9)
    assert found[b"g"].mtime == -2 * 10**9


def test_numbers_amid_blanks_and_without_terminators() -> None:
    same(raw_header(b"f", b"          5 ", at100=b"   644 \0", at108=b"00001750") + b"hello".ljust(512, b"\0") + END)


def test_signed_checksums_of_old_tars() -> None:
    block = bytearray(raw_header("é".encode()))
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256 - 256 * 2)
    same(bytes(block) + END)


def test_v7_and_star_headers() -> None:
    v7 = raw_header(b"dir/", kind=b"\0", magic=b"\0" * 8) + raw_header(b"dir/f", kind=b"\0", magic=b"\0" * 8, at345=b"junk")
    star = raw_header(b"f2", at345=b"dir", at476=b"00000000017\0", at508=b"tar\0")
    gnu = raw_header(b"dir/g", magic=b"ustar  \0", at345=b"00000000017\0")
    _, _, found = ingest(v7 + star + gnu + END)
    assert sorted(found) == [b"", b"dir", b"dir/f", b"dir/f2", b"dir/g"]
    assert found[b"dir"].type == "dir"


def test_contiguous_files_dump_directories_and_volume_labels() -> None:
    data = raw_header(b"label", kind=b"V") + raw_header(b"c", b"00000000003\0", b"7") + b"abc".ljust(512, b"\0")
    data += raw_header(b"d/", b"00000000004\0", b"D") + b"Yx\0\0".ljust(512, b"\0") + raw_header(b"d/x") + END
    _, _, found = ingest(data)
    assert {path: node.type for path, node in found.items()} == {b"": "dir", b"c": "file", b"d": "dir", b"d/x": "file"}


@pytest.mark.parametrize("kind", [b"M", b"N", b"A", b"\x80"])
def test_unknown_entry_types_are_refused(kind: bytes) -> None:
    refused(raw_header(b"odd", kind=kind) + END, "odd")


# -- B cases


@pytest.mark.parametrize("packed", ["plain", "gzip"])
def test_b1_pax_global_header(packed: str) -> None:

    data = pax((b"comment", b"0123456789abcdef"), (b"uid", b"42"), (b"mtime", b"99.25"), kind=b"g")
    data += make_tar(file("a", b"1"), file("b", b"2", pax={"uid": "7"}), end=False)
    data_no_deletion = data  # tarfile takes an empty value for 0; POSIX says that it deletes
    data += pax((b"uid", b""), kind=b"g") + make_tar(file("c", b"3", uid=5))
    same(data_no_deletion)
    _, _, found = ingest(data if packed == "plain" else gzip.compress(data))
    assert [found[name].uid for name in (b"a", b"b", b"c")] == [42, 7, 5]
    assert found[b"a"].mtime == 99_250_000_000


def test_b3_binary_attributes() -> None:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    odd = b"\0\xff\n=" + bytes(range(256))
    data = pax(
        (b"hdrcharset", b"BINARY"),
        (b"SCHILY.xattr.security.capability", capability),
        (b"SCHILY.xattr.user.odd", odd),
        (b"SCHILY.xattr.user.empty", b""),
        (b"SCHILY.xattr.user.a%3Db%25", b"gnu"),
        (b"LIBARCHIVE.xattr.user.%c3%a9", base64.b64encode(b"\0v").rstrip(b"=")),
        (b"LIBARCHIVE.xattr.user.odd", base64.b64encode(odd)),
    )
    found = same(data + raw_header(b"f") + END)
    assert found[b"f"].xattrs == {
        b"security.capability": capability, b"user.odd": odd, b"user.empty": b"", b"user.a=b%": b"gnu", "user.é".encode(): b"\0v",
    }  # fmt: skip


def test_b4_attributes_at_the_limits() -> None:
    longest = b"user." + b"n" * 250
    data = pax((b"SCHILY.xattr.user.v", b"v" * 65535), (b"SCHILY.xattr." + longest, b"x")) + raw_header(b"f")
    data += pax(*((b"SCHILY.xattr.user.%03d" % i, b"%d" % i) for i in range(500))) + raw_header(b"many") + END
    found = same(data)
    assert len(found[b"many"].xattrs) == 500 and len(found[b"f"].xattrs[b"user.v"]) == 65535


def test_b4_attributes_over_the_limits() -> None:
    refused(pax((b"SCHILY.xattr.user.big", b"v" * 65536)) + raw_header(b"some/file") + END, "'some/file'", "'user.big'", "65536")
    refused(pax((b"SCHILY.xattr.user." + b"n" * 251, b"v")) + raw_header(b"some/file") + END, "'some/file'", "'user.nnn", "256")
    body = pax(*((b"SCHILY.xattr.user.%d" % i, b"v" * 60000) for i in range(20)))
    refused(body + raw_header(b"f") + END, "limit of 1048576")
    with pytest.raises(LimitError, match="5000 bytes in all"):
        limits = Limits(attribute_bytes=5000)
        data = (pax((b"SCHILY.xattr.user.v", b"v" * 2000)) + raw_header(b"f")) * 3 + END
        TarSource(io.BytesIO(data), limits=limits).ingest(MemorySink())


def test_attributes_that_no_layer_carries_are_reported() -> None:
    said: list[str] = []

    class Listener:
        def task(self, title: str, *, total: int | None = None, unit: str = "B") -> object:
            from dsec_layers.progress import SILENT

            return SILENT.task(title, total=total, unit=unit)

        def warning(self, message: str) -> None:
            said.append(message)

    data = pax(
        (b"SCHILY.xattr.trusted.overlay.redirect", b"/x"), (b"SCHILY.xattr.com.apple.thing", b"1"), (b"SCHILY.acl.access", b"user::rw-")
    )
    data += raw_header(b"f") + make_tar(node("dev0", tarfile.CHRTYPE))
    tree = TarSource(io.BytesIO(data)).ingest(MemorySink(), Listener())  # type: ignore[arg-type]
    assert tree.root.children is not None and tree.root.children[b"f"].xattrs == ()
    assert len(said) == 2 and "0/0" in said[0] and "trusted.overlay.redirect" in said[1] and "SCHILY.acl.access" in said[1]


def test_b6_unusual_but_legal() -> None:
    data = make_tar(
        file("no/parents/here", b"1"),
        file("./dotted", b"2"),
        file("/leading/slash", b"3"),
        directory("no", mode=0o700, mtime=3),
        file(".//no/./parents//twice", b"4"),
        directory("/", mode=0o750, mtime=9),
        form=1,
    )
    found = same(data + b"\xde\xad" * 5000)
    assert (found[b"no/parents"].mode, found[b"no/parents"].uid, found[b"no/parents"].mtime) == (0o755, 0, 0)
    assert found[b"no"].mode == 0o700 and found[b""].mode == 0o750
    assert same(data + bytes(1 << 20)) == found


def test_b6_slash_at_the_end_of_a_file() -> None:
    _, _, found = ingest(raw_header(b"empty/") + raw_header(b"full/", b"00000000002\0") + b"ab".ljust(512, b"\0") + END)
    assert found[b"empty"].type == "dir"  # as GNU tar has it
    assert (found[b"full"].type, found[b"full"].size) == ("file", 2)


def test_b9_empty_archives() -> None:
    for data in (b"", bytes(1024), bytes(512), bytes(10240)):
        _, sink, found = ingest(data)
        assert list(found) == [b""] and not sink.pieces
        assert (found[b""].mode, found[b""].mtime) == (0o755, 0)
    assert same(make_tar(directory("a"), directory("a/b"))).keys() == {b"", b"a", b"a/b"}


# -- truncation and lies


def test_truncation_anywhere_is_noticed() -> None:
    data = make_tar(file("a", b"x" * 700), directory("d"), file("d/b", b"y" * 1100), end=False)
    boundaries = {0, 512 + 1024, 512 + 1024 + 512, len(data)}
    for cut in range(0, len(data) + 1, 17):
        if cut not in boundaries:
            refused(data[:cut], "truncated")
    for cut in boundaries:
        ingest(data[:cut])


def test_a_lying_size_is_noticed() -> None:
    refused(raw_header(b"liar", b"77777777777\0") + b"x" * 4096, "truncated", "'liar'")
    refused(raw_header(b"liar", b"00000001000\0") + b"x" * 512 + raw_header(b"next") + b"junk".ljust(512) + END)
    refused(raw_header(b"liar", b"\xff" * 12) + END)
    refused(pax((b"size", b"99999999999999999999")) + raw_header(b"liar") + END)


def test_damaged_headers_are_noticed() -> None:
    data = bytearray(make_tar(file("a", b"x"), file("b", b"y")))
    data[1024] ^= 1
    refused(bytes(data), "damaged header at byte 1024")
    refused(b"no tar at all, but some text" * 100, "not a tar archive")
    for size in (b"0000000009x\0", b"-0000000005\0", b"0b000000005\0"):
        refused(raw_header(b"f", size) + END, "malformed number")


@pytest.mark.parametrize(
    "body",
    [
        b"5 a=b\n",
        b"x a=b\n",
        b"999 a=b\n",
        b"6 a=bb",
        b"4 ab\n",
        b"3 =\n",
        b"06 a=b\nx",
        b"-6 a=b\n",
        b" 6 a=b\n",
        b"18446744073709551616 a=b\n",
    ],
)
def test_malformed_extended_headers(body: bytes) -> None:
    refused(raw_header(b"pax", b"%011o\0" % len(body), b"x") + body.ljust(512, b"\0") + raw_header(b"f") + END)


def test_extended_headers_over_the_limits() -> None:
    refused(raw_header(b"pax", b"77777777777\0", b"x") + END, "extended header of 8589934591 bytes")
    refused(raw_header(b"long", b"77777777777\0", b"L") + END, "8589934591")
    refused((pax((b"comment", b"c" * 600_000)) * 2) + raw_header(b"f") + END, "over the limit")
    refused(pax((b"a", b"c" * 600_000), kind=b"g") + pax((b"b", b"c" * 600_000), kind=b"g") + END, "over the limit")
    refused(pax((b"path", b"f")), "extended header is the last thing")
    refused(pax((b"path", b"f")) + END, "extended header is the last thing")


def test_names_over_the_limits() -> None:
    same(pax((b"path", b"d/" * 1900 + b"n" * 255)) + raw_header(b"f") + END)
    refused(pax((b"path", b"d/" * 2100 + b"f")) + raw_header(b"f") + END, "4201 bytes")
    refused(pax((b"path", b"d/" + b"n" * 256)) + raw_header(b"f") + END, "256 bytes", "limit of 255")
    refused(pax((b"path", b"n" * 256 + b"/f")) + raw_header(b"f") + END, "256 bytes", "limit of 255")
    refused(pax((b"path", b"a\0b")) + raw_header(b"f") + END, "NUL")
    refused(pax((b"linkpath", b"t" * 4097)) + raw_header(b"f", kind=b"2") + END, "4097 bytes")
    refused(raw_header(b"") + END, "no name")
    refused(raw_header(b"f", kind=b"2") + END, "no target")


def test_ids_and_devices_out_of_range() -> None:
    refused(pax((b"uid", b"4294967295")) + raw_header(b"f") + END, "4294967295")
    refused(pax((b"gid", b"-1")) + raw_header(b"f") + END, "-1")
    refused(pax((b"uid", b"root")) + raw_header(b"f") + END, "root")
    refused(raw_header(b"f", at108=b"\xff" * 8) + END, "-1")
    refused(raw_header(b"f", kind=b"3", at329=b"0010000\0") + END, "4096:0")
    refused(pax((b"mtime", b"0x10")) + raw_header(b"f") + END, "0x10")
    refused(pax((b"mtime", b"1e999")) + raw_header(b"f") + END, "out of range")
    refused(pax((b"mtime", b"9" * 19)) + raw_header(b"f") + END, "out of range")


def test_memory_for_entries_is_bounded() -> None:
    data = b"".join(pax((b"path", b"%d/" % i + b"d/" * 1000 + b"f")) + raw_header(b"f") for i in range(4)) + END
    with pytest.raises(LimitError, match="more than 3000 files"):
        TarSource(io.BytesIO(data), limits=Limits(inodes=3000)).ingest(MemorySink())
    TarSource(io.BytesIO(data), limits=Limits(inodes=4009)).ingest(MemorySink())


# -- content


def test_content_across_blocks_comes_whole_or_in_pieces() -> None:
    sizes = [0, 1, 511, 512, 513, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_500_000, 70_000, 1 << 20]
    data = make_tar(*(file(f"f{i}", os.urandom(size)) for i, size in enumerate(sizes)))
    calls: list[tuple[str, int]] = []

    class Sink(MemorySink):
        def whole(self, inode, data) -> None:  # type: ignore[no-untyped-def]
            calls.append(("whole", len(data)))
            super().whole(inode, data)

        def stream(self, inode, size, pieces) -> None:  # type: ignore[no-untyped-def]
            calls.append(("stream", size))
            super().stream(inode, size, pieces)

    sink = Sink()
    tree = TarSource(io.BytesIO(data)).ingest(sink)
    assert calls == [("stream" if size > 1 << 20 else "whole", size) for size in sizes]
    assert tree.root.children is not None
    same(data)


def test_a_sink_that_does_not_take_everything_does_no_harm() -> None:
    class Lazy(MemorySink):
        def stream(self, inode, size, pieces) -> None:  # type: ignore[no-untyped-def]
            next(iter(pieces))

    sink = Lazy()
    tree = TarSource(io.BytesIO(make_tar(file("big", bytes(5 << 20)), file("after", b"here")))).ingest(sink)
    assert tree.root.children is not None and sink.content(tree.root.children[b"after"]) == b"here"


def test_a_link_with_a_size() -> None:
    link = raw_header(b"l", b"00000001000\0", b"1", at157=b"f")
    head = raw_header(b"f", b"00000000003\0") + b"abc".ljust(512, b"\0")
    same(head + link + raw_header(b"after") + END)  # no content follows
    same(head + link + END)
    same(head + link)
    _, _, found = ingest(head + link + b"c" * 512 + raw_header(b"after") + END)  # POSIX pax -o linkdata: content follows
    assert found[b"l"].names == (b"f", b"l") and b"after" in found


# -- overrides and other ways in


def test_overrides() -> None:
    data = make_tar(
        file("d/old", mtime=5, uid=1), file("d/new", mtime=100, pax={"mtime": "50.000000001"}), directory("d", uid=3, mtime=200)
    )
    tree = TarSource(io.BytesIO(data), overrides=Overrides(uid=10, gid=20, epoch=50)).ingest(MemorySink())
    assert {(inode.uid, inode.gid) for _, inode in tree.walk()} == {(10, 20)}
    assert [(inode.mtime, inode.mtime_ns) for _, inode in tree.walk()] == [(0, 0), (50, 0), (50, 0), (5, 0)]
    for bad in ({"uid": -1}, {"gid": 1 << 32}, {"epoch": -5}):
        with pytest.raises(UsageError):
            Overrides(**bad)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    data = make_tar(file("f", b"abc")) + b"trailing" * 100_000
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "wb") as stream:
            stream.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        source = TarSource(reader, "pipe")
        tree = source.ingest(MemorySink())
        with pytest.raises(InputError, match="read already"):
            source.ingest(MemorySink())
    finally:
        thread.join()
        os.close(reader)
    assert tree.root.children is not None and stat.S_ISREG(tree.root.children[b"f"].mode)


def test_describe_tells_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(file("f")))
    before = TarSource(path).describe()
    assert before["kind"] == "tar" and before["name"] == str(path)
    path.write_bytes(make_tar(file("f"), file("g")))
    assert TarSource(path).describe() != before
    with pytest.raises(DsecError):
        TarSource(tmp_path / "none").ingest(MemorySink())


def test_progress_counts_the_bytes_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(file("f", bytes(3_000_000))))
    counted = 0

    class Counting:
        def task(self, title: str, *, total: int | None = None, unit: str = "B") -> Counting:
            assert title == str(path) and total == path.stat().st_size
            return self

        def __enter__(self) -> Task:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def advance(self, amount: int = 1) -> None:
            nonlocal counted
            counted += amount

        def total(self, amount: int | None) -> None:
            pass

    TarSource(path).ingest(MemorySink(), Counting())  # type: ignore[arg-type]
    assert counted == path.stat().st_size


def test_entries_without_a_parent_in_the_fast_path_and_the_root() -> None:
    refused(make_tar(entry(".", tarfile.REGTYPE, b"x")), "root")
    refused(make_tar(symlink("./", "x")), "root")
    refused(make_tar(hard_link(".", "x"), file("x")), "root")


def test_b1_entries_that_cost_more_than_their_bytes_are_worth_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MEMORY_BOUND.most(13 << 20) < 1_500_000 * memory_of(b"f0000000", Inode(0o100644)), "a known bomb"
    assert MEMORY_BOUND.most(60 << 20) > 2_000_000 * memory_of(b"usr/lib/node_modules/package/lib/file.js", Inode(0o100644)), (
        "a large honest one"
    )
    monkeypatch.setattr(names, "MEMORY_BOUND", Bound(1 << 30, 16 << 20, 32))
    compressor = zstandard.ZstdCompressor().compressobj()
    data = compressor.compress(raw_header(b"directory/file") * 30_000) + compressor.compress(END) + compressor.flush()
    assert len(data) < 10_000
    archive = tmp_path / "bomb.tar.zst"
    archive.write_bytes(data)
    with pytest.raises(LimitError, match=rf"up to 'directory/file' take \d+ bytes of memory, .* for {len(data)} bytes of input") as caught:
        TarSource(archive).ingest(MemorySink())
    assert caught.value.hint is not None and "--limit memory=SIZE" in caught.value.hint
    with pytest.raises(LimitError, match="bytes of memory"):
        TarSource(io.BytesIO(data)).ingest(MemorySink())
    TarSource(archive, limits=Limits.of({"memory": 1 << 30})).ingest(MemorySink())


@pytest.mark.parametrize(
    "entries",
    [
        [file(f"f{number}") for number in range(500)],
        [file("f"), *(hard_link(f"f{number}", "f") for number in range(500))],
        [symlink(f"s{number}", "t" * 3000) for number in range(50)],
        [file(f"f{number}", b"d" * 3000) for number in range(50)],
        [file(f"f{number}", pax={"SCHILY.xattr.user.a": "v" * 3000}) for number in range(50)],
        [file("/".join(["d"] * 500) + "/f"), file("g")],
        [file("./" * 1000 + f"{number}/f") for number in range(50)],
    ],
    ids=["files", "hard links", "targets", "inline", "attributes", "parents", "spellings"],
)
def test_b1_whatever_stays_in_memory_is_reckoned(entries: list[Entry]) -> None:
    data = make_tar(*entries)
    TarSource(io.BytesIO(data)).ingest(MemorySink())
    with pytest.raises(LimitError, match="bytes of memory"):
        TarSource(io.BytesIO(data), limits=Limits.of({"memory": 350_000})).ingest(MemorySink())


def test_b1_layers_are_reckoned_together() -> None:
    merger = Merger(Limits())
    for layer in range(3):
        merger.begin_layer(lambda: 1000)
        merger.add((b"f%d" % layer, Inode(0o100644), b""))
    tight = Merger(Limits.of({"memory": 2000}))
    tight.begin_layer(lambda: 1 << 30)
    tight.add((b"a", Inode(0o100644), b""))
    tight.begin_layer()
    tight.add((b"b", Inode(0o100644), b""))
    with pytest.raises(LimitError, match="for 1073741824 bytes of input"):
        tight.add((b"c", Inode(0o100644), b""))


_MEASURE = """
import io, resource, sys
from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.layers.descriptor import Kind
from dsec_layers.store.memory import MemoryStore
from tests.unit.builders.sources.test_tar import END, raw_header

class Entries(io.RawIOBase):
    at = 0
    def read(self, size=-1):
        first, self.at = self.at, min(self.at + 2000, COUNT)
        return b"".join(raw_header(b"dir%03d/file%07d" % (n // 1000, n)) for n in range(first, self.at)) + (END if first < self.at == COUNT else b"")

COUNT = int(sys.argv[1])
pack_layer(MemoryStore(), TarSource(Entries(), "x").ingest, kind=Kind.BASE, name="x:1")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_b1_an_entry_takes_no_more_memory_than_is_reckoned() -> None:
    few, many = (int(proc.run([sys.executable, "-c", _MEASURE, str(count)], cwd=ROOT).stdout) for count in (40_000, 140_000))
    assert (many - few) / 100_000 <= memory_of(b"dir000/file0000000", Inode(0o100644))
