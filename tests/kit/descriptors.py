"""What this process has open, told so that a test counts nothing but its own."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

__all__ = ["open_files", "opened_since"]


def open_files() -> Counter[str]:
    """What the descriptors of this process lead to, after what earlier tests dropped was closed."""
    gc.collect()
    return _read()


def opened_since(before: Counter[str], folder: Path | None = None) -> list[str]:
    """What is open and was not ``before``; with ``folder``, of what is in there. What others closed meanwhile takes nothing away from it."""
    new = _read() - before
    return sorted(name for name in new.elements() if folder is None or name.startswith(str(folder)))


def _read() -> Counter[str]:
    found: Counter[str] = Counter()
    for link in list(Path("/proc/self/fd").iterdir()):
        try:
            found[str(link.readlink())] += 1
        except FileNotFoundError:
            pass  # the listing's own descriptor
    return found
