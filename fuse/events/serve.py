"""Serving the kernel's readers: events in, segments fetched, answers out."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec_layers.cache.segments import SegmentCache, errno_of
from dsec_layers.errors import DsecError
from dsec_layers.fuse.events.keeper import Hand
from dsec_layers.linux.fanotify import answer, parse_events
from dsec_layers.segment import Segment

__all__ = ["EventServer"]

_log = logging.getLogger(__name__)

_MOST_IN_HAND: Final = 16_384
"""Readers being served at once; more wait in the kernel's queue, which costs nothing here."""

_DEAD: Final = (errno.EBADF, errno.EINVAL, errno.ENOTTY)
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0
"""Seconds between two tries to read a group that gives errors."""


class EventServer:
    """Reads events from a group in one thread, has the segments fetched, answers from the fetcher's threads.

    ``find``: where the segment with a digest can be had (empty if no known layer has it). Readers of files that are not in the cache's two segment
    folders, such as those of a mount that has outlived its group, get EIO. ``descriptors``: how many this process may have open.
    """

    def __init__(
        self, group: int, hand: Hand, cache: SegmentCache, find: Callable[[bytes], Sequence[Segment]], *, descriptors: int = 65_536
    ) -> None:
        self._group = group
        self._hand = hand
        self._cache = cache
        self._find = find
        self._folders = (f"{cache.directory.absent}/", f"{cache.directory.present}/")
        self._room = threading.Semaphore(max(64, min(_MOST_IN_HAND, descriptors // 2)))
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._loop, name="events", daemon=True)
        self._stopping = False
        self.events = 0

    def start(self) -> None:
        """Take over the events that an earlier worker left unanswered, then serve."""
        left = self._hand.numbers()
        for number, digest in left.items():
            self._hand.add(number, digest)
        self._hand.clear_buffer()
        if left:
            _log.warning("taking over %d events of the worker before", len(left))
        for number, digest in left.items():
            self._room.acquire()
            self._dispatch(number, digest)
        self._thread.start()

    def stop(self) -> None:
        """Read no more events. Those in hand are answered as their fetches end."""
        self._stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join()

    def _loop(self) -> None:
        poll, wake = select.poll(), select.poll()
        poll.register(self._group, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        wake.register(self._wake_read, select.POLLIN)
        pause = _FIRST_PAUSE
        while True:
            poll.poll()
            if self._stopping:
                return
            try:
                self._read()
            except BlockingIOError:
                continue  # the reader was killed meanwhile
            except OSError as error:
                if error.errno in _DEAD:
                    _log.error("cannot read events: %s", error)
                    return  # the descriptor is no group any more: trying again would only fill the log
                _log.error("cannot read events, next try in %.1f s: %s", pause, error)
                wake.poll(pause * 1000)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                pause = _FIRST_PAUSE

    def _read(self) -> None:
        count = os.readv(self._group, [self._hand.buffer])
        events = parse_events(self._hand.buffer[:count])
        for event in events:
            if event.fd >= 0:
                self._hand.add(event.fd)
        self._hand.clear_buffer(count)
        self.events += len(events)
        for event in events:
            if event.fd < 0:  # no descriptor could be opened: the kernel has refused the reader
                _log.error("no descriptor for an event of process %d: %s", event.pid, os.strerror(-event.fd))
            elif event.pid == os.getpid() and self._cache.is_own_write(_path_of(event.fd).name):
                self._close(event.fd, 0)  # this process fills the segment by its name
            else:
                self._room.acquire()
                self._dispatch(event.fd, b"")

    def _dispatch(self, number: int, digest: bytes) -> None:
        """Have the segment of an event fetched; ``digest`` if a worker before knew it."""
        try:
            self._serve(number, digest)
        except Exception:  # noqa: BLE001 - a reader waits: it must get an answer whatever happened
            _log.exception("unexpected failure while serving event %d: its reader gets EIO", number)
            self._answer(number, errno.EIO)

    def _serve(self, number: int, digest: bytes) -> None:
        try:
            folder, digest = self._identify(number, digest)
        except (OSError, ValueError) as error:
            _log.error("event %d is about no segment of this cache (%s): its reader gets EIO", number, error)
            self._answer(number, errno.EIO)
            return
        self._hand.add(number, digest)
        if folder == self._folders[1]:
            self._answer(number, 0)
            return
        pieces = self._find(digest)
        if not pieces:
            _log.error("segment %s belongs to no layer known here: its reader gets EIO", digest.hex())
            self._answer(number, errno.EIO)
            return

        def done(error: DsecError | None) -> None:
            self._answer(number, errno_of(error))

        self._cache.want(pieces, done, number)

    def _identify(self, number: int, digest: bytes) -> tuple[str, bytes]:
        """(folder, digest) of the file behind an event descriptor. ValueError if it is none of ours."""
        path = str(_path_of(number)).removesuffix(" (deleted)")
        for folder in self._folders:
            if path.startswith(folder):
                found = bytes.fromhex(path[len(folder) :])
                if len(found) == 32 and digest in (b"", found):
                    return folder, found
        raise ValueError(path)

    def _answer(self, number: int, code: int) -> None:
        self._close(number, code)
        self._room.release()

    def _close(self, number: int, code: int) -> None:
        try:
            answer(self._group, number, code)
        except OSError as error:
            _log.error("cannot answer event %d: %s", number, error)
        # Not before it is answered, and before the number can be given to another event:
        self._hand.drop(number)
        with suppress(OSError):
            os.close(number)


def _path_of(number: int) -> Path:
    return Path(f"/proc/self/fd/{number}").readlink()
