"""Verbs that mount: ``mount``, ``umount``, ``ps``, ``run``, ``cache show``, ``cache clear``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_layers.api.session import Session
from dsec_layers.digest import Digest
from dsec_layers.fuse.client.host import CacheReport, Cleared, Mounted
from dsec_layers.layers.manifest import Layer
from dsec_layers.registry.objects import load_config, load_layer, resolve
from dsec_layers.sandbox import Bind, Network, RunSpec
from dsec_layers.sandbox import run as run_sandbox
from dsec_layers.sandbox.cgroups import default_limits
from dsec_layers.sandbox.variables import merge_variables

__all__ = ["Ran", "cache_clear", "cache_show", "mount", "ps", "run", "run_spec", "stop", "umount"]


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended: its exit code, 128 + n when signal n ended it."""

    ref: str
    code: int


def mount(session: Session, text: str, target: str | Path, *, driver: str | None = None) -> Mounted:
    """Mount a layer or environment read-only on the existing directory ``target``. Only metadata is transferred."""
    digest, _ = resolve(session.store, text)
    mounted = session.host.mount(session.store, digest, Path(target), label=text, driver=driver or session.driver)
    _warn(session)
    return mounted


def umount(session: Session, target: str | Path, *, lazy: bool = False) -> Path:
    """Unmount what ``mount`` made; ``lazy``: at once from sight, in truth when its last user ends."""
    session.host.umount(Path(target), lazy=lazy)
    return Path(target)


def ps(session: Session) -> list[Mounted]:
    """What is mounted, oldest first."""
    rows = session.host.mounts()
    _warn(session)
    return rows


def run_spec(session: Session, text: str, argv: Sequence[str], **settings: Any) -> RunSpec:
    """What ``run`` would run: environment variables and working directory of the layers' configs, bottom to top, then ``settings`` (fields of RunSpec)."""
    configs = [load_config(session.store, load_layer(session.store, member)) for member in _members(session, text)]
    settings["env"] = merge_variables(config.env or {} for config in configs) | dict(settings.get("env") or {})
    if not settings.get("workdir"):
        settings["workdir"] = next((config.workdir for config in reversed(configs) if config.workdir), "/")
    if not settings.get("hostname"):
        settings["hostname"] = settings.get("name", "").replace("_", "-").rstrip(".-")
    if not settings["hostname"]:
        settings.pop("hostname", None)
    return RunSpec(argv=tuple(argv), **settings)


def run(
    session: Session,
    text: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    workdir: str = "",
    user: str = "",
    hostname: str = "",
    network: str = "none",
    memory: int | None = None,
    cpus: float | None = None,
    pids: int | None = None,
    interactive: bool = False,
    tty: bool = False,
    binds: Sequence[Bind] = (),
    entrypoint: Sequence[str] = (),
    name: str = "",
    timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``argv`` in a sandbox on a layer or environment. What it writes is gone afterwards; its output goes to this process's descriptors 1 and 2.

    Environment variables and working directory come from the layers' configs, bottom to top, and then from the arguments. ``memory`` in bytes and ``pids``: 0 for no limit, None for
    the default one (2 GiB and 1024, where the host can limit them).
    ``entrypoint``: the program, and its first arguments; ``argv`` follows. ``name``: of the sandbox, and its host name if there is no other.
    ``timeout``: seconds, then the command is ended and the code is 124.
    ``environ``: the host's environment, of which a sandbox on the host's network sees proxy and CA settings.
    """
    limits = {**default_limits(), **{key: value for key, value in (("memory", memory), ("pids", pids)) if value is not None}}
    spec = run_spec(
        session, text, [*entrypoint, *argv],
        env=env, workdir=workdir, user=user, hostname=hostname, network=Network(network), cpus=cpus,
        interactive=interactive, tty=tty, binds=tuple(binds), name=name, **{key: value or None for key, value in limits.items()},
    )  # fmt: skip
    with session.host.attach(session.store, _members(session, text), driver=session.driver) as lease:
        _warn(session)
        lower = tuple(reversed(lease.paths))
        return Ran(
            text, run_sandbox(spec, lower, state=session.cache / "sandboxes", environ=environ, timeout=timeout, progress=session.progress)
        )


def cache_show(session: Session) -> CacheReport:
    """What the cache holds, and what was fetched into it since the daemon began."""
    return session.host.show()


def cache_clear(session: Session) -> Cleared:
    """Remove everything from the cache that no mount uses."""
    return session.host.clear()


def stop(session: Session, *, force: bool = False) -> None:
    """End the mount daemon. Conflict while something is mounted, unless ``force``."""
    session.host.stop(force=force)


def _members(session: Session, text: str) -> list[Digest]:
    """The layers of an object from bottom to top."""
    digest, found = resolve(session.store, text)
    return [digest] if isinstance(found, Layer) else [item.digest for _, item in found.layers]


def _warn(session: Session) -> None:
    for warning in session.host.warnings:
        session.progress.warning(warning)
