"""A user without root builds, imports, inspects, verifies and exports; what needs root says so in one line."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_layers.proc import Completed, run

pytestmark = pytest.mark.root

NOBODY = 65534

# The interpreter and the package may lie where only root can read: everything is imported before root is given up.
PROGRAM = """
import ctypes, importlib, os, pkgutil, sys
import dsec_layers
for module in pkgutil.walk_packages(dsec_layers.__path__, "dsec_layers."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import encodings.idna, tarfile, sqlite3
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self belongs to the user again, as after an exec
from dsec_layers.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of nobody's, outside pytest's own directories: those are closed to others whenever a pytest starts."""
    with tempfile.TemporaryDirectory(prefix="dsec-nobody-") as base:
        Path(base).chmod(0o755)
        home = Path(base) / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        yield home


def as_nobody(home: Path, *argv: str | Path, code: int = 0) -> Completed:
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "TMPDIR": str(home)}
    done = run([sys.executable, "-c", PROGRAM, *argv], check=False, env=env, cwd=home, timeout=120)
    assert done.code == code, (done.stdout + done.stderr).decode()
    return done


def test_the_verbs_that_need_no_root(home: Path) -> None:
    tree = home / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/motd").write_text("hello\n" * 2000)
    (home / "layer.toml").write_text('kind = "toolkit"\nname = "tool:1"\nprefix = "/etc"\n[source]\ntype = "dir"\npath = "tree"\n')
    as_nobody(home, "import", tree, "--kind", "base", "--name", "base:1")
    as_nobody(home, "build", home / "layer.toml")
    as_nobody(home, "env", "create", "env:1", "--base", "base:1", "--toolkit", "tool:1")
    assert b"env:1" in as_nobody(home, "ls").stdout
    assert b"/etc/motd" in as_nobody(home, "inspect", "env:1", "--tree").stdout
    as_nobody(home, "verify", "--deep")
    as_nobody(home, "export", "env:1", "-o", home / "env.tar")
    assert (home / "env.tar").stat().st_uid == NOBODY


@pytest.mark.parametrize("argv", [["mount", "base:1", "mnt"], ["run", "base:1", "--", "true"]])
def test_what_needs_root_says_so(home: Path, argv: list[str]) -> None:
    (home / "tree").mkdir()
    (home / "mnt").mkdir()
    as_nobody(home, "import", home / "tree", "--kind", "base", "--name", "base:1")
    done = as_nobody(home, *argv, code=125 if argv[0] == "run" else 15)
    line = done.stderr.decode().splitlines()[0]
    assert line.startswith("error: ")
    assert "root" in line


def test_a_directory_that_cannot_be_searched_is_named(home: Path) -> None:
    (home / "closed").mkdir(mode=0)
    done = as_nobody(home, "import", home / "closed", "--kind", "base", "--name", "base:1", code=12)
    assert str(home / "closed") in done.stderr.decode().splitlines()[0]
