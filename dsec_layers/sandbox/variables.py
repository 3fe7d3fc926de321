"""Environment variables of several layers as those of one command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["DEFAULT_PATH", "merge_variables"]

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def merge_variables(layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Variables of layers from bottom to top: the higher wins, but a PATH goes before those below it and before the usual one.

    So a toolkit that brings its own directory hides neither the base's programs nor another toolkit's.
    """
    merged: dict[str, str] = {}
    for variables in layers:
        for name, value in variables.items():
            if name == "PATH":
                below = merged.get(name, DEFAULT_PATH)
                value = ":".join(dict.fromkeys([*value.split(":"), *below.split(":")]))
            merged[name] = value
    return merged
