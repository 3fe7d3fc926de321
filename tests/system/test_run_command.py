"""``dsec-layers run`` as people type it: its options, and what an image says of how it is run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec_layers.errors import Conflict, UsageError
from dsec_layers.proc import Completed, run
from dsec_layers.sandbox import Bind, RunSpec, Sandbox
from dsec_layers.sandbox import run as run_sandbox

pytestmark = pytest.mark.root

Dsec = Callable[..., Completed]


@pytest.fixture(scope="module")
def dsec(busybox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dsec]:
    """The command line on a store with the layer ``box:1``."""
    home = tmp_path_factory.mktemp("run")
    env = {**os.environ, "DSEC_STORE": str(home / "store"), "DSEC_CACHE": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}

    def call(*argv: str | Path, code: int = 0, **more: str) -> Completed:
        done = run([sys.executable, "-m", "dsec_layers", *argv], check=False, env={**env, **more}, timeout=60)
        assert done.code == code, (done.stdout + done.stderr).decode()
        return done

    call("import", busybox_root, "--kind", "base", "--name", "box:1")
    yield call
    call("cache", "stop", "--force")


def test_options_of_run(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("A=file\nB=file\n")
    told = dsec("run", "box:1", "-e", "A", "--env-file", tmp_path / "file", "--", "/bin/sh", "-c", "echo $A $B", A="here").stdout
    assert told == b"here file\n"
    assert dsec("run", "box:1", "--entrypoint", "/bin/echo", "--", "one", "two").stdout == b"one two\n"
    assert dsec("run", "box:1", "--user", "ann", "-w", "/tmp", "/bin/sh", "-c", "id -u; pwd").stdout == b"1000\n/tmp\n"
    script = "cat /in/file; echo new > /out/new; echo no > /in/no"
    done = dsec("run", "box:1", "--bind", f"{tmp_path}:/in:ro", "--bind", f"{tmp_path}:/out", "/bin/sh", "-c", script, code=1)
    assert done.stdout == b"A=file\nB=file\n"
    assert b"Read-only" in done.stderr
    assert (tmp_path / "new").read_text() == "new\n"
    assert b"no command" in dsec("run", "box:1", code=125).stderr
    assert dsec("run", "box:1", "--name", "my_box", "hostname").stdout == b"my-box\n"


def test_run_has_limits_unless_they_are_lifted(dsec: Dsec) -> None:
    forks = "for n in $(seq 1300); do sleep 20 & done 2>/dev/null; echo $n"
    assert b"1300" not in dsec("run", "box:1", "sh", "-c", forks, code=2).stdout
    assert dsec("run", "box:1", "--pids", "0", "sh", "-c", forks).stdout == b"1300\n"
    limit = "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null"
    assert dsec("run", "box:1", "sh", "-c", limit, code=1).stdout == b"2147483648\n"
    assert dsec("run", "box:1", "--memory", "0", "sh", "-c", limit, code=1).stdout != b"2147483648\n"


IMAGE = """name = "app:1"
kind = "base"
workdir = "/not/there"
source = { type = "dir", path = "tree" }
[image]
user = "ann"
entrypoint = ["/bin/sh", "-c"]
cmd = ["id; pwd; ls -ldn ."]
stop_signal = "SIGUSR1"
"""


@pytest.fixture(scope="module")
def app(dsec: Dsec, busybox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image that says how it is run."""
    place = tmp_path_factory.mktemp("app")
    (place / "app.toml").write_text(IMAGE)
    shutil.copytree(busybox_root, place / "tree", symlinks=True)
    dsec("build", place / "app.toml")
    return "app:1"


def test_an_image_runs_as_it_says(dsec: Dsec, app: str) -> None:
    who, where, place = dsec("run", app).stdout.decode().splitlines()
    assert who == "uid=1000(ann) gid=1000(ann) groups=10(wheel)"
    assert where == "/not/there"
    assert place.split()[2:4] == ["0", "0"]
    assert dsec("run", app, "echo $0 $1; id -u", "x", "y").stdout == b"x y\n1000\n"
    assert dsec("run", app, "--entrypoint", "", "-u", "0", "--", "id", "-u").stdout == b"0\n"
    assert dsec("run", app, "--entrypoint", "/bin/hostname", "-w", "/").stdout == b"sandbox\n"


def test_an_image_is_stopped_by_its_own_signal(dsec: Dsec, app: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    script = "trap 'echo bye > /out/end; exit 3' USR1; while :; do sleep 0.1; done"
    dsec("run", app, "--bind", f"{tmp_path}:/out", "--timeout", "2", "--", script, code=124)
    assert (tmp_path / "end").read_text() == "bye\n"


def test_sigterm_becomes_the_stop_signal(busybox_root: Path, state: Path, tmp_path: Path) -> None:
    script = "trap 'exit 3' USR1; trap 'exit 4' TERM; touch /out/up; while :; do sleep 0.1; done"
    spec = RunSpec(("/bin/sh", "-c", script), stop_signal=signal.SIGUSR1, binds=(Bind(tmp_path, "/out", read_only=False),))

    def terminate() -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    assert run_sandbox(spec, [busybox_root], state=state, timeout=30) == 3


def test_time_is_limited(dsec: Dsec) -> None:
    began = time.monotonic()
    done = dsec("run", "box:1", "--timeout", "0.5", "sleep", "50", code=124)
    assert b"0.5 s were over" in done.stderr
    assert dsec("run", "box:1", "--timeout", "50", "true").stderr == b""
    assert time.monotonic() - began < 30


def test_a_command_whose_time_is_up_may_end_by_itself(busybox_root: Path, state: Path, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 3' USR1; echo up; while :; do sleep 0.1; done"
    spec = RunSpec(("/bin/sh", "-c", script), stop_signal=10)
    with open(tmp_path / "out", "wb") as out:
        assert run_sandbox(spec, [busybox_root], state=state, stdout=out.fileno(), timeout=1) == 124
    assert (tmp_path / "out").read_bytes() == b"up\nbye\n"
    for bad in (0, -1, float("nan"), 1e300):
        with pytest.raises(UsageError, match="time limit"):
            run_sandbox(spec, [busybox_root], state=state, timeout=bad)


def test_a_name_has_one_sandbox(busybox_root: Path, state: Path) -> None:
    spec = RunSpec(("/bin/sleep", "50"), name="one")
    with Sandbox(spec, [busybox_root], state=state):
        with pytest.raises(Conflict, match="'one' is running"), Sandbox(spec, [busybox_root], state=state):
            pass
        assert run_sandbox(RunSpec(("/bin/true",), name="two"), [busybox_root], state=state) == 0
    assert run_sandbox(RunSpec(("/bin/true",), name="one"), [busybox_root], state=state) == 0
    with pytest.raises(UsageError, match="name for a sandbox"):
        RunSpec(("true",), name="../x")
