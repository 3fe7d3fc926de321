"""What an image says of itself besides its layers: how it is run (``config``), who made it when, for which platform, by which steps (``history``).

A layer's config keeps this document as the image had it (OCI image specification, config.md; Healthcheck, Shell and OnBuild are docker's), but for ``rootfs``.
Values only, no I/O; what is not well-formed is ImageError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dsec_layers.errors import ImageCode, ImageError
from dsec_layers.oci import canonical_json

if TYPE_CHECKING:
    from dsec_layers.layers.manifest import LayerConfig

__all__ = ["check_image", "compose_image", "one_layer", "overlay_image"]

MAX_IMAGE: Final = 4 << 20
_TOP: Final = ("created", "author", "architecture", "os", "variant")
_TEXTS: Final = ("User", "WorkingDir", "StopSignal")
_LISTS: Final = ("Env", "Entrypoint", "Cmd", "Shell", "OnBuild")
_MAPS: Final = ("Labels", "ExposedPorts", "Volumes", "Healthcheck")


def check_image(value: Any, what: str) -> dict[str, Any]:
    """``value`` without ``rootfs``, if everything known in it is of its type; unknown keys stay. Null counts as left out. Messages call it ``what``."""
    if not isinstance(value, Mapping):
        raise ImageError(f"{what} is no object", code=ImageCode.BAD_ENCODING)
    found = {key: item for key, item in value.items() if key != "rootfs" and item is not None}
    settings = found.get("config", {})
    if not isinstance(settings, Mapping):
        raise ImageError(f"{what} has a malformed 'config'", code=ImageCode.BAD_ENCODING)
    found["config"] = {key: item for key, item in settings.items() if item is not None}
    _check_keys(found, found["config"], what)
    history = found.get("history", [])
    if not isinstance(history, list) or not all(isinstance(item, Mapping) for item in history):
        raise ImageError(f"{what} has a malformed 'history'", code=ImageCode.BAD_ENCODING)
    try:
        size = len(canonical_json(found))
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{what} has a text that is no UTF-8, or a number that is none", code=ImageCode.BAD_ENCODING) from error
    if size > MAX_IMAGE:
        raise ImageError(f"{what} has {size} bytes, over the limit of {MAX_IMAGE}", code=ImageCode.LIMIT)
    return found


def one_layer(image: Mapping[str, Any], made_by: str) -> dict[str, Any]:
    """The document of an image of one layer with the same contents: the last step of its history is the one that has a layer, the others say they have none."""
    steps = [dict(item) for item in image.get("history", [])]
    if not any(not item.get("empty_layer") for item in steps):
        steps.append({"created_by": made_by})
    last = max(number for number, item in enumerate(steps) if not item.get("empty_layer"))
    for item in steps[:last]:
        item["empty_layer"] = True
    return {**image, "history": steps}


def overlay_image(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents as one: ``above`` wins where it says something. An Entrypoint takes the Cmd below away, which was made for another; history is joined."""
    settings, more = dict(below.get("config", {})), above.get("config", {})
    if more.get("Entrypoint"):
        settings.pop("Cmd", None)
    settings |= {key: item for key, item in more.items() if item or key not in settings}
    joined: dict[str, Any] = {**below, **{key: item for key, item in above.items() if item or key not in below}, "config": settings}
    if steps := [*below.get("history", []), *above.get("history", [])]:
        joined["history"] = steps
    return joined


def compose_image(layers: Sequence[LayerConfig], env: Mapping[str, str]) -> dict[str, Any]:
    """The image config, without ``rootfs``, of an image of these layers (bottom first), each with its own part of the history.

    ``env``: their variables together, but where only the lowest layer names a PATH, that is the image's.
    """
    whole: dict[str, Any] = {}
    for layer in layers:
        whole = overlay_image(whole, one_layer(layer.image or {}, f"dsec-layers {layer.kind} {layer.name}".rstrip()))
    values = dict(env)
    if layers and "PATH" in (lowest := layers[0].env or {}) and not any("PATH" in (layer.env or {}) for layer in layers[1:]):
        values["PATH"] = lowest["PATH"]
    settings = dict(whole.get("config", {}))
    settings.pop("Env", None)
    if variables := _variables(layers, values):
        settings["Env"] = variables
    if workdir := next((layer.workdir for layer in reversed(layers) if layer.workdir), ""):
        settings["WorkingDir"] = workdir
    return {**whole, "config": settings}


def _variables(layers: Sequence[LayerConfig], values: Mapping[str, str]) -> list[str]:
    """The list ``Env``, in the order in which the images had it; a name without a value is nothing to a command, but was said."""
    said = [item for layer in layers for item in (layer.image or {}).get("config", {}).get("Env", [])]
    bare = {item for item in said if item and "=" not in item}
    names = dict.fromkeys([*(item.partition("=")[0] for item in said), *values])
    return [f"{name}={values[name]}" if name in values else name for name in names if name in values or name in bare]


def _check_keys(found: Mapping[str, Any], settings: Mapping[str, Any], what: str) -> None:
    wrong = [key for key in _TOP if not _is_text(found.get(key, ""))]
    wrong += [key for key in _TEXTS if not _is_text(settings.get(key, ""))]
    wrong += [key for key in _MAPS if not isinstance(settings.get(key, {}), Mapping)]
    for key in _LISTS:
        items = settings.get(key, [])
        if not isinstance(items, list) or not all(_is_text(item) for item in items):
            wrong.append(key)
    if not wrong and not all(isinstance(item, str) for item in settings.get("Labels", {}).values()):
        wrong.append("Labels")
    if wrong:
        raise ImageError(f"{what} has a setting of the wrong type: {', '.join(wrong)}", code=ImageCode.BAD_ENCODING)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value
