"""Trees on their way into a layer: moved below a directory, cut down to one, freed of overlay marks. No I/O."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

from dsec_layers.builders.excludes import Excludes
from dsec_layers.erofs.overlay import OPAQUE_XATTR, ORIGIN_XATTR, is_opaque, is_whiteout
from dsec_layers.erofs.tree import Inode, Tree, show_path

__all__ = [
    "Lookup",
    "Underneath",
    "cut_to_prefix",
    "directory_like",
    "drop_marks",
    "drop_origins",
    "exclude",
    "leading",
    "rooted",
    "without_marks",
]

Lookup: TypeAlias = Callable[[bytes], "Inode | None"]


class Underneath:
    """The layers below one that is being built, as one tree to ask about. ``load`` gives their trees, topmost first; it is called at the first question."""

    def __init__(self, load: Callable[[], Sequence[Tree]]) -> None:
        self._load = load

    @cached_property
    def _trees(self) -> Sequence[Tree]:
        return self._load()

    def __call__(self, path: bytes) -> Inode | None:
        """What an overlay of them shows at a path relative to the root, no link followed; of a directory the attributes only are right."""
        here = [tree.root for tree in self._trees]
        for part in path.split(b"/") if path else ():
            found: list[Inode] = []
            for directory in here:
                inode = (directory.children or {}).get(part)
                if inode is not None:
                    if is_whiteout(inode) or (found and not inode.is_dir):
                        break
                    found.append(inode)
                    if not inode.is_dir:
                        break
                if is_opaque(directory):
                    break
            here = found
        return here[0] if here else None


def leading(root: Inode, path: bytes, below: Lookup) -> Inode:
    """The directory at ``path`` in a new tree; missing ones on the way are made as the layers below have them, or 0755 of root with time 0."""
    here, done = root, b""
    for part in path.split(b"/") if path else ():
        done = done + b"/" + part if done else part
        assert here.children is not None
        child = here.children.get(part)
        if child is None or child.children is None:
            child = here.children[part] = directory_like(below(done))
        here = child
    return here


def directory_like(model: Inode | None) -> Inode:
    """A new empty directory with the attributes of ``model`` if that is a directory."""
    if model is None or not model.is_dir:
        return Inode(stat.S_IFDIR | 0o755)
    made = Inode(model.mode, model.uid, model.gid, model.mtime, model.mtime_ns)
    made.xattrs = without_marks(model)
    return made


def without_marks(inode: Inode) -> tuple[tuple[bytes, bytes], ...]:
    """The attributes of an inode without those that tell overlayfs what is below."""
    return tuple(pair for pair in inode.xattrs if pair[0] not in (OPAQUE_XATTR, ORIGIN_XATTR))


def drop_origins(tree: Tree) -> None:
    """Remove the marks of directories with whiteouts, in place: ``stack_uppers`` sets them again where they are still due."""
    for _, inode in tree.walk():
        if inode.is_dir:
            inode.xattrs = tuple(pair for pair in inode.xattrs if pair[0] != ORIGIN_XATTR)


def rooted(tree: Tree, place: str, below: Lookup) -> Tree:
    """The tree with its root at the directory ``place`` (absolute) of a new one."""
    parts = os.fsencode(place).strip(b"/")
    if not parts:
        return tree
    head, _, name = parts.rpartition(b"/")
    result = Tree(directory_like(below(b"")))
    holder = leading(result.root, head, below)
    assert holder.children is not None
    holder.children[name] = tree.root
    return result


def drop_marks(tree: Tree) -> None:
    """Remove whiteouts and opaque marks, in place: for a tree with nothing below it."""
    stack = [tree.root]
    while stack:
        directory = stack.pop()
        assert directory.children is not None
        directory.xattrs = without_marks(directory)
        for name in [name for name, inode in directory.children.items() if is_whiteout(inode)]:
            del directory.children[name]
        stack += [inode for inode in directory.children.values() if inode.is_dir]


def exclude(tree: Tree, patterns: Excludes) -> None:
    """Remove what the patterns match, in place."""
    stack = [(b"", tree.root)]
    while stack:
        path, directory = stack.pop()
        assert directory.children is not None
        for name, inode in list(directory.children.items()):
            place = path + b"/" + name if path else name
            if patterns.match(place, is_dir=inode.is_dir):
                del directory.children[name]
            elif inode.is_dir:
                stack.append((place, inode))


def cut_to_prefix(tree: Tree, prefix: str) -> list[str]:
    """Keep of a tree, in place, only the directory ``prefix`` and those that lead to it; returns the paths of what else there was, sorted.

    Directories outside are no finding: overlayfs copies those up for the least of reasons.
    """
    parts = os.fsencode(prefix).strip(b"/").split(b"/")
    outside: list[str] = []
    here: Inode | None = tree.root
    path = b""
    for part in parts:
        children = here.children if here is not None else None
        if children is None:
            break
        for name in [name for name in children if name != part]:
            place = path + b"/" + name if path else name
            inside = Tree(children.pop(name)).walk()
            outside += [show_path(place + b"/" + found if found else place) for found, item in inside if not item.is_dir]
        path = path + b"/" + part if path else part
        here = children.get(part)
    return sorted(outside)
