"""Processes: who still lives, which boot this is, which mount namespace, by /proc; and one that goes on in the background."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from dsec_layers.errors import DsecError
from dsec_layers.fsio import map_os_error

__all__ = [
    "boot_id",
    "in_background",
    "is_alive",
    "mount_namespace",
    "set_descriptor_limit",
    "set_oom_score",
    "start_time",
    "sync_file_system",
]

_libc = ctypes.CDLL(None, use_errno=True)


def in_background(log: Path, serve: Callable[[int], int]) -> int:
    """Run ``serve`` in a process of its own that outlives this one: it has no terminal, no input, and errors that nobody expects go to ``log`` (appended, mode 0600).

    ``serve`` gets a descriptor to say on that it is ready, or why not; what it returns is the process's exit code. Returns the descriptor that reads what
    is said, whose end is the end of the process if it did not close its own. For a process with one thread. Raises OSError.
    """
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    said, say = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(target)
        os.close(say)
        return said
    os.close(said)
    os.setsid()
    os.chdir("/")
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for source, number in ((null, 0), (null, 1), (target, 2)):
        os.dup2(source, number)
    os.close(null)
    os.close(target)
    sys.exit(serve(say))


def boot_id() -> str:
    """The random identifier of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks after boot (field 22 of /proc/PID/stat); None if there is no such process or it is a zombie.

    With the pid this names a process for good: pids are used again, start times are not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command in parentheses may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that had ``pid`` and ``started`` then still runs."""
    return start_time(pid) == started


def mount_namespace(pid: int | str = "self") -> str:
    """The identity of a process's mount namespace."""
    return str(Path(f"/proc/{pid}/ns/mnt").readlink())


def set_oom_score(value: int) -> None:
    """Set how gladly the kernel kills this process when memory is short (-1000 never .. 1000 first). Without the right to lower it, nothing changes."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(value))
    except OSError:
        pass


def set_descriptor_limit(wanted: int) -> int:
    """Set this process's limit of open files to ``wanted``, or as near as allowed; returns what it is now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limits in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        except (ValueError, OSError):
            continue
        break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def sync_file_system(path: Path) -> None:
    """Wait until everything written to the file system of ``path`` is durable (syncfs(2))."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) < 0:
            raise _mapped(path)
    finally:
        os.close(fd)


def _mapped(path: Path) -> DsecError:
    code = ctypes.get_errno()
    return map_os_error(OSError(code, os.strerror(code)), f"sync {path}")
