"""Verbs that change refs: ``env create``, ``rm``, ``push``, ``pull``, ``gc``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsec_layers.api.session import Session
from dsec_layers.digest import Digest
from dsec_layers.errors import NotFound, UsageError
from dsec_layers.layers.descriptor import MANIFEST, Descriptor, Kind
from dsec_layers.layers.manifest import Environment, Layer
from dsec_layers.registry.objects import publish_object, resolve
from dsec_layers.store.base import Store, check_ref

__all__ = ["Created", "Removed", "env_create", "rm", "set_ref"]


@dataclass(frozen=True, slots=True)
class Created:
    """A new environment: its name, digest, and the layers from bottom to top as (kind, digest)."""

    name: str
    digest: Digest
    layers: tuple[tuple[str, Digest], ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """A ref that is gone, and what it named."""

    name: str
    digest: Digest


def env_create(session: Session, name: str, *, base: str, workspace: str | None = None, toolkits: Sequence[str] = ()) -> Created:
    """Compose layers into an environment and name it. UsageError if a layer is not of the kind its place asks for."""
    name = check_ref(name)
    wanted = [(Kind.BASE, base), *([(Kind.WORKSPACE, workspace)] if workspace else []), *((Kind.TOOLKIT, item) for item in toolkits)]
    layers = tuple(_member(session.store, kind, text) for kind, text in wanted)
    digest = publish_object(session.store, Environment(layers))
    set_ref(session.store, name, digest)
    return Created(name, digest, tuple((str(kind), item.digest) for kind, item in layers))


def rm(session: Session, name: str) -> Removed:
    """Remove a ref. Its blobs go when nothing else refers to them (``gc``)."""
    ref = session.store.get_ref(check_ref(name))
    session.store.set_ref(ref.name, None, expected=ref.digest)
    return Removed(ref.name, ref.digest)


def set_ref(store: Store, name: str, digest: Digest) -> None:
    """Point ``name`` at ``digest`` by compare-and-swap with what it is now. Conflict if somebody changes it meanwhile."""
    try:
        expected: Digest | None = store.get_ref(name).digest
    except NotFound:
        expected = None
    if expected != digest:
        store.set_ref(name, digest, expected=expected)


def _member(store: Store, kind: Kind, text: str) -> tuple[Kind, Descriptor]:
    digest, found = resolve(store, text)
    if not isinstance(found, Layer):
        raise UsageError(f"{text} is an environment, not a layer", hint="an environment is made of layers; see dsec-layers ls")
    allowed = {Kind.WORKSPACE: (Kind.WORKSPACE, Kind.DIFF)}.get(kind, (kind,))
    if found.kind not in allowed:
        raise UsageError(f"{text} is a {found.kind} layer, not a {kind}", hint=f"give it as --{found.kind}, or name a {kind} layer")
    return kind, Descriptor(MANIFEST, digest, len(found.to_json()))
