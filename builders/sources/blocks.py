"""Byte streams as blocks: raw inputs, taps for hashing and progress, a read-ahead thread, and the window a parser looks through.

A block is an immutable ``bytes`` of about 1 MiB, so that slices of it can be handed on without a copy.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import BinaryIO, Final, Protocol

from dsec_layers.errors import InputError

__all__ = ["BLOCK", "Blocks", "FileBlocks", "PipeBlocks", "ReadAhead", "StreamBlocks", "Tap", "Window", "rewound"]

BLOCK: Final = 1 << 20
"""Bytes in a block: a multiple of a tar record, so that headers of a plain tar never straddle two."""

_DEPTH: Final = 6  # blocks the read-ahead thread may be ahead


class Blocks(Protocol):
    """A stream of bytes. Errors of the medium and of the encoding are raised as InputError."""

    def block(self) -> bytes:
        """The next bytes, never more than a few MiB; empty at the end and ever after."""

    def skip(self, count: int) -> int:
        """Pass over up to ``count`` bytes without reading them; how many were passed over (0 where that is impossible)."""

    def close(self) -> None:
        """Release what the stream holds. Idempotent."""


class FileBlocks:
    """``size`` bytes of a regular file from ``start``, read by pread, so that several readers may share the descriptor. Closing is up to the caller."""

    def __init__(self, fd: int, start: int, size: int, what: str) -> None:
        self._fd, self._at, self._end, self._what = fd, start, start + size, what

    def block(self) -> bytes:
        """The next bytes."""
        try:
            data = os.pread(self._fd, min(BLOCK, self._end - self._at), self._at)
        except OSError as error:
            raise InputError(f"cannot read {self._what}: {error.strerror}") from error
        self._at += len(data)
        return data

    def skip(self, count: int) -> int:
        """Pass over up to ``count`` bytes."""
        count = min(count, self._end - self._at)
        self._at += count
        return count

    def close(self) -> None:
        """Nothing to release."""


_LOOK_UP: Final = 500
"""Milliseconds after which a wait for a pipe is begun again."""


class PipeBlocks:
    """A pipe, socket or terminal; ``close`` also ends a read that waits in another thread."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd, self._what = fd, what
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def block(self) -> bytes:
        """What can be read now, at least one byte."""
        try:
            # Bounded: a signal that comes just before the wait does not end it, and is only seen when it ends.
            while not (ready := self._poll.poll(_LOOK_UP)):
                pass
            if any(fd == self._wake for fd, _ in ready):
                return b""
            return os.read(self._fd, BLOCK)
        except OSError as error:
            raise InputError(f"cannot read {self._what}: {error.strerror}") from error

    def skip(self, count: int) -> int:
        """A pipe cannot skip."""
        return 0

    def interrupt(self) -> None:
        """End a read that waits."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Release the wake-up descriptor, not the pipe."""
        if not self._closed:
            self._closed = True
            os.close(self._wake)


class StreamBlocks:
    """Any binary stream, the caller's to close. A read that waits cannot be ended from outside, unlike one of PipeBlocks."""

    def __init__(self, stream: BinaryIO, what: str) -> None:
        self._stream, self._what = stream, what

    def block(self) -> bytes:
        """The next bytes."""
        try:
            return bytes(self._stream.read(BLOCK) or b"")
        except OSError as error:
            raise InputError(f"cannot read {self._what}: {error.strerror or error}") from error

    def skip(self, count: int) -> int:
        """A stream is not skipped: it may be one that cannot seek."""
        return 0

    def close(self) -> None:
        """Nothing to release."""


class Rewound:
    """A stream with blocks put back in front of it."""

    def __init__(self, first: bytes, rest: Blocks) -> None:
        self._first, self._rest = first, rest

    def block(self) -> bytes:
        """The block put back, then the rest."""
        first, self._first = self._first, b""
        return first or self._rest.block()

    def skip(self, count: int) -> int:
        """Pass over bytes of the rest, once the block put back has been taken."""
        return 0 if self._first else self._rest.skip(count)

    def close(self) -> None:
        """Close the rest."""
        self._rest.close()


def rewound(first: bytes, rest: Blocks) -> Blocks:
    """``rest`` with ``first`` put back in front of it."""
    return Rewound(first, rest)


class Tap:
    """Shows every block that passes to a function: a hash, which must miss nothing, or (``skips``) a progress bar, which may."""

    def __init__(self, inner: Blocks, see: Callable[[bytes], object], *, skips: bool = False) -> None:
        self._inner, self._see, self._skips = inner, see, skips

    def block(self) -> bytes:
        """The next block, after it has been shown."""
        data = self._inner.block()
        if data:
            self._see(data)
        return data

    def skip(self, count: int) -> int:
        """Pass over bytes unseen, if that is allowed here."""
        return self._inner.skip(count) if self._skips else 0

    def close(self) -> None:
        """Close the stream within."""
        self._inner.close()


class ReadAhead:
    """Runs another stream in a thread, a few blocks ahead: decompression releases the interpreter lock, so it goes on beside the parser.

    ``interrupt`` is called at ``close`` to end a read that may wait for long.
    """

    def __init__(self, inner: Blocks, interrupt: Callable[[], None] | None = None) -> None:
        self._inner, self._interrupt = inner, interrupt
        self._ready: deque[bytes | BaseException] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            item: bytes | BaseException
            try:
                item = self._inner.block()
            except BaseException as error:  # noqa: BLE001  (handed to the reader, whatever it is)
                item = error
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < _DEPTH or self._stopped)
                if self._stopped:
                    return
                self._ready.append(item)
                self._changed.notify_all()
            if not item or isinstance(item, BaseException):
                return

    def block(self) -> bytes:
        """The next block, waiting for the thread if need be."""
        if self._ended:
            return b""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
            item = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        self._ended = not item
        return item

    def skip(self, count: int) -> int:
        """What comes out of a thread is not skipped."""
        return 0

    def close(self) -> None:
        """End the thread and close the stream within."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._interrupt is not None and self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._interrupt()
        self._thread.join()
        self._inner.close()


class Window:
    """The current block of a stream and a place in it. ``buffer`` and ``at`` are public because the tar reader's inner loop works on them directly."""

    __slots__ = ("_blocks", "_loaded", "at", "buffer", "view", "what")

    def __init__(self, blocks: Blocks, what: str) -> None:
        self._blocks = blocks
        self._loaded = 0  # stream offset of the end of ``buffer``
        self.what = what
        self.buffer = b""
        self.view = memoryview(b"")
        self.at = 0

    @property
    def offset(self) -> int:
        """Where in the stream the next byte is."""
        return self._loaded - len(self.buffer) + self.at

    def load(self) -> bool:
        """Replace a used-up buffer by the next block. False at the end of the stream."""
        self.buffer = self._blocks.block()
        self.view = memoryview(self.buffer)
        self._loaded += len(self.buffer)
        self.at = 0
        return bool(self.buffer)

    def piece(self, limit: int) -> memoryview:
        """1 to ``limit`` bytes without a copy. Raises InputError at the end of the stream."""
        if self.at >= len(self.buffer) and not self.load():
            raise InputError(f"{self.what} is truncated at byte {self.offset}")
        start = self.at
        self.at = min(start + limit, len(self.buffer))
        return self.view[start : self.at]

    def take(self, count: int) -> memoryview:
        """Exactly ``count`` bytes, copied only if they straddle blocks. Raises InputError if the stream ends before."""
        end = self.at + count
        if end <= len(self.buffer):
            start, self.at = self.at, end
            return self.view[start:end]
        parts = []
        while count:
            parts.append(self.piece(count))
            count -= len(parts[-1])
        return memoryview(b"".join(parts))

    def peek(self, count: int) -> bytes:
        """The next ``count`` bytes, fewer at the end of the stream, without passing over them."""
        while len(self.buffer) - self.at < count and (data := self._blocks.block()):
            self.buffer = self.buffer[self.at :] + data
            self.view = memoryview(self.buffer)
            self._loaded += len(data)
            self.at = 0
        return self.buffer[self.at : self.at + count]

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes. Raises InputError if the stream ends before."""
        inside = min(count, len(self.buffer) - self.at)
        self.at += inside
        count -= inside
        if count:
            passed = self._blocks.skip(count)
            self._loaded += passed
            count -= passed
        while count:
            count -= len(self.piece(count))

    def drain(self) -> None:
        """Read to the end of the stream, for the sake of checksums behind the last byte of interest, and of writers that dislike a closed pipe."""
        while self.load():
            pass
