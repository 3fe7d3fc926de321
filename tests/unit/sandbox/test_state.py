"""Sandbox directories: who owns them, and how they go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec_layers.sandbox.state import make_place, remove_place, remove_tree, sweep


def test_places_are_private_and_locked(tmp_path: Path) -> None:
    first, second = make_place(tmp_path), make_place(tmp_path)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    cleaned: list[str] = []
    assert sweep(tmp_path, cleaned.append) == []
    os.close(first.fd)  # as the kernel does when its owner dies
    (first.path / "file").touch()
    assert sweep(tmp_path, cleaned.append) == [first.identifier] == cleaned
    assert not first.path.exists()
    assert second.path.exists()
    remove_place(second)
    assert not second.path.exists()


def test_a_sweep_of_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "new", lambda identifier: None) == []


@pytest.mark.slow
def test_a_tree_nested_1500_deep_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    remove_tree(top)
    assert not top.exists()


def test_links_in_a_removed_tree_are_not_followed(tmp_path: Path) -> None:
    victim, top = tmp_path / "victim", tmp_path / "top"
    victim.mkdir()
    (victim / "kept").touch()
    top.mkdir()
    (top / "link").symlink_to(victim)
    remove_tree(top)
    remove_tree(top)
    assert (victim / "kept").exists()
