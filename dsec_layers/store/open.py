"""A store from its URL. The only place that knows which backends there are; it imports one when it is asked for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Final, cast

from dsec_layers.errors import HostError, UsageError
from dsec_layers.store.base import Store

__all__ = ["open_store", "register_scheme"]

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")

_FACTORIES: Final[dict[str, str]] = {
    "file": "dsec_layers.store.posix:open_url",
    "mem": "dsec_layers.store.memory:open_url",
}


def register_scheme(scheme: str, factory: str) -> None:
    """Make ``scheme://`` URLs open by ``factory``, spelled ``module:function``: called as ``function(url, create=bool)``, returns a Store."""
    if scheme in _FACTORIES:
        raise ValueError(f"scheme {scheme} is taken by {_FACTORIES[scheme]}")
    _FACTORIES[scheme] = factory


def open_store(url: str, *, create: bool = True) -> Store:
    """The store that ``url`` names: a path, or ``scheme://…``. UsageError for a scheme that nobody knows.

    ``create``: whether a store that is not there yet is made.
    """
    found = _SCHEME.match(url)
    if not found:
        if not url:
            raise UsageError("no store named", hint="name a directory or a URL")
        from dsec_layers.store.posix import PosixStore

        return PosixStore(Path(url).expanduser(), create=create)
    factory = _FACTORIES.get(found[1])
    if factory is None:
        raise UsageError(
            f"no store has the scheme {found[1]}://", hint=f"known: a path, {', '.join(f'{name}://' for name in sorted(_FACTORIES))}"
        )
    module, _, function = factory.partition(":")
    try:
        opener = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise HostError(
            f"{found[1]}:// needs the Python package {error.name}, which is not installed", hint=f"pip install {error.name}"
        ) from error
    return cast(Store, opener(url, create=create))
