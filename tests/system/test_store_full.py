"""A store on a disk that is really full."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import NoSpace
from dsec_layers.proc import run
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes

pytestmark = pytest.mark.root


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "small").mkdir()
    run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path / "small"])
    yield tmp_path / "small"
    run(["umount", tmp_path / "small"])


def test_a_blob_that_does_not_fit_is_no_space_and_leaves_room(small: Path) -> None:
    store = PosixStore(small / "store")
    data = random.Random(1).randbytes(3 << 20)
    put_bytes(store, data)
    for size in (2 << 20, 8 << 20):
        with pytest.raises(NoSpace):
            put_bytes(store, random.Random(2).randbytes(size))
    assert list((small / "store" / "tmp").iterdir()) == []
    assert store.read(sha256_digest(data), 0, len(data)) == data
    put_bytes(store, b"x" * 100_000)
    store.close()
