"""Where sources put file data: the seam between reading an input and packing it into segments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dsec_layers.digest import Buffer
from dsec_layers.erofs.tree import Inode

__all__ = ["ContentSink"]


class ContentSink(Protocol):
    """Takes the content of regular files and fills in the inode's ``size`` and ``data`` or extents.

    Called from one thread, once for each inode, in the order the source yields. Buffers handed over must stay unchanged (slices of immutable ``bytes``):
    a sink may keep views of them until their segment is written.
    """

    def whole(self, inode: Inode, data: Buffer) -> None:
        """A file whose whole content is at hand (at most a few MiB)."""

    def stream(self, inode: Inode, size: int, pieces: Iterable[Buffer | int]) -> None:
        """A large or sparse file of ``size`` bytes: pieces in order, an int being a hole of that many bytes.

        Raises InputError if the pieces do not add up to ``size``.
        """
