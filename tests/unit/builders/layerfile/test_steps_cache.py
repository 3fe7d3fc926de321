"""The step cache: whole entries or none, shared by builds, bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_layers.builders.layerfile.recipe import Step
from dsec_layers.builders.layerfile.stepcache import StepCache
from dsec_layers.builders.layerfile.steps import chain_key, step_key
from dsec_layers.errors import Conflict
from dsec_layers.sandbox import Network

KEYS = [f"{number:064x}" for number in range(4)]


def fill(cache: StepCache, key: str, size: int = 10) -> None:
    with cache.new(key) as place:
        (place / "tree").mkdir()
        (place / "tree/file").write_bytes(b"x" * size)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_an_entry_appears_whole(tmp_path: Path) -> None:
    with StepCache(tmp_path / "c") as cache:
        assert cache.get(KEYS[0]) is None
        with cache.new(KEYS[0]) as place:
            (place / "file").touch()
            assert cache.get(KEYS[0]) is None
        found = cache.get(KEYS[0])
        assert found is not None
        assert (found / "file").exists()
    assert entries(tmp_path / "c") == [KEYS[0]]
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with StepCache(tmp_path) as cache:
        with pytest.raises(ValueError, match="x"), cache.new(KEYS[0]):
            raise ValueError("x")
        assert cache.get(KEYS[0]) is None
    assert entries(tmp_path) == []


def test_the_faster_of_two_builds_wins(tmp_path: Path) -> None:
    with StepCache(tmp_path) as one, StepCache(tmp_path) as two:
        with one.new(KEYS[0]) as first:
            (first / "from").write_text("one")
            with two.new(KEYS[0]) as second:
                (second / "from").write_text("two")
        for cache in (one, two):
            assert ((cache.get(KEYS[0]) or first) / "from").read_text() == "two"
    assert entries(tmp_path) == [KEYS[0]]


def test_what_a_dead_build_left_goes(tmp_path: Path) -> None:
    with StepCache(tmp_path) as cache:
        left = tmp_path / ".new-0123456789abcdef"
        left.mkdir()
        with cache.new(KEYS[0]) as place, StepCache(tmp_path):
            assert not left.exists()
            assert place.exists()


def test_a_fresh_build_makes_every_entry_again(tmp_path: Path) -> None:
    with StepCache(tmp_path) as cache:
        fill(cache, KEYS[0], 1)
    with StepCache(tmp_path, fresh=True) as cache:
        assert cache.get(KEYS[0]) is None
        fill(cache, KEYS[0], 2)
        found = cache.get(KEYS[0])
        assert found is not None
        assert (found / "tree/file").stat().st_size == 2
    assert entries(tmp_path) == [KEYS[0]]


def test_a_fresh_build_does_not_pull_the_ground_from_under_another(tmp_path: Path) -> None:
    with StepCache(tmp_path) as other:
        fill(other, KEYS[0], 1)
        with StepCache(tmp_path, fresh=True) as cache, pytest.raises(Conflict):
            fill(cache, KEYS[0], 2)
        found = other.get(KEYS[0])
        assert found is not None
        assert (found / "tree/file").stat().st_size == 1


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    with StepCache(tmp_path) as cache:
        for number, key in enumerate(KEYS):
            fill(cache, key, 100_000)
            os.utime(tmp_path / key, (number, number))
    with StepCache(tmp_path, limit=300_000) as cache:
        assert cache.get(KEYS[0]) is not None
    # The first was used just now, so the second and third make room.
    assert entries(tmp_path) == [KEYS[0], KEYS[3]]


def test_entries_in_use_are_not_removed(tmp_path: Path) -> None:
    with StepCache(tmp_path) as user:
        fill(user, KEYS[0], 100_000)
        with StepCache(tmp_path, limit=0) as cache:
            assert cache.prune() == []
            assert entries(tmp_path) == [KEYS[0]]
    with StepCache(tmp_path, limit=0):
        pass
    assert entries(tmp_path) == []


def test_everything_that_decides_a_step_is_in_its_key() -> None:
    step = Step(("sh", "-c", "x"))
    key = step_key("a" * 64, step, {"A": "1"})
    assert key == step_key("a" * 64, Step(("sh", "-c", "x")), {"A": "1"})
    others = [
        step_key("b" * 64, step, {"A": "1"}),
        step_key("a" * 64, step, {"A": "2"}),
        step_key("a" * 64, step, {}),
        step_key("a" * 64, Step(("sh", "-c", "y")), {"A": "1"}),
        step_key("a" * 64, Step(("sh", "-c x")), {"A": "1"}),
        step_key("a" * 64, Step(("sh", "-c", "x"), user="ann"), {"A": "1"}),
        step_key("a" * 64, Step(("sh", "-c", "x"), workdir="/x"), {"A": "1"}),
        step_key("a" * 64, Step(("sh", "-c", "x"), network=Network.HOST), {"A": "1"}),
    ]
    assert len({key, *others}) == 9
    assert chain_key(a=1) != chain_key(b=1)
