"""What the daemon does when it is asked: leases on layers, mounts of layers and environments, reports, clearing.

Every step is recorded before it is made, so that whatever a killed daemon or client leaves is put right by the same request, by the sweep, or at the next start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsec_layers.cache.directory import CacheDirectory
from dsec_layers.cache.metadata import manifest
from dsec_layers.cache.segments import SegmentCache, Usage
from dsec_layers.digest import Digest, check_digest
from dsec_layers.errors import Conflict, DsecError, LimitError, NotFound, UsageError
from dsec_layers.fsio import map_os_error
from dsec_layers.fuse.mounts.layers import LayerMounts
from dsec_layers.fuse.records import Holder, LayerUse, LeaseRecord, MountRecord, Records
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.manifest import Layer
from dsec_layers.linux.mount import MountTarget, mount_bind, mount_overlay, umount
from dsec_layers.linux.mountinfo import MountPoint, is_mount_point, read_mounts

__all__ = ["MAX_LOWERS", "Manager"]

_log = logging.getLogger(__name__)

MAX_LOWERS: Final = 500
"""Layers of one overlay (OVL_MAX_STACK in fs/overlayfs/params.h)."""

_SOURCE: Final = "dsec-layers:"
_PARALLEL: Final = 4


class Manager:
    """Thread-safe. Errors are DsecErrors."""

    def __init__(self, directory: CacheDirectory, cache: SegmentCache, records: Records, layers: LayerMounts) -> None:
        self._directory = directory
        self._cache = cache
        self._records = records
        self._layers = layers
        self._lock = threading.Lock()
        self._leases: dict[str, LeaseRecord] = {}
        self._mounts: dict[str, MountRecord] = {}
        self._busy: set[str] = set()

    def recover(self, *, poisoned: bool = False) -> None:
        """Take over what an earlier worker left: leases of those who live, mounts that stand. Everything else is undone.

        ``poisoned``: nobody held readers back for a while, and they may have read zeros (fuse/mounts/aftermath.py).
        """
        detached = self._layers.adopt(poisoned=poisoned)
        targets = {mount.target: mount for mount in read_mounts()}
        for record in self._records.mounts():
            if self._is_ours(record, targets.get(record.target)):
                bad = record.poisoned or not detached.isdisjoint(record.layers)
                self._mounts[record.target] = record = replace(record, done=True, poisoned=bad)
                self._save(record)
            else:
                _log.warning("%s is not mounted; its record is dropped", record.target)
                self._records.remove(record)
        held = {record.lease for record in self._mounts.values() if not record.poisoned}
        for lease in self._records.leases():
            if not detached.isdisjoint(use.digest for use in lease.layers):
                if not lease.holder.target:
                    _log.error("process %d uses layers that may have read zeros; end it", lease.holder.pid)
                self._records.remove(lease)
            elif lease.identifier in held or not (lease.holder.target or lease.holder.is_gone()):
                try:
                    for use in lease.layers:
                        self._layers.use(use)
                except DsecError as error:
                    _log.error("lease %s: %s", lease.identifier, error.message)
                    continue
                self._leases[lease.identifier] = lease
            else:
                self._records.remove(lease)

    # ---- leases

    def attach(self, identifier: str, store: str, digests: Sequence[Digest], holder: Holder, driver: str) -> list[Path]:
        """Mount layers, each once on this host; returns their mount points in the order of ``digests``. The same ``identifier`` again gives the same lease."""
        if not identifier.isalnum() or len(identifier) > 64:
            raise UsageError(f"not a lease identifier: {identifier[:100]!r}")
        uses = tuple(LayerUse(check_digest(digest), store, driver) for digest in digests)
        with self._lock:
            known = self._leases.get(identifier)
        lease = known or LeaseRecord(identifier, holder, uses)
        if lease.layers != uses:
            raise Conflict(f"lease {identifier} is on other layers")
        if known is None:
            self._save(lease)
        taken: list[LayerUse] = []
        try:
            paths = self._use_all(uses, taken)
        except BaseException:
            for use in taken:
                self._layers.unuse(use)
            if known is None:
                self._records.remove(lease)
            raise
        with self._lock:
            again = identifier in self._leases
            self._leases[identifier] = lease
        if again:
            for use in taken:
                self._layers.unuse(use)
        return paths

    def release(self, identifier: str) -> None:
        """Give a lease back; one that is not there is no error."""
        with self._lock:
            lease = self._leases.pop(identifier, None)
        if lease is not None:
            for use in lease.layers:
                self._layers.unuse(use)
            self._records.remove(lease)
            self._layers.sweep()

    def _use_all(self, uses: Sequence[LayerUse], taken: list[LayerUse]) -> list[Path]:
        """Use layers, the metadata of several being fetched at once; ``taken`` gets those that were taken, even when one fails: then no more are begun."""
        failures: list[BaseException] = []

        def use(each: LayerUse) -> Path | None:
            if failures:
                return None
            try:
                path = self._layers.use(each)
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                return None
            taken.append(each)
            return path

        with ThreadPoolExecutor(
            _PARALLEL, thread_name_prefix="metadata"
        ) as pool:  # its own: one that waits for a store keeps no other from another
            paths = list(pool.map(use, uses))
        if failures:
            raise failures[0]
        return [path for path in paths if path is not None]

    # ---- mounts

    def mount(self, store: str, digest: Digest, target: str, label: str, driver: str) -> MountRecord:
        """Mount a layer, or an environment's layers as one tree, read-only at the directory ``target``.

        A request that was carried out without its answer being received may be repeated; otherwise Conflict where something is mounted.
        """
        with self._busy_target(target):
            before = self._mounts.get(target)
            self._drop_if_gone(before)
            before = self._mounts.get(target)
            if before is not None and not before.answered and (before.digest, before.store, before.driver) == (digest, store, driver):
                return before
            with MountTarget(target) as place:
                return self._mount(store, digest, place, label, driver)

    def _mount(self, store: str, digest: Digest, place: MountTarget, label: str, driver: str) -> MountRecord:
        value = manifest(self._directory, store, check_digest(digest), self._cache.fetcher)
        members = [digest] if isinstance(value, Layer) else [item.digest for _, item in value.layers]
        if len(members) > MAX_LOWERS:
            raise LimitError(f"{len(members)} layers, the kernel's overlayfs stacks at most {MAX_LOWERS}")
        identifier = os.urandom(8).hex()
        record = MountRecord(identifier, place.path, digest, store, label, driver, identifier, members, time.time())
        self._save(record)
        try:
            paths = self.attach(identifier, store, members, Holder(target=place.path), driver)
            if isinstance(value, Layer) and value.kind is Kind.BASE:
                mount_bind(paths[0], place)
            else:
                # Also for one layer, above an empty directory: in the layer itself whiteouts would show as devices.
                empty = [] if len(paths) > 1 else [self._empty_directory()]
                mount_overlay(place, [*reversed(paths), *empty], source=f"{_SOURCE}{identifier}")
        except BaseException:
            self.release(identifier)
            self._records.remove(record)
            raise
        record = replace(record, done=True)
        self._save(record)
        self._mounts[place.path] = record
        return record

    def answered(self, identifier: str) -> None:
        """Whoever asked for the mount has the answer: asking again is a mistake from now on."""
        for record in list(self._mounts.values()):
            if record.identifier == identifier and not record.answered:
                self._mounts[record.target] = known = replace(record, answered=True)
                with suppress(OSError):
                    self._records.save(known)

    def umount(self, target: str, *, lazy: bool = False) -> None:
        """Unmount what ``mount`` made. NotFound if that is nothing, Conflict if it is in use."""
        with self._busy_target(target):
            record = self._mounts.get(target)
            if record is None:
                raise NotFound(f"nothing of this cache is mounted at {target}", hint="dsec-layers ps shows what is")
            mount = is_mount_point(Path(target))
            if mount is not None and not self._is_ours(record, mount):
                raise Conflict(f"what is visible at {target} was mounted by somebody else", hint="unmount that first")
            with suppress(NotFound):  # somebody else unmounted it
                umount(target, lazy)
            self._forget(record)

    def poisoned(self) -> list[str]:
        """Targets of mounts that may have read zeros."""
        return sorted(record.target for record in self._mounts.values() if record.poisoned)

    def mounts(self) -> list[MountRecord]:
        """What is mounted."""
        self.sweep()
        return sorted(self._mounts.values(), key=lambda record: record.since)

    # ---- housekeeping

    def sweep(self) -> None:
        """Drop leases of holders that are gone and mounts that somebody unmounted; unmount layers that were not used for a while."""
        with self._lock:
            gone = [lease.identifier for lease in self._leases.values() if lease.holder.is_gone()]
        for identifier in gone:
            self.release(identifier)
        if self._mounts:
            standing = {mount.target: mount for mount in read_mounts()}
            for record in list(self._mounts.values()):
                if not self._is_ours(record, standing.get(record.target)):
                    try:
                        with self._busy_target(record.target):
                            self._drop_if_gone(self._mounts.get(record.target))
                    except Conflict:
                        continue
        self._layers.sweep()

    def is_idle(self) -> bool:
        """Whether nobody holds anything, no layer is mounted and nothing is being mounted."""
        return self.holds_nothing() and not self._busy

    def holds_nothing(self) -> bool:
        """Whether nobody holds anything and no layer is mounted; what is being fetched for a mount does not count."""
        with self._lock:
            return not (self._leases or self._mounts or any(True for _ in self._layers.rows()))

    def clear(self) -> Usage:
        """Remove every segment and all metadata that no live mount uses; returns what the segments took.

        A layer that is being mounted comes into use before (then it stays whole) or after (then it is fetched anew). Conflict, and nothing
        is removed, if it cannot be told what a mount uses.
        """
        self._layers.sweep(now=True)
        with self._layers.held_back():
            if unknown := self._layers.without_files():
                raise Conflict(
                    f"the metadata of {', '.join(unknown)} is damaged: which segments the mounts of it need is not known",
                    hint="unmount what is mounted of it, or mount it again while its store is there",
                )
            freed = self._cache.clear(self._layers.segments_in_use())
            keep = set(self._layers.forget_files())
            kept_files = self._layers.files_in_use()
            for folder in (self._directory.metadata, self._directory.images):
                for path in folder.iterdir():
                    if path not in kept_files:
                        path.unlink(missing_ok=True)
            for digest, _ in list(self._records.known()):
                if digest not in keep:
                    self._records.forget(digest)
        return freed

    def release_all(self) -> None:
        """Unmount everything, before the daemon stops for good. Conflict, naming them, if some are in use."""
        busy = []
        for target in list(self._mounts):
            try:
                self.umount(target)
            except DsecError as error:
                busy.append(error.message)
        for lease in list(self._leases.values()):
            self.release(lease.identifier)
        self._layers.sweep(now=True)
        busy += [f"{path} is in use" for _, path, _, _ in self._layers.rows()]
        if busy:
            raise Conflict(
                f"some mounts are in use: {'; '.join(busy[:10])}", hint="end what uses them (fuser -vm DIRECTORY), then stop again"
            )

    def leases(self) -> list[LeaseRecord]:
        """The leases that are held."""
        with self._lock:
            return list(self._leases.values())

    def _empty_directory(self) -> Path:
        path = self._directory.root / "empty"
        path.mkdir(mode=0o755, exist_ok=True)
        return path

    def _forget(self, record: MountRecord) -> None:
        self._mounts.pop(record.target, None)
        self.release(record.lease)
        self._records.remove(record)

    def _drop_if_gone(self, record: MountRecord | None) -> None:
        if record is not None and not self._is_ours(record, is_mount_point(Path(record.target))):
            self._forget(record)

    def _is_ours(self, record: MountRecord, mount: MountPoint | None) -> bool:
        """Whether the mount that stands at a record's target is the one it speaks of."""
        if mount is None:
            return False
        if mount.kind == "overlay":
            return mount.source == f"{_SOURCE}{record.identifier}"
        if mount.kind != "erofs" or len(record.layers) != 1:
            return False
        # Through a loop device the source is that, and after a failure the layer itself may be detached: one of the two is enough.
        use = LayerUse(record.layers[0], record.store, record.driver)
        return mount.source.startswith(f"{self._directory.root}/") or mount.device == self._layers.device_of(use)

    def _save(self, record: LeaseRecord | MountRecord) -> None:
        try:
            self._records.save(record)
        except OSError as error:
            raise map_os_error(error, f"cache {self._directory.root}") from error

    @contextmanager
    def _busy_target(self, target: str) -> Iterator[None]:
        with self._lock:
            if target in self._busy:
                raise Conflict(f"{target} is being mounted or unmounted by somebody else")
            self._busy.add(target)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(target)
