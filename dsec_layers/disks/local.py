"""A writable disk that is open: a local directory's generations on top of a sealed disk in a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from dsec_layers.disks.files import DiskFiles, Generation
from dsec_layers.disks.state import DiskState, Parent
from dsec_layers.disks.stored import StoredDisk
from dsec_layers.errors import DsecError, StoreError
from dsec_layers.overlaybd import Disk, LsmtLayer

__all__ = ["LocalDisk", "OpenParent"]

OpenParent = Callable[[Parent], StoredDisk]
"""Opens the sealed disk below for lazy reading."""


class LocalDisk:
    """An open writable disk. ``disk`` is what an NBD export serves; ``recovered`` says what a crash tore off, or is empty. Use as a context.

    ``local``: whether no byte of it is in a store. Raises Conflict if somebody else has it open, and what opening the sealed disk raises.
    """

    def __init__(self, path: Path, open_parent: OpenParent) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stuck = ""
        with ExitStack() as stack:
            self._files = stack.enter_context(DiskFiles(path))
            state = self._files.state
            layers: list[LsmtLayer] = []
            if state.parent is not None:
                layers += stack.enter_context(open_parent(state.parent)).layers
            self.local = not layers
            torn = []
            for number in state.frozen:
                generation = self._files.open(number)
                stack.callback(generation.close)
                torn.append(generation.upper.recovery.reason)
                layers.append(generation.upper.freeze())
            self._upper = self._files.open(state.upper)
            stack.callback(lambda: self._upper.close())
            torn.append(self._upper.upper.recovery.reason)
            self.recovered = "; ".join(filter(None, torn))
            self.disk = Disk(layers, self._upper.upper)
            self._cleanup = stack.pop_all()

    @property
    def state(self) -> DiskState:
        """The state as it is on the disk."""
        return self._files.state

    def snapshot(self) -> DiskState:
        """Freeze what was written so far, durable, and go on with a new upper. Reads and writes go on meanwhile. Nothing happens if nothing was written.

        Returns the new state, whose frozen generations are the snapshot.
        """
        with self._lock:
            if self._stuck:
                raise StoreError(f"{self.path}: a snapshot failed before ({self._stuck})", hint="detach the disk and attach it again")
            if self._upper.is_empty:
                return self._files.state
            self.disk.flush()  # most of the work, while writes still go on
            before = self._files.state
            fresh = self._files.begin()
            try:
                self.disk.snapshot(fresh.upper)
            except BaseException as error:
                self._take_back(before, fresh, error)
                raise
            old, self._upper = self._upper, fresh
            self._cleanup.callback(old.close)
            return self._files.state

    def rebase(self, expected: Parent | None, parent: Parent, gone: tuple[int, ...]) -> DiskState:
        """See DiskFiles.rebase. What is open goes on reading the old files, whose space is free when it closes."""
        with self._lock:
            return self._files.rebase(expected, parent, gone)

    def close(self) -> None:
        """Flush and close everything."""
        try:
            self.disk.flush()
        finally:
            self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_back(self, before: DiskState, fresh: Generation, error: BaseException) -> None:
        """The old upper goes on. If the state cannot say so (a full disk), the new one is as true: the pair it names is empty, and stays."""
        try:
            self._files.undo(before, fresh)
        except DsecError:
            fresh.close()
            self._stuck = str(error)
