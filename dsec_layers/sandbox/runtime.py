"""Which OCI runtime, how it is called, and what its failures mean.

The runtime is chosen by trying: a host's control groups, kernel and runtime version have to fit, and no list of versions knows that. The answer is kept for this
boot of the host, in the state directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_layers import proc
from dsec_layers.errors import DsecError, HostError, ToolError
from dsec_layers.fsio import write_atomic
from dsec_layers.linux.process import boot_id
from dsec_layers.sandbox.cgroups import CgroupHost

__all__ = ["Failure", "Runtime", "choose_runtime", "read_failure"]

_LAUNCH: Final = '"$1" -t proc -o nosuid,nodev,noexec proc /proc && shift && exec "$@"'
_MAX_LOG: Final = 1 << 20
_FAILED: Final = (1, 125, 126, 127, 255)
"""How runtimes exit when they fail themselves. An error they log beside another code is about the clean-up after the command."""

_COMMAND: Final = (
    *("exec:", "exec user process", "exec container process"),
    *("executable file", "open executable", "is not executable", "is not a regular file"),
)
"""What runc 1.1 and crun 1.8 and 1.21 say when the fault is the command's."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime program. ``hide_unified``: take the empty unified hierarchy of a mixed host out of its sight (crun refuses to work beside one)."""

    name: str
    path: str
    hide_unified: bool = False

    def command(self, identifier: str, *, root: Path, bundle: Path, log: Path) -> list[str]:
        """The argument vector that runs a bundle in the foreground.

        Its first process is also the first of the new process namespace made by ``private_namespaces``: there it needs a /proc of its own, and to die with
        this process, so that nothing runs on if this process is killed.
        """
        return [
            *("/bin/sh", "-c", _LAUNCH, "sh", proc.find_tool("mount")),
            *(proc.find_tool("setpriv"), "--pdeathsig", "KILL", "--"),
            *(self.path, "--root", str(root), "--log", str(log), "--log-format", "json", "run", "--bundle", str(bundle), identifier),
        ]


@dataclass(frozen=True, slots=True)
class Failure:
    """A command that could not be started. ``code`` as docker has it: 125 the sandbox failed, 126 not executable, 127 not found."""

    code: int
    message: str


def choose_runtime(state: Path, cgroups: CgroupHost, works: Callable[[Runtime], None]) -> Runtime:
    """The first runtime that ``works`` (it raises DsecError if not). Raises ToolError with everybody's reason if none does."""
    cached = _Cache(state / "runtime.json")
    candidates = _candidates(cgroups)
    if (known := cached.load(candidates)) is not None:
        return known
    reasons = []
    for candidate in candidates:
        try:
            works(candidate)
        except DsecError as error:
            reasons.append(f"{candidate.name}: {error.message}")
            continue
        cached.store(candidate)
        return candidate
    if not reasons:
        raise ToolError("no OCI runtime is installed", hint="apt-get install crun (or runc)")
    raise HostError("no OCI runtime works on this host: " + "; ".join(dict.fromkeys(reasons)))


def read_failure(log: Path, code: int) -> Failure | None:
    """What the runtime itself had to say, None if it started the command and ``code`` is the command's own."""
    try:
        with open(log, "rb") as stream:
            text = stream.read(_MAX_LOG).decode(errors="replace")
    except FileNotFoundError:
        return None
    messages = [message for line in text.splitlines() if (message := _error_message(line))]
    if not messages or code not in _FAILED:
        return None
    message = messages[-1]
    lowered = message.lower()
    if any(phrase in lowered for phrase in _COMMAND):
        missing = "not found" in lowered or "no such file" in lowered
        return Failure(127 if missing else 126, message)
    return Failure(125, message)


def _candidates(cgroups: CgroupHost) -> list[Runtime]:
    """What is installed, fastest first."""
    found = []
    for name in ("crun", "runc"):
        try:
            path = proc.find_tool(name)
        except ToolError:
            continue
        found.append(Runtime(name, path))
        if name == "crun" and cgroups.hybrid is not None:
            found.append(Runtime(name, path, hide_unified=True))
    return found


def _error_message(line: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(value, dict) or value.get("level") not in ("error", "fatal"):
        return ""
    return str(value.get("msg", ""))[:2000]


class _Cache:
    """The choice of this boot. Another boot, or a changed program, asks again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, candidates: list[Runtime]) -> Runtime | None:
        try:
            value = json.loads(self._path.read_bytes())
            return next((item for item in candidates if value == self._key(item)), None)
        except (OSError, ValueError):
            return None

    def store(self, runtime: Runtime) -> None:
        write_atomic(self._path, json.dumps(self._key(runtime)).encode(), mode=0o600)

    def _key(self, runtime: Runtime) -> dict[str, Any]:
        status = Path(runtime.path).stat()
        return {"boot": boot_id(), "path": runtime.path, "hide": runtime.hide_unified, "size": status.st_size, "mtime": status.st_mtime_ns}
