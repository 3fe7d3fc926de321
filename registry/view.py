"""The merged view of an environment in a store: what overlayfs shows, computed from the layers' trees (Documentation/filesystems/overlayfs.rst)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsec_layers.erofs.overlay import is_opaque, is_whiteout, without_overlay
from dsec_layers.erofs.tree import Inode
from dsec_layers.registry.content import LayerContent, open_layer
from dsec_layers.registry.objects import members_of, resolve
from dsec_layers.store.base import Store

__all__ = ["Entry", "merge", "open_view", "walk"]


class Entry:
    """One name in the merged view: the inode that shows, the layer it comes from, and for a directory its merged children."""

    __slots__ = ("children", "inode", "layer")

    def __init__(self, layer: LayerContent, inode: Inode) -> None:
        self.layer = layer
        self.inode = inode
        self.children: dict[bytes, Entry] | None = {} if inode.is_dir else None

    @property
    def xattrs(self) -> tuple[tuple[bytes, bytes], ...]:
        """The inode's xattrs without overlayfs' own."""
        return without_overlay(self.inode)

    @property
    def identity(self) -> tuple[int, int]:
        """Equal for two names of one inode."""
        return id(self.layer), id(self.inode)


def open_view(store: Store, text: str) -> Entry:
    """The merged view of a layer or environment, read from the store."""
    return merge([open_layer(store, member) for member in members_of(*resolve(store, text))])


def merge(layers: Sequence[LayerContent]) -> Entry:
    """The view of layers given from bottom to top. Whiteouts and opaque directories are applied and do not show."""
    root = _entry(layers[0], layers[0].tree.root, None)
    for layer in layers[1:]:
        root = _entry(layer, layer.tree.root, root)
    return root


def walk(root: Entry) -> Iterator[tuple[bytes, Entry]]:
    """Every (path, entry), parents first, names in byte order; the root's path is empty."""
    stack: list[tuple[bytes, Entry]] = [(b"", root)]
    while stack:
        path, entry = stack.pop()
        yield path, entry
        if entry.children:
            prefix = path + b"/" if path else b""
            stack.extend((prefix + name, entry.children[name]) for name in sorted(entry.children, reverse=True))


def _entry(layer: LayerContent, inode: Inode, below: Entry | None) -> Entry:
    top = Entry(layer, inode)
    stack = [(top, below)]
    while stack:
        entry, lower = stack.pop()
        if entry.children is None:
            continue
        if lower is not None and lower.children is not None and not is_opaque(entry.inode):
            entry.children = dict(lower.children)
        for name, child in (entry.inode.children or {}).items():
            if is_whiteout(child):
                entry.children.pop(name, None)
                continue
            hidden = entry.children.get(name)
            entry.children[name] = fresh = Entry(layer, child)
            stack.append((fresh, hidden))
    return top
