"""The memory store keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsec_layers.store.base import Store
from dsec_layers.store.open import open_store
from tests.contract.suite import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        yield open_store(f"mem://{request.node.nodeid}")


def test_a_named_store_is_one_in_the_process() -> None:
    assert open_store("mem://named-once") is open_store("mem://named-once")
    assert open_store("mem://") is not open_store("mem://")
