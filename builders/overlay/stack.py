"""Stacks trees in overlayfs' own form: what a mount of several uppers shows, kept as one upper for the layer below.

Kernel: Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsec_layers.builders.names import keeps_xattr, shown
from dsec_layers.erofs.overlay import OPAQUE_XATTR, ORIGIN_XATTR, TRUSTED_PREFIX, USER_PREFIX, is_opaque, is_whiteout
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.errors import InputError

__all__ = ["overlay_xattr", "stack_uppers"]

_DROPPED: Final = frozenset((b"origin", b"impure", b"nlink", b"upper", b"uuid", b"protattr"))
_REFUSED: Final = frozenset((b"redirect", b"metacopy", b"verity", b"whiteout", b"whiteouts"))


def overlay_xattr(path: bytes, is_dir: bool, name: bytes, value: bytes) -> bytes | None:
    """The name under which an attribute found in an upper is kept, None if it is overlayfs' note to itself (unprivileged mounts use ``user.overlay.``).

    Raises InputError for notes without which the upper cannot be understood: content or children that are elsewhere.
    """
    for prefix in (TRUSTED_PREFIX, USER_PREFIX):
        if name.startswith(prefix):
            note = name[len(prefix) :]
            if note in _DROPPED:
                return None
            if note.startswith(b"overlay."):
                return name  # an attribute of an overlay within, which the kernel spells so (Linux >= 6.7)
            if note == b"opaque" and is_dir and value == b"y":
                return OPAQUE_XATTR
            if note in _REFUSED or note == b"opaque":
                raise InputError(
                    f"{shown(path)} has the overlayfs attribute {shown(name)}: its content is in another layer",
                    hint="mount the overlay with redirect_dir=off,metacopy=off",
                )
            raise InputError(f"{shown(path)} has the overlayfs attribute {shown(name)}, which is not known here")
    return name if keeps_xattr(name) else None


def stack_uppers(trees: Sequence[Tree]) -> Tree:
    """One tree for uppers from the lowest to the highest, made of their inodes (which change). Whiteouts that have nothing left to hide are left out.

    The root's attributes are the highest one's.
    """
    result = trees[0] if trees else Tree()
    for tree in trees[1:]:
        _put_below(tree.root, result.root)
        result = tree
    _tidy(result.root)
    return result


def _put_below(upper: Inode, lower: Inode) -> None:
    """Merge ``lower`` into ``upper``, which lies over it."""
    stack = [(upper, lower)]
    while stack:
        high, low = stack.pop()
        if is_opaque(high):
            continue
        assert high.children is not None and low.children is not None
        if is_opaque(low):
            _make_opaque(high)
        for name, below in low.children.items():
            above = high.children.get(name)
            if above is None:
                high.children[name] = below
            elif above.is_dir and below.is_dir:
                stack.append((above, below))
            elif above.is_dir:
                _make_opaque(above)  # whatever lies still deeper was hidden already


def _make_opaque(directory: Inode) -> None:
    if not is_opaque(directory):
        directory.xattrs = tuple(sorted((*directory.xattrs, (OPAQUE_XATTR, b"y"))))


def _tidy(root: Inode) -> None:
    """Give the same view the same tree, and one whose whiteouts stay hidden.

    Where a directory is opaque nothing of the layers below shows, so marks inside it say nothing. Other directories with whiteouts say that they have some.
    """
    stack = [(root, False)]
    while stack:
        directory, hidden = stack.pop()
        assert directory.children is not None
        if hidden and is_opaque(directory):
            directory.xattrs = tuple(pair for pair in directory.xattrs if pair[0] != OPAQUE_XATTR)
        inside = hidden or is_opaque(directory)
        whiteouts = [name for name, inode in directory.children.items() if is_whiteout(inode)]
        if inside:
            for name in whiteouts:
                del directory.children[name]
        elif whiteouts and (ORIGIN_XATTR, b"") not in directory.xattrs:
            directory.xattrs = tuple(sorted((*directory.xattrs, (ORIGIN_XATTR, b""))))
        stack += [(inode, inside) for inode in directory.children.values() if inode.is_dir]
