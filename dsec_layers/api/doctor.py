"""``doctor``: what this host can do, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from dsec_layers.errors import DsecError
from dsec_layers.linux.mountinfo import file_system_of
from dsec_layers.proc import find_tool, tool_version
from dsec_layers.sandbox.cgroups import default_limits

__all__ = ["Check", "doctor"]

_KERNELS = {"erofs file-backed mounts": (6, 12), "fanotify pre-content events": (6, 14)}
_TOOLS = (
    ("mkfs.erofs", (1, 5), "the compressed layout", "erofs-utils"),
    ("fsck.erofs", (1, 5), "verify --deep judged by the reference tool", "erofs-utils"),
    ("mmdebstrap", (1, 0), "Debian bases", "mmdebstrap"),
    ("zstd", (1, 4), "reading blobs by hand", "zstd"),
    ("qemu-img", (5, 0), "disk conversion", "qemu-utils"),
    ("mke2fs", (1, 46), "disks with a file system", "e2fsprogs"),
)
_CACHE_FILESYSTEMS = {"ext4", "xfs", "btrfs"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: ``ok``, ``missing`` (a feature will not work) or ``note``; ``remedy`` says how to get it."""

    name: str
    status: str
    detail: str
    needed_for: str = ""
    remedy: str = ""


def doctor(cache: Path, *, memory: int | None = None, pids: int | None = None) -> list[Check]:
    """Look at this host: rights, kernel, runtimes, tools, the cache's file system. Changes nothing. ``memory``, ``pids``: the limits of ``run`` that are set."""
    limits = _limits(memory, pids)
    return [_root(), *_kernel(), _erofs(), _fuse(), _cache(cache), _runtime(), limits, *(_tool(*tool) for tool in _TOOLS)]


def _root() -> Check:
    if os.geteuid() == 0:
        return Check("root", "ok", "running as root", "mounts and sandboxes")
    return Check(
        "root", "missing", f"running as uid {os.geteuid()}", "mounts and sandboxes", "sudo; build, import and inspect work without"
    )


def _kernel() -> list[Check]:
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    return [
        Check(
            name,
            "ok" if version >= least else "missing",
            f"Linux {release}",
            "the fanotify driver",
            "" if version >= least else f"Linux {least[0]}.{least[1]} or newer; the fuse driver works on older kernels",
        )
        for name, least in _KERNELS.items()
    ]


def _erofs() -> Check:
    known = any(line.split()[-1] == "erofs" for line in _lines("/proc/filesystems"))
    return Check(
        "erofs in the kernel",
        *(("ok", "registered") if known else ("missing", "not in /proc/filesystems")),
        "mounts",
        "" if known else "modprobe erofs",
    )


def _fuse() -> Check:
    there = os.path.exists("/dev/fuse")  # noqa: PTH110
    return Check("/dev/fuse", *(("ok", "present") if there else ("missing", "absent")), "the fuse driver", "" if there else "modprobe fuse")


def _cache(cache: Path) -> Check:
    place = cache
    while not place.exists():
        place = place.parent
    kind = file_system_of(place)
    if kind in _CACHE_FILESYSTEMS:
        return Check("cache file system", "ok", f"{place} is {kind}", "the fanotify driver")
    return Check(
        "cache file system",
        "missing",
        f"{place} is {kind}",
        "the fanotify driver",
        "put --cache on ext4, xfs or btrfs; or use the fuse driver",
    )


def _runtime() -> Check:
    versions = []
    for name in ("runc", "crun"):
        try:
            versions.append(f"{name} {'.'.join(map(str, tool_version(find_tool(name))))}")
        except DsecError:
            continue
    if versions:
        return Check("OCI runtime", "ok", ", ".join(versions), "run and build steps")
    return Check("OCI runtime", "missing", "neither runc nor crun", "run and build steps", "apt-get install runc")


def _limits(memory: int | None, pids: int | None) -> Check:
    default = default_limits()
    known = {"memory": default.get("memory") if memory is None else memory, "pids": default.get("pids") if pids is None else pids}
    size, count = known["memory"], known["pids"]
    texts = (
        f"memory {size / (1 << 20):g} MiB" if size else "memory without limit",
        f"{count} processes" if count else "processes without limit",
    )
    lacking = [name for name in ("memory", "pids") if name not in default]
    return Check(
        "limits of run",
        "missing" if lacking else "ok",
        ", ".join(texts),
        "--memory and --pids of run, or memory and pids below [run] in config.toml",
        f"mount the control groups with the controllers {' and '.join(lacking)}" if lacking else "",
    )


def _tool(name: str, least: tuple[int, int], purpose: str, package: str) -> Check:
    try:
        path = find_tool(name)
        version = tool_version(path, "-V" if name == "mke2fs" else "--version")
    except DsecError:
        return Check(name, "missing", "not installed", purpose, f"apt-get install {package}")
    text = ".".join(map(str, version)) or "unknown version"
    if version and version[:2] < least:
        return Check(name, "missing", f"{text}, {least[0]}.{least[1]} needed", purpose, f"a newer {package}")
    return Check(name, "ok", text, purpose)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
