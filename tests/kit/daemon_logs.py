"""What servers of a test say about themselves: a warning, an error or a traceback that the test does not expect is a failure of that test.

Logs are ``daemon.log`` (the mount daemon's keeper and worker) and ``flat.log`` (the FUSE server) in a cache directory, ``attach.log`` in that of a disk, and the
standard error of servers in the foreground, which pytest captures. A conftest.py that takes over the names below has all of them looked at after each test, when its
fixtures have ended. A test that provokes errors names them: ``@pytest.mark.logs("gave up", "the worker died")``, regular expressions for what a record holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

__all__ = ["log_places", "pytest_runtest_makereport", "pytest_runtest_teardown", "records", "unexpected"]

_NAMES: Final = re.compile(r"(daemon\.log(\.1)?|flat\.log|attach\.log)\Z")
_RECORD: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)? \S+\[\d+\] ([A-Z]+) ")
_FINE: Final = ("DEBUG", "INFO")
_TRACEBACK: Final = "Traceback (most recent call last)"
_SAID: Final = re.compile(rf"{re.escape(_TRACEBACK)}|^warning: NBD\b", re.MULTILINE)
_BASE: Final = pytest.StashKey[Path]()
_SEEN: dict[tuple[int, int], int] = {}
"""How far each log, by its file's identity, was looked at: some outlive their test."""


def records(text: str) -> list[str]:
    """A log as records: lines that do not begin one belong to the one before."""
    found: list[str] = []
    for line in text.splitlines():
        if _RECORD.match(line) or not found:
            found.append(line)
        else:
            found[-1] += "\n" + line
    return found


def unexpected(text: str, expected: Iterable[str]) -> list[str]:
    """The records of a log that tell of something wrong and match none of the patterns."""
    patterns = [re.compile(pattern) for pattern in expected]
    bad = []
    for record in records(text):
        level = _RECORD.match(record)
        fine = level is not None and level[1] in _FINE and _TRACEBACK not in record
        if not fine and not any(pattern.search(record) for pattern in patterns):
            bad.append(record)
    return bad


def expected_of(node: pytest.Item) -> list[str]:
    """The patterns that a test names, and its module."""
    return [pattern for mark in node.iter_markers("logs") for pattern in mark.args]


@pytest.fixture(autouse=True)
def log_places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Note where the logs of a test are: in its own folder, and in those that it shares with others."""
    request.node.stash[_BASE] = tmp_path_factory.getbasetemp()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test for what its daemons have logged, after all fixtures that end with it have ended."""
    yield
    base = item.stash.get(_BASE, None)
    if base is None:
        return
    places = [folder for folder in base.iterdir() if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("test_")]
    places += [folder for name, folder in getattr(item, "funcargs", {}).items() if name == "tmp_path"]
    expected = expected_of(item)
    bad = [f"{path}: {record}" for place in places for path in _logs(place) for record in unexpected(_news(path), expected)]
    if bad:
        pytest.fail("\n".join(["logged, and not expected:", *bad]), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test for a traceback, or a warning of an NBD server, on the standard error of a process that it started."""
    report = yield
    bad = report.when == "teardown" and report.passed and _SAID.search(report.capstderr)
    if bad and not any(re.search(pattern, report.capstderr) for pattern in expected_of(item)):
        report.outcome = "failed"
        report.longrepr = f"on standard error, and not expected:\n{report.capstderr}"
    return report


def _logs(folder: Path) -> Iterator[Path]:
    """The logs below a folder, on its own file system: nothing that is mounted there is read."""
    device = folder.stat().st_dev
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.stat(follow_symlinks=False).st_dev == device:
                            waiting.append(Path(entry.path))
                    elif _NAMES.match(entry.name) and entry.is_file(follow_symlinks=False):
                        yield Path(entry.path)
        except OSError:
            pass  # gone meanwhile


def _news(path: Path) -> str:
    """What was written to a log since it was looked at last."""
    with open(path, "rb") as stream:
        status = os.fstat(stream.fileno())
        identity = (status.st_dev, status.st_ino)
        start = _SEEN.get(identity, 0)
        stream.seek(start if start <= status.st_size else 0)
        text = stream.read()
    _SEEN[identity] = status.st_size if start <= status.st_size else len(text)
    return text.decode(errors="replace")
