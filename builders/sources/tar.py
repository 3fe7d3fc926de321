"""The tar reader: walks a stream of headers and hands content on without copying it.

Python's ``tarfile`` and GNU tar are the judges of what an archive means (docs/sources.md has the rules). The reader takes names as they come; what they mean
inside a tree is for ``builders.merge`` to say.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.names import MAX_PATH, Limits, check_xattr, keeps_xattr, over_limit, shown
from dsec_layers.builders.sources import header as h
from dsec_layers.builders.sources.blocks import BLOCK, Blocks, Window
from dsec_layers.builders.sources.header import RECORD, Records
from dsec_layers.builders.sources.sparse import MAX_EXTENTS, Map, Map1, check_map, map_0, old_entries
from dsec_layers.digest import Buffer
from dsec_layers.erofs.overlay import WHITEOUT_DEVICE
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import InputError, LimitError

__all__ = ["Member", "TarReader"]

Member: TypeAlias = tuple[bytes, Inode | None, bytes]
"""Name as stored, less trailing slashes; inode, None for a hard link; the hard link's target as stored."""

WHOLE: Final = BLOCK
"""Files up to this size are handed over in one piece."""

MAX_EXTENSION: Final = 1 << 20
"""Bytes of one extended header or long name."""

_REGULAR: Final = stat.S_IFREG
_DIRECTORY: Final = stat.S_IFDIR
_FORMS: Final = {
    b"0": stat.S_IFREG, b"2": stat.S_IFLNK, b"3": stat.S_IFCHR, b"4": stat.S_IFBLK, b"5": stat.S_IFDIR, b"6": stat.S_IFIFO, b"D": stat.S_IFDIR,
}  # fmt: skip
_EXTENSIONS: Final = frozenset((b"x", b"X", b"g", b"L", b"K"))
_Fields: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]


class TarReader:
    """Iterates over the members of a tar stream, once.

    After each regular file's member its content can be handed to a sink by ``feed``; content not asked for is skipped. At the end of the archive the stream is
    read to its own end, so that checksums of a compression format are checked. Raises InputError for a malformed archive, naming the place.
    """

    def __init__(self, blocks: Blocks, what: str, limits: Limits | None = None, input_bytes: Callable[[], int] | None = None) -> None:
        self._window = Window(blocks, what)
        self._what = what
        self._limits = limits or Limits()
        self._left = 0  # bytes up to the next header
        self._stored = 0  # bytes of content among them
        self._sparse: Map | None = None
        self._name = b""
        self._globals: dict[bytes, bytes] = {}
        self._local: Records = []
        self._long: dict[bytes, bytes] = {}  # GNU long name (L) and long link target (K) for the next member
        self._attribute_bytes = 0
        self.input_bytes = input_bytes or (lambda: self._window.offset)
        """Tells how many stored bytes there are, or were read of a stream: what the archive may cost depends on them."""
        self.dropped: set[bytes] = set()
        """Names of extended attributes, and keywords of access control lists, that were left out."""
        self.whiteouts = 0
        """Character devices 0/0, which overlayfs takes for whiteouts."""

    @property
    def what(self) -> str:
        """What messages call the archive."""
        return self._what

    @property
    def stored(self) -> int:
        """Bytes of the current member's content that the archive holds: less than the file's size if that is sparse."""
        return self._stored

    @property
    def content_at(self) -> tuple[int, int]:
        """Where in the stream the content of the current member is: offset and stored bytes."""
        return self._window.offset, self._stored

    def __iter__(self) -> Iterator[Member]:
        window, unpack = self._window, h.HEADER.unpack_from
        while True:
            if self._left:
                self._skip()
            at = window.at
            if at + RECORD <= len(window.buffer):
                buffer = window.buffer
                window.at = at + RECORD
            else:
                buffer, at = self._next_record(), 0
            if not buffer or not h.is_header(buffer, at):
                self._finish(buffer, at)
                return
            fields = unpack(buffer, at)
            kind = fields[7]
            try:
                if kind in _EXTENSIONS:
                    self._extend(kind, h.size_field(fields[4]))
                    continue
                member = self._simple(buffer, at, fields) or self._member(buffer, at, fields)
            except (InputError, LimitError) as error:
                if not error.message.startswith(self._what):
                    error.message = f"{self._what}, before byte {window.offset}: {error.message}"
                    error.args = (error.message,)
                raise
            if member is not None:
                yield member

    def feed(self, sink: ContentSink, inode: Inode) -> None:
        """Hand the content of the current member, a regular file, to ``sink`` on behalf of ``inode``."""
        size, window = self._stored, self._window
        if self._sparse is not None:
            sink.stream(inode, inode.size, self._sparse_pieces(self._sparse, inode.size))
            return
        start = window.at
        following = start + self._left
        if following <= len(window.buffer):
            window.at = following
            self._left = self._stored = 0
            sink.whole(inode, window.view[start : start + size])
        elif size <= WHOLE:
            sink.whole(inode, self._take(size))
        else:
            sink.stream(inode, size, self._pieces(size))

    # -- content

    def _take(self, count: int) -> memoryview:
        try:
            data = self._window.take(count)
        except InputError as error:
            raise self._cut(error) from error
        self._left -= count
        self._stored -= count
        return data

    def _pieces(self, count: int) -> Iterator[memoryview]:
        while count:
            try:
                piece = self._window.piece(count)
            except InputError as error:
                raise self._cut(error) from error
            self._left -= len(piece)
            self._stored -= len(piece)
            count -= len(piece)
            yield piece

    def _sparse_pieces(self, sparse: Map, real: int) -> Iterator[Buffer | int]:
        at = 0
        for offset, length in sparse:
            if offset > at:
                yield offset - at
            yield from self._pieces(length)
            at = offset + length
        if real > at:
            yield real - at

    def _skip(self) -> None:
        try:
            self._window.skip(self._left)
        except InputError as error:
            raise self._cut(error) from error
        self._left = 0

    def _cut(self, error: InputError) -> InputError:
        return InputError(f"{error.message}, inside the entry {shown(self._name)}")

    # -- headers

    def _next_record(self) -> bytes:
        window = self._window
        if window.at == len(window.buffer) and not window.load():
            return b""
        return bytes(window.take(RECORD))

    def _finish(self, buffer: bytes, at: int) -> None:
        """The end: a block of zeros, or (tolerated) nothing at all where a header is due."""
        window = self._window
        if buffer and any(buffer[at : at + RECORD]):
            where = window.offset - RECORD
            if where == 0:
                raise InputError(
                    f"{self._what} is not a tar archive", hint="tar, plain or compressed by gzip, xz, zstd or bzip2, is understood"
                )
            raise InputError(f"{self._what}: damaged header at byte {where}")
        if self._local or self._long:
            raise InputError(f"{self._what} is truncated at byte {window.offset}: an extended header is the last thing in it")
        window.drain()

    def _extend(self, kind: bytes, size: int) -> None:
        """Take in an extended header or long name, which apply to the next member (``g``: to all that follow)."""
        if size > MAX_EXTENSION:
            raise InputError(f"extended header of {size} bytes, over the limit of {MAX_EXTENSION}")
        data = bytes(self._window.take(size))
        self._window.skip(-size % RECORD)
        if kind in (b"L", b"K"):
            self._long[kind] = h.text(data)
            return
        records = h.parse_records(data)
        if kind != b"g":
            again = bool(self._local)
            self._local += records
            if again and sum(len(key) + len(value) for key, value in self._local) > MAX_EXTENSION:
                raise InputError(f"extended headers of one entry are over the limit of {MAX_EXTENSION} bytes")
            return
        for keyword, value in records:
            if value:
                self._globals[keyword] = value
            else:
                self._globals.pop(keyword, None)
        if sum(len(key) + len(value) for key, value in self._globals.items()) > MAX_EXTENSION:
            raise InputError(f"global extended headers are over the limit of {MAX_EXTENSION} bytes")

    def _simple(self, buffer: bytes, at: int, fields: _Fields) -> Member | None:
        """A plain file or directory that the 512 bytes say all about: nearly every member, so this path is short."""
        name, mode, uid, gid, size, mtime, _, kind, _, magic = fields
        if self._local or self._globals or magic[:5] != b"ustar" or (buffer[at + 345] and magic[5] == 0):
            return None
        if self._long:
            name = self._long.get(b"L", b"")
            if len(name) > MAX_PATH:
                return None
        else:
            name = name.partition(b"\0")[0]
        if not name:
            return None
        if kind == b"0":
            if name[-1:] == b"/":
                return None
            inode = Inode(h.mode_field(_REGULAR, mode), h.id_field(uid), h.id_field(gid), h.time_field(mtime))
            self._stored = inode.size = stored = h.size_field(size)
            self._left = stored + (-stored & 511)
        elif kind == b"5":
            inode = Inode(h.mode_field(_DIRECTORY, mode), h.id_field(uid), h.id_field(gid), h.time_field(mtime))
            name = name.rstrip(b"/") or b"."
        else:
            return None
        if self._long:
            self._long = {}
        self._sparse = None
        self._name = name
        return name, inode, b""

    def _member(self, buffer: bytes, at: int, fields: _Fields) -> Member | None:
        """Any member, extended headers applied. None for entries that are no part of the tree (volume labels)."""
        local, self._local = self._local, []
        long, self._long = self._long, {}
        records = {**self._globals, **dict(local)}
        sparse_name = records.get(b"GNU.sparse.name", b"")
        kind = fields[7]
        prefix = h.long_prefix(buffer, at) if kind not in (b"S", b"D") else b""
        name = h.text(fields[0])
        name = sparse_name or records.get(b"path") or long.get(b"L") or (prefix + b"/" + name if prefix else name)
        target = records.get(b"linkpath") or long.get(b"K") or h.text(fields[8])
        size = h.length(h.decimal(records[b"size"])) if records.get(b"size") else h.size_field(fields[4])
        self._name = name
        self._check_paths(name, target)
        self._stored = self._left = 0
        self._sparse = None
        if kind == b"V":
            return None
        bare = name.rstrip(b"/") or b"."
        if kind == b"1":
            self._ignore_link_size(size)
            return bare, None, target
        kind = self._effective_kind(kind, name, size)
        inode = self._inode(kind, fields, records)
        if kind == b"0":
            self._stored, self._left, inode.size = size, size + (-size % RECORD), size
            if fields[7] == b"S" or b".sparse." in b" ".join(records) or b"SCHILY.realsize" in records:
                self._read_sparse(buffer, at, fields[7], local, inode)
        elif kind == b"D":
            self._left = size + (-size % RECORD)
        elif kind == b"2":
            if not target:
                raise InputError(f"the symbolic link {shown(name)} has no target")
            inode.data, inode.size = target, len(target)
        elif kind in (b"3", b"4"):
            inode.rdev = self._rdev(kind, buffer, at, records)
        return bare, inode, b""

    def _check_paths(self, name: bytes, target: bytes) -> None:
        for text in (name, target):
            if len(text) > MAX_PATH:
                raise InputError(f"the path {shown(text)} has {len(text)} bytes, over the limit of {MAX_PATH}")
            if b"\0" in text:
                raise InputError(f"the path {shown(text)} has a NUL in it")
        if not name:
            raise InputError("an entry has no name")

    def _effective_kind(self, kind: bytes, name: bytes, size: int) -> bytes:
        """The type an entry stands for: the two spellings of directories and the three of regular files are told apart."""
        if kind in (b"0", b"\0", b"7", b"S"):
            # v7 had no directories but names that end in a slash, and GNU tar takes empty files of later formats for such, too
            return b"5" if name.endswith(b"/") and kind != b"S" and (kind == b"\0" or not size) else b"0"
        if kind in (b"2", b"3", b"4", b"5", b"6", b"D"):
            return kind
        if kind in (b"M", b"N"):
            raise InputError(f"{shown(name)}: multi-volume archives and pre-1988 long names are not supported")
        raise InputError(f"{shown(name)} has the unknown entry type {kind!r}")

    def _inode(self, kind: bytes, fields: _Fields, records: dict[bytes, bytes]) -> Inode:
        uid = h.identity(h.decimal(records[b"uid"])) if records.get(b"uid") else h.id_field(fields[2])
        gid = h.identity(h.decimal(records[b"gid"])) if records.get(b"gid") else h.id_field(fields[3])
        inode = Inode(h.mode_field(_FORMS[kind], fields[1]), uid, gid)
        inode.mtime, inode.mtime_ns = h.mtime(records[b"mtime"]) if records.get(b"mtime") else (h.time_field(fields[5]), 0)
        if records and b"." in b" ".join(records):
            inode.xattrs = self._xattrs(records)
        return inode

    def _xattrs(self, records: dict[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
        self.dropped.update(keyword for keyword in records if keyword.startswith((b"SCHILY.acl.", b"RHT.security.")))
        pairs = []
        for name, value in h.xattrs_of(records).items():
            if not keeps_xattr(name):
                self.dropped.add(name)
                continue
            check_xattr(self._name, name, value)
            self._attribute_bytes += len(name) + len(value)
            pairs.append((name, value))
        if self._attribute_bytes > self._limits.attribute_bytes:
            raise over_limit(f"extended attributes are over the limit of {self._limits.attribute_bytes} bytes in all", "attributes")
        return tuple(sorted(pairs))

    def _ignore_link_size(self, size: int) -> None:
        """A hard link has no content, whatever its size says, unless (POSIX pax, ``-o linkdata``) what follows is no header: then it is skipped."""
        if not size:
            return
        following = self._window.peek(RECORD)
        if len(following) == RECORD and any(following) and not h.is_header(following, 0):
            self._left = size + (-size % RECORD)

    def _rdev(self, kind: bytes, buffer: bytes, at: int, records: dict[bytes, bytes]) -> int:
        major, minor = h.device(buffer, at)
        if records.get(b"SCHILY.devmajor") and records.get(b"SCHILY.devminor"):
            major, minor = h.decimal(records[b"SCHILY.devmajor"]), h.decimal(records[b"SCHILY.devminor"])
        if not 0 <= major < 1 << 12 or not 0 <= minor < 1 << 20:
            raise InputError(f"{shown(self._name)}: device {major}:{minor} is out of Linux' range")
        device = os.makedev(major, minor)
        self.whiteouts += kind == b"3" and device == WHITEOUT_DEVICE
        return device

    def _read_sparse(self, buffer: bytes, at: int, kind: bytes, local: Records, inode: Inode) -> None:
        """Set the map and the real size of a sparse file; the stored size becomes that of the data alone."""
        records = dict(local)
        if kind == b"S":
            sparse = self._old_map(buffer, at)
            inode.size = h.size_field(buffer[at + 483 : at + 495])
        elif (records.get(b"GNU.sparse.major"), records.get(b"GNU.sparse.minor")) == (b"1", b"0"):
            sparse = self._map_1()
            inode.size = h.length(h.decimal(records.get(b"GNU.sparse.realsize", b"")))
        else:
            listed = map_0(local)
            if listed is None:
                raise InputError(f"{shown(self._name)} is sparse in a way that is not known here")
            sparse = listed
            inode.size = h.length(h.decimal(records.get(b"GNU.sparse.size", b"")))
        self._sparse = check_map(sparse, inode.size, self._stored)

    def _old_map(self, buffer: bytes, at: int) -> Map:
        entries = old_entries(buffer, at + 386, 4)
        more = buffer[at + 482]
        while more:
            block = bytes(self._window.take(RECORD))
            entries += old_entries(block, 0, 21)
            more = block[504]
            if len(entries) > MAX_EXTENTS:
                raise InputError(f"sparse map has more than {MAX_EXTENTS} pieces")
        return entries

    def _map_1(self) -> Map:
        collector = Map1()
        while self._left >= RECORD:
            block = bytes(self._window.take(RECORD))
            self._left -= RECORD
            self._stored -= RECORD
            sparse = collector.feed(block)
            if sparse is not None:
                return sparse
        raise InputError("sparse map goes on to the end of the entry")
