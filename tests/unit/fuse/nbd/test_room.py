"""Who gets one of a server's places: clients that have not finished the handshake make room, and nothing stays of who has left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec_layers.blocksource import BytesSource
from dsec_layers.fuse.nbd import Export, Limits, Server
from dsec_layers.fuse.nbd.connection import Connection
from dsec_layers.fuse.nbd.negotiation import Negotiation
from dsec_layers.fuse.nbd.sender import Sender
from dsec_layers.fuse.nbd.transmission import Transmission
from dsec_layers.fuse.nbd.workers import Workers
from tests.kit.nbd_client import Client

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


def test_a_stopped_server_has_no_thread_left(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that have left already, too, whose threads would hold on to the sources."""
    run = Server._run

    def slow(server: Server, connection: Connection) -> None:
        run(server, connection)
        time.sleep(0.3)

    monkeypatch.setattr(Server, "_run", slow)
    with Server([Export(BytesSource(DATA))], unix=address) as server:
        connect(server).socket.close()
        while server.connections:
            time.sleep(0.001)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("nbd-client")] == []


def test_workers_that_are_finished_have_no_thread_left() -> None:
    workers = Workers("finished", threads=2, requests=8, payload=100)

    def job() -> None:
        workers.settle(1)
        time.sleep(0.2)

    for _ in range(2):
        workers.submit(1, job)
    workers.finish()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("finished")] == []


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


def leave(client: Client, how: str) -> None:
    """Let the server's connection end in one of the ways there are."""
    assert client.read(0, 4096) == DATA
    if how == "disconnects":
        client.disconnect()
    elif how == "breaks the rules":
        client.socket.sendall(bytes(28))
        assert client.at_end()


@pytest.mark.parametrize("how", ["disconnects", "is gone", "breaks the rules"])
def test_b6_nothing_stays_of_who_has_left(address: Path, how: str) -> None:
    """Not even until garbage is collected: one connection's buffers are hundreds of KiB."""
    gc.collect()
    gc.disable()
    try:
        with Server([Export(BytesSource(DATA))], unix=address) as server:
            for _ in range(30):
                with connect(server) as client:
                    leave(client, how)
            deadline = time.monotonic() + 5
            while (left := kept()) and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not left
    finally:
        gc.enable()


def kept() -> list[str]:
    """The names of the objects that belong to connections."""
    kinds = Transmission, Connection, Sender, Workers, Negotiation
    return [type(item).__name__ for item in gc.get_objects() if isinstance(item, kinds)]


_SERVER = """
import sys
from pathlib import Path
from dsec_layers.blocksource import BytesSource
from dsec_layers.fuse.nbd import Export, Server
with Server([Export(BytesSource(bytes(range(256)) * 16))], unix=Path(sys.argv[1])):
    print(flush=True)
    sys.stdin.read()
"""


def test_b6_a_server_does_not_grow(address: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()

        def resident() -> int:
            return int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

        def use(times: int) -> None:
            for nth in range(times):
                with Client(address) as client:
                    client.greet()
                    leave(client.go(), "disconnects" if nth % 2 else "is gone")

        use(150)
        before = resident()
        use(1500)
        assert resident() - before < 1.5 * (1 << 20)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
