"""Builds tars for tests by Python's ``tarfile``, member by member, odd ones included."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from typing import Literal

from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.erofs.tree import Tree
from tests.kit.oracle import MemorySink, Snapshot, snapshot_tree

__all__ = ["Entry", "directory", "entry", "file", "hard_link", "ingest", "make_tar", "node", "symlink"]

Entry = tuple[tarfile.TarInfo, bytes]


def entry(
    name: str,
    kind: bytes,
    data: bytes = b"",
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: float = 0,
    link: str = "",
    device: tuple[int, int] = (0, 0),
    pax: Mapping[str, str] | None = None,
) -> Entry:
    """Any member."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode, info.uid, info.gid, info.mtime = kind, len(data), mode, uid, gid, mtime
    info.linkname = link
    info.devmajor, info.devminor = device
    info.pax_headers = dict(pax or {})
    return info, data


def file(name: str, data: bytes = b"", *, mode: int = 0o644, uid: int = 0, gid: int = 0, mtime: float = 0, pax: Mapping[str, str] | None = None) -> Entry:  # fmt: skip
    """A regular file."""
    return entry(name, tarfile.REGTYPE, data, mode=mode, uid=uid, gid=gid, mtime=mtime, pax=pax)


def directory(name: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0, mtime: float = 0, pax: Mapping[str, str] | None = None) -> Entry:
    """A directory."""
    return entry(name, tarfile.DIRTYPE, mode=mode, uid=uid, gid=gid, mtime=mtime, pax=pax)


def symlink(name: str, target: str) -> Entry:
    """A symbolic link."""
    return entry(name, tarfile.SYMTYPE, link=target, mode=0o777)


def hard_link(name: str, target: str) -> Entry:
    """A hard link."""
    return entry(name, tarfile.LNKTYPE, link=target)


def node(name: str, kind: bytes, major: int = 0, minor: int = 0, *, mode: int = 0o600) -> Entry:
    """A device or fifo."""
    return entry(name, kind, mode=mode, device=(major, minor))


def make_tar(*entries: Entry, form: Literal[0, 1, 2] = 2, end: bool = True) -> bytes:
    """An archive of ``entries`` in ustar (0), GNU (1) or PAX (2) format; without its end marker if not ``end``."""
    stream = io.BytesIO()
    for info, data in entries:
        stream.write(info.tobuf(form, "utf-8", "surrogateescape"))
        stream.write(data + bytes(-len(data) % 512))
    return stream.getvalue() + bytes(1024 if end else 0)


def ingest(data: bytes) -> tuple[Tree, MemorySink, Snapshot]:
    """What the tar source makes of an archive."""
    sink = MemorySink()
    tree = TarSource(io.BytesIO(data), "test.tar").ingest(sink)
    return tree, sink, snapshot_tree(tree, sink.content)
