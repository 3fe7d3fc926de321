"""A store that fails on demand: for tests of whatever reads from a store.

store = FaultyStore(MemoryStore())
store.add(Fault("read", error=StoreError("reset"), times=3))     the next three reads fail
store.add(Fault("read", change=zeros, when=lambda digest: digest == bad))     all reads of one blob give zeros
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from dsec_layers.digest import Buffer, Digest
from dsec_layers.store.base import BlobInfo, BlobWriter, Capabilities, Ref, Store
from tests.kit.store_wrapper import Wrapper

__all__ = ["Fault", "FaultyStore", "flipped", "half", "other", "zeros"]

_T = TypeVar("_T")


def zeros(data: bytes) -> bytes:
    """As many zeros."""
    return bytes(len(data))


def half(data: bytes) -> bytes:
    """The first half."""
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """One bit in the middle is wrong."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else data


def other(data: bytes) -> bytes:
    """The right bytes in the wrong place."""
    return data[1:] + data[:1]


@dataclass(slots=True)
class Fault:
    """What goes wrong, in calls of the method ``operation`` (``stat``, ``read``, ``write``, ``commit``, ``touch``, ``delete``, ``list``, ``get_ref``,
    ``set_ref``, ``list_refs``) after ``skip`` of them, for the next ``times`` (None: for good), where ``when`` is true of its digest or name.

    First it waits ``delay`` seconds and for the event ``until``; then ``error`` is raised (with ``late``, after the call has done its work), or the
    bytes read go through ``change``.
    """

    operation: str
    error: BaseException | None = None
    change: Callable[[bytes], bytes] | None = None
    delay: float = 0.0
    until: threading.Event | None = None
    times: int | None = None
    skip: int = 0
    when: Callable[[str], bool] | None = None
    late: bool = False


class FaultyStore(Wrapper):
    """Passes calls on, except where a fault was added. ``hits`` counts the calls that a fault met."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.hits = 0
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    @property
    def capabilities(self) -> Capabilities:
        """Those of the wrapped store, without local files: reads are to come by here."""
        inner = self.inner.capabilities
        return Capabilities(inner.connections, inner.read_size, local=False)

    def add(self, fault: Fault) -> Fault:
        """From now on ``fault`` happens. Several may apply to one call: the first added is met first."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """No more faults."""
        with self._lock:
            self._faults.clear()

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        return self.meet("stat", digest, lambda: self.inner.stat(digest))

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """The bytes, or what a fault makes of them."""
        faults = self._due("read", digest)
        data = _under(faults, lambda: self.inner.read(digest, offset, length))
        for fault in faults:
            data = fault.change(data) if fault.change else data
        return data

    def writer(self) -> BlobWriter:
        """Start a blob."""
        return _FaultyWriter(self, self.inner.writer())

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        return self.meet("touch", digest, lambda: self.inner.touch(digest))

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``."""
        return self.meet("delete", digest, lambda: self.inner.delete(digest, older_than=older_than))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``."""
        return self.meet("list", prefix, lambda: self.inner.list(prefix))

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        return self.meet("get_ref", name, lambda: self.inner.get_ref(name))

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""
        self.meet("set_ref", name, lambda: self.inner.set_ref(name, new, expected=expected))

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        return self.meet("list_refs", prefix, lambda: self.inner.list_refs(prefix))

    def meet(self, operation: str, subject: str, call: Callable[[], _T]) -> _T:
        """One call under the faults that apply to it."""
        return _under(self._due(operation, subject), call)

    def _due(self, operation: str, subject: str) -> tuple[Fault, ...]:
        due = []
        with self._lock:
            for fault in self._faults:
                if fault.operation != operation or fault.times == 0 or not (fault.when is None or fault.when(subject)):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                due.append(fault)
            self.hits += bool(due)
        return tuple(due)


def _under(faults: tuple[Fault, ...], call: Callable[[], _T]) -> _T:
    for fault in faults:
        if fault.delay:
            time.sleep(fault.delay)
        if fault.until is not None:
            fault.until.wait()
        if fault.error is not None and not fault.late:
            raise fault.error
    result = call()
    for fault in faults:
        if fault.error is not None:
            raise fault.error
    return result


class _FaultyWriter:
    def __init__(self, store: FaultyStore, inner: BlobWriter) -> None:
        self._store = store
        self._inner = inner

    def write(self, data: Buffer) -> int:
        return self._store.meet("write", "", lambda: self._inner.write(data))

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        return self._store.meet("commit", expected or "", lambda: self._inner.commit(expected))

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, value, trace)
