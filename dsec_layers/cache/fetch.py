"""Fetching with bounds: so many at once and so many bytes at once of each store, each with a deadline; a failed attempt waits without holding a slot.

::

    absent ──slot──> asked ──verified──> landed ──kept──> present
       ^               │ bad answer, no answer                        at the deadline, or after too many bad answers:
       └────pause──────┘                                              ──────────────────────────────────> given up

Each source of a fetch goes this way on its own: the second begins when the first has failed once or has not answered in its share of the deadline, and the
first right answer wins. An answer that is wrong (length, frame, digest) or says "no such blob" is asked for again a few times, what is no blob at all is not;
a store that does not answer is asked until the deadline. Waiters are told once, at the deadline at the latest, even if a read hangs: then the thread is left
to hang and another takes its slot. What it brings late is verified and kept like anything else, unless the fetcher is closed; nobody is told.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar, cast

from dsec_layers.cache.directio import aligned_buffer
from dsec_layers.cache.slots import StoreSlots, Task
from dsec_layers.cache.timer import Timer
from dsec_layers.digest import Buffer, Digest
from dsec_layers.errors import CorruptError, DsecError, NotFound, StoreError
from dsec_layers.fsio import map_os_error
from dsec_layers.segment import Segment, read_segment
from dsec_layers.store.base import Store

__all__ = ["Counters", "Fetch", "FetchLimits", "Fetcher", "Place", "Question", "State", "Waiter"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Waiter: TypeAlias = Callable[[DsecError | None], None]

_END: Final = 10.0
"""Seconds that ``close`` waits for writes to the local disk, and for the timer."""

_REMEMBERED: Final = 1.0
"""Seconds, or half of the deadline if that is less, for which a fetch that was given up at its deadline fails again at once while its stores hang."""

_GRACE: Final = 0.02
"""Seconds that such a failure takes: a store that was just healed may answer what it was asked before."""


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


@dataclass(frozen=True, slots=True)
class Question(Generic[_T]):
    """Anything else to be asked of one store, under the same bounds. ``name``: the same for the same question; ``size``: bytes that it takes in memory.

    ``read``: asks; each read of the store that ends well begins the deadline anew, so that what is long may take long.
    """

    store: str
    name: str
    read: Callable[[Store], _T]
    size: int = 0
    stored: int = 0

    def __str__(self) -> str:
        return f"{self.name} in {self.store}"


@dataclass(slots=True, eq=False)
class _Source:
    """One place where a fetch can be had, and how far asking there is. ``bad``: wrong answers. ``task``: of the last attempt."""

    piece: Segment | Question[Any]
    state: State = State.ABSENT
    attempts: int = 0
    bad: int = 0
    task: Task | None = None


@dataclass(slots=True, eq=False)
class Fetch:
    """One segment on its way. ``pieces``: where it can be had, best first. ``waiters``: told the outcome, in a fetcher thread or the timer's.

    ``begun``, ``left``: how many of the sources were asked, and how many may still give it.
    """

    pieces: Sequence[Segment | Question[Any]]
    place: Place
    waiters: list[Waiter] = field(default_factory=list)
    sources: list[_Source] = field(init=False)
    outcome: State | None = None
    due: float = 0.0
    begun: int = 0
    left: int = field(init=False)
    last: DsecError | None = None
    threads: int = 0
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.sources = [_Source(piece) for piece in self.pieces]
        self.left = len(self.sources)

    @property
    def state(self) -> State:
        """The outcome, or how far the source is that got farthest."""
        order = list(State)
        return self.outcome or max((source.state for source in self.sources), key=order.index)

    def join(self, waiter: Waiter) -> bool:
        """Add a waiter, unless the outcome is known."""
        with self.lock:
            if self.outcome is not None:
                return False
            self.waiters.append(waiter)
            return True

    def enter(self) -> bool:
        """A thread begins to work on it; False if the outcome is known."""
        with self.lock:
            if self.outcome is not None:
                return False
            self.threads += 1  # the one before may not have left yet
            return True

    def leave(self) -> None:
        """That thread is done with it for now."""
        with self.lock:
            self.threads -= 1
        self.close_if_over()

    def begin(self, number: int) -> bool:
        """Source ``number`` is asked from now on; False if it was before, or if there is none."""
        with self.lock:
            if number != self.begun or number >= len(self.sources):
                return False
            self.begun += 1
            return True

    def exhaust(self) -> bool:
        """One source less; whether it was the last."""
        with self.lock:
            self.left -= 1
            return self.left == 0

    def settle(self, outcome: State) -> list[Waiter] | None:
        """The outcome, once; returns who is to be told, or None if there was one already."""
        with self.lock:
            if self.outcome is not None:
                return None
            self.outcome = outcome
            waiters, self.waiters = self.waiters, []
            return waiters

    def close_if_over(self) -> None:
        """Close the place when the outcome is known and no thread is at work."""
        with self.lock:
            if self.closed or self.threads or self.outcome is None:
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
        self._failed: dict[str, tuple[float, DsecError]] = {}  # those of the longest ago first
        self._local = threading.Condition()
        self._at_work = 0
        self._closed = False
        self._timer = Timer(_END)

    def submit(self, fetch: Fetch) -> None:
        """Start a fetch; returns at once."""
        fetch.due = time.monotonic() + self.limits.deadline
        failure = self._failure(fetch)
        if failure is None:
            self._start(fetch)
        else:
            self._timer.call_at(time.monotonic() + _GRACE, lambda: self._refuse(fetch, failure))

    def ask(self, question: Question[_T]) -> _T:
        """The answer to a question, waited for. Raises StoreError at the deadline, and what was the matter."""
        answer: _Answer[_T] = _Answer()
        self.submit(Fetch([question], answer, [answer.tell]))
        answer.told.wait()
        if answer.error is not None:
            raise _named(answer.error, question.store)
        return answer.values[0]

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

    def _start(self, fetch: Fetch) -> None:
        self._timer.call_at(fetch.due, lambda: self._expire(fetch))
        self._begin(fetch, 0)

    def _refuse(self, fetch: Fetch, failure: DsecError) -> None:
        """Give up what was given up a moment ago, unless the store has answered something by now."""
        if self._hang(fetch):
            self._settle(fetch, failure)
        else:
            self._start(fetch)

    def _begin(self, fetch: Fetch, number: int) -> None:
        """Ask a source for the first time; the next one when this one has not answered in its share of the deadline, at once if its store hangs anyway."""
        if not fetch.begin(number):
            return
        hangs = self._slots.hangs(fetch.pieces[number].store)
        self._queue(fetch, fetch.sources[number])
        if number + 1 < len(fetch.sources):
            share = 0.0 if hangs else self.limits.deadline / len(fetch.sources)
            self._timer.call_at(time.monotonic() + share, lambda: self._begin(fetch, number + 1))

    def _queue(self, fetch: Fetch, source: _Source) -> None:
        """Have an attempt made as soon as the source's store has a slot."""
        piece = source.piece
        with fetch.lock:
            if fetch.outcome is None:
                source.task = self._slots.submit(piece.store, piece.stored + piece.size, lambda: self._run(fetch, source))

    def _run(self, fetch: Fetch, source: _Source) -> bool:
        """One turn of a fetch, in a slot of the source's store; whether that answered."""
        if not fetch.enter():
            return False
        attempts = source.attempts
        try:
            self._advance(fetch, source)
        except DsecError as error:  # of the place: this disk, not the store
            self._settle(fetch, error)
        except OSError as error:
            self._settle(fetch, map_os_error(error, "cache"))
        except Exception as error:  # noqa: BLE001 - a reader waits: it must get an answer whatever happened
            _log.exception("unexpected failure while fetching %s", source.piece)
            self._settle(fetch, StoreError(f"{source.piece}: {error!r}"))
        asked = source.attempts > attempts
        fetch.leave()
        return asked

    def _advance(self, fetch: Fetch, source: _Source) -> None:
        """Take a fetch from absent to present, or to its next attempt at this source, or to giving it up."""
        with self._local_work():
            here = fetch.place.is_here()
        if here:
            self._settle(fetch, None)
            return
        if time.monotonic() + self.limits.pause >= fetch.due:
            return  # nothing comes of a question so late; the timer is about to tell the waiters
        source.attempts += 1
        source.state = State.ASKED
        try:
            data = self._read(fetch, source.piece)
        except (DsecError, OSError) as error:
            self._ask_again(fetch, source, map_os_error(error, str(source.piece)) if isinstance(error, OSError) else error)
            return
        source.state = State.LANDED
        if isinstance(source.piece, Segment):
            self.count(segments=1, bytes=source.piece.stored)
        with self._local_work():
            fetch.place.keep(data)
        self._settle(fetch, None)

    def _read(self, fetch: Fetch, piece: Segment | Question[Any]) -> Any:
        """One attempt."""
        store = self._opener(piece.store)
        if isinstance(piece, Segment):
            return read_segment(store, piece, aligned_buffer)
        return piece.read(cast(Store, _Heard(store, lambda: self._heard(fetch))))

    def _heard(self, fetch: Fetch) -> None:
        """The store gave a part of an answer: the deadline begins anew."""
        if self._closed:
            raise StoreError("the cache is closed")
        fetch.due = time.monotonic() + self.limits.deadline

    def _ask_again(self, fetch: Fetch, source: _Source, error: DsecError) -> None:
        """After a failed attempt: the next one later, if it may have another outcome; and the next source at once, if it was not asked yet."""
        source.state = State.ABSENT
        fetch.last = error
        if not isinstance(error, StoreError):
            source.bad += 1
            self.count(bad_answers=1)
        self._begin(fetch, fetch.sources.index(source) + 1)
        pause = min(self.limits.pause * 2 ** min(source.attempts - 1, 20), self.limits.longest_pause)
        when = time.monotonic() + pause
        if _is_final(error, source.piece) or source.bad >= self.limits.bad_answers or when >= fetch.due:
            if fetch.exhaust():
                self._settle(fetch, error)
            return
        self.count(retries=1)
        _log.warning("%s; attempt %d in %.2f s", error.message, source.attempts + 1, pause)
        self._timer.call_at(when, lambda: self._queue(fetch, source))

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
        """The deadline: whoever waits gets an error, and threads that hang, whoever waits or not, lose their slots to others."""
        if not self._closed and time.monotonic() < fetch.due:
            self._timer.call_at(fetch.due, lambda: self._expire(fetch))
            return
        why = "the cache is closed" if self._closed else f"not here after {self.limits.deadline:g} s ({fetch.state.value})"
        last = f"; last: {fetch.last.message}" if fetch.last else ""
        error = StoreError(f"{fetch.pieces[0]}: {why}{last}")
        for source in fetch.sources:
            if source.task is not None:
                self._slots.write_off(source.task)
        if fetch.outcome is None:
            if isinstance(fetch.pieces[0], Segment):
                self._remember(fetch, error)
            self._settle(fetch, error)

    def _remember(self, fetch: Fetch, error: DsecError) -> None:
        """What was given up now is not waited for again by those who ask for it next: a kernel that was refused a range asks again page by page."""
        now = time.monotonic()
        with self._counting:
            while self._failed and (oldest := next(iter(self._failed.items())))[1][0] <= now:
                del self._failed[oldest[0]]
            self._failed.pop(fetch.pieces[0].name, None)
            self._failed[fetch.pieces[0].name] = (now + min(_REMEMBERED, self.limits.deadline / 2), error)

    def _failure(self, fetch: Fetch) -> DsecError | None:
        """The error that ended the same fetch a moment ago, as long as no store that has it has answered anything since."""
        with self._counting:
            until, error = self._failed.get(fetch.pieces[0].name, (0.0, None))
        return error if time.monotonic() < until and self._hang(fetch) else None

    def _hang(self, fetch: Fetch) -> bool:
        return all(self._slots.hangs(piece.store) for piece in fetch.pieces)

    def _settle(self, fetch: Fetch, error: DsecError | None) -> bool:
        """Tell the outcome, to each waiter whatever another does; False if there was an outcome already."""
        waiters = fetch.settle(State.PRESENT if error is None else State.GIVEN_UP)
        if waiters is None:
            return False
        if error is not None:
            with self._counting:
                self._counters.failures += 1
                self._counters.last_error = error.message
            nobody_knows = isinstance(error, NotFound) and isinstance(fetch.pieces[0], Question)  # whoever asked hears of it
            _log.log(logging.INFO if nobody_knows else logging.ERROR, "gave up: %s", error.message)
        for waiter in waiters:
            try:
                waiter(error)
            except Exception:  # noqa: BLE001 - the other waiters must be told
                _log.exception("unexpected failure in a waiter for %s", fetch.pieces[0])
        fetch.close_if_over()
        return True


class _Answer(Generic[_T]):
    """The place of a question, and its waiter."""

    def __init__(self) -> None:
        self.values: list[_T] = []
        self.error: DsecError | None = None
        self.told = threading.Event()

    def is_here(self) -> bool:
        """Never."""
        return False

    def keep(self, data: Any) -> None:
        """The answer."""
        self.values.append(data)

    def close(self) -> None:
        """Nothing is held."""

    def tell(self, error: DsecError | None) -> None:
        """The outcome."""
        self.error = error
        self.told.set()


class _Heard:
    """A store that says when it has read something."""

    def __init__(self, store: Store, heard: Callable[[], None]) -> None:
        self._store = store
        self._heard = heard

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """See Store."""
        data = self._store.read(digest, offset, length)
        self._heard()
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _is_final(error: DsecError, piece: Segment | Question[Any]) -> bool:
    """Whether asking the same store again cannot help. Bytes that are wrong are asked for a few times: the wire may have changed them."""
    if isinstance(error, NotFound):
        return isinstance(piece, Question)  # a manifest that nobody knows is the caller's mistake far more often than the store's
    return not isinstance(error, StoreError | CorruptError) or (isinstance(error, CorruptError) and error.final)


def _named(error: DsecError, url: str) -> DsecError:
    """The same error, which names the store."""
    if url in error.message:
        return error
    named = copy(error)
    named.message = f"{error.message} (from {url})"
    named.args = (named.message,)
    return named
