"""A test fails for what its servers log and it does not expect."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dsec_layers.proc import clean_environment, run
from tests.kit.daemon_logs import records, unexpected

ROOT = Path(__file__).resolve().parents[2]
STAMP = "2026-01-01 00:00:00 dsec_layers.x[7]"
CONFTEST = "from tests.kit.daemon_logs import log_places, pytest_runtest_makereport, pytest_runtest_teardown\n"
TEST = """
import os, sys, pytest
from pathlib import Path

@pytest.fixture
def daemon(tmp_path):
    log = tmp_path / "cache" / NAME
    log.parent.mkdir()
    yield log
    with open(log, "a") as stream:
        stream.write(LATE)

@pytest.mark.logs(*EXPECTED)
def test_it(daemon, tmp_path):
    daemon.write_text(TEXT)
    os.write(2, STDERR)

def test_the_next_is_not_blamed(tmp_path):
    pass

@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    yield folder
    with open(folder / "daemon.log", "a") as stream:
        stream.write(LAST)

def test_of_a_home(home):
    (home / "daemon.log").write_text(TEXT)

def test_of_the_same_home(home):
    with open(home / "daemon.log", "a") as stream:
        stream.write(LATE)
"""


def outcome(folder: Path, **values: object) -> tuple[int, int, str]:
    """How many of the four tests passed, how many failed or ended badly, and what was said."""
    values = {"NAME": "daemon.log", "TEXT": "", "LATE": "", "LAST": "", "EXPECTED": (), "STDERR": b""} | values
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_sample.py").write_text("".join(f"{name} = {value!r}\n" for name, value in values.items()) + TEST)
    options = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
        "-rA",
        "--basetemp",
        str(folder / "base"),
    ]
    done = run(
        [sys.executable, "-m", "pytest", *options, str(folder / "test_sample.py")],
        check=False,
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        timeout=60,
    )
    said = done.stdout.decode()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", said.splitlines()[-1])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), said


def test_a_quiet_log_is_fine(tmp_path: Path) -> None:
    passed, bad, said = outcome(tmp_path, TEXT=f"{STAMP} INFO well\n", LATE=f"{STAMP} INFO ended\n")
    assert (passed, bad) == (4, 0), said


@pytest.mark.parametrize(
    ("name", "level"), [("daemon.log", "ERROR"), ("daemon.log.1", "WARNING"), ("flat.log", "ERROR"), ("attach.log", "WARNING")]
)
def test_what_a_daemon_logs_fails_its_test_and_no_other(tmp_path: Path, name: str, level: str) -> None:
    passed, bad, said = outcome(tmp_path, NAME=name, LATE=f"{STAMP} {level} there is a fault\n")
    assert (passed, bad) == (4, 2) and said.count("logged, and not expected") >= 2, said
    assert re.search(r"^ERROR .*::test_it\b", said, re.MULTILINE) and re.search(
        r"^ERROR .*::test_of_the_same_home\b", said, re.MULTILINE
    ), said


def test_what_is_logged_when_a_module_ends_fails_its_last_test(tmp_path: Path) -> None:
    passed, bad, said = outcome(tmp_path, LAST=f"{STAMP} ERROR there is a fault\n")
    assert (passed, bad) == (4, 1) and re.search(r"^ERROR .*::test_of_the_same_home\b", said, re.MULTILINE), said


def test_what_is_expected_is_named(tmp_path: Path) -> None:
    text = f"{STAMP} ERROR disk 1 died\n"
    passed, bad, said = outcome(tmp_path, LATE=text, EXPECTED=("disk . died",))
    assert (passed, bad) == (4, 1) and not re.search(r"^ERROR .*::test_it\b", said, re.MULTILINE), said


@pytest.mark.parametrize("wrong", ["Traceback (most recent call last):\n  File\nKeyError: 3\n", "fine\nwarning: NBD export '': KeyError\n"])
def test_what_a_server_in_the_foreground_says(tmp_path: Path, wrong: str) -> None:
    _, bad, said = outcome(tmp_path, STDERR=wrong.encode())
    assert bad == 1 and "KeyError" in said, said
    assert outcome(tmp_path, STDERR=wrong.encode(), EXPECTED=("KeyError",))[1] == 0


def test_records_have_their_lines() -> None:
    text = f"stray\n{STAMP} INFO fine\n{STAMP} INFO odd\nTraceback (most recent call last):\n  File\n2026-01-01 00:00:00,123 __main__[1] ERROR bad\n"
    assert [record.count("\n") for record in records(text)] == [0, 0, 2, 0]
    assert [record.split()[-1] for record in unexpected(text, [])] == ["stray", "File", "bad"]
    assert [record.split()[-1] for record in unexpected(text, ["Traceback", "stray"])] == ["bad"]
