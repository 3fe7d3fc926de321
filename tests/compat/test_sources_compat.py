"""Judged by other programs: GNU tar extracts what the tar reader read; umoci unpacks and skopeo repacks what the image sources read."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.builders.sources.detect import detect
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_dir, snapshot_tree
from tests.kit.tars import directory, entry, file, hard_link, make_tar, node, symlink
from tests.kit.tools import tool

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: extraction sets owners")


def read(source: Path, reference: str | None = None) -> Snapshot:
    sink = MemorySink()
    tree = detect(source, reference=reference).ingest(sink)
    return snapshot_tree(tree, sink.content)


ODD = {
    "no parents": [file("a/b/c/f", b"1", mode=0o600), file("a/g", b"2")],
    "mixed dots": [directory("./", mode=0o711, mtime=5), file("./x/f", b"1"), file("x/g", b"2"), directory("x", mode=0o700, uid=9, mtime=3)],
    "leading slash": [file("/abs/f", b"1"), hard_link("/abs/h", "/abs/f"), symlink("/abs/s", "/abs/f")],
    "children first": [file("d/f", b"1", mtime=7), directory("d", mode=0o710, mtime=8)],
    "again": [file("f", b"one", mode=0o600), file("f", b"two", mode=0o640), symlink("s", "f"), symlink("s", "g"), directory("q"), symlink("t", "q"), directory("t")],
    "through a link": [directory("real"), symlink("l", "real"), file("l/f", b"1"), symlink("m", "l"), file("m/g", b"2")],
    "long": [file("n" * 255, b"1"), file("/".join(["d" * 200] * 10), b"2"), symlink("s", "t" * 1000)],
    "nodes": [node("c", b"3", 1, 300), node("b", b"4", 259, 5), node("p", b"6"), hard_link("c2", "c"), hard_link("p2", "p")],
    "slash": [entry("e/", b"0"), file("e/f", b"1")],
    "attributes": [file("f", b"1", pax={"SCHILY.xattr.user.a%3Db": "1", "SCHILY.xattr.user.n": "\0\udcff\n", "mtime": "1.123456789"})],
    "contiguous": [entry("c", b"7", b"abc"), entry("v", b"V"), file("z", b"1")],
}  # fmt: skip


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("case", ODD)
def test_b6_gnu_tar_extracts_the_same(tmp_path: Path, case: str) -> None:
    data = make_tar(*ODD[case], form=2 if case in ("attributes", "long") else 1)
    archive = tmp_path / "a.tar"
    out = tmp_path / "out"
    for tail in (b"", bytes(1 << 20), b"\xff" * 10240):
        archive.write_bytes(data + tail)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        proc.run([tool("tar"), "-C", out, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-p", "-xf", archive])
        found, wanted = read(archive), snapshot_dir(out)
        given = {os.fsencode(os.path.normpath(info.name.lstrip("/"))) for info, _ in ODD[case]}
        for path in wanted.keys() - given - {b"."}:
            found[path].mtime = wanted[path].mtime  # implied directories get the time of extraction
        if case == "through a link":  # GNU tar sets the time of an explicit directory too early to survive this
            found[b"real"].mtime = wanted[b"real"].mtime
        if b"." not in given:
            found[b""].mtime = wanted[b""].mtime
        assert diff(found, wanted) == []


def fill(root: Path, step: int) -> None:
    """The changes of one step, whiteouts of all sorts among them."""
    if step == 0:
        for name in ("bin", "lib/old", "etc", "gone/deep"):
            (root / name).mkdir(parents=True)
        (root / "bin/a").write_bytes(b"program" * 5000)
        os.link(root / "bin/a", root / "bin/b")
        (root / "etc/config").write_bytes(b"1")
        (root / "gone/deep/f").write_bytes(b"x")
        (root / "lib/old/f").write_bytes(b"x")
        (root / "link").symlink_to("bin/a")
        os.mkfifo(root / "fifo", 0o640)
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.setxattr(root / "etc/config", "user.note", b"\0binary\xff")
        os.chown(root / "etc/config", 1000, 1001)
    elif step == 1:
        (root / "bin/a").unlink()  # A1
        shutil.rmtree(root / "gone")
        shutil.rmtree(root / "lib")
        (root / "lib").symlink_to("bin")  # A7
        (root / "etc/config").chmod(0o600)
    else:
        (root / "lib").unlink()
        (root / "lib").mkdir()
        (root / "lib/new").write_bytes(b"new")
        os.link(root / "bin/b", root / "lib/b")  # A2
        shutil.rmtree(root / "etc")
        (root / "etc").write_bytes(b"a file now")
        (root / "fifo").unlink()
    os.utime(root / "bin", ns=(step, step * 10**9))


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Snapshot]:
    """An image of three layers by umoci, and what umoci itself unpacks from it."""
    umoci = tool("umoci")
    base = tmp_path_factory.mktemp("umoci")
    image = f"{base}/layout:latest"
    proc.run([umoci, "init", "--layout", base / "layout"])
    proc.run([umoci, "new", "--image", image])
    for step in range(3):
        bundle = base / f"bundle{step}"
        proc.run([umoci, "unpack", "--image", image, bundle])
        fill(bundle / "rootfs", step)
        proc.run([umoci, "repack", "--image", image, bundle])
    proc.run([umoci, "config", "--image", image, "--config.env", "KEY=value", "--config.workingdir", "/work", "--config.user", "1000"])
    proc.run([umoci, "unpack", "--image", image, base / "last"])
    return base / "layout", snapshot_dir(base / "last/rootfs")


@pytest.mark.root
@needs_root
def test_b13_umoci_unpacks_the_same(layout: tuple[Path, Snapshot]) -> None:
    path, wanted = layout
    assert len(wanted) > 8 and wanted[b"lib/b"].nlink == 2
    assert diff(read(path), wanted) == []
    config = detect(path).image_config
    assert config is not None and (config.env.get("KEY"), config.workdir, config.user) == ("value", "/work", "1000")


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("form", ["oci", "oci-zstd", "oci-archive", "docker-archive"])
def test_skopeo_repacks_the_same(layout: tuple[Path, Snapshot], tmp_path: Path, form: str) -> None:
    path, wanted = layout
    target, options = tmp_path / "copy", []
    if form == "oci-zstd":
        form, options = "oci", ["--dest-compress", "--dest-compress-format", "zstd"]
    proc.run([tool("skopeo"), "--insecure-policy", "copy", "-q", *options, f"oci:{path}:latest", f"{form}:{target}:example:latest"])
    reference = None if form == "docker-archive" else "example:latest"
    assert diff(read(target, reference), wanted) == []
    if form == "docker-archive":
        assert diff(read(target, "docker.io/library/example"), wanted) == []
    if form != "oci":
        packed = tmp_path / "copy.gz"
        packed.write_bytes(gzip.compress(target.read_bytes(), 1))
        assert diff(read(packed, reference), wanted) == []
