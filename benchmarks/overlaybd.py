"""OverlayBD: what reading, writing, stacking and committing cost.

    python benchmarks/overlaybd.py [--size MIB] [--rounds N]

Everything is in the page cache. ZFile reading is printed beside a C loop that does the same work on the same file (pread, CRC-32C, LZ4 or zstd, nothing else),
compiled on the spot; it is left out where there is no C compiler. Rounds alternate between the two; printed are medians of processor time, which other
load on the machine disturbs less than wall time. Targets: 0.7 for sequential and 0.3 for random 4 KiB reads, under a second for a stack of 50 layers
with a million segments, commits at the speed of a plain copy.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dsec_layers.blocksource import BytesSource, FileSource
from dsec_layers.errors import ToolError
from dsec_layers.fsio import pwrite_all
from dsec_layers.overlaybd import (
    Algorithm,
    BlockCache,
    Disk,
    LsmtLayer,
    Packing,
    Upper,
    Write,
    ZFile,
    ZFileOptions,
    commit,
    open_layer,
    zfile_writes,
)
from dsec_layers.overlaybd.lsmt import Flags, Header
from dsec_layers.overlaybd.segments import Segments
from dsec_layers.proc import find_tool, run

MIB = 1 << 20
READS = 20_000
C_LOOP = r"""
#include <fcntl.h>
#include <nmmintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int LZ4_decompress_safe(const char *, char *, int, int);
size_t ZSTD_decompress(void *, size_t, const void *, size_t);
static uint32_t crc(const unsigned char *p, size_t n) {
    uint64_t c = 100007;
    for (; n >= 8; p += 8, n -= 8) c = _mm_crc32_u64(c, *(const uint64_t *)p);
    for (; n; n--) c = _mm_crc32_u8((uint32_t)c, *p++);
    return (uint32_t)c;
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static int zstd;
static void unpack(const unsigned char *p, uint32_t stored, char *out, int size) {
    if (crc(p, stored - 4) != *(const uint32_t *)(p + stored - 4)) exit(3);
    long got = zstd ? (long)ZSTD_decompress(out, size, p, stored - 4) : LZ4_decompress_safe((const char *)p, out, stored - 4, size);
    if (got != size) exit(4);
}
int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDONLY), per = atoi(argv[2]), reads = atoi(argv[3]);
    unsigned char head[512];
    if (argc < 4 || pread(fd, head, 512, 0) != 512) return 1;
    uint64_t table = *(uint64_t *)(head + 40), n = *(uint64_t *)(head + 48), size = *(uint64_t *)(head + 56);
    zstd = head[76] == 2;
    uint32_t *stored = malloc(n * 4);
    if (pread(fd, stored, n * 4, table) != (ssize_t)(n * 4)) return 1;
    uint64_t *at = malloc((n + 1) * 8);
    at[0] = 512;
    for (uint64_t i = 0; i < n; i++) at[i + 1] = at[i] + stored[i];
    char *out = malloc(per * 4096);
    unsigned char *in = malloc(per * 8192);
    double start = now();
    for (uint64_t i = 0; i < n; i += per) {
        uint64_t end = i + per < n ? i + per : n;
        if (pread(fd, in, at[end] - at[i], at[i]) < 0) return 1;
        for (uint64_t k = i; k < end; k++) unpack(in + (at[k] - at[i]), stored[k], out + (k - i) * 4096, k == n - 1 ? size - k * 4096 : 4096);
    }
    double sequential = now() - start;
    srand(1);
    start = now();
    for (int i = 0; i < reads; i++) {
        uint64_t k = ((uint64_t)rand() * 2147483648u + rand()) % (n - 1);
        if (pread(fd, in, stored[k], at[k]) < 0) return 1;
        unpack(in, stored[k], out, 4096);
    }
    printf("%f %f\n", sequential, now() - start);
    return 0;
}
"""


def corpus(size: int) -> bytes:
    """Real files of this machine, so that compression has something to do."""
    data = bytearray()
    for root in ("/usr/lib", "/usr/share", "/usr/bin"):
        for path in sorted(Path(root).rglob("*")):
            if len(data) >= size:
                return bytes(data[:size])
            if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
                data += path.read_bytes()
    return (bytes(data) * (size // max(1, len(data)) + 1))[:size]


def write_file(path: Path, writes: Iterable[Write]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
    for at, data in writes:
        pwrite_all(fd, data, at)
    os.fsync(fd)
    os.close(fd)


def spent(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def compile_loop(folder: Path) -> Path | None:
    source, program = folder / "loop.c", folder / "loop"
    source.write_text(C_LOOP)
    try:
        run([find_tool("cc"), "-O2", "-msse4.2", "-o", program, source, "-l:liblz4.so.1", "-l:libzstd.so.1"])
    except ToolError as error:
        print(f"no C loop to compare with: {error.message.splitlines()[0][:100]}", file=sys.stderr)
        return None
    return program


def scan(zfile: ZFile, step: int) -> None:
    for at in range(0, zfile.size, step):
        zfile.pread(at, min(step, zfile.size - at))


def pick(zfile: ZFile) -> None:
    rng = random.Random(1)
    for _ in range(READS):
        zfile.pread(rng.randrange(zfile.size // 4096 - 1) * 4096, 4096)


def fill(disk: Disk, data: bytes, places: Sequence[int], step: int) -> None:
    for n, at in enumerate(places):
        disk.pwrite(at, data[n * step : (n + 1) * step])


def zfile_reads(folder: Path, data: bytes, rounds: int) -> None:
    loop = compile_loop(folder)
    for algorithm in Algorithm:
        path = folder / algorithm.name
        start = time.process_time()
        write_file(path, zfile_writes([data], ZFileOptions(algorithm)))
        taken = time.process_time() - start
        print(f"{algorithm.name}: {path.stat().st_size / len(data):.2f} of the size, written with {len(data) / MIB / taken:.0f} MiB/s")
        with path.open("rb") as file:
            for step in (65536, 131072, MIB):
                ours, native, single, native_single = [], [], [], []
                for _ in range(rounds):
                    zfile = ZFile(FileSource(file.fileno()), BlockCache())
                    ours.append(spent(partial(scan, zfile, step)))
                    single.append(spent(partial(pick, zfile)))
                    if loop:
                        sequential, one = run([loop, path, str(step // 4096), str(READS)]).stdout.split()
                        native.append(float(sequential))
                        native_single.append(float(one))
                show(f"  sequential, {step >> 10} KiB a read", len(data) / MIB, "MiB/s", ours, native)
            show("  random 4 KiB", READS, "/s", single, native_single)


def show(name: str, amount: float, unit: str, ours: list[float], native: list[float]) -> None:
    mine = statistics.median(ours)
    beside = f", C loop {amount / statistics.median(native):.0f} {unit}, ratio {statistics.median(native) / mine:.2f}" if native else ""
    print(f"{name}: {amount / mine:.0f} {unit}{beside}")


def stacking(rounds: int) -> None:
    rng = np.random.default_rng(1)
    blobs = []
    for _ in range(50):
        lba = np.unique(rng.integers(0, 1 << 24, 20_300))[:20_000] * 8
        mapping = Segments(lba, lba + 8, np.full(len(lba), 8), np.zeros(len(lba), np.int16), np.ones(len(lba), np.bool_))
        layer = LsmtLayer(Header(Flags.UPPER_DATA, virtual_size=64 << 30), mapping, (BytesSource(b""),))
        blobs.append(b"".join(data for _, data in commit(layer)))
    times = [spent(lambda: Disk([open_layer(BytesSource(blob)) for blob in blobs])) for _ in range(rounds)]
    mapping = Disk([open_layer(BytesSource(blob)) for blob in blobs])._state.mapping
    print(f"a stack of 50 layers, 1000000 segments: {statistics.median(times):.2f} s, {mapping.nbytes / len(mapping):.0f} bytes a segment")


def uppers(folder: Path, data: bytes) -> None:
    size = len(data)
    order = np.random.default_rng(2).permutation(4 * size // 4096)[: size // 4096].tolist()
    for name, places, step in (("sequential 1 MiB", range(0, size, MIB), MIB), ("random 4 KiB", [block * 4096 for block in order], 4096)):
        fds = [os.open(folder / f"{step}.{kind}", os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600) for kind in ("data", "index")]
        upper = Upper.create(fds[0], fds[1], 4 * size)
        disk = Disk([], upper)
        taken = spent(partial(fill, disk, data, places, step))
        print(f"upper, {name} writes: {len(places) / taken:.0f} /s, {size / MIB / taken:.0f} MiB/s")
        layer = upper.freeze()
        out = folder / "out"
        start = time.perf_counter()
        write_file(out, ((at, os.pread(fds[0], MIB, 4096 + at)) for at in range(0, size, MIB)))
        copied = time.perf_counter() - start
        for what, packing in (("LSMT", Packing()), ("ZFile LZ4 in a tar", Packing(zfile=ZFileOptions(), tar=True))):
            start = time.perf_counter()
            write_file(out, commit(layer, packing))
            took = time.perf_counter() - start
            print(f"  commit as {what}: {size / MIB / took:.0f} MiB/s (wall), a plain copy {size / MIB / copied:.0f} MiB/s")
        for fd in fds:
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="MiB of data")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    data = corpus(given.size * MIB)
    with tempfile.TemporaryDirectory(prefix="overlaybd-") as name:
        zfile_reads(Path(name), data, given.rounds)
        stacking(given.rounds)
        uppers(Path(name), data)


if __name__ == "__main__":
    main()
