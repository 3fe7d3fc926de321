"""Uppers that the kernel's overlayfs wrote, stacked into one, show through overlayfs what the uppers showed one by one."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.builders.sources.directory import OverlaySource
from dsec_layers.erofs.tree import Inode, Tree
from tests.kit.oracle import MemorySink, diff, snapshot_dir

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: overlayfs mounts")]


@contextmanager
def overlay(target: Path, lower: list[Path], upper: Path | None = None) -> Iterator[Path]:
    """An overlay mount: ``lower`` from the highest to the lowest."""
    options = f"lowerdir={':'.join(map(str, lower))},redirect_dir=off,metacopy=off,index=off,xino=off"
    if upper is not None:
        work = upper.with_name(upper.name + ".work")
        work.mkdir()
        options += f",upperdir={upper},workdir={work}"
    target.mkdir(exist_ok=True)
    proc.run(["mount", "-t", "overlay", "overlay", "-o", options, target])
    try:
        yield target
    finally:
        proc.run(["umount", target])


def write_out(tree: Tree, sink: MemorySink, root: Path) -> None:
    """The tree as a directory, whiteouts and all."""
    made: dict[Inode, Path] = {}
    for path, inode in tree.walk():
        place = root / os.fsdecode(path)
        if inode in made:
            os.link(made[inode], place, follow_symlinks=False)
            continue
        made[inode] = place
        if inode.is_dir:
            place.mkdir(exist_ok=not path)
        elif stat.S_ISREG(inode.mode):
            place.write_bytes(sink.content(inode))
        elif stat.S_ISLNK(inode.mode):
            place.symlink_to(os.fsdecode(inode.data or b""))
        else:
            os.mknod(place, inode.mode, inode.rdev)
        os.chown(place, inode.uid, inode.gid, follow_symlinks=False)
        if not stat.S_ISLNK(inode.mode):
            place.chmod(stat.S_IMODE(inode.mode))
        for name, value in inode.xattrs:
            os.setxattr(place, name, value, follow_symlinks=False)
    for inode, place in reversed(made.items()):
        time = inode.mtime * 10**9 + inode.mtime_ns
        os.utime(place, ns=(time, time), follow_symlinks=False)


def act(root: Path, chance: random.Random) -> None:
    """A handful of random changes below ``root``."""
    names = ["a", "b", "c"]
    for _ in range(25):
        place = root.joinpath(*chance.choices(names, k=chance.randint(1, 3)))
        if not place.parent.is_dir() or place.parent.is_symlink():
            continue
        deed = chance.choice(
            ["write", "write", "mkdir", "mkdir", "remove", "remove", "link", "hard", "chmod", "rename", "fifo", "xattr", "append"]
        )
        there, is_dir = os.path.lexists(place), place.is_dir() and not place.is_symlink()
        if deed == "remove" and there:
            shutil.rmtree(place) if is_dir else place.unlink()
        elif deed == "chmod" and there and not place.is_symlink():
            place.chmod(chance.choice([0o700, 0o755, 0o711]))
        elif deed == "xattr" and (is_dir or place.is_file()) and not place.is_symlink():
            os.setxattr(place, "user.n", str(chance.random()).encode())
        elif deed == "append" and place.is_file() and not place.is_symlink():
            with open(place, "ab") as stream:
                stream.write(b"more")
        elif deed == "rename" and there:
            other = root / chance.choice(names)
            if not os.path.lexists(other) and other not in place.parents:
                with suppress(OSError):  # a directory of a lower layer is not renamed (EXDEV)
                    place.rename(other)
        elif not there:
            _make(root, place, deed, chance)


def _make(root: Path, place: Path, deed: str, chance: random.Random) -> None:
    if deed == "write":
        place.write_bytes(str(chance.random()).encode())
    elif deed == "mkdir":
        place.mkdir()
    elif deed == "link":
        place.symlink_to(chance.choice("abc"))
    elif deed == "fifo":
        os.mkfifo(place)
    elif deed == "hard":
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        if files:
            os.link(chance.choice(files), place)


@pytest.mark.parametrize("seed", range(20))
def test_stacked_uppers_show_what_they_showed_one_by_one(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    base = tmp_path / "base"
    base.mkdir()
    act(base, chance)
    act(base, chance)
    view = tmp_path / "view"
    uppers: list[Path] = []
    for number in range(3):
        upper = tmp_path / f"upper{number}"
        upper.mkdir()
        with overlay(view, [*reversed(uppers), base], upper):
            act(view, chance)
        uppers.append(upper)
    with overlay(view, [*reversed(uppers), base]):
        wanted = snapshot_dir(view)
    sink = MemorySink()
    tree = OverlaySource(uppers).ingest(sink)
    merged = tmp_path / "merged"
    merged.mkdir()
    write_out(tree, sink, merged)
    with overlay(view, [merged, base]):
        assert diff(snapshot_dir(view), wanted, ignore=("nlink", "names")) == []
    assert all(inode.is_dir or inode in sink.pieces or not stat.S_ISREG(inode.mode) for _, inode in tree.walk())
    once = OverlaySource([merged]).ingest(MemorySink())
    assert [path for path, _ in once.walk()] == [path for path, _ in tree.walk()]  # and stacking is done in one go


def test_a10_a_whiteout_stays_hidden_where_no_lower_layer_has_its_directory(tmp_path: Path) -> None:
    one, two, base = (tmp_path / name for name in ("one", "two", "base"))
    for place in (one / "d", two / "d", base):
        place.mkdir(parents=True)
    (one / "d/deleted").write_bytes(b"x")
    (one / "d/kept").write_bytes(b"x")
    os.mknod(two / "d/deleted", stat.S_IFCHR, 0)
    sink = MemorySink()
    tree = OverlaySource([one, two]).ingest(sink)
    merged = tmp_path / "merged"
    merged.mkdir()
    write_out(tree, sink, merged)
    with overlay(tmp_path / "view", [merged, base]) as view:
        assert sorted(path.name for path in (view / "d").iterdir()) == ["kept"]
        assert not (view / "d/deleted").exists()
