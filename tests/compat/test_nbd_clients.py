"""The server judged by the clients people use: nbdinfo, nbdcopy, qemu-img, qemu-io, fio, nbdkit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.blocksource import BlockSource, BytesSource, MemoryDisk
from dsec_layers.fuse.nbd import Export, LocalDisk, LocalFile, Server, run_captive
from dsec_layers.proc import run
from dsec_layers.progress import SILENT
from tests.kit.tools import need

MIB = 1 << 20
SIZE = 24 * MIB


class Strict:
    """A progress for which every warning is a failure of the test, at its end."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.task = SILENT.task
        self.info = self.debug = SILENT.info

    def warning(self, message: str) -> None:
        """Kept."""
        self.warnings.append(message)


def sparse_image(path: Path) -> bytes:
    """An image with data and holes in it, and its bytes."""
    rng = random.Random(3)
    with open(path, "wb") as stream:
        stream.truncate(SIZE)
        for offset, length in ((0, 100_000), (3 * MIB, 2 * MIB), (9 * MIB + 4096, 4096), (SIZE - MIB, MIB)):
            stream.seek(offset)
            stream.write(rng.randbytes(length))
    return path.read_bytes()


@pytest.fixture(params=["file", "workers"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[BlockSource, bytes]]:
    """A read-only source that leaves by sendfile, and one that is read by worker threads; with its bytes."""
    path = tmp_path / "image"
    data = sparse_image(path)
    if request.param == "file":
        with LocalFile(path) as source:
            yield source, data
    else:
        yield BytesSource(data), data


@pytest.fixture(params=["file", "workers"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockSource]:
    """A writable source of zeros."""
    if request.param == "file":
        path = tmp_path / "disk"
        with open(path, "wb") as stream:
            stream.truncate(SIZE)
        with LocalDisk(path) as source:
            yield source
    else:
        yield MemoryDisk(SIZE)


@pytest.fixture
def progress() -> Iterator[Strict]:
    """Fails a test whose server complained."""
    strict = Strict()
    yield strict
    assert strict.warnings == []


def test_nbdinfo_reads_what_is_offered(disk: BlockSource, tmp_path: Path, progress: Strict) -> None:
    need("nbdinfo")
    exports = [Export(disk, "disk", "a disk", preferred_block=65536), Export(disk, "image", read_only=True)]
    with Server(exports, unix=tmp_path / "s", progress=progress) as server:
        listed = json.loads(run(["nbdinfo", "--list", "--json", server.uri()], timeout=60).stdout)
        assert listed["protocol"] == "newstyle-fixed"
        assert listed["structured"] is True
        writable, read_only = listed["exports"]
        assert (writable["export-name"], writable["description"], writable["export-size"]) == ("disk", "a disk", SIZE)
        assert [writable[f"block_size_{kind}"] for kind in ("minimum", "preferred", "maximum")] == [1, 65536, 32 * MIB]
        assert writable["contexts"] == read_only["contexts"] == ["base:allocation"]
        for verb in ("flush", "fua", "trim", "zero", "fast_zero"):
            assert (writable[f"can_{verb}"], read_only[f"can_{verb}"]) == (True, False)
        for entry in (writable, read_only):
            assert entry["can_multi_conn"] and entry["can_df"]
        assert (writable["is_read_only"], read_only["is_read_only"]) == (False, True)
        assert run(["nbdinfo", "--size", server.uri("disk")]).stdout == b"%d\n" % SIZE
        assert run(["nbdinfo", server.uri("nope")], check=False).code != 0


def test_nbdinfo_maps_holes(tmp_path: Path, progress: Strict) -> None:
    need("nbdinfo")
    data = sparse_image(tmp_path / "image")
    with LocalFile(tmp_path / "image") as source, Server([Export(source)], unix=tmp_path / "s", progress=progress) as server:
        extents = json.loads(run(["nbdinfo", "--map", "--json", server.uri()], timeout=60).stdout)
    assert sum(extent["length"] for extent in extents) == SIZE
    assert {extent["type"] for extent in extents} == {0, 3}
    for extent in extents:
        if extent["type"] == 3:
            assert data[extent["offset"] : extent["offset"] + extent["length"]] == bytes(extent["length"])


def test_nbdcopy_out(image: tuple[BlockSource, bytes], tmp_path: Path) -> None:
    need("nbdcopy")
    source, data = image
    for options in ([], ["--no-extents", "--connections=8", "--requests=128"], ["--synchronous"]):
        out = tmp_path / "out"
        assert run_captive([Export(source)], ["nbdcopy", *options, "$uri", str(out)]) == 0
        assert out.read_bytes() == data
        out.unlink()


def test_nbdcopy_in_by_several_connections(disk: BlockSource, tmp_path: Path) -> None:
    need("nbdcopy")
    data = sparse_image(tmp_path / "source")
    command = ["nbdcopy", "--connections=4", "--requests=32", "--request-size=131072", "--flush", str(tmp_path / "source"), "$uri"]
    assert run_captive([Export(disk)], command) == 0
    assert disk.pread(0, SIZE) == data


def test_nbdcopy_between_two_exports(image: tuple[BlockSource, bytes], disk: BlockSource, progress: Strict, tmp_path: Path) -> None:
    need("nbdcopy")
    with Server([Export(image[0], "from"), Export(disk, "to")], unix=tmp_path / "s", progress=progress) as server:
        run(["nbdcopy", "--flush", server.uri("from"), server.uri("to")], timeout=60)
    assert disk.pread(0, SIZE) == image[1]


def test_qemu_img_compares_and_converts(image: tuple[BlockSource, bytes], disk: BlockSource, tmp_path: Path, progress: Strict) -> None:
    need("qemu-img")
    local = tmp_path / "local"
    local.write_bytes(image[1])
    exports = [Export(image[0], "image"), Export(disk, "disk")]
    with Server(exports, unix=tmp_path / "s", progress=progress) as server:
        run(["qemu-img", "compare", "-f", "raw", "-F", "raw", server.uri("image"), local], timeout=60)
        run(["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", server.uri("image"), server.uri("disk")], timeout=60)
        run(["qemu-img", "compare", "-f", "raw", "-F", "raw", server.uri("disk"), local], timeout=60)
        run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", server.uri("image"), tmp_path / "q"], timeout=60)
        run(["qemu-img", "compare", "-f", "raw", "-F", "qcow2", server.uri("image"), tmp_path / "q"], timeout=60)
        mapped = json.loads(run(["qemu-img", "map", "-f", "raw", "--output=json", server.uri("image")], timeout=60).stdout)
        assert sum(extent["length"] for extent in mapped) == SIZE
    assert disk.pread(0, SIZE) == image[1]


def test_qemu_io_writes_zeroes_discards_and_flushes(disk: BlockSource, tmp_path: Path, progress: Strict) -> None:
    need("qemu-io")
    commands = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 1M 64k",  # FUA
        "write -P 0x33 1234567 777",
        "write -z 2M 1M",
        "write -z -u 3M 1M",  # may unmap
        "write -P 0x44 4M 4M",
        "write -z -u -n 4M 64k",  # only if it is fast
        "discard 5M 1M",
        "flush",
        "read -P 0x11 0 1M",
        "read -P 0x22 1M 64k",
        "read -P 0x33 1234567 777",
        "read -P 0 2M 2M",
        "read -P 0x44 6M 2M",
    ]
    arguments = [part for command in commands for part in ("-c", command)]
    with Server([Export(disk)], unix=tmp_path / "s", progress=progress) as server:
        done = run(["qemu-io", "-f", "raw", *arguments, server.uri()], timeout=60, check=False)
    output = done.stdout.decode()
    assert "Pattern verification failed" not in output
    fast_zero = getattr(disk, "fast_zero", False)
    assert (done.code, "Operation not supported" in output) == ((0, False) if fast_zero else (1, True)), output
    assert disk.pread(1234567, 777) == b"\x33" * 777


def test_qemu_img_respects_block_sizes(tmp_path: Path, progress: Strict) -> None:
    need("qemu-img", "qemu-io")
    source = MemoryDisk(SIZE)
    with Server([Export(source, minimum_block=4096, preferred_block=65536)], unix=tmp_path / "s", progress=progress) as server:
        run(["qemu-io", "-f", "raw", "-c", "write -P 0x77 100 5000", "-c", "read -P 0x77 100 5000", server.uri()], timeout=60)
    assert source.pread(0, 8192) == bytes(100) + b"\x77" * 5000 + bytes(8192 - 5100)


@pytest.mark.slow
def test_fio_verifies_random_writes(disk: BlockSource, tmp_path: Path, progress: Strict) -> None:
    need("fio")
    with Server([Export(disk)], unix=tmp_path / "s", progress=progress) as server:
        out = tmp_path / "fio.json"
        run(
            [
                *("fio", "--name=verify", "--ioengine=nbd", f"--uri={server.uri()}", "--rw=randrw", "--bsrange=512-128k", "--size=8M"),
                *("--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--numjobs=3", "--offset_increment=8M"),
                *("--randseed=7", "--fsync=64", "--output-format=json", f"--output={out}"),
            ],
            timeout=120,
            cwd=tmp_path,
        )
        jobs = json.loads(out.read_text())["jobs"]
    assert [job["error"] for job in jobs] == [0, 0, 0]
    assert all(job["write"]["total_ios"] > 50 and job["read"]["total_ios"] > 50 for job in jobs)


def test_nbdkit_proxies(image: tuple[BlockSource, bytes], tmp_path: Path) -> None:
    """nbdkit's own client side, with several connections of its own client."""
    need("nbdkit", "nbdcopy")
    out = tmp_path / "out"
    # In a file, because the $uri here is nbdkit's own and not to be replaced.
    script = tmp_path / "script"
    script.write_text(f"nbdkit -U - nbd socket=$unixsocket --run 'nbdcopy \"$uri\" {out}'")
    assert run_captive([Export(image[0])], ["sh", str(script)]) == 0
    assert out.read_bytes() == image[1]
