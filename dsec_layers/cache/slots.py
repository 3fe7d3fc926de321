"""Threads for work on stores, with bounds for each store: one that hangs takes nothing from another.

::

    submit ──> queue of the store ──> running (a slot and its bytes are held) ──> over
                                         │ write_off
                                         └──> written off (slot and bytes are given back, the thread is left to hang) ──> over

The threads are daemon threads that nobody waits for: a read of a dead file system cannot be interrupted, and must not keep the process from ending.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

__all__ = ["StoreSlots", "Task"]

_log = logging.getLogger(__name__)

_STORES_AT_FULL: Final = 4
"""How many stores can use all their slots and bytes at the same time. Each store has one slot whatever the others hold."""

_WRITTEN_OFF: Final = 4
"""Threads that may hang in one store, written off, as a multiple of its slots. More hanging ones keep their slots."""

_PROBES: Final = 4
"""A store that has let a thread hang, and answered nothing since, has this part of its slots."""

_IDLE: Final = 10.0
"""Seconds until a thread without work ends."""


class _State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    WRITTEN_OFF = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Task:
    """Work on a store that needs ``size`` bytes of memory. ``work``: returns whether the store answered."""

    store: str
    size: int
    work: Callable[[], bool]
    state: _State = _State.QUEUED


@dataclass(slots=True)
class _Lane:
    """The work on one store. ``running``, ``bytes``: what counts against its bounds. ``hangs``: no answer since a thread was written off."""

    queue: deque[Task] = field(default_factory=deque)
    running: int = 0
    bytes: int = 0
    written_off: int = 0
    hangs: bool = False


class StoreSlots:
    """Runs tasks, of each store at most ``count`` at once that need ``size`` bytes together; something larger runs alone. Thread-safe."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self._handed: deque[Task] = deque()
        self._running = 0
        self._bytes = 0
        self._idle = 0
        self._starting = 0
        self._closed = False
        self.peak_bytes = 0

    def submit(self, store: str, size: int, work: Callable[[], bool]) -> Task:
        """Have ``work`` called in a thread as soon as the store has a slot and the bytes; returns at once."""
        task = Task(store, size, work)
        with self._changed:
            if self._closed:
                task.state = _State.OVER
                return task
            self._lanes.setdefault(store, _Lane()).queue.append(task)
            self._dispatch()
        return task

    def write_off(self, task: Task) -> None:
        """Expect nothing more from a task: one that waits never runs, and one that runs gives its slot and bytes to others."""
        with self._changed:
            lane = self._lanes.get(task.store)
            if lane is None:
                return
            if task.state is _State.QUEUED:
                lane.queue.remove(task)
                task.state = _State.OVER
            elif task.state is _State.RUNNING and lane.written_off < _WRITTEN_OFF * self._count:
                self._give_back(lane, task)
                task.state = _State.WRITTEN_OFF
                lane.written_off += 1
                lane.hangs = True
                _log.warning("a read of %s hangs; it is left alone (%d such)", task.store, lane.written_off)
            self._forget(task.store, lane)
            self._dispatch()

    def hangs(self, store: str) -> bool:
        """Whether a store has let a thread hang, and answered nothing since."""
        with self._changed:
            lane = self._lanes.get(store)
            return lane is not None and lane.hangs

    def close(self) -> None:
        """Start nothing more. What runs is left alone."""
        with self._changed:
            self._closed = True
            for lane in self._lanes.values():
                for task in lane.queue:
                    task.state = _State.OVER
                lane.queue.clear()
            self._changed.notify_all()

    def _dispatch(self, ready: int = 0) -> None:
        """Hand out what may run, waking threads beyond the ``ready`` ones that look by themselves. The lock is held."""
        for lane in self._lanes.values():
            while lane.queue and self._has_room(lane, lane.queue[0].size):
                task = lane.queue.popleft()
                task.state = _State.RUNNING
                lane.running += 1
                lane.bytes += task.size
                self._running += 1
                self._bytes += task.size
                self.peak_bytes = max(self.peak_bytes, self._bytes)
                self._handed.append(task)
        if len(self._handed) > ready:
            self._changed.notify(len(self._handed) - ready)
        while len(self._handed) > self._idle + self._starting:
            try:
                threading.Thread(target=self._loop, name="fetch", daemon=True).start()
            except RuntimeError as error:
                _log.error("%s: %d tasks wait for a thread", error, len(self._handed))
                return  # a thread that gets ready takes the task, or the next dispatch starts one
            self._starting += 1

    def _has_room(self, lane: _Lane, size: int) -> bool:
        if not lane.running:
            return True
        return (
            lane.running < (self._count // _PROBES if lane.hangs else self._count)
            and lane.bytes + size <= self._size
            and self._running < _STORES_AT_FULL * self._count
            and self._bytes + size <= _STORES_AT_FULL * self._size
        )

    def _give_back(self, lane: _Lane, task: Task) -> None:
        lane.running -= 1
        lane.bytes -= task.size
        self._running -= 1
        self._bytes -= task.size

    def _forget(self, store: str, lane: _Lane) -> None:
        if not (lane.queue or lane.running or lane.written_off):
            self._lanes.pop(store, None)

    def _loop(self) -> None:
        with self._changed:
            self._starting -= 1
            task = self._next()
        while task is not None:
            answered = False
            try:
                answered = task.work()
            except Exception:  # noqa: BLE001 - the thread goes on with other work
                _log.exception("unexpected failure in work on %s", task.store)
            with self._changed:
                self._end(task, answered)
                task = self._next()

    def _end(self, task: Task, answered: bool) -> None:
        lane = self._lanes[task.store]
        if task.state is _State.WRITTEN_OFF:
            lane.written_off -= 1
        else:
            self._give_back(lane, task)
        task.state = _State.OVER
        lane.hangs = lane.hangs and not answered
        self._forget(task.store, lane)

    def _next(self) -> Task | None:
        """Something to do for this thread; None if there was nothing for a while. The lock is held."""
        self._idle += 1
        try:
            self._dispatch(ready=1)
            while not self._handed:
                if self._closed or not self._changed.wait(_IDLE):
                    break
            return self._handed.popleft() if self._handed else None
        finally:
            self._idle -= 1
