"""B11: the same input gives the same digests on any file system, in any time zone, locale, umask, hash seed, and for any number of workers."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from dsec_layers import proc
from tests.kit.pack_inputs import noise, text

SCRIPT = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[4], 8))
from dsec_layers.builders.pack.layer import pack_layer
from dsec_layers.builders.sources.detect import detect
from dsec_layers.layers.descriptor import Kind
from dsec_layers.registry.catalog import Catalog
from dsec_layers.store.posix import PosixStore
source, store, workers = sys.argv[1], PosixStore(Path(sys.argv[2])), int(sys.argv[3])
with Catalog(Path(sys.argv[2]).parent / "catalog.sqlite") as catalog:
    for name in ("one", "two"):
        result = pack_layer(store, detect(source).ingest, kind=Kind.BASE, name=name, workers=workers, catalog=catalog)
        print(result.digest)
        for item in result.layer.blobs():
            print(item.digest, item.size)
"""

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with names whose order depends on locale and hash seed, links, a sparse file, repeated content."""
    root = tmp_path_factory.mktemp("input") / "tree"
    for nth, name in enumerate(("a", "B", "_", "ä", "Z/z", "z/Z", "é", "e", "10", "9")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text(nth % 7, 3000 * nth) + noise(nth, 50_000 * nth))
    (root / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"x" * 700)
    (root / "hard").hardlink_to(root / "a")
    (root / "soft").symlink_to("a")
    with open(root / "sparse", "wb") as stream:
        stream.seek(3 << 20)
        stream.write(b"end")
    for path in [root, *root.rglob("*")]:
        path.lchmod(0o750 if path.is_dir() else 0o640) if not path.is_symlink() else None
        os.utime(path, ns=(1_600_000_000_000_000_123, 1_600_000_000_000_000_123), follow_symlinks=False)
    return root


def packed(source: Path, where: Path, *, workers: int = 2, umask: str = "022", **env: str) -> list[str]:
    """The digests of two layers packed by another process: into an empty store, and again under another name."""
    where.mkdir()
    try:
        argv: list[str | os.PathLike[str]] = [sys.executable, "-c", SCRIPT, source, where / "store", str(workers), umask]
        return proc.run(argv, env=proc.clean_environment(env)).stdout.decode().split("\n")
    finally:
        shutil.rmtree(where)


@pytest.fixture(scope="module")
def expected(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests in a plain environment."""
    return packed(tree, tmp_path_factory.mktemp("plain") / "x", PYTHONHASHSEED="0")


@pytest.mark.parametrize(
    ("workers", "umask", "env"),
    [
        (1, "022", {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "1"}),
        (5, "077", {"TZ": "America/St_Johns", "PYTHONHASHSEED": "2", "LC_ALL": "C"}),
        (2, "000", {"PYTHONHASHSEED": "4242", "LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONUTF8": "0"}),
    ],
)
def test_b11_settings_of_the_process_change_nothing(
    tree: Path, tmp_path: Path, expected: list[str], workers: int, umask: str, env: dict[str, str]
) -> None:
    assert len(expected) > 8
    assert packed(tree, tmp_path / "x", workers=workers, umask=umask, **env) == expected


def copied(tree: Path, target: Path) -> Path:
    """A copy of the tree, made in another order."""
    target.mkdir()
    for path in sorted(tree.rglob("*"), reverse=True):
        if path.is_file() and not path.is_symlink() and path.name not in ("hard", "sparse"):
            (target / path.relative_to(tree)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / path.relative_to(tree))
    (target / "soft").symlink_to("a")
    (target / "hard").hardlink_to(target / "a")
    with open(target / "sparse", "wb") as stream:
        stream.truncate((3 << 20) + 3)
        os.pwrite(stream.fileno(), b"end", 3 << 20)
    for path in [target, *target.rglob("*")]:
        original = tree / path.relative_to(target)
        shutil.copystat(original, path, follow_symlinks=False)
    return target


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no tmpfs at /dev/shm")
def test_b11_the_file_systems_of_input_and_store_change_nothing(tree: Path, tmp_path: Path, expected: list[str]) -> None:
    shm = SHM / f"dsec-test-{os.getpid()}"
    shm.mkdir()
    try:
        assert packed(tree, shm / "x") == expected
        assert packed(copied(tree, shm / "tree"), tmp_path / "x") == expected
    finally:
        shutil.rmtree(shm)


def test_b11_a_tar_as_well(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "tree.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tree, ".", filter=lambda member: member if member.name != "sparse" else None)
    one = packed(tmp_path / "tree.tar", tmp_path / "x")
    assert one == packed(tmp_path / "tree.tar", tmp_path / "x", PYTHONHASHSEED="7", TZ="Asia/Kathmandu", workers=4)
