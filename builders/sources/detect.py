"""Tells what an input is: a directory, an OCI image layout (a directory, or a tar of one), a ``docker save`` archive, or a tar of files."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias

from dsec_layers.builders.names import Limits, Overrides, over_limit, shown
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.base import Source
from dsec_layers.builders.sources.blocks import FileBlocks, StreamBlocks, Tap
from dsec_layers.builders.sources.decompress import beginning, compression_of, decompressed
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.builders.sources.image import Platform
from dsec_layers.builders.sources.inputs import Prefixed, Where, open_any, opened, regular_descriptor
from dsec_layers.builders.sources.oci import IMAGE_NAME, MAX_MEMBERS, ArchiveFiles, DirectoryFiles, load_docker, load_oci, path_of
from dsec_layers.builders.sources.tar import TarReader
from dsec_layers.descriptors import OpenFile
from dsec_layers.errors import DsecError, InputError, LimitError, NotFound, UsageError
from dsec_layers.fsio import map_os_error, pwrite_all

__all__ = ["Kind", "detect"]

Kind: TypeAlias = Literal["auto", "tar", "directory", "oci", "docker"]

_PEEK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Settings:
    kind: Kind
    platform: Platform
    reference: str | None
    overrides: Overrides | None
    limits: Limits | None
    spool: Path | None


def detect(
    source: str | Path | BinaryIO,
    *,
    kind: Kind = "auto",
    platform: str = "linux/amd64",
    reference: str | None = None,
    excludes: Iterable[str] = (),
    one_filesystem: bool = False,
    overrides: Overrides | None = None,
    limits: Limits | None = None,
    spool: Path | None = None,
) -> Source:
    """The source that ``source`` is: a path, ``"-"`` for standard input, or a binary stream.

    ``kind`` overrides what it looks like. ``platform`` and ``reference`` choose an image, ``excludes`` and ``one_filesystem`` are for directories. An image that
    comes from a stream or is compressed is first written to a nameless file in the directory ``spool`` (the system's temporary one by default).
    Raises NotFound, UsageError, InputError, or LimitError for an image that would make that file too large.
    """
    settings = _Settings(kind, Platform.parse(platform), reference, overrides, limits, spool)
    patterns = tuple(excludes)
    where: Where = 0 if source == "-" else Path(source) if isinstance(source, str | Path) else source
    name = "standard input" if source == "-" else str(where) if isinstance(where, Path) else "the stream"
    if isinstance(where, Path) and where.is_dir():
        if kind == "oci" or (kind == "auto" and all(_is_file(where / part) for part in ("oci-layout", "index.json"))):
            _no_excludes(patterns, one_filesystem)
            return _load(DirectoryFiles(where), settings)
        if kind in ("tar", "docker"):
            raise UsageError(f"{name} is a directory, not a file as {kind!r} has it")
        return DirectorySource(where, excludes=patterns, one_filesystem=one_filesystem, overrides=overrides, limits=limits)
    if kind == "directory":
        raise UsageError(f"{name} is not a directory")
    _no_excludes(patterns, one_filesystem)
    return _from_file(where, name, settings)


def _is_file(path: Path) -> bool:
    """Whether it is one that can be seen: what cannot be searched is for the directory's own reader to complain of."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def _no_excludes(patterns: tuple[str, ...], one_filesystem: bool) -> None:
    if patterns or one_filesystem:
        raise UsageError("exclude patterns and the one-file-system rule are for directories only")


def _from_file(where: Where, name: str, settings: _Settings) -> Source:
    if settings.kind == "tar":
        return TarSource(where, name, overrides=settings.overrides, limits=settings.limits)
    where, first, regular = _peek(where, name)
    compression = compression_of(first)
    archive = None
    if regular and not compression:
        archive = _archive(where, name, settings)
    elif settings.kind != "auto" or _may_be_image(beginning(first, compression)):
        where = _spooled(where, name, compression, settings)
        archive = _archive(where, name, settings)
    if archive is not None:
        return _load(archive, settings)
    return TarSource(where, name, overrides=settings.overrides, limits=settings.limits)


def _peek(where: Where, name: str) -> tuple[Where, bytes, bool]:
    """The input, its first bytes, and whether it is a file that can be read again; of any other the bytes are put back."""
    if isinstance(where, Path):
        where = OpenFile(open_any(where, name))
    with opened(where, name) as source:
        first = source.blocks.block()
        while len(first) < _PEEK and (more := source.blocks.block()):
            first += more
        regular = isinstance(source.blocks, FileBlocks)
    return (where if regular else Prefixed(first, where)), first, regular


def _archive(where: Where, name: str, settings: _Settings) -> ArchiveFiles | None:
    """The files of a tar of an image; None if it is no such tar, which the first name that no image has tells."""
    if settings.kind != "auto":
        return ArchiveFiles(name, lambda: regular_descriptor(where, name))
    try:
        archive = ArchiveFiles(name, lambda: regular_descriptor(where, name), only=IMAGE_NAME)
    except (InputError, LimitError):
        return None  # reading it as a tar of files will say what is wrong, if anything is
    return archive if "index.json" in archive or "manifest.json" in archive else None


def _may_be_image(start: bytes) -> bool:
    """Whether every name in the beginning of a tar is one that images have: an educated guess."""
    names = set()
    with contextlib.suppress(InputError):  # it is cut off, of course
        for name, _, _ in TarReader(StreamBlocks(io.BytesIO(start), ""), ""):
            names.add(path_of(name))
            if not IMAGE_NAME.fullmatch(path_of(name)):
                return False
    return bool(names - {"."})


def _spooled(where: Where, name: str, compression: str, settings: _Settings) -> OpenFile:
    """The tar within an input, in a nameless temporary file. Raises LimitError for one that grows out of proportion; the space it took is free then."""
    try:
        fd, path = tempfile.mkstemp(prefix="dsec-spool-", dir=settings.spool)
        held = OpenFile(fd)
        Path(path).unlink()
    except OSError as error:
        raise map_os_error(error, f"the spool file for {name}") from error
    try:
        _spool(where, name, compression, settings.limits or Limits(), fd)
    except BaseException:
        os.ftruncate(fd, 0)  # now, not when the last reference to the error is gone
        raise
    return held


def _spool(where: Where, name: str, compression: str, limits: Limits, fd: int) -> None:
    read = at = 0

    def count(block: bytes) -> None:
        nonlocal read
        read += len(block)

    with opened(where, name) as source:
        stored = Tap(source.blocks, count)
        blocks = decompressed(stored, compression, name) if compression else stored
        while data := blocks.block():
            most = limits.spool.most(read)
            if at + len(data) > most:
                entry = shown(_last_entry(fd, at, name))
                raise over_limit(
                    f"{name}: its first {read} bytes hold more than {most}, the limit of a temporary copy, at the entry {entry}", "spool"
                )
            try:
                pwrite_all(fd, data, at)
            except OSError as error:
                raise map_os_error(error, f"the spool file for {name}") from error
            at += len(data)


def _last_entry(fd: int, size: int, name: str) -> bytes:
    """The name of the last entry that begins in the first ``size`` bytes of a tar; of very many entries, one."""
    last = b""
    try:
        for entry, _, _ in islice(TarReader(FileBlocks(fd, 0, size, name), name), MAX_MEMBERS):
            last = entry
    except DsecError:
        pass  # it is cut off, of course
    return last


def _load(files: ArchiveFiles | DirectoryFiles, settings: _Settings) -> Source:
    def load(loader: Callable[..., Source]) -> Source:
        return loader(
            files, platform=settings.platform, reference=settings.reference, overrides=settings.overrides, limits=settings.limits
        )  # fmt: skip

    has_docker = isinstance(files, ArchiveFiles) and "manifest.json" in files
    if settings.kind == "docker" or (settings.kind == "auto" and isinstance(files, ArchiveFiles) and "index.json" not in files):
        return load(load_docker)
    try:
        return load(load_oci)
    except NotFound:
        if settings.kind == "auto" and has_docker and settings.reference is not None:
            return load(load_docker)  # Docker's own names are only there
        raise
