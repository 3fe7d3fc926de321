"""Processes that go on in the background."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsec_layers.errors import DsecError
from dsec_layers.linux import process
from dsec_layers.proc import run

PROGRAM = """
import json, os, sys
from pathlib import Path
from dsec_layers.linux.process import in_background

log, gate = map(Path, sys.argv[1:])

def serve(say):
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    sys.stderr.write("something nobody expects\\n")
    os.write(say, json.dumps([os.getpid(), os.getsid(0), os.getcwd(), streams]).encode())
    os.close(say)
    with open(gate) as stream:  # lives on after its starter
        stream.read()
    return 7

before = os.getsid(0)
said = in_background(log, serve)
print(os.read(said, 1000).decode())
assert os.read(said, 1) == b"" and os.getsid(0) == before
"""


def test_it_says_that_it_is_ready_and_lives_on(tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    log.write_text("before\n")
    run(["mkfifo", gate])
    done = run([sys.executable, "-c", PROGRAM, log, gate], timeout=60)  # returns: nothing holds its output open
    pid, session, folder, streams = json.loads(done.stdout)
    assert process.start_time(pid) is not None
    assert (session, folder, streams) == (pid, "/", ["/dev/null", "/dev/null", str(log)])
    gate.write_text("end")
    assert log.read_text() == "before\nsomething nobody expects\n"


def test_a_log_that_cannot_be_is_the_starters_error(tmp_path: Path) -> None:
    with pytest.raises(DsecError, match="IsADirectoryError"):
        run([sys.executable, "-c", PROGRAM, tmp_path, tmp_path / "gate"], timeout=60)


def test_a3_processes_go_into_the_background_in_one_way() -> None:
    package = Path(process.__file__).parents[1]
    folders = (package, *(entry for entry in package.iterdir() if entry.is_symlink()))
    assert [path for folder in folders for path in folder.rglob("*.py") if "setsid" in path.read_text()] == [Path(process.__file__)]
