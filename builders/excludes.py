"""Exclude patterns of a directory source: a small, fixed subset of what ``.gitignore`` knows, compiled to one regular expression. No I/O.

* ``*`` stands for any run of bytes but ``/``, ``?`` for one such byte, ``[abc]``, ``[a-z]``, ``[!abc]`` for one of a set, ``**`` for anything, slashes included.
  A backslash takes the next character literally.
* A pattern without a slash (one at its end aside) matches a name at any depth; one with a slash matches the whole path from the source's root.
* A slash at the end: directories only. What is excluded takes everything below it along. There is no negation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from dsec_layers.errors import UsageError

__all__ = ["Excludes"]

_TOKEN = re.compile(rb"\*\*/|\*+|\?|\[(?P<set>!?\]?[^\]]*)\]|\\(?P<literal>.)|(?P<other>.)", re.DOTALL)


class Excludes:
    """Patterns, ready to be asked about paths."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        everywhere: list[bytes] = []
        directories: list[bytes] = []
        for pattern in patterns:
            expression, only_directories = _translated(os.fsencode(pattern))
            (directories if only_directories else everywhere).append(expression)
        self._everywhere = re.compile(b"|".join(everywhere), re.DOTALL) if everywhere else None
        self._directories = re.compile(b"|".join(everywhere + directories), re.DOTALL) if everywhere or directories else None

    def match(self, path: bytes, *, is_dir: bool) -> bool:
        """Whether ``path``, relative to the source's root, is excluded."""
        compiled = self._directories if is_dir else self._everywhere
        return compiled is not None and compiled.fullmatch(path) is not None


def _translated(pattern: bytes) -> tuple[bytes, bool]:
    only_directories = pattern.endswith(b"/")
    bare = pattern.rstrip(b"/")
    anchored = b"/" in bare
    bare = bare.removeprefix(b"./").lstrip(b"/")
    if not bare or b"\0" in bare:
        raise UsageError(f"empty exclude pattern {os.fsdecode(pattern)!r}")
    body = b"".join(_expression(token) for token in _TOKEN.finditer(bare))
    return (b"(?:" if anchored else b"(?:.*/)?(?:") + body + b")", only_directories


def _expression(token: re.Match[bytes]) -> bytes:
    whole = token[0]
    if token["set"] is not None:
        negated = token["set"].startswith(b"!")
        inside = token["set"][1:] if negated else token["set"]
        inside = re.sub(rb"([\\^\[\]&~|])", rb"\\\1", inside)
        return b"[" + (b"^/" if negated else b"") + inside + b"]"
    if whole == b"**/":
        return b"(?:.*/)?"
    if whole.startswith(b"*"):
        return b".*" if len(whole) > 1 else b"[^/]*"
    if whole == b"?":
        return b"[^/]"
    return re.escape(token["literal"] or whole)
