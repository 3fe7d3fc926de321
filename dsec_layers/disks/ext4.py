"""Make an ext4 file system inside a new disk, empty or with the content of a directory, by mke2fs.

mke2fs writes behind the header of the upper's data file, at the very place where the disk's first sector is to be; its data is then only entered into the
index. Nothing is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from dsec_layers.disks.ext4_times import settle_times
from dsec_layers.errors import NoSpace, ToolError, UsageError
from dsec_layers.fsio import data_ranges, map_os_error, pread_exact, pwrite_all
from dsec_layers.overlaybd.lsmt import SPACE, encode_entries
from dsec_layers.overlaybd.segments import SECTOR, Segments
from dsec_layers.proc import clean_environment, find_tool, run

__all__ = ["BLOCK", "make_ext4", "make_image", "size_for"]

BLOCK: Final = 4096
UUID: Final = "bdf7bb2e-c231-43ce-87c2-299792458ef5"
"""Of every file system made here, as accelerated-container-image has it: the same input gives the same image."""

_INODE: Final = 256
_BYTES_PER_INODE: Final = 16384  # mke2fs's own default
_MARGIN: Final = 64 << 20
_MAX_SECTORS: Final = 8192
_CHECK: Final = 1 << 20


def make_ext4(data: Path, index: Path, virtual_size: int, source: Path | None = None, *, epoch: int = 0) -> None:
    """Put an ext4 file system of ``virtual_size`` bytes into a new, empty upper. Durable when it returns.

    ``source``: the directory that becomes its root, owners, modes, times, links and attributes included. ``epoch``: the time the file system is made at.
    UsageError for a size that ext4 cannot have, NoSpace if the content does not fit or the disk is full, ToolError.
    """
    segments = make_image(data, virtual_size, source, base=SPACE, epoch=epoch)
    try:
        with open(data, "r+b") as stream, open(index, "r+b") as entries:
            os.fsync(stream.fileno())
            pwrite_all(entries.fileno(), encode_entries(segments), SPACE)
            os.fsync(entries.fileno())
    except OSError as error:
        raise map_os_error(error, str(data)) from error


def make_image(path: Path, virtual_size: int, source: Path | None = None, *, base: int = 0, epoch: int = 0) -> Segments:
    """Make the file system in an existing file from byte ``base`` on, not durable; returns where in the file its data is. Otherwise as ``make_ext4``."""
    if virtual_size % BLOCK or virtual_size < 1 << 20:
        raise UsageError(f"an ext4 file system here has a multiple of {BLOCK} bytes, at least 1 MiB, not {virtual_size} bytes")
    try:
        os.truncate(path, base + virtual_size)
        _run_mke2fs(path, virtual_size, source, base, epoch)
        with open(path, "r+b") as stream:
            settle_times(stream.fileno(), base, epoch)
            return _segments(list(_extents(stream.fileno(), base, base + virtual_size)), base)
    except OSError as error:
        raise map_os_error(error, str(path)) from error


def size_for(source: Path) -> int:
    """Bytes of a disk that holds the content of a directory with room to spare: a quarter more, and 64 MiB."""
    used, inodes = 0, 1
    for folder, folders, files in os.walk(source):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - a hot loop
            used += -(-status.st_size // BLOCK) * BLOCK
            inodes += 1
    return -(-(used * 5 // 4 + inodes * _INODE * 2 + _MARGIN) // (1 << 20)) * (1 << 20)


def _run_mke2fs(data: Path, virtual_size: int, source: Path | None, base: int, epoch: int) -> None:
    options = f"hash_seed={UUID},offset={base},root_owner=0:0,lazy_itable_init=0,lazy_journal_init=1"
    argv: list[str | Path] = [find_tool("mke2fs"), "-q", "-F", "-t", "ext4", "-b", str(BLOCK), "-I", str(_INODE), "-m", "1"]
    argv += ["-O", "^orphan_file,^metadata_csum_seed", "-U", UUID, "-E", options]
    if source is not None:
        needed = _count(source)
        if needed > virtual_size // _BYTES_PER_INODE:
            argv += ["-N", str(needed + needed // 4)]
        argv += ["-d", source]
    done = run(
        [*argv, data, str(virtual_size // BLOCK)], check=False, env=clean_environment({"E2FSPROGS_FAKE_TIME": str(max(epoch, 1))})
    )  # fmt: skip
    said = done.stderr.decode(errors="replace").strip()
    if done.code == 0:
        return
    if "Could not allocate" in said:
        raise NoSpace(f"the content of {source} does not fit into {virtual_size} bytes", hint="give a larger --size")
    if "No space left" in said:
        raise NoSpace(f"{data}: no space left on the device: {said[-200:]}")
    raise ToolError(f"mke2fs failed with exit code {done.code}: {said[-500:]}")


def _count(source: Path) -> int:
    return 16 + sum(len(folders) + len(files) for _, folders, files in os.walk(source))


def _extents(fd: int, at: int, end: int) -> Iterator[tuple[int, int]]:
    """(offset, end) of a file's data in ``[at, end)``, without the runs of zeros in it."""
    for first, stop in data_ranges(fd, end, at):
        yield from _without_zeros(fd, first, stop)


def _without_zeros(fd: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    began = -1
    for start in range(first, end, _CHECK):
        data = pread_exact(fd, min(_CHECK, end - start), start)
        blocks = np.frombuffer(data.ljust(-(-len(data) // BLOCK) * BLOCK, b"\0"), np.uint64).reshape(-1, BLOCK // 8).any(axis=1)
        for number in np.flatnonzero(np.diff(blocks, prepend=began >= 0)).tolist():
            place = start + number * BLOCK
            if began < 0:
                began = place
            else:
                yield began, place
                began = -1
    if began >= 0:
        yield began, end


def _segments(extents: list[tuple[int, int]], base: int) -> Segments:
    """Index entries of at most 4 MiB that map a disk's sectors to the same place behind byte ``base``."""
    spans = np.array(extents, np.int64).reshape(-1, 2) // SECTOR
    count = -(-(spans[:, 1] - spans[:, 0]) // _MAX_SECTORS)
    owner = np.repeat(np.arange(len(spans)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = spans[owner, 0] + nth * _MAX_SECTORS
    end = np.minimum(first + _MAX_SECTORS, spans[owner, 1])
    zero = np.zeros(len(first), np.int16)
    return Segments(first - base // SECTOR, end - base // SECTOR, first, zero, zero.astype(np.bool_))
