"""Hostile clients: random, malformed and truncated bytes in every phase. Nothing but the client's own connection may suffer."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_layers.blocksource import BytesSource, MemoryDisk
from dsec_layers.fuse.nbd import Export, Limits, Server, Tls, TlsMode
from dsec_layers.fuse.nbd import protocol as nbd
from dsec_layers.fuse.nbd.negotiation import Negotiation, Next
from dsec_layers.progress import SILENT
from tests.kit.nbd_certificates import make_certificates
from tests.kit.nbd_client import SECONDS, Client, export_query, meta_query

SIZE = 1 << 16
IMAGE = bytes(range(256)) * (SIZE // 256)
MAX_REPLY = 64 << 20

numbers16 = st.one_of(st.integers(0, 12), st.integers(0, 0xFFFF))
numbers32 = st.one_of(
    st.sampled_from([0, 1, 4, 512, SIZE, SIZE + 1, 1 << 25, (1 << 25) + 1, 1 << 31, (1 << 32) - 1]), st.integers(0, (1 << 32) - 1)
)
numbers64 = st.one_of(st.sampled_from([0, 1, 512, SIZE - 1, SIZE, 1 << 32, 1 << 63, (1 << 64) - 1]), st.integers(0, (1 << 64) - 1))
blobs = st.binary(max_size=200)

option_data = st.one_of(
    blobs,
    st.builds(lambda name, requests: export_query(name, *requests), st.text(max_size=20), st.lists(numbers16, max_size=5)),
    st.builds(
        lambda name, queries: meta_query(name, *queries), st.sampled_from(["disk", "", "x"]), st.lists(st.text(max_size=20), max_size=5)
    ),
    st.builds(lambda data, cut: data[:cut], st.just(meta_query("disk", "base:allocation")), st.integers(0, 40)),
    st.builds(lambda length, rest: struct.pack(">I", length) + rest, numbers32, blobs),
)
options = st.builds(
    lambda option, data, length: struct.pack(">QII", nbd.NBD_OPTION_MAGIC, option, len(data) if length is None else length) + data,
    st.one_of(st.integers(0, 12), numbers32),
    option_data,
    st.one_of(st.none(), numbers32),
)
requests = st.builds(
    lambda magic, flags, command, offset, length, rest: struct.pack(">IHHQQI", magic, flags, command, 7, offset, length) + rest,
    st.sampled_from([nbd.NBD_REQUEST_MAGIC] * 9 + [0]),
    numbers16,
    numbers16,
    numbers64,
    numbers32,
    st.one_of(st.just(b""), blobs, st.binary(min_size=512, max_size=512)),
)


def joined(parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda pieces, tail: b"".join(pieces) + tail, st.lists(parts, max_size=8), blobs)


class Complaints:
    """A progress that keeps warnings: a hostile client is no reason for one."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.task = SILENT.task
        self.info = self.debug = SILENT.info

    def warning(self, message: str) -> None:
        """Kept."""
        self.warnings.append(message)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all examples of this module, which is alive and has nothing to complain about at the end."""
    folder = tmp_path_factory.mktemp("nbd")
    make_certificates(folder)
    tls = Tls.from_directory(folder, mode=TlsMode.ON)
    complaints = Complaints()
    exports = [Export(MemoryDisk(SIZE), "disk"), Export(BytesSource(IMAGE), "image")]
    limits = Limits(connections=16, handshake_seconds=SECONDS)
    server = Server(exports, unix=folder / "socket", tls=tls, limits=limits, progress=complaints)
    threads = threading.active_count()
    with server:
        yield server
    assert complaints.warnings == []
    assert threading.active_count() <= threads


def attack(server: Server, prefix: str, data: bytes) -> None:
    """Bring a connection to a phase, send ``data`` and no more, take what comes until the end, and see that the next client is served."""
    with Client(server.address) as client:
        if prefix != "greeting":
            client.greet()
        if prefix == "transmission":
            client.go("disk", allocation=True)
        elif prefix == "simple":
            client.export_name("disk")
        elif prefix == "tls":
            assert client.option(nbd.NBD_OPT_STARTTLS) == [(nbd.NBD_REP_ACK, b"")]
        try:
            client.socket.sendall(data)
            client.socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was thrown out already
        taken = 0
        try:
            while part := client.socket.recv(1 << 20):
                taken += len(part)
                assert taken < MAX_REPLY
        except ConnectionResetError:
            pass
    with Client(server.address) as client:
        client.greet()
        client.go("image")
        assert client.read(100, 1000) == IMAGE[100:1100]
    deadline = time.monotonic() + SECONDS
    while server.connections and time.monotonic() < deadline:
        time.sleep(0.0005)
    assert server.connections == 0


@given(data=st.one_of(blobs, joined(options)))
@settings(max_examples=60, deadline=None)
def test_instead_of_client_flags(target: Server, data: bytes) -> None:
    attack(target, "greeting", data)


@given(data=st.one_of(blobs, joined(options)))
@settings(max_examples=250, deadline=None)
def test_during_option_haggling(target: Server, data: bytes) -> None:
    attack(target, "options", data)


@pytest.mark.parametrize("prefix", ["transmission", "simple"])
@given(data=st.one_of(blobs, joined(requests)))
@settings(max_examples=200, deadline=None)
def test_during_transmission(target: Server, prefix: str, data: bytes) -> None:
    attack(target, prefix, data)


@given(data=st.one_of(blobs, joined(options), st.builds(lambda rest: b"\x16\x03\x01" + rest, blobs)))
@settings(max_examples=60, deadline=None)
def test_instead_of_a_tls_handshake(target: Server, data: bytes) -> None:
    attack(target, "tls", data)


@given(data=st.one_of(joined(options), joined(requests)), broken=blobs)
@settings(max_examples=40, deadline=None)
def test_inside_tls(target: Server, data: bytes, broken: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with Client(target.address) as client:
        client.greet()
        client.option(nbd.NBD_OPT_STARTTLS)
        raw = client.socket
        client.socket = context.wrap_socket(raw, suppress_ragged_eofs=True)
        client.go("disk")
        try:
            client.socket.sendall(data)
            plain = socket.socket(fileno=client.socket.detach())
            client.socket = plain
            plain.settimeout(SECONDS)
            plain.sendall(broken)  # not a TLS record
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 20):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    attack(target, "greeting", b"")


@given(
    steps=st.lists(st.tuples(st.one_of(st.integers(0, 12), numbers32), st.one_of(st.none(), option_data)), max_size=12),
    mode=st.sampled_from(TlsMode),
)
@settings(max_examples=400, deadline=None)
def test_negotiation_answers_everything(steps: list[tuple[int, bytes | None]], mode: TlsMode) -> None:
    export = Export(MemoryDisk(SIZE), "disk")
    state = Negotiation({"disk": export}, mode, fixed=True, no_zeroes=True)
    for option, data in steps:
        answer, then = state.answer(option, data)
        if then in (Next.CLOSE, Next.TRANSMISSION):
            assert (state.session is not None) is (then is Next.TRANSMISSION)
            return
        kinds = []
        while answer:
            magic, echoed, kind, length = struct.unpack(">QIII", answer[:20])
            assert (magic, echoed) == (nbd.NBD_REPLY_MAGIC, option)
            assert len(answer) >= 20 + length
            answer = answer[20 + length :]
            kinds.append(kind)
        final = [kind for kind in kinds if kind == nbd.NBD_REP_ACK or kind >> 31]
        assert final == kinds[-1:]
        if then is Next.TLS:
            state.secured()
