"""Local files as sources, captive mode, serving in the foreground."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from dsec_layers.blocksource import BytesSource, MemoryDisk
from dsec_layers.errors import CorruptError, DsecError, NotFound, ToolError, UsageError
from dsec_layers.fuse.nbd import Export, LocalDisk, LocalFile, run_captive
from dsec_layers.proc import PIPE, clean_environment, spawn
from tests.kit.nbd_client import SECONDS, Client

ROOT = Path(__file__).resolve().parents[4]
SIZE = 1 << 20


def test_a_disk_agrees_with_the_model(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(SIZE))
    model = MemoryDisk(SIZE)
    rng = random.Random(1)
    with LocalDisk(path) as disk:
        assert disk.size == SIZE
        for _ in range(300):
            offset = rng.randrange(SIZE)
            length = min(rng.choice([0, 1, 511, 4096, 100_000]), SIZE - offset)
            if rng.random() < 0.6:
                data = rng.randbytes(length)
                disk.pwrite(offset, data)
                model.pwrite(offset, data)
            else:
                disk.write_zeroes(offset, length)
                model.write_zeroes(offset, length)
            covered = 0
            for size, flags in disk.block_status(0, SIZE):
                assert size > 0
                if flags:
                    assert model.pread(covered, size) == bytes(size)
                covered += size
            assert covered == SIZE
        disk.flush()
        assert disk.pread(0, SIZE) == model.pread(0, SIZE)
        disk.trim(0, SIZE)
        assert disk.pread(0, SIZE) == bytes(SIZE)


def test_zeros_are_written_where_no_hole_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, length: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("dsec_layers.fuse.nbd.files.punch_hole", unsupported)
    path = tmp_path / "disk"
    path.write_bytes(b"x" * SIZE)
    with LocalDisk(path) as disk:
        disk.trim(0, SIZE)
        assert disk.pread(0, SIZE) == b"x" * SIZE
        disk.write_zeroes(1, SIZE - 2)
        assert disk.pread(0, SIZE) == b"x" + bytes(SIZE - 2) + b"x"


def test_failures(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        LocalFile(tmp_path / "nothing")
    with pytest.raises(DsecError):
        LocalDisk(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with LocalFile(path) as file:
        assert Export(file).disk is None
        with pytest.raises(UsageError):
            file.pread(1, 3)
        os.truncate(path, 1)
        with pytest.raises(CorruptError):
            file.pread(0, 3)
    file.close()
    with LocalDisk(path) as disk:
        for change in (disk.trim, disk.write_zeroes):
            with pytest.raises(UsageError):
                change(0, 2)
        with pytest.raises(UsageError):
            disk.pwrite(1, b"x")


def test_a_file_that_became_shorter_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * SIZE)
    script = "import sys; from tests.unit.fuse.nbd.test_files import read_after_truncate; read_after_truncate(*sys.argv[1:])"
    with LocalFile(path) as file:
        environment = clean_environment({"PYTHONPATH": str(ROOT)})
        assert run_captive([Export(file)], [sys.executable, "-c", script, "$unixsocket", str(path)], env=environment) == 0


def read_after_truncate(address: str, path: str) -> None:
    """The client of the test above."""
    with Client(Path(address)) as client:
        client.greet()
        client.go()
        assert client.read(0, SIZE) == b"x" * SIZE
        os.truncate(path, SIZE // 2)
        for length in (100, SIZE // 2):
            assert client.call(0, SIZE // 2, length).error == 5
        assert client.read(0, SIZE // 2) == b"x" * (SIZE // 2)


class TestCaptive:
    EXPORTS = (Export(BytesSource(b"x" * 512), "a b"), Export(BytesSource(b""), "other"))

    def test_exit_code_of_the_command(self) -> None:
        for code in (0, 7):
            assert run_captive(self.EXPORTS, ["sh", "-c", f"exit {code}"]) == code
        assert run_captive(self.EXPORTS, ["sh", "-c", "kill -TERM $$"]) == 128 + signal.SIGTERM

    def test_arguments_and_environment(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        script = 'printf "%s\\n" "$1" "$2" "$3" "$(printenv uri)" "${unixsocket}" "$MARK" >"$4"; test -S "$unixsocket"'
        command = ["sh", "-c", script, "sh", "$uri", "path=${unixsocket}", "$uris", str(out)]
        assert run_captive(self.EXPORTS, command, env=clean_environment({"MARK": "here"})) == 0
        uri, option, other, uri_variable, path, mark = out.read_text().splitlines()
        assert uri == uri_variable == f"nbd+unix:///a%20b?socket={path}"
        assert (option, other, mark) == (f"path={path}", "$uris", "here")
        assert not Path(path).parent.exists()

    def test_a_command_that_is_not_there(self) -> None:
        with pytest.raises(ToolError):
            run_captive(self.EXPORTS, ["/no/such/program"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serving_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    program = """
import sys
from pathlib import Path
from dsec_layers.blocksource import BytesSource
from dsec_layers.fuse.nbd import Export, serve
done = serve([Export(BytesSource(b"x" * 4096))], unix=Path(sys.argv[1]), ready=lambda server: print(server.uri(), flush=True))
print(done)
"""
    path = tmp_path / "socket"
    argv = [sys.executable, "-W", "error", "-c", program, str(path)]
    with spawn(argv, stdout=PIPE, env=clean_environment({"PYTHONPATH": str(ROOT)})) as process:
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == f"nbd+unix:///?socket={path}"
        with Client(path) as client:
            client.greet()
            client.go()
            assert client.read(0, 4096) == b"x" * 4096
            process.send_signal(number)
            assert client.at_end()
        assert process.stdout.read() == b"True\n"
        assert process.wait(SECONDS) == 0
    assert not path.exists()
