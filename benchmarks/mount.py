"""The on-demand driver beside a plain ``mount -t erofs`` of the same bytes: mount times, cold start, cached reads, the driver's own cost, memory.

    python benchmarks/mount.py [--tree DIR|TAR] [--work DIR] [--rounds N] [--imports NAMES] [--ways]

Root, Linux >= 6.14. The tree is packed into a layer once (kept in --work); default is this interpreter's own library directory, and the import is run by this
interpreter with its library taken from the mount. Whatever is compared is measured alternately, so that what else the machine does hits both; printed are
medians. ``--ways`` compares ways of writing and mounting segments (docs/adr/0021) instead.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.builders.sources.detect import detect
from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.fetch import Fetcher
from dsec_layers.cache.flat import FlatImage
from dsec_layers.cache.metadata import LayerFiles, layer_files
from dsec_layers.cache.segments import SegmentCache
from dsec_layers.cache.stock import SIZE
from dsec_layers.digest import Buffer, Digest
from dsec_layers.fuse.client.host import Host, open_host
from dsec_layers.fuse.daemon.requirements import watch
from dsec_layers.fuse.events.keeper import Hand
from dsec_layers.fuse.events.serve import EventServer
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.manifest import Environment
from dsec_layers.linux.mount import mount_erofs, mount_overlay, umount
from dsec_layers.proc import clean_environment, run
from dsec_layers.registry.objects import load_layer, publish_object
from dsec_layers.store.posix import PosixStore

MIB = 1 << 20
_SYS_CACHESTAT = 451


def say(name: str, value: str, target: str = "") -> None:
    """One line of the report."""
    print(f"{name:<58} {value:>22}   {target}", flush=True)


def timed(function: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def worked(function: Callable[[], object]) -> float:
    """Processor seconds of this process: what reading from the page cache costs, whatever else the machine does."""
    began = time.process_time()
    function()
    return time.process_time() - began


def by_children(function: Callable[[], object]) -> float:
    """Processor seconds of the programs that a function runs."""
    before = os.times()
    function()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def alternated(rounds: int, measure: Callable[[Path], float], ours: Path, theirs: Path) -> list[tuple[float, float]]:
    """(ours, theirs) of each round, every second time in the other order."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = measure(theirs)
            pairs.append((measure(ours), second))
        else:
            pairs.append((measure(ours), measure(theirs)))
    return pairs


def ms(seconds: float) -> str:
    """For the report."""
    return f"{1000 * seconds:.1f} ms"


def drop_caches() -> None:
    """Forget clean pages, dentries and inodes."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


_libc = ctypes.CDLL(None, use_errno=True)


def cached(root: Path) -> int:
    """Bytes of the files below a directory that are in the page cache (cachestat(2))."""
    total = 0
    span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            if _libc.syscall(_SYS_CACHESTAT, fd, span, found, 0) == 0:
                total += found[0]
            os.close(fd)
    return total * 4096


def resident(pid: int) -> int:
    """The most memory a process had, in bytes."""
    return next(1024 * int(line.split()[1]) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))


class MemoryGroup:
    """A control group that counts the kernel memory of what is done in it."""

    def __init__(self) -> None:
        unified = Path("/sys/fs/cgroup/cgroup.controllers")
        self._new = unified.exists() and "memory" in unified.read_text().split()
        top = Path("/sys/fs/cgroup") if self._new else Path("/sys/fs/cgroup/memory")
        self._path = top / f"dsec-bench-{os.getpid()}"
        if self._new:
            (top / "cgroup.subtree_control").write_text("+memory")
        self._path.mkdir()

    def used(self) -> int:
        if not self._new:
            return int((self._path / "memory.kmem.usage_in_bytes").read_text())
        return next(int(line.split()[1]) for line in (self._path / "memory.stat").read_text().splitlines() if line.startswith("kernel "))

    def growth(self, function: Callable[[], object]) -> int:
        """By how much the kernel's memory grows when a child process in the group calls ``function``."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                (self._path / "cgroup.procs").write_text(str(os.getpid()))
                before = self.used()
                function()
                os.write(writing, str(self.used() - before).encode())
            finally:
                os._exit(0)
        os.close(writing)
        grown = os.read(reading, 20)
        os.close(reading)
        os.waitpid(child, 0)
        return int(grown)

    def close(self) -> None:
        self._path.rmdir()


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_all(root: Path) -> int:
    """Read every file, in order; bytes."""
    total = 0
    buffer = bytearray(MIB)
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = f"{folder}/{name}"
            if os.path.islink(path):  # noqa: PTH114
                continue
            fd = os.open(path, os.O_RDONLY)
            while count := os.readv(fd, [buffer]):
                total += count
            os.close(fd)
    return total


def await_stock(cache: Path) -> None:
    """Until the daemon has made its empty files: it does so when nothing else is to do, and that is not what is measured."""
    due = time.monotonic() + 60
    while len(list((cache / "stock").iterdir())) < SIZE and time.monotonic() < due:
        time.sleep(0.02)


class Bench:
    """A packed tree, its flat image, and a place for caches."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.work = work
        self.rounds: int = arguments.rounds
        self.imports: list[str] = arguments.imports.split(",")
        self.store = PosixStore(work / "store")
        self.python = Path(sys.base_prefix).name
        marker = work / "digest"
        if not marker.exists():
            packed = pack_layer(self.store, detect(str(arguments.tree)).ingest, kind=Kind.BASE, name="bench")
            marker.write_text(packed.digest)
        self.digest: Digest = marker.read_text()
        self.small = [self._small(number) for number in range(2)]
        self.flat = work / "flat.erofs"
        self.files = self._make_flat()
        self.mount = work / "plain"
        self.mount.mkdir(exist_ok=True)

    def _small(self, number: int) -> Digest:
        source = self.work / f"small{number}"
        source.mkdir(exist_ok=True)
        for at in range(200):
            (source / f"file{at}").write_bytes(
                os.urandom(20_000) if not (source / f"file{at}").exists() else (source / f"file{at}").read_bytes()
            )
        kind = (Kind.WORKSPACE, Kind.TOOLKIT)[number]
        return pack_layer(self.store, detect(str(source)).ingest, kind=kind, name=f"small{number}").digest

    def environment(self) -> Digest:
        members = [self.digest, *self.small]
        layers = [load_layer(self.store, member) for member in members]
        described = zip(members, layers, strict=True)
        return publish_object(
            self.store,
            Environment(tuple((layer.kind, Descriptor(d.MANIFEST, member, len(layer.to_json()))) for member, layer in described)),
        )

    def _make_flat(self) -> LayerFiles:
        """The layer's files, and its flat image as one file if that is not there yet."""
        with CacheDirectory(self.work / "flat-cache") as directory:
            fetcher = Fetcher(lambda _: self.store)
            files = layer_files(directory, self.store.url, self.digest, fetcher)
            if not self.flat.exists():
                with FlatImage.of_layer(files, SegmentCache(directory, fetcher)) as image, open(self.flat, "wb") as stream:
                    stream.writelines(image.pread(offset, min(MIB, image.size - offset)) for offset in range(0, image.size, MIB))
                shutil.rmtree(directory.present)
            fetcher.close()
        return files

    def cache(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.work, prefix="cache-"))

    @contextmanager
    def host(self) -> Iterator[Host]:
        cache = self.cache()
        host = open_host(cache, options=["--linger", "0", "--idle", "60"])
        try:
            await_stock(cache)
            yield host
        finally:
            host.stop(force=True)
            shutil.rmtree(cache)

    @contextmanager
    def plain(self) -> Iterator[Path]:
        """A plain mount of the flat image."""
        mount_erofs(self.flat, self.mount)
        try:
            yield self.mount
        finally:
            umount(self.mount)

    def run_imports(self, root: Path) -> float:
        """Import packages with an interpreter whose library is the mounted tree."""
        home = root if (root / "lib").is_dir() else None
        environment = clean_environment(
            {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHOME": str(home)} if home else {"PYTHONDONTWRITEBYTECODE": "1"}
        )
        program = f"import {', '.join(self.imports)}"
        return timed(lambda: run([Path(sys.base_prefix) / "bin" / "python3", "-s", "-c", program], env=environment, timeout=300))


def report_mounts(bench: Bench) -> None:
    """Mount and unmount times."""
    environment = bench.environment()
    target = bench.work / "target"
    target.mkdir(exist_ok=True)
    layer, new, env, nothing, plain = [], [], [], [], []
    with bench.host() as host:
        leases = [host.attach(bench.store, [bench.digest])]
        leases.pop().release()
        for _ in range(bench.rounds):
            await_stock(host.cache)
            layer.append(timed(lambda: leases.append(host.attach(bench.store, [bench.digest]))))
            leases.pop().release()
            for path in (host.cache / "absent").iterdir():
                path.unlink()
            await_stock(host.cache)
            new.append(timed(lambda: leases.append(host.attach(bench.store, [bench.digest]))))
            leases.pop().release()
            await_stock(host.cache)
            env.append(timed(lambda: host.mount(bench.store, environment, target)))
            host.umount(target)
            host.clear()
            await_stock(host.cache)
            nothing.append(timed(lambda: host.mount(bench.store, environment, target)))
            host.umount(target)
            plain.append(timed(lambda: mount_erofs(bench.flat, bench.mount)))
            umount(bench.mount)
    count = len(bench.files.names)
    say(f"mount of a layer of {count} segments, metadata here", ms(statistics.median(layer)), "< 50 ms")
    say("  the same, absent segments' files made first", ms(statistics.median(new)), "< 50 ms")
    say("environment of 3 layers, metadata here", ms(statistics.median(env)), "< 100 ms")
    say("environment of 3 layers, nothing here (with its metadata)", ms(statistics.median(nothing)), "metadata + 100 ms")
    say("plain mount of the flat image", ms(statistics.median(plain)))


def report_memory(bench: Bench) -> None:
    """Kernel memory of mounts, counted by a control group."""
    group = MemoryGroup()
    names, sizes = bench.files.names, bench.files.sizes
    with CacheDirectory(bench.cache()) as directory:
        fetcher = Fetcher(lambda _: bench.store)
        segments, grown = SegmentCache(directory, fetcher), []
        for _ in range(bench.rounds):
            with segments.devices(names, sizes) as devices:
                drop_caches()
                drop_caches()  # what the first one wrote back can be dropped now
                grown.append(group.growth(lambda devices=devices: mount_erofs(bench.files.image, bench.mount, devices)))  # type: ignore[misc]
            umount(bench.mount)
        say("kernel memory of a mounted segment", f"{statistics.median(grown) / len(names):.0f} B")
        with segments.devices(names, sizes) as devices:
            mount_erofs(bench.files.image, bench.mount, devices)
        targets = [bench.work / "targets" / str(number) for number in range(200)]
        for target in targets:
            target.mkdir(parents=True, exist_ok=True)
        empty = bench.work / "empty"
        empty.mkdir(exist_ok=True)

        def mount_all() -> None:
            for target in targets:
                mount_overlay(target, [empty, bench.mount])

        say("kernel memory of an environment on layers in use", f"{group.growth(mount_all) / len(targets):.0f} B")
        for target in targets:
            umount(target)
        umount(bench.mount)
        fetcher.close()
    shutil.rmtree(directory.root)
    group.close()


def report_cold(bench: Bench) -> None:
    """Cold import and cold read of everything."""
    with bench.host() as host, host.attach(bench.store, [bench.digest]) as lease, bench.plain() as plain:
        drop_caches()
        flat = bench.run_imports(plain)
        took = bench.run_imports(lease.paths[0])
        report = host.show()
        say(f"cold import of {len(bench.imports)} packages, from the store", f"{report.fetched_bytes / 1e6:.1f} MB", "<= 150 MB")
        say("  the same, decompressed", f"{report.bytes / 1e6:.1f} MB")
        say("  segments, events", f"{report.fetched}, {report.events}")
        say("  time; the plain mount of a local image", f"{took:.2f} s; {flat:.2f} s")
        pairs = alternated(bench.rounds, lambda root: by_children(lambda: bench.run_imports(root)), lease.paths[0], plain)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        say("  again, all cached (cpu); the plain mount", f"{ours:.2f} s; {theirs:.2f} s")
        say("  ratio", f"{statistics.median(a / b for a, b in pairs):.3f}", "<= 1.05")
    with bench.host() as host, host.attach(bench.store, [bench.digest]) as lease:
        await_stock(host.cache)
        before = cpu_of(host.show().pid)
        took = timed(lambda: read_all(lease.paths[0]))
        report = host.show()
        used = cpu_of(report.pid) - before
        say(f"cold read of all {report.fetched} segments", f"{took:.2f} s, {report.bytes / took / 1e6:.0f} MB/s")
        say("  events a segment", f"{report.events / report.fetched:.3f}", "1")
        say("  the driver's processor time a segment", ms(used / report.fetched), "< 2 ms")
        mib = report.bytes / MIB
        say("  the driver's processor time a MiB", ms(used / mib))
        say(
            "  the worker's and the keeper's memory at most", f"{resident(report.pid) / 1e6:.0f} MB, {resident(report.keeper) / 1e6:.0f} MB"
        )
        report_cached(bench, lease.paths[0])
        say("events since", f"{host.show().events - report.events}", "0")


def report_cached(bench: Bench, root: Path) -> None:
    """Reads of what is here, beside the plain mount."""
    with bench.plain() as plain:
        pairs = []
        for first, second in ((root, plain), (plain, root)):  # which one was read into memory first makes a difference of some percent
            drop_caches()
            read_all(first)
            read_all(second)
            pairs += alternated(bench.rounds, lambda place: worked(lambda: read_all(place)), root, plain)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        say("read all, in the page cache (cpu): driver, plain mount", f"{ours:.2f} s, {theirs:.2f} s")
        say("  ratio", f"{statistics.median(a / b for a, b in pairs):.3f}", "<= 1.05")

        def uncached(place: Path) -> float:
            drop_caches()
            return timed(lambda: read_all(place))

        pairs = alternated(bench.rounds, uncached, root, plain)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        say("read all, present, page cache empty: driver, plain mount", f"{ours:.2f} s, {theirs:.2f} s")
        say("  ratio", f"{statistics.median(a / b for a, b in pairs):.3f}")


def _write_buffered(fd: int, data: Buffer) -> None:
    os.pwrite(fd, data, 0)


def report_ways(bench: Bench) -> None:
    """Ways of writing segments and of mounting them: time and memory of a cold read, and of the next."""
    segments: Any = importlib.import_module("dsec_layers.cache.segments")
    direct = segments.write_whole
    print(f"{'way':<44}{'cold read':>11}{'cpu/segment':>13}{'pages of files':>16}{'of segments':>13}{'again, cold':>13}")

    def direct_and_ahead(fd: int, data: Buffer) -> None:
        direct(fd, data)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)

    ways = (
        ("direct write, read ahead, buffered mount", direct_and_ahead, ()),
        ("direct write, directio mount", direct, ("directio",)),
        ("direct write, buffered mount", direct, ()),
        ("buffered write, directio mount", _write_buffered, ("directio",)),
        ("buffered write, buffered mount", _write_buffered, ()),
    )
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name, _, _ in ways}
    for _ in range(bench.rounds):
        for name, write, flags in ways:
            segments.write_whole = write
            rows[name].append(_one_way(bench, flags))
    segments.write_whole = direct
    for name, measured in rows.items():
        cold, cpu, once, twice, again = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:<44}{cold:>9.2f} s{1000 * cpu:>10.2f} ms{once / 1e6:>13.0f} MB{twice / 1e6:>10.0f} MB{again:>11.2f} s", flush=True)


def _one_way(bench: Bench, flags: tuple[str, ...]) -> tuple[float, float, float, float, float]:
    cache = bench.cache()
    with CacheDirectory(cache) as directory:
        fetcher = Fetcher(lambda _: bench.store)
        group = watch([directory.absent])
        served = SegmentCache(directory, fetcher)
        files = layer_files(directory, bench.store.url, bench.digest, fetcher)
        hand = Hand.create()
        server = EventServer(group, Hand(hand), served, lambda digest: [files.piece(files.index[digest])])
        server.start()
        with served.devices(files.names, files.sizes) as devices:
            mount_erofs(files.image, bench.mount, devices, flags)
        drop_caches()
        used = time.process_time()
        read = [
            "sh",
            "-c",
            f"find {bench.mount} -type f -print0 | sort -z | xargs -0 cat > /dev/null",
        ]  # in a process of its own: ours serves
        cold = timed(lambda: run(read, timeout=300))
        used = time.process_time() - used
        twice = cached(directory.present)
        once = cached(bench.mount)
        drop_caches()
        again = timed(lambda: run(read, timeout=300))
        umount(bench.mount)
        server.stop()
        fetcher.close()
        os.close(group)
        os.close(hand)
    shutil.rmtree(cache)
    return cold, used / len(files.names), once, twice, again


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(sys.base_prefix), help="directory or tar to pack")
    parser.add_argument("--work", type=Path, help="keep the packed layer here, for the next time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--imports", default="numpy,scipy,sympy,networkx,pydantic,requests,boto3")
    parser.add_argument("--ways", action="store_true", help="compare ways of writing and mounting")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        bench = Bench(arguments, work)
        say("layer", f"{len(bench.files.names)} segments", f"{bench.flat.stat().st_size / 1e6:.0f} MB")
        if arguments.ways:
            report_ways(bench)
            return
        report_mounts(bench)
        report_cold(bench)
        report_memory(bench)
    finally:
        if not arguments.work:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
