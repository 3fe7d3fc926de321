"""Where settings come from: the command line, then the environment, then the configuration file, then the defaults.

This is the only place that reads the environment for settings.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import PlatformDirs

from dsec_layers.errors import UsageError

__all__ = ["Settings", "config_path", "load_settings", "source_date_epoch"]

_KEYS = {"store", "cache", "driver", "run"}
_DRIVERS = ("fanotify", "fuse")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a command runs with. ``driver``: None for the best that works here. ``memory``, ``pids``: limits of ``run``, 0 for none, None for the default."""

    store: str
    cache: Path
    driver: str | None = None
    memory: int | None = None
    pids: int | None = None


def config_path() -> Path:
    """The configuration file: ``dsec-layers/config.toml`` under XDG_CONFIG_HOME."""
    return _folders().user_config_path / "config.toml"


def load_settings(store: str | None, cache: str | None) -> Settings:
    """Settings from the given options (None: not given) and the three places behind them. UsageError for a bad file."""
    env, folders = os.environ, _folders()
    values = _read_config(config_path())
    default_store = str(folders.user_data_path / "store")
    default_cache = str(folders.user_cache_path)
    driver = env.get("DSEC_DRIVER") or values.get("driver") or None
    if driver is not None and driver not in _DRIVERS:
        raise UsageError(f"no driver is called {driver[:40]!r}", hint=f"DSEC_DRIVER and driver in config.toml are {' or '.join(_DRIVERS)}")
    return Settings(
        store=store or env.get("DSEC_STORE") or values.get("store") or default_store,
        cache=Path(cache or env.get("DSEC_CACHE") or values.get("cache") or default_cache).absolute(),
        driver=driver,
        **_limits(values.get("run", {})),
    )


def source_date_epoch() -> int | None:
    """SOURCE_DATE_EPOCH as a number (reproducible-builds.org), or None. UsageError when it is no number."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise UsageError(f"SOURCE_DATE_EPOCH is not a number of seconds: {text[:40]!r}")
    return int(text)


def _folders() -> PlatformDirs:
    """Where a user's files belong (XDG base directory specification); root's are no others than a user's. Nothing is made here."""
    return PlatformDirs("dsec-layers", appauthor=False, use_site_for_root=False, ensure_exists=False)


def _limits(table: dict[str, Any]) -> dict[str, int | None]:
    """``memory`` and ``pids`` of the table ``[run]``."""
    from dsec_layers.cli.values import parse_size

    where = f"{config_path()}: [run]"
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    for key, value in table.items():
        if key not in ("memory", "pids"):
            raise UsageError(f"{where} has the unknown key {key!r}", hint="known keys: memory, pids")
        number = type(value) is int and value >= 0
        if not number and not (key == "memory" and isinstance(value, str)):
            raise UsageError(f"{where} {key} must be a number{' or a size such as 4G' if key == 'memory' else ''}")
    memory = table.get("memory")
    return {"memory": parse_size(memory) if isinstance(memory, str) else memory, "pids": table.get("pids")}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    for key, item in value.items():
        if key not in _KEYS:
            raise UsageError(f"{path}: unknown key {key!r}", hint=f"known keys: {', '.join(sorted(_KEYS))}")
        if key != "run" and not isinstance(item, str):
            raise UsageError(f"{path}: {key} must be a string")
    return value
