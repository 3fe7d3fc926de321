"""Memory while packing: bounded, whatever the size of the input and however slow the store."""

from __future__ import annotations

import sys

import pytest

from dsec_layers import proc

SCRIPT = """
import random, stat, sys
from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.erofs.tree import Inode, Tree
from dsec_layers.layers.descriptor import Kind
from dsec_layers.store.posix import PosixStore
from pathlib import Path

block = random.Random(1).randbytes(2 << 20)

def pieces(count, seed):
    for nth in range(count):
        at = 4 * nth + seed  # every chunk is shifted and so another one
        yield block[at : at + (1 << 20)]

def ingest(sink, progress):
    tree = Tree()
    for nth in range(4):
        inode = tree.root.children[b"large%d" % nth] = Inode(stat.S_IFREG | 0o644)
        sink.stream(inode, 300 << 20, pieces(300, nth))
    for nth in range(3000):
        inode = tree.root.children[b"small%d" % nth] = Inode(stat.S_IFREG | 0o644)
        sink.whole(inode, memoryview(block)[5 * nth + 11 : 5 * nth + 100_011])
    return tree

result = pack_layer(PosixStore(Path(sys.argv[1])), ingest, kind=Kind.BASE, workers=2, level=1)
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(result.unique >> 20, result.segments, int(peak.split()[1]) >> 10)
"""


@pytest.mark.slow
def test_a_gibibyte_and_a_half_in_300_mib(tmp_path: object) -> None:
    done = proc.run([sys.executable, "-c", SCRIPT, f"{tmp_path}/store"])
    mib, segments, peak = map(int, done.stdout.split())
    assert mib > 1400 and segments > 1000
    assert peak < 300
