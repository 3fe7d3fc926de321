"""Kept descriptors: bounded, never closed under their user, none left behind."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec_layers.descriptors import Descriptors, OpenFile
from tests.kit.descriptors import open_files, opened_since


def test_descriptors_are_kept_bounded_and_closed(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / str(number)).write_text(str(number))
    opened = []

    def take(name: str) -> OpenFile:
        def opener() -> int:
            opened.append(name)
            return os.open(tmp_path / name, os.O_RDONLY | os.O_CLOEXEC)

        return kept.take(name, opener)

    before = open_files()
    kept = Descriptors[str](8)

    def work(number: int) -> None:
        name = str(number % 40)
        file = take(name)
        assert os.pread(file.fd, 10, 0) == name.encode()
        if number % 7 == 0:
            kept.drop(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(2000)))
    assert len(opened_since(before)) <= 8
    file = take("1")
    kept.close()
    assert kept.here("1") is None
    assert os.pread(file.fd, 10, 0) == b"1"
    del file
    assert opened_since(before) == []
    opened.clear()
    for _ in range(3):
        take("2")
    assert opened == ["2"]
    kept.close()
    assert opened_since(before) == []


def test_the_least_recently_used_goes_first() -> None:
    kept = Descriptors[int](2)
    for number in (1, 2, 1, 3):
        kept.take(number, lambda: os.open("/dev/null", os.O_RDONLY))
    assert [number for number in (1, 2, 3) if kept.here(number) is not None] == [1, 3]


def test_what_the_opener_raises_passes_through_and_nothing_is_kept() -> None:
    kept = Descriptors[int](2)
    with pytest.raises(FileNotFoundError):
        kept.take(1, lambda: os.open("/nonexistent", os.O_RDONLY))
    assert kept.here(1) is None


def test_a_file_that_cannot_be_looked_at_any_more_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Descriptors[str](8, recheck=-1.0)
    first = kept.take("x", lambda: os.open("/dev/null", os.O_RDONLY))

    def fstat(_: int) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fstat)
        second = kept.take("x", lambda: os.open("/dev/null", os.O_RDONLY))
    assert second is not first


@pytest.mark.parametrize("recheck", [30.0, None])
def test_a_kept_file_whose_name_is_gone_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recheck: float | None) -> None:
    path = tmp_path / "x"
    kept = Descriptors[str](8, recheck=recheck)

    def read() -> bytes:
        file = kept.take("x", lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return os.pread(file.fd, 10, 0)

    path.write_text("old")
    assert read() == b"old"
    path.unlink()
    path.write_text("new")
    assert read() == b"old"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    assert read() == (b"new" if recheck else b"old")
