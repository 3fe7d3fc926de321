"""config.v1.json: which layers make up a device, as overlaybd-tcmu and AgentENV's ublk server read it.

Keys this module does not know are kept through a read and a write. Relative names are relative to whatever the reader of the file decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from dsec_layers.digest import Buffer
from dsec_layers.documents import Natural, convert, decode

__all__ = ["ImageConfig", "LowerConfig", "UpperConfig", "blob_url", "lower_paths", "parse_config", "render_config"]

Json: TypeAlias = Mapping[str, Any]

_MAX_LOWERS = 255
_MAX_BYTES = 16 << 20
_WHAT = "config.v1.json"
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
    size: Natural = 0
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
    vsize: Natural = 0
    mode: str = ""
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """A device: ``lowers`` bottom first, ``upper`` if it is writable, ``download`` the settings of background download as they stand in the file."""

    repo_blob_url: str = ""
    lowers: Annotated[tuple[LowerConfig, ...], Meta(max_length=_MAX_LOWERS)] = ()
    upper: UpperConfig | None = None
    result_file: str = ""
    download: Json = field(default_factory=dict)
    acceleration_layer: bool = False
    record_trace_path: str = ""
    extra: Json = field(default_factory=dict)


def parse_config(data: Buffer) -> ImageConfig:
    """Read a config.v1.json. Raises ImageError."""
    values = _values(ImageConfig, decode(data, dict[str, Any], _WHAT, limit=_MAX_BYTES))
    lowers = values.get("lowers")
    if isinstance(lowers, list):
        values["lowers"] = [_values(LowerConfig, lower) for lower in lowers]
    upper = values.pop("upper", {})
    if upper != {}:
        values["upper"] = _values(UpperConfig, upper)
    return convert(values, ImageConfig, _WHAT)


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


def _values(kind: type, given: Any) -> Any:
    """The fields of ``kind`` in a JSON object by their names here; what it has no field for is ``extra``, and null is as if it were not there."""
    if not isinstance(given, dict):
        return given
    rest = dict(given)
    found = {entry.name: rest.pop(_KEYS.get(entry.name, entry.name), None) for entry in fields(kind) if entry.name != "extra"}
    return {name: value for name, value in found.items() if value is not None} | {"extra": rest}


def _set_keys(value: LowerConfig | UpperConfig | ImageConfig) -> dict[str, Any]:
    done: dict[str, Any] = dict(value.extra)
    for entry in fields(value):
        own = getattr(value, entry.name)
        if entry.name not in ("extra", "lowers", "upper") and own:
            done[_KEYS.get(entry.name, entry.name)] = dict(own) if isinstance(own, Mapping) else own
    return done
