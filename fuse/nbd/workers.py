"""Threads for what may wait, and the bounds on what one connection may have in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Workers"]


class Workers:
    """Up to ``threads`` threads, started as they are needed, that run jobs; at most ``requests`` jobs and ``payload`` bytes are open at a time.

    A job is open from ``submit`` until somebody calls ``settle`` for it, which is when its reply has left. One thread submits; it asks for room
    first.
    """

    def __init__(self, name: str, *, threads: int, requests: int, payload: int) -> None:
        self._name = name
        self._threads = threads
        self._requests = requests
        self._payload = payload
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._started: list[threading.Thread] = []
        self._running = 0
        self._open = 0
        self._bytes = 0
        self._aborted = False

    def has_room(self, cost: int) -> bool:
        """Whether a job of ``cost`` bytes fits within the bounds. One that is over them by itself runs alone."""
        return self._open == 0 or (self._open < self._requests and self._bytes + cost <= self._payload)

    def wait_for_room(self, cost: int) -> None:
        """Wait until a job of ``cost`` bytes fits. Raises ConnectionError after ``abort``."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self.has_room(cost))
            if self._aborted:
                raise ConnectionError("the connection was ended")

    def submit(self, cost: int, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, in a thread."""
        with self._changed:
            if self._running >= len(self._started) < self._threads:
                self._start()
            self._open += 1
            self._bytes += cost
            self._running += 1
        self._queue.put(job)

    def settle(self, cost: int) -> None:
        """One job's reply of ``cost`` bytes has left, or never will."""
        with self._changed:
            self._open -= 1
            self._bytes -= cost
            self._changed.notify_all()

    def abort(self) -> None:
        """Nobody waits for open jobs any longer; those that are running end when they end."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until no job is open and the threads have ended, so that nothing refers to what jobs used; or for ``abort``."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._open == 0)
            for _ in self._started:
                self._queue.put(None)
            hanging = self._aborted
        for thread in [] if hanging else self._started:
            thread.join()

    def _start(self) -> None:
        """One thread more. The first must start; with fewer than wanted the work is done all the same."""
        thread = threading.Thread(target=self._work, name=f"{self._name}-worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._started:
                raise ConnectionError("no thread can be started") from error
        else:
            self._started.append(thread)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            with self._changed:
                self._running -= 1
