"""Verbs on refs and what they reach: ``env create``, ``rm``, ``push``, ``pull``, ``gc``, ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsec_layers.api.results import Verified
from dsec_layers.api.session import Session
from dsec_layers.digest import Digest, is_digest
from dsec_layers.errors import NotFound, UsageError
from dsec_layers.layers.descriptor import MANIFEST, Descriptor, Kind
from dsec_layers.layers.manifest import Environment, Layer
from dsec_layers.registry.collect import GRACE, Sweep, remove_ref, sweep
from dsec_layers.registry.copy import Copied, copy_object
from dsec_layers.registry.fsck import judge
from dsec_layers.registry.objects import publish_object, reach, resolve, resolve_any, set_tag
from dsec_layers.registry.verify import Report
from dsec_layers.registry.verify import repair as repair_object
from dsec_layers.registry.verify import verify as verify_object
from dsec_layers.store.base import Ref, Store, check_ref
from dsec_layers.store.open import open_store

__all__ = ["Copied", "Created", "Verified", "env_create", "gc", "pull", "push", "rm", "rm_all", "verify"]


@dataclass(frozen=True, slots=True)
class Created:
    """A new environment: its name, digest, and the layers from bottom to top as (kind, digest)."""

    name: str
    digest: Digest
    layers: tuple[tuple[str, Digest], ...]


def env_create(session: Session, name: str, *, base: str, workspace: str | None = None, toolkits: Sequence[str] = ()) -> Created:
    """Compose layers into an environment and name it. UsageError if a layer is not of the kind its place asks for."""
    name = check_ref(name)
    wanted = [(Kind.BASE, base), *([(Kind.WORKSPACE, workspace)] if workspace else []), *((Kind.TOOLKIT, item) for item in toolkits)]
    layers = tuple(_member(session.store, kind, text) for kind, text in wanted)
    digest = publish_object(session.store, Environment(layers))
    set_tag(session.store, name, digest)
    return Created(name, digest, tuple((str(kind), item.digest) for kind, item in layers))


def rm(session: Session, name: str) -> Ref:
    """Remove a ref; returns what it was. Its blobs go when nothing else refers to them (``gc``)."""
    return remove_ref(session.store, name)


def rm_all(session: Session, names: Sequence[str]) -> list[Ref]:
    """Remove refs as ``rm`` does. NotFound before anything is removed if one of them is not there."""
    for name in names:
        session.store.get_ref(name)
    return [rm(session, name) for name in names]


def gc(session: Session, *, grace: float | None = None, dry_run: bool = False, force: bool = False) -> Sweep:
    """Delete blobs that no ref reaches and that are older than ``grace`` seconds (default: a day)."""
    chosen = GRACE if grace is None else grace
    swept = sweep(session.store, grace=chosen, dry_run=dry_run, force=force, progress=session.progress)
    if not dry_run:
        session.catalog.forget_blobs(info.digest for info in swept.deleted)
    return swept


def push(session: Session, text: str, target: str, *, name: str | None = None) -> Copied:
    """Copy a layer or environment and all it needs to the store ``target``, and name it there as here (or ``name``)."""
    return _copy(session.store, open_store(target), text, name, session)


def pull(session: Session, text: str, source: str, *, name: str | None = None) -> Copied:
    """Copy a layer or environment and all it needs from the store ``source``, and name it here as there (or ``name``)."""
    return _copy(open_store(source, create=False), session.store, text, name, session)


def verify(session: Session, texts: Sequence[str] = (), *, deep: bool = False, repair: str | None = None) -> list[Verified]:
    """Check the named objects, or every ref: blobs present and of the right size; ``deep``: every byte, every digest, metadata by our reader and by fsck.erofs.

    ``repair``: another store, from which what is missing or corrupt is fetched.
    """
    replica = open_store(repair, create=False) if repair else None
    reports, judged = [], set()
    for text in list(texts) or [ref.name for ref in session.store.list_refs()]:
        digest = _digest_of(session.store, text)
        report = verify_object(session.store, digest, deep=deep, progress=session.progress)
        report, repaired = _repaired(session, replica, report, deep) if replica is not None else (report, ())
        problems = [str(finding) for finding in report.findings]
        if deep and not problems:
            members = [member for member, found in reach(session.store, digest) if isinstance(found, Layer) and member not in judged]
            problems = [problem for member in members if (problem := judge(session.store, member, session.progress))]
            judged.update(members)
        reports.append(Verified(text, digest, report.blobs, report.bytes, tuple(problems), repaired))
    return reports


def _digest_of(store: Store, text: str) -> Digest:
    """What ``text`` names, whether its manifest can be read or not."""
    if is_digest(text):
        return store.stat(text).digest
    try:
        return store.get_ref(text).digest
    except (NotFound, UsageError):
        return resolve_any(store, text)[0]


def _repaired(session: Session, replica: Store, report: Report, deep: bool) -> tuple[Report, tuple[Digest, ...]]:
    """Repair and verify again until nothing is found or nothing helps: a manifest that was missing hides what it needs."""
    repaired: dict[Digest, None] = {}
    while report.findings:
        fetched = repair_object(session.store, replica, report.findings, progress=session.progress)
        if not set(fetched) - repaired.keys():
            break
        repaired |= dict.fromkeys(fetched)
        report = verify_object(session.store, report.digest, deep=deep, progress=session.progress)
    return report, tuple(repaired)


def _copy(source: Store, target: Store, text: str, name: str | None, session: Session) -> Copied:
    digest, _ = resolve_any(source, text)
    if name is None and not text.startswith("sha256:"):
        name = check_ref(text)
    return copy_object(source, target, digest, name=name, progress=session.progress)


def _member(store: Store, kind: Kind, text: str) -> tuple[Kind, Descriptor]:
    digest, found = resolve(store, text)
    if not isinstance(found, Layer):
        raise UsageError(f"{text} is an environment, not a layer", hint="an environment is made of layers; see dsec-layers ls")
    allowed = {Kind.WORKSPACE: (Kind.WORKSPACE, Kind.DIFF)}.get(kind, (kind,))
    if found.kind not in allowed:
        raise UsageError(f"{text} is a {found.kind} layer, not a {kind}", hint=f"give it as --{found.kind}, or name a {kind} layer")
    return kind, Descriptor(MANIFEST, digest, store.stat(digest).size)
