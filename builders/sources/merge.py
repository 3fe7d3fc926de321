"""Applies the members of tar layers to one tree, by the rules of the OCI image specification ("Image Layer Filesystem Changeset").

The meaning is that of extraction in order into an empty directory, never leaving it: a parent that is a symbolic link is followed inside the tree, as if in a
chroot; a missing one is made (0755, root, time 0). Whiteouts and opaque markers delete what lower layers had, wherever they stand in their layer, and are never
entries themselves. docs/sources.md has the rules in full.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.names import MAX_PATH, Limits, check_name, memory_of, over_limit, shown
from dsec_layers.builders.sources.sparse import Holes
from dsec_layers.builders.sources.tar import Member, TarReader
from dsec_layers.erofs.overlay import OPAQUE_NAME, RESERVED_PREFIX, WHITEOUT_PREFIX
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError

__all__ = ["LayerTar", "Merger", "components", "merge_layers", "merge_tar"]

_MAX_LINKS: Final = 40  # symbolic links followed in one path, as many as Linux does
_MAX_STEPS: Final = 10_000  # components walked for one path, those of symbolic links included
_PLACES: Final = frozenset((b"", b".", b".."))


class Merger:
    """One tree, to which layers are applied from the lowest up: ``begin_layer``, then ``add`` for each member.

    ``add`` returns the inode if the member is a regular file, whose content is then due.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.tree = Tree()
        self._limits = limits or Limits()
        self._inodes = 1
        self._layer = -1
        self._memory = self._most = 0  # what the entries take; what they may take by what was read when they last went over it
        self._input_before = 0  # bytes of the layers below
        self._input: Callable[[], int] = lambda: 0
        self._heads: dict[
            bytes, tuple[Inode, set[bytes] | None]
        ] = {}  # directory part of a name, as spelt -> directory, names of this layer in it
        self._own: dict[Inode, set[bytes]] = {}  # names that this layer put into a directory, or passed through
        self._given: set[Inode] = set()  # directories whose attributes are this layer's
        self._hidden: set[tuple[Inode, bytes]] = set()  # names whose lower content is gone already

    def begin_layer(self, input_bytes: Callable[[], int] = lambda: 0) -> None:
        """What follows belongs to the next layer up, of which ``input_bytes`` tells the stored bytes, as far as they are known."""
        self._layer += 1
        self._input_before += self._input()
        self._input = input_bytes
        self._heads.clear()
        self._own.clear()
        self._given.clear()
        self._hidden.clear()

    def add(self, member: Member) -> Inode | None:
        """Apply one member. Raises InputError for one that leaves the tree, links to nothing, or stands below what is no directory."""
        name, inode, target = member
        self._memory += memory_of(name, inode)
        if self._memory > self._most:
            self._check_memory(name)
        head, _, tail = name.rpartition(b"/")
        place = self._heads.get(head)
        if place is None or tail in _PLACES or tail.startswith(WHITEOUT_PREFIX) or len(tail) > 255:
            place, tail = self._place(name, head, tail)
            if place is None:
                if tail:
                    self._delete(name, head, tail)
                elif inode is None or inode.children is None:
                    raise InputError(f"{shown(name)} would replace the root by something that is no directory")
                else:
                    self._update(self.tree.root, inode)
                return None
        parent, own = place
        children = parent.children
        assert children is not None  # places are directories
        if inode is None:
            inode = linked = self._link_target(name, target)
        else:
            linked = None
            self._inodes += 1
            if self._inodes > self._limits.inodes:
                raise over_limit(f"more than {self._limits.inodes} files and directories", "entries")
        old = children.get(tail)
        if own is not None:
            own.add(tail)
        if old is not None and self._replaces(old, inode):
            return None
        children[tail] = inode
        if inode.children is not None:
            self._enter(name, inode)
        return inode if linked is None and stat.S_ISREG(inode.mode) else None

    # -- places

    def _enter(self, name: bytes, directory: Inode) -> None:
        """A new directory of this layer: what is in it probably comes next."""
        if self._layer > 0:
            self._given.add(directory)
        self._heads[name] = (directory, self._own.setdefault(directory, set()) if self._layer > 0 else None)

    def _place(self, name: bytes, head: bytes, tail: bytes) -> tuple[tuple[Inode, set[bytes] | None] | None, bytes]:
        """The directory and last component of a name off the beaten track: (None, b"") for the root, (None, marker) for one that only deletes."""
        parts = components(name)
        if not parts:
            return None, b""
        for part in parts[:-1]:
            if part.startswith(RESERVED_PREFIX):
                return None, RESERVED_PREFIX  # below AUFS' own directories
            if part.startswith(WHITEOUT_PREFIX):
                raise InputError(f"{shown(name)} stands below a whiteout")
        if parts[-1].startswith(WHITEOUT_PREFIX):
            return None, parts[-1]
        check_name(parts[-1], name)
        parent = self._directory(name, parts[:-1], make=True)
        assert parent is not None  # it was made
        place = (parent, self._own.setdefault(parent, set()) if self._layer > 0 else None)
        if tail not in _PLACES:
            self._heads[head] = place
        return place, parts[-1]

    def _directory(self, name: bytes, parts: list[bytes], *, make: bool) -> Inode | None:
        """The directory that ``parts`` lead to, symbolic links followed inside the tree. A missing one is made, or (not ``make``) gives None."""
        root = self.tree.root
        path: list[tuple[Inode, bytes]] = []  # directories from the root down, each with the name of the next one
        here, todo, links, size, steps = root, parts[::-1], 0, 0, 0
        while todo:
            part = todo.pop()
            steps += 1
            if part == b"..":
                if path:
                    here, left = path.pop()
                    size -= len(left) + 1
                continue
            assert here.children is not None
            child = here.children.get(part)
            if child is not None and stat.S_ISLNK(child.mode):
                links += 1
                if links > _MAX_LINKS or steps > _MAX_STEPS:
                    raise InputError(f"{shown(name)} leads through more than {_MAX_LINKS} symbolic links, or very long ones")
                target = child.data or b""
                if target.startswith(b"/"):
                    here, path, size = root, [], 0
                todo += [item for item in reversed(target.split(b"/")) if item not in (b"", b".")]
                continue
            size += len(part) + 1
            if size > MAX_PATH:
                raise InputError(f"{shown(name)} leads to a path of more than {MAX_PATH} bytes")
            if not make and (child is None or child.children is None):
                return None
            if child is None:
                check_name(part, name)
                child = self._make(here, part)
            elif child.children is None:
                raise InputError(f"{shown(name)} stands below {shown(part)}, which is no directory")
            path.append((here, part))
            here = child
        if make and self._layer > 0:
            for directory, part in path:
                self._own.setdefault(directory, set()).add(part)
        return here

    def _make(self, parent: Inode, part: bytes) -> Inode:
        self._inodes += 1
        if self._inodes > self._limits.inodes:
            raise over_limit(f"more than {self._limits.inodes} files and directories", "entries")
        child = Inode(stat.S_IFDIR | 0o755)
        self._memory += memory_of(part, child)
        assert parent.children is not None
        parent.children[part] = child
        self._given.add(child)
        return child

    def _check_memory(self, name: bytes) -> None:
        read = self._input_before + self._input()
        self._most = self._limits.memory.most(read)
        if self._memory > self._most:
            raise over_limit(
                f"the entries up to {shown(name)} take {self._memory} bytes of memory, over the limit of {self._most} for {read} bytes of input",
                "memory",
            )

    # -- what a member does

    def _replaces(self, old: Inode, new: Inode) -> bool:
        """Make way for ``new``; True if a directory met itself again and only its attributes changed, or a link its own name."""
        if old is new:
            return True
        if old.children is not None and new.children is not None:
            self._update(old, new)
            return True
        if old.children is not None or stat.S_ISLNK(old.mode):
            self._heads.clear()
        return False

    def _update(self, old: Inode, new: Inode) -> None:
        old.mode, old.uid, old.gid, old.mtime, old.mtime_ns, old.xattrs = new.mode, new.uid, new.gid, new.mtime, new.mtime_ns, new.xattrs
        if self._layer > 0:
            self._given.add(old)

    def _link_target(self, name: bytes, target: bytes) -> Inode:
        try:
            parts = components(target)
            parent = self._directory(target, parts[:-1], make=False) if parts else None
        except InputError as error:
            raise InputError(f"{shown(name)} is a hard link to {shown(target)}, which is no place in the tree: {error.message}") from error
        found = parent.children.get(parts[-1]) if parent is not None and parent.children else None
        if found is None:
            raise InputError(f"{shown(name)} is a hard link to {shown(target)}, which does not exist")
        if found.children is not None:
            raise InputError(f"{shown(name)} is a hard link to {shown(target)}, which is a directory")
        return found

    # -- whiteouts

    def _delete(self, name: bytes, head: bytes, marker: bytes) -> None:
        if marker != OPAQUE_NAME and marker.startswith(RESERVED_PREFIX):
            return  # other names AUFS keeps for itself mean nothing elsewhere
        gone = marker[len(WHITEOUT_PREFIX) :]
        if gone in _PLACES:
            raise InputError(f"{shown(name)} is a whiteout of nothing")
        parent = self._directory(name, components(name)[:-1], make=False)
        if parent is None or not parent.children or self._layer == 0:
            return
        doomed = list(parent.children) if marker == OPAQUE_NAME else [gone]
        stack = [(parent, part) for part in doomed]
        while stack:
            directory, part = stack.pop()
            if (directory, part) not in self._hidden:
                self._hidden.add((directory, part))
                stack += self._hide(directory, part)

    def _hide(self, directory: Inode, part: bytes) -> Iterable[tuple[Inode, bytes]]:
        """Take away what lower layers have under one name; what this layer has put there or below stays. Returns the names to go on with."""
        assert directory.children is not None
        child = directory.children.get(part)
        if child is None:
            return ()
        if part not in self._own.get(directory, ()):
            del directory.children[part]
            if child.children is not None or stat.S_ISLNK(child.mode):
                self._heads.clear()
            return ()
        if child.children is None:
            return ()
        if child not in self._given:
            self._update(child, Inode(stat.S_IFDIR | 0o755))  # now an implied parent of this layer's entries
        return [(child, name) for name in child.children]


def components(path: bytes) -> list[bytes]:
    """The components of a stored path, relative to the root; leading slashes and ``.`` mean nothing. Raises InputError for ``..`` and for no path at all."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InputError(f"{shown(path)} has '..' in it and might leave the tree")
    if not path:
        raise InputError("an entry has no name")
    return parts


class LayerTar(Protocol):
    """A tar layer that can be read several times."""

    def open(self) -> AbstractContextManager[TarReader]:
        """Read it from the start. What can be verified is, when the context ends well."""


def merge_tar(reader: TarReader, sink: ContentSink, limits: Limits | None = None) -> Tree:
    """The tree of a tar that stands alone, read once: content goes to ``sink`` as it comes."""
    merger = Merger(limits)
    holes = Holes(limits or Limits())
    merger.begin_layer(reader.input_bytes)
    for member in reader:
        inode = merger.add(member)
        if inode is not None:
            if inode.size > reader.stored:
                holes.add(reader.what, member[0], inode.size, inode.size - reader.stored)
            reader.feed(sink, inode)
    return merger.tree


def merge_layers(layers: Sequence[LayerTar], sink: ContentSink, limits: Limits | None = None) -> Tree:
    """Apply ``layers``, lowest first, to one tree, and hand the content of the files that survive to ``sink``, in the order of the layers.

    A single layer is read once. Several are read twice: first the headers, to learn what survives, so that nothing is packed that a later layer deletes (ADR 0016).
    """
    if len(layers) == 1:
        with layers[0].open() as reader:
            return merge_tar(reader, sink, limits)
    merger = Merger(limits)
    holes = Holes(limits or Limits())
    files = [_apply(merger, layer) for layer in layers]
    alive = {id(inode) for _, inode in merger.tree.walk()}
    for layer, found in zip(layers, files, strict=True):
        due = [inode if inode is not None and id(inode) in alive else None for inode in found]
        if any(inode is not None for inode in due):
            _feed(layer, due, sink, holes)
    return merger.tree


def _apply(merger: Merger, layer: LayerTar) -> list[Inode | None]:
    """Apply one layer without its content. For each regular file in its order: the inode, None if it is no part of the tree."""
    with layer.open() as reader:
        merger.begin_layer(reader.input_bytes)
        files = []
        for member in reader:
            inode = merger.add(member)
            if member[1] is not None and stat.S_ISREG(member[1].mode):
                files.append(inode)
    return files


def _feed(layer: LayerTar, due: list[Inode | None], sink: ContentSink, holes: Holes) -> None:
    """Read a layer again and hand over the content of those regular files that are ``due``."""
    with layer.open() as reader:
        position = 0
        for name, inode, _ in reader:
            if inode is None or not stat.S_ISREG(inode.mode):
                continue
            wanted = due[position] if position < len(due) else inode
            position += 1
            if wanted is None:
                continue
            if wanted is inode or wanted.size != inode.size:
                raise InputError(f"{shown(name)}: the layer changed while it was read")
            if inode.size > reader.stored:
                holes.add(reader.what, name, inode.size, inode.size - reader.stored)
            reader.feed(sink, wanted)
        if position != len(due):
            raise InputError("a layer changed while it was read")
