"""Builds the layer that a layer file describes: parent, source, copies, steps, scrub, pack.

Two ways. A layer without steps is read straight from its inputs into the store, without root. One with steps is staged: inputs are written out once (step cache),
each step runs over them and leaves a writable layer, and the stack of these is scrubbed and packed. Setting a ref is up to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache as cache_result
from pathlib import Path
from typing import Any, Final, Protocol

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.layerfile import debian
from dsec_layers.builders.layerfile.assemble import Finish, ingest_copies, ingest_layers, input_key, resolve_input
from dsec_layers.builders.layerfile.recipe import DebianInput, FileInput, Recipe, load_recipe
from dsec_layers.builders.layerfile.scrub import Removed, rules_for
from dsec_layers.builders.layerfile.stepcache import StepCache
from dsec_layers.builders.layerfile.steps import Ground, chain_key, run_steps
from dsec_layers.builders.names import Limits, Overrides
from dsec_layers.builders.output.directory import materialize
from dsec_layers.builders.overlay.stack import stack_uppers
from dsec_layers.builders.overlay.trees import Underneath, cut_to_prefix, rooted
from dsec_layers.builders.pack.layer import Ingest, PackResult, pack_layer
from dsec_layers.builders.sources.archive import TarSource
from dsec_layers.builders.sources.base import ImageConfig, Source
from dsec_layers.builders.sources.detect import detect
from dsec_layers.digest import Digest
from dsec_layers.erofs.reader import Image
from dsec_layers.erofs.tree import Tree
from dsec_layers.errors import HostError, InputError, UsageError
from dsec_layers.fuse.client.host import Host
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.image import overlay_image
from dsec_layers.layers.manifest import Layer, LayerConfig
from dsec_layers.progress import SILENT, Progress
from dsec_layers.registry.catalog import Catalog
from dsec_layers.registry.objects import load_config, load_layer, load_metadata, members_of, resolve
from dsec_layers.sandbox.variables import merge_variables
from dsec_layers.store.base import Store

__all__ = ["Workplace", "build_layerfile", "load_recipe"]

_KINDS: Final[dict[str, Any]] = {"dir": "directory", "tar": "tar", "oci": "oci", "docker": "docker"}
_LISTED: Final = 50


class Workplace(Protocol):
    """Where a build takes place: ``dsec_layers.api.session.Session``, or a stand-in."""

    progress: Progress
    cache: Path

    @property
    def driver(self) -> str | None:
        """The on-demand driver; None: the best that works here."""

    @property
    def store(self) -> Store:
        """Where parents come from and the layer goes."""

    @property
    def catalog(self) -> Catalog:
        """The chunk catalog of the store."""

    @property
    def host(self) -> Host:
        """What mounts the parent's layers for steps."""


def build_layerfile(
    recipe: Recipe,
    place: Workplace,
    *,
    name: str | None = None,
    previous: Digest | None = None,
    workers: int | None = None,
    level: int = 3,
    use_cache: bool = True,
    epoch: int | None = None,
    environ: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> PackResult:
    """Build and publish a layer; nothing is named.

    ``name``: put into the layer's config instead of the file's. ``previous``: the layer it is to replace, looked into for chunks first. ``use_cache``: take results of
    steps from the cache. ``epoch``: goes before the file's. ``environ``: the host's environment, for proxies and CA bundle (None: this process's).
    ``limits``: what the source may cost.
    Raises UsageError, NotFound, StepError, and what sources, sandbox and store raise.
    """
    build = _Build(recipe, place, recipe.epoch if epoch is None else epoch, environ, limits)
    with ExitStack() as stack:
        cache = stack.enter_context(StepCache(place.cache / "steps", fresh=not use_cache))
        ingest = build.staged(cache, stack) if recipe.steps else build.direct(cache)
        return pack_layer(
            place.store,
            ingest,
            kind=recipe.kind,
            name=name or recipe.name,
            catalog=place.catalog,
            previous=previous,
            parent=build.parent if recipe.kind is Kind.WORKSPACE else None,
            env={**build.image.env, **recipe.env},
            workdir=recipe.workdir or build.image.workdir,
            image=overlay_image(build.image.document, recipe.image) if build.image.document or recipe.image else None,
            prefix=recipe.prefix,
            recipe={"layerfile": recipe.document},
            epoch=build.epoch,
            workers=workers,
            level=level,
            progress=place.progress,
        )


class _Build:
    """One build: the recipe with what its names stand for."""

    def __init__(
        self, recipe: Recipe, place: Workplace, epoch: int | None, environ: Mapping[str, str] | None, limits: Limits | None
    ) -> None:
        self.recipe, self.place, self.epoch, self._environ, self._limits = recipe, place, epoch, environ, limits
        self.image = ImageConfig()
        self.parent: Digest | None = None
        self._members: list[Digest] = []
        self._layers: list[Layer] = []
        self._reported = False
        if recipe.parent is not None:
            self.parent, found = resolve(place.store, recipe.parent)
            self._members = members_of(self.parent, found)
            self._layers = [load_layer(place.store, member) for member in self._members]

    # -- without steps

    def direct(self, cache: StepCache) -> Ingest:
        """Reads the inputs as they are."""
        recipe = self.recipe
        below = self._below()
        source = self._source(cache, recipe.excludes)

        def ingest(sink: ContentSink, progress: Progress) -> Tree:
            trees = [self._placed(source, sink, progress)] if source is not None else []
            if recipe.copies:
                trees.append(ingest_copies(recipe.copies, recipe.directory, below, sink, progress))
            tree = stack_uppers(trees)
            if recipe.prefix and (outside := cut_to_prefix(tree, recipe.prefix)):
                raise UsageError(
                    f"the toolkit has {outside[0]}, which is outside its prefix {recipe.prefix}", hint="set `to`, or the prefix"
                )
            return self._checked(tree)

        return ingest

    # -- with steps

    def staged(self, cache: StepCache, stack: ExitStack) -> Ingest:
        """Writes the inputs out, runs the steps, and reads what they left."""
        if os.geteuid() != 0:
            raise HostError("run steps need root", hint="sudo; a layer file without run steps builds without")
        recipe = self.recipe
        source, source_key = self._written_source(cache)
        copied, copied_key = self._written_copies(cache)

        @cache_result
        def lower() -> tuple[Path, ...]:
            return (*([copied] if copied else []), *([source] if source else []), *self._mounted(stack))

        ground = Ground(
            lower=lower,
            key=chain_key(parent=self._members, source=source_key, copies=copied_key),
            env=merge_variables([*(config.env or {} for config in self._configs()), self.image.env, recipe.env]),
        )
        uppers = run_steps(
            recipe.steps,
            ground,
            cache,
            state=self.place.cache / "build",
            epoch=self.epoch,
            progress=self.place.progress,
            environ=self._environ,
        )
        finish = Finish(
            rules=rules_for(recipe.scrub.disable, recipe.scrub.paths),
            keep=recipe.scrub.keep,
            excludes=recipe.excludes,
            flatten=recipe.kind is not Kind.WORKSPACE,
            prefix=recipe.prefix,
        )
        layers = [*([copied] if copied else []), *uppers]
        below = self._below()

        def ingest(sink: ContentSink, progress: Progress) -> Tree:
            return self._checked(ingest_layers(source, layers, finish, below, sink, progress, report=self._report))

        return ingest

    def _written_source(self, cache: StepCache) -> tuple[Path | None, str | None]:
        """The directory of the source, and its key."""
        source = self._source(cache, ())
        if source is None:
            return None, None
        if isinstance(self.recipe.source, DebianInput):
            content = self._debian_key(self.recipe.source)
        else:
            content = input_key(source.ingest, self.epoch)
        to = self.recipe.source.to if isinstance(self.recipe.source, FileInput) else "/"
        return self._written(cache, chain_key(source=content, to=to), lambda sink, progress: self._placed(source, sink, progress))

    def _written_copies(self, cache: StepCache) -> tuple[Path | None, str | None]:
        recipe, below = self.recipe, self._below()
        if not recipe.copies:
            return None, None

        def ingest(sink: ContentSink, progress: Progress) -> Tree:
            return ingest_copies(recipe.copies, recipe.directory, below, sink, progress)

        return self._written(cache, chain_key(copies=input_key(ingest, self.epoch)), ingest)

    def _written(self, cache: StepCache, key: str, ingest: Ingest) -> tuple[Path, str]:
        if cache.get(key) is None:
            with cache.new(key) as place:
                (place / "tree").mkdir()
                materialize(ingest, place / "tree", self.place.progress)
        found = cache.get(key)
        assert found is not None
        return found / "tree", key

    # -- inputs

    def _source(self, cache: StepCache, excludes: Sequence[str]) -> Source | None:
        """The source of the layer file, opened. A Debian root is made now, or found in the cache."""
        wanted = self.recipe.source
        if wanted is None:
            return None
        if isinstance(wanted, DebianInput):
            return TarSource(self._debian_tar(wanted, cache), f"Debian {wanted.suite}")
        path = resolve_input(self.recipe.directory, wanted.path)
        source = detect(
            path,
            kind=_KINDS[wanted.type],
            platform=wanted.platform,
            reference=wanted.reference,
            excludes=(*wanted.excludes, *excludes) if wanted.type == "dir" else (),
            overrides=Overrides(*(wanted.owner or (None, None))),
            limits=self._limits,
        )
        self.image = source.image_config or ImageConfig()
        return source

    def _debian_key(self, wanted: DebianInput) -> str:
        return chain_key(debian=debian.describe(wanted), epoch=self.epoch)

    def _debian_tar(self, wanted: DebianInput, cache: StepCache) -> Path:
        key = self._debian_key(wanted)
        found = cache.get(key)
        if found is None:
            with cache.new(key) as place:
                debian.bootstrap(wanted, place / "root.tar", epoch=self.epoch, environ=self._environ, progress=self.place.progress)
            found = cache.get(key)
            assert found is not None
        else:
            self.place.progress.info(f"mmdebstrap: Debian {wanted.suite} (cached)")
        return found / "root.tar"

    def _placed(self, source: Source, sink: ContentSink, progress: Progress) -> Tree:
        """The source's tree where the layer file wants it."""
        tree = source.ingest(sink, progress)
        wanted = self.recipe.source
        return rooted(tree, wanted.to, self._below()) if isinstance(wanted, FileInput) else tree

    # -- the parent

    def _mounted(self, stack: ExitStack) -> tuple[Path, ...]:
        """The parent's layers, mounted until ``stack`` ends; topmost first."""
        if not self._members:
            return ()
        host = self.place.host
        lease = stack.enter_context(host.attach(self.place.store, self._members, driver=self.place.driver))
        for warning in host.warnings:
            self.place.progress.warning(warning)
        return tuple(reversed(lease.paths))

    def _below(self) -> Underneath:
        """What the layer will lie on. A toolkit lies on anything, so on nothing in particular."""
        layers = self._layers if self.recipe.kind is Kind.WORKSPACE else []
        store = self.place.store
        return Underneath(
            lambda: [Image(load_metadata(store, layer)[0]).tree(metadata_only=True) for layer in reversed(layers) if not layer.compressed]
        )

    def _configs(self) -> list[LayerConfig]:
        return [load_config(self.place.store, layer) for layer in self._layers]

    # -- the result

    def _checked(self, tree: Tree) -> Tree:
        prefix = self.recipe.prefix
        inode = tree.root
        for part in os.fsencode(prefix).strip(b"/").split(b"/") if prefix else ():
            found = (inode.children or {}).get(part)
            if found is None or not found.is_dir:
                raise InputError(f"the toolkit has no directory {prefix}", hint="its source or steps must put it there")
            inode = found
        return tree

    def _report(self, removed: list[Removed], outside: list[str]) -> None:
        """Say once what does not become part of the layer."""
        progress = self.place.progress if not self._reported else SILENT
        self._reported = True
        for item in removed:
            progress.info(f"scrubbed {item.path}: {item.why}, {item.size:,} bytes")
        for path in outside[:_LISTED]:
            progress.info(f"left out {path}: outside {self.recipe.prefix}")
        if len(outside) > _LISTED:
            progress.info(f"left out {len(outside) - _LISTED} more outside {self.recipe.prefix}")
