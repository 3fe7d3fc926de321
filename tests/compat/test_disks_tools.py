"""Disks and the tools of others: e2fsck and debugfs on file systems made here, qemu-img, skopeo, nbdcopy, images of accelerated-container-image."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.api import nbd
from dsec_layers.api.diskconvert import convert, seal
from dsec_layers.api.disks import commit, create, info
from dsec_layers.api.session import Session
from dsec_layers.digest import sha256_digest
from dsec_layers.disks.place import find_disk, opened
from dsec_layers.errors import ImageError, InputError, NoSpace, UsageError
from dsec_layers.oci import descriptor_json
from dsec_layers.overlaybd.oci import BlobInfo, layer_descriptor
from dsec_layers.proc import inherited_environment, run
from tests.kit.disks_kit import MIB, noise, quiet_session, sealed_content
from tests.kit.overlaybd_vectors import EXPECTED, vector
from tests.kit.tools import need


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with quiet_session(tmp_path, monkeypatch) as made:
        yield made


def sample(root: Path) -> Path:
    """A directory with what file systems trip over."""
    root.mkdir()
    (root / "sub/deep").mkdir(parents=True)
    (root / "file").write_bytes(noise(1, 300_000))
    os.link(root / "file", root / "sub/link")
    (root / "sub/symlink").symlink_to("../file")
    (root / "empty").touch(mode=0o600)
    with open(root / "sparse", "wb") as stream:
        stream.seek(3 * MIB)
        stream.write(b"end")
    os.setxattr(root / "file", "user.note", b"value")
    os.chmod(root / "sub/deep", 0o1751)  # noqa: PTH101
    os.utime(root / "file", ns=(10**18, 10**18 + 5))
    for number in range(500):
        (root / f"sub/deep/{number}").write_bytes(b"%d" % number)
    return root


def test_a_file_system_with_content(session: Session, tmp_path: Path) -> None:
    need("mke2fs", "e2fsck", "debugfs")
    source, raw = sample(tmp_path / "source"), tmp_path / "raw"
    create(session, tmp_path / "d", mkfs="ext4", source=str(source))
    used = info(tmp_path / "d").local_bytes
    assert used < 8 * MIB  # holes and zeros cost nothing
    commit(session, tmp_path / "d", "d:1", fs_type="ext4")
    convert(session, "d:1", raw, to="raw")
    assert run(["e2fsck", "-fn", raw], check=False).code == 0
    out = tmp_path / "out"
    out.mkdir()
    run(["debugfs", "-R", f"rdump / {out}", raw])
    for path in sorted(source.rglob("*")):
        other, a = out / path.relative_to(source), path.lstat()
        b = other.lstat()
        assert stat.S_IFMT(a.st_mode) == stat.S_IFMT(b.st_mode), path
        if path.is_symlink():
            assert path.readlink() == other.readlink()
        elif path.is_file():
            assert path.read_bytes() == other.read_bytes() and a.st_mode == b.st_mode
    said = run(["debugfs", "-R", "stat /file", raw]).stdout.decode()
    assert "Links: 2" in said and "user.note" in said
    assert find_disk(session.store, "d:1")[1].layers[0].blob.annotations["containerd.io/snapshot/overlaybd/blob-fs-type"] == "ext4"


def test_an_empty_file_system_and_what_does_not_fit(session: Session, tmp_path: Path) -> None:
    need("mke2fs", "e2fsck")
    create(session, tmp_path / "d", size=64 * MIB, mkfs="ext4")
    convert(session, str(tmp_path / "d"), tmp_path / "raw", to="raw")
    assert run(["e2fsck", "-fn", tmp_path / "raw"], check=False).code == 0
    (tmp_path / "big").mkdir()
    (tmp_path / "big/file").write_bytes(noise(1, 40 * MIB))
    with pytest.raises(NoSpace, match="does not fit"):
        create(session, tmp_path / "e", size=32 * MIB, mkfs="ext4", source=str(tmp_path / "big"))
    assert not (tmp_path / "e").exists()
    for size in (None, 1000, 64 * MIB + 512):
        with pytest.raises(UsageError):
            create(session, tmp_path / "e", size=size, mkfs="ext4")
    with pytest.raises(UsageError):
        create(session, tmp_path / "e", size=64 * MIB, source=str(tmp_path / "big"))


def test_the_same_directory_gives_the_same_file_system(session: Session, tmp_path: Path) -> None:
    need("mke2fs", "e2fsck")
    source = sample(tmp_path / "source")
    for name in ("a", "b"):
        for path in source.rglob("*"):  # what reading and touching attributes leave behind
            os.utime(path, ns=(path.lstat().st_atime_ns + 10**9, path.lstat().st_mtime_ns), follow_symlinks=False)
        create(session, tmp_path / name, mkfs="ext4", source=str(source), epoch=1_700_000_000)
        seal(session, str(tmp_path / name), f"{name}:1")
    convert(session, "b:1", tmp_path / "raw", to="raw")
    assert run(["e2fsck", "-fn", tmp_path / "raw"], check=False).code == 0
    made = seal(session, str(source), "c:1", mkfs="ext4", epoch=1_700_000_000)
    assert sealed_content(session, "c:1") == (tmp_path / "raw").read_bytes() and made.layers == 1
    assert find_disk(session.store, "a:1")[1].layers == find_disk(session.store, "b:1")[1].layers


def test_qcow2_out_and_in(session: Session, tmp_path: Path) -> None:
    need("qemu-img")
    create(session, tmp_path / "d", size=8 * MIB)
    with opened(session, tmp_path / "d") as disk:
        disk.disk.pwrite(MIB, noise(1, 2 * MIB))
    convert(session, str(tmp_path / "d"), tmp_path / "raw", to="raw")
    convert(session, str(tmp_path / "d"), tmp_path / "q.qcow2", to="qcow2")
    assert run(["qemu-img", "compare", tmp_path / "raw", tmp_path / "q.qcow2"], check=False).code == 0
    seal(session, str(tmp_path / "q.qcow2"), "q:1")
    assert sealed_content(session, "q:1") == (tmp_path / "raw").read_bytes()


def test_a_qcow2_that_names_other_files_is_refused(session: Session, tmp_path: Path) -> None:
    """Reading it would read whatever file of this host its maker named."""
    need("qemu-img")
    (tmp_path / "secret").write_bytes(b"s" * MIB)
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", tmp_path / "secret", "-F", "raw", tmp_path / "a.qcow2", "1M"])
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={tmp_path / 'secret2'}", tmp_path / "b.qcow2", "1M"])
    for name in ("a", "b"):
        with pytest.raises(InputError, match="other files"):
            seal(session, str(tmp_path / f"{name}.qcow2"), "x:1")


def oci_layout(root: Path, blobs: list[bytes], version: str = "0.1.0") -> Path:
    """An image as the convertor of accelerated-container-image writes it."""
    (root / "blobs/sha256").mkdir(parents=True)

    def put(data: bytes) -> dict[str, object]:
        digest = sha256_digest(data)
        (root / "blobs/sha256" / digest[7:]).write_bytes(data)
        return {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": len(data)}

    layers = []
    for data in blobs:
        put(data)
        layers.append(layer_descriptor(BlobInfo(sha256_digest(data), len(data), version, fs_type="ext4")))
    config = put(json.dumps({"rootfs": {"type": "layers", "diff_ids": [item.digest for item in layers]}}).encode())
    manifest = put(json.dumps({"schemaVersion": 2, "config": config, "layers": [descriptor_json(item) for item in layers]}).encode())
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return root


def test_images_of_the_convertor_are_taken_as_they_are(session: Session, tmp_path: Path) -> None:
    need("e2fsck")
    blobs = [vector(f"ext4-64m-layer{number}.zfile-lz4-4k.tar") for number in (1, 2)]
    made = seal(session, str(oci_layout(tmp_path / "oci", blobs)), "aci:1")
    layers = find_disk(session.store, "aci:1")[1].layers
    assert [layer.blob.digest for layer in layers] == list(map(sha256_digest, blobs)) and made.layers == 2
    convert(session, "aci:1", tmp_path / "raw", to="raw")
    assert run(["e2fsck", "-fn", tmp_path / "raw"], check=False).code == 0
    assert sha256_digest((tmp_path / "raw").read_bytes())[7:] == EXPECTED["ext4-64m.expected.raw"]
    convert(session, "aci:1", tmp_path / "again", to="oci")
    assert {path.name for path in (tmp_path / "again/blobs/sha256").iterdir()} >= {sha256_digest(blob)[7:] for blob in blobs}
    convert(session, "aci:1", tmp_path / "bd", to="overlaybd")
    assert seal(session, str(tmp_path / "bd/config.v1.json"), "aci:2").layers == 2


def test_images_with_other_layers_are_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="not native"):
        seal(session, str(oci_layout(tmp_path / "turbo", [b"x" * 1024], "0.1.0-turbo.ociv1")), "x:1")
    with pytest.raises(ImageError):
        seal(session, str(oci_layout(tmp_path / "junk", [b"x" * 8192])), "x:1")
    with pytest.raises(ImageError, match="no layers"):
        seal(session, str(oci_layout(tmp_path / "none", [])), "x:1")


def test_skopeo_takes_our_images(session: Session, tmp_path: Path) -> None:
    need("skopeo")
    create(session, tmp_path / "d", size=MIB)
    with opened(session, tmp_path / "d") as disk:
        disk.disk.pwrite(0, noise(1, 65536))
    convert(session, str(tmp_path / "d"), tmp_path / "oci", to="oci")
    run(["skopeo", "copy", "--insecure-policy", f"oci:{tmp_path / 'oci'}", f"dir:{tmp_path / 'dir'}"])
    assert (tmp_path / "dir/manifest.json").exists()


def test_nbdcopy_from_a_captive_server(session: Session, tmp_path: Path) -> None:
    need("nbdcopy")
    create(session, tmp_path / "d", size=4 * MIB)
    (tmp_path / "raw").write_bytes(noise(1, 4 * MIB))
    copy = ["nbdcopy", "--flush", str(tmp_path / "raw"), "$uri"]
    assert nbd.run(session, str(tmp_path / "d"), copy, environ=inherited_environment()) == 0
    commit(session, tmp_path / "d", "d:1", format="lsmt")
    for what in ("d:1", str(tmp_path / "d")):
        out = tmp_path / "out"
        assert nbd.run(session, what, ["nbdcopy", "$uri", str(out)], environ=inherited_environment()) == 0
        assert out.read_bytes() == (tmp_path / "raw").read_bytes()
        out.unlink()
    assert nbd.run(session, "d:1", ["nbdcopy", str(tmp_path / "raw"), "$uri"], environ=inherited_environment()) != 0  # read-only
