"""What a control request may say: the type and the bound of each field, checked before anything is done with it. UsageError names the field.

The other end runs as the same user and is mostly this program, but perhaps of another version; what it says is kept in records and sizes memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dsec_layers.digest import Digest, is_digest
from dsec_layers.errors import ImageError, UsageError
from dsec_layers.fuse.records import Holder
from dsec_layers.segment import Segment

__all__ = [
    "MAX_LAYERS",
    "MAX_TEXT",
    "a_digest",
    "a_flag",
    "a_holder",
    "a_number",
    "a_segment",
    "a_text",
    "digests",
]

MAX_TEXT: Final = 4096
"""Characters of a path, a URL or a label."""

MAX_LAYERS: Final = 4096
"""Layers of one lease."""

_MAX_PID: Final = (1 << 31) - 1
_MAX_TICKS: Final = (1 << 63) - 1


def a_text(message: Mapping[str, Any], name: str, *, least: int = 0) -> str:
    """The text of a field: at least ``least`` and at most MAX_TEXT characters without NUL."""
    value = _field(message, name)
    if not isinstance(value, str) or not least <= len(value) <= MAX_TEXT or "\0" in value:
        raise _improper(name, value, f"a text of {least} to {MAX_TEXT} characters")
    return value


def a_number(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """The whole number of a field."""
    value = _field(message, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _improper(name, value, f"a number from {low} to {high}")
    return value


def a_flag(message: Mapping[str, Any], name: str) -> bool:
    """The true or false of a field."""
    value = _field(message, name)
    if not isinstance(value, bool):
        raise _improper(name, value, "true or false")
    return value


def a_digest(message: Mapping[str, Any], name: str) -> Digest:
    """The blob digest of a field."""
    value = _field(message, name)
    if not isinstance(value, str) or not is_digest(value):
        raise _improper(name, value, "sha256: and 64 hex digits")
    return value


def digests(message: Mapping[str, Any], name: str) -> list[Digest]:
    """The blob digests of a field: at most MAX_LAYERS."""
    value = _field(message, name)
    if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(isinstance(item, str) and is_digest(item) for item in value):
        raise _improper(name, value, f"at most {MAX_LAYERS} digests")
    return value


def a_holder(message: Mapping[str, Any], name: str) -> Holder:
    """Who holds a lease."""
    value = _mapping(message, name, {"pid", "starttime", "target"})
    return Holder(a_number(value, "pid", 0, _MAX_PID), a_number(value, "starttime", 0, _MAX_TICKS), a_text(value, "target"))


def a_segment(message: Mapping[str, Any], name: str) -> Segment:
    """What to fetch; what it may be is for Segment to say."""
    value = _mapping(message, name, set(Segment.__slots__))
    a_text(value, "store", least=1)
    try:
        return Segment.of_message(value)
    except ImageError as error:
        raise _improper(name, value, f"a segment ({error.message})") from error


def _mapping(message: Mapping[str, Any], name: str, fields: set[str]) -> dict[str, Any]:
    value = _field(message, name)
    if not isinstance(value, dict) or set(value) != fields:
        raise _improper(name, value, f"an object with {', '.join(sorted(fields))}")
    return value


def _field(message: Mapping[str, Any], name: str) -> Any:
    try:
        return message[name]
    except KeyError:
        raise UsageError(f"improper request: it has no {name!r}", hint=_HINT) from None


_HINT: Final = "stop the daemon if it is not of the same version as this program"


def _improper(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"improper request: {name} is {wanted}, not {str(value)[:100]!r}", hint=_HINT)
