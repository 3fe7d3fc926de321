"""The compressed layout: mkfs.erofs as a helper that is not trusted (case B12)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.builders.pack.compressed_child import compare_trees
from dsec_layers.builders.pack.layer import PackResult, pack_layer
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.errors import CorruptError, DsecError, HostError, InputError, NoSpace, ToolError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Kind
from dsec_layers.linux.mount import mount_erofs, umount
from dsec_layers.registry.objects import load_config
from dsec_layers.store.base import Store
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from tests.kit.pack_inputs import Files, Pieces, noise, pack, text
from tests.kit.store_faulty import Fault, FaultyStore

pytestmark = pytest.mark.root


def make_tree(root: Path) -> Path:
    """Every sort of file."""
    root.mkdir()
    (root / "d").mkdir(mode=0o2751)
    (root / "d/text").write_bytes(text(1, 200_000))
    (root / "noise").write_bytes(noise(2, 300_001))
    (root / "empty").touch()
    (root / "hard").hardlink_to(root / "noise")
    (root / "soft").symlink_to("d/text")
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"x")
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(root / "whiteout", stat.S_IFCHR, 0)
    os.mkfifo(root / "fifo")
    os.setxattr(root / "empty", "user.a", b"\0\xff")
    os.setxattr(root / "noise", "trusted.t", b"t")
    with open(root / "sparse", "wb") as stream:
        stream.truncate(1 << 20)
        os.pwrite(stream.fileno(), noise(3, 5000), 1 << 19)
    os.chown(root / "noise", 1234, 70_000)
    (root / "noise").chmod(0o4755)
    for name in ("p", "q"):  # two inodes that differ in nothing but their names
        (root / f"{name}1").write_bytes(b"twin" * 2000)
        (root / f"{name}2").hardlink_to(root / f"{name}1")
    for nth, path in enumerate(sorted([root, *root.rglob("*")])):
        time = 1_600_000_000 if path.name[0] in "pq" else 1_700_000_000 + nth
        os.utime(path, ns=(0, time * 1_000_000_000 + 1), follow_symlinks=False)
    return root


def pack_compressed(store: Store, source: DirectorySource, **settings: object) -> PackResult:
    return pack_layer(store, source.ingest, kind=Kind.TOOLKIT, layout="compressed", **settings)  # type: ignore[arg-type]


def is_empty(store: Store) -> bool:
    return not list(store.list())


def test_the_image_is_the_tree(tmp_path: Path) -> None:
    tree, store = make_tree(tmp_path / "tree"), PosixStore(tmp_path / "store")
    result = pack_compressed(store, DirectorySource(tree), name="tool")
    assert result.layer.compressed and result.layer.metadata.media_type == d.EROFS and result.layer.blobs()[1:] == (result.layer.metadata,)
    assert load_config(store, result.layer).layout == "compressed"
    assert result.metadata < 700_000
    point = tmp_path / "point"
    point.mkdir()
    mount_erofs(store.local_path(result.layer.metadata.digest), point)
    try:
        assert compare_trees(os.fsencode(tree), os.fsencode(point)) is None
    finally:
        umount(point)
    again = pack_compressed(MemoryStore(), DirectorySource(tree), name="tool", workers=1)
    assert again.digest == result.digest


@pytest.mark.parametrize("files", [{}, {"only-inline": b"x" * 100}, {"zeros": bytes(100_000)}])
def test_b9_trees_without_data(files: dict[str, bytes | Pieces]) -> None:
    result = pack(MemoryStore(), files, layout="compressed")
    assert result.layer.compressed and result.inodes == len(files) + 1


def fake(directory: Path, version: str, then: str) -> None:
    """A mkfs.erofs that says it is of some version, and when asked to work does ``then``."""
    directory.mkdir()
    script = directory / "mkfs.erofs"
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mkfs.erofs {version}"; exit 1; fi\n{then}\n')
    script.chmod(0o755)


@pytest.mark.parametrize("version", ["1.4", "0.9.3", "1.2.1", "from git"])
def test_b12_an_old_mkfs_first_in_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake(tmp_path / "bin", version, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    store = MemoryStore()
    with pytest.raises(ToolError, match=r"/bin/mkfs.erofs is version .*needs 1\.5"):
        pack(store, {"a": b"x"}, layout="compressed")
    assert is_empty(store)


@pytest.mark.parametrize(
    ("then", "error"),
    [
        ("exit 3", ToolError),
        ("kill -SEGV $$", ToolError),
        ("exit 0", ToolError),  # no image at all
        (": > {image}", ToolError),
        ("head -c 100000 /dev/urandom > {image}", ToolError),
        ("{real} --quiet {image} {empty}", CorruptError),
        ("env -u SOURCE_DATE_EPOCH {real} --quiet -T1 {image} {point}", CorruptError),
        ("{real} --quiet --all-root {image} {point}", CorruptError),
        ("{real} --quiet -x-1 {image} {point}", CorruptError),
    ],
)
def test_b12_a_helper_that_crashes_or_lies_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, error: type[DsecError]
) -> None:
    tree = make_tree(tmp_path / "tree")
    (tmp_path / "empty").mkdir()
    arguments = 'for last in "$@"; do image=$point; point=$last; done\n'
    body = then.format(image='"$image"', point='"$point"', empty=tmp_path / "empty", real=proc.find_tool("mkfs.erofs"))
    fake(tmp_path / "bin", "1.8.6", arguments + body)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    store = MemoryStore()
    with pytest.raises(error) as caught:
        pack_compressed(store, DirectorySource(tree))
    assert caught.value.exit_code != 0 and is_empty(store)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    pack(MemoryStore(), {"a": noise(1, 10_000)}, layout="compressed")
    with pytest.raises(InputError):
        pack(MemoryStore(), Broken({}), layout="compressed")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


class Broken(Files):
    """A source that fails."""

    def ingest(self, *_: object) -> None:  # type: ignore[override]
        raise InputError("broken")


def test_a_scratch_directory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    proc.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", scratch])
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    try:
        with pytest.raises(NoSpace):
            pack(MemoryStore(), {"a": noise(1, 3 << 20)}, layout="compressed")
        assert list(scratch.iterdir()) == []
    finally:
        proc.run(["umount", scratch])


@pytest.mark.parametrize("operation", ["write", "commit", "touch"])
def test_a_full_store_publishes_nothing(operation: str) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner)
    store.add(Fault(operation, error=NoSpace("full")))
    with pytest.raises(NoSpace):
        pack(store, {"a": noise(1, 10_000)}, layout="compressed")
    assert not [info for info in inner.list() if b"artifactType" in inner.read(info.digest, 0, min(info.size, 100))]


def test_without_root_it_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostError, match="root") as caught:
        pack(MemoryStore(), {}, layout="compressed")
    assert caught.value.hint and "segments" in caught.value.hint


def cross_links(root: Path) -> None:
    (root / "p2").unlink()
    (root / "q1").unlink()
    (root / "q1").hardlink_to(root / "p1")
    (root / "p2").hardlink_to(root / "q2")


def retarget(root: Path) -> None:
    (root / "soft").unlink()
    (root / "soft").symlink_to("d/texT")


def renumber(root: Path) -> None:
    mode = (root / "null").lstat().st_mode
    (root / "null").unlink()
    os.mknod(root / "null", mode, os.makedev(1, 5))
    (root / "null").chmod(stat.S_IMODE(mode))


def rewrite(root: Path) -> None:
    (root / "d/text").write_bytes(text(9, 200_000))


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("content", rewrite),
    ("st_size", lambda root: os.truncate(root / "d/text", 5)),
    ("names", lambda root: (root / "d/new").touch()),
    ("names", lambda root: (root / "soft").unlink()),
    ("target", retarget),
    ("hard links", cross_links),
    ("extended attributes", lambda root: os.setxattr(root / "empty", "user.a", b"\0\xfe")),
    ("names of extended attributes", lambda root: os.removexattr(root / "empty", "user.a")),
    ("st_uid", lambda root: os.chown(root / "empty", 5, 0)),
    ("st_mode", lambda root: (root / "empty").chmod(0o600)),
    ("st_nlink", lambda root: (root / "hard").unlink()),
    ("st_rdev", renumber),
    ("st_mtime_ns", lambda root: os.utime(root / "empty", ns=(0, 5))),
]


@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[f"{nth}-{what}" for nth, (what, _) in enumerate(CHANGES)])
def test_the_comparison_finds_every_difference(tmp_path: Path, what: str, change: Callable[[Path], object]) -> None:
    one, two = make_tree(tmp_path / "one"), make_tree(tmp_path / "two")
    assert compare_trees(os.fsencode(one), os.fsencode(two)) is None
    before = {path: path.lstat().st_mtime_ns for path in [two, *two.rglob("*")]}
    change(two)
    if what != "st_mtime_ns":
        for path, time in before.items():
            if os.path.lexists(path):
                os.utime(path, ns=(0, time), follow_symlinks=False)
    found = compare_trees(os.fsencode(one), os.fsencode(two))
    assert found is not None and (found.endswith(f": {what}") or what in ("names", "st_nlink"))
