"""The directory store keeps the contract, alone and under the wrappers of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.store.base import Store
from dsec_layers.store.posix import PosixStore
from tests.contract.suite import StoreContract
from tests.kit.store_count import CountStore
from tests.kit.store_faulty import FaultyStore


class TestPosix(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = PosixStore(tmp_path / "store")
        yield store
        store.close()


class TestKeepingRemoved(StoreContract):
    """With the trash that 3FS needs."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = PosixStore(tmp_path / "store with a % space", keep_removed=3600, patience=0.05)
        yield store
        store.close()


class TestWrapped(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = CountStore(FaultyStore(PosixStore(tmp_path / "store")))
        yield store
        store.close()
