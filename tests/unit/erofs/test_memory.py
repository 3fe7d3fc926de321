"""What an entry costs while an image is written and compared: a million of them is an ordinary tree."""

from __future__ import annotations

import stat
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.erofs.verify import compare
from dsec_layers.erofs.writer import render

ENTRIES = 200_000  # more than are taken at once
T = TypeVar("T")


def peak(step: Callable[[], T]) -> tuple[T, float]:
    """What a step returns, and the bytes of memory an entry that it takes at its height."""
    tracemalloc.start(1)
    try:
        return step(), tracemalloc.get_traced_memory()[1] / ENTRIES
    finally:
        tracemalloc.stop()


def test_memory_of_an_entry() -> None:
    tree = Tree()
    assert tree.root.children is not None
    for number in range(ENTRIES // 1000):
        directory = tree.root.children[b"d%d" % number] = Inode(stat.S_IFDIR | 0o755)
        # every other one has a time of its own and so the long form
        directory.children = {b"file%08d" % nth: Inode(stat.S_IFREG | 0o644, 0, 0, nth & 1) for nth in range(1000)}
    image, written = peak(lambda: render(tree, []))
    _, compared = peak(lambda: compare(tree, image, []))
    assert written - len(image) / ENTRIES < 235, written
    assert compared < 270, compared
