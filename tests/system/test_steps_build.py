"""Layer files built for real: steps in sandboxes over a parent, what becomes part of the layer, what does not, and the step cache."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsec_layers import proc
from dsec_layers.builders.layerfile import steps
from dsec_layers.builders.layerfile.build import build_layerfile
from dsec_layers.builders.layerfile.recipe import parse_recipe
from dsec_layers.builders.pack.layer import PackResult, pack_layer
from dsec_layers.builders.sources.directory import DirectorySource
from dsec_layers.digest import Digest
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import Inode
from dsec_layers.errors import InputError, NotFound, StepError, UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.progress import SILENT
from dsec_layers.registry.catalog import Catalog
from dsec_layers.registry.objects import load_config, load_metadata
from dsec_layers.store.posix import PosixStore

pytestmark = pytest.mark.root

EPOCH = 1_000_000_000


class Lines:
    """A progress receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.output: list[str] = []
        self.task = SILENT.task

    def info(self, message: str) -> None:
        self.told.append(message)

    def debug(self, message: str) -> None:
        self.output.append(message)

    def warning(self, message: str) -> None:
        raise AssertionError(message)


@dataclass
class Lease:
    paths: tuple[Path, ...]


@dataclass
class DirectoryHost:
    """A host whose layers are plain directories."""

    places: dict[Digest, Path] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    attached: int = 0

    @contextmanager
    def attach(self, store: object, layers: Sequence[Digest], *, driver: str | None = None) -> Iterator[Lease]:
        self.attached += 1
        yield Lease(tuple(self.places[layer] for layer in layers))


class Place:
    """Where a build takes place, with one parent ``bb:1``: a busybox root and a few files to change."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory, self.cache, self.driver = directory, directory / "cache", "none"
        self.project = directory / "project"
        self.project.mkdir(parents=True)
        self.store = PosixStore(directory / "store")
        self.catalog = Catalog(directory / "catalog.sqlite")
        self.progress: Any = Lines()
        self.host: Any = DirectoryHost()
        made = pack_layer(self.store, DirectorySource(root).ingest, kind=Kind.BASE, name="bb:1", env={"FROM_BASE": "yes"})
        self.parent = made.digest
        self.store.set_ref("bb:1", made.digest, expected=None)
        self.host.places[made.digest] = root

    def build(self, text: str, **more: Any) -> PackResult:
        recipe = parse_recipe(text.encode(), self.project / "layer.toml")
        self.progress.told.clear()
        result = build_layerfile(recipe, self, **{"environ": {}, **more})
        left = [path.name for path in (self.cache / "steps").iterdir() if path.name.startswith(".") and path.name != ".lock"]
        running = self.cache / "build/sandboxes"
        left += [path.name for path in running.iterdir() if path.name != ".lock"] if running.exists() else []
        assert left == []
        return result

    def tree(self, result: PackResult) -> dict[str, Inode]:
        image, _ = load_metadata(self.store, result.layer)
        return {path.decode(): inode for path, inode in Image(image).tree().walk()}


@pytest.fixture(scope="session")
def parent_root(tmp_path_factory: pytest.TempPathFactory, busybox_root: Path) -> Path:
    root = tmp_path_factory.mktemp("parent") / "root"
    proc.run(["cp", "-a", busybox_root, root])
    for name in ("etc/motd", "etc/gone", "data/old/f", "var/log/base.log", "var/lib/apt/lists/base"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} of the base\n")
    (root / "etc").chmod(0o751)
    os.chown(root / "etc", 3, 4)
    for path in root.rglob("*"):
        os.utime(path, ns=(0, 0), follow_symlinks=False)
    return root


@pytest.fixture
def place(tmp_path: Path, parent_root: Path) -> Iterator[Place]:
    value = Place(tmp_path / "place", parent_root)
    yield value
    value.catalog.close()


def workspace(*run: str, more: str = "") -> str:
    commands = ", ".join(f"'''{line}'''" for line in run)
    return f'kind = "workspace"\nname = "w:1"\nparent = "bb:1"\nepoch = {EPOCH}\nrun = [{commands}]\n{more}'


def test_what_the_steps_changed_is_the_layer(place: Place) -> None:
    """Nothing but that: no mount points, nothing of the host's that a step with the network was lent, whiteouts and opaque directories in overlay form."""
    result = place.build(
        workspace(
            "cat /etc/hosts /etc/resolv.conf $APT_CONFIG > /dev/null; echo changed >> /etc/motd; rm /etc/gone",
            "rm -r /data/old; mkdir /data/old; echo new > /data/old/g; echo $FROM_BASE $SOURCE_DATE_EPOCH $A > /new/env; chown 7:8 /new/env",
            more='network = "host"\nworkdir = "/new"\n[env]\nA = "b"\n',
        ),
        environ={"http_proxy": "http://127.0.0.1:9"},
    )
    tree = place.tree(result)
    assert sorted(tree) == ["", "data", "data/old", "data/old/g", "etc", "etc/gone", "etc/motd", "new", "new/env"]
    assert (tree["etc/gone"].mode, tree["etc/gone"].rdev) == (stat.S_IFCHR, 0)
    assert tree["data/old"].xattrs == ((b"trusted.overlay.opaque", b"y"),)
    assert tree["etc/motd"].data == b"etc/motd of the base\nchanged\n"
    assert tree["new/env"].data == b"yes 1000000000 b\n"
    assert (tree["new/env"].uid, tree["new/env"].gid) == (7, 8)
    assert (tree["etc"].mode, tree["etc"].uid, tree["etc"].gid) == (stat.S_IFDIR | 0o751, 3, 4)
    assert max(inode.mtime for inode in tree.values()) == EPOCH
    config = load_config(place.store, result.layer)
    assert (config.kind, config.parent, config.env, config.workdir) == (Kind.WORKSPACE, place.parent, {"A": "b"}, "/new")


def test_residue_is_dropped_line_by_line_and_the_bases_files_show_again(place: Place) -> None:
    result = place.build(
        workspace(
            "echo x > /root/.ash_history; mkdir -p /root/.cache/pip; echo abc > /root/.cache/pip/w; echo t > /tmp/t; echo more >> /var/log/base.log",
            "rm /var/lib/apt/lists/*; echo l > /var/lib/apt/lists/new; echo kept > /tmp/kept; echo s > /scratch; echo r > /real",
            more='[scrub]\npaths = ["/scratch"]\nkeep = ["/tmp/kept"]\n',
        )
    )
    assert [line for line in place.progress.told if line.startswith("scrubbed")] == [
        "scrubbed /root/.ash_history: a history of typed commands, 2 bytes",
        "scrubbed /root/.cache/pip: a cache of the build user, 4 bytes",
        "scrubbed /scratch: named in the layer file, 2 bytes",
        "scrubbed /tmp/t: a temporary file, 2 bytes",
        "scrubbed /var/lib/apt/lists/base: a package list, 0 bytes",
        "scrubbed /var/lib/apt/lists/new: a package list, 2 bytes",
        "scrubbed /var/log/base.log: a log, 34 bytes",
    ]
    # /root stays because /root/.cache, which the base does not have, does.
    assert sorted(place.tree(result)) == ["", "real", "root", "root/.cache", "tmp", "tmp/kept"]


def test_steps_are_run_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = steps._run

    def counted(spec: Any, *more: Any) -> None:
        ran.append(spec.argv[-1])
        real(spec, *more)

    monkeypatch.setattr(steps, "_run", counted)
    first = place.build(workspace("echo 1 > /one", "echo 2 > /two"))
    assert place.build(workspace("echo 1 > /one", "echo 2 > /two")).digest == first.digest
    assert ran == ["echo 1 > /one", "echo 2 > /two"]
    assert place.progress.told == ["step 1/2: echo 1 > /one (cached)", "step 2/2: echo 2 > /two (cached)"]
    assert place.host.attached == 1
    place.build(workspace("echo 1 > /one", "echo 3 > /three"))
    assert ran[2:] == ["echo 3 > /three"]
    place.build(workspace("echo 0 > /zero", "echo 2 > /two"))
    assert ran[3:] == ["echo 0 > /zero", "echo 2 > /two"]
    again = place.build(workspace("echo 1 > /one", "echo 2 > /two"), use_cache=False)
    assert ran[5:] == ["echo 1 > /one", "echo 2 > /two"]
    assert again.digest == first.digest


def test_changed_inputs_run_the_steps_again(place: Place) -> None:
    text = workspace(
        "cat /src/a /etc/conf > /both",
        more='[source]\ntype = "dir"\npath = "src"\nto = "/src"\n[[copy]]\nfrom = "conf"\nto = "/etc/conf"\n',
    )
    (place.project / "src").mkdir()
    (place.project / "src/a").write_text("a\n")
    (place.project / "conf").write_text("conf\n")
    for path in (place.project / "src/a", place.project / "src", place.project / "conf"):
        os.utime(path, (EPOCH + 5, EPOCH + 5))
    first = place.build(text)
    assert place.tree(first)["both"].data == b"a\nconf\n"
    # A time after the epoch does not reach the layer, so it is no change.
    os.utime(place.project / "conf", (EPOCH + 9, EPOCH + 9))
    assert place.build(text).digest == first.digest
    assert place.progress.told[0].endswith("(cached)")
    (place.project / "conf").write_text("other\n")
    assert place.tree(place.build(text))["both"].data == b"a\nother\n"
    (place.project / "src/a").chmod(0o600)
    assert not place.progress.told[0].endswith("(cached)")
    assert place.tree(place.build(text))["src/a"].mode == stat.S_IFREG | 0o600


def test_copies_keep_out_of_the_way(place: Place) -> None:
    """Owner and mode as asked; directories on the way as the parent has them."""
    (place.project / "tree/sub").mkdir(parents=True)
    (place.project / "tree/sub/x").write_text("x")
    (place.project / "tree/skip.o").write_text("o")
    text = f'kind = "workspace"\nname = "w:1"\nparent = "bb:1"\nepoch = {EPOCH}\n'
    text += '[[copy]]\nfrom = "tree"\nto = "/etc/tree"\nmode = "0640"\nowner = "5:6"\nexcludes = ["*.o"]\n'
    text += f'[[copy]]\nfrom = "{place.project}/tree/sub/x"\nto = "/etc/tree/y"\n'
    for run in ("", 'run = ["true"]\n'):
        tree = place.tree(place.build(run + text))
        assert sorted(tree) == ["", "etc", "etc/tree", "etc/tree/sub", "etc/tree/sub/x", "etc/tree/y"]
        assert (tree["etc"].mode, tree["etc"].uid, tree["etc"].gid) == (stat.S_IFDIR | 0o751, 3, 4)
        assert (tree["etc/tree/sub/x"].mode, tree["etc/tree/sub/x"].uid) == (stat.S_IFREG | 0o640, 5)
        assert (tree["etc/tree/y"].mode & 0o777, tree["etc/tree/y"].uid) == (0o644, 0)


@pytest.mark.parametrize(("path", "kind"), [("../outside", UsageError), ("link", UsageError), ("none", NotFound), ("fifo", InputError)])
def test_inputs_stay_beside_the_layer_file(place: Place, path: str, kind: type[Exception]) -> None:
    (place.directory / "outside").write_text("x")
    (place.project / "link").symlink_to("/etc/passwd")
    os.mkfifo(place.project / "fifo")
    with pytest.raises(kind):
        place.build(f'kind = "workspace"\nname = "w:1"\nparent = "bb:1"\n[[copy]]\nfrom = "{path}"\nto = "/x"\n')


def test_a_failed_step_says_why_and_leaves_nothing(place: Place) -> None:
    lines = "for i in 1 2 3; do echo line $i; done; echo to stderr >&2; exit 3"
    with pytest.raises(StepError) as caught:
        place.build(workspace("echo fine > /fine", lines))
    assert caught.value.exit_code == 19
    assert caught.value.message.endswith("failed with exit code 3; the end of its output:\n  line 1\n  line 2\n  line 3\n  to stderr")
    assert 'network = "host"' in (caught.value.hint or "")
    assert place.progress.output == ["line 1", "line 2", "line 3", "to stderr"]
    entries = [item.name for item in (place.cache / "steps").iterdir() if len(item.name) == 64]
    assert len(entries) == 1
    with pytest.raises(StepError, match="exit code 127"):
        place.build(workspace("true", more="").replace("run = ['''true''']", 'run = [{ command = ["/nope"] }]'))
    assert place.tree(place.build(workspace("echo fine > /fine", "exit 0")))["fine"].data == b"fine\n"


def test_a_base_with_steps_is_flat(place: Place, parent_root: Path) -> None:
    text = f'kind = "base"\nname = "b:1"\nepoch = {EPOCH}\nrun = ["rm /etc/gone; rm -r /data; mkdir /data; echo x > /data/x; ln /etc/motd /motd"]\n'
    result = place.build(text + f'excludes = ["/home/ann/"]\n[source]\ntype = "dir"\npath = "{parent_root}"\n')
    tree = place.tree(result)
    assert {"data", "data/x", "etc/motd", "motd", "bin/busybox", "bin/sh", "var/log/base.log"} <= set(tree)
    assert not {"etc/gone", "data/old", "home/ann", "proc", "sys", "dev", "etc/hosts"} & set(tree)
    assert all(not inode.xattrs for inode in tree.values())
    assert tree["motd"] is tree["etc/motd"]
    assert tree["bin/sh"].data == b"busybox"
    assert tree["tmp"].mode == stat.S_IFDIR | 0o1777
    assert load_config(place.store, result.layer).parent is None


def test_a_toolkit_is_what_is_under_its_prefix(place: Place) -> None:
    text = f'kind = "toolkit"\nname = "t:1"\nprefix = "/opt/tool"\nparent = "bb:1"\nepoch = {EPOCH}\n[env]\nPATH = "/opt/tool/bin"\n'
    run = 'run = ["mkdir -p /opt/tool/bin /opt/other; cp /bin/busybox /opt/tool/bin/bb; echo x > /opt/other/y; rm /etc/gone; echo $PATH > /opt/tool/path"]\n'
    result = place.build(run + text)
    tree = place.tree(result)
    assert sorted(tree) == ["", "opt", "opt/tool", "opt/tool/bin", "opt/tool/bin/bb", "opt/tool/path"]
    assert tree["opt/tool/path"].data == b"/opt/tool/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
    assert [line for line in place.progress.told if "outside" in line] == [
        "left out /etc/gone: outside /opt/tool",
        "left out /opt/other/y: outside /opt/tool",
    ]
    config = load_config(place.store, result.layer)
    assert (config.prefix, config.parent, config.env) == ("/opt/tool", None, {"PATH": "/opt/tool/bin"})
    with pytest.raises(InputError, match="no directory /opt/tool"):
        place.build('run = ["true"]\n' + text)


def test_a_toolkit_from_files_needs_no_steps(place: Place) -> None:
    (place.project / "tool/bin").mkdir(parents=True)
    (place.project / "tool/bin/x").write_text("#!/bin/sh\n")
    head = 'kind = "toolkit"\nname = "t:1"\nprefix = "/opt/tool"\n[source]\ntype = "dir"\npath = "tool"\nowner = "0:0"\n'
    assert sorted(place.tree(place.build(head + 'to = "/opt/tool"\n'))) == ["", "opt", "opt/tool", "opt/tool/bin", "opt/tool/bin/x"]
    with pytest.raises(UsageError, match="outside its prefix"):
        place.build(head)


DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tests.system.test_steps_build import Place, workspace
place = Place(Path(sys.argv[2]), Path(sys.argv[3]))
place.build(workspace("echo one > /one", "echo READY >&2; sleep 1000"))
"""


def test_a_build_that_is_killed_leaves_nothing_that_matters(tmp_path: Path, parent_root: Path) -> None:
    """The step before is cached; of the one that was running nothing is left after the next build."""
    home = tmp_path / "place"
    code = DRIVER.replace("tests.system.test_steps_build", "test_steps_build")
    argv = [sys.executable, "-c", code, str(Path(__file__).parent), str(home), str(parent_root)]
    with proc.spawn(argv, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}) as process:
        deadline = time.monotonic() + 60
        while not list(home.glob("cache/steps/.new-*/tree")) or len(list((home / "cache/steps").glob("?" * 64))) < 1:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    (home / "project").rmdir()
    (home / "store").rename(home / "old-store")
    place = Place(home, parent_root)
    result = place.build(workspace("echo one > /one", "echo two > /two"))
    place.catalog.close()
    assert place.progress.told == ["step 1/2: echo one > /one (cached)", "step 2/2: echo two > /two"]
    assert sorted(place.tree(result)) == ["", "one", "two"]


def test_two_hosts_build_the_same_digest(tmp_path: Path, parent_root: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        place = Place(tmp_path / name, parent_root)
        digests.add(place.build(workspace("mkdir /d; for i in 3 1 2; do echo $i > /d/$i; done; rm -r /data", "mv /d /e")).digest)
        place.catalog.close()
    assert len(digests) == 1
