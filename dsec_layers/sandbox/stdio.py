"""Standard streams of a sandbox: never the caller's own files.

A process can open what it holds a descriptor of again, through /proc/self/fd, with other rights: given a log file to write to it could read it, given one to
read from, as root, it could write to it. And the runtimes change the owner of the streams they pass on. So the sandbox gets pipes, and threads move the bytes;
what is a pipe or socket already (or /dev/null) goes in as it is, which costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from typing import Final

__all__ = ["Streams"]

_CHUNK: Final = 1 << 20
_NULL: Final = os.makedev(1, 3)


class Streams:
    """The three descriptors for the runtime, and the threads that serve them.

    ``stdin`` None is /dev/null. Without ``relay`` the descriptors go in as they are (the runtime keeps them to itself when it makes a terminal). Call ``started`` as soon as the runtime has the descriptors, and ``finish`` when the sandbox has ended.
    """

    def __init__(self, stdin: int | None, stdout: int, stderr: int, *, relay: bool = True) -> None:
        self._relay = relay
        self._mine: list[int] = []
        self._threads: list[threading.Thread] = []
        self._idle: list[int] = []
        self._stop, self._stopper = os.pipe2(os.O_CLOEXEC)
        self._kept = [self._stop, self._stopper]
        self.stdin = self._input(stdin)
        self.stdout = self._output(stdout)
        # One pipe for both if both go to one place: two would mix the order of what was written.
        self.stderr = self.stdout if relay and os.path.sameopenfile(stdout, stderr) else self._output(stderr)

    def started(self) -> None:
        """Close our copies of the sandbox's ends (or its end would never be seen) and begin to move bytes."""
        for fd in self._mine:
            os.close(fd)
        self._mine.clear()
        self._idle.clear()
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until everything the sandbox wrote has been passed on."""
        if self._stopper >= 0:
            os.close(self._stopper)
            self._kept.remove(self._stopper)
            self._stopper = -1
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for descriptors in (self._mine, self._kept, self._idle):
            while descriptors:
                os.close(descriptors.pop())

    def _input(self, source: int | None) -> int:
        if source is None:
            fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._mine.append(fd)
            return fd
        if not self._relay or _harmless(source):
            return source
        read, write = os.pipe2(os.O_CLOEXEC)
        self._mine.append(read)
        self._idle.append(write)
        self._threads.append(threading.Thread(target=_feed, args=(source, write, self._stop), daemon=True, name="sandbox-stdin"))
        return read

    def _output(self, target: int) -> int:
        if not self._relay or _harmless(target):
            return target
        read, write = os.pipe2(os.O_CLOEXEC)
        self._mine.append(write)
        self._idle.append(read)
        self._threads.append(threading.Thread(target=_drain, args=(read, target), daemon=True, name="sandbox-output"))
        return write


def _harmless(fd: int) -> bool:
    status = os.fstat(fd)
    return stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL)


def _drain(read: int, target: int) -> None:
    """Move everything from a pipe to the caller's stream. When that stream fails, the sandbox sees its pipe close, as it would have seen the stream."""
    with contextlib.suppress(OSError):
        while data := os.read(read, _CHUNK):
            _write(target, data)
    os.close(read)


def _feed(source: int, write: int, stop: int) -> None:
    """Move the caller's input to the sandbox until it ends, the sandbox closes its side, or ``stop`` is readable."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(stop, select.POLLIN)
    poll.register(write, select.POLLERR)
    with contextlib.suppress(OSError):
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if stop in ready or write in ready:
                break
            data = os.read(source, _CHUNK)
            if not data:
                break
            _write(write, data)
    os.close(write)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # Somebody who shares the caller's stream made it non-blocking.
            select.select([], [fd], [])
