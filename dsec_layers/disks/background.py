"""A disk's server in the background: ``python -m dsec_layers.disks.background``, for ``disk attach --detach``.

The starter waits for one JSON object on standard output: ``{"ok": {…}}`` once clients can connect, or ``{"error": {…}}``. What goes wrong later is in ``attach.log``
of the disk.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsec_layers.errors import DsecError, HostError
from dsec_layers.linux.process import in_background
from dsec_layers.progress import Progress, Task

if TYPE_CHECKING:
    from dsec_layers.disks.attach import Attached
    from dsec_layers.store.base import Store

__all__ = ["start_server"]

_LOG: Final = "attach.log"
_START: Final = 180.0


def start_server(
    store: str, cache: Path, path: Path, *, unix: Path | None = None, port: int | None = None, read_only: bool = False
) -> Attached:
    """Serve a disk as ``attach`` does, in a process of its own that stays; what its ``ready`` was told. Raises what it raises."""
    from dsec_layers.disks.attach import Attached
    from dsec_layers.disks.state import read_state
    from dsec_layers.fuse.client import control
    from dsec_layers.proc import inherited_environment, run

    read_state(path)
    asked = {"store": store, "cache": str(cache), "path": str(path.absolute()), "port": port, "read_only": read_only}
    asked["unix"] = str(unix.absolute()) if unix is not None else None
    done = run(
        [sys.executable, "-P", "-m", "dsec_layers.disks.background", json.dumps(asked)],
        check=False,
        env=inherited_environment(),
        timeout=_START,
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.decode(errors="replace").strip()
        raise HostError(f"the server of {path} did not start: {said or f'exit code {done.code}'}", hint=f"see {path / _LOG}") from error
    if "error" in answer:
        raise control.error_from(answer["error"])
    return Attached(**answer["ok"])


def main(argv: list[str]) -> None:
    """Fork at once, while this process has one thread: the child serves, this one passes on what it says."""
    asked = json.loads(argv[0])
    with open(in_background(Path(asked["path"]) / _LOG, lambda say: _serve(asked, say)), "rb") as stream:
        sys.stdout.buffer.write(stream.read())


def _serve(asked: dict[str, Any], say: int) -> int:
    from dsec_layers.disks.attach import attach
    from dsec_layers.fuse.client import control

    left = [say]

    def tell(answer: dict[str, Any]) -> None:
        while left:
            with open(left.pop(), "wb") as stream:
                stream.write(json.dumps(answer).encode())

    def ready(attached: Attached) -> None:
        tell({"ok": asdict(attached)})

    try:
        with closing(_Place(asked["store"], Path(asked["cache"]))) as place:
            unix = Path(asked["unix"]) if asked["unix"] else None
            attach(place, asked["path"], unix=unix, port=asked["port"], read_only=asked["read_only"], ready=ready)
    except DsecError as error:
        _Log().warning(f"the server ends: {error.message}")
        tell(control.error_message(error))
        return error.exit_code
    return 0


class _Place:
    """Where the server's disk is worked on. Its store is opened when the disk needs it: one that stands on nothing never does."""

    def __init__(self, store: str, cache: Path) -> None:
        self._url = store
        self.cache = cache
        self.progress: Progress = _Log()

    @cached_property
    def store(self) -> Store:
        """The store, opened at the first use."""
        from dsec_layers.store.open import open_store

        return open_store(self._url)

    def close(self) -> None:
        """Close what was opened."""
        if "store" in self.__dict__:
            self.store.close()


class _Log:
    """Progress as the daemon's log has it, on standard error."""

    @contextmanager
    def task(self, title: str, *, total: int | None = None, unit: str = "B") -> Iterator[Task]:
        yield self

    def advance(self, amount: int = 1) -> None:
        pass

    def total(self, amount: int | None) -> None:
        pass

    def info(self, message: str) -> None:
        self._write("INFO", message)

    def debug(self, message: str) -> None:
        pass

    def warning(self, message: str) -> None:
        self._write("WARNING", message)

    def _write(self, level: str, message: str) -> None:
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} attach[{os.getpid()}] {level} {message}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
