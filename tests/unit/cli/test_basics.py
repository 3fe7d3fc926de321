"""Settings, output forms, exit codes and help of the command line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from dsec_layers.cli import COMMANDS, cli, main
from dsec_layers.cli.common import App, Command
from dsec_layers.cli.console import Console, human_bytes, to_jsonable
from dsec_layers.cli.settings import config_path, load_settings, source_date_epoch
from dsec_layers.cli.values import parse_limits
from dsec_layers.errors import NotFound, UsageError
from dsec_layers.proc import run
from tests.kit.tars import file, make_tar

ROOT = Path(__file__).resolve().parents[3]


def dsec(*argv: str, code: int = 0, **env: str) -> str:
    """Run the real command line in a process of its own; its standard output."""
    done = run([sys.executable, "-m", "dsec_layers", *argv], check=False, env={**os.environ, **env}, timeout=60)
    assert done.code == code, done.stderr.decode()
    return done.stdout.decode()


def all_commands() -> list[tuple[str, click.Command]]:
    found: list[tuple[str, click.Command]] = []
    root = click.Context(cli, obj=App())
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {child}", item) for child, item in command.commands.items()]
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, and no other setting."""
    for name in [name for name in os.environ if name.startswith(("XDG_", "DSEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_settings_come_from_option_then_environment_then_file_then_default(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    assert load_settings(None, None).store == str(home / ".local/share/dsec-layers/store")
    assert load_settings(None, None).cache == home / ".cache/dsec-layers"
    config = home / "config/dsec-layers/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('store = "/from/file"\ndriver = "fuse"\n')
    assert load_settings(None, None).store == "/from/file"
    assert load_settings(None, None).driver == "fuse"
    monkeypatch.setenv("DSEC_STORE", "/from/env")
    assert load_settings(None, None).store == "/from/env"
    assert load_settings("/from/option", None).store == "/from/option"


@pytest.mark.parametrize("value", [None, "", "relative", "./relative"])
def test_folders_that_are_not_set_properly_are_the_usual_ones_and_are_not_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """Of root too; a relative path in a variable counts for nothing (XDG base directory specification)."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert load_settings(None, None).store == str(home / ".local/share/dsec-layers/store")
    assert load_settings(None, None).cache == home / ".cache/dsec-layers"
    assert config_path() == home / ".config/dsec-layers/config.toml"
    assert list(home.iterdir()) == []


def test_folders_that_are_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "a b"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "c"))
    assert load_settings(None, None).store == str(home / "a b/dsec-layers/store")
    assert load_settings(None, None).cache == home / "c/dsec-layers"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stor = 1", "unknown key 'stor'"),
        ("store = 1", "must be a string"),
        ("run = 1", "table"),
        ("[run]\npid = 1", "'pid'"),
        ('[run]\npids = "1"', "pids must be"),
        ("[run]\nmemory = -1", "memory must be"),
        ("[run]\nmemory = true", "memory must be"),
        ('[run]\nmemory = "much"', "not a size"),
        ("store = ", "config.toml"),
    ],
)
def test_a_bad_config_file_is_named(home: Path, text: str, problem: str) -> None:
    config = home / ".config/dsec-layers/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(text)
    with pytest.raises(UsageError, match=problem):
        load_settings(None, None)


def test_limits_of_run_in_the_config_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = home / ".config/dsec-layers/config.toml"
    config.parent.mkdir(parents=True)
    assert (load_settings(None, None).memory, load_settings(None, None).pids) == (None, None)
    config.write_text('[run]\nmemory = "64M"\npids = 7\n')
    assert (load_settings(None, None).memory, load_settings(None, None).pids) == (64 << 20, 7)
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["limits of run"]["detail"] == "memory 64 MiB, 7 processes"
    config.write_text("[run]\nmemory = 0\n")
    assert (load_settings(None, None).memory, load_settings(None, None).pids) == (0, None)


def test_source_date_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert source_date_epoch() is None
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert source_date_epoch() == 1700000000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        source_date_epoch()


def test_every_command_has_help_with_an_example() -> None:
    for name, command in all_commands():
        context = click.Context(command, info_name=name, obj=App())
        text = command.get_help(context)
        assert command.help, name
        if not isinstance(command, click.Group):
            assert isinstance(command, Command), name
            assert "Example:" in text, name
            assert "dsec-layers" in command.example, name


def test_every_command_takes_the_global_options() -> None:
    for name, command in all_commands():
        if not isinstance(command, click.Group):
            flags = {flag for parameter in command.params for flag in parameter.opts}
            assert {"--store", "--cache", "--json", "-v", "-q"} <= flags, name


def test_json_values() -> None:
    @dataclass
    class Result:
        path: Path
        names: tuple[bytes, ...]
        more: dict[str, int]

    assert to_jsonable(Result(Path("/x"), (b"a", b"\xff"), {"k": 1})) == {"path": "/x", "names": ["a", "\\xff"], "more": {"k": 1}}


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1 << 20, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 TiB"]


def test_plain_progress_is_one_line_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    with console.task("packing") as task:
        task.advance(2048)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.startswith("packing: 2.0 KiB in ")


def test_quiet_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(verbosity=-1)
    with console.task("packing") as task:
        task.advance()
    console.info("hello")
    assert capsys.readouterr().err == ""


def test_an_error_is_one_line_a_hint_and_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--store", str(tmp_path), "inspect", "nothing:1"])
    assert exit_.value.code == NotFound.exit_code
    assert "error: " in capsys.readouterr().err


def test_json_errors(tmp_path: Path) -> None:
    value = json.loads(dsec("--store", str(tmp_path), "--json", "inspect", "nothing:1", code=10))
    assert value["error"] == "NotFound"
    assert value["exit_code"] == 10
    assert "nothing:1" in value["message"]
    assert json.loads(dsec("inspect", "--json", code=2))["exit_code"] == 2


def test_a_mistyped_command_gets_a_suggestion() -> None:
    done = run([sys.executable, "-m", "dsec_layers", "impotr"], check=False)
    assert done.code == 2
    assert b"Did you mean 'import'?" in done.stderr


def test_help_is_fast_and_imports_no_heavy_module() -> None:
    done = run([sys.executable, "-X", "importtime", "-m", "dsec_layers", "--help"])
    loaded = {line.rpartition(b"|")[2].strip().decode() for line in done.stderr.splitlines()}
    assert not loaded & {"numpy", "rich", "zstandard", "blake3", "mfusepy", "sqlite3"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    assert "_DSEC_LAYERS_COMPLETE" in dsec("completion", shell)


def test_completion_offers_commands() -> None:
    words = dsec(_DSEC_LAYERS_COMPLETE="bash_complete", COMP_WORDS="dsec-layers cat", COMP_CWORD="1")
    assert "catalog" in words


def test_the_reference_document_is_up_to_date() -> None:
    done = run([sys.executable, "-c", "import runpy; print(runpy.run_path('scripts/cli_reference.py')['reference'](), end='')"], cwd=ROOT)
    assert (ROOT / "docs/cli.md").read_text() == done.stdout.decode(), "run: python scripts/cli_reference.py"


def test_limits_as_people_type_them() -> None:
    assert parse_limits(["spool=16G", "entries=40M", "spool=1"]) == {"spool": 1, "entries": 40 << 20}
    for bad in ("spool", "spool=", "=5", "spool=much"):
        with pytest.raises(UsageError, match="not"):
            parse_limits([bad])


def test_b1_a_limit_of_import_is_named_and_can_be_raised(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(make_tar(*(file(f"f{number}") for number in range(1100))))
    places = ("--store", str(tmp_path / "store"), "--cache", str(tmp_path / "cache"))
    common = (*places, "--json", "import", str(archive), "--kind", "base", "--name", "a:1")
    error = json.loads(dsec(*common, "--limit", "entries=1K", code=13))
    assert error["error"] == "LimitError" and "more than 1024 files" in error["message"] and "--limit entries=SIZE" in error["hint"]
    assert json.loads(dsec(*common, "--limit", "inodes=5", code=2))["hint"].startswith("the limits are entries, attributes, ")
    assert json.loads(dsec(*common, "--limit", "entries=2K"))["inodes"] == 1101
    recipe = tmp_path / "a.toml"
    recipe.write_text('name = "a:2"\nkind = "base"\n[source]\ntype = "tar"\npath = "a.tar"\n')
    assert json.loads(dsec(*places, "--json", "build", str(recipe), "--limit", "entries=1K", code=13))["error"] == "LimitError"
    assert json.loads(dsec(*places, "--json", "build", str(recipe), "--limit", "entries=2K"))["inodes"] == 1101
