"""What to run and within which bounds, as a value."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

from dsec_layers.errors import UsageError

__all__ = ["Bind", "Network", "RunSpec"]

MIN_MEMORY: Final = 6 << 20
"""Docker's own lower limit: below it a container cannot start at all."""
MAX_ARGUMENTS: Final = 2 << 20
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,62}[A-Za-z0-9])?\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_VARIABLE = re.compile(r"[^=\0]+\Z")


class Network(StrEnum):
    """``NONE``: a network namespace of its own with nothing but a loopback device. ``HOST``: the host's network, resolver, CA bundle and proxies."""

    NONE = "none"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Bind:
    """A host file or directory shown inside. Read-only unless asked otherwise; it never becomes part of the writable layer."""

    source: Path
    target: str
    read_only: bool = True

    @classmethod
    def parse(cls, text: str) -> Bind:
        """SRC:DST, writable, or SRC:DST:ro; SRC may be relative. UsageError names what is neither, or has no source."""
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target or mode not in ("", "ro", "rw"):
            raise UsageError(f"not SRC:DST or SRC:DST:ro: {text[:200]!r}", hint="a bind is like ./data:/data:ro")
        path = Path(source).absolute()
        if not path.exists():
            raise UsageError(f"nothing to bind is at {path}")
        return cls(path, target, read_only=mode == "ro")

    def __post_init__(self) -> None:
        _check_absolute(self.target, "bind target")
        if self.target == "/":
            raise UsageError("bind target / would hide the environment")
        if PurePosixPath(self.target).parts[1] in ("proc", "sys", "dev"):
            raise UsageError(f"cannot bind to {self.target}: /proc, /sys and /dev are the sandbox's own")
        if not self.source.is_absolute():
            raise UsageError(f"bind source is not absolute: {self.source}")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One command in a sandbox. Raises UsageError if a field cannot be.

    ``argv``: the command, looked up in the sandbox's PATH. ``env``: added to PATH, HOME, HOSTNAME, LANG (and TERM with ``tty``).
    ``user``: ``name``, ``uid``, ``name:group`` or ``uid:gid``, looked up in the environment's /etc/passwd; empty is root.
    ``memory``: bytes, swap included. ``cpus``: processors' worth of time, 0.5 is half a processor. ``pids``: processes and threads. None: no limit.
    ``interactive``: pass standard input on; otherwise it is /dev/null. ``tty``: a terminal inside (standard input must be one).
    ``shm``: bytes of /dev/shm. ``name``: no two sandboxes with the same one run at a time; empty for none.
    ``stop_signal``: what asks the command to end when its time is up.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    hostname: str = "sandbox"
    network: Network = Network.NONE
    memory: int | None = None
    cpus: float | None = None
    pids: int | None = None
    tty: bool = False
    interactive: bool = False
    binds: tuple[Bind, ...] = ()
    shm: int = 64 << 20
    name: str = ""
    stop_signal: int = signal.SIGTERM

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise UsageError("no command to run")
        for text in (*self.argv, *self.env.values()):
            if "\0" in text:
                raise UsageError("a NUL byte in the command or its environment")
        if sum(len(text.encode(errors="surrogateescape")) + 1 for text in (*self.argv, *self.env, *self.env.values())) > MAX_ARGUMENTS:
            raise UsageError(f"command and environment are longer than {MAX_ARGUMENTS} bytes together")
        for name in self.env:
            if not _VARIABLE.match(name):
                raise UsageError(f"not the name of an environment variable: {name!r}")
        _check_absolute(self.workdir, "working directory")
        if self.user and not _USER.match(self.user):
            raise UsageError(f"not a user: {self.user!r}", hint="name, uid, name:group or uid:gid")
        if not _HOSTNAME.match(self.hostname):
            raise UsageError(f"not a host name: {self.hostname!r}")
        if self.name and not _NAME.match(self.name):
            raise UsageError(
                f"not a name for a sandbox: {self.name!r}", hint="letters, digits, '_', '.' and '-', beginning with a letter or digit"
            )
        if self.stop_signal not in signal.valid_signals():
            raise UsageError(f"no signal has the number {self.stop_signal}")
        _check_limits(self)


def _check_limits(spec: RunSpec) -> None:
    if spec.memory is not None and spec.memory < MIN_MEMORY:
        raise UsageError(f"memory limit of {spec.memory} bytes is below the least that can start, {MIN_MEMORY}")
    if spec.memory is not None and spec.memory >= 1 << 62:
        raise UsageError(f"memory limit of {spec.memory} bytes is more than any machine has")
    if spec.cpus is not None and not 0.01 <= spec.cpus <= 100_000:
        raise UsageError(f"cpu limit {spec.cpus:g} is not between 0.01 and 100000")
    if spec.pids is not None and not 1 <= spec.pids <= 1 << 22:
        raise UsageError(f"process limit {spec.pids} is not between 1 and {1 << 22}")
    if not 4096 <= spec.shm < 1 << 62:
        raise UsageError(f"/dev/shm of {spec.shm} bytes")


def _check_absolute(path: str, what: str) -> None:
    if not path.startswith("/") or "\0" in path or ".." in PurePosixPath(path).parts:
        raise UsageError(f"{what} must be an absolute path without '..': {path!r}")
