"""Snapshots of a disk, whether somebody serves it or not: its server is asked, or else its files are changed here.

The protocol is that of fuse/client/control.py, on the socket ``control`` in the disk's directory: ``status``, ``snapshot``, ``rebase``, ``stop``.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from dsec_layers.disks.files import DiskFiles
from dsec_layers.disks.local import LocalDisk
from dsec_layers.disks.state import MAX_GENERATIONS, DiskState, Parent
from dsec_layers.documents import plain
from dsec_layers.errors import Conflict, HostError, ImageError, UsageError
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.controlserver import MessageServer, Reply
from dsec_layers.linux.unixsocket import remove_socket, socket_identity

__all__ = ["ControlServer", "Owner", "Served", "owner_of", "served"]

_ANSWER: Final = 600.0
_END: Final = 60.0
_ROOT: Final = 0
_MAX_PID: Final = (1 << 31) - 1
_ACCEPT_PAUSE: Final = 0.1


class Owner(Protocol):
    """Who may change a disk."""

    def snapshot(self) -> DiskState:
        """Freeze what was written so far; the state's frozen generations are the snapshot."""

    def rebase(self, expected: Parent | None, parent: Parent, gone: tuple[int, ...]) -> DiskState:
        """See DiskFiles.rebase."""


class Served:
    """A disk that a server process has open. Close it."""

    def __init__(self, path: Path, channel: socket.socket) -> None:
        self._path = path
        self._channel = channel

    def status(self) -> dict[str, Any]:
        """``pid``, ``uri``, ``connections``, ``state`` and ``recovered`` of the server."""
        answer = self._ask("status")
        if not isinstance(answer, dict):
            raise HostError(f"the server of {self._path} answers nonsense", hint="end it by hand")
        return answer

    def snapshot(self) -> DiskState:
        """See Owner."""
        return DiskState.from_value(self._ask("snapshot"))

    def rebase(self, expected: Parent | None, parent: Parent, gone: tuple[int, ...]) -> DiskState:
        """See Owner."""
        before = plain(expected) if expected else None
        return DiskState.from_value(self._ask("rebase", expected=before, parent=plain(parent), gone=list(gone)))

    def stop(self) -> None:
        """Ask the server to end, and wait until it has let go of the disk. HostError if it does not."""
        pid = self.status().get("pid")
        if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid <= _MAX_PID:
            raise HostError(f"the server of {self._path} does not say which process it is", hint="end it by hand")
        process = os.pidfd_open(pid)
        try:
            self._ask("stop")
            ended = select.poll()
            ended.register(process, select.POLLIN)
            if ended.poll(_END * 1000):
                return
        finally:
            os.close(process)
        try:
            DiskFiles(self._path).close()  # a program that does other things after it has served
        except Conflict as error:
            raise HostError(f"the server of {self._path} does not end", hint="its clients may be waiting for a store") from error

    def close(self) -> None:
        """Close the connection; the server stays."""
        self._channel.close()

    def _ask(self, operation: str, **arguments: Any) -> Any:
        try:
            with suppress(BrokenPipeError):  # it has closed already; what it said before is there still
                control.send(self._channel, {"op": operation, **arguments})
            received = control.receive(self._channel)
        except (OSError, ValueError) as error:
            raise HostError(f"the server of {self._path} does not answer: {error}") from error
        if received is None:
            raise HostError(f"the server of {self._path} has ended")
        answer, fds = received
        control.close_all(fds)  # no answer brings any
        if "error" in answer:
            raise control.error_from(answer["error"])
        return answer.get("ok")


class _Offline:
    """A disk that nobody has open."""

    def __init__(self, files: DiskFiles) -> None:
        self._files = files

    def snapshot(self) -> DiskState:
        state = self._files.state
        empty = [self._settle(number) for number in (*state.frozen, state.upper)]
        if not empty[-1]:
            self._files.begin().close()
        return self._files.state

    def rebase(self, expected: Parent | None, parent: Parent, gone: tuple[int, ...]) -> DiskState:
        return self._files.rebase(expected, parent, gone)

    def _settle(self, number: int) -> bool:
        """Cut off what a crash tore, which who only reads generations does not do. Whether the generation is empty."""
        generation = self._files.open(number)
        try:
            generation.upper.freeze()
            return generation.is_empty
        finally:
            generation.close()


@contextmanager
def owner_of(path: Path) -> Iterator[Owner]:
    """Whoever may change the disk at ``path`` now: its server, or this process, which then holds its lock. Conflict if neither."""
    try:
        files = DiskFiles(path)
    except Conflict:
        server = served(path)
        if server is None:
            raise
        try:
            yield server
        finally:
            server.close()
        return
    with files:
        yield _Offline(files)


def served(path: Path) -> Served | None:
    """The server of the disk at ``path``, None if there is none."""
    channel = control.connect(path, _ANSWER)
    return Served(path, channel) if channel is not None else None


class ControlServer:
    """Answers on the disk's control socket, from threads of its own. ``stop`` is called when a client asks for the end."""

    def __init__(self, disk: LocalDisk, status: Callable[[], dict[str, Any]], stop: Callable[[], None]) -> None:
        self._disk = disk
        self._status = status
        self._stop = stop
        listening = control.listen(disk.path)
        self._identity = socket_identity(disk.path / control.SOCKET)
        self._server = MessageServer(listening, self._answer)
        self._server.start()

    def close(self) -> None:
        """Take no more connections. The socket's name goes."""
        remove_socket(self._disk.path / control.SOCKET, self._identity)
        self._server.close()

    def _answer(self, message: control.Message) -> Any:
        operation = message.get("op")
        if operation == "status":
            return self._status()
        if operation == "snapshot":
            return self._disk.snapshot().to_value()
        if operation == "rebase":
            expected, parent, gone = _rebase(message)
            return self._disk.rebase(expected, parent, gone).to_value()
        if operation == "stop":
            return Reply(then=self._stop)
        raise UsageError(f"the server of a disk knows no {str(operation)[:40]!r}")


def _rebase(message: control.Message) -> tuple[Parent | None, Parent, tuple[int, ...]]:
    """What a rebase asks for: it becomes the disk's state, so nothing else may pass. UsageError."""
    hint = "use the same version of this program as the disk's server"
    gone = message.get("gone")
    numbers = isinstance(gone, list) and len(gone) <= MAX_GENERATIONS and all(type(number) is int and number > 0 for number in gone)
    if not isinstance(gone, list) or not numbers or "expected" not in message:
        raise UsageError(
            f"not a rebase: it names no expected disk, or its generations are no list of at most {MAX_GENERATIONS} numbers", hint=hint
        )
    try:
        expected = Parent.from_value(message["expected"]) if message["expected"] is not None else None
        return expected, Parent.from_value(message.get("parent")), tuple(gone)
    except ImageError as error:
        raise UsageError(f"not a rebase: {error.message}", hint=hint) from error
