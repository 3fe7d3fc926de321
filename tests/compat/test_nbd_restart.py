"""A server that is killed or stopped and started again under a client that reconnects (QEMU): nothing acknowledged is lost, no request fails."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dsec_layers.fuse.nbd import LocalFile
from dsec_layers.proc import PIPE, Process, clean_environment, spawn
from tests.kit.tools import need

ROOT = Path(__file__).resolve().parents[2]
KIB = 1 << 10
SIZE = 16 << 20
PROGRAM = """
import sys
from pathlib import Path
from dsec_layers.fuse.nbd import Export, LocalDisk, serve
with LocalDisk(Path(sys.argv[1])) as disk:
    serve([Export(disk)], unix=Path(sys.argv[2]), ready=lambda server: print("ready", flush=True))
"""


@contextmanager
def server(disk: Path, socket: Path) -> Iterator[Process]:
    """A server in a process of its own, ready for clients; killed at the end unless it has ended before."""
    environment = clean_environment({"PYTHONPATH": str(ROOT)})
    with spawn([sys.executable, "-W", "error", "-c", PROGRAM, disk, socket], stdout=PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


class QemuIo:
    """qemu-io on a disk that it connects to again, for up to 30 s, when the connection ends."""

    def __init__(self, stack: ExitStack, socket: Path) -> None:
        image = f"driver=nbd,path={socket},reconnect-delay=30"
        # It waits for its standard input to become readable before each line: lines that stdio has read ahead would wait for ever.
        unbuffered = ["stdbuf", "-i0", "qemu-io"]
        self.process = stack.enter_context(spawn([*unbuffered, "--image-opts", image], stdin=PIPE, stdout=PIPE))

    def say(self, *commands: str) -> None:
        """Give commands, without waiting for what comes of them."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(command + "\n" for command in commands).encode())
        self.process.stdin.flush()

    def hear(self, count: int) -> None:
        """Wait until ``count`` operations are reported, none of them as a failure."""
        assert self.process.stdout is not None
        while count:
            line = self.process.stdout.readline().decode()
            assert line, "qemu-io has ended"
            assert "fail" not in line and "rror" not in line, line
            count -= " bytes at offset " in line

    def close(self) -> None:
        """All must have been well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_e6_restart_under_a_reconnecting_client(tmp_path: Path, number: signal.Signals) -> None:
    """The public case E6 with QEMU as the client: writes are in flight while the server goes, and again while it is away."""
    need("qemu-io")
    disk, socket = tmp_path / "disk", tmp_path / "socket"
    with open(disk, "wb") as stream:
        stream.truncate(SIZE)
    with ExitStack() as stack:
        with server(disk, socket) as first:
            qemu = QemuIo(stack, socket)
            qemu.say("write -P 1 0 1M", "flush")
            qemu.hear(1)
            qemu.say(*(f"aio_write -q -P {2 + block % 200} {1024 + 16 * block}k 16k" for block in range(200)))
            first.send_signal(number)
            assert first.wait(60) == (-9 if number == signal.SIGKILL else 0)
        qemu.say("aio_flush", "write -P 250 8M 64k")
        with server(disk, socket) as second:
            qemu.hear(1)
            qemu.say("read -P 1 0 1M", "read -P 250 8M 64k", *(f"read -P {2 + block} {1024 + 16 * block}k 16k" for block in range(200)))
            qemu.hear(202)
            qemu.say("flush")
            qemu.close()
            second.terminate()
            assert second.wait(60) == 0
    assert not socket.exists()
    with LocalFile(disk) as file:
        for block in range(200):
            assert file.pread((1024 + 16 * block) * KIB, 16 * KIB) == bytes([2 + block]) * 16 * KIB
        assert file.pread(8 << 20, 64 * KIB) == bytes([250]) * 64 * KIB
