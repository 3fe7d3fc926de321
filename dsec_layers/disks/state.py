"""What a writable disk says of itself: ``disk.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from dsec_layers.digest import Buffer, Digest, is_digest
from dsec_layers.errors import ImageCode, ImageError, NotFound
from dsec_layers.fsio import map_os_error

__all__ = ["MAX_GENERATIONS", "STATE", "DiskState", "Parent", "parse_state", "read_state"]

STATE: Final = "disk.json"
SECTOR: Final = 512
MAX_GENERATIONS: Final = 200
MAX_URL: Final = 4096
"""Characters of a store's URL."""
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Parent:
    """The sealed disk below: the store's URL and the manifest's digest."""

    store: str
    digest: Digest

    @classmethod
    def from_value(cls, value: Any) -> Parent:
        """The disk that a JSON value names. Raises ImageError."""
        if not isinstance(value, dict) or set(value) != {"store", "digest"}:
            raise ImageError("the disk below is not named properly", code=ImageCode.BAD_ENCODING)
        store, digest = value["store"], value["digest"]
        if not (isinstance(store, str) and 0 < len(store) <= MAX_URL and isinstance(digest, str) and is_digest(digest)):
            raise ImageError("the disk below is not named properly", code=ImageCode.BAD_ENCODING)
        return cls(store, digest)


@dataclass(frozen=True, slots=True)
class DiskState:
    """What disk.json says: size in bytes, the sealed disk below (None: nothing), frozen generations from bottom to top, and the one that takes writes."""

    virtual_size: int
    parent: Parent | None = None
    frozen: tuple[int, ...] = ()
    upper: int = 1

    def to_value(self) -> dict[str, Any]:
        """The state as JSON has it."""
        return {"format": 1, **asdict(self), "frozen": list(self.frozen)}

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.to_value(), indent=1).encode() + b"\n"

    @classmethod
    def from_value(cls, value: Any) -> DiskState:
        """The state in a JSON value. Raises ImageError."""
        try:
            parent, size, frozen, upper = (value[name] for name in ("parent", "virtual_size", "frozen", "upper"))
            state = cls(size, Parent.from_value(parent) if parent is not None else None, tuple(frozen), upper)
            known = value["format"] == 1
        except (KeyError, TypeError, AttributeError) as error:
            raise ImageError("not the state of a disk", code=ImageCode.BAD_MAGIC) from error
        if not known:
            raise ImageError(f"disk directories of format {str(value['format'])[:20]} are not known here", code=ImageCode.BAD_VERSION)
        _check(state)
        return state


def parse_state(data: Buffer) -> DiskState:
    """The state in the bytes of a disk.json. Raises ImageError."""
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ImageError("not JSON", code=ImageCode.BAD_ENCODING) from error
    return DiskState.from_value(value)


def read_state(path: Path) -> DiskState:
    """The state of the disk in directory ``path``. Raises NotFound or ImageError."""
    try:
        with open(path / STATE, "rb") as stream:
            data = stream.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{path} is no disk: it has no {STATE}", hint="make one with dsec-layers disk create") from error
    except OSError as error:
        raise map_os_error(error, str(path)) from error
    try:
        return parse_state(data)
    except ImageError as error:
        raise error.located(str(path / STATE)) from error


def _check(state: DiskState) -> None:
    numbers = (state.virtual_size, *state.frozen, state.upper)
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63 for number in numbers):
        raise ImageError("a number is out of range", code=ImageCode.OUT_OF_BOUNDS)
    if state.virtual_size == 0 or state.virtual_size % SECTOR:
        raise ImageError(f"{state.virtual_size} bytes are no size of a disk", code=ImageCode.OUT_OF_BOUNDS)
    generations = (*state.frozen, state.upper)
    if len(generations) > MAX_GENERATIONS + 1 or any(a >= b for a, b in pairwise(generations)):
        raise ImageError("the generations are out of order", code=ImageCode.INCONSISTENT)
