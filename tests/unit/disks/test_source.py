"""What leaves without a copy is what a read gives, and stays so while it is held; extents; the NBD export of a disk."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from dsec_layers.api.diskconvert import seal
from dsec_layers.api.disks import branch
from dsec_layers.disks.attach import export_of, open_export
from dsec_layers.disks.files import create_files
from dsec_layers.disks.place import opened
from dsec_layers.fuse.nbd import Server
from dsec_layers.fuse.nbd.protocol import NBD_STATE_HOLE, NBD_STATE_ZERO
from dsec_layers.overlaybd import Disk
from tests.kit.disks_kit import MIB, local_disk, noise, quiet_session
from tests.kit.nbd_client import Client


def sent(disk: Disk, offset: int, length: int) -> bytes | None:
    places = disk.sendable(offset, length)
    return None if places is None else b"".join(os.pread(fd.__index__(), count, at) for fd, at, count in places)


def test_what_is_sendable_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_session(tmp_path, monkeypatch) as session:
        (tmp_path / "raw").write_bytes(noise(1, MIB))
        seal(session, str(tmp_path / "raw"), "d:1", format="lsmt")
        branch(session, "d:1", [tmp_path / "d"])
        random = np.random.default_rng(3)
        with opened(session, tmp_path / "d") as disk:
            for number in range(60):
                at = int(random.integers(0, 2000)) * 512
                disk.disk.pwrite(at, noise(number, 512 * int(random.integers(1, 40))))
                if number % 20 == 10:
                    disk.disk.trim(int(random.integers(0, 1000)) * 512, 65536)
                    disk.snapshot()
            answers = 0
            assert sent(disk.disk, 0, MIB) is None  # it has zeros, and pieces that are not here yet
            whole = disk.disk.pread(0, MIB)
            for _ in range(500):
                first, end = sorted(random.integers(0, MIB // 512 + 1, 2).tolist())
                end = min(end, first + int(random.integers(1, 80)))
                got = sent(disk.disk, first * 512, (end - first) * 512)
                if got is not None:
                    answers += 1
                    assert got == whole[first * 512 : end * 512]
            assert answers > 200
            assert sent(disk.disk, 1, 512) is None and sent(disk.disk, 0, 0) is None


def test_what_is_held_is_not_given_back_meanwhile(tmp_path: Path) -> None:
    create_files(tmp_path / "d", 8 * MIB)
    with local_disk(tmp_path / "d") as disk:
        old = noise(1, 4 * MIB)
        disk.disk.pwrite(0, old)
        disk.disk.flush()
        data = tmp_path / "d/000001.data"
        held = disk.disk.sendable(0, 4 * MIB)
        assert held is not None
        for number in range(3):
            disk.disk.pwrite(0, noise(2 + number, 4 * MIB))
            disk.disk.flush()
            assert b"".join(os.pread(fd.__index__(), count, at) for fd, at, count in held) == old
        before = data.stat().st_blocks
        del held
        gc.collect()
        disk.disk.pwrite(0, noise(9, 4 * MIB))
        disk.disk.flush()
        assert data.stat().st_blocks <= before - 2 * (4 * MIB // 512)


def test_an_export_knows_holes_and_refuses_parts_of_sectors(tmp_path: Path) -> None:
    create_files(tmp_path / "d", 8 * MIB)
    socket = tmp_path / "s"
    with local_disk(tmp_path / "d") as disk, Server([export_of(disk)], unix=socket):
        disk.disk.pwrite(MIB, noise(1, 65536))
        disk.disk.pwrite(2 * MIB, noise(1, 65536))
        disk.disk.trim(2 * MIB, 65536)
        extents = list(export_of(disk).block_status(0, 3 * MIB))
        zero = NBD_STATE_HOLE | NBD_STATE_ZERO
        assert extents[:3] == [(MIB, zero), (65536, 0), (MIB - 65536, zero)] and sum(length for length, _ in extents) == 3 * MIB
        with Client(socket) as client:
            client.greet()
            client.go()
            assert client.read(MIB, 65536) == noise(1, 65536) and client.read(0, 4096) == bytes(4096)
            assert client.write(MIB, noise(2, 1024)) == 0 and client.read(MIB, 1024) == noise(2, 1024)
            assert client.write(MIB + 1, b"x" * 512) != 0 and client.write(MIB, b"x") != 0


def test_sealed_disks_are_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_session(tmp_path, monkeypatch) as session:
        (tmp_path / "raw").write_bytes(noise(1, 65536))
        seal(session, str(tmp_path / "raw"), "d:1")
        with open_export(session, "d:1") as made:
            assert made.disk is None and made.source.pread(0, 65536) == noise(1, 65536)
