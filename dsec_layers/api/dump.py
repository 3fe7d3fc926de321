"""``dump``: an image or layer as text, for looking at and for ``diff``."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from dsec_layers.api.session import Session
from dsec_layers.blocksource import BlockSource, FileSource, check_range
from dsec_layers.digest import Digest, is_digest
from dsec_layers.erofs.dump import dump as dump_erofs
from dsec_layers.errors import InputError, LimitError, NotFound, UsageError
from dsec_layers.fsio import map_os_error
from dsec_layers.layers.frames import MAX_METADATA, split_metadata
from dsec_layers.layers.manifest import Layer
from dsec_layers.layers.tables import dump_segments
from dsec_layers.overlaybd.dump import DumpKind
from dsec_layers.overlaybd.dump import dump as dump_overlaybd
from dsec_layers.registry.objects import resolve_any
from dsec_layers.store.base import Store

__all__ = ["KINDS", "MAX_LINES", "Dump", "dump"]

KINDS: Final = ("auto", "erofs", "lsmt", "zfile")
MAX_LINES: Final = 1_000_000
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_EROFS: Final = b"\xe2\xe1\xf5\xe0"
_EROFS_AT: Final = 1024
_BY_DIGEST: Final = "give the digest of one of its blobs; dsec-layers inspect shows them"


@dataclass(frozen=True, slots=True)
class Dump:
    """What is dumped, its bytes, and the lines, which are made while they are read and can be read once."""

    name: str
    kind: str
    size: int
    lines: Iterator[str]


@contextmanager
def dump(session: Session, text: str, *, kind: str = "auto", max_lines: int = MAX_LINES) -> Iterator[Dump]:
    """The dump of a file, or of a blob of the store by its digest, or of a layer's metadata by its name or digest.

    ``kind``: ``erofs`` (an image, or a metadata blob with one in it), ``zfile`` or ``lsmt`` (that wrapping of an OverlayBD file alone), ``auto`` (by what
    the bytes begin with). Reading the lines raises ImageError where the bytes are not well-formed and LimitError after ``max_lines``.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", hint=f"one of {', '.join(KINDS)}")
    with _open(session, text) as source:
        if kind == "auto" and _is_erofs(source):
            kind = "erofs"
        lines = _erofs(source) if kind == "erofs" else dump_overlaybd(source, DumpKind(kind))
        yield Dump(text, kind if kind != "auto" else "overlaybd", source.size, _bounded(lines, max_lines))


def _bounded(lines: Iterator[str], most: int) -> Iterator[str]:
    yield from islice(lines, most)
    if next(lines, None) is not None:
        raise LimitError(f"the dump has more than {most} lines", hint="--max-lines N prints more")


def _is_erofs(source: BlockSource) -> bool:
    return _at(source, 0, 4) == _ZSTD or _at(source, _EROFS_AT, 4) == _EROFS


def _erofs(source: BlockSource) -> Iterator[str]:
    """An image; of a metadata blob the image and the segment table."""
    if source.size > MAX_METADATA:
        raise LimitError(f"an image of {source.size} bytes, at most {MAX_METADATA} are read here")
    data = source.pread(0, source.size)
    if data[:4] != _ZSTD:
        yield from dump_erofs(data)
        return
    image, table = split_metadata(data)
    yield from dump_erofs(image)
    yield "# segment table; offsets are in it"
    yield from dump_segments(table)


def _at(source: BlockSource, offset: int, length: int) -> bytes:
    return source.pread(offset, length) if offset + length <= source.size else b""


@contextmanager
def _open(session: Session, text: str) -> Iterator[BlockSource]:
    if os.path.lexists(text) or text.startswith((".", "/")):
        fd = _open_file(Path(text))
        try:
            yield FileSource(fd, name=text)
        finally:
            os.close(fd)
    else:
        yield _Blob(session.store, _blob(session, text))


def _open_file(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer is an answer, not a wait
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        os.close(fd)
        raise InputError(f"{path} is no file that could be dumped")
    return fd


def _blob(session: Session, text: str) -> Digest:
    """The blob to dump: that of this digest, or the metadata of the layer that ``text`` names."""
    try:
        _, found = resolve_any(session.store, text)
    except (InputError, LimitError):
        if not is_digest(text):
            raise
        return text
    if not isinstance(found, Layer):
        raise UsageError(f"{text} consists of several layers", hint=_BY_DIGEST)
    return found.metadata.digest


class _Blob:
    """A blob of a store, read as it is: a dump is for what may be damaged."""

    def __init__(self, store: Store, digest: Digest) -> None:
        self._store, self._digest = store, digest
        self.size = store.stat(digest).size

    def pread(self, offset: int, length: int) -> bytes:
        """See BlockSource."""
        check_range(offset, length, self.size)
        return bytes(self._store.read(self._digest, offset, length)) if length else b""
