"""The directory store keeps the contract, alone and under every wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.store.base import Store
from dsec_layers.store.count import CountStore
from dsec_layers.store.fallback import FallbackStore
from dsec_layers.store.faulty import FaultyStore
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.retry import RetryStore
from dsec_layers.store.verify import VerifyStore
from tests.contract.suite import StoreContract


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
        first = VerifyStore(RetryStore(CountStore(FaultyStore(PosixStore(tmp_path / "store"))), first=0.001))
        store = FallbackStore(first, MemoryStore())
        yield store
        store.close()
