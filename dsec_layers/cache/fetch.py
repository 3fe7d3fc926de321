"""Fetching with bounds: so many at once and so many bytes at once of each store, each with a deadline; a failed attempt waits without holding a slot.

::

    absent ──slot──> asked ──verified──> landed ──kept──> present
       ^               │ bad answer, no answer                        at the deadline, or after too many bad answers:
       └────pause──────┘                                              ──────────────────────────────────> given up

An answer that is wrong (length, frame, digest) or says "no such blob" is asked for again a few times, the next time elsewhere if there is an elsewhere;
a store that does not answer is asked until the deadline. Waiters are told once, at the deadline at the latest, even if a read hangs: then the thread is left
to hang and another takes its slot. What it brings late is verified and kept like anything else, unless the fetcher is closed; nobody is told.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol, TypeAlias

from dsec_layers.cache.directio import aligned_buffer
from dsec_layers.cache.slots import StoreSlots, Task
from dsec_layers.digest import Buffer
from dsec_layers.errors import CorruptError, DsecError, NotFound, StoreError
from dsec_layers.fsio import map_os_error
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store

__all__ = ["Counters", "Fetch", "FetchLimits", "Fetcher", "Place", "State", "Waiter"]

_log = logging.getLogger(__name__)

Waiter: TypeAlias = Callable[[DsecError | None], None]

_END: Final = 10.0
"""Seconds that ``close`` waits for writes to the local disk, and for the timer."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of the fetcher.

    ``fetches``: at once, of one store; ``bytes``: stored and decompressed bytes in flight, of one store (of all together at most four times as much);
    ``deadline``: seconds until a reader gets an error; ``pause``, ``longest_pause``: seconds before the second attempt, doubled each time;
    ``bad_answers``: wrong answers until a reader gets an error.
    """

    fetches: int = 16
    bytes: int = 64 << 20
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


class Place(Protocol):
    """Where on this host a segment belongs. Called in fetcher threads."""

    def is_here(self) -> bool:
        """Whether the segment is here after all; asked before anything is fetched."""

    def keep(self, data: Buffer) -> None:
        """Make verified bytes visible. The buffer is the thread's own and used again afterwards."""

    def close(self) -> None:
        """Called once, when neither of the others will be called again."""


class State(Enum):
    """How far a fetch is. ``PRESENT`` and ``GIVEN_UP`` are for good."""

    ABSENT = "waiting for its turn"
    ASKED = "the store has not answered"
    LANDED = "writing it to the cache"
    PRESENT = "present"
    GIVEN_UP = "given up"


_OUTCOMES: Final = (State.PRESENT, State.GIVEN_UP)


@dataclass(slots=True, eq=False)
class Fetch:
    """One segment on its way. ``pieces``: where it can be had, best first. ``waiters``: told the outcome, in a fetcher thread or the timer's."""

    pieces: Sequence[Segment]
    place: Place
    waiters: list[Waiter] = field(default_factory=list)
    state: State = State.ABSENT
    due: float = 0.0
    attempts: int = 0
    bad: int = 0
    last: DsecError | None = None
    task: Task | None = None
    threads: int = 0
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, waiter: Waiter) -> bool:
        """Add a waiter, unless the outcome is known."""
        with self.lock:
            if self.state in _OUTCOMES:
                return False
            self.waiters.append(waiter)
            return True

    def enter(self) -> bool:
        """A thread begins to work on it; False if the outcome is known."""
        with self.lock:
            if self.state in _OUTCOMES:
                return False
            self.threads += 1  # the one before may not have left yet
            return True

    def leave(self) -> None:
        """That thread is done with it for now."""
        with self.lock:
            self.threads -= 1
        self.close_if_over()

    def move(self, state: State) -> None:
        """The next state, unless the outcome is known."""
        with self.lock:
            if self.state not in _OUTCOMES:
                self.state = state

    def settle(self, outcome: State) -> list[Waiter] | None:
        """The outcome, once; returns who is to be told, or None if there was one already."""
        with self.lock:
            if self.state in _OUTCOMES:
                return None
            self.state = outcome
            waiters, self.waiters = self.waiters, []
            return waiters

    def close_if_over(self) -> None:
        """Close the place when the outcome is known and no thread is at work."""
        with self.lock:
            if self.closed or self.threads or self.state not in _OUTCOMES:
                return
            self.closed = True
        try:
            self.place.close()
        except Exception:  # noqa: BLE001 - the others must go on
            _log.exception("unexpected failure while closing %s", self.pieces[0])


class Fetcher:
    """Runs fetches. ``opener`` gives the store of a URL and may be called from several threads."""

    def __init__(self, opener: Callable[[str], Store], limits: FetchLimits | None = None) -> None:
        self.limits = limits or FetchLimits()
        self._opener = opener
        self._slots = StoreSlots(self.limits.fetches, self.limits.bytes)
        self._counters = Counters()
        self._counting = threading.Lock()
        self._local = threading.Condition()
        self._at_work = 0
        self._closed = False
        self._timer = _Timer()

    def submit(self, fetch: Fetch) -> None:
        """Start a fetch; returns at once."""
        fetch.due = time.monotonic() + self.limits.deadline
        self._timer.call_at(fetch.due, lambda: self._expire(fetch))
        self._queue(fetch)

    def close(self) -> None:
        """Stop: whoever waits gets an error, and what hangs is left alone. Ends within some seconds; nothing is kept afterwards."""
        with self._local:
            self._closed = True
        self._slots.close()
        self._timer.close()
        with self._local:
            if not self._local.wait_for(lambda: not self._at_work, _END):
                _log.error("a write to the cache hangs")

    def count(self, **more: int) -> None:
        """Add to counters."""
        with self._counting:
            for name, amount in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def snapshot(self) -> Counters:
        """The counters as they are now."""
        with self._counting:
            return replace(self._counters, peak_bytes=self._slots.peak_bytes)

    def _queue(self, fetch: Fetch) -> None:
        """Have an attempt made as soon as the store whose turn it is has a slot."""
        piece = fetch.pieces[fetch.attempts % len(fetch.pieces)]
        with fetch.lock:
            if fetch.state in _OUTCOMES:
                return
            fetch.state = State.ABSENT
            fetch.task = self._slots.submit(piece.store, piece.stored + piece.size, lambda: self._run(fetch))

    def _run(self, fetch: Fetch) -> bool:
        """One turn of a fetch, in a slot of the store whose turn it is; whether that answered."""
        if not fetch.enter():
            return False
        attempts = fetch.attempts
        try:
            self._advance(fetch)
        except DsecError as error:  # of the place: this disk, not the store
            self._settle(fetch, error)
        except OSError as error:
            self._settle(fetch, map_os_error(error, "cache"))
        except Exception as error:  # noqa: BLE001 - a reader waits: it must get an answer whatever happened
            _log.exception("unexpected failure while fetching %s", fetch.pieces[0])
            self._settle(fetch, StoreError(f"{fetch.pieces[0]}: {error!r}"))
        asked = fetch.attempts > attempts
        fetch.leave()
        return asked

    def _advance(self, fetch: Fetch) -> None:
        """Take a fetch from absent to present, or to its next attempt, or to giving up."""
        with self._local_work():
            here = fetch.place.is_here()
        if here:
            self._settle(fetch, None)
            return
        if time.monotonic() + self.limits.pause >= fetch.due:
            return  # nothing comes of a question so late; the timer is about to tell the waiters
        piece = fetch.pieces[fetch.attempts % len(fetch.pieces)]
        fetch.attempts += 1
        fetch.move(State.ASKED)
        try:
            data = read_segment(self._opener(piece.store), piece, aligned_buffer(piece.size))
        except (DsecError, OSError) as error:
            self._ask_again(fetch, map_os_error(error, str(piece)) if isinstance(error, OSError) else error)
            return
        fetch.move(State.LANDED)
        self.count(segments=1, bytes=piece.stored)
        with self._local_work():
            fetch.place.keep(data)
        self._settle(fetch, None)

    def _ask_again(self, fetch: Fetch, error: DsecError) -> None:
        """After a failed attempt: the next one later, at another source at once; or none."""
        if isinstance(error, CorruptError | NotFound):
            fetch.bad += 1
            self.count(bad_answers=1)
        fetch.move(State.ABSENT)
        fetch.last = error
        when = time.monotonic() + self._pause(fetch)
        if fetch.bad >= self.limits.bad_answers * len(fetch.pieces) or when >= fetch.due:
            self._settle(fetch, error)
            return
        self.count(retries=1)
        _log.warning("%s; attempt %d in %.2f s", error.message, fetch.attempts + 1, when - time.monotonic())
        self._timer.call_at(when, lambda: self._queue(fetch))

    def _pause(self, fetch: Fetch) -> float:
        """Seconds until the next attempt: none as long as there is a source that was not asked in this round."""
        rounds, asked = divmod(fetch.attempts, len(fetch.pieces))
        return 0.0 if asked else min(self.limits.pause * 2 ** min(rounds - 1, 20), self.limits.longest_pause)

    @contextmanager
    def _local_work(self) -> Iterator[None]:
        """Work on the cache directory, which is not the fetcher's any more once it is closed."""
        with self._local:
            if self._closed:
                raise StoreError("the cache is closed")
            self._at_work += 1
        try:
            yield
        finally:
            with self._local:
                self._at_work -= 1
                self._local.notify_all()

    def _expire(self, fetch: Fetch) -> None:
        """The deadline: whoever waits gets an error, and a thread that hangs loses its slot to another."""
        why = "the cache is closed" if self._closed else f"not here after {self.limits.deadline:g} s ({fetch.state.value})"
        last = f"; last: {fetch.last.message}" if fetch.last else ""
        if fetch.state not in _OUTCOMES and self._settle(fetch, StoreError(f"{fetch.pieces[0]}: {why}{last}")) and fetch.task is not None:
            self._slots.write_off(fetch.task)

    def _settle(self, fetch: Fetch, error: DsecError | None) -> bool:
        """Tell the outcome, to each waiter whatever another does; False if there was an outcome already."""
        waiters = fetch.settle(State.PRESENT if error is None else State.GIVEN_UP)
        if waiters is None:
            return False
        if error is not None:
            with self._counting:
                self._counters.failures += 1
                self._counters.last_error = error.message
            _log.error("gave up: %s", error.message)
        for waiter in waiters:
            try:
                waiter(error)
            except Exception:  # noqa: BLE001 - the other waiters must be told
                _log.exception("unexpected failure in a waiter for %s", fetch.pieces[0])
        fetch.close_if_over()
        return True


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
        self._thread.join(_END)

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
