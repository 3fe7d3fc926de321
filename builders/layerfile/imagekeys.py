"""The table ``[image]`` of a layer file: what the layer says of how it is run and made, as an OCI image config has it. docs/layerfile.md is the manual."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from dsec_layers.errors import UsageError

__all__ = ["image_settings"]

_UNITS: Final = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION: Final = re.compile(r"(\d{1,9})(ms|s|m|h)\Z")
_PORT: Final = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:/(?:tcp|udp|sctp))?\Z")
_TIMES: Final = {"interval": "Interval", "timeout": "Timeout", "start_period": "StartPeriod", "start_interval": "StartInterval"}


def image_settings(key: str, value: Any) -> dict[str, Any]:
    """The image config document of the table; UsageError names the key that is wrong."""
    image: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, item in _table(key, value, {*_SETTINGS, *_OTHERS}).items():
        where = f"{key}.{name}"
        if name == "platform":
            image |= _platform(where, item)
        elif name in _OTHERS:
            image[name] = _OTHERS[name](where, item)
        else:
            spelled, convert = _SETTINGS[name]
            settings[spelled] = convert(where, item)
    return {**image, **({"config": settings} if settings else {})}


def _table(key: str, value: Any, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{key} must be a table")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"{key}.{name} is not a known key", hint=f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
            )
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{key} must be a string that is not empty")
    return value


def _texts(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise UsageError(f"{key} must be a list of strings")
    return list(value)


def _command(key: str, value: Any) -> list[str]:
    return ["/bin/sh", "-c", _text(key, value)] if isinstance(value, str) else _texts(key, value)


def _labels(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise UsageError(f"{key} must be a table of strings")
    return dict(value)


def _ports(key: str, value: Any) -> dict[str, Any]:
    ports = _texts(key, value)
    for port in ports:
        if not _PORT.match(port):
            raise UsageError(f"{key}: {port!r} is not a port", hint="a port is like 80/tcp")
    return {port if "/" in port else f"{port}/tcp": {} for port in ports}


def _volumes(key: str, value: Any) -> dict[str, Any]:
    paths = _texts(key, value)
    for path in paths:
        if not path.startswith("/"):
            raise UsageError(f"{key}: {path!r} is not an absolute path")
    return {path: {} for path in paths}


def _healthcheck(key: str, value: Any) -> dict[str, Any]:
    table = _table(key, value, {"test", "retries", *_TIMES})
    found: dict[str, Any] = {}
    for name, item in table.items():
        where = f"{key}.{name}"
        if name == "test":
            found["Test"] = ["CMD-SHELL", _text(where, item)] if isinstance(item, str) else _texts(where, item)
        elif name == "retries":
            if type(item) is not int or item < 0:
                raise UsageError(f"{where} must be a number")
            found["Retries"] = item
        else:
            matched = _DURATION.match(_text(where, item))
            if not matched:
                raise UsageError(f"{where}: {item!r} is not a time", hint="a time is like 500ms, 30s, 5m or 1h")
            found[_TIMES[name]] = int(matched[1]) * _UNITS[matched[2]]
    return found


def _created(key: str, value: Any) -> str:
    text = _text(key, value)
    try:
        aware = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise UsageError(f"{key}: {text!r} is not a time", hint='with its zone, such as "2024-05-01T12:00:00Z"')
    return text


def _history(key: str, value: Any) -> list[dict[str, Any]]:
    return [{"created_by": text, "empty_layer": True} for text in _texts(key, value)]


def _platform(key: str, value: Any) -> dict[str, str]:
    parts = _text(key, value).split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(f"{key}: {value!r} is not a platform", hint="a platform is like linux/amd64 or linux/arm64/v8")
    return dict(zip(("os", "architecture", "variant"), parts, strict=False))


_SETTINGS: Final[dict[str, tuple[str, Callable[[str, Any], Any]]]] = {
    "user": ("User", _text),
    "entrypoint": ("Entrypoint", _command),
    "cmd": ("Cmd", _command),
    "labels": ("Labels", _labels),
    "ports": ("ExposedPorts", _ports),
    "volumes": ("Volumes", _volumes),
    "stop_signal": ("StopSignal", _text),
    "healthcheck": ("Healthcheck", _healthcheck),
    "shell": ("Shell", _texts),
}
_OTHERS: Final[dict[str, Callable[[str, Any], Any]]] = {"author": _text, "created": _created, "history": _history, "platform": _platform}
