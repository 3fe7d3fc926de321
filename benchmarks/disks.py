"""Disks: opening, committing, converting and serving, beside what others take for the same on the same machine.

    python -m benchmarks.disks [--tree DIR] [--size MIB] [--rounds N] [--only open,commit,convert,serve]

Run as root. Runs alternate; printed are medians of wall time. Targets: a stack of 50 layers with a million segments opens in less than a second and takes less
than 40 bytes of memory a segment; a commit runs at 0.8 of the disk's write rate; a tar becomes a committed ZFile disk in the time of ``tar -x``, ``mke2fs -d``
and ``lz4``; reads and writes over NBD at the speed of qemu-nbd on qcow2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.common import MIB, Usage, alternate, disk_usage, drop_caches, environment, measure, median, print_table, progress
from dsec_layers.disks.opener import private_pieces
from dsec_layers.disks.stored import StoredDisk, publish_layer
from dsec_layers.layers.disk import DiskLayer
from dsec_layers.overlaybd import Disk, LsmtLayer, Packing, ZFileOptions, merge
from dsec_layers.overlaybd.lsmt import Flags, Header
from dsec_layers.overlaybd.segments import Segments
from dsec_layers.store.open import open_store

LAYERS, SEGMENTS = 50, 1_000_000
DSEC = [sys.executable, "-P", "-m", "dsec_layers", "-q"]


class Bench:
    """A store, a cache and a place to work in."""

    def __init__(self, work: Path, rounds: int) -> None:
        self.work = work
        self.rounds = rounds
        self.env = dict(os.environ) | {"DSEC_STORE": str(work / "store"), "DSEC_CACHE": str(work / "cache")}

    def dsec(self, *argv: str | Path) -> Usage:
        return measure([*DSEC, *argv], env=self.env)

    def fresh(self, name: str) -> Path:
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True) if path.is_file() else None
        return path


class Blocks:
    """Data that compresses to about half, wherever it is read."""

    size = 1 << 40
    _half = os.urandom(1 << 20)

    def pread(self, offset: int, length: int) -> bytes:
        block = (self._half[:2048] + bytes(2048)) * -(-length // 4096)
        return block[:length]


def open_stack(bench: Bench) -> None:
    """Publish the layers, then open the whole from the store: first with nothing cached, then again."""
    store, made = open_store(str(bench.work / "store")), list[DiskLayer]()
    random = np.random.default_rng(1)
    size = SEGMENTS * 16 * 512
    for number in range(LAYERS):
        progress(f"layer {number + 1} of {LAYERS}")
        lba = np.sort(random.choice(SEGMENTS, SEGMENTS // LAYERS, replace=False)).astype(np.int64) * 16 + number % 8
        count = np.zeros(len(lba), np.int16)
        segments = Segments(lba, lba + 8, np.full(len(lba), 8, np.int64), count, count.astype(np.bool_))
        layer = LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=size), segments, (Blocks(),))
        made.append(publish_layer(store, merge([layer], Packing(zfile=ZFileOptions(), tar=True)), spool=bench.work, uuid=""))
    times: dict[str, list[float]] = {"nothing cached": [], "cached": []}
    found = 0
    for nth in range(bench.rounds):
        shutil.rmtree(bench.work / "cache", ignore_errors=True)
        with private_pieces(bench.work / "cache") as opener:
            for took in times.values():
                began = time.perf_counter()
                with StoredDisk(store, made, opener) as stored:
                    disk = Disk(stored.layers)
                    disk.pread(0, 4096)
                    took.append(time.perf_counter() - began)
                    found = len(disk._state.mapping)
        progress(f"round {nth + 1} of {bench.rounds}")
    columns = 8 + 8 + 8 + 2 + 1
    print(f"\nOpen a sealed disk: {LAYERS} layers, {SEGMENTS} segments ({found} in the stacked mapping, {columns} bytes each)")
    print_table(("", "seconds", "target"), [(name, f"{median(took):.2f}", "1.00") for name, took in times.items()])


def commit_upper(bench: Bench, size: int) -> None:
    """Commit an upper of ``size`` bytes beside writing as many bytes to a file with fsync."""
    data = (os.urandom(64 << 10) + bytes(64 << 10)) * 8  # a megabyte that LZ4 halves
    source = bench.work / "data"
    with open(source, "wb") as stream:
        stream.writelines(data for _ in range(size // MIB))

    def ours(format: str) -> Callable[[], Usage]:
        def call() -> Usage:
            disk = bench.fresh("disk")
            bench.dsec("disk", "create", disk, "--size", str(size))
            with served(bench, disk) as uri:
                measure(["nbdcopy", "--flush", source, uri])
            drop_caches()
            took = bench.dsec("disk", "commit", disk, "--name", "bench:1", "--format", format)
            shutil.rmtree(bench.work / "store")
            return took

        return call

    def plain() -> Usage:
        drop_caches()
        return measure(["dd", f"if={source}", f"of={bench.fresh('copy')}", "bs=1M", "conv=fsync", "status=none"])

    found = alternate({"commit --format lsmt": ours("lsmt"), "commit --format zfile": ours("zfile"), "dd conv=fsync": plain}, bench.rounds)
    base = median(use.wall for use in found["dd conv=fsync"])
    print(f"\nCommit an upper of {size // MIB} MiB, nothing cached")
    rows = []
    for name, uses in found.items():
        took = median(use.wall for use in uses)
        rows.append((name, f"{took:.2f}", f"{size / MIB / took:.0f}", f"{base / took:.2f}", f"{max(use.peak for use in uses) / MIB:.0f}"))
    print_table(("", "seconds", "MiB/s", "x dd", "peak MiB"), rows)


def convert_tar(bench: Bench, tree: Path) -> None:
    """A tar to a committed ZFile disk, beside unpacking it, mke2fs -d and lz4."""
    tar = bench.work / "tree.tar"
    measure(["tar", "-C", tree, "-cf", tar, "."])
    size = (tar.stat().st_size * 3 // 2 // MIB + 128) * MIB

    def ours() -> Usage:
        shutil.rmtree(bench.work / "store", ignore_errors=True)
        drop_caches()
        return bench.dsec("disk", "convert", tar, "--mkfs", "ext4", "--size", str(size), "--name", "bench:1")

    def theirs() -> Usage:
        root, raw, packed = bench.fresh("root"), bench.fresh("raw"), bench.fresh("raw.lz4")
        drop_caches()
        root.mkdir()
        command = f"tar -C {root} --numeric-owner -xpf {tar} && mke2fs -q -F -t ext4 -b 4096 -d {root} {raw} {size // 4096} && lz4 -q --sparse {raw} {packed} && sync {packed}"
        return measure(["sh", "-c", command])

    found = alternate({"disk convert --mkfs ext4": ours, "tar -x, mke2fs -d, lz4": theirs}, bench.rounds)
    base = median(use.wall for use in found["tar -x, mke2fs -d, lz4"])
    sizes = {
        "disk convert --mkfs ext4": disk_usage(bench.work / "store"),
        "tar -x, mke2fs -d, lz4": (bench.work / "raw.lz4").stat().st_size,
    }
    print(f"\nA tar of {tar.stat().st_size // MIB} MiB to a committed disk, nothing cached")
    rows = []
    for name, uses in found.items():
        took = median(use.wall for use in uses)
        rows.append((name, f"{took:.2f}", f"{median(use.cpu for use in uses):.2f}", f"{took / base:.2f}", f"{sizes[name] / MIB:.0f}"))
    print_table(("", "seconds", "cpu", "ratio", "MiB stored"), rows)


@contextmanager
def served(bench: Bench, disk: Path) -> Iterator[str]:
    bench.dsec("disk", "attach", disk, "--detach")
    try:
        yield f"nbd+unix:///?socket={disk / 'nbd.sock'}"
    finally:
        bench.dsec("disk", "detach", disk)


@contextmanager
def qemu_nbd(bench: Bench) -> Iterator[str]:
    image, sock = bench.fresh("image.qcow2"), bench.fresh("qemu.sock")
    measure(["qemu-img", "create", "-q", "-f", "qcow2", image, "1G"])
    with subprocess.Popen(["qemu-nbd", "-f", "qcow2", "-k", sock, "--cache=writeback", "-t", image]) as process:
        while not sock.exists():
            time.sleep(0.01)
        try:
            yield f"nbd+unix:///?socket={sock}"
        finally:
            process.terminate()


CASES = (("write 1 MiB x 8", "write", "1M", 8), ("read 1 MiB x 8", "read", "1M", 8), ("randread 4 KiB x 1", "randread", "4k", 1),
         ("randread 4 KiB x 16", "randread", "4k", 16), ("randwrite 4 KiB x 1", "randwrite", "4k", 1), ("randwrite 4 KiB x 16", "randwrite", "4k", 16))  # fmt: skip


def serve(bench: Bench) -> None:
    """fio over NBD on a new writable disk, beside qemu-nbd on a new qcow2."""
    rates: dict[str, dict[str, list[float]]] = {title: {"ours": [], "qemu-nbd": []} for title, *_ in CASES}
    for nth in range(bench.rounds):
        disk = bench.fresh("disk")
        bench.dsec("disk", "create", disk, "--size", "1G")
        for server, context in (("ours", served(bench, disk)), ("qemu-nbd", qemu_nbd(bench))):
            with context as uri:
                for title, mode, block, depth in CASES:
                    progress(f"round {nth + 1} of {bench.rounds}: {server}, {title}")
                    rates[title][server].append(fio(bench, uri, mode, block, depth))
    print("\nNBD on a new writable disk of 1 GiB, MiB/s by fio")
    rows = []
    for title, by in rates.items():
        ours, theirs = median(by["ours"]), median(by["qemu-nbd"])
        rows.append((title, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"))
    print_table(("", "ours", "qemu-nbd, qcow2", "ratio"), rows)


def fio(bench: Bench, uri: str, mode: str, block: str, depth: int) -> float:
    argv = ["fio", "--name=x", "--ioengine=nbd", f"--uri={uri}", "--size=256M", f"--rw={mode}", f"--bs={block}", f"--iodepth={depth}"]
    argv += ["--output-format=json"] + (["--runtime=3", "--time_based"] if block == "4k" else [])
    said = measure(argv, output=bench.work / "fio.json").output
    job = json.loads(said[said.index(b"{") :])["jobs"][0]  # a line of the engine's comes first
    side: dict[str, float] = job["read" if "read" in mode else "write"]
    return side["io_bytes"] / (side["runtime"] / 1000) / MIB


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path("/usr/lib"), help="what the tar holds")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="of the upper that is committed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="open,commit,convert,serve")
    arguments = parser.parse_args()
    print(environment())
    with tempfile.TemporaryDirectory(prefix="bench-disks-") as folder:
        bench = Bench(Path(folder), arguments.rounds)
        chosen = arguments.only.split(",")
        if "open" in chosen:
            open_stack(bench)
        if "commit" in chosen:
            commit_upper(bench, arguments.size * MIB)
        if "convert" in chosen:
            convert_tar(bench, arguments.tree)
        if "serve" in chosen:
            serve(bench)
        bench.dsec("cache", "stop")


if __name__ == "__main__":
    main()
