"""Shared by the benchmarks: run a program and say what it took, run things alternately, medians, tables."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MIB", "Usage", "alternate", "disk_usage", "drop_caches", "environment", "measure", "median", "print_table", "progress"]

MIB = 1 << 20


@dataclass(frozen=True)
class Usage:
    """What a program took: seconds of wall and processor time, bytes of memory at its peak, and what it printed."""

    wall: float
    cpu: float
    peak: int
    output: bytes = b""


def measure(argv: Sequence[str | os.PathLike[str]], *, output: Path | None = None, env: Mapping[str, str] | None = None) -> Usage:
    """Run a program to its end; it must succeed. Its standard output goes to the file ``output`` and is returned, or nowhere."""
    target = os.fspath(output) if output else os.devnull
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
    ]
    arguments = [os.fspath(part) for part in argv]
    began = time.perf_counter()
    child = os.posix_spawnp(arguments[0], arguments, dict(env if env is not None else os.environ), file_actions=actions)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed: {os.waitstatus_to_exitcode(status)}")
    return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, output.read_bytes() if output else b"")


def alternate(cases: Mapping[str, Callable[[], Usage]], rounds: int, pause: float = 0.0) -> dict[str, list[Usage]]:
    """Run every case once, then every case again, and so on, so that what else the machine does hits all of them. ``pause``: seconds before each run."""
    found: dict[str, list[Usage]] = {name: [] for name in cases}
    for nth in range(rounds):
        for name, run in cases.items():
            progress(f"round {nth + 1} of {rounds}: {name}")
            time.sleep(pause)
            found[name].append(run())
    return found


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def drop_caches() -> None:
    """Forget clean pages, dentries and inodes. Root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def disk_usage(path: Path) -> int:
    """Bytes of all files at or below ``path``."""
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def environment() -> str:
    """A line on the machine."""
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    load = os.getloadavg()[0]
    version = sys.version.split()[0]
    return (
        f"{len(os.sched_getaffinity(0))} processors ({model}), Linux {os.uname().release}, Python {version}, load {load:.1f} at the start"
    )


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def progress(message: str) -> None:
    """Say on standard error what goes on."""
    print(message, file=sys.stderr, flush=True)
