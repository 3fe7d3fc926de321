"""OCI image layouts (a directory, or a tar of one) and ``docker save`` archives as sources: the layers of one image merged into one tree.

Everything is verified: each document and layer against its digest, each uncompressed layer against the config's diff ID.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dsec_layers.builders.content import ContentSink
from dsec_layers.builders.names import Limits, Overrides, apply_overrides, shown
from dsec_layers.builders.sources.archive import warn_of_oddities
from dsec_layers.builders.sources.base import ImageConfig
from dsec_layers.builders.sources.blocks import FileBlocks
from dsec_layers.builders.sources.image import (
    MAX_DOCUMENT,
    Blob,
    DockerImage,
    Platform,
    parse_config,
    parse_docker,
    parse_index,
    parse_manifest,
)
from dsec_layers.builders.sources.inputs import Opened, Seen, open_regular, tar_reader
from dsec_layers.builders.sources.merge import merge_layers
from dsec_layers.builders.sources.tar import TarReader
from dsec_layers.digest import Digest, is_digest, sha256_digest
from dsec_layers.erofs.tree import Tree
from dsec_layers.errors import CorruptError, InputError, LimitError, NotFound, UsageError
from dsec_layers.fsio import pread_exact
from dsec_layers.progress import SILENT, Progress

__all__ = ["IMAGE_NAME", "MAX_MEMBERS", "ArchiveFiles", "DirectoryFiles", "ImageFiles", "ImageSource", "load_docker", "load_oci", "path_of"]

MAX_MEMBERS: Final = 100_000
"""Files in a tar of an image."""

IMAGE_NAME: Final = re.compile(
    r"(?:\.|oci-layout|index\.json|manifest\.json|repositories|blobs(?:/[a-z0-9]+(?:/[0-9a-f]{64,128})?)?"
    r"|[0-9a-f]{64}(?:\.json|\.tar|/VERSION|/json|/layer\.tar)?)"
)
"""Names in a tar of an image."""

_MAX_DEPTH: Final = 4  # indexes within indexes


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a file: descriptor, offset, size."""

    fd: int
    start: int
    size: int


class ImageFiles(Protocol):
    """The files of an image layout or archive, by name."""

    @property
    def what(self) -> str:
        """What messages call it."""

    def open(self, name: str) -> Any:
        """A context with the Section of a file. Raises NotFound or InputError."""


class DirectoryFiles:
    """The files of an image layout in a directory."""

    def __init__(self, path: Path) -> None:
        self.what = str(path)
        self._path = path

    @contextmanager
    def open(self, name: str) -> Iterator[Section]:
        """A file. Where links lead does not matter: what is read is verified by digest."""
        fd = open_regular(self._path / name, f"{self.what}/{name}")
        try:
            yield Section(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)


class ArchiveFiles:
    """The files of an image in an uncompressed tar, found by one walk over its headers. ``opener`` gives a context with the tar's descriptor.

    Raises InputError for a damaged tar, and for the first name that does not match ``only``; LimitError for more than MAX_MEMBERS files.
    """

    def __init__(self, what: str, opener: Callable[[], Any], *, only: re.Pattern[str] | None = None) -> None:
        self.what = what
        self._opener = opener
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with opener() as fd:
            reader = TarReader(FileBlocks(fd, 0, os.fstat(fd).st_size, what), what)
            for name, inode, target in reader:
                path = path_of(name)
                if only is not None and not only.fullmatch(path):
                    raise InputError(f"{what} has {shown(name)}, which no image has")
                self._files.pop(path, None)
                self._links.pop(path, None)
                if inode is None:
                    self._links[path] = path_of(target)
                elif inode.data is not None:
                    self._links[path] = posixpath.normpath(posixpath.join(posixpath.dirname(path), os.fsdecode(inode.data)))
                elif inode.children is None:
                    self._files[path] = reader.content_at
                if len(self._files) + len(self._links) > MAX_MEMBERS:
                    raise LimitError(f"{what} has more than {MAX_MEMBERS} files: no image is like that")

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._links

    @contextmanager
    def open(self, name: str) -> Iterator[Section]:
        """A file; older ``docker save`` makes links from one layer to an equal one."""
        path = posixpath.normpath(name)
        for _ in range(8):
            if path not in self._links:
                break
            path = self._links[path]
        if path not in self._files:
            raise NotFound(f"{self.what} has no {shown(os.fsencode(name))}")
        with self._opener() as fd:
            yield Section(fd, *self._files[path])


def path_of(name: bytes) -> str:
    """A name in a tar of an image as its documents spell it."""
    return posixpath.normpath(os.fsdecode(name).lstrip("/"))


def _read(files: ImageFiles, name: str, blob: Blob | None = None) -> bytes:
    """A whole document, verified if its descriptor is known."""
    what = f"{files.what}: {shown(os.fsencode(name))}"
    with files.open(name) as section:
        if section.size > MAX_DOCUMENT:
            raise InputError(f"{what} has {section.size} bytes, over the limit of {MAX_DOCUMENT}")
        try:
            data = pread_exact(section.fd, section.size, section.start)
        except (OSError, EOFError) as error:
            raise InputError(f"cannot read {what}: {error}") from error
    if blob is not None and (len(data) != blob.size or sha256_digest(data) != blob.digest):
        raise CorruptError(f"{what} does not match its digest or size")
    return data


def _blob_name(blob: Blob) -> str:
    return f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"


class _ImageLayer:
    """One layer of an image. What is read must match ``digest`` (of the stored bytes) and ``diff_id``; read again, the same stored bytes will do."""

    def __init__(self, files: ImageFiles, name: str, title: str, diff_id: Digest, blob: Blob | None, limits: Limits) -> None:
        self._files, self._name, self._title, self._diff_id, self._blob, self._limits = files, name, title, diff_id, blob, limits
        self._digest = blob.digest if blob else None
        self._verified = False
        self.progress: Progress = SILENT

    @contextmanager
    def open(self) -> Iterator[TarReader]:
        """Read and verify it."""
        what = f"{self._files.what}: {self._title}"
        seen = Seen(with_tar=not self._verified)
        with self._files.open(self._name) as section, self.progress.task(self._title, total=section.size) as task:
            if self._blob is not None and section.size != self._blob.size:
                raise CorruptError(f"{what} has {section.size} bytes, its descriptor says {self._blob.size}")
            source = Opened(FileBlocks(section.fd, section.start, section.size, what), section.size)
            with tar_reader(source, what, limits=self._limits, advance=task.advance, seen=seen) as reader:
                yield reader
        stored, tar = (f"sha256:{item.hexdigest()}" for item in (seen.stored, seen.tar))
        if stored != (self._digest or stored):
            raise CorruptError(f"{what} does not match its digest {self._digest}: it is {stored}")
        if self._verified:
            return
        if tar != self._diff_id:
            raise CorruptError(f"{what}, uncompressed, does not match the config's diff ID {self._diff_id}: it is {tar}")
        self._digest, self._verified = stored, True
        warn_of_oddities(self.progress, what, reader.dropped, reader.whiteouts)


class ImageSource:
    """One image: ``kind`` is ``oci`` or ``docker``."""

    def __init__(
        self, kind: str, layers: Sequence[_ImageLayer], config: ImageConfig, about: dict[str, Any], overrides: Overrides, limits: Limits
    ) -> None:
        self._kind, self._layers, self._config, self._about = kind, layers, config, about
        self._overrides, self._limits = overrides, limits

    @property
    def kind(self) -> str:
        """``oci`` or ``docker``."""
        return self._kind

    @property
    def image_config(self) -> ImageConfig | None:
        """The settings of the image."""
        return self._config

    def ingest(self, sink: ContentSink, progress: Progress = SILENT) -> Tree:
        """Merge the layers: the content of what survives goes to ``sink``. Raises InputError, LimitError, and CorruptError for bytes that match no digest."""
        for layer in self._layers:
            layer.progress = progress
        tree = merge_layers(self._layers, sink, self._limits)
        apply_overrides(tree, self._overrides)
        return tree

    def describe(self) -> dict[str, Any]:
        """Kind, name, digest (of the manifest; of the config for a Docker archive), platform, digests of the layers."""
        return {"kind": self._kind, **self._about}


def load_oci(
    files: ImageFiles,
    *,
    platform: Platform,
    reference: str | None = None,
    overrides: Overrides | None = None,
    limits: Limits | None = None,
) -> ImageSource:
    """The image of a layout for ``platform``; ``reference`` (a name in the index, or a digest) chooses among several."""
    top = parse_index(_read(files, "index.json"), f"{files.what}: index.json")
    if top is None:
        raise InputError(f"{files.what}: index.json is no image index")
    chosen = _chosen(files, top, platform, reference)
    document = _read(files, _blob_name(chosen), chosen)
    what = f"{files.what}: the manifest {chosen.digest}"
    manifest = parse_manifest(document, what)
    config, diff_ids = parse_config(
        _read(files, _blob_name(manifest.config), manifest.config),
        len(manifest.layers),
        f"{files.what}: the config {manifest.config.digest}",
    )
    limits = limits or Limits()
    count = len(diff_ids)
    layers = [
        _ImageLayer(files, _blob_name(blob), f"layer {number} of {count} ({blob.digest[:19]})", diff_id, blob, limits)
        for number, (blob, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True), 1)
    ]
    about = {
        "name": files.what,
        "digest": chosen.digest,
        "platform": str(Platform(config.os, config.architecture)),
        "layers": [blob.digest for blob in manifest.layers],
    }
    return ImageSource("oci", layers, config, about, overrides or Overrides(), limits)


def _chosen(files: ImageFiles, top: Sequence[Blob], platform: Platform, reference: str | None) -> Blob:
    """The manifest for a platform. Of an image for several platforms the first that fits is taken; several images are for the user to choose from."""
    named = [blob for blob in top if not blob.attestation]
    if reference is not None:
        named = [blob for blob in named if reference in (*blob.names, blob.digest)]
        if not named:
            raise NotFound(f"{files.what} has no image {reference!r}", hint=_hint(top))
    found: dict[Digest, Blob] = {}
    seen: list[str] = []
    for blob in named:
        match = _for_platform(files, blob, platform, seen, 0)
        if match is not None:
            found.setdefault(match.digest, match)
    if not found:
        raise NotFound(f"{files.what} has no image for {platform}", hint=f"it has: {', '.join(sorted(set(seen)))[:500] or 'none at all'}")
    if len(found) > 1:
        raise UsageError(f"{files.what} has {len(found)} images for {platform}", hint=_hint(top))
    return next(iter(found.values()))


def _hint(top: Sequence[Blob]) -> str:
    names = [(*blob.names, blob.digest)[0] for blob in top if not blob.attestation]
    return f"choose one by its reference: {', '.join(names)[:500] or '(there is none)'}"


def _for_platform(files: ImageFiles, blob: Blob, platform: Platform, seen: list[str], depth: int) -> Blob | None:
    """``blob`` or, if it is an index, the first manifest below it, if that is for ``platform``; other platforms met go into ``seen``."""
    if blob.platform is not None and not platform.wants(blob.platform):
        seen.append(str(blob.platform))
        return None
    document = _read(files, _blob_name(blob), blob)
    what = f"{files.what}: {blob.digest}"
    below = parse_index(document, what)
    if below is not None:
        if depth == _MAX_DEPTH:
            raise InputError(f"{files.what}: indexes within indexes are more than {_MAX_DEPTH} deep")
        matches = (_for_platform(files, item, platform, seen, depth + 1) for item in below if not item.attestation)
        return next((match for match in matches if match is not None), None)
    if blob.platform is None:
        manifest = parse_manifest(document, what)
        config, _ = parse_config(_read(files, _blob_name(manifest.config), manifest.config), len(manifest.layers), what)
        mine = Platform(config.os, config.architecture)
        if not platform.wants(mine):
            seen.append(str(mine))
            return None
    return blob


def load_docker(
    files: ImageFiles,
    *,
    platform: Platform,
    reference: str | None = None,
    overrides: Overrides | None = None,
    limits: Limits | None = None,
) -> ImageSource:
    """The image of a ``docker save`` archive; ``reference`` is one of its tags."""
    images = parse_docker(_read(files, "manifest.json"), f"{files.what}: manifest.json")
    image = _tagged(files.what, images, reference)
    document = _read(files, image.config)
    config, diff_ids = parse_config(document, len(image.layers), f"{files.what}: {shown(os.fsencode(image.config))}")
    digest = sha256_digest(document)
    claimed = "sha256:" + posixpath.basename(image.config).removesuffix(".json")
    if is_digest(claimed) and claimed != digest:
        raise CorruptError(f"{files.what}: the config does not match the digest it is named by, {claimed}")
    mine = Platform(config.os, config.architecture)
    if not platform.wants(mine):
        raise NotFound(f"{files.what} has no image for {platform}", hint=f"it has: {mine}")
    limits = limits or Limits()
    count = len(diff_ids)
    layers = [
        _ImageLayer(files, name, f"layer {number} of {count}", diff_id, None, limits)
        for number, (name, diff_id) in enumerate(zip(image.layers, diff_ids, strict=True), 1)
    ]
    about = {"name": files.what, "digest": digest, "platform": str(mine), "layers": list(diff_ids)}
    return ImageSource("docker", layers, config, about, overrides or Overrides(), limits)


def _tagged(what: str, images: Sequence[DockerImage], reference: str | None) -> DockerImage:
    if reference is not None:
        images = [image for image in images if reference in image.tags or f"{reference}:latest" in image.tags]
    if not images:
        raise NotFound(f"{what} has no image" + (f" {reference!r}" if reference else ""))
    if len(images) > 1:
        tags = [tag for image in images for tag in image.tags]
        raise UsageError(f"{what} has {len(images)} images", hint=f"choose one by its reference: {', '.join(tags)[:500]}")
    return images[0]
