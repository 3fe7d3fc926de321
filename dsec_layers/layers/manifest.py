"""Layer and environment as values, and their OCI JSON form.

``to_json`` gives canonical bytes (sorted keys, no white space), so that equal values have equal digests. ``parse_*`` accept any valid spelling, within limits,
and raise ImageError for everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dsec_layers.digest import Buffer, Digest, is_digest
from dsec_layers.errors import ImageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.disk import DISK, DiskImage
from dsec_layers.layers.image import check_image
from dsec_layers.oci import canonical_json, descriptor_json, parse_descriptor, parse_list

__all__ = [
    "FOREIGN",
    "KIND",
    "Environment",
    "Layer",
    "LayerConfig",
    "Object",
    "canonical_json",
    "parse_config",
    "parse_disk",
    "parse_environment",
    "parse_layer",
    "parse_object",
]

MAX_JSON: Final = 16 << 20
MAX_DESCRIPTORS: Final = 70_000
KIND: Final = "dev.dsec.kind"
FOREIGN: Final = "dev.dsec.foreign"
"""Annotation on a segments descriptor that another layer owns: listed here so that garbage collection and copies see the reference."""
FORMAT: Final = 1
ALGORITHMS: Final = {"blobs": "sha256", "content": "blake3"}
LAYOUTS: Final = ("segments", "compressed")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What a layer says about itself. Nothing in it is needed to read the layer's bytes.

    ``prefix``: a toolkit's own directory. ``env``: environment variables for commands run on it. ``counts``: inodes, bytes, segments, ….
    ``image``: what the image that it came from, or its layer file, says of how it is run and made: an OCI image config without ``rootfs``. ``env`` and ``workdir``
    are what counts, also where the image says something else.
    ``parent``: manifest digest of the layer it was built on. ``recipe``: how it was made. ``features``: format features a reader must know.
    """

    kind: Kind
    name: str = ""
    layout: str = "segments"
    prefix: str = ""
    env: Mapping[str, str] | None = None
    workdir: str = ""
    counts: Mapping[str, int] | None = None
    parent: Digest | None = None
    recipe: Mapping[str, Any] | None = None
    builder: str = ""
    features: tuple[str, ...] = ()
    image: Mapping[str, Any] | None = None

    def to_json(self) -> bytes:
        """The config blob."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "kind": str(self.kind),
            "name": self.name,
            "layout": self.layout,
            "digests": ALGORITHMS,
            "counts": dict(self.counts or {}),
            "recipe": dict(self.recipe or {}),
            "builder": self.builder,
            "features": list(self.features),
            "env": dict(self.env or {}),
        }
        for key in ("prefix", "workdir", "parent", "image"):
            if getattr(self, key):
                value[key] = getattr(self, key)
        return canonical_json(value)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: config, metadata, chunk table and segments blobs (its own first, then foreign ones sorted by digest).

    In the ``compressed`` layout ``metadata`` is the whole EROFS image (media type EROFS) and the rest is empty.
    """

    kind: Kind
    config: Descriptor
    metadata: Descriptor
    chunks: Descriptor | None = None
    segments: tuple[Descriptor, ...] = ()

    @property
    def compressed(self) -> bool:
        """Whether this layer is one EROFS-compressed image instead of metadata and segments."""
        return self.metadata.media_type == d.EROFS

    def blobs(self) -> tuple[Descriptor, ...]:
        """Every blob the layer needs, foreign segments included."""
        return (self.config, self.metadata, *((self.chunks,) if self.chunks else ()), *self.segments)

    def to_json(self) -> bytes:
        """The OCI image manifest."""
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": d.MANIFEST,
                "artifactType": d.LAYER,
                "config": descriptor_json(self.config),
                "layers": [descriptor_json(item) for item in self.blobs()[1:]],
                "annotations": {KIND: str(self.kind)},
            }
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment: layer manifests from bottom to top (base, workspace, toolkits), each with its kind."""

    layers: tuple[tuple[Kind, Descriptor], ...]

    def to_json(self) -> bytes:
        """The OCI image index."""
        return canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": d.INDEX,
                "artifactType": d.ENVIRONMENT,
                "manifests": [
                    descriptor_json(item) | {"artifactType": d.LAYER, "annotations": {**item.annotations, KIND: str(kind)}}
                    for kind, item in self.layers
                ],
            }
        )


Object: TypeAlias = Layer | Environment | DiskImage
"""What a ref may name."""


def parse_object(data: Buffer) -> Object:
    """A manifest blob of any kind, by its artifactType."""
    value = _object(data)
    artifact = value.get("artifactType")
    if artifact == d.LAYER:
        return parse_layer(data)
    if artifact == d.ENVIRONMENT:
        return parse_environment(data)
    if artifact == DISK:
        return parse_disk(data)
    raise ImageError(f"not a layer, environment or disk: artifactType is {str(artifact)[:100]!r}")


def parse_layer(data: Buffer) -> Layer:
    """The value of a layer manifest."""
    value = _object(data)
    if value.get("artifactType") != d.LAYER or value.get("schemaVersion") != 2:
        raise ImageError("not a layer manifest")
    config = _descriptor(value.get("config"))
    if config.media_type != d.CONFIG:
        raise ImageError(f"layer config has media type {config.media_type[:100]!r}")
    items = [_descriptor(item) for item in _list(value, "layers")]
    by_type = {kind: [item for item in items if item.media_type == kind] for kind in (d.METADATA, d.EROFS, d.CHUNKS, d.SEGMENTS)}
    if sum(map(len, by_type.values())) != len(items):
        raise ImageError("layer manifest has a blob of unknown media type")
    if len({item.digest for item in by_type[d.SEGMENTS]}) != len(by_type[d.SEGMENTS]):
        raise ImageError("layer manifest has a segments blob twice")
    heads = by_type[d.METADATA] + by_type[d.EROFS]
    if len(heads) != 1 or len(by_type[d.CHUNKS]) > 1 or (by_type[d.EROFS] and len(items) > 1):
        raise ImageError("layer manifest must have one metadata blob and at most one chunk table")
    return Layer(_kind(value), config, heads[0], by_type[d.CHUNKS][0] if by_type[d.CHUNKS] else None, tuple(by_type[d.SEGMENTS]))


def parse_environment(data: Buffer) -> Environment:
    """The value of an environment index."""
    value = _object(data)
    if value.get("artifactType") != d.ENVIRONMENT or value.get("schemaVersion") != 2:
        raise ImageError("not an environment index")
    layers: list[tuple[Kind, Descriptor]] = []
    for item in _list(value, "manifests"):
        layer = _descriptor(item)
        if layer.media_type != d.MANIFEST:
            raise ImageError(f"environment member has media type {layer.media_type[:100]!r}")
        layers.append((_kind(item), Descriptor(layer.media_type, layer.digest, layer.size)))
    if not layers or layers[0][0] is not Kind.BASE:
        raise ImageError("an environment begins with a base")
    return Environment(tuple(layers))


def parse_disk(data: Buffer) -> DiskImage:
    """The value of a disk manifest."""
    value = _object(data)
    if value.get("artifactType") != DISK or value.get("schemaVersion") != 2:
        raise ImageError("not a disk manifest")
    return DiskImage.of(_descriptor(value.get("config")), [_descriptor(item) for item in _list(value, "layers")])


def parse_config(data: Buffer) -> LayerConfig:
    """The value of a layer config blob."""
    value = _object(data)
    try:
        kind = Kind(value.get("kind", ""))
    except ValueError as error:
        raise ImageError(f"layer config has unknown kind {str(value.get('kind'))[:100]!r}") from error
    if value.get("format") != FORMAT:
        raise ImageError(f"layer format {str(value.get('format'))[:20]} is not known here (this version reads {FORMAT})")
    if value.get("digests") != ALGORITHMS:
        raise ImageError(f"layer uses digests that this version does not know: {str(value.get('digests'))[:100]}")
    features = value.get("features", [])
    if not isinstance(features, list) or features:
        raise ImageError(f"layer needs features that this version does not know: {str(features)[:200]}")
    return LayerConfig(
        kind,
        env=_env(value.get("env", {})),
        counts=_counts(value.get("counts", {})),
        parent=_parent(value.get("parent")),
        recipe=_mapping(value.get("recipe", {}), "recipe"),
        layout=_one_of(value.get("layout"), LAYOUTS, "layout"),
        prefix=_path(value.get("prefix", ""), "prefix"),
        image=check_image(value["image"], "image") if "image" in value else None,
        workdir=_path(value.get("workdir", ""), "workdir"),
        name=_text(value.get("name", ""), "name"),
        builder=_text(value.get("builder", ""), "builder"),
    )


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImageError(f"layer config: {what} is no object")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ImageError(f"layer config: {what} is no proper text")
    return value


def _one_of(value: Any, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise ImageError(f"layer config: {what} {str(value)[:100]!r} is not known here")
    return str(value)


def _path(value: Any, what: str) -> str:
    """Empty, or an absolute path inside the layer without ``.``, ``..`` or doubled slashes."""
    text = _text(value, what)
    if text and (not text.startswith("/") or any(part in ("", ".", "..") for part in text[1:].split("/") if text != "/")):
        raise ImageError(f"layer config: {what} {text[:100]!r} is not an absolute path in plain form")
    return text


def _env(value: Any) -> dict[str, str]:
    if not _is_text_map(value) or any(not name or "=" in name or "\0" in name + item for name, item in value.items()):
        raise ImageError("layer config: env is not a map of names to values")
    return dict(value)


def _counts(value: Any) -> dict[str, int]:
    counts = _mapping(value, "counts")
    if not all(type(item) is int and 0 <= item < 1 << 63 for item in counts.values()):
        raise ImageError("layer config: a count is no number")
    return counts


def _parent(value: Any) -> Digest | None:
    if value is not None and not (isinstance(value, str) and is_digest(value)):
        raise ImageError("layer config names a parent that is no digest")
    return value


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())


def _object(data: Buffer) -> dict[str, Any]:
    if len(data) > MAX_JSON:
        raise ImageError(f"manifest of {len(data)} bytes is over the limit of {MAX_JSON}")
    try:
        value = json.loads(bytes(data).decode(), parse_constant=_no_constant)
        canonical_json(value)  # what has no UTF-8 form (a lone surrogate) could be read but never written again
    except (ValueError, RecursionError) as error:
        raise ImageError("manifest is not JSON") from error
    if not isinstance(value, dict):
        raise ImageError("manifest is not a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _descriptor(value: Any) -> Descriptor:
    return parse_descriptor(value, "manifest")


def _list(value: dict[str, Any], key: str) -> list[Any]:
    return parse_list(value.get(key), "manifest", MAX_DESCRIPTORS)


def _kind(value: dict[str, Any]) -> Kind:
    annotations = value.get("annotations")
    try:
        return Kind(annotations.get(KIND, "") if isinstance(annotations, dict) else "")
    except ValueError as error:
        raise ImageError(f"manifest lacks a proper {KIND} annotation") from error
