"""The main path through the command line: import, compose, mount, run, and what a user sees when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.proc import PIPE, Completed, run, spawn
from dsec_layers.registry.view import open_view, walk
from tests.kit.oracle import diff, snapshot_dir

pytestmark = pytest.mark.root

Dsec = Callable[..., Completed]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this module's store and cache are."""
    return tmp_path_factory.mktemp("main-path")


@pytest.fixture(scope="module")
def dsec(home: Path) -> Iterator[Dsec]:
    """The command line on a store and cache of its own; the daemon is ended afterwards, and no mount may be left."""
    env = {**os.environ, "DSEC_STORE": str(home / "store"), "DSEC_CACHE": str(home / "cache")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling the package anew for each command would be most of the time

    def call(*argv: str | Path, code: int = 0, **more: str) -> Completed:
        done = run([sys.executable, "-m", "dsec_layers", *argv], check=False, env={**env, **more}, timeout=120)
        assert done.code == code, (done.stdout + done.stderr).decode()
        return done

    yield call
    call("cache", "stop", "--force")
    assert str(home) not in Path("/proc/self/mountinfo").read_text()


def answer(done: Completed) -> Any:
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def environment(dsec: Dsec, busybox_root: Path, home: Path) -> str:
    work = home / "work"
    (work / "srv/project").mkdir(parents=True)
    (work / "srv/project/data").write_bytes(os.urandom(3 << 20))
    (work / "etc").mkdir()
    (work / "etc/passwd").write_text("root:x:0:0:workspace:/root:/bin/sh\n")
    os.mknod(work / "etc/group", 0o20000, 0)  # a whiteout of the base's file
    tool = home / "tool"
    (tool / "opt/tool/bin").mkdir(parents=True)
    (tool / "opt/tool/bin/hello").write_text("#!/bin/sh\necho hello from the tool\n")
    (tool / "opt/tool/bin/hello").chmod(0o755)
    dsec("import", busybox_root, "--kind", "base", "--name", "busybox:1")
    dsec("import", work, "--kind", "workspace", "--name", "work:1")
    dsec("import", tool, "--kind", "toolkit", "--name", "tool:1", "--prefix", "/opt/tool")
    dsec("env", "create", "env:1", "--base", "busybox:1", "--workspace", "work:1", "--toolkit", "tool:1")
    return "env:1"


def test_mounted_environment_is_the_merged_view(dsec: Dsec, environment: str, home: Path, tmp_path: Path) -> None:
    from dsec_layers import Session

    target = tmp_path / "mnt"
    target.mkdir()
    dsec("mount", environment, target)
    assert [row["label"] for row in answer(dsec("ps", "--json"))] == [environment]
    before = answer(dsec("cache", "show", "--json"))["fetched"]
    assert before == 0
    mounted = snapshot_dir(target)
    with Session(home / "store", home / "cache") as session:
        view = open_view(session.store, environment)
        assert {path for path, _ in walk(view)} == set(mounted)
        for path, entry in walk(view):
            if entry.children is None:
                assert mounted[path].size == entry.inode.size
    assert (target / "etc/passwd").read_text().startswith("root:x:0:0:workspace")
    assert not (target / "etc/group").exists()
    assert "group" not in {path.name for path in (target / "etc").iterdir()}
    assert (target / "srv/project/data").read_bytes() == (home / "work/srv/project/data").read_bytes()
    dsec("umount", target)
    assert answer(dsec("ps", "--json")) == []


def test_a10_a_whiteout_shows_nowhere(dsec: Dsec, environment: str, tmp_path: Path) -> None:
    target = tmp_path / "mnt"
    target.mkdir()
    for ref in ("work:1", environment):
        dsec("mount", ref, target)
        assert "group" not in {path.name for path in (target / "etc").iterdir()}
        assert not (target / "etc/group").exists()
        dsec("umount", target)


def test_exported_tar_equals_the_mount(dsec: Dsec, environment: str, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    (tmp_path / "tree").mkdir()
    dsec("mount", environment, tmp_path / "mnt")
    dsec("export", environment, "-o", tmp_path / "env.tar")
    run(["tar", "-xpf", tmp_path / "env.tar", "-C", tmp_path / "tree", "--xattrs", "--xattrs-include=*", "--numeric-owner"])
    assert diff(snapshot_dir(tmp_path / "mnt"), snapshot_dir(tmp_path / "tree"), ignore={"names", "nlink"}) == []
    dsec("umount", tmp_path / "mnt")


def test_flat_image_of_an_environment_mounts_by_itself(dsec: Dsec, environment: str, tmp_path: Path) -> None:
    for name in ("mnt", "flat"):
        (tmp_path / name).mkdir()
    dsec("mount", environment, tmp_path / "mnt")
    dsec("export", environment, "--format", "erofs", "-o", tmp_path / "env.erofs")
    run(["mount", "-t", "erofs", tmp_path / "env.erofs", tmp_path / "flat"])
    try:
        assert diff(snapshot_dir(tmp_path / "mnt"), snapshot_dir(tmp_path / "flat"), ignore={"names", "nlink"}) == []
    finally:
        run(["umount", tmp_path / "flat"])
    dsec("umount", tmp_path / "mnt")


def test_run_passes_output_exit_code_and_environment(dsec: Dsec, environment: str) -> None:
    done = dsec("run", environment, "--", "/opt/tool/bin/hello")
    assert done.stdout == b"hello from the tool\n"
    assert dsec("run", environment, "--", "/bin/sh", "-c", "exit 7", code=7).stdout == b""
    assert dsec("run", "-e", "WORD=green", environment, "--", "/bin/sh", "-c", "echo $WORD").stdout == b"green\n"
    dsec("run", environment, "--", "/no/such", code=127)
    dsec("run", "nothing:1", "--", "/bin/true", code=125)


def test_what_a_sandbox_writes_is_gone(dsec: Dsec, environment: str) -> None:
    assert dsec("run", environment, "--", "/bin/sh", "-c", "echo x > /srv/new && cat /srv/new").stdout == b"x\n"
    dsec("run", environment, "--", "/bin/sh", "-c", "test ! -e /srv/new")


def test_compressed_layout_mounts_and_verifies(dsec: Dsec, busybox_root: Path, tmp_path: Path) -> None:
    dsec("import", busybox_root, "--kind", "base", "--name", "small:1", "--layout", "compressed")
    assert answer(dsec("inspect", "small:1", "--json"))["layers"][0]["layout"] == "compressed"
    (tmp_path / "mnt").mkdir()
    dsec("mount", "small:1", tmp_path / "mnt")
    assert diff(snapshot_dir(busybox_root), snapshot_dir(tmp_path / "mnt")) == []
    dsec("umount", tmp_path / "mnt")
    dsec("verify", "--deep")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["mount", "nothing:1", "."], 10, "nothing:1"),
        (["mount", "env:1", "/no/such/dir"], 10, "/no/such/dir"),
        (["umount", "/proc"], 10, "/proc"),
        (["inspect", "not a ref"], 2, "not a ref"),
        (["run", "--memory", "lots", "env:1", "--", "true"], 125, "lots"),
        (["env", "create", "bad:1", "--base", "tool:1"], 2, "tool:1"),
        (["import", "/no/such.tar", "--kind", "base", "--name", "x:1"], 10, "/no/such.tar"),
        (["export", "env:1", "-o", "/no/such/dir/x"], 10, "/no/such/dir"),
    ],
)
def test_bad_input_is_one_clear_line(dsec: Dsec, environment: str, argv: list[str], code: int, says: str) -> None:
    done = dsec(*argv, code=code)
    lines = done.stderr.decode().splitlines()
    assert says in lines[0]
    assert lines[0].startswith("error: ")
    assert not any("Traceback" in line for line in lines)


def test_ctrl_c_during_an_import_leaves_nothing(tmp_path: Path) -> None:
    fifo = tmp_path / "endless.tar"
    os.mkfifo(fifo)
    store = tmp_path / "store"
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "dsec_layers",
        "--store",
        store,
        "--cache",
        tmp_path / "cache",
        "import",
        fifo,
        "--kind",
        "base",
        "--name",
        "x:1",
    ]
    with spawn(argv, stderr=PIPE, env=dict(os.environ)) as process, open(fifo, "wb") as stream:
        info = b"f".ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + b"77777777777\0" + b"00000000000\0"
        header = bytearray(info.ljust(512, b"\0"))
        header[148:156] = b" " * 8
        header[148:156] = f"{sum(header):06o}\0 ".encode()
        stream.write(header)
        stream.writelines(os.urandom(1 << 20) for _ in range(8))
        stream.flush()
        # Data is being stored. (Python may swallow an interrupt while it loads modules; that moment is not what is tested here.)
        wait_for(lambda: any(path.is_file() and path.name != "dsec-store.json" for path in store.rglob("*")))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"interrupted" in stderr
    assert [path for path in store.rglob("*") if path.is_file() and path.name != "dsec-store.json"] == []


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
