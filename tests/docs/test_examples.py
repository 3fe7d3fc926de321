"""The examples of README.md, docs/driver.md, docs/sandbox.md, docs/sources.md and docs/layerfile.md run, block by block, from an empty folder.

What an example takes for granted is made beforehand: a root file system (busybox, with scripts in place of Python, pip, make and bash), a project, a layer file. Paths of
the host (/mnt, /run, /srv, /var) are put below the folder, and that is all that is changed in an example.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsec_layers.progress import SILENT
from tests.kit.busybox import make_busybox_root
from tests.kit.tools import need

pytestmark = [pytest.mark.root, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
STAND_IN = '#!/bin/sh\necho "$0 $@"\n'
RECIPE = 'kind = "workspace"\nname = "project:3"\nparent = "debian:12"\nepoch = 1767225600\nrun = ["mkdir -p /srv/project; echo 3 > /srv/project/version"]\n'
ELSEWHERE = ("./quickstart ", "./test ", "pip install .")
"""Lines that this is no place for: the first two are what a reader does with the whole project, the third is tests/meta/test_packaging.py's."""


def blocks(document: str, language: str) -> list[str]:
    """The blocks of a document that are marked with a language, or with none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


class Place:
    """An empty folder, a store and a cache in it, and the command line on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"DSEC_STORE": str(folder / "srv/layers"), "DSEC_CACHE": str(folder / "var/cache/dsec-layers")}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        for name in ("mnt/dev", "run", "srv", "var/cache", "var/lib"):
            (folder / name).mkdir(parents=True)

    def here(self, text: str) -> str:
        """An example with its absolute paths below the folder."""
        return re.sub(r"(?<=[\s\"'(])/(?=(mnt|run|srv|var)/)", f"{self.folder}/", text)

    def line(self, line: str) -> str:
        """Run one line of shell, which must end well; its standard output. One with a terminal (-t) is told to exit."""
        command = self.here(line)
        if re.match(r"dsec-layers run -it ", line):
            return self._at_terminal(command)
        done = subprocess.run(
            ["sh", "-euc", command], cwd=self.folder, env=self.env, capture_output=True, timeout=120, check=False, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{line}\n{done.stdout.decode()}{done.stderr.decode()}"
        return done.stdout.decode()

    def block(self, text: str) -> list[str]:
        """Run the lines of a block; what each said."""
        return [self.line(line) for line in text.splitlines() if line.strip() and not line.startswith(ELSEWHERE)]

    def python(self, text: str, **names: object) -> dict[str, Any]:
        """Run a block of Python with what it takes for granted; what it has defined."""
        values: dict[str, Any] = dict(names)
        exec(self.here(text), values)  # noqa: S102 - our own documentation
        return values

    @contextmanager
    def serving(self, line: str, socket: Path) -> Iterator[None]:
        """A line that serves until it is interrupted."""
        with subprocess.Popen(
            ["sh", "-euc", f"exec {self.here(line)}"], cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL
        ) as process:
            try:
                due = time.monotonic() + 60
                while not socket.exists():
                    assert process.poll() is None and time.monotonic() < due, line
                    time.sleep(0.02)
                yield
            finally:
                process.terminate()
            assert process.wait(60) == 0

    def _at_terminal(self, command: str) -> str:
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            ["sh", "-euc", command], cwd=self.folder, env=self.env, stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            os.write(ours, b"exit\n")
            said = b""
            try:
                while part := os.read(ours, 4096):
                    said += part
            except OSError:
                pass  # the terminal's last user is gone
            os.close(ours)
            assert process.wait(60) == 0, said.decode()
        return said.decode()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system that examples are about."""
    made = make_busybox_root(tmp_path_factory.mktemp("root"))
    for name in ("usr/bin/python3", "usr/bin/pip", "usr/bin/make"):
        (made / name).write_text(STAND_IN)
        (made / name).chmod(0o755)
    (made / "bin/bash").symlink_to("busybox-sh")
    (made / "bin/busybox-sh").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    (made / "bin/busybox-sh").chmod(0o755)
    (made / "etc/os-release").write_text("NAME=Busybox\n")
    return made


@pytest.fixture
def place(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty folder, but for the file system as a tar."""
    made = Place(tmp_path)
    monkeypatch.chdir(tmp_path)
    subprocess.run(["tar", "-cf", tmp_path / "rootfs.tar", "-C", root, "."], check=True)
    yield made
    made.line("dsec-layers cache stop --force")
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.fixture
def env(place: Place) -> str:
    """The environment of the examples: dev:1."""
    (place.folder / "workspace.toml").write_text(RECIPE)
    place.block(
        "dsec-layers import rootfs.tar --kind base --name debian:12\ndsec-layers build workspace.toml\n"
        "dsec-layers env create dev:1 --base debian:12 --workspace project:3"
    )
    return "dev:1"


def test_readme(place: Place) -> None:
    need("mke2fs", "zstd")
    first, use, disks = blocks("README.md", "")
    assert [line.split()[0] for line in first.splitlines()] == ["./quickstart", "./test"]
    place.line("zstd -q rootfs.tar")
    (place.folder / "workspace.toml").write_text(RECIPE)
    said = "".join(place.block(use))
    assert "python3 -m pytest" in said and "dev:1" in said
    place.line("dsec-layers umount /mnt/dev")
    *lines, serve = disks.splitlines()
    place.block("\n".join(lines))
    assert sorted(path.name for path in place.folder.glob("*.disk")) == ["a.disk", "b.disk", "vm.disk"]
    place.line("dsec-layers disk detach vm.disk")
    with place.serving(serve, place.folder / "run/dev.sock"):
        pass


def test_readme_library(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("README.md", "python")
    done = place.python(example)["done"]
    assert (done.code, capfd.readouterr().out) == (0, "NAME=Busybox\n")


def test_sandbox(place: Place, env: str) -> None:
    (example,) = blocks("docs/sandbox.md", "")
    said = place.block(example)
    assert "python3 -m pytest" in said[0] and "exit" in said[1] and said[2] == "hello\n"


def test_sandbox_library(place: Place, root: Path) -> None:
    (example,) = blocks("docs/sandbox.md", "python")
    values = place.python(example, lowerdirs=[root])
    assert values["code"] == 0 and values["done"].stdout.endswith(b"python3 -c print(1 + 1)\n")
    assert (place.folder / "var/lib/dsec/kept").is_dir()


def test_driver(place: Place, env: str, capsys: pytest.CaptureFixture[str]) -> None:
    from dsec_layers import Session

    (example,) = blocks("docs/driver.md", "python")
    with Session(place.env["DSEC_STORE"], place.env["DSEC_CACHE"]) as session:
        refs = {
            name: session.store.get_ref(ref).digest
            for name, ref in (("base", "debian:12"), ("workspace", "project:3"), ("environment", env))
        }
        place.python(example, store=session.store, **refs)
    assert str(place.folder / "mnt/dev") in capsys.readouterr().out


def test_sources(place: Place) -> None:
    class Sink:
        def whole(self, inode: Any, data: Any) -> None:
            inode.size = len(data)

        def stream(self, inode: Any, size: int, pieces: Any) -> None:
            inode.size = sum(piece if isinstance(piece, int) else len(piece) for piece in pieces)

    need("zstd")
    (example,) = blocks("docs/sources.md", "python")
    place.line("zstd -q rootfs.tar")
    values = place.python(example, sink=Sink(), progress=SILENT)
    names = {path for path, _ in values["tree"].walk()}
    assert b"etc/os-release" in {name.lstrip(b"/") for name in names}


def test_layerfile(place: Place, env: str) -> None:
    (example,) = blocks("docs/layerfile.md", "toml")
    (place.folder / "files").mkdir()
    (place.folder / "files/settings.conf").write_text("a = 1\n")
    (place.folder / "layer.toml").write_text(example)
    (place.folder / "rootfs.tar").unlink()
    place.line("dsec-layers build layer.toml")
    assert "settings.conf" in place.line("dsec-layers inspect project:1 --tree --depth 4")
