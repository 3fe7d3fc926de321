"""Which requests are refused, with which error, and how failures of a source become NBD errors. No I/O.

Source: doc/proto.md, "Request types", "Command flags", "Size constraints", "Error values".
"""

from __future__ import annotations

import errno
from typing import NamedTuple

from dsec_layers.errors import DsecError, Interrupted, NoSpace, UsageError
from dsec_layers.fuse.nbd.negotiation import Session
from dsec_layers.fuse.nbd.protocol import (
    MAX_PAYLOAD,
    NBD_CMD_BLOCK_STATUS,
    NBD_CMD_CACHE,
    NBD_CMD_FLAG_DF,
    NBD_CMD_FLAG_FAST_ZERO,
    NBD_CMD_FLAG_FUA,
    NBD_CMD_FLAG_NO_HOLE,
    NBD_CMD_FLAG_REQ_ONE,
    NBD_CMD_FLUSH,
    NBD_CMD_READ,
    NBD_CMD_TRIM,
    NBD_CMD_WRITE,
    NBD_CMD_WRITE_ZEROES,
    NBD_EINVAL,
    NBD_EIO,
    NBD_ENOMEM,
    NBD_ENOSPC,
    NBD_EOVERFLOW,
    NBD_EPERM,
    NBD_ESHUTDOWN,
    NBD_FLAG_READ_ONLY,
    NBD_FLAG_SEND_CACHE,
)

__all__ = ["Refusal", "Request", "error_of", "refusal"]

_FLAGS = {
    NBD_CMD_READ: NBD_CMD_FLAG_DF,
    NBD_CMD_WRITE: 0,
    NBD_CMD_FLUSH: 0,
    NBD_CMD_TRIM: 0,
    NBD_CMD_CACHE: 0,
    NBD_CMD_WRITE_ZEROES: NBD_CMD_FLAG_NO_HOLE | NBD_CMD_FLAG_FAST_ZERO,
    NBD_CMD_BLOCK_STATUS: NBD_CMD_FLAG_REQ_ONE,
}
_WRITING = frozenset({NBD_CMD_WRITE, NBD_CMD_TRIM, NBD_CMD_WRITE_ZEROES})
_BEYOND = {NBD_CMD_WRITE: NBD_ENOSPC, NBD_CMD_WRITE_ZEROES: NBD_ENOSPC}

_ERRNO = {
    errno.EPERM: NBD_EPERM,
    errno.EACCES: NBD_EPERM,
    errno.EROFS: NBD_EPERM,
    errno.ENOMEM: NBD_ENOMEM,
    errno.EINVAL: NBD_EINVAL,
    errno.ENOSPC: NBD_ENOSPC,
    errno.EDQUOT: NBD_ENOSPC,
    errno.EFBIG: NBD_ENOSPC,
    errno.ESHUTDOWN: NBD_ESHUTDOWN,
}


class Request(NamedTuple):
    """One request, as it was parsed."""

    flags: int
    command: int
    cookie: int
    offset: int
    length: int


class Refusal(NamedTuple):
    """An NBD error value and the reason for a human."""

    error: int
    reason: str


def refusal(session: Session, request: Request) -> Refusal | None:
    """Why a request cannot be carried out, None when nothing speaks against it. NBD_CMD_DISC is not asked about: it has no reply."""
    command = request.command
    if command not in _FLAGS:
        return Refusal(NBD_EINVAL, f"unknown command {command}")
    read_only = bool(session.flags & NBD_FLAG_READ_ONLY)
    if read_only and command in _WRITING:
        return Refusal(NBD_EPERM, "the export is read-only")
    allowed = _FLAGS[command] | (0 if read_only else NBD_CMD_FLAG_FUA)
    if not session.structured:
        allowed &= ~NBD_CMD_FLAG_DF
    if request.flags & ~allowed:
        return Refusal(NBD_EINVAL, f"flags {request.flags:#x} are not valid for command {command} here")
    if command == NBD_CMD_FLUSH:
        return _refuse_flush(read_only, request)
    if command == NBD_CMD_CACHE and not session.flags & NBD_FLAG_SEND_CACHE:
        return Refusal(NBD_EINVAL, "this export has no use for cache requests")
    if command == NBD_CMD_BLOCK_STATUS and not (session.allocation and request.length):
        return Refusal(NBD_EINVAL, "no metadata context was agreed on, or the length is 0")
    return _refuse_range(session, request)


def _refuse_flush(read_only: bool, request: Request) -> Refusal | None:
    if read_only or request.offset or request.length:
        return Refusal(NBD_EINVAL, "flush is for exports that can be written to and takes no range")
    return None


def _refuse_range(session: Session, request: Request) -> Refusal | None:
    command = request.command
    if request.offset + request.length > session.size:
        return Refusal(_BEYOND.get(command, NBD_EINVAL), "the range ends beyond the export")
    minimum = session.export.minimum_block
    if request.offset % minimum or request.length % minimum:
        return Refusal(NBD_EINVAL, f"the range is not a multiple of the block size {minimum}")
    if command in (NBD_CMD_READ, NBD_CMD_WRITE) and request.length > MAX_PAYLOAD:
        error = NBD_EOVERFLOW if command == NBD_CMD_READ and session.structured else NBD_EINVAL
        return Refusal(error, f"the length is over the maximum payload {MAX_PAYLOAD}")
    return None


def error_of(error: Exception) -> Refusal:
    """The NBD error for a failure of a source. The reason is general: a source's own message may name things the client should not see."""
    if isinstance(error, OSError):
        return Refusal(_ERRNO.get(error.errno or 0, NBD_EIO), "the storage failed")
    if isinstance(error, NoSpace):
        return Refusal(NBD_ENOSPC, "no space left")
    if isinstance(error, UsageError):
        return Refusal(NBD_EINVAL, "the request does not fit the storage")
    if isinstance(error, Interrupted):
        return Refusal(NBD_ESHUTDOWN, "the server is stopping")
    if isinstance(error, MemoryError):
        return Refusal(NBD_ENOMEM, "out of memory")
    return Refusal(NBD_EIO, "the data cannot be had" if isinstance(error, DsecError) else "internal error")
