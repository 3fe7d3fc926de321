"""Garbage collection: what no ref reaches and nobody touched for a grace period goes.

Safe beside publishers, without locks, by two rules. Whoever refers to blobs touches them first, and makes the reference visible within the grace period
(``registry/objects.py`` does). The collector lists blobs before it reads refs, and deletes each blob only if it still is older than the grace period at that very
moment (``Store.delete(older_than=…)``). So a blob that a publisher is about to refer to is either seen to be young, or gone before the publisher's touch,
which then says NotFound and the publisher stores the bytes again.

Manifests younger than the grace period count as references too: a layer that was just built keeps its blobs until it gets a name, or is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dsec_layers.digest import Digest
from dsec_layers.errors import CorruptError, DsecError, StoreError, UsageError
from dsec_layers.layers.manifest import Environment, Object
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.objects import children, peek, reach
from dsec_layers.store.base import BlobInfo, Ref, Store, check_ref

__all__ = ["GRACE", "LEAST_GRACE", "Sweep", "referenced", "remove_ref", "sweep"]

GRACE: Final = 24 * 3600.0
"""Seconds for which what nobody refers to stays; longer than any build, push or clock error."""

LEAST_GRACE: Final = 3600.0
"""The shortest grace period that leaves publishers, caches of file systems and clocks that differ some room."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a collection did, or would do: ``deleted`` blobs and their ``bytes``; ``young`` unreferenced blobs left for now; ``kept`` blobs in use."""

    deleted: tuple[BlobInfo, ...]
    bytes: int
    young: int
    kept: int
    dry_run: bool = False


def referenced(store: Store, extra: Iterable[Digest] = ()) -> set[Digest]:
    """Every blob that a ref or an object in ``extra`` needs, manifests among them.

    CorruptError if an object cannot be read: what it needs is then unknown, which is not the same as nothing.
    """
    needed: set[Digest] = set()
    for name, root in _roots(store.list_refs(), extra):
        if root in needed:
            continue
        try:
            for digest, value in reach(store, root):
                needed.add(digest)
                needed.update(item.digest for item in children(value))
        except StoreError:
            raise
        except DsecError as error:
            hint = "repair it from another store (verify --repair), or remove the ref"
            raise CorruptError(f"{name}: what it needs is unknown: {error.message}", hint=hint) from error
    return needed


def remove_ref(store: Store, name: str) -> Ref:
    """Remove a ref, whatever it is now; returns what it was. NotFound; Conflict if somebody changes it at the same moment."""
    ref = store.get_ref(check_ref(name))
    store.set_ref(ref.name, None, expected=ref.digest)
    return ref


def sweep(
    store: Store,
    *,
    grace: float = GRACE,
    keep: Iterable[Digest] = (),
    dry_run: bool = False,
    progress: Progress = SILENT,
    force: bool = False,
) -> Sweep:
    """Delete the blobs that neither a ref nor ``keep`` (objects in use, such as mounts) reaches and that are older than ``grace`` seconds.

    Manifests go before what they refer to, so that one that is left is whole. UsageError for a grace below an hour unless ``force``: then nobody
    may be publishing. CorruptError, and nothing is deleted, if a ref's object cannot be read.
    """
    if grace < LEAST_GRACE and not force:
        raise UsageError(f"a grace period of {grace:g} s is not safe beside publishers", hint=f"at least {LEAST_GRACE:g} s, or force it")
    cutoff = time.time() - grace
    blobs = sorted(store.list(), key=lambda info: info.digest)  # before the refs: what is named from here on is young
    needed = referenced(store, keep)
    loose = [info for info in blobs if info.digest not in needed]
    young = [info for info in loose if info.modified >= cutoff]
    needed |= _held_by_young(store, young)
    doomed = [info for info in loose if info.modified < cutoff and info.digest not in needed]
    gone: list[BlobInfo] = []
    with progress.task("Deleting", total=len(doomed), unit="") as task:
        for info in sorted(doomed, key=lambda info: (_rank(peek(store, info)), info.digest)):
            if dry_run or store.delete(info.digest, older_than=cutoff):
                gone.append(info)
            task.advance()
    return Sweep(tuple(gone), sum(info.size for info in gone), len(loose) - len(gone), len(blobs) - len(loose), dry_run)


def _roots(refs: Iterable[Ref], extra: Iterable[Digest]) -> list[tuple[str, Digest]]:
    return [(ref.name, ref.digest) for ref in refs] + [(digest, digest) for digest in extra]


def _held_by_young(store: Store, young: Iterable[BlobInfo]) -> set[Digest]:
    """What young manifests refer to, directly or not. One that is not whole holds what it names."""
    held: set[Digest] = set()
    left = list(young)
    while left:
        value = peek(store, left.pop())
        if value is not None:
            held.update(item.digest for item in children(value))
        if isinstance(value, Environment):
            left += [BlobInfo(item.digest, item.size) for item in children(value)]
    return held


def _rank(value: Object | None) -> int:
    return 2 if value is None else 0 if isinstance(value, Environment) else 1
