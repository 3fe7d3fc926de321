"""config.v1.json: which layers make up a device, as overlaybd-tcmu and AgentENV's ublk server read it.

Keys this module does not know are kept through a read and a write. Relative names are relative to whatever the reader of the file decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

from dsec_layers.digest import Buffer
from dsec_layers.errors import ImageCode, ImageError

__all__ = ["ImageConfig", "LowerConfig", "UpperConfig", "blob_url", "lower_paths", "parse_config", "render_config"]

Json: TypeAlias = Mapping[str, Any]
_T = TypeVar("_T")

_MAX_LOWERS = 255
_MAX_BYTES = 16 << 20
_KEYS = {
    "target_file": "targetFile", "target_digest": "targetDigest", "gzip_index": "gzipIndex", "repo_blob_url": "repoBlobUrl",
    "result_file": "resultFile", "acceleration_layer": "accelerationLayer", "record_trace_path": "recordTracePath",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerConfig:
    """One read-only layer: found by ``file``, in ``dir``, or under ``digest`` in a registry. ``uuid`` and ``repo_blob_url`` are AgentENV's."""

    file: str = ""
    dir: str = ""
    digest: str = ""
    size: int = 0
    target_file: str = ""
    target_digest: str = ""
    gzip_index: str = ""
    uuid: str = ""
    repo_blob_url: str = ""
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperConfig:
    """The writable layer's files, and its size in GB where containerd's snapshotter made it. ``mode`` is AgentENV's: sparse, logStructured (the default) or hybridLogStructured."""

    index: str = ""
    data: str = ""
    target: str = ""
    gzip_index: str = ""
    vsize: int = 0
    mode: str = ""
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """A device: ``lowers`` bottom first, ``upper`` if it is writable, ``download`` the settings of background download as they stand in the file."""

    repo_blob_url: str = ""
    lowers: tuple[LowerConfig, ...] = ()
    upper: UpperConfig | None = None
    result_file: str = ""
    download: Json = field(default_factory=dict)
    acceleration_layer: bool = False
    record_trace_path: str = ""
    extra: Json = field(default_factory=dict)


def parse_config(data: Buffer) -> ImageConfig:
    """Read a config.v1.json. Raises ImageError."""
    if len(data) > _MAX_BYTES:
        raise ImageError(f"config.v1.json: {len(data)} bytes are too many", code=ImageCode.LIMIT)
    try:
        top = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ImageError(f"config.v1.json: {error}", code=ImageCode.BAD_ENCODING) from error
    values = _values(ImageConfig, top, "config.v1.json")
    lowers = values.pop("lowers", [])
    if len(lowers) > _MAX_LOWERS:
        raise ImageError(f"config.v1.json: {len(lowers)} lowers, more than {_MAX_LOWERS}", code=ImageCode.LIMIT)
    upper = values.pop("upper", None)
    if upper:
        values["upper"] = UpperConfig(**_values(UpperConfig, upper, "config.v1.json: upper"))
    parsed = [LowerConfig(**_values(LowerConfig, lower, f"config.v1.json: lower {i}")) for i, lower in enumerate(lowers)]
    return ImageConfig(lowers=tuple(parsed), **values)


def render_config(config: ImageConfig) -> bytes:
    """The JSON text, with a final newline. What has its default value is left out, but for the keys that every such file has."""
    top: dict[str, Any] = {"repoBlobUrl": "", "lowers": [_set_keys(lower) for lower in config.lowers]}
    top.update(_set_keys(config))
    if config.upper is not None:
        top["upper"] = _set_keys(config.upper)
    top["resultFile"] = config.result_file
    return json.dumps(top, indent=2, ensure_ascii=False).encode() + b"\n"


def lower_paths(lower: LowerConfig) -> tuple[str, ...]:
    """Where the layer may be on this host, best first. None of them need exist: the layer is then at ``blob_url``."""
    if lower.file:
        return (lower.file,)
    return tuple(f"{lower.dir}/{name}" for name in ("overlaybd.commit", ".commit", "overlaybd.sealed")) if lower.dir else ()


def blob_url(config: ImageConfig, lower: LowerConfig) -> str | None:
    """Where the layer is in a registry, or None when the configuration does not say."""
    base = lower.repo_blob_url or config.repo_blob_url
    return f"{base.rstrip('/')}/{lower.digest}" if base and lower.digest else None


def _values(kind: type[_T], given: object, what: str) -> dict[str, Any]:
    """Constructor arguments for ``kind`` out of a JSON object; what it has no field for goes to ``extra``."""
    if not isinstance(given, dict):
        raise ImageError(f"{what} is not an object", code=ImageCode.BAD_ENCODING)
    rest = dict(given)
    values: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]
        key = _KEYS.get(entry.name, entry.name)
        if entry.name != "extra" and (value := rest.pop(key, None)) is not None:
            values[entry.name] = _checked(entry.name, value, f"{what}: {key}")
    return {**values, "extra": rest}


def _checked(name: str, value: object, what: str) -> object:
    if name in ("size", "vsize"):
        good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    elif name in ("lowers",):
        good = isinstance(value, list)
    elif name in ("upper", "download"):
        good = isinstance(value, dict)
    elif name == "acceleration_layer":
        good = isinstance(value, bool)
    else:
        good = isinstance(value, str)
    if not good:
        raise ImageError(f"{what} has a value of a wrong kind: {str(value)[:60]}", code=ImageCode.BAD_ENCODING)
    return value


def _set_keys(value: LowerConfig | UpperConfig | ImageConfig) -> dict[str, Any]:
    done: dict[str, Any] = dict(value.extra)
    for entry in fields(value):
        own = getattr(value, entry.name)
        if entry.name not in ("extra", "lowers", "upper") and own:
            done[_KEYS.get(entry.name, entry.name)] = dict(own) if isinstance(own, Mapping) else own
    return done
