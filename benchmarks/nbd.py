"""The NBD server against ``nbdkit file`` on the same file, driven by fio's nbd engine and by nbdcopy. Needs fio, nbdkit, nbdcopy.

    python benchmarks/nbd.py [--size MIB] [--seconds S] [--rounds N]

Both servers run in processes of their own on Unix sockets; the file is in the page cache. Each round measures both one after the other, so that what
else the machine does hits both; printed are the medians and the ratio (more is better for us). Targets: 0.4 for random 4 KiB reads at queue depth 8,
0.8 for sequential 1 MiB reads. ``pread`` names our server on a source that can only be read through Python, by worker threads or (``inline``) not.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec_layers.proc import PIPE, clean_environment, run, spawn

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
SERVER = """
import sys
from pathlib import Path
from dsec_layers.blocksource import FileSource
from dsec_layers.fuse.nbd import Export, LocalDisk, serve
with LocalDisk(Path(sys.argv[1])) as disk:
    plain = FileSource(disk.sendable(0, 0)[0][0])
    inline = FileSource(disk.sendable(0, 0)[0][0])
    inline.blocking = False
    exports = [Export(disk), Export(plain, "pread"), Export(inline, "inline")]
    serve(exports, unix=Path(sys.argv[2]), ready=lambda server: print("ready", flush=True))
"""

READS = {
    "random 4 KiB reads, depth 8": ("randread", "4k", 8),
    "random 4 KiB reads, depth 1": ("randread", "4k", 1),
    "random 64 KiB reads, depth 8": ("randread", "64k", 8),
    "sequential 1 MiB reads, depth 8": ("read", "1m", 8),
    "sequential 1 MiB reads, depth 1": ("read", "1m", 1),
}
WRITES = {
    "random 4 KiB writes, depth 8": ("randwrite", "4k", 8),
    "sequential 1 MiB writes, depth 8": ("write", "1m", 8),
}
TARGETS = {"random 4 KiB reads, depth 8": 0.4, "sequential 1 MiB reads, depth 8": 0.8}


@contextmanager
def ours(file: Path, path: Path) -> Iterator[None]:
    """Our server, ready."""
    argv = [sys.executable, "-c", SERVER, str(file), str(path)]
    with spawn(argv, stdout=PIPE, env=clean_environment({"PYTHONPATH": str(ROOT)})) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def nbdkit(file: Path, path: Path) -> Iterator[None]:
    """nbdkit with its file plugin, ready."""
    with spawn(["nbdkit", "-f", "-U", path, "file", file]) as process:
        try:
            wait_for(path)
            yield
        finally:
            process.terminate()


def wait_for(path: Path) -> None:
    """Wait until somebody listens at ``path``, for 10 s at most."""
    deadline = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return


def uri(path: Path, export: str = "") -> str:
    """The URI of an export behind a socket."""
    return f"nbd+unix:///{export}?socket={path}"


def fio(address: str, job: tuple[str, str, int], seconds: float, folder: Path) -> float:
    """Bytes a second of a fio job."""
    pattern, size, depth = job
    out = folder / "fio.json"
    argv = ["fio", "--name=job", "--ioengine=nbd", f"--uri={address}", f"--rw={pattern}", f"--bs={size}", f"--iodepth={depth}"]
    run([*argv, f"--runtime={seconds}", "--time_based", "--output-format=json", f"--output={out}"], cwd=folder)
    result = json.loads(out.read_text())["jobs"][0]
    return float(result["read"]["bw_bytes"] + result["write"]["bw_bytes"])


def copy(address: str, size: int) -> float:
    """Bytes a second of nbdcopy with its default of several connections."""
    start = time.perf_counter()
    run(["nbdcopy", "--no-extents", address, "null:"])
    return size / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="MiB")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = options.size * MIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "image"
        block = random.Random(1).randbytes(MIB)
        with open(file, "wb") as stream:
            stream.writelines(block for _ in range(options.size))
        us, kit = folder / "us", folder / "kit"
        with ours(file, us), nbdkit(file, kit):
            print(f"{'':42} {'ours':>12} {'nbdkit':>12} {'ratio':>7}")
            for title, job in (READS | WRITES).items():
                for export in (
                    ("", "pread", "inline") if title.startswith(("random 4 KiB reads", "sequential 1 MiB reads, depth 8")) else ("",)
                ):
                    compare(
                        title,
                        export,
                        [
                            (fio(uri(us, export), job, options.seconds, folder), fio(uri(kit), job, options.seconds, folder))
                            for _ in range(options.rounds)
                        ],
                    )
            compare("nbdcopy, 4 connections", "", [(copy(uri(us), size), copy(uri(kit), size)) for _ in range(options.rounds)])


def compare(title: str, export: str, pairs: list[tuple[float, float]]) -> None:
    """Print the medians of (ours, nbdkit) in MiB/s and of their ratios."""
    mine, theirs = (statistics.median(column) / MIB for column in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    target = f"   target {TARGETS[title]}" if title in TARGETS and not export else ""
    print(f"{title + (f' ({export})' if export else ''):42} {mine:7.0f} MiB/s {theirs:6.0f} MiB/s {ratio:7.2f}{target}", flush=True)


if __name__ == "__main__":
    main()
