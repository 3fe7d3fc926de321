"""Fetching with bounds: so many at once, so many bytes at once, each with a deadline; a failed attempt waits without holding a place.

::

    submit ──> pool ──> job.settle()? ──yes──────────────────────────> done(None)
                │            │no
                │        bytes gate ─> read, decode, verify ─> keep ─> done(None)
                │                         │ bad answer, no answer
                └──<── pause (timer) ──<──┘            deadline, or too many bad answers ──> done(error)

An answer that is wrong (length, frame, digest) or says "no such blob" is asked for again a few times, the next time elsewhere if there is an elsewhere;
a store that does not answer is asked until the deadline. ``done`` is called exactly once, at the deadline at the latest, even if a read hangs.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from dsec_layers.cache.directio import aligned_buffer
from dsec_layers.digest import Buffer
from dsec_layers.errors import CorruptError, DsecError, NotFound, StoreError
from dsec_layers.fsio import map_os_error
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store

__all__ = ["Counters", "Fetcher", "Gate", "Job", "Limits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the fetcher.

    ``fetches``: at once; ``bytes``: stored and decompressed bytes in flight; ``deadline``: seconds until a reader gets an error;
    ``pause``, ``longest_pause``: seconds before the second attempt, doubled each time; ``bad_answers``: wrong answers until a reader gets an error.
    """

    fetches: int = 16
    bytes: int = 256 << 20
    deadline: float = 60.0
    pause: float = 0.05
    longest_pause: float = 5.0
    bad_answers: int = 4


@dataclass(slots=True)
class Counters:
    """What the fetcher did since it was made."""

    segments: int = 0
    bytes: int = 0
    retries: int = 0
    bad_answers: int = 0
    failures: int = 0
    healed: int = 0
    peak_bytes: int = 0
    last_error: str = ""


@dataclass(slots=True)
class Job:
    """One segment to be had.

    ``pieces``: where it can be had, best first. ``settle``: whether it is here after all (called before anything is fetched). ``keep``: make verified bytes
    visible; the buffer is the thread's own and used again afterwards. ``done``: told the outcome once, in a fetcher thread or the timer's. ``end``: called once when neither of the others will be called again.
    """

    pieces: Sequence[Segment]
    settle: Callable[[], bool]
    keep: Callable[[Buffer], None]
    done: Callable[[DsecError | None], None]
    end: Callable[[], None]
    due: float = 0.0
    attempts: int = 0
    bad: int = 0
    last: DsecError | None = None
    finished: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


class Gate:
    """A bound on a sum: whoever would exceed it waits. Something larger than the bound passes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._free = threading.Condition()
        self.peak = 0

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Hold ``amount`` while the context lasts."""
        with self._free:
            while self._used and self._used + amount > self._limit:
                self._free.wait()
            self._used += amount
            self.peak = max(self.peak, self._used)
        try:
            yield
        finally:
            with self._free:
                self._used -= amount
                self._free.notify_all()


class Fetcher:
    """Runs jobs. ``opener`` gives the store of a URL and may be called from several threads."""

    def __init__(self, opener: Callable[[str], Store], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._opener = opener
        self._gate = Gate(self.limits.bytes)
        self._counters = Counters()
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(self.limits.fetches, thread_name_prefix="fetch")
        self._timer = _Timer()

    def submit(self, job: Job) -> None:
        """Start a job; returns at once."""
        job.due = time.monotonic() + self.limits.deadline
        self._timer.call_at(job.due, lambda: self._expire(job))
        self._pool.submit(self._run, job)

    def close(self) -> None:
        """Stop; jobs that wait are finished with an error, running ones are waited for."""
        self._timer.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def count(self, **more: int) -> None:
        """Add to counters."""
        with self._counting:
            for name, amount in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def snapshot(self) -> Counters:
        """The counters as they are now."""
        with self._counting:
            return replace(self._counters, peak_bytes=self._gate.peak)

    def _run(self, job: Job) -> None:
        again = False
        try:
            if not job.finished:
                again = self._step(job)
        except DsecError as error:  # from settle and keep: this disk, not the store
            self._finish(job, error)
        except OSError as error:
            self._finish(job, map_os_error(error, "cache"))
        except Exception as error:  # noqa: BLE001 - a reader waits: it must get an answer whatever happened
            _log.exception("unexpected failure while fetching %s", job.pieces[0])
            self._finish(job, StoreError(f"{job.pieces[0]}: {error!r}"))
        if not again:
            job.end()

    def _step(self, job: Job) -> bool:
        """Settle or try once; whether another try follows."""
        if job.settle():
            self._finish(job, None)
            return False
        piece = job.pieces[job.attempts % len(job.pieces)]
        job.attempts += 1
        with self._gate.hold(piece.stored + piece.size):
            try:
                data = read_segment(self._opener(piece.store), piece, aligned_buffer(piece.size))
            except (CorruptError, NotFound) as error:
                job.bad += 1
                self.count(bad_answers=1)
                return self._again(job, error)
            except DsecError as error:
                return self._again(job, error)
            except OSError as error:
                return self._again(job, map_os_error(error, str(piece)))
            self.count(segments=1, bytes=piece.stored)
            job.keep(data)
        self._finish(job, None)
        return False

    def _again(self, job: Job, error: DsecError) -> bool:
        """Try again later, or give up (False). Another source is tried at once, as often as there are sources."""
        job.last = error
        pause = 0.0
        rounds = job.attempts // len(job.pieces)
        if job.attempts % len(job.pieces) == 0:
            pause = min(self.limits.pause * 2 ** min(rounds - 1, 20), self.limits.longest_pause)
        when = time.monotonic() + pause
        if job.bad >= self.limits.bad_answers * len(job.pieces) or when >= job.due:
            self._finish(job, error)
            return False
        self.count(retries=1)
        _log.warning("%s; attempt %d in %.2f s", error.message, job.attempts + 1, pause)
        self._timer.call_at(when, lambda: self._resubmit(job))
        return True

    def _resubmit(self, job: Job) -> None:
        try:
            self._pool.submit(self._run, job)
        except RuntimeError:  # the pool is closed
            self._finish(job, job.last)
            job.end()

    def _expire(self, job: Job) -> None:
        if not job.finished:
            last = f"; last: {job.last.message}" if job.last else ""
            self._finish(job, StoreError(f"{job.pieces[0]}: not here after {self.limits.deadline:g} s{last}"))

    def _finish(self, job: Job, error: DsecError | None) -> None:
        with job.guard:
            if job.finished:
                return
            job.finished = True
        if error is not None:
            self.count(failures=1)
            self._counters.last_error = error.message
            _log.error("gave up: %s", error.message)
        job.done(error)


class _Timer:
    """Calls functions at given times, in one thread. They must be short."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="timer", daemon=True)
        self._thread.start()

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._queue, (when, next(self._order), function))
            if self._queue[0][2] is function:  # else the thread sleeps until something earlier
                self._changed.notify()

    def close(self) -> None:
        """Call what is left now, then stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._queue or self._queue[0][0] > time.monotonic()):
                    self._changed.wait(self._queue[0][0] - time.monotonic() if self._queue else None)
                if not self._queue:
                    return
                function = heapq.heappop(self._queue)[2]
            function()
