"""Signals on their way into a sandbox.

The command is the first process of its namespace, and to such a process the kernel delivers no signal whose default it has left alone: ``sleep`` under docker does
not end at SIGTERM. Here it does: what would have ended any ordinary process ends the sandbox, with the exit code that the shell would show.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from dsec_layers.errors import UsageError

__all__ = ["FORWARDED", "deliver", "first_process", "forwarding", "signal_number"]

FORWARDED: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def signal_number(text: str) -> int:
    """The number of ``SIGINT``, ``int``, ``2`` or ``SIGRTMIN+3``. UsageError if there is no such signal."""
    name, plus, more = text.upper().removeprefix("SIG").partition("+")
    known = {item.name.removeprefix("SIG"): int(item) for item in signal.Signals}
    number = known.get(name) if not name.isdecimal() else int(name[:4])
    if plus:
        number = number + int(more[:4]) if number is not None and more.isdecimal() else None
    if number not in signal.valid_signals():
        raise UsageError(f"no signal is called {text[:40]!r}")
    return int(number)


def first_process(pids: Collection[int]) -> int | None:
    """The process that is number 1 in its own namespace, and the outermost such: a sandbox may have made namespaces of its own."""
    depth: dict[int, int] = {}
    for pid in pids:
        numbers = _status(pid).get("NSpid", "").split()
        if numbers and numbers[-1] == "1":
            depth[pid] = len(numbers)
    return min(depth, key=depth.__getitem__) if depth else None


def deliver(pids: Collection[int], number: int) -> bool:
    """Send a signal to the first process among a sandbox's ``pids``. False if there is none yet, or if it would not notice."""
    found = first_process(pids)
    if found is None or not _notices(found, number):
        return False
    # By descriptor: the process may go between the look and the signal, and its number to another.
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(found)
        try:
            if first_process([found]) is not None:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)
    return True


@contextmanager
def forwarding(forward: Callable[[int], None], kill: Callable[[], None], resize: Callable[[], None] | None) -> Iterator[None]:
    """Pass this process's signals on while the context lasts; the second Ctrl-C kills. Does nothing outside the main thread, where Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if number == signal.SIGINT and interrupts > 1:
            kill()
        else:
            forward(number)

    handlers = {number: signal.signal(number, handle) for number in FORWARDED}
    if resize is not None:
        grown = resize
        handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: grown())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _notices(pid: int, number: int) -> bool:
    """Whether a first process handles, blocks (to wait for) or ignores a signal, by its status; if not, the kernel drops the signal."""
    status = _status(pid)
    if status.get("Name", "").startswith(("runc:[", "crun")):
        # Still the runtime, about to become the command.
        return False
    masks = (int(status.get(name, "0"), 16) for name in ("SigCgt", "SigBlk", "SigIgn"))
    return any(mask >> (number - 1) & 1 for mask in masks)


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
