"""Programs that tests judge by. Where one is missing the test is skipped; with ``DSEC_CI=1``, where all are expected, it fails instead."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest

from dsec_layers.errors import ToolError
from dsec_layers.proc import find_tool

__all__ = ["missing", "module", "need", "tool"]


def missing(reason: str) -> NoReturn:
    """Something that can be installed is not there."""
    if os.environ.get("DSEC_CI") == "1":
        pytest.fail(f"{reason}, and DSEC_CI=1 wants it", pytrace=False)
    pytest.skip(reason)


def tool(name: str) -> str:
    """The absolute path of a program."""
    try:
        return find_tool(name)
    except ToolError as error:
        missing(f"{error.message} ({error.hint})" if error.hint else error.message)


def need(*names: str) -> None:
    """All of these programs."""
    for name in names:
        tool(name)


def module(name: str) -> Any:
    """A Python module that only tests use."""
    try:
        return importlib.import_module(name)
    except ImportError:
        missing(f"the Python package {name} is not installed")
