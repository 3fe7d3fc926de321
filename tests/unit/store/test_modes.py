"""Blobs in a directory store are read-only files, and stores that several users share work all the same."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.store.base import BlobInfo
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes, read_blob

DATA = b"0123456789" * 1000
DIGEST = sha256_digest(DATA)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    """A store in a new directory."""
    return PosixStore(tmp_path / "store")


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """A umask that holds during the test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def blob_path(store: PosixStore) -> Path:
    """The file of the test's blob."""
    return store.root / "blobs" / "sha256" / DIGEST[7:9] / DIGEST[7:]


def mode(store: PosixStore) -> int:
    """Its permission bits."""
    return blob_path(store).stat().st_mode & 0o7777


def test_b7_a_blob_is_read_only(store: PosixStore, umask: int) -> None:
    put_bytes(store, DATA)
    assert mode(store) == 0o444 & ~umask
    assert put_bytes(store, DATA).size == store.touch(DIGEST).size == len(DATA)
    assert mode(store) == 0o444 & ~umask
    assert read_blob(store, DIGEST, limit=1 << 20) == DATA
    assert store.delete(DIGEST)
    assert not blob_path(store).exists()
    put_bytes(store, DATA)
    assert mode(store) == 0o444 & ~umask


def test_b7_blobs_from_before_are_fine(store: PosixStore) -> None:
    put_bytes(store, DATA)
    blob_path(store).chmod(0o644)
    assert put_bytes(store, DATA).size == len(DATA)
    assert read_blob(store, DIGEST, limit=1 << 20) == DATA
    assert store.delete(DIGEST)


def test_b7_another_users_blob_can_be_touched(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to the directories but does not own the file puts a copy of his own in its place."""
    put_bytes(store, DATA)
    old = time.time() - 1000
    acts: tuple[Callable[[], BlobInfo], ...] = (lambda: store.touch(DIGEST), lambda: put_bytes(store, DATA))
    for act in acts:
        os.utime(blob_path(store), (old, old))
        before = blob_path(store).stat().st_ino
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", _refuse)
            assert act().modified > old + 500
        assert blob_path(store).stat().st_ino != before
        assert read_blob(store, DIGEST, limit=1 << 20) == DATA
    assert [path.name for path in (store.root / "tmp").iterdir()] == []


def test_b7_another_users_blob_is_put_back(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob that was touched while it was deleted comes back, also where fs.protected_hardlinks forbids the link."""
    put_bytes(store, DATA)
    trashed = store.root / "trash" / DIGEST[7:9] / f"{DIGEST[7:]}.{int((time.time() - 1000) * 1e9)}.{time.time_ns()}"
    trashed.parent.mkdir(parents=True, exist_ok=True)
    blob_path(store).rename(trashed)
    monkeypatch.setattr(Path, "hardlink_to", _refuse)
    assert store.stat(DIGEST).size == len(DATA)
    assert not trashed.exists()
    assert read_blob(store, DIGEST, limit=1 << 20) == DATA


def _refuse(*arguments: object, **options: object) -> None:
    raise PermissionError(errno.EPERM, "not yours")
