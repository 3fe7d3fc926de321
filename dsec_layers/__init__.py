"""Build, store and lazily mount deduplicated EROFS layers for agent sandboxes.

The verbs of the command line, with typed results::

    from dsec_layers import Session, import_source, env_create, run

    with Session("/srv/layers", "/var/cache/dsec-layers") as session:
        import_source(session, "rootfs.tar", kind="base", name="debian:12")
        env_create(session, "dev:1", base="debian:12")
        run(session, "dev:1", ["cat", "/etc/os-release"])

Every failure is a ``DsecError`` (dsec_layers.errors). Names are loaded when they are first used, so importing this package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsec_layers.api.build import Built, build, import_source
    from dsec_layers.api.catalog import Indexed, catalog_rebuild
    from dsec_layers.api.doctor import Check, doctor
    from dsec_layers.api.dump import Dump, dump
    from dsec_layers.api.environment import Created, Verified, env_create, gc, pull, push, rm, verify
    from dsec_layers.api.export import Exported, export
    from dsec_layers.api.look import Difference, Inspection, Listed, diff, inspect, ls
    from dsec_layers.api.mounts import Ran, cache_clear, cache_show, mount, ps, run, stop, umount
    from dsec_layers.api.session import Session
    from dsec_layers.errors import DsecError

_PLACES = {
    "dsec_layers.api.build": ("Built", "build", "import_source"),
    "dsec_layers.api.catalog": ("Indexed", "catalog_rebuild"),
    "dsec_layers.api.doctor": ("Check", "doctor"),
    "dsec_layers.api.dump": ("Dump", "dump"),
    "dsec_layers.api.environment": ("Created", "Verified", "env_create", "gc", "pull", "push", "rm", "verify"),
    "dsec_layers.api.export": ("Exported", "export"),
    "dsec_layers.api.look": ("Difference", "Inspection", "Listed", "diff", "inspect", "ls"),
    "dsec_layers.api.mounts": ("Ran", "cache_clear", "cache_show", "mount", "ps", "run", "stop", "umount"),
    "dsec_layers.api.session": ("Session",),
    "dsec_layers.errors": ("DsecError",),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Built",
    "Check",
    "Created",
    "Difference",
    "DsecError",
    "Dump",
    "Exported",
    "Indexed",
    "Inspection",
    "Listed",
    "Ran",
    "Session",
    "Verified",
    "build",
    "cache_clear",
    "cache_show",
    "catalog_rebuild",
    "diff",
    "doctor",
    "dump",
    "env_create",
    "export",
    "gc",
    "import_source",
    "inspect",
    "ls",
    "mount",
    "ps",
    "pull",
    "push",
    "rm",
    "run",
    "stop",
    "umount",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
