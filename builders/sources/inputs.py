"""Opening inputs: a path, a descriptor or a binary stream as blocks, and tar readers upon them with hashing, decompression and progress."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from dsec_layers.builders.names import Limits
from dsec_layers.builders.sources.blocks import Blocks, FileBlocks, PipeBlocks, ReadAhead, StreamBlocks, Tap, rewound
from dsec_layers.builders.sources.decompress import compression_of, decompressed, peeked
from dsec_layers.builders.sources.tar import TarReader
from dsec_layers.descriptors import OpenFile
from dsec_layers.errors import InputError, NotFound

__all__ = ["Opened", "Prefixed", "Seen", "Where", "open_any", "open_regular", "opened", "regular_descriptor", "tar_reader"]


@dataclass(frozen=True, slots=True)
class Prefixed:
    """An input of which ``first`` has been read already."""

    first: bytes
    rest: Where


Where: TypeAlias = "Path | int | BinaryIO | OpenFile | Prefixed"
"""An input: a path, a descriptor (left open), a binary stream (left open), a descriptor held, or one of these with its first bytes put back."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open input. ``size`` is None for what has none and can be read but once; ``interrupt`` ends a read that waits in another thread."""

    blocks: Blocks
    size: int | None = None
    interrupt: Callable[[], None] | None = None


@contextmanager
def opened(where: Where, what: str) -> Iterator[Opened]:
    """Open an input for one reading."""
    if isinstance(where, Prefixed):
        with opened(where.rest, what) as source:
            yield Opened(rewound(where.first, source.blocks), None, source.interrupt)
        return
    if not isinstance(where, Path | int | OpenFile):
        yield Opened(StreamBlocks(where, what))
        return
    held = where if isinstance(where, OpenFile) else OpenFile(open_any(where, what)) if isinstance(where, Path) else None
    fd = held.fd if held is not None else where
    assert isinstance(fd, int)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and (held is not None or os.lseek(fd, 0, os.SEEK_CUR) == 0):
        yield Opened(FileBlocks(fd, 0, info.st_size, what), info.st_size)
    elif stat.S_ISDIR(info.st_mode):
        raise InputError(f"{what} is a directory")
    else:
        pipe = PipeBlocks(fd, what)
        try:
            yield Opened(pipe, None, pipe.interrupt)
        finally:
            pipe.close()


def open_any(path: Path, what: str) -> int:
    """A descriptor of a file or pipe (of which the other end is waited for). Raises NotFound or InputError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_open(what, error) from error


@contextmanager
def regular_descriptor(where: Where, what: str) -> Iterator[int]:
    """The descriptor of a regular file for the time of the context."""
    if isinstance(where, OpenFile):
        yield where.fd
    elif isinstance(where, int):
        yield where
    else:
        raise InputError(f"{what} is not a regular file")


def open_regular(path: Path, what: str) -> int:
    """A descriptor of a regular file; a pipe put in its place cannot hang the reader. Raises NotFound or InputError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _cannot_open(what, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{what} is not a regular file")
    return fd


def _cannot_open(what: str, error: OSError) -> NotFound | InputError:
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what} does not exist")
    return InputError(f"cannot open {what}: {error.strerror}")


class Seen:
    """The SHA-256 of what was read, complete once the reader is at its end: ``stored`` of the bytes as they are stored, ``tar`` of those of the tar itself."""

    def __init__(self, *, with_tar: bool = True) -> None:
        self.stored = self.tar = hashlib.sha256()
        self.with_tar = with_tar


@contextmanager
def tar_reader(
    source: Opened, what: str, *, limits: Limits | None = None, advance: Callable[[int], None] | None = None, seen: Seen | None = None
) -> Iterator[TarReader]:
    """A reader of a tar that may be compressed. ``advance`` is told the bytes read; ``seen`` takes hashes, for which nothing is skipped."""
    blocks, read = source.blocks, source.size or 0
    if source.size is None:

        def count(block: bytes) -> None:
            nonlocal read
            read += len(block)

        blocks = Tap(blocks, count)
    if advance is not None:
        blocks = Tap(blocks, lambda block: advance(len(block)), skips=seen is None)
    if seen is not None:
        blocks = Tap(blocks, seen.stored.update)
    first, blocks = peeked(blocks)
    kind = compression_of(first)
    if kind:
        blocks = ReadAhead(decompressed(blocks, kind, what), source.interrupt)
        if seen is not None and seen.with_tar:
            seen.tar = hashlib.sha256()
            blocks = Tap(blocks, seen.tar.update)
    try:
        yield TarReader(blocks, what, limits, lambda: read)
    finally:
        blocks.close()
