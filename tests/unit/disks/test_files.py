"""The directory of a writable disk: state, generations, crashes between any two steps, full disks."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_layers.disks import files as disk_files
from dsec_layers.disks.files import DiskFiles, GenerationReader, create_files
from dsec_layers.disks.owner import owner_of
from dsec_layers.disks.state import DiskState, Parent, parse_state, read_state
from dsec_layers.errors import Conflict, DsecError, ImageError, LimitError, NoSpace, NotFound, StoreError, UsageError
from dsec_layers.overlaybd import Disk, Upper
from tests.kit.disks_kit import MIB, content, local_disk, noise
from tests.kit.durability import Durability

DIGEST = "sha256:" + "1" * 64


def test_state_round_trips() -> None:
    state = DiskState(4096, Parent("file:///s", DIGEST), (1, 3), 7)
    assert parse_state(state.to_json()) == state
    assert parse_state(DiskState(512).to_json()) == DiskState(512)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"virtual_size": 0}, {"virtual_size": 513}, {"virtual_size": -512}, {"virtual_size": True}, {"virtual_size": "512"},
        {"virtual_size": 1 << 63}, {"frozen": [2, 1]}, {"frozen": [1, 1]}, {"frozen": [9]}, {"frozen": ["1"]}, {"frozen": 3}, {"upper": None},
        {"upper": -1}, {"parent": 3}, {"parent": {}}, {"parent": {"store": "s", "digest": "sha256:12"}}, {"parent": {"store": 3, "digest": DIGEST}},
        {"frozen": list(range(1, 300)), "upper": 300},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(change: dict[str, object]) -> None:
    value = DiskState(4096, None, (1,), 2).to_value() | change
    with pytest.raises(ImageError):
        parse_state(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{", b"\xff", b"{}", b"[" * 100_000])
def test_what_is_no_state_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        parse_state(data)
    (tmp_path / "disk.json").write_bytes(data)
    with pytest.raises(ImageError, match=str(tmp_path)):
        read_state(tmp_path)


def test_no_disk_is_not_found_and_stays_untouched(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotFound):
            DiskFiles(path)
    assert list(tmp_path.iterdir()) == []


def test_create_makes_the_whole_or_nothing(tmp_path: Path) -> None:
    create_files(tmp_path / "d", MIB)
    assert sorted(item.name for item in (tmp_path / "d").iterdir()) == ["000001.data", "000001.index", "000001.journal", "disk.json"]
    with pytest.raises(Conflict):
        create_files(tmp_path / "d", MIB)
    for size in (0, -512, 100):
        with pytest.raises(UsageError):
            create_files(tmp_path / "e", size)

    def fail(data: Path, index: Path) -> None:
        raise StoreError("no")

    with pytest.raises(StoreError):
        create_files(tmp_path / "e", MIB, fill=fail)
    assert [item.name for item in tmp_path.iterdir()] == ["d"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    create_files(tmp_path / "d", MIB)
    with local_disk(tmp_path / "d"):
        with pytest.raises(Conflict, match="open already"):
            DiskFiles(tmp_path / "d")
        with pytest.raises(Conflict), owner_of(tmp_path / "d"):
            pass
    DiskFiles(tmp_path / "d").close()


def test_snapshots_stack_up_and_are_read_by_anybody(tmp_path: Path) -> None:
    path, model = tmp_path / "d", bytearray(MIB)
    create_files(path, MIB)
    with local_disk(path) as disk:
        assert disk.snapshot().frozen == ()  # nothing was written
        for number in range(1, 4):
            data = noise(number, 8192)
            disk.disk.pwrite(number * 4096, data)
            model[number * 4096 : number * 4096 + 8192] = data
            state = disk.snapshot()
            assert state.frozen == tuple(range(1, number + 1)) and state == read_state(path)
            with GenerationReader(path, state.frozen) as reader:
                assert content(Disk(reader.layers)) == model
        assert disk.snapshot() == state
        disk.disk.trim(0, 8192)
        model[:8192] = bytes(8192)
        assert content(disk.disk) == model
    with local_disk(path) as disk:
        assert content(disk.disk) == model and not disk.recovered


def test_the_oldest_generations_leave_with_a_commit(tmp_path: Path) -> None:
    path, parent = tmp_path / "d", Parent("file:///s", DIGEST)
    create_files(path, MIB)
    with local_disk(path) as disk:
        disk.disk.pwrite(0, noise(1, 4096))
        frozen = disk.snapshot().frozen
        disk.disk.pwrite(4096, noise(2, 4096))
        disk.snapshot()
        with pytest.raises(Conflict):
            disk.rebase(parent, parent, frozen)
        with pytest.raises(Conflict):
            disk.rebase(None, parent, (2,))
        assert disk.rebase(None, parent, frozen) == DiskState(MIB, parent, (2,), 3)
        assert content(disk.disk)[:8192] == noise(1, 4096) + noise(2, 4096)  # the files are gone, what is open is not
        disk.disk.pwrite(8192, noise(3, 4096))
    assert not (path / "000001.data").exists() and read_state(path).parent == parent


def test_too_many_generations_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "MAX_GENERATIONS", 2)
    create_files(tmp_path / "d", MIB)
    with local_disk(tmp_path / "d") as disk:
        for number in range(3):
            disk.disk.pwrite(number * 512, b"x" * 512)
            if number < 2:
                disk.snapshot()
        with pytest.raises(LimitError, match="2 frozen"):
            disk.snapshot()
        disk.disk.pwrite(0, b"y" * 512)
        assert disk.disk.pread(0, 512) == b"y" * 512


def use(path: Path, model: Durability) -> None:
    """All that happens to a disk: writes, flushes, snapshots, a commit, a snapshot that fails, the death of its process, a torn index."""

    def full(self: Upper) -> None:
        model.rest("begun snapshot")  # the new generation is named by now
        raise NoSpace("full")

    with local_disk(path) as disk:
        for number in range(2):
            disk.disk.pwrite(number * 8192, noise(number, 8192))
            disk.disk.flush()
            model.rest(f"flush {number}")
            disk.disk.pwrite(number * 4096, noise(number, 4096))
            disk.snapshot()
            model.rest(f"snapshot {number}")
        disk.rebase(None, Parent("file:///s", DIGEST), (1,))
        model.rest("commit")
        disk.disk.pwrite(0, noise(5, 512))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NoSpace):
            patch.setattr(Upper, "freeze", full)
            disk.snapshot()
        model.rest("failed snapshot")
        upper = disk.state.upper
    model.rest("close")
    with DiskFiles(path) as files:
        generation = files.open(upper)
        generation.upper.write(8, noise(6, 4096))
        generation.close()  # as a killed process leaves it: the journal knows
        generation = files.open(upper)
        assert generation.upper.recovery.replayed
        model.rest("replay")
        generation.close()
        os.truncate(path / f"{upper:06}.journal", 0)  # the host died, too
        index = os.open(path / f"{upper:06}.index", os.O_RDWR)
        os.ftruncate(index, os.fstat(index).st_size - 1)
        os.close(index)
        generation = files.open(upper)
        assert generation.upper.recovery.reason
        model.rest("torn")
        generation.close()


SYNCS = 32
"""Of all that ``use`` does."""


def test_what_is_done_to_a_disk_is_durable_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Durability(monkeypatch)
    create_files(tmp_path / "d", MIB)
    model.rest("create")
    created = len(model.syncs)
    use(tmp_path / "d", model)
    monkeypatch.undo()
    assert model.faults == []
    assert len(model.syncs) - created == SYNCS, "each must be in the test below"


@pytest.mark.parametrize("missing", range(SYNCS))
def test_no_sync_of_a_disk_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    create_files(tmp_path / "d", MIB)
    model = Durability(monkeypatch, lambda number, name: number == missing)
    use(tmp_path / "d", model)
    monkeypatch.undo()
    assert model.faults != [], f"sync {missing}, of {model.syncs[missing]}, is not needed, or not missed"


@pytest.mark.parametrize("missing", [r"000001\.data", r"000001\.index", r"\.disk\.json\..*", r"\.d\..*", "parent"])
def test_nothing_of_a_new_disk_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """All syncs of one thing, as the whole directory is synced once more before it gets its name."""
    parent = tmp_path / "parent"
    parent.mkdir()
    model = Durability(monkeypatch, lambda number, name: re.fullmatch(missing, name) is not None)
    create_files(parent / "d", MIB)
    model.rest("create")
    monkeypatch.undo()
    assert model.faults != []


@pytest.mark.parametrize("step", range(12))
def test_a_crash_at_any_step_of_a_snapshot_loses_nothing(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is copied as it is at the step, which is what a kill -9 there leaves."""
    path, left = tmp_path / "d", tmp_path / "left"
    create_files(path, MIB)
    model = noise(1, 4096) + noise(2, 4096)
    count = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count == step + 1 and not left.exists():
                shutil.copytree(path, left)
            return function(*arguments, **named)

        return call

    with local_disk(path) as disk:
        disk.disk.pwrite(0, noise(1, 4096))
        disk.disk.flush()
        disk.disk.pwrite(4096, noise(2, 4096))
        for name in ("fsync", "fdatasync", "rename", "unlink", "pwrite"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        disk.snapshot()
        monkeypatch.undo()
        if not left.exists():
            shutil.copytree(path, left)
    with local_disk(left) as disk:
        assert content(disk.disk)[:4096] == model[:4096]  # what was flushed
        assert content(disk.disk)[4096:8192] in (model[4096:], bytes(4096))
        disk.disk.pwrite(8192, noise(3, 512))
        disk.snapshot()
        assert content(disk.disk)[8192:8704] == noise(3, 512)


def test_leftovers_of_a_killed_snapshot_are_no_part_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "d"
    create_files(path, MIB)
    (path / "000002.data").write_bytes(b"junk")
    with local_disk(path) as disk:
        disk.disk.pwrite(0, b"a" * 512)
        disk.snapshot()
        assert disk.disk.pread(0, 512) == b"a" * 512


def test_a_torn_end_is_cut_off_and_told(tmp_path: Path) -> None:
    path = tmp_path / "d"
    create_files(path, MIB)
    with local_disk(path) as disk:
        disk.disk.pwrite(0, noise(1, 4096))
    with open(path / "000001.index", "ab") as stream:
        stream.write(b"torn")
    with local_disk(path) as disk:
        assert "4 bytes" in disk.recovered and content(disk.disk)[:4096] == noise(1, 4096)
    with open(path / "000001.index", "ab") as stream:
        stream.write(b"torn")
    with owner_of(path) as owner:  # an offline snapshot must cut it off too
        state = owner.snapshot()
    with GenerationReader(path, state.frozen) as reader:
        assert content(Disk(reader.layers))[:4096] == noise(1, 4096)


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    create_files(tmp_path / "d", MIB)
    (tmp_path / "d/000001.index").unlink()
    with pytest.raises(ImageError, match="generation 1 has lost a file"), local_disk(tmp_path / "d"):
        pass
    DiskFiles(tmp_path / "d").close()  # the lock was let go


def test_a_link_in_place_of_a_generation_is_refused(tmp_path: Path) -> None:
    create_files(tmp_path / "d", MIB)
    (tmp_path / "d/000001.data").rename(tmp_path / "elsewhere")
    (tmp_path / "d/000001.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DsecError), local_disk(tmp_path / "d"):
        pass


def test_a_snapshot_that_fails_leaves_the_disk_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d"
    create_files(path, MIB)
    with local_disk(path) as disk:
        disk.disk.pwrite(0, noise(1, 4096))

        def full(self: Upper) -> None:
            raise NoSpace("full")

        before = disk.state
        with monkeypatch.context() as patch:
            patch.setattr(Upper, "freeze", full)
            with pytest.raises(NoSpace):
                disk.snapshot()
        assert disk.state == read_state(path) == before and not (path / "000002.data").exists()
        disk.disk.pwrite(4096, noise(2, 4096))
        assert disk.snapshot().frozen == (1,)
        assert content(disk.disk)[:8192] == noise(1, 4096) + noise(2, 4096)


def test_a_snapshot_that_cannot_be_taken_back_keeps_both_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is so full that not even the old state can be written again: the new one is as true, and a later open goes on from it."""
    path = tmp_path / "d"
    create_files(path, MIB)
    with local_disk(path) as disk:
        disk.disk.pwrite(0, noise(1, 4096))

        def full(self: Upper) -> None:
            def refuse(*arguments: object, **named: object) -> None:
                raise OSError(errno.ENOSPC, "full")

            monkeypatch.setattr(disk_files, "write_atomic", refuse)
            raise NoSpace("full")

        monkeypatch.setattr(Upper, "freeze", full)
        with pytest.raises(NoSpace):
            disk.snapshot()
        monkeypatch.undo()
        with pytest.raises(StoreError, match="failed before"):
            disk.snapshot()
        disk.disk.pwrite(4096, noise(2, 4096))
        assert content(disk.disk)[:8192] == noise(1, 4096) + noise(2, 4096)
    with local_disk(path) as disk:
        assert disk.state.frozen == (1,)
        assert content(disk.disk)[:8192] == noise(1, 4096) + noise(2, 4096)
