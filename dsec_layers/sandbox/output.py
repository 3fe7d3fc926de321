"""What a sandbox writes, into memory and never more than was agreed: a program that prints without end must not fill the caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec_layers.sandbox.box import Outcome, Sandbox
from dsec_layers.sandbox.spec import RunSpec

__all__ = ["Captured", "Collector", "capture"]

LIMIT: Final = 16 << 20
_CHUNK: Final = 1 << 16
_LONGEST_LINE: Final = 4096


@dataclass(frozen=True, slots=True)
class Captured:
    """How a command ended and what it wrote. ``truncated``: it wrote more than the limit; the first bytes were kept."""

    outcome: Outcome
    stdout: bytes
    stderr: bytes
    truncated: bool


def capture(
    spec: RunSpec,
    lowerdirs: Sequence[Path],
    *,
    state: Path,
    environ: Mapping[str, str] | None = None,
    limit: int = LIMIT,
    timeout: float | None = None,
) -> Captured:
    """Run one command to its end and return what it wrote, at most ``limit`` bytes a stream; the rest is read and dropped.

    Raises TimeoutError after ``timeout`` seconds, having ended the sandbox. Other parameters: see Sandbox.
    """
    out, err = Collector(limit), Collector(limit)
    try:
        with Sandbox(spec, lowerdirs, state=state, environ=environ, stdout=out.fd, stderr=err.fd) as box:
            outcome = box.wait(timeout)
    finally:
        stdout, stderr = out.finish(), err.finish()
    return Captured(outcome, stdout, stderr, out.truncated or err.truncated)


class Collector:
    """A pipe's write end to give away as ``fd``, and a thread that keeps the first ``limit`` bytes, or the last ones with ``tail``.

    ``line`` is called with every line as soon as it is whole (its first 4096 bytes, without the line end), from the thread.
    """

    def __init__(self, limit: int = LIMIT, *, tail: bool = False, line: Callable[[str], None] | None = None) -> None:
        read, self.fd = os.pipe2(os.O_CLOEXEC)
        self.truncated = False
        self._limit = limit
        self._tail = tail
        self._line = line
        self._rest = b""
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._collect, args=(read,), daemon=True, name="sandbox-collector")
        self._thread.start()

    def finish(self) -> bytes:
        """Close the write end, wait for the last byte, and return what was kept. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._thread.join()
        return bytes(self._kept)

    def _collect(self, read: int) -> None:
        try:
            while data := os.read(read, _CHUNK):
                self._keep(data)
                if self._line is not None:
                    self._split(data, self._line)
            if self._rest and self._line is not None:
                self._line(self._rest.decode(errors="replace"))
        finally:
            os.close(read)

    def _keep(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > self._limit:
            self.truncated = True
            if self._tail:
                del self._kept[: len(self._kept) - self._limit]
            else:
                del self._kept[self._limit :]

    def _split(self, data: bytes, line: Callable[[str], None]) -> None:
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = self._rest + whole[0]
            self._rest = b""
        for text in whole:
            line(text[:_LONGEST_LINE].rstrip(b"\r").decode(errors="replace"))
        self._rest = (self._rest + rest)[:_LONGEST_LINE]
