"""How the core tells a user interface what it does; the command line implements it, libraries may pass their own.

Nothing here prints. The default swallows everything, so that library calls are silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

__all__ = ["SILENT", "Progress", "Task"]


class Task(Protocol):
    """One measurable piece of work."""

    def advance(self, amount: int = 1) -> None:
        """``amount`` more units (bytes, entries) are done."""

    def total(self, amount: int | None) -> None:
        """The whole is now known to be ``amount`` units, or unknown."""


class Progress(Protocol):
    """Receives progress; methods may be called from any thread."""

    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> AbstractContextManager[Task]:
        """Start a piece of work, shown until the context ends."""

    def info(self, message: str) -> None:
        """A line the user should see at normal verbosity."""

    def debug(self, message: str) -> None:
        """A line shown with -v."""

    def warning(self, message: str) -> None:
        """Something is off but the work goes on."""


class _SilentTask:
    def advance(self, amount: int = 1) -> None:
        pass

    def total(self, amount: int | None) -> None:
        pass


class _Silent:
    @contextmanager
    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> Iterator[Task]:
        yield _SilentTask()

    def info(self, message: str) -> None:
        pass

    def debug(self, message: str) -> None:
        pass

    def warning(self, message: str) -> None:
        pass


SILENT: Progress = _Silent()
