"""Every error this package raises on purpose, and the exit code each gives the command line.

The tree, by what a caller would do about it::

    DsecError                     1   something failed; the message says what
    ├── UsageError                2   the call itself is wrong (argument, reference syntax, layer file)
    ├── NotFound                 10   no such ref, blob, layer, mount, file
    ├── Conflict                 11   somebody else changed or holds the thing: look again, then retry
    ├── InputError               12   the input (tar, directory, OCI image, disk) is malformed or hostile
    │   └── ImageError           12   malformed EROFS, LSMT, ZFile or table bytes
    ├── LimitError               13   well-formed, but over a limit of the format or a setting
    ├── ToolError                14   an external program is missing, too old, or failed
    ├── HostError                15   this host cannot do it: no root, kernel too old, feature absent
    ├── CorruptError             16   stored or fetched bytes do not match their digest
    ├── StoreError               17   the store did not answer as it must (time-out, I/O error): retrying may help
    ├── NoSpace                  18   a disk is full
    └── StepError                19   a build step exited non-zero
    Interrupted                 130   Ctrl-C or SIGTERM

Format code raises only ``ImageError``, and tells its kind by a code as well (``ImageCode``), which ``--json`` shows. Foreign exceptions are mapped to this tree at the edge where they enter.
``run`` is the exception to the table: it passes on the command's own exit code and uses 125 for its own failures.
"""

from __future__ import annotations

from copy import copy
from enum import StrEnum
from typing import Self

__all__ = [
    "Conflict",
    "CorruptError",
    "DsecError",
    "HostError",
    "ImageCode",
    "ImageError",
    "InputError",
    "Interrupted",
    "LimitError",
    "NoSpace",
    "NotFound",
    "StepError",
    "StoreError",
    "ToolError",
    "UsageError",
]


class DsecError(Exception):
    """Base of all expected failures. ``hint`` is the way out, shown on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def located(self, where: str) -> Self:
        """The same error, its message beginning with where it happened."""
        told = copy(self)
        told.message = f"{where}: {self.message}"
        told.args = (told.message,)
        return told


class UsageError(DsecError):
    """The call is wrong: an argument, a reference, a layer file."""

    exit_code = 2


class NotFound(DsecError):
    """The named thing does not exist."""

    exit_code = 10


class Conflict(DsecError):
    """Somebody else changed or holds the thing."""

    exit_code = 11


class InputError(DsecError):
    """The input is malformed or tries to do harm."""

    exit_code = 12


class ImageCode(StrEnum):
    """What is wrong with the bytes, for programs; the message says it for people. The set is closed: callers may rely on there being no other."""

    TRUNCATED = "truncated"
    """They end before they should."""

    BAD_MAGIC = "bad_magic"
    """They are something else: no such image, table or manifest at all."""

    BAD_VERSION = "bad_version"
    """A version of the format that is not known here."""

    UNKNOWN_FEATURE = "unknown_feature"
    """A feature, flag, algorithm or media type that is not known or not supported here."""

    OUT_OF_BOUNDS = "out_of_bounds"
    """A place outside of what it lies in, or a number that the field cannot have."""

    BAD_CHECKSUM = "bad_checksum"
    """A checksum or digest that does not match."""

    BAD_ENCODING = "bad_encoding"
    """A field that is not spelled as it must be: JSON, names, a compressed frame."""

    INCONSISTENT = "inconsistent"
    """Parts that contradict one another, are out of order, missing, or there twice."""

    LIMIT = "limit"
    """More than is read of anybody."""


class ImageError(InputError):
    """Bytes that are not a well-formed image, table or manifest. The only error format code raises. ``code`` is its kind."""

    def __init__(self, message: str, *, code: ImageCode = ImageCode.INCONSISTENT, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class LimitError(DsecError):
    """A limit of the format or of a setting was exceeded; the message carries the number."""

    exit_code = 13


class ToolError(DsecError):
    """An external program is missing, too old, or failed."""

    exit_code = 14


class HostError(DsecError):
    """This host cannot do it: no root, an old kernel, an absent feature."""

    exit_code = 15


class CorruptError(DsecError):
    """Bytes that do not match their digest, size or table. ``final``: reading again where they came from cannot help."""

    exit_code = 16

    def __init__(self, message: str, *, hint: str | None = None, final: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.final = final


class StoreError(DsecError):
    """The store did not answer as it must. Retrying may help."""

    exit_code = 17


class NoSpace(DsecError):
    """A disk is full."""

    exit_code = 18


class StepError(DsecError):
    """A build step failed."""

    exit_code = 19


class Interrupted(DsecError):
    """Ctrl-C or SIGTERM."""

    exit_code = 130
