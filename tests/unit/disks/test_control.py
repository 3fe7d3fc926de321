"""The control socket of a disk's server: who may ask, what may come along, and what a message may say."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.disks.files import create_files
from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.owner import ControlServer, Served, served
from dsec_layers.disks.state import STATE, Parent, read_state
from dsec_layers.errors import HostError
from dsec_layers.fuse.client import control
from tests.kit.descriptors import open_files, opened_since
from tests.kit.disks_kit import no_parent

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LocalDisk]:
    """An open disk, whose control socket is served."""
    create_files(tmp_path / "d", MIB)
    with LocalDisk(tmp_path / "d", no_parent) as opened:  # type: ignore[arg-type]
        server = ControlServer(opened, lambda: {"pid": os.getpid(), "uri": "nbd://"}, lambda: None)
        try:
            yield opened
        finally:
            server.close()


def ask(path: Path, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
    """A message's answer, as it comes over the socket; empty if the server closes."""
    channel = control.connect(path, 10)
    assert channel is not None
    with channel:
        try:
            control.send(channel, message, fds or [])
            received = control.receive(channel)
        except ConnectionError:
            received = None
        return received[0] if received else {}


def settle(before: Counter[str]) -> None:
    """Wait until nothing is open that was not ``before``, or fail."""
    deadline = time.monotonic() + 5
    while opened_since(before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert opened_since(before) == []


@pytest.mark.parametrize("count", [1, 16, 100])
@pytest.mark.parametrize("message", [{"op": "status"}, {"op": "nonsense"}])
def test_b6_descriptors_that_come_along_are_closed(disk: LocalDisk, message: dict[str, Any], count: int) -> None:
    before = open_files()
    with open(os.devnull, "rb") as stream:
        for _ in range(5):
            ask(disk.path, message, [stream.fileno()] * count)
    settle(before)


@pytest.mark.parametrize("rest", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2no"])
def test_b6_descriptors_of_broken_messages_are_closed(disk: LocalDisk, rest: bytes) -> None:
    before = open_files()
    with open(os.devnull, "rb") as stream:
        for _ in range(5):
            channel = control.connect(disk.path, 10)
            assert channel is not None
            with channel:
                socket.send_fds(channel, [rest[:1] or b"\0"], [stream.fileno()] * 3)
                channel.sendall(rest[1:])
                channel.shutdown(socket.SHUT_WR)
                assert channel.recv(1) == b""  # the server has taken the connection, and is done with it
    settle(before)


def test_b6_descriptors_in_an_answer_are_closed(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there, open(os.devnull, "rb") as stream:
        asking = Served(tmp_path, here)
        control.send(there, {"ok": {"pid": 1}}, [stream.fileno()] * 4)
        before = open_files()
        assert asking.status() == {"pid": 1}
        assert opened_since(before) == []


def test_b6_too_many_descriptors_are_no_message() -> None:
    here, there = socket.socketpair()
    with here, there, open(os.devnull, "rb") as stream:
        socket.send_fds(there, [struct.pack(">I", 2)], [stream.fileno()] * 100)
        there.sendall(b"{}")
        before = open_files()
        with pytest.raises(ValueError, match="descriptors"):
            control.receive(here)
        assert opened_since(before) == []


@pytest.mark.parametrize(("uid", "allowed"), [(os.geteuid(), True), (0, True), (12345, False)])
def test_b6_only_the_owner_and_root_may_ask(disk: LocalDisk, monkeypatch: pytest.MonkeyPatch, uid: int, allowed: bool) -> None:
    monkeypatch.setattr(control, "peer_uid", lambda channel: uid)
    with ExitStack() as stack:
        server = served(disk.path)
        assert server is not None
        stack.callback(server.close)
        if allowed:
            assert server.status()["pid"] == os.getpid()
            return
        with pytest.raises(HostError) as caught:
            server.snapshot()
        assert caught.value.hint


def test_b6_the_server_goes_on_after_it_was_out_of_descriptors(disk: LocalDisk) -> None:
    with ExitStack() as stack:
        channel = control.connect(disk.path, 10)
        assert channel is not None
        stack.callback(channel.close)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket(socket.AF_UNIX)
        stack.callback(waiting.close)
        here = os.open(disk.path, os.O_PATH)
        stack.callback(os.close, here)
        resource.setrlimit(resource.RLIMIT_NOFILE, (here + 1, before[1]))
        try:
            while True:
                try:
                    stack.callback(os.close, os.dup(here))
                except OSError:
                    break
            waiting.connect(f"/proc/self/fd/{here}/{control.SOCKET}")
            time.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert ask(disk.path, {"op": "status"})["ok"]["pid"] == os.getpid()


REBASE: dict[str, Any] = {"op": "rebase", "expected": None, "parent": {"store": "file:///s", "digest": "sha256:" + "0" * 64}, "gone": []}


@pytest.mark.parametrize(
    "change",
    [
        {"parent": None}, {"parent": {}}, {"parent": {"store": "file:///s"}}, {"parent": REBASE["parent"] | {"digest": "x"}},
        {"parent": REBASE["parent"] | {"digest": 1}}, {"parent": REBASE["parent"] | {"store": 1}}, {"parent": REBASE["parent"] | {"store": "x" * 5000}},
        {"gone": None}, {"gone": "1"}, {"gone": ["1"]}, {"gone": [True]}, {"gone": [1.5]}, {"gone": [-1]}, {"gone": [1] * 1000}, {"gone": {"1": 1}},
        {"expected": []}, {"expected": ""}, {"expected": {"store": 1, "digest": 2}},
    ],
)  # fmt: skip
def test_b7_an_improper_rebase_changes_nothing(disk: LocalDisk, change: dict[str, Any]) -> None:
    """What got through would be in disk.json, which nobody could read any more."""
    before = (disk.path / STATE).read_bytes()
    answer = ask(disk.path, REBASE | change)
    assert answer["error"]["type"] == "UsageError" and "not a rebase" in answer["error"]["message"]
    assert (disk.path / STATE).read_bytes() == before


def test_a_proper_rebase_passes(disk: LocalDisk) -> None:
    assert ask(disk.path, REBASE)["ok"]["parent"] == REBASE["parent"]
    assert read_state(disk.path).parent == Parent(**REBASE["parent"])


@pytest.mark.parametrize("status", [{}, {"pid": "1"}, {"pid": -1}, {"pid": True}, {"pid": 1 << 40}, [], "x", None])
def test_b7_a_server_that_answers_nonsense_is_not_stopped(tmp_path: Path, status: object) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5)
        control.send(there, {"ok": status})
        with pytest.raises(HostError):
            Served(tmp_path, here).stop()
