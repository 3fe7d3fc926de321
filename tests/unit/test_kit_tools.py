"""What is missing is a skip at home, and a failure where everything is meant to be installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.tools import missing, module, need, tool

NAME = "no-such-program-of-dsec-layers"
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("call", [lambda: missing(NAME), lambda: tool(NAME), lambda: need("sh", NAME), lambda: module(NAME)])
def test_a_missing_tool_is_a_skip_or_with_dsec_ci_a_failure(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        monkeypatch.delenv("DSEC_CI", raising=False)
        if value is not None:
            monkeypatch.setenv("DSEC_CI", value)
        with pytest.raises(pytest.skip.Exception, match=NAME):
            call()
    monkeypatch.setenv("DSEC_CI", "1")
    with pytest.raises(pytest.fail.Exception, match=NAME):
        call()


def test_ci_wants_all_tools() -> None:
    script = TESTS.parent / ".ci/run"
    assert not script.exists() or "\nexport DSEC_CI=1\n" in script.read_text(), "what an sdist does not have is not looked at"


def test_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_CI", "1")
    need("sh", "cat")
    assert tool("sh").endswith("/sh")
    assert module("json").loads("1") == 1


def test_no_test_skips_for_a_missing_tool_by_itself() -> None:
    by_themselves = re.compile(r"importorskip|skip\([^)]*not installed")
    found = [str(path.relative_to(TESTS)) for path in sorted(TESTS.rglob("*.py")) if by_themselves.search(path.read_text())]
    assert [name for name in found if name != "unit/test_kit_tools.py"] == []
