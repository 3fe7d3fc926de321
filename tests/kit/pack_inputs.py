"""Inputs for tests of the packer: files as values, handed to a sink the way sources do, and layers read back from their store."""

from __future__ import annotations

import hashlib
import random
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.pack.layer import PackResult, pack_layer
from dsec_layers.digest import Buffer, Digest
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.layers.descriptor import Kind
from dsec_layers.progress import Progress
from dsec_layers.registry.content import open_layer
from dsec_layers.store.base import Store

__all__ = ["Files", "Pieces", "contents", "noise", "pack", "text"]


@dataclass(frozen=True)
class Pieces:
    """A file that is streamed: buffers, and holes as ints."""

    parts: tuple[bytes | int, ...]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return sum(part if isinstance(part, int) else len(part) for part in self.parts)

    def sha256(self) -> str:
        """Of the content, holes as zeros."""
        state = hashlib.sha256()
        for part in self.parts:
            for _ in range(part >> 20 if isinstance(part, int) else 0):
                state.update(bytes(1 << 20))
            state.update(bytes(part & 0xFFFFF) if isinstance(part, int) else part)
        return state.hexdigest()


class Files:
    """A source: a mapping of paths to contents, in its order. Every call of ``ingest`` makes a tree of its own."""

    def __init__(self, files: Mapping[str, bytes | Pieces]) -> None:
        self.files = dict(files)
        self.times = 0

    def ingest(self, sink: ContentSink, progress: Progress) -> Tree:
        """As a source's."""
        self.times += 1
        tree = Tree()
        for path, content in self.files.items():
            *parents, name = path.encode().split(b"/")
            directory = tree.root
            for parent in parents:
                assert directory.children is not None
                directory = directory.children.setdefault(parent, Inode(stat.S_IFDIR | 0o755))
            assert directory.children is not None
            inode = directory.children[name] = Inode(stat.S_IFREG | 0o644, mtime=1_700_000_000)
            if isinstance(content, Pieces):
                sink.stream(inode, content.size, self.pieces(content.parts))
            else:
                sink.whole(inode, content)
        return tree

    def pieces(self, parts: Iterable[bytes | int]) -> Iterable[Buffer | int]:
        """What a stream yields; to be overridden."""
        return parts

    def sha256(self) -> dict[str, str]:
        """The digest of each file's content."""
        return {
            path: content.sha256() if isinstance(content, Pieces) else hashlib.sha256(content).hexdigest()
            for path, content in self.files.items()
        }


def pack(store: Store, files: Files | Mapping[str, bytes | Pieces], **settings: Any) -> PackResult:
    """Pack files as a base with two workers."""
    source = files if isinstance(files, Files) else Files(files)
    return pack_layer(store, source.ingest, **{"kind": Kind.BASE, "workers": 2, **settings})


def contents(store: Store, digest: Digest) -> dict[str, str]:
    """The digest of each regular file's content in a layer, read back from the store, segments verified."""
    layer = open_layer(store, digest)
    found = {}
    for path, inode in layer.tree.walk():
        if stat.S_ISREG(inode.mode):
            state = hashlib.sha256()
            for piece in layer.pieces(inode):
                if isinstance(piece, int):
                    for at in range(0, piece, 1 << 20):
                        state.update(bytes(min(1 << 20, piece - at)))
                else:
                    state.update(piece)
            found[path.decode()] = state.hexdigest()
    return found


def noise(seed: int, size: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def text(seed: int, size: int) -> bytes:
    """Bytes that compress, the same for the same seed."""
    words = random.Random(seed).choices([b"chunk ", b"segment ", b"blob ", b"layer\n"], k=size // 4 + 1)
    return b"".join(words)[:size]
