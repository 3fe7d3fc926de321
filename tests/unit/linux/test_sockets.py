"""Unix sockets by name: who may have one, and that nobody loses a name he listens on."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from dsec_layers.errors import Conflict, HostError
from dsec_layers.linux.unixsocket import connect_unix, listen_unix, remove_socket, socket_identity


def leave_stale(path: Path) -> None:
    """What a server leaves that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))


def test_b5_of_two_servers_that_race_for_a_path_one_gets_it_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for number in range(200):
        if number % 2:
            leave_stale(path)
        start = threading.Barrier(2)
        won: list[socket.socket] = []
        lost: list[Conflict] = []

        def serve(start: threading.Barrier = start, won: list[socket.socket] = won, lost: list[Conflict] = lost) -> None:
            start.wait()
            try:
                won.append(listen_unix(path))
            except Conflict as error:
                lost.append(error)

        threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 1), number
        (server,) = won
        server.settimeout(5)
        with server, connect_unix(path, 5) as client:
            client.sendall(number.to_bytes(2, "big"))
            while True:  # the loser's look at whether somebody listens is a connection as well
                with server.accept()[0] as accepted:
                    if data := accepted.recv(2):
                        assert data == number.to_bytes(2, "big")
                        break
            remove_socket(path, socket_identity(path))
        assert list(tmp_path.iterdir()) == []


def test_b5_a_server_that_has_its_name_but_does_not_listen_yet_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    seen: list[bool] = []
    listen = socket.socket.listen

    def spy(self: socket.socket, backlog: int) -> None:
        seen.append(path.exists())
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", spy)
    with listen_unix(path):
        assert seen == [False] and path.is_socket()


def test_what_is_there_stays_unless_it_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("a file")
    with pytest.raises(Conflict, match="not a socket"):
        listen_unix(path)
    with pytest.raises(Conflict, match="not a socket"):
        listen_unix(path, owned=True)
    path.unlink()
    with listen_unix(path) as first:
        identity = socket_identity(path)
        with pytest.raises(Conflict, match="another server"):
            listen_unix(path)
        assert socket_identity(path) == identity
        with listen_unix(path, owned=True):
            remove_socket(path, identity)
            assert path.is_socket(), "it is another server's by now"
        first.close()
    with pytest.raises(ConnectionRefusedError):
        connect_unix(path)
    with listen_unix(path):
        remove_socket(path, socket_identity(path))
    with pytest.raises(FileNotFoundError):
        connect_unix(path)
    with pytest.raises(HostError, match="nowhere"):
        listen_unix(tmp_path / "nowhere/s")


def test_a_path_of_any_length_and_a_mode_that_no_umask_makes(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200) / ("y" * 255)
    path.parent.mkdir()
    before = os.umask(0)
    try:
        with listen_unix(path) as server:
            assert path.stat().st_mode & 0o7777 == 0o600
            with connect_unix(path) as client, server.accept()[0] as accepted:
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
        assert list(path.parent.iterdir()) == [path]
    finally:
        os.umask(before)


def test_what_a_crash_left_while_a_socket_was_made_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "rename failed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fail)
        patched.setattr(os, "unlink", lambda *_, **__: None)  # a crash tidies nothing
        with pytest.raises(HostError, match="rename failed"):
            listen_unix(path)
    assert [entry.is_socket() for entry in tmp_path.iterdir()] == [True]
    with listen_unix(path):
        assert list(tmp_path.iterdir()) == [path]
