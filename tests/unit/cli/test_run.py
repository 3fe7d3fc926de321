"""The command line of ``run``, and of others that take a command: what is ours and what is the command's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from dsec_layers.cli import main
from dsec_layers.cli.common import App, CommandLine
from dsec_layers.cli.nbd import serve
from dsec_layers.cli.run import command
from dsec_layers.cli.values import parse_environment, read_env_files
from dsec_layers.errors import UsageError
from dsec_layers.sandbox import Bind


def parsed(line: str, what: click.Command = command) -> dict[str, Any]:
    """The parameters that a command line gives."""
    with what.make_context("run", line.split(), obj=App()) as context:
        return context.params


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("REF CMD", "CMD"),
        ("REF -- CMD", "CMD"),
        ("-i REF -- CMD", "CMD"),
        ("REF -i -- CMD", "CMD"),
        ("REF -i CMD -i -- x", "CMD -i -- x"),
        ("REF -- -i CMD --", "-i CMD --"),
        ("-i REF --cpus=2 -eA=1 CMD --memory 1", "CMD --memory 1"),
        ("-- REF -- CMD", "CMD"),
        ("-- REF CMD -- x", "CMD -- x"),
        ("REF --cpus 2 -- -- CMD", "-- CMD"),
    ],
)
def test_options_may_stand_on_both_sides_of_the_ref(line: str, argv: str) -> None:
    found = parsed(line)
    assert (found["ref"], " ".join(found["argv"])) == ("REF", argv)
    assert found["interactive"] == ("-i" in line.partition(argv)[0])


def test_options_on_both_sides_are_joined() -> None:
    found = parsed("-e A=1 --memory 1G REF -e B=2 --memory 2G -- CMD")
    assert (found["environment"], found["memory"]) == (("A=1", "B=2"), "2G")


def test_a_served_ref_may_stand_before_the_socket() -> None:
    found = parsed("REF --socket S", serve)
    assert (found["what"], found["socket"], found["argv"]) == ("REF", Path("S"), ())
    assert parsed("--run REF -- nbdcopy $uri -", serve)["argv"] == ("nbdcopy", "$uri", "-")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("run", "Missing argument"),
        ("run REF --memroy 1G -- CMD", "Did you mean '--memory'?"),
        ("run REF -Z CMD", "after --"),
        ("run --cpus none REF CMD", "--cpus"),
        ("run REF CMD --memory", "nothing:1"),
        ("run --bind x REF CMD", "SRC:DST"),
        ("run --memory much REF CMD", "not a size"),
        ("run -e =1 REF CMD", "not NAME=VALUE"),
    ],
)
def test_usage_errors_of_run_are_125(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--store", str(tmp_path), "--cache", str(tmp_path), *line.replace("REF", "nothing:1").split()])
    assert exit_.value.code == 125
    assert word in capsys.readouterr().err


def test_usage_errors_of_others_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["nbd", "serve", "REF", "--sokcet", "S"])
    assert exit_.value.code == 2
    assert "Did you mean '--socket'?" in capsys.readouterr().err


def test_every_command_that_ends_with_a_command_line_takes_options_after_the_ref() -> None:
    from tests.unit.cli.test_basics import all_commands

    for name, found in all_commands():
        if any(isinstance(item, click.Argument) and "CMD" in (item.metavar or "") for item in found.params):
            assert isinstance(found, CommandLine), name
        else:
            assert isinstance(found, click.Group) or found.allow_interspersed_args, name


def test_variables_without_a_value_are_those_of_the_caller(tmp_path: Path) -> None:
    environ = {"HERE": "a b", "EMPTY": ""}
    assert parse_environment(["A=1=2", "HERE", "EMPTY", "GONE", "B="], environ) == {"A": "1=2", "HERE": "a b", "EMPTY": "", "B": ""}
    for bad in ("", "=", "=1", "A\0=1"):
        with pytest.raises(UsageError, match="not NAME=VALUE"):
            parse_environment([bad], environ)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"\xef\xbb\xbf# comment\n\n  A=1 # no comment\r\nQ='x'\nHERE\nGONE\nB=1\nRAW=\xff\n")
    second.write_text("B=2")
    found = read_env_files([first, second], environ)
    assert found == {"A": "1 # no comment", "Q": "'x'", "HERE": "a b", "B": "2", "RAW": "\udcff"}
    second.write_text("A=1\nexport B=2\n")
    with pytest.raises(UsageError, match=r"second, line 2: not NAME=VALUE: 'export B=2'"):
        read_env_files([second], environ)
    with pytest.raises(UsageError, match="third: there is no such file"):
        read_env_files([tmp_path / "third"], environ)


def test_binds_as_people_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert Bind.parse("data:/a") == Bind.parse("data:/a:rw") == Bind(tmp_path / "data", "/a", read_only=False)
    assert Bind.parse(f"{tmp_path}:/b:ro") == Bind(tmp_path, "/b")
    for bad, word in (
        ("data", "SRC:DST"),
        (":/a", "SRC:DST"),
        ("data:/a:rx", "SRC:DST"),
        ("none:/a", f"{tmp_path}/none"),
        ("data:a", "absolute"),
    ):
        with pytest.raises(UsageError, match=word):
            Bind.parse(bad)
