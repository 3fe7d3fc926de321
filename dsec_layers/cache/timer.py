"""Deadlines and pauses: one thread that calls functions at given times."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timer"]

_log = logging.getLogger(__name__)


class Timer:
    """Calls functions at given times, in one thread. They must be short. ``end``: seconds that ``close`` waits for the one that runs."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="timer", daemon=True)
        self._thread.start()

    def call_at(self, when: float, function: Callable[[], object]) -> None:
        """Call ``function`` at that time of the monotonic clock; now if the timer is closed."""
        with self._changed:
            closed = self._closed
            if not closed:
                heapq.heappush(self._queue, (when, next(self._order), function))
                if self._queue[0][2] is function:  # else the thread sleeps until something earlier
                    self._changed.notify()
        if closed:
            function()

    def close(self) -> None:
        """Call what is left now, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(self._end)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._queue or self._queue[0][0] > time.monotonic()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if not self._queue:
                    return
                function = heapq.heappop(self._queue)[2]
            try:
                function()
            except Exception:  # noqa: BLE001 - the others must be called
                _log.exception("unexpected failure at a deadline")
