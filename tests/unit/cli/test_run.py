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
