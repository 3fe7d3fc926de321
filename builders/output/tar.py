"""A tar stream of a tree: PAX format, hard links, xattrs, nanoseconds, sparse files (GNU.sparse 1.0), devices.

The standard library's ``tarfile`` makes the headers; the entries are written in path order, so the stream is deterministic.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import InputError
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.view import open_view, walk
from dsec_layers.store.base import Store

__all__ = ["TarWriter", "write_tar"]

_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}
_ZEROS = bytes(1 << 20)
_RECORD = 10240


def write_tar(store: Store, text: str, stream: BinaryIO, progress: Progress = SILENT) -> int:
    """Write the merged view of the layer or environment that ``text`` names; the bytes written."""
    writer = TarWriter(stream)
    with progress.task(f"exporting {text}") as task:
        for path, entry in walk(open_view(store, text)):
            layer, inode = entry.layer, entry.inode
            regular = stat.S_ISREG(inode.mode)
            pieces, regions = (layer.pieces(inode), layer.regions(inode)) if regular else ((), None)
            writer.add(path or b".", inode, pieces, regions, identity=entry.identity, xattrs=entry.xattrs)
            task.advance(inode.size)
    return writer.close()


class TarWriter:
    """Writes entries to a binary stream. ``close`` ends the archive."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._written = 0
        self._first: dict[object, bytes] = {}

    def add(
        self,
        path: bytes,
        inode: Inode,
        pieces: Iterable[Buffer | int] = (),
        regions: Sequence[tuple[int, int]] | None = None,
        *,
        identity: object = None,
        xattrs: tuple[tuple[bytes, bytes], ...] | None = None,
    ) -> None:
        """One entry. ``pieces`` is a regular file's content, ints being holes; ``regions`` its (offset, length) parts that are not holes, None for all of it.

        ``identity`` (hashable) makes a later entry with the same one a hard link. Raises InputError for a socket, which tar cannot hold.
        """
        kind = stat.S_IFMT(inode.mode)
        if kind not in _TYPES:
            raise InputError(f"tar cannot hold the socket {path!r}")
        info = tarfile.TarInfo(_text(path) + ("/" if kind == stat.S_IFDIR else ""))
        info.mode, info.uid, info.gid, info.mtime = stat.S_IMODE(inode.mode), inode.uid, inode.gid, inode.mtime
        pax = {"SCHILY.xattr." + _text(name): _text(value) for name, value in (inode.xattrs if xattrs is None else xattrs)}
        if inode.mtime_ns:
            pax["mtime"] = _seconds(inode.mtime, inode.mtime_ns)
        if identity is not None and kind != stat.S_IFDIR:
            first = self._first.setdefault(identity, path)
            if first is not path:
                info.type, info.linkname = tarfile.LNKTYPE, _text(first)
                self._header(info, {})
                return
        info.type = _TYPES[kind]
        if kind == stat.S_IFLNK:
            info.linkname = _text(inode.data or b"")
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            info.devmajor, info.devminor = _device(inode.rdev)
        if kind != stat.S_IFREG or not inode.size:
            self._header(info, pax)
        elif regions is None or list(regions) == [(0, inode.size)]:
            info.size = inode.size
            self._header(info, pax)
            self._content(info.name, inode.size, pieces)
        else:
            self._sparse(info, pax, inode.size, pieces, list(regions))

    def whiteout(self, path: bytes) -> None:
        """An OCI whiteout marker: an empty regular file of that name."""
        info = tarfile.TarInfo(_text(path))
        info.mode = 0o644
        self._header(info, {})

    def close(self) -> int:
        """End the archive: two zero blocks, padded to a whole record. The bytes of the whole."""
        self._write(bytes(1024))
        self._write(bytes(-self._written % _RECORD))
        return self._written

    def _sparse(
        self, info: tarfile.TarInfo, pax: dict[str, str], size: int, pieces: Iterable[Buffer | int], regions: list[tuple[int, int]]
    ) -> None:
        if not regions or sum(regions[-1]) != size:
            regions.append((size, 0))
        table = "".join(f"{number}\n" for number in [len(regions), *(n for region in regions for n in region)]).encode()
        table += bytes(-len(table) % 512)
        stored = sum(length for _, length in regions)
        pax = {**pax, "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": info.name, "GNU.sparse.realsize": str(size)}
        directory, _, name = info.name.rpartition("/")
        info.name, info.size = f"{directory + '/' if directory else ''}GNUSparseFile.0/{name}", stored + len(table)
        self._header(info, pax)
        self._write(table)
        self._content(info.name, stored, (piece for piece in pieces if not isinstance(piece, int)))

    def _content(self, name: str, size: int, pieces: Iterable[Buffer | int]) -> None:
        begun = self._written
        for piece in pieces:
            if isinstance(piece, int):
                for at in range(0, piece, len(_ZEROS)):
                    self._write(_ZEROS[: min(len(_ZEROS), piece - at)])
            else:
                self._write(piece)
        if self._written - begun != size:
            raise InputError(f"{name}: content has {self._written - begun} bytes, not {size}")
        self._write(bytes(-size % 512))

    def _header(self, info: tarfile.TarInfo, pax: dict[str, str]) -> None:
        info.pax_headers = pax
        self._write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _write(self, data: Buffer) -> None:
        self._stream.write(data)
        self._written += len(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _seconds(seconds: int, nanoseconds: int) -> str:
    """A decimal number, exact for times before 1970 as well."""
    total = seconds * 10**9 + nanoseconds
    sign, total = ("-", -total) if total < 0 else ("", total)
    return f"{sign}{total // 10**9}.{total % 10**9:09d}"


def _device(rdev: int) -> tuple[int, int]:
    return os.major(rdev), os.minor(rdev)
