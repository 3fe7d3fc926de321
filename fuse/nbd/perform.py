"""What a request does to its export, and the reply that says how it went."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from dsec_layers.blocksource import WritableSource
from dsec_layers.digest import Buffer
from dsec_layers.errors import DsecError
from dsec_layers.fuse.nbd.negotiation import Session
from dsec_layers.fuse.nbd.protocol import (
    MAX_EXTENTS,
    NBD_CMD_BLOCK_STATUS,
    NBD_CMD_CACHE,
    NBD_CMD_FLAG_FAST_ZERO,
    NBD_CMD_FLAG_FUA,
    NBD_CMD_FLAG_NO_HOLE,
    NBD_CMD_FLAG_REQ_ONE,
    NBD_CMD_FLUSH,
    NBD_CMD_READ,
    NBD_CMD_TRIM,
    NBD_CMD_WRITE,
    NBD_ENOTSUP,
    block_status_chunk,
    data_header,
    done_chunk,
    error_reply,
    success_reply,
)
from dsec_layers.fuse.nbd.requests import Refusal, Request, error_of
from dsec_layers.progress import Progress

__all__ = ["Performer", "tidy_extents"]

_ZEROES = bytes(1 << 18)


class Performer:
    """Carries out requests that were found valid. Any thread may call it; it never raises, a failure becomes an error reply."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session = session
        self._export = session.export
        self._disk = session.export.disk
        self._prefetch = session.export.prefetch
        self._progress = progress

    def refuse(self, request: Request, refused: Refusal) -> list[Buffer]:
        """The reply to a request that is not carried out."""
        return [error_reply(request.cookie, refused.error, refused.reason, structured=self._session.structured)]

    def perform(self, request: Request, payload: Buffer) -> list[Buffer]:
        """Carry out ``request``, with ``payload`` for a write, and return its whole reply."""
        try:
            return self._perform(request, payload)
        except Exception as error:  # noqa: BLE001 - a source's failure of any kind is the client's EIO, not the server's end
            self.report(request, error)
            return self.refuse(request, error_of(error))

    def report(self, request: Request, error: Exception) -> None:
        """Tell the operator of a failure, and of a mistake in the source with all there is to find it."""
        what = f"NBD export {self._export.name!r}: command {request.command} for {request.length} bytes at {request.offset} failed: {error}"
        if not isinstance(error, DsecError | OSError):
            what += "\n" + "".join(traceback.format_exception(error))
        self._progress.warning(what)

    def _perform(self, request: Request, payload: Buffer) -> list[Buffer]:
        command = request.command
        if command == NBD_CMD_READ:
            return self._read(request)
        if command == NBD_CMD_BLOCK_STATUS:
            limit = 1 if request.flags & NBD_CMD_FLAG_REQ_ONE else MAX_EXTENTS
            extents = self._export.block_status(request.offset, request.length)
            return [block_status_chunk(request.cookie, tidy_extents(extents, request.length, limit))]
        if command == NBD_CMD_CACHE:
            if self._prefetch is not None and request.length:
                self._prefetch(request.offset, request.length)
        elif self._disk is not None:
            refused = self._change(self._disk, request, payload)
            if refused is not None:
                return self.refuse(request, refused)
        return [success_reply(request.cookie)]

    def _read(self, request: Request) -> list[Buffer]:
        structured = self._session.structured
        if request.length == 0:
            return [done_chunk(request.cookie) if structured else success_reply(request.cookie)]
        data = self._export.source.pread(request.offset, request.length)
        if len(data) != request.length:
            raise DsecError(f"the source gave {len(data)} bytes")
        return [data_header(request.cookie, request.offset, request.length, structured=structured), data]

    def _change(self, disk: WritableSource, request: Request, payload: Buffer) -> Refusal | None:
        _, command, _, offset, length = request
        if command == NBD_CMD_FLUSH:
            disk.flush()
            return None
        if length == 0:
            return None
        if command == NBD_CMD_WRITE:
            disk.pwrite(offset, payload)
        elif command == NBD_CMD_TRIM:
            disk.trim(offset, length)
        else:
            refused = self._zero(disk, request)
            if refused is not None:
                return refused
        if request.flags & NBD_CMD_FLAG_FUA:
            disk.flush()
        return None

    def _zero(self, disk: WritableSource, request: Request) -> Refusal | None:
        """Zero a range. Without holes means with written zeros: a source does not say how ``write_zeroes`` stores them."""
        allocate = bool(request.flags & NBD_CMD_FLAG_NO_HOLE)
        if request.flags & NBD_CMD_FLAG_FAST_ZERO and (allocate or not self._export.fast_zero):
            return Refusal(NBD_ENOTSUP, "zeroing is not faster than writing here")
        if not allocate:
            disk.write_zeroes(request.offset, request.length)
            return None
        end = request.offset + request.length
        for offset in range(request.offset, end, len(_ZEROES)):
            disk.pwrite(offset, memoryview(_ZEROES)[: end - offset])
        return None


def tidy_extents(extents: Iterable[tuple[int, int]], length: int, limit: int) -> list[tuple[int, int]]:
    """Extents as a block status reply wants them: none empty, neighbours different, together at most ``length`` bytes, at most ``limit`` of them.

    Raises ValueError when there is none or the source gave one that is not positive.
    """
    tidy: list[tuple[int, int]] = []
    left = length
    for size, flags in extents:
        if size <= 0:
            raise ValueError(f"an extent of {size} bytes")
        size = min(size, left)
        if tidy and tidy[-1][1] == flags:
            tidy[-1] = (tidy[-1][0] + size, flags)
        elif len(tidy) == limit:
            break
        else:
            tidy.append((size, flags))
        left -= size
        if left == 0:
            break
    if not tidy:
        raise ValueError("no extent for a range within the export")
    return tidy
