"""Files and directories that appear whole, durable and under a name that was free."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Barrier

import pytest

from dsec_layers import fsio
from dsec_layers.errors import Conflict
from dsec_layers.fsio import data_ranges, publish, publish_directory, publish_new


def tree_at(path: Path) -> None:
    (path / "a/b").mkdir(parents=True)
    (path / "a/b/deep").write_bytes(b"deep")
    (path / "top").write_bytes(b"top")
    (path / "link").symlink_to("nowhere")


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def contents(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}


def make_directory(path: Path) -> AbstractContextManager[object]:
    return publish_directory(path)


def make_file(path: Path) -> AbstractContextManager[object]:
    return publish(path, replace=False)


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "new/parents/target"
    with publish_directory(target, mode=0o700) as work:
        assert work.parent == target.parent
        tree_at(work)
        assert not target.exists()
    assert contents(target) == {"a/b/deep": b"deep", "top": b"top"}
    assert target.stat().st_mode & 0o777 == 0o700
    assert names(target.parent) == ["target"]


def test_all_of_it_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    synced: dict[int, bool] = {}
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.setdefault(os.fstat(fd).st_ino, target.exists())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    with publish_directory(target) as work:
        tree_at(work)
    inside = [target, *(path for path in target.rglob("*") if not path.is_symlink())]
    assert len(inside) == 5
    assert {str(path): synced.get(path.stat().st_ino) for path in inside} == {str(path): False for path in inside}
    assert synced[tmp_path.stat().st_ino] is True  # the name itself, afterwards


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), publish_directory(tmp_path / "target") as work:
        tree_at(work)
        raise error
    with pytest.raises(error), publish_new(tmp_path / "target") as work:
        work.write_bytes(b"half")
        raise error
    with pytest.raises(error), publish(tmp_path / "target", replace=False) as stream:
        stream.write(b"half")
        raise error
    assert names(tmp_path) == []


def test_a_failing_fsync_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"), publish_directory(tmp_path / "target") as work:
        tree_at(work)
    assert names(tmp_path) == []


def test_a_program_that_wrote_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), publish_new(tmp_path / "target"):
        pass
    assert names(tmp_path) == []


TAKEN: list[Callable[[Path], object]] = [
    lambda path: path.mkdir(),  # rename(2) would replace an empty one
    lambda path: path.write_bytes(b"mine"),
    lambda path: path.symlink_to("nowhere"),
]


@pytest.mark.parametrize("make", [make_directory, make_file])
@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize("known", [True, False], ids=["renameat2", "without"])
def test_what_is_there_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], AbstractContextManager[object]],
    take: Callable[[Path], object],
    known: bool,
) -> None:
    if not known:
        monkeypatch.setattr(fsio, "_renameat2", lambda *_: -1)
        monkeypatch.setattr("ctypes.get_errno", lambda: errno.EINVAL)
    target = tmp_path / "target"
    with pytest.raises(Conflict, match="exists already"), make(target):
        take(target)  # while the content is being made
    before = target.lstat()
    with pytest.raises(Conflict, match="exists already"), make(target):
        pass
    assert (target.lstat().st_ino, target.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert names(tmp_path) == ["target"]
    target.rmdir() if target.is_dir() else target.unlink()
    with make(target):
        pass
    assert target.exists()


@pytest.mark.parametrize("make", [make_directory, make_file])
def test_of_publishers_at_the_same_time_one_wins(tmp_path: Path, make: Callable[[Path], AbstractContextManager[object]]) -> None:
    count = 8
    together = Barrier(count)
    target = tmp_path / "target"

    def run(number: int) -> bool:
        try:
            with make(target) as work:
                if isinstance(work, Path):
                    (work / "who").write_bytes(b"%d" % number)
                    (work / "again").write_bytes(b"%d" % number)
                together.wait(20)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(count) as pool:
        won = list(pool.map(run, range(count)))
    assert won.count(True) == 1
    if target.is_dir():
        winner = b"%d" % won.index(True)
        assert contents(target) == {"who": winner, "again": winner}
    assert names(tmp_path) == ["target"]


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    for number, name in enumerate(("x" * 255, "\xe9" * 127)):
        target = tmp_path / str(number) / name
        with publish_directory(target) as work:
            (work / "f").write_bytes(b"f")
        assert contents(target) == {"f": b"f"}


BLOCK = 1 << 16  # no file system has larger ones here


@pytest.fixture
def sparse(tmp_path: Path) -> Iterator[int]:
    """A file: data, hole, data, hole, of two blocks each."""
    with open(tmp_path / "sparse", "w+b", buffering=0) as stream:
        for at in (0, 4):
            os.pwrite(stream.fileno(), b"x" * 2 * BLOCK, at * BLOCK)
        stream.truncate(8 * BLOCK)
        yield stream.fileno()


def test_data_between_holes(sparse: int) -> None:
    def ranges(end: int, start: int = 0) -> list[tuple[int, int]]:
        return [(a // BLOCK, b // BLOCK) for a, b in data_ranges(sparse, end * BLOCK, start * BLOCK)]

    assert ranges(8) == ranges(100) == [(0, 2), (4, 6)]
    assert ranges(5, 1) == [(1, 2), (4, 5)]
    assert ranges(4, 2) == ranges(8, 6) == ranges(0) == ranges(3, 3) == []
    assert ranges(6, 4) == [(4, 6)]


def test_what_is_not_known_is_data(sparse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lseek, left = os.lseek, 2

    def failing(fd: int, offset: int, whence: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return lseek(fd, offset, whence)

    monkeypatch.setattr(os, "lseek", failing)
    assert list(data_ranges(sparse, 8 * BLOCK)) == [(0, 2 * BLOCK), (2 * BLOCK, 8 * BLOCK)]
    assert list(data_ranges(sparse, 8 * BLOCK, BLOCK)) == [(BLOCK, 8 * BLOCK)]


def test_a_file_that_shrinks_meanwhile_ends(sparse: int) -> None:
    found = data_ranges(sparse, 8 * BLOCK)
    assert next(found) == (0, 2 * BLOCK)
    os.ftruncate(sparse, BLOCK)
    assert list(found) == []


def test_one_module_tells_data_from_holes() -> None:
    root = Path(fsio.__file__).parents[1]
    folders = ("dsec_layers", "builders", "fuse", "registry")
    told = {path.name for folder in folders for path in (root / folder).rglob("*.py") if "os.SEEK_DATA" in path.read_text()}
    assert told == {"fsio.py"}
