"""What the packer publishes, as other people's programs see it: zstd unpacks it, fsck.erofs checks and extracts it."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash

from dsec_layers import proc
from dsec_layers.linux.mount import mount_erofs, umount
from dsec_layers.registry.objects import load_metadata
from dsec_layers.store.posix import PosixStore
from tests.kit.pack_inputs import Files, Pieces, noise, pack, text
from tests.kit.tools import tool

MIB = 1 << 20


FILES = Files(
    {f"d{nth % 5}/f{nth}": (noise if nth % 3 else text)(nth, nth * 997 % 200_000) for nth in range(120)} | {"large": noise(500, 7 * MIB)}
)

SPARSE = Files(FILES.files | {"sparse": Pieces((noise(501, 100_000), 3 * MIB, noise(502, 70_000)))})
"""fsck.erofs 1.5 extracts holes as nothing."""


def test_what_zstd_unpacks_fsck_extracts(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    result = pack(store, FILES)
    image, content = (
        proc.run([tool("zstd"), "-dc", store.local_path(item.digest)]).stdout for item in (result.layer.metadata, *result.layer.segments)
    )
    (tmp_path / "image").write_bytes(image)
    devices, at = [], 0
    for nth, size in enumerate(load_metadata(store, result.layer)[1]["size"].tolist()):
        device = tmp_path / f"segment{nth}"
        device.write_bytes(content[at : at + size])
        devices.append(f"--device={device}")
        at += size
    assert at == len(content) and len(devices) > 8
    out = tmp_path / "out"
    proc.run([tool("fsck.erofs"), f"--extract={out}", *devices, tmp_path / "image"])
    found = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in out.rglob("*") if path.is_file()}
    assert found == FILES.sha256()


@pytest.mark.root
def test_what_zstd_unpacks_is_a_flat_image_that_the_kernel_mounts(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    result = pack(store, SPARSE)
    blobs = [store.local_path(item.digest) for item in (result.layer.metadata, *result.layer.segments)]
    flat, point = tmp_path / "flat", tmp_path / "point"
    point.mkdir()
    flat.write_bytes(proc.run([tool("zstd"), "-dc", *blobs]).stdout)
    mount_erofs(flat, point)
    try:
        found = {str(path.relative_to(point)): hashlib.sha256(path.read_bytes()).hexdigest() for path in point.rglob("*") if path.is_file()}
    finally:
        umount(point)
    assert found == SPARSE.sha256()


def test_the_seek_table_names_every_frame(tmp_path: Path) -> None:
    """As the zstd seekable format spells it: a skippable frame whose footer counts the frames."""
    store = PosixStore(tmp_path / "store")
    result = pack(store, FILES)
    (item,) = result.layer.segments
    blob = store.local_path(item.digest).read_bytes()
    count, descriptor, magic = struct.unpack("<IBI", blob[-9:])
    entries = struct.unpack(f"<{3 * count}I", blob[-9 - 12 * count : -9])
    assert (magic, descriptor) == (0x8F92EAB1, 0x80)
    assert struct.unpack("<II", blob[-17 - 12 * count : -9 - 12 * count]) == (0x184D2A5E, 12 * count + 9)
    _, table = load_metadata(store, result.layer)
    assert (list(entries[::3]), list(entries[1::3])) == (table["stored"].tolist(), table["size"].tolist())
    content = proc.run([tool("zstd"), "-dc", store.local_path(item.digest)]).stdout
    at = 0
    for size, checksum in zip(entries[1::3], entries[2::3], strict=True):
        assert xxhash.xxh64_intdigest(content[at : at + size]) & 0xFFFFFFFF == checksum
        at += size
    assert at == len(content)
