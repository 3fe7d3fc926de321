"""The serving side of the control protocol, and what both of its users get by it."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.owner import ControlServer, served
from dsec_layers.errors import HostError, NotFound, UsageError
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.control import Message, receive, send
from dsec_layers.fuse.client.controlserver import MessageServer, Reply
from dsec_layers.linux.process import set_descriptor_limit
from tests.kit.cache_kit import eventually
from tests.kit.descriptors import open_files, opened_since


def ask(channel: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> tuple[Message, list[int]] | None:
    send(channel, message, fds)
    return receive(channel)


@pytest.fixture
def disk_control(tmp_path: Path) -> Iterator[threading.Event]:
    """A disk's control socket in ``tmp_path``; the event is set when somebody asked for the end."""
    stopped = threading.Event()
    server = ControlServer(cast(LocalDisk, SimpleNamespace(path=tmp_path)), lambda: {"pid": os.getpid()}, stopped.set)
    yield stopped
    server.close()


def test_a3_b6_descriptors_that_a_request_brings_are_closed(disk_control: threading.Event, tmp_path: Path) -> None:
    channel = control.connect(tmp_path, 20)
    assert channel is not None
    with channel, open("/dev/null", "rb") as null:
        assert ask(channel, {"op": "status"}) == ({"ok": {"pid": os.getpid()}}, [])
        before = open_files()
        for _ in range(10):
            ask(channel, {"op": "status"}, (null.fileno(),) * 5)
        assert opened_since(before) == []


def test_a3_b6_another_user_is_sent_away(disk_control: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "peer_uid", lambda _: 12345)
    server = served(tmp_path)
    assert server is not None
    with pytest.raises(HostError, match="another user"):
        server._ask("stop")
    server.close()
    assert not disk_control.is_set()


def test_a_disk_is_stopped_when_the_answer_is_out_and_its_name_is_gone(disk_control: threading.Event, tmp_path: Path) -> None:
    server = served(tmp_path)
    assert server is not None
    with pytest.raises(UsageError, match="knows no 'nonsense'"):
        server._ask("nonsense")
    with pytest.raises(UsageError, match="not a rebase"):
        server._ask("rebase", parent=7)
    assert server._ask("stop") is None
    server.close()
    assert disk_control.wait(20)


class Asked:
    def __init__(self) -> None:
        self.then: list[str] = []

    def answer(self, message: Message) -> Any:
        match message["op"]:
            case "value":
                return message["value"]
            case "file":
                return Reply("here", (os.open("/dev/null", os.O_RDONLY),), lambda: self.then.append("file"))
            case "missing":
                raise NotFound("there is none", hint="make one")
            case "improper":
                raise KeyError("what")
        raise RuntimeError("unexpected")


def test_answers_errors_descriptors_and_the_end(tmp_path: Path) -> None:
    asked = Asked()
    server = MessageServer(control.listen(tmp_path), asked.answer, greeting=lambda: {"hello": 1})
    server.start()
    channel = control.connect(tmp_path, 20)
    assert channel is not None
    with channel:
        assert receive(channel) == ({"hello": 1}, [])
        before = open_files()
        assert ask(channel, {"op": "value", "value": [1]}) == ({"ok": [1]}, [])
        received = ask(channel, {"op": "file"})
        assert received is not None and received[0] == {"ok": "here"}
        for fd in received[1]:
            os.close(fd)
        eventually(lambda: not opened_since(before) and asked.then == ["file"])
        for operation, kind in (("missing", "NotFound"), ("improper", "UsageError"), ("else", "DsecError"), (None, "DsecError")):
            received = ask(channel, {"op": operation})
            assert received is not None and received[0]["error"]["type"] == kind
        assert not server.end_if_quiet(100, lambda: True) and not server.end_if_quiet(0, lambda: False)
        eventually(lambda: server.end_if_quiet(0, lambda: True))
        assert ask(channel, {"op": "value", "value": 1}) is None
    server.close()
    eventually(lambda: control.connect(tmp_path) is None)


def test_a_server_that_gets_no_thread_for_a_client_serves_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = MessageServer(control.listen(tmp_path), lambda message: message["value"])
    server.start()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    expected: object
    for expected in (None, ({"ok": 1}, [])):
        channel = control.connect(tmp_path, 20)
        assert channel is not None
        with channel:
            send(channel, {"op": "value", "value": 1})
            try:
                assert receive(channel) == expected
            except ConnectionResetError:
                assert expected is None
    server.close()


def test_a_message_nested_too_deep_is_none_for_either_side() -> None:
    here, there = socket.socketpair()
    data = b'{"op":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with here, there:
        here.setblocking(False)
        thread = threading.Thread(target=there.sendall, args=(len(data).to_bytes(4, "big") + data,))
        thread.start()
        here.settimeout(20)
        with pytest.raises(ValueError, match="nested"):
            receive(here)
        thread.join()


def test_a_descriptor_of_any_number_can_listen(tmp_path: Path) -> None:
    """A worker that follows one with thousands of events in hand gets high numbers; select(2) knows those below 1024."""
    if set_descriptor_limit(4096) <= 2000:
        pytest.skip("this process may not open so many files")
    with control.listen(tmp_path) as low:
        server = MessageServer(socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 2000)), lambda message: message["value"])
    server.start()
    channel = control.connect(tmp_path, 20)
    assert channel is not None
    with channel:
        assert ask(channel, {"op": "value", "value": 1}) == ({"ok": 1}, [])
    server.close()
