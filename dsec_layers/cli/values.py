"""Values as people type them: sizes and environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsec_layers.errors import UsageError

__all__ = ["parse_environment", "parse_limits", "parse_size", "read_env_files"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str | None) -> int | None:
    """Bytes of ``512M``, ``2GiB``, ``4096``; units are powers of 1024. None stays None. UsageError for anything else."""
    if text is None:
        return None
    found = _SIZE.match(text.strip())
    if not found:
        raise UsageError(f"not a size: {text[:40]!r}", hint="a size is a number and K, M, G or T, such as 512M")
    size = float(found[1]) * _UNITS[found[2].upper()]
    if size >= 1 << 62:
        raise UsageError(f"a size of {text[:40]} is more than any machine has")
    return int(size)


def parse_limits(items: Iterable[str]) -> dict[str, int]:
    """NAME=SIZE pairs as a dict, sizes as ``parse_size`` has them. UsageError for anything else."""
    limits: dict[str, int] = {}
    for item in items:
        name, equals, text = item.partition("=")
        size = parse_size(text) if equals and text else None
        if size is None or not name:
            raise UsageError(f"not NAME=SIZE: {item[:80]!r}", hint="a limit is like spool=16G")
        limits[name] = size
    return limits


def parse_environment(items: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """NAME=VALUE pairs as a dict; a NAME alone has its value from ``environ``, and is left out if it has none there. UsageError names what is neither."""
    values: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or "\0" in item:
            raise UsageError(f"not NAME=VALUE: {item[:80]!r}", hint="NAME alone passes on the variable of this process")
        if equals or name in environ:
            values[name] = value if equals else environ[name]
    return values


def read_env_files(paths: Iterable[Path], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of files as docker has them: a line is NAME=VALUE, taken as it is, or NAME; empty lines and those that begin with # count for nothing."""
    values: dict[str, str] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
        except FileNotFoundError as error:
            raise UsageError(f"{path}: there is no such file") from error
        for number, line in enumerate(lines, 1):
            line = line.lstrip().removesuffix("\r")
            name = line.partition("=")[0]
            if not line or line.startswith("#"):
                continue
            if not name or any(character.isspace() for character in name):
                raise UsageError(f"{path}, line {number}: not NAME=VALUE: {line[:80]!r}")
            values |= parse_environment([line], environ)
    return values
