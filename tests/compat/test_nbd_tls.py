"""TLS judged by libnbd and QEMU (GnuTLS) and by Python's ssl: certificates, client certificates, pre-shared keys, and what each mode refuses."""

from __future__ import annotations

import random
import shutil
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec_layers.blocksource import MemoryDisk
from dsec_layers.errors import HostError, UsageError
from dsec_layers.fuse.nbd import Export, LocalDisk, Server, Tls, TlsMode
from dsec_layers.fuse.nbd import protocol as nbd
from dsec_layers.fuse.nbd.tls import read_keys
from dsec_layers.proc import run
from tests.kit.nbd_certificates import make_certificates
from tests.kit.nbd_client import Client, export_query
from tests.kit.tools import need

SIZE = 3 << 20
DATA = random.Random(4).randbytes(SIZE)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates signed by one CA, and, in the folder ``stranger``, others signed by another."""
    need("openssl")
    folder = tmp_path_factory.mktemp("pki")
    make_certificates(folder)
    (folder / "stranger").mkdir()
    make_certificates(folder / "stranger")
    return folder


@pytest.fixture(params=["memory", "file"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Export]:
    """A disk with data: one that worker threads read, one that would leave by sendfile in clear text."""
    if request.param == "memory":
        disk = MemoryDisk(SIZE)
        disk.pwrite(0, DATA)
        yield Export(disk)
    else:
        (tmp_path / "disk").write_bytes(DATA)
        with LocalDisk(tmp_path / "disk") as file:
            yield Export(file)


def uri(server: Server, certificates: Path) -> str:
    _, port = server.address  # type: ignore[misc]
    return f"nbds://localhost:{port}/?tls-certificates={certificates}"


def test_nbdcopy_both_ways(export: Export, pki: Path, tmp_path: Path) -> None:
    need("nbdcopy", "nbdinfo")
    with Server([export], port=0, tls=Tls.from_directory(pki, verify_peer=True)) as server:
        address = uri(server, pki)
        assert b"with TLS" in run(["nbdinfo", address], timeout=60).stdout
        run(["nbdcopy", "--requests=8", address, tmp_path / "out"], timeout=60)
        assert (tmp_path / "out").read_bytes() == DATA
        (tmp_path / "in").write_bytes(DATA[::-1])
        run(["nbdcopy", "--flush", tmp_path / "in", address], timeout=60)
    assert export.source.pread(0, SIZE) == DATA[::-1]


def test_qemu_img(export: Export, pki: Path, tmp_path: Path) -> None:
    need("qemu-img")
    (tmp_path / "local").write_bytes(DATA)
    with Server([export], port=0, tls=Tls.from_directory(pki, verify_peer=True)) as server:
        _, port = server.address  # type: ignore[misc]
        remote = f"driver=raw,file.driver=nbd,file.host=localhost,file.port={port},file.tls-creds=t"
        credentials = f"tls-creds-x509,id=t,dir={pki},endpoint=client"
        local = f"driver=raw,file.driver=file,file.filename={tmp_path / 'local'}"
        run(["qemu-img", "compare", "--object", credentials, "--image-opts", remote, local], timeout=60)


def test_clients_without_a_certificate_or_with_a_strangers(export: Export, pki: Path, tmp_path: Path) -> None:
    need("nbdinfo")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(pki / "ca-cert.pem", bare)
    other = tmp_path / "other"
    shutil.copytree(pki / "stranger", other)
    shutil.copy(pki / "ca-cert.pem", other)
    with Server([export], port=0, tls=Tls.from_directory(pki, verify_peer=True)) as server:
        for folder in (bare, other):
            assert run(["nbdinfo", uri(server, folder)], check=False, timeout=60).code != 0
        assert run(["nbdinfo", uri(server, pki)], timeout=60).code == 0
    with Server([export], port=0, tls=Tls.from_directory(pki)) as server:
        assert run(["nbdinfo", uri(server, bare)], timeout=60).code == 0
        assert run(["nbdinfo", uri(server, pki / "stranger")], check=False, timeout=60).code != 0  # the client finds no trust


def test_require_gives_nothing_away_in_clear_text(export: Export, pki: Path, tmp_path: Path) -> None:
    with Server([export], unix=tmp_path / "s", tls=Tls.from_directory(pki)) as server:
        assert server.uri().startswith("nbds+unix://")
        with Client(server.address) as client:
            client.greet()
            for option, data in ((nbd.NBD_OPT_LIST, b""), (nbd.NBD_OPT_INFO, export_query("")), (nbd.NBD_OPT_GO, export_query(""))):
                assert client.option(option, data) == [(nbd.NBD_REP_ERR_TLS_REQD, b"")]
            client.send_option(nbd.NBD_OPT_EXPORT_NAME)
            assert client.at_end()


def secure(client: Client, pki: Path) -> None:
    assert client.option(nbd.NBD_OPT_STARTTLS) == [(nbd.NBD_REP_ACK, b"")]
    context = ssl.create_default_context(cafile=str(pki / "ca-cert.pem"))
    client.socket = context.wrap_socket(client.socket, server_hostname="localhost")


def test_on_serves_both_kinds_and_forgets_what_was_said_in_clear_text(export: Export, pki: Path, tmp_path: Path) -> None:
    with Server([export], unix=tmp_path / "s", tls=Tls.from_directory(pki, mode=TlsMode.ON)) as server:
        with Client(server.address) as client:
            client.greet()
            assert client.go().read(0, SIZE) == DATA
        with Client(server.address) as client:
            client.greet()
            client.option(nbd.NBD_OPT_STRUCTURED_REPLY)
            secure(client, pki)
            assert client.socket.version() in ("TLSv1.2", "TLSv1.3")
            client.go(structured=False)
            assert client.read(0, SIZE) == DATA
            requests = [(number, 0, 0, number * 1000, 100_000, b"") for number in range(200)]
            for cookie, reply in client.many(requests, 20).items():
                assert reply.data == DATA[cookie * 1000 : cookie * 1000 + 100_000]


def test_both_directions_at_once(pki: Path, tmp_path: Path) -> None:
    """Large writes arrive while large reads leave: one thread decrypts while another encrypts."""
    disk = MemoryDisk(SIZE * 2)
    disk.pwrite(0, DATA)
    with Server([Export(disk)], unix=tmp_path / "s", tls=Tls.from_directory(pki)) as server, Client(server.address) as client:
        client.greet()
        secure(client, pki)
        client.go()
        requests = []
        for number in range(60):
            at = number * 50_000
            requests.append((2 * number, nbd.NBD_CMD_WRITE, 0, SIZE + at, 50_000, DATA[at : at + 50_000]))
            requests.append((2 * number + 1, nbd.NBD_CMD_READ, 0, at, 50_000, b""))
        for cookie, reply in client.many(requests, 16).items():
            at = cookie // 2 * 50_000
            assert reply.error == 0
            assert reply.data == (DATA[at : at + 50_000] if cookie % 2 else b"")
    assert disk.pread(SIZE, 3_000_000) == DATA[:3_000_000]


def test_clear_text_behind_starttls_is_not_believed(export: Export, pki: Path, tmp_path: Path) -> None:
    """An option injected before the TLS handshake is taken as part of it, and fails it."""
    with Server([export], unix=tmp_path / "s", tls=Tls.from_directory(pki)) as server, Client(server.address) as client:
        client.greet()
        client.send_option(nbd.NBD_OPT_STARTTLS)
        client.send_option(nbd.NBD_OPT_GO, export_query(""))
        assert client.receive(20)[8:16] == b"\0\0\0\x05\0\0\0\x01"
        answer = b""
        while part := client.socket.recv(4096):
            answer += part
        assert not answer.startswith(b"\0\x03\xe8\x89")  # an alert at most, no option reply


def test_settings_that_cannot_be(pki: Path, tmp_path: Path) -> None:
    for tls in (
        Tls(),
        Tls.from_directory(tmp_path),
        Tls(certificate=pki / "server-cert.pem", key=pki / "client-key.pem"),
        replace(Tls.from_directory(pki), client_ca=tmp_path / "none"),
        replace(Tls.from_directory(pki), keys=tmp_path / "keys"),
    ):
        with pytest.raises(UsageError):
            tls.context()
    with Server([Export(MemoryDisk(512))], host="0.0.0.0", port=0, tls=Tls.from_directory(pki)) as server:
        assert server.uri().startswith("nbds://0.0.0.0:")
    with pytest.raises(UsageError):
        Server([Export(MemoryDisk(512))], host="0.0.0.0", port=0, tls=Tls.from_directory(pki, mode=TlsMode.ON)).start()


def test_key_files(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:00112233445566778899aabbccddeeff\n\nbob:x:" + "ff" * 32 + "\n")
    assert read_keys(keys) == {"ann": bytes.fromhex("00112233445566778899aabbccddeeff"), "bob:x": b"\xff" * 32}
    for text in ("", "ann", "ann:0011", ":" + "00" * 16, "ann:" + "zz" * 16):
        keys.write_text(text)
        with pytest.raises(UsageError):
            read_keys(keys)
    with pytest.raises(UsageError):
        read_keys(tmp_path / "none")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="this Python can do pre-shared keys")
def test_pre_shared_keys_need_python_3_13(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:" + "a1" * 32)
    with pytest.raises(HostError, match=r"Python 3\.13"):
        Server([Export(MemoryDisk(512))], unix=tmp_path / "s", tls=Tls(keys=keys))


@pytest.mark.skipif(sys.version_info < (3, 13), reason="pre-shared keys need Python 3.13")
def test_pre_shared_keys(export: Export, tmp_path: Path) -> None:
    need("nbdinfo", "nbdcopy", "qemu-img")
    keys = tmp_path / "keys.psk"
    keys.write_text("ann:" + "a1" * 32 + "\n")
    wrong = tmp_path / "wrong.psk"
    wrong.write_text("ann:" + "b2" * 32 + "\nbob:" + "a1" * 32 + "\n")
    with Server([export], unix=tmp_path / "s", tls=Tls(keys=keys)):
        base = f"nbds+unix://ann@/?socket={tmp_path / 's'}&tls-psk-file="
        assert b"with TLS" in run(["nbdinfo", base + str(keys)], timeout=60).stdout
        run(["nbdcopy", base + str(keys), tmp_path / "out"], timeout=60)
        assert (tmp_path / "out").read_bytes() == DATA
        qemu = f"driver=nbd,path={tmp_path / 's'},tls-creds=t"
        credentials = f"tls-creds-psk,id=t,dir={tmp_path},endpoint=client,username=ann"
        run(["qemu-img", "info", "--object", credentials, "--image-opts", qemu], timeout=60)
        assert run(["nbdinfo", base + str(wrong)], check=False, timeout=60).code != 0
        assert run(["nbdinfo", base.replace("ann@", "bob@") + str(wrong)], check=False, timeout=60).code != 0
