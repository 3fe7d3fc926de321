"""What a writable disk says of itself: ``disk.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from dsec_layers.digest import Buffer
from dsec_layers.documents import MAX_NUMBER, DigestText, Natural, convert, decode, plain
from dsec_layers.errors import ImageCode, ImageError, NotFound
from dsec_layers.fsio import map_os_error

__all__ = ["MAX_GENERATIONS", "STATE", "DiskState", "Parent", "parse_state", "read_state"]

STATE: Final = "disk.json"
SECTOR: Final = 512
MAX_GENERATIONS: Final = 200
MAX_URL: Final = 4096
"""Characters of a store's URL."""
_MAX_BYTES: Final = 1 << 20
_WHAT: Final = "the state of a disk"


class Parent(Struct, frozen=True, forbid_unknown_fields=True):
    """The sealed disk below: the store's URL and the manifest's digest."""

    store: Annotated[str, Meta(min_length=1, max_length=MAX_URL)]
    digest: DigestText

    @classmethod
    def from_value(cls, value: Any) -> Parent:
        """The disk that a JSON value names. Raises ImageError."""
        return convert(value, cls, "the disk below")


class _Stated(Struct):
    """The document: everything in it must be there."""

    format: int
    virtual_size: Annotated[int, Meta(gt=0, le=MAX_NUMBER, multiple_of=SECTOR)]
    parent: Parent | None
    frozen: Annotated[tuple[Natural, ...], Meta(max_length=MAX_GENERATIONS)]
    upper: Natural

    def state(self) -> DiskState:
        """The state that it is. Raises ImageError."""
        if self.format != 1:
            raise ImageError(f"disk directories of format {self.format} are not known here", code=ImageCode.BAD_VERSION)
        if any(a >= b for a, b in pairwise((*self.frozen, self.upper))):
            raise ImageError("the generations are out of order", code=ImageCode.INCONSISTENT)
        return DiskState(self.virtual_size, self.parent, self.frozen, self.upper)


@dataclass(frozen=True, slots=True)
class DiskState:
    """What disk.json says: size in bytes, the sealed disk below (None: nothing), frozen generations from bottom to top, and the one that takes writes."""

    virtual_size: int
    parent: Parent | None = None
    frozen: tuple[int, ...] = ()
    upper: int = 1

    def to_value(self) -> dict[str, Any]:
        """The state as JSON has it."""
        return {"format": 1, **plain(self)}

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.to_value(), indent=1).encode() + b"\n"

    @classmethod
    def from_value(cls, value: Any) -> DiskState:
        """The state in a JSON value. Raises ImageError."""
        return convert(value, _Stated, _WHAT).state()


def parse_state(data: Buffer) -> DiskState:
    """The state in the bytes of a disk.json. Raises ImageError."""
    return decode(data, _Stated, _WHAT, limit=_MAX_BYTES).state()


def read_state(path: Path) -> DiskState:
    """The state of the disk in directory ``path``. Raises NotFound or ImageError."""
    try:
        with open(path / STATE, "rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{path} is no disk: it has no {STATE}", hint="make one with dsec-layers disk create") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    try:
        return parse_state(data)
    except ImageError as error:
        raise error.located(str(path / STATE)) from error
