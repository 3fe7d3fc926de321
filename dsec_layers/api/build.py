"""``build`` and ``import``: from an input to a named layer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsec_layers.api.session import Session
from dsec_layers.builders.names import Limits, Overrides
from dsec_layers.builders.pack.layer import PackResult, pack_layer
from dsec_layers.builders.sources.base import Source
from dsec_layers.builders.sources.detect import detect
from dsec_layers.builders.sources.directory import OverlaySource
from dsec_layers.digest import Digest
from dsec_layers.errors import UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.registry.refs import current, layer_before, swap_ref
from dsec_layers.store.base import check_ref

__all__ = ["Built", "build", "clear_steps", "import_source"]


@dataclass(frozen=True, slots=True)
class Built:
    """A layer that was built or imported, and what it took (bytes).

    ``image_bytes``: the content of all its files. ``stored_bytes``: what was new in the store. ``dedup_bytes``: content that was there already, in the layer or in others.
    """

    name: str
    kind: str
    digest: Digest
    inodes: int
    segments: int
    foreign_segments: int
    image_bytes: int
    stored_bytes: int
    dedup_bytes: int
    metadata_bytes: int
    seconds: float
    stages: Mapping[str, float]


def import_source(
    session: Session,
    source: str | Path,
    *,
    kind: str,
    name: str,
    prefix: str = "",
    layout: str = "segments",
    excludes: Iterable[str] = (),
    platform: str = "linux/amd64",
    workers: int | None = None,
    level: int = 3,
    epoch: int | None = None,
    limits: Mapping[str, int] | None = None,
) -> Built:
    """Import a directory, tar, OCI image or docker archive as a layer and name it ``name``. ``-`` is standard input. ``level``: zstd's.

    ``limits``: what the input may cost, by name, such as ``{"spool": 16 << 30}`` (docs/sources.md); LimitError beyond.
    """
    name, wanted = check_ref(name), _kind(kind)
    if not str(source):
        raise UsageError("the name of the source is empty", hint="a directory, a file, or - for standard input")
    if prefix and (wanted is not Kind.TOOLKIT or not prefix.startswith("/") or ".." in PurePosixPath(prefix).parts):
        raise UsageError(f"a prefix is an absolute path without '..', of a toolkit: {prefix[:200]!r}")
    before = current(session.store, name)
    began = time.monotonic()
    found = _source(source, wanted, platform, tuple(excludes), Overrides(epoch=epoch), Limits.of(limits or {}))
    image = found.image_config
    packed = pack_layer(
        session.store,
        found.ingest,
        kind=wanted,
        name=name,
        catalog=session.catalog,
        previous=layer_before(session.store, before),
        env=image.env if image else None,
        workdir=image.workdir if image else "",
        image=image.document if image else None,
        prefix=prefix,
        recipe=lambda: {"import": {"type": found.kind, **{k: v for k, v in found.describe().items() if k == "digest"}}},
        epoch=epoch,
        workers=workers,
        level=level,
        layout=layout,
        progress=session.progress,
    )
    swap_ref(session.store, name, packed.digest, before)
    return built(name, wanted, packed, time.monotonic() - began)


def build(
    session: Session,
    layerfile: str | Path,
    *,
    name: str | None = None,
    workers: int | None = None,
    level: int = 3,
    use_cache: bool = True,
    epoch: int | None = None,
    limits: Mapping[str, int] | None = None,
) -> Built:
    """Build the layer that a layer file describes (docs/layerfile.md) and name it: ``name``, or what the file says. ``level``: zstd's.

    ``limits``: what the source may cost, as in ``import_source``.
    """
    from dsec_layers.builders.layerfile.build import build_layerfile, load_recipe

    began = time.monotonic()
    recipe = load_recipe(Path(layerfile))
    name = check_ref(name or recipe.name)
    before = current(session.store, name)
    packed = build_layerfile(
        recipe, session,
        name=name, previous=layer_before(session.store, before), workers=workers, level=level, use_cache=use_cache, epoch=epoch,
        limits=Limits.of(limits or {}),
    )  # fmt: skip
    swap_ref(session.store, name, packed.digest, before)
    return built(name, recipe.kind, packed, time.monotonic() - began)


def clear_steps(session: Session) -> None:
    """Remove the results of build steps that are kept in the cache, but for those a running build uses."""
    from dsec_layers.builders.layerfile.stepcache import StepCache

    with StepCache(session.cache / "steps", limit=0):
        pass


def built(name: str, kind: Kind, packed: PackResult, seconds: float) -> Built:
    """The result of a build in the command line's terms."""
    return Built(
        name=name,
        kind=str(kind),
        digest=packed.digest,
        inodes=packed.inodes,
        segments=packed.segments,
        foreign_segments=packed.foreign_segments,
        image_bytes=packed.content,
        stored_bytes=packed.stored,
        dedup_bytes=packed.within + packed.against,
        metadata_bytes=packed.metadata,
        seconds=seconds,
        stages=packed.seconds,
    )


def _source(source: str | Path, kind: Kind, platform: str, excludes: tuple[str, ...], overrides: Overrides, limits: Limits) -> Source:
    """The input. A directory that becomes a workspace is read as what overlayfs leaves in an upper: its whiteouts hide the base's names, and show nowhere."""
    if kind is Kind.WORKSPACE and source != "-" and Path(source).is_dir() and not (Path(source) / "oci-layout").is_file():
        return OverlaySource([Path(source)], excludes=excludes, overrides=overrides, limits=limits)
    return detect(source, platform=platform, excludes=excludes, overrides=overrides, limits=limits)


def _kind(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError as error:
        raise UsageError(f"unknown kind {text!r}", hint="base, workspace or toolkit") from error
