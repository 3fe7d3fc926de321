"""The general oracle: what a file tree is, as plain values, from a directory, from tars (a slow, independent reference) or from a Tree; and how two differ.

Nothing here shares code with the package's readers: ``tarfile`` reads the archives, and the layer rules are spelt out once more over a dict of paths.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import zstandard

from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode, Tree

__all__ = ["MemorySink", "Node", "Snapshot", "data_ranges", "diff", "snapshot_dir", "snapshot_tars", "snapshot_tree"]

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


@dataclass
class Node:
    """One name of a tree. ``mtime`` is in nanoseconds; ``names`` are all paths of the inode; what a type does not have is empty."""

    type: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int = 0
    nlink: int = 1
    names: tuple[bytes, ...] = ()
    target: bytes = b""
    rdev: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    sha256: str = ""


Snapshot = dict[bytes, Node]
"""Nodes by path; the root's path is empty."""


def diff(one: Snapshot, two: Snapshot, *, ignore: Collection[str] = ()) -> list[str]:
    """How two trees differ, a line for each difference; no lines if they are equal. Fields named in ``ignore`` are not compared."""
    lines = [f"only in the first: {path!r}" for path in sorted(one.keys() - two.keys())]
    lines += [f"only in the second: {path!r}" for path in sorted(two.keys() - one.keys())]
    compared = [item.name for item in fields(Node) if item.name not in ignore]
    for path in sorted(one.keys() & two.keys()):
        for name in compared:
            left, right = getattr(one[path], name), getattr(two[path], name)
            if left != right:
                lines.append(f"{path!r} {name}: {left!r} != {right!r}")
    return lines


# -- a directory


def snapshot_dir(path: str | os.PathLike[str], *, skip: Collection[bytes] = ()) -> Snapshot:
    """The tree at ``path``, a mount point or any directory. Names of extended attributes in ``skip`` are left out."""
    nodes: Snapshot = {}
    groups: dict[tuple[int, int], list[bytes]] = {}
    top = os.fsencode(path)
    stack = [b""]
    while stack:
        relative = stack.pop()
        full = os.path.join(top, relative) if relative else top  # noqa: PTH118
        info = os.lstat(full)
        node = Node(_TYPES[stat.S_IFMT(info.st_mode)], stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns)
        node.xattrs = {
            os.fsencode(name): os.getxattr(full, name, follow_symlinks=False)
            for name in os.listxattr(full, follow_symlinks=False)
            if os.fsencode(name) not in skip
        }
        nodes[relative] = node
        if node.type == "dir":
            stack += [relative + b"/" + name if relative else name for name in os.listdir(full)]  # noqa: PTH208
            continue
        node.nlink = info.st_nlink
        groups.setdefault((info.st_dev, info.st_ino), []).append(relative)
        if node.type == "link":
            node.target, node.size = os.readlink(full), info.st_size  # noqa: PTH115
        elif node.type in ("char", "block"):
            node.rdev = os.major(info.st_rdev), os.minor(info.st_rdev)
        elif node.type == "file":
            node.size = info.st_size
            with open(full, "rb") as stream:
                node.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    for names in groups.values():
        for name in names:
            nodes[name].names = tuple(sorted(names))
    return nodes


def data_ranges(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """The (start, end) ranges of a file that its file system says hold data."""
    ranges = []
    with open(path, "rb") as stream:
        size, at = os.fstat(stream.fileno()).st_size, 0
        while at < size:
            try:
                start = os.lseek(stream.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(stream.fileno(), start, os.SEEK_HOLE)
            ranges.append((start, at))
    return ranges


# -- a Tree


class MemorySink:
    """A ContentSink that keeps everything: data pieces with their offsets by inode, in the order of the calls."""

    def __init__(self) -> None:
        self.pieces: dict[Inode, list[tuple[int, bytes]]] = {}
        self.holes: dict[Inode, int] = {}

    def whole(self, inode: Inode, data: Buffer) -> None:
        """Keep a file."""
        assert inode not in self.pieces
        self.pieces[inode] = [(0, bytes(data))]
        inode.size = len(data)

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        """Keep a file in pieces."""
        assert inode not in self.pieces
        kept: list[tuple[int, bytes]] = []
        at = 0
        for piece in pieces:
            if isinstance(piece, int):
                assert piece > 0
                self.holes[inode] = self.holes.get(inode, 0) + piece
                at += piece
            else:
                assert len(piece) > 0
                kept.append((at, bytes(piece)))
                at += len(piece)
        assert at == size, f"pieces of {at} bytes for a file of {size}"
        self.pieces[inode] = kept
        inode.size = size

    def content(self, inode: Inode) -> bytes:
        """The whole content of a file, holes as zeros."""
        data = bytearray(inode.size)
        for at, piece in self.pieces[inode]:
            data[at : at + len(piece)] = piece
        return bytes(data)


def snapshot_tree(tree: Tree, content: Callable[[Inode], bytes]) -> Snapshot:
    """The tree of a Tree value; ``content`` gives the bytes of a regular file (MemorySink.content)."""
    nodes: Snapshot = {}
    names: dict[int, list[bytes]] = {}
    for path, inode in tree.walk():
        node = Node(_TYPES[stat.S_IFMT(inode.mode)], stat.S_IMODE(inode.mode), inode.uid, inode.gid, inode.mtime * 10**9 + inode.mtime_ns)
        assert 0 <= inode.mtime_ns < 10**9 and list(inode.xattrs) == sorted(inode.xattrs)
        node.xattrs = dict(inode.xattrs)
        nodes[path] = node
        if node.type == "dir":
            continue
        names.setdefault(id(inode), []).append(path)
        if node.type == "link":
            assert inode.data is not None
            node.target, node.size = inode.data, inode.size
        elif node.type in ("char", "block"):
            node.rdev = os.major(inode.rdev), os.minor(inode.rdev)
        elif node.type == "file":
            node.size = inode.size
            node.sha256 = hashlib.sha256(content(inode)).hexdigest()
    for paths in names.values():
        for path in paths:
            nodes[path].names, nodes[path].nlink = tuple(sorted(paths)), len(paths)
    return nodes


# -- tars


@dataclass
class _File:
    """An inode of the reference: ``node`` without names, and directories carry nothing else."""

    node: Node


@dataclass
class _Name:
    file: _File
    layer: int


def snapshot_tars(layers: Sequence[str | os.PathLike[str] | bytes]) -> Snapshot:
    """The tree that tar layers (paths or bytes, lowest first, plain or compressed) make when extracted in order by the OCI whiteout rules."""
    names: dict[bytes, _Name] = {b"": _Name(_File(Node("dir", 0o755, 0, 0, 0)), 0)}
    for number, layer in enumerate(layers):
        data = layer if isinstance(layer, bytes) else Path(layer).read_bytes()
        _apply(names, number, _plain(data))
    groups: dict[int, list[bytes]] = {}
    for path, name in names.items():
        groups.setdefault(id(name.file), []).append(path)
    result: Snapshot = {}
    for path, name in names.items():
        node = name.file.node
        if node.type != "dir":
            node.names = tuple(sorted(groups[id(name.file)]))
            node.nlink = len(node.names)
        result[path] = node
    return result


def _plain(data: bytes) -> bytes:
    if data[:2] == b"\x1f\x8b":
        return gzip.decompress(data)
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    return data


def _apply(names: dict[bytes, _Name], layer: int, data: bytes) -> None:
    if not data:
        return
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            _apply_member(names, layer, archive, member)


def _apply_member(names: dict[bytes, _Name], layer: int, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    parts = _parts(_bytes(member.name))
    if any(part.startswith(b".wh..wh.") for part in parts[:-1]):
        return
    assert not any(part.startswith(b".wh.") for part in parts[:-1])
    if parts and parts[-1].startswith(b".wh."):
        parent = _follow(names, parts[:-1], None)
        if parent is not None and parts[-1] == b".wh..wh..opq":
            _prune(names, layer, _join(parent, b""))
        elif parent is not None and not parts[-1].startswith(b".wh..wh."):
            _prune(names, layer, _join(parent, parts[-1][4:]), exact=True)
        return
    if not parts:
        path = b""
    else:
        parent = _follow(names, parts[:-1], layer)
        assert parent is not None
        path = _join(parent, parts[-1])
    if member.islnk():
        target = _parts(_bytes(member.linkname))
        above = _follow(names, target[:-1], None)
        assert above is not None
        file = names[_join(above, target[-1])].file
        assert file.node.type != "dir"
    else:
        file = _File(_node(archive, member))
    old = names.get(path)
    if old is not None and not (old.file.node.type == "dir" and file.node.type == "dir"):
        _remove(names, path)
    names[path] = _Name(file, layer)


def _prune(names: dict[bytes, _Name], layer: int, prefix: bytes, *, exact: bool = False) -> None:
    """Delete what lower layers have below ``prefix`` (or under exactly that path); parents of what stays become implied ones."""
    below = prefix + b"/" if exact else prefix
    inside = [path for path in names if path and (path.startswith(below) or (exact and path == prefix))]
    kept = [path for path in inside if names[path].layer == layer]
    for path in inside:
        if names[path].layer < layer:
            del names[path]
    for path in kept:
        parts = path.split(b"/")
        for count in range(1, len(parts)):
            above = b"/".join(parts[:count])
            if above not in names:
                names[above] = _Name(_File(Node("dir", 0o755, 0, 0, 0)), layer)


def _remove(names: dict[bytes, _Name], path: bytes) -> None:
    for other in [other for other in names if other == path or other.startswith(path + b"/")]:
        del names[other]


def _follow(names: dict[bytes, _Name], parts: list[bytes], make_in: int | None) -> bytes | None:
    """The path of a directory, links followed inside the tree; missing ones are made in layer ``make_in``, or give None."""
    path = b""
    todo = list(parts)
    while todo:
        part = todo.pop(0)
        if part == b"..":
            path = path.rpartition(b"/")[0]
            continue
        here = _join(path, part)
        found = names.get(here)
        if found is None:
            if make_in is None:
                return None
            names[here] = _Name(_File(Node("dir", 0o755, 0, 0, 0)), make_in)
        elif found.file.node.type == "link":
            target = found.file.node.target
            if target.startswith(b"/"):
                path = b""
            todo = [item for item in target.split(b"/") if item not in (b"", b".")] + todo
            continue
        elif found.file.node.type != "dir":
            assert make_in is None
            return None
        path = here
    return path


def _node(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Node:
    kind = _kind(member)
    records: dict[str, Any] = dict(member.pax_headers)
    mtime = int(Decimal(records["mtime"]) * 10**9 // 1) if "mtime" in records else int(member.mtime) * 10**9
    node = Node(kind, member.mode & 0o7777, member.uid, member.gid, mtime)
    for key, value in records.items():
        if key.startswith("SCHILY.xattr."):
            node.xattrs[_bytes(key[13:]).replace(b"%3D", b"=").replace(b"%25", b"%")] = _bytes(value)
        elif key.startswith("LIBARCHIVE.xattr."):
            node.xattrs.setdefault(unquote_to_bytes(key[17:]), _base64(value))
    if kind == "file":
        stream = archive.extractfile(member)
        content = stream.read() if stream else b""
        node.size, node.sha256 = len(content), hashlib.sha256(content).hexdigest()
    elif kind == "link":
        node.target = _bytes(member.linkname)
        node.size = len(node.target)
    elif kind in ("char", "block"):
        node.rdev = member.devmajor, member.devminor
    return node


def _kind(member: tarfile.TarInfo) -> str:
    if member.isreg():
        return "file"
    for kind, name in ((tarfile.DIRTYPE, "dir"), (tarfile.SYMTYPE, "link"), (tarfile.CHRTYPE, "char"), (tarfile.BLKTYPE, "block")):
        if member.type == kind:
            return name
    assert member.type == tarfile.FIFOTYPE
    return "fifo"


def _base64(value: str) -> bytes:
    return base64.b64decode(value + "=" * (-len(value) % 4))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory + (b"/" if directory else b"") + name
