"""The directory store on a double of a 3FS mount (tests/kit/threefs.py): the contract, and what several hosts see of each other."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import Conflict, CorruptError, NotFound
from dsec_layers.store.base import Store
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes, read_pieces
from tests.contract.suite import StoreContract
from tests.kit.threefs import ThreeFS

DATA = b"0123456789" * 1000
DIGEST = sha256_digest(DATA)
OTHER = sha256_digest(b"other")


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ThreeFS:
    (tmp_path / "3fs").mkdir()
    return ThreeFS(tmp_path / "3fs", monkeypatch)


def opened(mount: ThreeFS) -> PosixStore:
    return PosixStore(Path(mount.root) / "store", patience=0.5, keep_removed=3600)


class Test3FS(StoreContract):
    @pytest.fixture
    def store(self, mount: ThreeFS) -> Iterator[Store]:
        store = opened(mount)
        yield store
        store.close()


def test_the_double_refuses_what_3fs_refuses(mount: ThreeFS) -> None:
    path = Path(mount.root) / "x"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"x" * 10)
    for call in (lambda: os.setxattr(path, "user.a", b"b"), lambda: os.getxattr(path, "user.a"), lambda: os.posix_fallocate(fd, 0, 10)):
        with pytest.raises(OSError):
            call()
    assert os.lseek(fd, 3, os.SEEK_HOLE) == 10
    for forbidden in (lambda: fcntl.flock(fd, fcntl.LOCK_EX), lambda: os.open(path, os.O_WRONLY | os.O_APPEND)):
        with pytest.raises(AssertionError):
            forbidden()
    assert path.stat().st_mtime == int(path.stat().st_mtime)
    path.unlink()
    assert os.pread(fd, 10, 0) == bytes(10)
    os.close(fd)


def test_a_blob_that_was_missing_a_moment_ago_is_read(mount: ThreeFS) -> None:
    here, there = opened(mount), opened(mount)
    with mount.as_client("two"), pytest.raises(NotFound):
        there.stat(DIGEST)
    put_bytes(here, DATA)
    with mount.as_client("two"):
        assert there.read(DIGEST, 0, len(DATA)) == DATA


def test_a_ref_that_moves_elsewhere_is_followed(mount: ThreeFS) -> None:
    here, there = opened(mount), opened(mount)
    here.set_ref("a:1", DIGEST, expected=None)
    with mount.as_client("two"):
        assert there.get_ref("a:1").digest == DIGEST
        with pytest.raises(FileNotFoundError):
            os.stat(Path(mount.root) / "store/refs/a/1" / f"{2:020d}")  # noqa: PTH116  (now cached as missing)
    here.set_ref("a:1", OTHER, expected=DIGEST)
    with mount.as_client("two"):
        assert there.get_ref("a:1").digest == OTHER
        with pytest.raises(Conflict):
            there.set_ref("a:1", DIGEST, expected=DIGEST)
        there.set_ref("a:1", DIGEST, expected=OTHER)
    assert here.get_ref("a:1").digest == DIGEST


def test_a_deleted_blob_stays_readable_for_who_has_it_open(mount: ThreeFS) -> None:
    here, there = opened(mount), opened(mount)
    put_bytes(here, DATA)
    with mount.as_client("two"):
        assert there.read(DIGEST, 0, 10) == DATA[:10]
    assert here.delete(DIGEST)
    with mount.as_client("two"):
        assert there.read(DIGEST, 0, len(DATA)) == DATA


def old(mount: ThreeFS) -> None:
    """The blob was last touched two hours ago, and nobody remembers anything else."""
    when = time.time() - 7200
    os.utime(Path(mount.root) / "store/blobs/sha256" / DIGEST[7:9] / DIGEST[7:], (when, when))


def test_a_touch_that_the_collector_sees_late_keeps_the_blob(mount: ThreeFS) -> None:
    collector, publisher = opened(mount), opened(mount)
    put_bytes(publisher, DATA)
    old(mount)
    with mount.as_client("collector"):
        assert collector.stat(DIGEST).modified < time.time() - 7000
    publisher.touch(DIGEST)
    with mount.as_client("collector"):
        collector.delete(DIGEST, older_than=time.time() - 3600)
    with mount.as_client("reader"):
        assert opened(mount).read(DIGEST, 0, len(DATA)) == DATA


def test_a_touch_under_a_remembered_name_keeps_the_blob(mount: ThreeFS) -> None:
    collector, publisher = opened(mount), opened(mount)
    put_bytes(publisher, DATA)
    old(mount)
    with mount.as_client("publisher"):
        publisher.stat(DIGEST)
    with mount.as_client("collector"):
        assert collector.delete(DIGEST, older_than=time.time() - 3600)
    with mount.as_client("publisher"):
        publisher.touch(DIGEST)  # the name is gone, the file is not: the touch goes to the file
        assert publisher.read(DIGEST, 0, len(DATA)) == DATA
    assert collector.stat(DIGEST).size == len(DATA)


def test_zeros_of_a_file_that_is_gone_do_not_pass(mount: ThreeFS) -> None:
    """The hazard itself: somebody removes a blob behind the store's back while it is open."""
    store = opened(mount)
    put_bytes(store, DATA)
    assert b"".join(read_pieces(store, DIGEST, len(DATA))) == DATA
    (Path(mount.root) / "store/blobs/sha256" / DIGEST[7:9] / DIGEST[7:]).unlink()
    with pytest.raises(CorruptError):
        list(read_pieces(store, DIGEST, len(DATA)))
    with pytest.raises(NotFound):
        list(read_pieces(store, DIGEST, len(DATA)))
