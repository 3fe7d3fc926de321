"""Layer and environment as values, and their OCI JSON form.

``to_json`` gives canonical bytes (sorted keys, no white space), so that equal values have equal digests. ``parse_*`` accept any valid spelling, within limits,
and raise ImageError for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from dsec_layers.digest import Buffer, Digest
from dsec_layers.documents import DigestText, Natural, convert, decode
from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.disk import DISK, DiskImage
from dsec_layers.layers.image import check_image
from dsec_layers.oci import DescriptorJson, canonical_json, descriptor_json

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
_T = TypeVar("_T")


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


# --- what documents must have ------------------------------------------------------------------------------------------------------------------

_Text: TypeAlias = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[^=\0]+\Z")]
_Path: TypeAlias = Annotated[str, Meta(pattern=r"\A(/|(/(?!\.{1,2}(/|\Z))[^/\0]+)*)\Z")]
"""Empty, or an absolute path inside the layer without ``.``, ``..`` or doubled slashes."""


class _Artifact(Struct, rename="camel"):
    artifact_type: Any = None


class _Kinds(Struct):
    kind: Kind = field(name=KIND)


class _Manifest(Struct, rename="camel"):
    schema_version: Literal[2]
    config: DescriptorJson
    layers: Annotated[list[DescriptorJson], Meta(max_length=MAX_DESCRIPTORS)]

    def items(self) -> list[Descriptor]:
        return [item.value() for item in self.layers]


class _LayerManifest(_Manifest, rename="camel"):
    annotations: _Kinds


class _Index(Struct, rename="camel"):
    schema_version: Literal[2]
    manifests: Annotated[list[DescriptorJson], Meta(max_length=MAX_DESCRIPTORS, min_length=1)]


class _Needs(Struct):
    """What a reader of a config must know: looked at before the rest, which another version may spell in another way."""

    format: Any = None
    digests: Any = None
    features: Any = ()


class _Config(Struct):
    kind: Kind
    layout: Literal["segments", "compressed"]
    name: _Text = ""
    prefix: _Path = ""
    env: dict[_Name, _Text] = {}
    workdir: _Path = ""
    image: dict[str, Any] | None = None
    counts: dict[str, Natural] = {}
    parent: DigestText | None = None
    recipe: dict[str, Any] = {}
    builder: _Text = ""


def parse_object(data: Buffer) -> Object:
    """A manifest blob of any kind, by its artifactType."""
    artifact = decode(data, _Artifact, "manifest", limit=MAX_JSON).artifact_type
    parsers: dict[str, Callable[[Buffer], Object]] = {d.LAYER: parse_layer, d.ENVIRONMENT: parse_environment, DISK: parse_disk}
    parse = parsers.get(artifact) if isinstance(artifact, str) else None
    if parse is None:
        raise ImageError(f"not a layer, environment or disk: artifactType is {str(artifact)[:100]!r}", code=ImageCode.BAD_MAGIC)
    return parse(data)


def parse_layer(data: Buffer) -> Layer:
    """The value of a layer manifest."""
    value = _document(data, _LayerManifest, d.LAYER, "layer manifest")
    config, items = value.config.value(), value.items()
    if config.media_type != d.CONFIG:
        raise ImageError(f"layer config has media type {config.media_type[:100]!r}", code=ImageCode.INCONSISTENT)
    by_type = {kind: [item for item in items if item.media_type == kind] for kind in (d.METADATA, d.EROFS, d.CHUNKS, d.SEGMENTS)}
    if sum(map(len, by_type.values())) != len(items):
        raise ImageError("layer manifest has a blob of unknown media type", code=ImageCode.UNKNOWN_FEATURE)
    if len({item.digest for item in by_type[d.SEGMENTS]}) != len(by_type[d.SEGMENTS]):
        raise ImageError("layer manifest has a segments blob twice", code=ImageCode.INCONSISTENT)
    heads = by_type[d.METADATA] + by_type[d.EROFS]
    if len(heads) != 1 or len(by_type[d.CHUNKS]) > 1 or (by_type[d.EROFS] and len(items) > 1):
        raise ImageError("layer manifest must have one metadata blob and at most one chunk table", code=ImageCode.INCONSISTENT)
    chunks = by_type[d.CHUNKS][0] if by_type[d.CHUNKS] else None
    return Layer(value.annotations.kind, config, heads[0], chunks, tuple(by_type[d.SEGMENTS]))


def parse_environment(data: Buffer) -> Environment:
    """The value of an environment index."""
    value = _document(data, _Index, d.ENVIRONMENT, "environment index")
    for item in value.manifests:
        if item.media_type != d.MANIFEST:
            raise ImageError(f"environment member has media type {item.media_type[:100]!r}", code=ImageCode.INCONSISTENT)
    kinds = [convert(item.annotations or {}, _Kinds, "environment member").kind for item in value.manifests]
    layers = tuple((kind, Descriptor(item.media_type, item.digest, item.size)) for kind, item in zip(kinds, value.manifests, strict=True))
    if layers[0][0] is not Kind.BASE:
        raise ImageError("an environment begins with a base", code=ImageCode.INCONSISTENT)
    return Environment(layers)


def parse_disk(data: Buffer) -> DiskImage:
    """The value of a disk manifest."""
    value = _document(data, _Manifest, DISK, "disk manifest")
    return DiskImage.of(value.config.value(), value.items())


def parse_config(data: Buffer) -> LayerConfig:
    """The value of a layer config blob."""
    needs = decode(data, _Needs, "layer config", limit=MAX_JSON)
    if needs.format != FORMAT:
        raise ImageError(
            f"layer format {str(needs.format)[:20]} is not known here (this version reads {FORMAT})", code=ImageCode.BAD_VERSION
        )
    if needs.digests != ALGORITHMS:
        raise ImageError(f"layer uses digests that this version does not know: {str(needs.digests)[:100]}", code=ImageCode.UNKNOWN_FEATURE)
    if not isinstance(needs.features, list | tuple) or needs.features:
        raise ImageError(
            f"layer needs features that this version does not know: {str(needs.features)[:200]}", code=ImageCode.UNKNOWN_FEATURE
        )
    config = LayerConfig(**asdict(decode(data, _Config, "layer config", limit=MAX_JSON)))
    return config if config.image is None else replace(config, image=check_image(config.image, "layer config: image"))


def _document(data: Buffer, kind: type[_T], artifact: str, what: str) -> _T:
    """A manifest of type ``kind``, after it was found to say that it is one."""
    if decode(data, _Artifact, what, limit=MAX_JSON).artifact_type != artifact:
        raise ImageError(f"not a {what}", code=ImageCode.BAD_MAGIC)
    return decode(data, kind, what, limit=MAX_JSON)
