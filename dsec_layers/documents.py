"""JSON from anywhere as typed values: one decoder for manifests, configs and state.

A type says what a document may hold (fields, bounds, patterns); what does not fit is ImageError naming the document and the field. It is strict: no
NaN, no lone surrogates, no number that is really true or false, nothing behind the value; nesting ends where Python's recursion does.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["MAX_NUMBER", "DigestText", "Natural", "convert", "decode", "plain"]

MAX_NUMBER: Final = (1 << 63) - 1

Natural: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
"""A number that fits 64 bits with a sign and has none."""

DigestText: TypeAlias = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
"""A blob digest, as ``dsec_layers.digest.is_digest`` has it."""

_T = TypeVar("_T")


def decode(data: Buffer, kind: type[_T], what: str, *, limit: int) -> _T:
    """The value of type ``kind`` in a document of at most ``limit`` bytes, which messages call ``what``. Raises ImageError."""
    if len(data) > limit:
        raise ImageError(f"{what}: {len(data)} bytes are over the limit of {limit}", code=ImageCode.LIMIT)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ImageError(f"{what}: {_lower(error)}", code=ImageCode.BAD_ENCODING) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ImageError(f"{what} is not JSON: {_lower(error)}", code=ImageCode.BAD_ENCODING) from error


def convert(value: Any, kind: type[_T], what: str) -> _T:
    """As ``decode``, of what has been read as JSON before: a message, a part of a document."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ImageError(f"{what}: {_lower(error)}", code=ImageCode.BAD_ENCODING) from error


def plain(value: Any) -> Any:
    """A typed value as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def _lower(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:300]
