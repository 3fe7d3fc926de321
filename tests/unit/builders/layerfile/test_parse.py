"""Layer files: what they say, and what they are told when they say it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_layers.builders.layerfile.recipe import Copy, DebianInput, FileInput, Step, load_recipe, parse_recipe
from dsec_layers.errors import NotFound, UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.sandbox import Network

FILE = Path("/project/layer.toml")

WORKSPACE = """
kind = "workspace"
name = "project:1"
parent = "debian:12"
workdir = "/src"
network = "host"
epoch = 1700000000
excludes = ["*.o", "/src/build/"]
run = [
  "make",
  { command = ["pip", "install", "-e", "."], network = "none", user = "builder", workdir = "/tmp", env = { A = "b" } },
]
[env]
PATH = "/src/bin:/usr/bin"
[source]
type = "dir"
path = "."
to = "/src/"
owner = "0:0"
excludes = [".git/"]
[[copy]]
from = "files/conf"
to = "/etc/conf"
mode = "0640"
owner = "5:6"
[scrub]
disable = ["logs"]
paths = ["/opt/scratch"]
keep = ["/root/.cache/pip"]
"""


def test_everything_a_workspace_may_say() -> None:
    recipe = parse_recipe(WORKSPACE.encode(), FILE)
    assert (recipe.kind, recipe.name, recipe.parent, recipe.workdir) == (Kind.WORKSPACE, "project:1", "debian:12", "/src")
    assert recipe.directory == Path("/project")
    assert recipe.source == FileInput("dir", ".", "/src", (0, 0), (".git/",))
    assert recipe.copies == (Copy("files/conf", "/etc/conf", 0o640, (5, 6)),)
    assert recipe.steps == (
        Step(("/bin/sh", "-euc", "make"), True, Network.HOST, "/src"),
        Step(("pip", "install", "-e", "."), False, Network.NONE, "/tmp", "builder", {"A": "b"}),
    )
    assert recipe.env == {"PATH": "/src/bin:/usr/bin"}
    assert (recipe.excludes, recipe.epoch) == (("*.o", "/src/build/"), 1_700_000_000)
    assert (recipe.scrub.disable, recipe.scrub.paths, recipe.scrub.keep) == (("logs",), ("/opt/scratch",), ("/root/.cache/pip",))
    assert recipe.document["name"] == "project:1"


def test_a_debian_base() -> None:
    text = 'kind = "base"\nname = "debian:12"\n[source]\ntype = "debian"\nsuite = "bookworm"\npackages = ["python3", "gcc-12"]\nvariant = "apt"\n'
    recipe = parse_recipe(text.encode(), FILE)
    assert recipe.source == DebianInput("bookworm", ("python3", "gcc-12"), "apt")


def test_titles_of_steps_are_one_line() -> None:
    assert Step(("/bin/sh", "-euc", "\n first\n second")).title() == "first …"
    assert Step(("a", "b c"), shell=False).title() == "a b c"
    assert len(Step(("/bin/sh", "-euc", "x" * 500)).title()) == 100


BASE = 'kind = "base"\nname = "b:1"\n'
SOURCE = '[source]\ntype = "dir"\npath = "x"\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("kind = ", "is not TOML", None),
        ("\udcff", "is not TOML", None),
        ("", "kind is missing", None),
        ('kind = "bas"\n', "kind: 'bas' is not one of base, workspace, toolkit", "did you mean 'base'?"),
        ('kind = "diff"\n', "is not one of", None),
        ('kind = "base"\n', "name is missing", None),
        ('kind = "base"\nname = "A B"\n', "name: ", None),
        (BASE + 'nmae = "x"\n' + SOURCE, "nmae is not a known key", "did you mean 'name'?"),
        (BASE + "epoch = -1\n" + SOURCE, "epoch must be", None),
        (BASE + "epoch = true\n" + SOURCE, "epoch must be", None),
        (BASE, "a base needs a source", None),
        (BASE + 'parent = "x"\n' + SOURCE, "a base has no parent", "workspace"),
        (BASE + 'prefix = "/opt"\n' + SOURCE, "prefix is for toolkits", None),
        (BASE + 'excludes = [""]\n' + SOURCE, r"excludes\[0\] must be a string that is not empty", None),
        (BASE + 'excludes = ["/"]\n' + SOURCE, "excludes: empty exclude pattern", None),
        (BASE + 'run = "make"\n' + SOURCE, "run must be a list", None),
        (BASE + "run = [[]]\n" + SOURCE, r"run\[0\].command must be a line of shell", None),
        (BASE + "run = [1]\n" + SOURCE, r"run\[0\].command must be", None),
        (BASE + 'run = [{ command = "x", netwrok = "host" }]\n' + SOURCE, r"run\[0\].netwrok is not a known key", "network"),
        (BASE + 'run = [{ command = "x", user = "a b" }]\n' + SOURCE, r"run\[0\]: not a user", None),
        (BASE + "run = [" + '"x",' * 201 + "]\n" + SOURCE, "201 run steps", None),
        (BASE + "env = { A = 1 }\n" + SOURCE, "env.A must be a string", None),
        (BASE + 'env = { "A=B" = "c" }\n' + SOURCE, "env: not the name", None),
        (BASE + 'source = "x"\n', "source must be a table", None),
        (BASE + '[source]\ntype = "dirr"\n', "source.type: 'dirr'", "did you mean 'dir'?"),
        (BASE + '[source]\ntype = "dir"\n', "source.path is missing", None),
        (BASE + '[source]\ntype = "dir"\npath = "x"\nto = "y"\n', "source.to must be an absolute path", None),
        (BASE + '[source]\ntype = "dir"\npath = "x"\nowner = "root"\n', "source.owner: 'root' is not an owner", "uid:gid"),
        (BASE + '[source]\ntype = "oci"\npath = "x"\nto = "/y"\n', "source.to is not a known key", None),
        (BASE + '[source]\ntype = "debian"\nsuite = "--help"\n', "source.suite: '--help' is not a plain name", None),
        (BASE + '[source]\ntype = "debian"\nsuite = "x"\npackages = ["a,b"]\n', r"source.packages\[0\]", None),
        (BASE + '[source]\ntype = "debian"\nsuite = "x"\nvariant = "tiny"\n', "source.variant", None),
        (BASE + SOURCE + '[[copy]]\nfrom = "x"\n', r"copy\[0\].to is missing", None),
        (BASE + SOURCE + '[[copy]]\nfrom = "x"\nto = "/y"\nmode = "0999"\n', r"copy\[0\].mode", "octal"),
        (BASE + SOURCE + '[[copy]]\nfrom = "x"\nto = "/a/../b"\n', r"copy\[0\].to must be", None),
        (BASE + SOURCE + '[scrub]\ndisable = ["log"]\n', r"scrub.disable\[0\]: 'log'", "did you mean 'logs'?"),
        (BASE + 'excludes = ["x"]\n[source]\ntype = "tar"\npath = "x"\n', "excludes of an archive need a run step", None),
        ('kind = "workspace"\nname = "w:1"\nrun = ["x"]\n', "a workspace needs a parent", None),
        ('kind = "workspace"\nname = "w:1"\nparent = "x"\n', "nothing to build", None),
        ('kind = "toolkit"\nname = "t:1"\nrun = ["x"]\n', "a toolkit needs a prefix", None),
        ('kind = "toolkit"\nname = "t:1"\nprefix = "/"\nrun = ["x"]\n', "prefix cannot be /", None),
        ('kind = "toolkit"\nname = "t:1"\nprefix = "/opt/t"\nrun = ["x"]\n', "need a parent to run on", None),
    ],
)
def test_mistakes_are_named(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_recipe(text.encode(errors="surrogateescape"), FILE)
    assert "/project/layer.toml" in caught.value.message
    if hint is not None:
        assert hint in (caught.value.hint or "")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read"):
        load_recipe(tmp_path)


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "big.toml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(UsageError, match="larger than"):
        load_recipe(tmp_path / "big.toml")


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[4] / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_layer_files(path: Path) -> None:
    assert load_recipe(path).epoch is not None
