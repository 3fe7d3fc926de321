"""Opening inputs: a path, a descriptor or a binary stream as blocks, and tar readers upon them with hashing, decompression and progress."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from dsec_layers.builders.sources.blocks import Blocks, FileBlocks, PipeBlocks, ReadAhead, StreamBlocks, Tap
from dsec_layers.builders.sources.decompress import compression_of, decompressed, peeked
from dsec_layers.builders.sources.names import Limits
from dsec_layers.builders.sources.tar import TarReader
from dsec_layers.errors import InputError, NotFound

__all__ = ["Opened", "Where", "open_regular", "opened", "tar_reader"]

Where: TypeAlias = "Path | int | BinaryIO"
"""An input: a path, a descriptor (left open), or a binary stream (left open)."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open input. ``size`` is None for what has none; ``interrupt`` ends a read that waits in another thread."""

    blocks: Blocks
    size: int | None = None
    interrupt: Callable[[], None] | None = None


@contextmanager
def opened(where: Where, what: str) -> Iterator[Opened]:
    """Open an input for one reading."""
    if not isinstance(where, Path | int):
        yield Opened(StreamBlocks(where, what))
        return
    try:
        fd = where if isinstance(where, int) else os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_open(what, error) from error
    try:
        info = os.fstat(fd)
        if stat.S_ISREG(info.st_mode):
            start = os.lseek(fd, 0, os.SEEK_CUR) if isinstance(where, int) else 0
            size = max(0, info.st_size - start)
            yield Opened(FileBlocks(fd, start, size, what), size)
        elif stat.S_ISDIR(info.st_mode):
            raise InputError(f"{what} is a directory")
        else:
            pipe = PipeBlocks(fd, what)
            try:
                yield Opened(pipe, None, pipe.interrupt)
            finally:
                pipe.close()
    finally:
        if not isinstance(where, int):
            os.close(fd)


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


@contextmanager
def tar_reader(
    source: Opened,
    what: str,
    *,
    limits: Limits | None = None,
    see_input: Callable[[bytes], object] | None = None,
    see_output: Callable[[bytes], object] | None = None,
) -> Iterator[TarReader]:
    """A reader of a tar that may be compressed. ``see_input`` is shown every byte as stored, ``see_output`` every byte of the tar itself (hashes)."""
    blocks = source.blocks if see_input is None else Tap(source.blocks, see_input)
    first, blocks = peeked(blocks)
    kind = compression_of(first)
    if kind:
        blocks = ReadAhead(decompressed(blocks, kind, what), source.interrupt)
    if see_output is not None:
        blocks = Tap(blocks, see_output)
    try:
        yield TarReader(blocks, what, limits)
    finally:
        blocks.close()
