"""Who gets one of a server's places: clients that have not finished the handshake make room, and nothing stays of who has left."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec_layers.blocksource import BytesSource
from dsec_layers.fuse.nbd import Export, Limits, Server
from tests.nbd_client import Client

DATA = bytes(range(256)) * 16


@pytest.fixture
def address(tmp_path: Path) -> Path:
    """Where the server of a test listens."""
    return tmp_path / "s"


def connect(server: Server) -> Client:
    """A client that has finished the handshake."""
    client = Client(server.address)
    client.greet()
    return client.go()


@pytest.mark.parametrize("words", [0, 1, 2])
def test_b6_silent_clients_make_room(address: Path, words: int) -> None:
    """``words``: how far the clients go in the handshake before they fall silent."""
    with Server([Export(BytesSource(DATA))], unix=address) as server, ExitStack() as stack:
        silent = [stack.enter_context(Client(address)) for _ in range(64)]
        for client in silent:
            if words > 0:
                client.greet()
            if words > 1:
                client.socket.sendall(b"IHAVEOPT")
        start = time.monotonic()
        with connect(server) as client:
            assert client.read(0, len(DATA)) == DATA
        assert time.monotonic() - start < 2


def test_b6_who_has_finished_the_handshake_is_never_dropped(address: Path) -> None:
    limits = Limits(connections=4)
    with Server([Export(BytesSource(DATA))], unix=address, limits=limits) as server, ExitStack() as stack:
        finished = [stack.enter_context(connect(server)) for _ in range(3)]
        silent = [stack.enter_context(Client(address)) for _ in range(20)]
        for client in silent[:-1]:
            if client.socket.recv(18):
                assert client.at_end()
        finished.append(stack.enter_context(connect(server)))
        silent[-1].socket.recv(18)
        assert silent[-1].at_end()
        with Client(address) as late:
            assert late.at_end()
        assert all(client.read(0, len(DATA)) == DATA for client in finished)


def test_b6_the_oldest_goes_first(address: Path) -> None:
    with Server([Export(BytesSource(DATA))], unix=address, limits=Limits(connections=3)) as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(Client(address)) for _ in range(3))
        for client in (first, second, third):
            client.greet()
        with connect(server):
            assert first.at_end()
            for client in (second, third):
                assert client.go().read(0, 16) == DATA[:16]


def test_b6_many_silent_clients_do_not_add_up(address: Path) -> None:
    before = threading.active_count()
    with Server([Export(BytesSource(DATA))], unix=address, limits=Limits(connections=8)) as server, ExitStack() as stack:
        for _ in range(200):
            client = stack.enter_context(Client(address))
            client.socket.recv(18)
        deadline = time.monotonic() + 5
        while threading.active_count() > before + 9 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert threading.active_count() <= before + 9
        assert server.connections <= 8
