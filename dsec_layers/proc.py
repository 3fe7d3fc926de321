"""The only module that starts programs.

The defaults are the opposite of ``subprocess``'s: failure raises, standard input is /dev/null, the environment is built from nothing
(so that a build does not depend on the caller's locale or settings), and the child is always reaped. The one failure message says what was run
in a form that can be pasted into a shell, what came of it, and the last lines the program wrote to its standard error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, TypeAlias

from dsec_layers.errors import ToolError

__all__ = [
    "DEVNULL",
    "INHERIT",
    "PIPE",
    "Completed",
    "Process",
    "clean_environment",
    "find_tool",
    "inherited_environment",
    "run",
    "spawn",
    "tool_version",
]

PIPE = subprocess.PIPE
DEVNULL = subprocess.DEVNULL
INHERIT = None
Process: TypeAlias = "subprocess.Popen[bytes]"
Target: TypeAlias = "int | IO[Any] | None"

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAIL = 2000
_TERMINATE_GRACE = 5.0

_PACKAGES = {
    "mkfs.erofs": "erofs-utils",
    "fsck.erofs": "erofs-utils",
    "dump.erofs": "erofs-utils",
    "runc": "runc",
    "crun": "crun",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "mke2fs": "e2fsprogs",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "nbdinfo": "libnbd-bin",
    "nbdcopy": "libnbd-bin",
    "skopeo": "skopeo",
    "umoci": "umoci",
    "zstd": "zstd",
}


@dataclass(frozen=True, slots=True)
class Completed:
    """What a finished program left: exit code, captured output."""

    argv: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: bytes


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment from nothing: a PATH, the C.UTF-8 locale, UTC, and ``extra``. TERM, HOME and TMPDIR pass through."""
    env = {"PATH": os.environ.get("PATH", _PATH), "LANG": "C.UTF-8", "TZ": "UTC"}
    for name in ("HOME", "TERM", "TMPDIR"):
        if name in os.environ:
            env[name] = os.environ[name]
    env.update(extra or {})
    return env


def inherited_environment() -> dict[str, str]:
    """This process's whole environment: for a daemon that must find the same credentials and packages as its starter."""
    return dict(os.environ)


def find_tool(name: str) -> str:
    """The absolute path of a program. Raises ToolError that says which package has it."""
    path = shutil.which(name, path=os.environ.get("PATH", _PATH) + ":" + _PATH)
    if path is None:
        package = _PACKAGES.get(name)
        raise ToolError(f"{name} is not installed", hint=f"apt-get install {package}" if package else None)
    return path


@lru_cache(maxsize=64)
def tool_version(path: str, flag: str = "--version") -> tuple[int, ...]:
    """The first dotted number a program prints of itself, () if it prints none. ``path`` is absolute (from find_tool)."""
    done = run([path, flag], check=False, timeout=20)
    found = re.search(rb"(\d+(?:\.\d+)+)", done.stdout + done.stderr)
    return tuple(int(part) for part in found.group(1).split(b".")) if found else ()


@contextmanager
def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    stdin: Target = DEVNULL,
    stdout: Target = DEVNULL,
    stderr: Target = INHERIT,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
) -> Iterator[Process]:
    """Start a program and hand it out; when the context ends it is waited for, and on an exception it is ended first.

    ``env`` is the whole environment (``clean_environment()`` when None). The caller looks at ``returncode``.
    """
    arguments = [os.fspath(part) for part in argv]
    try:
        process = subprocess.Popen(
            arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(env) if env is not None else clean_environment(),
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=new_session,
        )
    except FileNotFoundError as error:
        raise ToolError(f"cannot start {arguments[0]}: not found", hint=_install_hint(arguments[0])) from error
    except OSError as error:
        raise ToolError(f"cannot start {shlex.join(arguments)}: {error.strerror}") from error
    try:
        yield process
    except BaseException:
        _end(process)
        raise
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        process.wait()


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    input: bytes | None = None,
    check: bool = True,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Completed:
    """Run a program to its end with captured output. A non-zero exit raises ToolError unless ``check`` is false; so does a time-out, always."""
    with spawn(
        argv, stdin=PIPE if input is not None else DEVNULL, stdout=PIPE, stderr=PIPE, env=env, cwd=cwd, pass_fds=pass_fds
    ) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise ToolError(f"{shlex.join(os.fspath(part) for part in argv)} did not finish within {timeout:g} s") from error
    done = Completed(tuple(os.fspath(part) for part in argv), process.returncode, out, err)
    if check and done.code != 0:
        raise ToolError(describe_failure(done), hint=_install_hint(done.argv[0]) if done.code == 127 else None)
    return done


def describe_failure(done: Completed) -> str:
    """One message: the command as it can be pasted, what came of it, the end of its standard error."""
    if done.code < 0:
        outcome = f"was ended by {signal.Signals(-done.code).name}"
    elif done.code == 127:
        outcome = "was not found (exit code 127)"
    else:
        outcome = f"failed with exit code {done.code}"
    tail = done.stderr[-_TAIL:].decode(errors="replace").strip()
    return f"{shlex.join(done.argv)} {outcome}" + (f": {tail}" if tail else "")


def _install_hint(program: str) -> str | None:
    package = _PACKAGES.get(os.path.basename(program))  # noqa: PTH119
    return f"apt-get install {package}" if package else None


def _end(process: Process) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_TERMINATE_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
