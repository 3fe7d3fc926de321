"""Verbs that mount: ``mount``, ``umount``, ``ps``, ``run``, ``cache show``, ``cache clear``."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_layers.api.session import Session
from dsec_layers.digest import Digest
from dsec_layers.errors import UsageError
from dsec_layers.fuse.client.host import CacheReport, Cleared, Mounted
from dsec_layers.layers.image import compose_image
from dsec_layers.registry.objects import load_config, load_layer, members_of, resolve
from dsec_layers.sandbox import Bind, Network, RunSpec
from dsec_layers.sandbox import run as run_sandbox
from dsec_layers.sandbox.cgroups import default_limits
from dsec_layers.sandbox.signals import signal_number
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


def run_spec(session: Session, text: str, argv: Sequence[str], *, entrypoint: Sequence[str] | None = None, **settings: Any) -> RunSpec:
    """What ``run`` would run: what the layers' configs say together, then ``settings`` (fields of RunSpec).

    As docker has it, ``argv`` follows the image's Entrypoint and replaces its Cmd; ``entrypoint`` replaces both, and takes none if it is empty.
    """
    configs = [load_config(session.store, load_layer(session.store, member)) for member in _members(session, text)]
    env = merge_variables(config.env or {} for config in configs)
    image = compose_image(configs, env)["config"]
    settings["env"] = env | dict(settings.get("env") or {})
    settings["workdir"] = settings.get("workdir") or image.get("WorkingDir") or "/"
    settings["user"] = settings.get("user") or image.get("User", "")
    settings.setdefault("stop_signal", _stop_signal(session, image.get("StopSignal", "")))
    if entrypoint is None:
        entrypoint, argv = image.get("Entrypoint", ()), argv or image.get("Cmd", ())
    if not (argv or entrypoint):
        raise UsageError(f"no command to run: {text} has none of its own", hint="dsec-layers run REF -- CMD...")
    if not settings.get("hostname"):
        settings["hostname"] = settings.get("name", "").replace("_", "-").rstrip(".-")
    if not settings["hostname"]:
        settings.pop("hostname", None)
    return RunSpec(argv=(*entrypoint, *argv), **settings)


def _stop_signal(session: Session, text: str) -> int:
    """The signal that an image wants to be stopped by: a name with or without SIG, or a number."""
    if not text:
        return signal.SIGTERM
    try:
        return signal_number(text)
    except UsageError as error:
        session.progress.warning(f"the image's stop signal counts for nothing: {error.message}")
        return signal.SIGTERM


def run(
    session: Session,
    text: str,
    argv: Sequence[str] = (),
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
    binds: Sequence[Bind | str] = (),
    entrypoint: Sequence[str] | None = None,
    name: str = "",
    timeout: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``argv`` in a sandbox on a layer or environment. What it writes is gone afterwards; its output goes to this process's descriptors 1 and 2.

    User, entry point, command, variables, working directory and stop signal come from what the layers say together, and then from the arguments (see ``run_spec``).
    ``memory`` in bytes and ``pids``: 0 for no limit, None for
    the default one (2 GiB and 1024, where the host can limit them).
    ``binds``: also as SRC:DST[:ro]. ``name``: of the sandbox, and its host name if there is no other.
    ``timeout``: seconds, then the command is ended and the code is 124.
    ``environ``: the host's environment, of which a sandbox on the host's network sees proxy and CA settings.
    """
    limits = {**default_limits(), **{key: value for key, value in (("memory", memory), ("pids", pids)) if value is not None}}
    spec = run_spec(
        session, text, argv, entrypoint=entrypoint,
        env=env, workdir=workdir, user=user, hostname=hostname, network=Network(network), cpus=cpus,
        interactive=interactive, tty=tty, binds=tuple(item if isinstance(item, Bind) else Bind.parse(item) for item in binds), name=name, **{key: value or None for key, value in limits.items()},
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
    return members_of(*resolve(session.store, text))


def _warn(session: Session) -> None:
    for warning in session.host.warnings:
        session.progress.warning(warning)
