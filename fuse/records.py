"""What the daemon must know after its worker was killed: leases and mounts, one small file each in state/.

Replaced atomically, not synced: after a power loss there are no mounts either, so records of another boot are dropped.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from dsec_layers.digest import Digest
from dsec_layers.documents import DigestText, decode
from dsec_layers.errors import ImageError
from dsec_layers.linux.process import is_alive

__all__ = ["Holder", "LayerUse", "LeaseRecord", "MountRecord", "Records", "source_of"]

_log = logging.getLogger(__name__)
_FOLDERS: Final = ("leases", "mounts", "known")
_MAX_BYTES: Final = 16 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose a lease is: a process (``pid`` and its ``starttime``, see linux/process.py), or the mount at ``target``."""

    pid: int = 0
    starttime: int = 0
    target: str = ""

    def is_gone(self) -> bool:
        """Whether this is a process that has ended. A mount's lease ends with its record."""
        return not self.target and not is_alive(self.pid, self.starttime)


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer by the digest of its manifest, the store it comes from, and the driver that serves it."""

    digest: DigestText
    store: str
    driver: str


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Layers that somebody uses."""

    identifier: str
    holder: Holder
    layers: tuple[LayerUse, ...]


@dataclass(frozen=True, slots=True)
class MountRecord:
    """A mount that the daemon made at ``target``. ``done``: it stands; ``answered``: whoever asked for it knows; ``poisoned``: it may have read zeros
    when nobody held its readers back, and is served no more (fuse/mounts/aftermath.py).
    """

    identifier: str
    target: str
    digest: DigestText
    store: str
    label: str
    driver: str
    lease: str
    layers: list[DigestText] = field(default_factory=list)
    since: float = 0.0
    done: bool = False
    answered: bool = False
    poisoned: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    store: str


class Records:
    """The record files of one cache. ``boot`` is this boot's id: what another boot left is removed."""

    def __init__(self, state: Path, boot: str) -> None:
        self._state = state
        for name in _FOLDERS:
            (state / name).mkdir(mode=0o700, exist_ok=True)
        marker = state / "boot"
        try:
            same = marker.read_text() == boot
        except OSError:
            same = False
        if not same:
            for name in ("leases", "mounts"):
                for path in (state / name).iterdir():
                    path.unlink()
            marker.write_text(boot)

    def leases(self) -> Iterator[LeaseRecord]:
        """All leases."""
        return (record for _, record in self._load("leases", LeaseRecord))

    def mounts(self) -> Iterator[MountRecord]:
        """All mounts, finished or not."""
        return (record for _, record in self._load("mounts", MountRecord))

    def known(self) -> Iterator[tuple[Digest, str]]:
        """(layer, store URL) of every layer that was ever mounted from this cache, until it is cleared."""
        return ((f"sha256:{path.stem}", known.store) for path, known in self._load("known", _Known))

    def save(self, record: LeaseRecord | MountRecord) -> None:
        """Write a record or replace it. Raises OSError."""
        self._write("leases" if isinstance(record, LeaseRecord) else "mounts", record.identifier, asdict(record))

    def remove(self, record: LeaseRecord | MountRecord) -> None:
        """Remove a record."""
        folder = "leases" if isinstance(record, LeaseRecord) else "mounts"
        (self._state / folder / f"{record.identifier}.json").unlink(missing_ok=True)

    def remember(self, digest: Digest, store: str) -> None:
        """Note where a layer comes from."""
        name = digest.removeprefix("sha256:")
        if not (self._state / "known" / f"{name}.json").exists():
            self._write("known", name, {"store": store})

    def forget(self, digest: Digest) -> None:
        """The layer's metadata was removed from the cache."""
        (self._state / "known" / f"{digest.removeprefix('sha256:')}.json").unlink(missing_ok=True)

    def _write(self, folder: str, name: str, value: dict[str, Any]) -> None:
        path = self._state / folder / f"{name}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(value))
        temporary.rename(path)

    def _load(self, folder: str, kind: type[_T]) -> Iterator[tuple[Path, _T]]:
        for entry in sorted(os.scandir(self._state / folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            found = _read(path, kind) if path.suffix == ".json" else None
            if found is not None:
                yield path, found
            else:
                self._junk(path)

    def _junk(self, path: Path) -> None:
        if path.suffix != ".tmp":
            _log.warning("%s is no record; removed", path)
        path.unlink(missing_ok=True)


def source_of(state: Path, digest: Digest) -> str | None:
    """The store URL of a layer that was mounted from the cache whose state/ this is; for any process."""
    known = _read(state / "known" / f"{digest.removeprefix('sha256:')}.json", _Known)
    return known.store if known is not None else None


def _read(path: Path, kind: type[_T]) -> _T | None:
    """The record in a file; None if there is none or it is something else."""
    try:
        return decode(path.read_bytes(), kind, str(path), limit=_MAX_BYTES)
    except (OSError, ImageError):
        return None
