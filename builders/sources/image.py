"""OCI and Docker image documents as values: index, manifest, config, ``manifest.json``. JSON in, values out, no I/O; whatever is not well-formed is InputError."""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Any, Final

from dsec_layers.builders.sources.base import ImageConfig
from dsec_layers.digest import Digest, is_digest
from dsec_layers.errors import InputError, UsageError
from dsec_layers.layers.image import check_image, one_layer
from dsec_layers.oci import IMAGE_CONFIG, REF_NAME, Descriptor, parse_descriptor, parse_list

__all__ = ["MAX_DOCUMENT", "Blob", "DockerImage", "Manifest", "Platform", "parse_config", "parse_docker", "parse_index", "parse_manifest"]

MAX_DOCUMENT: Final = 16 << 20
"""Bytes of one JSON document."""

_MAX_ITEMS: Final = 10_000
_LAYERS: Final = frozenset(
    f"application/vnd.{name}"
    for name in (
        "oci.image.layer.v1.tar",
        "oci.image.layer.v1.tar+gzip",
        "oci.image.layer.v1.tar+zstd",
        "docker.image.rootfs.diff.tar",
        "docker.image.rootfs.diff.tar.gzip",
        "docker.image.rootfs.diff.tar.zstd",
    )
)
_CONFIGS: Final = frozenset((IMAGE_CONFIG, "application/vnd.docker.container.image.v1+json"))


@dataclass(frozen=True, slots=True)
class Platform:
    """``os/architecture[/variant]``."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Platform:
        """The value of ``linux/arm64/v8`` and the like. Raises UsageError."""
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(parts):
            raise UsageError(f"not a platform: {text[:100]!r}", hint="a platform is like linux/amd64 or linux/arm/v7")
        return cls(*parts)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))

    def wants(self, other: Platform) -> bool:
        """Whether ``other`` is what this asks for; what either leaves open fits."""
        pairs = ((self.os, other.os), (self.architecture, other.architecture), (self.variant, other.variant))
        return all(not ours or not theirs or ours == theirs for ours, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Blob(Descriptor):
    """A descriptor in an image's documents."""

    platform: Platform | None = None

    @property
    def attestation(self) -> bool:
        """Whether this says something about another image instead of being one (BuildKit's provenance and SBOM manifests)."""
        unknown = self.platform is not None and (self.platform.os, self.platform.architecture) == ("unknown", "unknown")
        return unknown or self.annotations.get("vnd.docker.reference.type") == "attestation-manifest"

    @property
    def names(self) -> tuple[str, ...]:
        """What this image is called in its index."""
        keys = (REF_NAME, "io.containerd.image.name")
        return tuple(self.annotations[key] for key in keys if self.annotations.get(key))


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest: config and layers, lowest first."""

    config: Blob
    layers: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class DockerImage:
    """One image of a ``docker save`` archive: names in the archive of its config and its layers, and what it is called."""

    config: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]


def parse_index(data: bytes, what: str) -> tuple[Blob, ...] | None:
    """The manifests of an index (or Docker manifest list); None if the document is no index."""
    value = _object(data, what)
    if "manifests" not in value:
        return None
    if "layers" in value:
        raise InputError(f"{what} claims to be an index and a manifest at once")
    return tuple(_blob(item, what) for item in _list(value["manifests"], what))


def parse_manifest(data: bytes, what: str) -> Manifest:
    """An image manifest, with or without its own ``mediaType``. Layers that are not tars, or not for distribution, are refused."""
    value = _object(data, what)
    if value.get("schemaVersion") != 2 or "config" not in value:
        raise InputError(f"{what} is no image manifest of schema version 2")
    if "manifests" in value:
        raise InputError(f"{what} claims to be an index and a manifest at once")
    config = _blob(value["config"], what)
    if config.media_type not in _CONFIGS:
        raise InputError(f"{what} is no container image: its config has the media type {config.media_type[:100]!r}")
    layers = tuple(_blob(item, what) for item in _list(value.get("layers"), what))
    for layer in layers:
        if "nondistributable" in layer.media_type or "foreign" in layer.media_type:
            raise InputError(f"{what}: the layer {layer.digest} is not for distribution, so the image does not hold it")
        if layer.media_type not in _LAYERS:
            raise InputError(f"{what}: the layer {layer.digest} has the media type {layer.media_type[:100]!r}, which is not supported")
    return Manifest(config, layers)


def parse_config(data: bytes, layers: int, what: str) -> tuple[ImageConfig, tuple[Digest, ...]]:
    """An image config: the part that outlives the import, and the digests of the uncompressed layers, which must be as many as there are ``layers``."""
    value = _object(data, what)
    rootfs = value.get("rootfs")
    diff_ids = _list(rootfs.get("diff_ids") if isinstance(rootfs, dict) else None, what)
    if not all(isinstance(item, str) and is_digest(item) for item in diff_ids):
        raise InputError(f"{what} has a diff ID that is no SHA-256 digest")
    if len(diff_ids) != layers:
        raise InputError(f"{what} lists {len(diff_ids)} diff IDs, but the manifest has {layers} layers")
    document = check_image(value, what)
    settings = document["config"]
    pairs = [item.partition("=") for item in settings.get("Env", [])]
    variables = {name: text for name, equals, text in pairs if name and equals}
    workdir = settings.get("WorkingDir", "") and posixpath.normpath("/" + settings["WorkingDir"].lstrip("/"))
    image = one_layer(document, "dsec-layers import")
    return ImageConfig(
        variables, workdir, settings.get("User", ""), document.get("architecture", ""), document.get("os", ""), image
    ), tuple(diff_ids)


def parse_docker(data: bytes, what: str) -> tuple[DockerImage, ...]:
    """The images that the ``manifest.json`` of a ``docker save`` archive lists."""
    images = []
    for item in _list(_json(data, what), what):
        config, layers, tags = (item.get(key) for key in ("Config", "Layers", "RepoTags")) if isinstance(item, dict) else (None, None, None)
        if not isinstance(config, str) or not _is_texts(layers) or not _is_texts(tags or []):
            raise InputError(f"{what} is malformed")
        images.append(DockerImage(config, tuple(layers or ()), tuple(tags or ())))
    return tuple(images)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_ITEMS and all(isinstance(item, str) for item in value)


def _json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not JSON") from error


def _object(data: bytes, what: str) -> dict[str, Any]:
    value = _json(data, what)
    if not isinstance(value, dict):
        raise InputError(f"{what} is not a JSON object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    return [] if value is None else parse_list(value, what, _MAX_ITEMS)


def _blob(value: Any, what: str) -> Blob:
    found = parse_descriptor(value, what, typed=False)
    return Blob(found.media_type, found.digest, found.size, found.annotations, _platform(value.get("platform"), what))


def _platform(value: Any, what: str) -> Platform | None:
    if value is None:
        return None
    texts = [value.get(key) or "" for key in ("os", "architecture", "variant")] if isinstance(value, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{what} has a malformed platform")
    return Platform(*texts)
