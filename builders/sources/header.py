"""Tar headers as values: the 512-byte block of v7, ustar, GNU and star, and PAX extended headers. Bytes in, values out, no I/O.

The rules are those of Python's ``tarfile`` and GNU tar (POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"); where those two read on over
a malformed field, this raises InputError.
"""

from __future__ import annotations

import base64
import binascii
import re
from fractions import Fraction
from functools import lru_cache
from math import floor
from struct import Struct
from typing import Final
from urllib.parse import unquote_to_bytes
from zlib import adler32

from dsec_layers.builders.names import MAX_ID
from dsec_layers.digest import Buffer
from dsec_layers.errors import InputError

__all__ = [
    "HEADER",
    "RECORD",
    "Records",
    "decimal",
    "device",
    "id_field",
    "identity",
    "is_header",
    "length",
    "long_prefix",
    "mode_field",
    "mtime",
    "number",
    "parse_records",
    "size_field",
    "text",
    "time_field",
    "xattrs_of",
]

RECORD: Final = 512
"""Bytes in a tar block."""

HEADER: Final = Struct("100s8s8s8s12s12s8sc100s8s")
"""The part every format has: name, mode, uid, gid, size, mtime, chksum, typeflag, linkname, magic and version."""

Records = list[tuple[bytes, bytes]]
"""The records of an extended header in their order; a keyword may come more than once (GNU sparse 0.0)."""

_DECIMAL = re.compile(rb"-?\d{1,20}")
_TIME = re.compile(rb"(-?)(\d{1,19})(?:\.(\d{0,100}))?(?:[eE]([-+]?\d{1,3}))?")
_MAX_TIME = 1 << 62


@lru_cache(maxsize=1 << 14)
def number(field: bytes) -> int:
    """A numeric field: octal digits amid blanks and NULs, or base-256 if the first bit is set. Raises InputError for anything else."""
    if field[0] & 0x80:
        value = int.from_bytes(field)
        bits = 8 * len(field)
        return value - (1 << bits) if field[0] & 0x40 else value - (1 << (bits - 1))
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    try:
        if not digits.isdigit():
            raise ValueError
        return int(digits, 8)
    except ValueError:
        raise InputError(f"malformed number {field!r} in a tar header") from None


@lru_cache(maxsize=1 << 14)
def mode_field(form: int, field: bytes) -> int:
    """The mode of an inode of the type ``form``: one object for all that are alike, which a million inodes then share."""
    return form | number(field) & 0o7777


@lru_cache(maxsize=1 << 14)
def id_field(field: bytes) -> int:
    """A user or group id of a header."""
    return identity(number(field))


@lru_cache(maxsize=1 << 14)
def size_field(field: bytes) -> int:
    """A size of a header."""
    return length(number(field))


@lru_cache(maxsize=1 << 14)
def time_field(field: bytes) -> int:
    """The time of a header in seconds."""
    seconds = number(field)
    if not -_MAX_TIME < seconds < _MAX_TIME:
        raise InputError(f"time {seconds} in a tar header is out of range")
    return seconds


def text(field: bytes) -> bytes:
    """A text field: what stands before the first NUL."""
    return field.partition(b"\0")[0]


@lru_cache(maxsize=1 << 14)
def _whole_sum(field: bytes) -> int:
    """What the 512 bytes of a header with this ``chksum`` field sum up to (the field itself counts as blanks); -1 if it is malformed."""
    try:
        return number(field) - 8 * 32 + sum(field)
    except InputError:
        return -1


def is_header(buffer: bytes, at: int) -> bool:
    """Whether the 512 bytes at ``at`` carry the right checksum, summed over unsigned or (old Sun tars) signed bytes."""
    wanted = _whole_sum(buffer[at + 148 : at + 156])
    # adler32 from 0 has the sum modulo 65521 in its low half, and 256 bytes cannot reach that: four times faster than sum()
    total = (adler32(buffer[at : at + 256], 0) & 0xFFFF) + (adler32(buffer[at + 256 : at + RECORD], 0) & 0xFFFF)
    if wanted == total:
        return True
    block = buffer[at : at + 148] + buffer[at + 156 : at + RECORD]
    return wanted == total - 256 * sum(byte > 127 for byte in block)


def long_prefix(buffer: bytes, at: int) -> bytes:
    """The ``prefix`` of a ustar header's name. GNU headers keep other things there, v7 ones nothing, star's are shorter."""
    if buffer[at + 257 : at + 263] != b"ustar\0":
        return b""
    end = 476 if buffer[at + 508 : at + RECORD] == b"tar\0" else 500
    return text(buffer[at + 345 : at + end])


def device(buffer: bytes, at: int) -> tuple[int, int]:
    """Major and minor number of a device's header."""
    return number(buffer[at + 329 : at + 337]), number(buffer[at + 337 : at + 345])


def identity(value: int) -> int:
    """A user or group id that chown(2) takes. Raises InputError."""
    if not 0 <= value <= MAX_ID:
        raise InputError(f"user or group id {value} is not between 0 and {MAX_ID}")
    return value


def length(value: int) -> int:
    """A size that a file can have. Raises InputError."""
    if not 0 <= value < 1 << 63:
        raise InputError(f"size {value} is no size of a file")
    return value


def decimal(value: bytes) -> int:
    """A decimal number of an extended header."""
    if not _DECIMAL.fullmatch(value):
        raise InputError(f"malformed number {value[:40]!r} in an extended header")
    return int(value)


def mtime(value: bytes) -> tuple[int, int]:
    """A time of an extended header as seconds and nanoseconds; finer fractions are cut off towards the past, as GNU tar does."""
    found = _TIME.fullmatch(value)
    if not found:
        raise InputError(f"malformed time {value[:40]!r} in an extended header")
    sign, whole, fraction, exponent = found.groups()
    if sign or exponent:  # Python's tarfile writes the first 100 microseconds of 1970 as 1e-05 and the like
        seconds, nanoseconds = divmod(floor(Fraction(value.decode()) * 1_000_000_000), 1_000_000_000)
    else:
        seconds, nanoseconds = int(whole), int((fraction or b"")[:9].ljust(9, b"0"))
    if not -_MAX_TIME < seconds < _MAX_TIME:
        raise InputError(f"time {value[:40]!r} in an extended header is out of range")
    return seconds, nanoseconds


def parse_records(data: Buffer) -> Records:
    """The records ``length keyword=value\\n`` of an extended header, values as raw bytes. Raises InputError."""
    block = bytes(data)
    records: Records = []
    at = 0
    while at < len(block):
        space = block.find(b" ", at, at + 12)
        digits = block[at:space]
        if space < 0 or not digits.isdigit():
            if not block[at:].strip(b"\0"):
                break  # padding inside the header, which some writers leave
            raise InputError("malformed extended header: a record without a length")
        end = at + int(digits)
        keyword, equals, value = block[space + 1 : end].partition(b"=")
        if end <= space or end > len(block) or not equals or not keyword or value[-1:] != b"\n":
            raise InputError("malformed extended header: a record that does not end where it says")
        records.append((keyword, value[:-1]))
        at = end
    return records


def xattrs_of(records: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The extended attributes among records: ``SCHILY.xattr.`` (raw; GNU tar writes % and = of a name as %25 and %3D) and ``LIBARCHIVE.xattr.``."""
    found: dict[bytes, bytes] = {}
    for keyword, value in records.items():
        if keyword.startswith(b"LIBARCHIVE.xattr."):
            try:
                found[unquote_to_bytes(keyword[17:])] = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
            except binascii.Error as error:
                raise InputError(f"malformed base64 in the extended header's {keyword[:300]!r}") from error
    for keyword, value in records.items():
        if keyword.startswith(b"SCHILY.xattr."):
            found[keyword[13:].replace(b"%3D", b"=").replace(b"%25", b"%")] = value
    return found
