"""The upper's journal: what was acknowledged survives a killed process, and nothing else comes back."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec_layers.blocksource import MemoryDisk
from dsec_layers.errors import DsecError, StoreError
from dsec_layers.overlaybd import Disk, Upper, upper_journal
from dsec_layers.overlaybd import upper as upper_module
from dsec_layers.overlaybd.upper_journal import Journal

SIZE = 1 << 20
UUID = "01234567-89AB-CDEF-0123-456789ABCDEF"


@contextmanager
def opened(folder: Path, *, journal: bool = True) -> Iterator[Upper]:
    """The upper in ``folder``. Its files are closed at the end as a killed process leaves them: nothing is flushed."""
    names = ("data", "index", "journal") if journal else ("data", "index")
    new = not (folder / "data").exists()
    fds = [os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in names]
    try:
        third = fds[2] if journal else None
        yield Upper.create(fds[0], fds[1], SIZE, journal_fd=third) if new else Upper.open(fds[0], fds[1], journal_fd=third)
    finally:
        for fd in fds:
            os.close(fd)


def content(upper: Upper) -> bytes:
    return Disk([], upper).pread(0, SIZE)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_was_acknowledged_is_there_after_a_kill(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    model = MemoryDisk(SIZE)
    replayed = 0
    for _ in range(6):
        with opened(tmp_path) as upper:
            replayed += upper.recovery.replayed
            assert content(upper) == model.pread(0, SIZE)
            disk = Disk([], upper)
            at = 0
            for _ in range(chance.randrange(60)):
                kind = chance.random()
                at = at if kind < 0.4 else chance.randrange(SIZE // 512 - 64) * 512  # runs of writes that continue each other
                length = min(chance.randrange(1, 64) * 512, SIZE - at)
                if kind < 0.85:
                    data = chance.randbytes(length)
                    disk.pwrite(at, data)
                    model.pwrite(at, data)
                elif kind < 0.95:
                    disk.trim(at, length)
                    model.write_zeroes(at, length)
                else:
                    disk.flush()
                at = (at + length) % SIZE
    assert replayed > 0


def test_a_host_that_was_started_anew_has_lost_what_was_not_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as upper:
        upper.write(0, b"a" * 4096)
        upper.flush()
        upper.write(0, b"b" * 4096)
    monkeypatch.setattr(upper_journal, "boot_id", lambda: "another boot")
    with opened(tmp_path) as upper:
        assert (upper.recovery.replayed, content(upper)[:4096]) == (0, b"a" * 4096)


def test_a_torn_end_of_the_index_comes_back_from_the_journal(tmp_path: Path) -> None:
    with opened(tmp_path) as upper:
        for number in range(10):
            upper.write(number * 16, bytes([number]) * 4096)
        upper.flush()
        whole = content(upper)
    os.truncate(tmp_path / "index", (tmp_path / "index").stat().st_size - 40)
    with opened(tmp_path) as upper:
        assert upper.recovery.replayed == 3
        assert content(upper) == whole


def test_after_a_failed_sync_the_journal_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the pages: replaying would give a name to bytes that are not there."""

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "lost")

    with opened(tmp_path) as upper:
        upper.write(0, b"a" * 4096)
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(DsecError):
            upper.flush()
        monkeypatch.undo()
    with opened(tmp_path) as upper:
        assert (upper.recovery.replayed, content(upper)[:4096]) == (0, bytes(4096))


def test_an_upper_opens_with_and_without_its_journal(tmp_path: Path) -> None:
    with opened(tmp_path, journal=False) as upper:
        upper.write(0, b"a" * 4096)
    with opened(tmp_path) as upper:
        assert content(upper)[:4096] == bytes(4096)
        upper.write(0, b"b" * 4096)
        upper.flush()
    with opened(tmp_path, journal=False) as upper:
        assert content(upper)[:4096] == b"b" * 4096


def test_no_more_is_taken_than_the_journal_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upper_module, "RING", 4)
    monkeypatch.setattr(upper_journal, "RING", 4)
    with opened(tmp_path) as upper:
        for number in range(4):
            upper.write(number * 16, b"a" * 4096)
        with pytest.raises(StoreError, match="more than it could flush"):
            upper.write(100, b"b" * 4096)
        upper.flush()
        upper.write(100, b"c" * 4096)
    with opened(tmp_path) as upper:
        assert (upper.recovery.replayed, content(upper)[51200:55296]) == (1, b"c" * 4096)


def test_reading_stops_at_what_is_damaged_old_or_of_another_upper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upper_journal, "RING", 8)
    with open(tmp_path / "journal", "w+b") as stream:
        journal = Journal(stream.fileno(), UUID)
        assert journal.after(0) == b""
        for number in range(20):
            journal.put(number, number, number + 1, 8 + number, number % 2 == 1)
        whole = journal.after(12)
        assert len(whole) == 8 * 16
        assert journal.after(15) == whole[48:]
        assert journal.after(11) == journal.after(20) == b""
        assert Journal(stream.fileno(), UUID.replace("0", "1")).after(12) == b""
        os.pwrite(stream.fileno(), b"\xff", 17 % 8 * 32 + 20)
        assert journal.after(12) == whole[: 5 * 16]
        os.ftruncate(stream.fileno(), 5 * 32 + 31)
        assert journal.after(12) == whole[:16]
        journal.forget()
        assert journal.after(12) == b""
