"""What the OverlayBD tests share: the stored vectors, and files put together from writes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import zstandard

from dsec_layers.blocksource import BlockSource, BytesSource
from dsec_layers.overlaybd import LsmtLayer, Write, open_layer

FOLDER = Path(__file__).parent.parent / "golden" / "overlaybd"
STEMS = ("blk-64m-layer1", "blk-64m-layer2", "blk-64m-layer3")
UUIDS = tuple(f"{d * 8}-{d * 4}-4{d * 3}-8{d * 3}-{d * 12}" for d in "123")
EXPECTED = {name: digest for digest, name in (line.split() for line in (FOLDER / "EXPECTED.sha256").read_text().splitlines())}
DISKS = ("blk-64m.expected-layer1.raw", "blk-64m.expected-layer2.raw", "blk-64m.expected.raw")


@lru_cache(maxsize=64)
def vector(name: str) -> bytes:
    """A stored file; ``.zst`` and the ZFile that only stands in its tar are found too."""
    path = FOLDER / name
    if path.exists():
        return path.read_bytes()
    if (FOLDER / f"{name}.zst").exists():
        return zstandard.ZstdDecompressor().decompress((FOLDER / f"{name}.zst").read_bytes(), max_output_size=1 << 28)
    if name == "ext4_64":
        packed = gzip.decompress((FOLDER / "ext4_64.tar.gz").read_bytes())
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            member = archive.extractfile("ext4_64")
            assert member is not None
            return member.read()
    tar = (FOLDER / f"{name}.tar").read_bytes()
    return tar[1536 : 1536 + int(tar[512:1024].split(b"size=")[1].split(b"\n")[0])]


def layer(name: str) -> LsmtLayer:
    """A stored layer, open."""
    return open_layer(BytesSource(vector(name)))


def assemble(writes: Iterable[Write]) -> bytes:
    """The file that the writes make."""
    data = bytearray()
    for at, part in writes:
        data.extend(bytes(max(0, at + len(part) - len(data))))
        data[at : at + len(part)] = part
    return bytes(data)


def sha256(source: BlockSource, step: int = 1 << 20) -> str:
    """The digest of all that a source holds, read ``step`` bytes at a time."""
    state = hashlib.sha256()
    for at in range(0, source.size, step):
        state.update(source.pread(at, min(step, source.size - at)))
    return state.hexdigest()


def script_bytes(stem: str) -> Iterable[tuple[int, bytes | int]]:
    """The operations of a vector's script: (offset, data to write) or (offset, bytes to discard)."""
    for line in (FOLDER / f"{stem}.script").read_text().splitlines():
        if line.startswith("#"):
            continue
        kind, offset, length, *rest = line.split(" ", 3)
        size = int(length)
        if kind == "z":
            yield int(offset), size
        elif kind == "f":
            yield int(offset), bytes([int(rest[0], 0)]) * size
        elif kind == "t":
            text = rest[0].encode()
            yield int(offset), (text * (size // len(text) + 1))[:size]
        else:
            yield int(offset), _splitmix(int(rest[0]), size)


def _splitmix(seed: int, size: int) -> bytes:
    mask = (1 << 64) - 1
    words = bytearray()
    for k in range(-(-size // 8)):
        x = (seed * 0x100000001 + k + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        words += (x ^ (x >> 31)).to_bytes(8, "little")
    return bytes(words[:size])
