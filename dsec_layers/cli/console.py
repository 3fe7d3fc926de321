"""The only module that imports rich: results on standard output, everything else on standard error.

On a terminal progress is drawn; without one (CI, a pipe) each finished piece of work is one plain line. ``--json`` prints the result, or the error, as one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_layers.errors import DsecError, ImageError
from dsec_layers.progress import Task

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["Console", "human_bytes", "to_jsonable", "visible"]

_ESCAPES = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
_ESCAPES_OF_LINES = {number: escape for number, escape in _ESCAPES.items() if chr(number) not in "\n\t"}


def visible(text: str) -> str:
    """``text`` with control characters escaped: names in a layer are its maker's, and must not move the cursor or fake a line."""
    return text.translate(_ESCAPES)


def human_bytes(count: float) -> str:
    """``count`` bytes as people read them: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def to_jsonable(value: Any) -> Any:
    """A result as JSON knows it: dataclasses become objects, paths and enums text, bytes text with escapes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence | set | frozenset):
        return [to_jsonable(item) for item in value]
    return value


class Console:
    """Shows results, progress and errors in the form that was asked for. It implements ``progress.Progress``."""

    def __init__(self, *, as_json: bool = False, verbosity: int = 0) -> None:
        self.as_json = as_json
        self.verbosity = verbosity
        self._lock = threading.Lock()
        self._live: RichProgress | None = None
        self._depth = 0

    # results

    def result(self, value: Any, show: Callable[[], None]) -> None:
        """Print a command's result: as JSON, or by ``show``."""
        if self.as_json:
            self.out(json.dumps(to_jsonable(value), indent=None if not sys.stdout.isatty() else 2))
        else:
            show()

    def out(self, text: str = "") -> None:
        """A line on standard output."""
        try:
            sys.stdout.write(text.translate(_ESCAPES_OF_LINES) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
        """A table on standard output: aligned text, the same on a terminal and in a pipe."""
        cells = [[visible(str(cell)) for cell in row] for row in rows]
        widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
        for line in [[column.upper() for column in columns], *cells]:
            parts = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(line)]
            self.out("  ".join(parts).rstrip())

    # errors and notes

    def error(self, error: DsecError) -> None:
        """The one message of a failure, and the way out."""
        if self.as_json:
            value = {"error": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
            if isinstance(error, ImageError):
                value["code"] = str(error.code)
            with suppress(OSError):  # standard output may be what failed; standard error still says it
                self.out(json.dumps(value))
        self._line(f"error: {error.message}", "bold red")
        if error.hint:
            self._line(f"  {error.hint}", None)

    def info(self, message: str) -> None:
        """A line at normal verbosity."""
        if self.verbosity >= 0:
            self._line(message, None)

    def debug(self, message: str) -> None:
        """A line with -v."""
        if self.verbosity > 0:
            self._line(message, "dim")

    def warning(self, message: str) -> None:
        """Something is off but the work goes on."""
        self._line(f"warning: {message}", "yellow")

    def traceback(self) -> None:
        """The traceback of the exception being handled: for bugs, and with -v."""
        from rich.console import Console as RichConsole

        RichConsole(stderr=True).print_exception(suppress=["click"])

    def _line(self, text: str, style: str | None) -> None:
        text = text.translate(_ESCAPES_OF_LINES)
        with self._lock:
            if self._live is not None:
                self._live.console.print(text, style=style, markup=False, highlight=False)
            elif style and sys.stderr.isatty():
                from rich.console import Console as RichConsole

                RichConsole(stderr=True).print(text, style=style, markup=False, highlight=False)
            else:
                with suppress(OSError):  # there is nowhere to say that standard error is gone, and the work goes on
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()

    # progress

    @contextmanager
    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> Iterator[Task]:
        """A piece of work: a bar on a terminal, one line when it ends elsewhere."""
        if self.verbosity < 0:
            yield _PlainTask()
        elif sys.stderr.isatty():
            with self._bars() as bars:
                yield _BarTask(bars, bars.add_task(title, total=total, unit=unit))
        else:
            began, task = time.monotonic(), _PlainTask()
            yield task
            amount = human_bytes(task.done) if unit == "B" else f"{task.done} {unit}"
            self._line(
                f"{title}: {amount} in {time.monotonic() - began:.1f} s" if task.done else f"{title}: {time.monotonic() - began:.1f} s",
                None,
            )

    @contextmanager
    def _bars(self) -> Iterator[RichProgress]:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            self._depth += 1
            if self._live is None:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(binary_units=True),
                    TimeElapsedColumn(),
                )
                self._live = Progress(*columns, console=RichConsole(stderr=True), transient=True)
                self._live.start()
            live = self._live
        try:
            yield live
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    live.stop()
                    self._live = None


class _PlainTask:
    def __init__(self) -> None:
        self.done = 0

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def total(self, amount: int | None) -> None:
        pass


class _BarTask:
    def __init__(self, bars: RichProgress, task: TaskID) -> None:
        self._bars = bars
        self._task = task

    def advance(self, amount: int = 1) -> None:
        self._bars.advance(self._task, amount)

    def total(self, amount: int | None) -> None:
        self._bars.update(self._task, total=amount)
