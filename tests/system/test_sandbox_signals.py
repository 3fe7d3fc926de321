"""Signals, terminals, and what is left when the one who runs a sandbox is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers import proc
from dsec_layers.errors import UsageError
from dsec_layers.sandbox import RunSpec, Sandbox, run
from dsec_layers.sandbox.cgroups import read_cgroup_mounts
from dsec_layers.sandbox.output import Collector
from dsec_layers.sandbox.runtime import Runtime

pytestmark = pytest.mark.root

DRIVER = """
import sys
from pathlib import Path
from dsec_layers.sandbox import RunSpec, run
sys.exit(run(RunSpec(tuple(sys.argv[3:])), [Path(sys.argv[1])], state=Path(sys.argv[2])))
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextlib.contextmanager
def driver(root: Path, state: Path, script: str) -> Iterator[proc.Process]:
    """Another process that runs a sandbox; its output comes through a pipe."""
    argv = [sys.executable, "-c", DRIVER, str(root), str(state), "/bin/sh", "-c", script]
    with proc.spawn(argv, stdout=proc.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}) as process:
        yield process


def first_line(process: proc.Process) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_a_command_that_handles_it(busybox_root: Path, state: Path, number: signal.Signals) -> None:
    script = "trap 'echo got; exit 3' TERM INT HUP; echo ready; while :; do sleep 0.05; done"
    with driver(busybox_root, state, script) as process:
        assert first_line(process) == b"ready\n"
        process.send_signal(number)
        assert first_line(process) == b"got\n"
        assert process.wait(20) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_a_command_that_does_not_handle_it(busybox_root: Path, state: Path, number: signal.Signals) -> None:
    """To the first process of a namespace the kernel would not deliver it; the caller must not notice."""
    with driver(busybox_root, state, "echo ready; exec sleep 100") as process:
        assert first_line(process) == b"ready\n"
        process.send_signal(number)
        assert process.wait(20) == 128 + number


def test_the_second_interrupt_kills(busybox_root: Path, state: Path) -> None:
    with driver(busybox_root, state, "trap 'echo no' INT; echo ready; while :; do sleep 0.05; done") as process:
        assert first_line(process) == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert first_line(process) == b"no\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 137


def test_an_ignored_signal_is_ignored(busybox_root: Path, state: Path) -> None:
    with driver(busybox_root, state, "trap '' TERM; echo ready; sleep 0.3; echo alive; exit 4") as process:
        assert first_line(process) == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert first_line(process) == b"alive\n"
        assert process.wait(20) == 4


def test_killed_with_nine_nothing_runs_on(busybox_root: Path, state: Path) -> None:
    """The kernel ends the sandbox with us, a grandchild in its own session too; the next run takes the rest away."""
    host = read_cgroup_mounts(Path("/proc/self/mounts").read_text())
    with driver(busybox_root, state, "setsid sleep 1000 & echo ready; exec sleep 1000") as process:
        assert first_line(process) == b"ready\n"
        (identifier,) = [path.name for path in (state / "sandboxes").iterdir() if path.name != ".lock"]
        assert len(host.pids_of(identifier)) == 2
        process.kill()
        process.wait(20)
        until(lambda: not host.pids_of(identifier), "the sandbox outlives its owner")
    assert (state / "sandboxes" / identifier).is_dir()
    assert not [line for line in Path("/proc/self/mounts").read_text().splitlines() if identifier in line]
    assert run(RunSpec(("/bin/true",)), [busybox_root], state=state) == 0
    assert not (state / "sandboxes" / identifier).exists()


def test_a_sandbox_in_use_is_not_swept(busybox_root: Path, state: Path) -> None:
    with driver(busybox_root, state, "trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done") as process:
        assert first_line(process) == b"ready\n"
        assert run(RunSpec(("/bin/true",)), [busybox_root], state=state) == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 6


def test_leaving_the_context_ends_the_command(busybox_root: Path, state: Path, runtime: Runtime) -> None:
    with Sandbox(RunSpec(("/bin/sleep", "1000")), [busybox_root], state=state, runtime=runtime):
        began = time.monotonic()
    assert time.monotonic() - began < 20


class Terminal:
    """A pseudo-terminal with us at its far end."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def expect(self, text: bytes) -> None:
        os.set_blocking(self.master, False)

        def found() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self.master, 65536)
            return text in self.seen

        until(found, f"terminal shows {self.seen!r}, not {text!r}")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    value = Terminal()
    yield value
    os.close(value.master)
    os.close(value.slave)


def test_a_terminal_inside(busybox_root: Path, state: Path, runtime: Runtime, terminal: Terminal) -> None:
    """A terminal of the right size, resized with ours; Ctrl-C goes through it; our own is as before afterwards."""
    terminal.resize(30, 90)
    before = termios.tcgetattr(terminal.slave)
    script = "tty; stty size; echo $TERM; trap 'stty size; exit 9' INT; echo waiting; while :; do sleep 0.05; done"
    spec = RunSpec(("/bin/sh", "-c", script), tty=True, interactive=True)
    tty = terminal.slave
    with Sandbox(spec, [busybox_root], state=state, environ={"TERM": "vt220"}, stdin=tty, stdout=tty, stderr=tty, runtime=runtime) as box:
        terminal.expect(b"waiting")
        for line in (b"/dev/", b"30 90", b"vt220"):
            assert line in terminal.seen
        assert termios.tcgetattr(terminal.slave) != before
        terminal.resize(40, 100)
        box.resize()
        os.write(terminal.master, b"\x03")
        assert box.wait(20).code == 9
    terminal.expect(b"40 100")
    assert termios.tcgetattr(terminal.slave) == before


def test_a_terminal_is_restored_after_a_kill(busybox_root: Path, state: Path, runtime: Runtime, terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.slave)
    spec = RunSpec(("/bin/sh", "-c", "echo up; sleep 100"), tty=True)
    with Sandbox(
        spec, [busybox_root], state=state, stdin=terminal.slave, stdout=terminal.slave, stderr=terminal.slave, runtime=runtime
    ) as box:
        terminal.expect(b"up")
        box.kill()
        assert box.wait(20).code == 137
    assert termios.tcgetattr(terminal.slave) == before


def test_no_terminal_without_one_outside(busybox_root: Path, state: Path) -> None:
    out = Collector()
    try:
        with pytest.raises(UsageError, match="terminal"):
            Sandbox(RunSpec(("/bin/true",), tty=True), [busybox_root], state=state, stdin=out.fd)
    finally:
        out.finish()
