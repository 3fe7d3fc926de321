"""From an input to published, fsynced blobs, beside mksquashfs and mkfs.erofs on the same tree.

    python benchmarks/build.py [--tree DIR] [--work DIR] [--rounds N] [--pause S] [--level N ...] [--no-erofs]

Default tree: this interpreter's own library directory. Cases run alternately; printed are medians, and ratios to mksquashfs in the same rounds. The
command line is what is measured, start of the interpreter and catalog included. The last part changes one file of about 100 KB and imports the tar again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import MIB, Usage, alternate, disk_usage, environment, measure, median, print_table, progress
from dsec_layers.errors import ToolError
from dsec_layers.proc import find_tool, run, tool_version

RUNNER = """
import json, sys, dataclasses
from pathlib import Path
from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.builders.sources.detect import detect
from dsec_layers.layers.descriptor import Kind
from dsec_layers.store.posix import PosixStore
result = pack_layer(PosixStore(Path(sys.argv[2])), detect(sys.argv[1]).ingest, kind=Kind.BASE, level=int(sys.argv[3]))
print(json.dumps({"stages": dict(result.seconds)}))
"""


class Bench:
    """The inputs, and where results go."""

    def __init__(self, tree: Path, work: Path) -> None:
        self.tree, self.work = tree, work
        self.tar, self.gz = work / "tree.tar", work / "tree.tar.gz"
        # Modules compiled beforehand, as an installer does it.
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
            "PYTHONPYCACHEPREFIX": f"{work}/pyc"
        }
        measure([sys.executable, "-c", "import dsec_layers.api.build, dsec_layers.cli.import_"], env=self.env)
        self.sizes: dict[str, int] = {}
        self.stages: dict[str, list[dict[str, float]]] = {}
        if not self.tar.exists():
            progress(f"making {self.tar}")
            run(["tar", "--sort=name", "-C", tree.parent, "-cf", f"{self.tar}.new", tree.name])
            Path(f"{self.tar}.new").rename(self.tar)
        if not self.gz.exists():
            progress(f"making {self.gz}")
            run(["gzip", "-nk", self.tar])
        run(["sh", "-c", 'cat "$@" >/dev/null', "sh", self.tar, self.gz])  # so that all of them read from memory
        run(["tar", "-C", tree.parent, "-cf", "/dev/null", tree.name])

    def clean(self, name: str) -> Path:
        """A place that does not exist yet."""
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        return path

    def ours(self, title: str, source: Path) -> Callable[[], Usage]:
        """The command line on one input and an empty store."""

        def call() -> Usage:
            store, cache = self.clean("store"), self.clean("cache")
            usage = self.command(source, store, cache)
            self.sizes[title] = disk_usage(store)
            self.stages.setdefault(title, []).append(json.loads(usage.output)["stages"])
            return usage

        return call

    def command(self, source: Path, store: Path, cache: Path) -> Usage:
        """One import by the command line."""
        options = [f"--store={store}", f"--cache={cache}", "--json", "--quiet", "import", "--kind=base", "--name=bench:1"]
        return measure([sys.executable, "-m", "dsec_layers", *options, source], output=self.work / "output", env=self.env)

    def at_level(self, title: str, level: int) -> Callable[[], Usage]:
        """The tar at one zstd level, without catalog."""

        def call() -> Usage:
            store = self.clean("store")
            usage = measure([sys.executable, "-c", RUNNER, self.tar, store, str(level)], output=self.work / "output", env=self.env)
            self.sizes[title] = disk_usage(store)
            return usage

        return call

    def peer(self, title: str, *argv: str | os.PathLike[str]) -> Callable[[], Usage]:
        """Another program; ``IMAGE`` in its arguments is what it writes."""

        def call() -> Usage:
            image = self.clean("image")
            usage = measure([image if part == "IMAGE" else part for part in argv])
            self.sizes[title] = image.stat().st_size
            return usage

        return call

    def rebuild(self) -> None:
        """Import the tar, change one file of about 100 KB, import again under the same name."""
        store, cache = self.clean("store"), self.clean("cache")
        first = self.command(self.tar, store, cache)
        before = disk_usage(store)
        changed = self.work / "changed.tar"
        shutil.copyfile(self.tar, changed)
        with tarfile.open(self.tar) as archive:
            member = min((item for item in archive if item.isreg()), key=lambda item: abs(item.size - 100_000))
        with open(changed, "r+b") as stream:
            os.pwrite(stream.fileno(), os.urandom(member.size), member.offset_data)
        second = self.command(changed, store, cache)
        after = disk_usage(store)
        third = self.command(changed, store, cache)
        print(
            f"\nImported again after a change of {member.name} ({member.size} bytes): {(after - before) / MIB:.2f} MiB more in the store (target < 2)"
        )
        print(
            f"first {first.wall:.2f} s, changed {second.wall:.2f} s, unchanged {third.wall:.2f} s ({(disk_usage(store) - after) / MIB:.2f} MiB more)"
        )
        print(f"peak memory: {first.peak / MIB:.0f}, {second.peak / MIB:.0f}, {third.peak / MIB:.0f} MiB; stages of the second:")
        print("  " + stages_text(json.loads(second.output)["stages"]))
        changed.unlink()


def stages_text(stages: dict[str, float]) -> str:
    """Stage names and seconds."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages.items() if seconds >= 0.005)


def report(bench: Bench, found: dict[str, list[Usage]], base: str) -> None:
    """Medians, and ratios to ``base`` round by round."""
    rows = []
    for name, usages in found.items():
        ratio = median(one.wall / other.wall for one, other in zip(usages, found[base], strict=True))
        cpu = median(one.cpu / other.cpu for one, other in zip(usages, found[base], strict=True))
        rows.append(
            [
                name, f"{median(u.wall for u in usages):.2f} s", f"{ratio:.2f}", f"{median(u.cpu for u in usages):.2f} s", f"{cpu:.2f}",
                f"{median(u.peak for u in usages) / MIB:.0f} MiB", f"{bench.sizes[name] / 1e6:.1f} MB",
                f"{bench.sizes[name] / bench.sizes[base]:.3f}",
            ]
        )  # fmt: skip
    print_table(["", "wall", "ratio", "processor", "ratio", "peak memory", "size", "ratio"], rows)
    for name, stages in bench.stages.items():
        medians = {stage: median(run[stage] for run in stages) for stage in stages[0]}
        print(f"{name}: {stages_text(medians)}")


def cases_of(bench: Bench, arguments: argparse.Namespace) -> dict[str, Callable[[], Usage]]:
    """What is measured."""
    cases: dict[str, Callable[[], Usage]] = {}
    squashfs = "mksquashfs zstd 3, directory"
    options = ["-comp", "zstd", "-Xcompression-level", "3", "-quiet", "-no-progress"]
    cases[squashfs] = bench.peer(squashfs, find_tool("mksquashfs"), bench.tree, "IMAGE", *options)
    for title, source in (("dsec-layers, tar", bench.tar), ("dsec-layers, directory", bench.tree), ("dsec-layers, tar.gz", bench.gz)):
        cases[title] = bench.ours(title, source)
    for level in arguments.level:
        title = f"pack_layer at zstd {level}, tar, no catalog"
        cases[title] = bench.at_level(title, level)
    if arguments.erofs:
        cases |= erofs_case(bench)
    return cases


def erofs_case(bench: Bench) -> dict[str, Callable[[], Usage]]:
    """mkfs.erofs with the compressor nearest to ours that it has."""
    try:
        mkfs = find_tool("mkfs.erofs")
    except ToolError as error:
        progress(error.message)
        return {}
    version = ".".join(map(str, tool_version(mkfs)))
    helped = run([mkfs, "--help"], check=False)
    method = "zstd,3" if b"zstd" in helped.stdout + helped.stderr else "lz4hc,9"
    title = f"mkfs.erofs {version} {method}, directory"
    return {title: bench.peer(title, mkfs, "--quiet", f"-z{method}", "-C65536", "IMAGE", bench.tree)}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(sys.base_prefix) / "lib")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dsec-bench-build")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each run, to let others have the machine")
    parser.add_argument("--level", type=int, action="append", default=[])
    parser.add_argument("--no-erofs", dest="erofs", action="store_false")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.tree, arguments.work)
    print(environment())
    print(f"{arguments.tree}: {bench.tar.stat().st_size / 1e6:.0f} MB as tar; medians of {arguments.rounds}; page cache warm")
    cases = cases_of(bench, arguments)
    report(bench, alternate(cases, arguments.rounds, arguments.pause), next(iter(cases)))
    bench.rebuild()


if __name__ == "__main__":
    main()
