"""The OCI runtime configuration of a sandbox: a pure function from what is wanted to config.json.

Written for the OCI runtime specification 1.0; nothing is used that runc 1.1 or crun 1.8 lack. What is not granted here, a sandbox does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsec_layers.sandbox.seccomp import seccomp_profile
from dsec_layers.sandbox.spec import Network, RunSpec
from dsec_layers.sandbox.variables import DEFAULT_PATH

__all__ = ["CAPABILITIES", "Identity", "Mountpoint", "oci_config"]

CAPABILITIES: Final = tuple(
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
        *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    )
)
"""Docker's default set without NET_RAW, which on the host's network would read and forge everybody's packets."""

_MASKED: Final = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug"),
    *("/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags"),
    *("/sys/firmware", "/sys/devices/virtual/powercap", "/sys/kernel/debug", "/sys/kernel/tracing"),
)
_READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_PERIOD: Final = 100_000
_OPEN_FILES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom the command runs as, all numbers resolved: the runtimes read no passwd file."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/root"


@dataclass(frozen=True, slots=True)
class Mountpoint:
    """A host path bound into the sandbox at a place that exists there."""

    source: str
    target: str
    read_only: bool = True


def oci_config(
    spec: RunSpec,
    *,
    rootfs: str,
    cgroup: str,
    machine: str,
    identity: Identity,
    binds: Sequence[Mountpoint] = (),
    host_env: Mapping[str, str] | None = None,
    swap: bool = True,
    open_files: int = _OPEN_FILES,
    console: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    ``rootfs``: absolute path of the mounted root. ``cgroup``: absolute path within each hierarchy. ``machine``: as ``uname -m`` names it.
    ``host_env``: variables that come with the host's network; the spec's own win. ``swap``: whether this host can limit swap (asking for it where it cannot fails).
    ``open_files``: the hard limit of this process, which the sandbox's may not exceed. ``console``: rows and columns of the caller's terminal.
    """
    return {
        "ociVersion": "1.0.2",
        "process": {
            **_process(spec, identity, host_env or {}, min(open_files, _OPEN_FILES)),
            **({"consoleSize": {"height": console[0], "width": console[1]}} if console else {}),
        },
        "root": {"path": rootfs, "readonly": False},
        "hostname": spec.hostname,
        "mounts": [*_system_mounts(spec), *(_bind(item) for item in binds)],
        "linux": {
            "cgroupsPath": cgroup,
            "resources": _resources(spec, swap),
            "namespaces": _namespaces(spec),
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "seccomp": seccomp_profile(machine),
        },
    }


def _process(spec: RunSpec, identity: Identity, host_env: Mapping[str, str], open_files: int) -> dict[str, Any]:
    environment = {"PATH": DEFAULT_PATH, "HOME": identity.home, "HOSTNAME": spec.hostname, "LANG": "C.UTF-8"}
    if spec.tty:
        environment["TERM"] = "xterm"
    environment |= {**host_env, **spec.env}
    # Root gets the set; others get nothing, and cannot win it back: no_new_privs also takes the power out of set-user-id programs and file capabilities.
    held = list(CAPABILITIES) if identity.uid == 0 else []
    return {
        "terminal": spec.tty,
        "user": {"uid": identity.uid, "gid": identity.gid, "additionalGids": list(identity.groups), "umask": 0o022},
        "args": list(spec.argv),
        "env": [f"{name}={value}" for name, value in environment.items()],
        "cwd": spec.workdir,
        "capabilities": {"bounding": list(CAPABILITIES), "effective": held, "permitted": held, "inheritable": [], "ambient": []},
        "noNewPrivileges": True,
        "rlimits": [
            {"type": "RLIMIT_NOFILE", "soft": min(1024, open_files), "hard": open_files},
            {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
        ],
        "oomScoreAdj": 100,
    }


def _system_mounts(spec: RunSpec) -> list[dict[str, Any]]:
    def mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
        return {"destination": destination, "type": kind, "source": source, "options": ["nosuid", *options]}

    return [
        mount("/proc", "proc", "proc", "noexec", "nodev"),
        mount("/dev", "tmpfs", "tmpfs", "noexec", "strictatime", "mode=755", "size=65536k"),
        mount("/dev/pts", "devpts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        mount("/dev/shm", "tmpfs", "shm", "noexec", "nodev", "mode=1777", f"size={spec.shm}"),
        mount("/dev/mqueue", "mqueue", "mqueue", "noexec", "nodev"),
        mount("/sys", "sysfs", "sysfs", "noexec", "nodev", "ro"),
        # Its own limits, read-only: run-time systems (Java, Go, .NET) size themselves by them.
        mount("/sys/fs/cgroup", "cgroup", "cgroup", "noexec", "nodev", "relatime", "ro"),
    ]


def _bind(item: Mountpoint) -> dict[str, Any]:
    # Not recursive: "ro" would leave the mounts below it writable.
    options = ["bind", "nosuid", "nodev", "rprivate", "ro" if item.read_only else "rw"]
    return {"destination": item.target, "type": "bind", "source": item.source, "options": options}


def _namespaces(spec: RunSpec) -> list[dict[str, str]]:
    kinds = ["pid", "mount", "ipc", "uts", "cgroup"]
    if spec.network is Network.NONE:
        kinds.append("network")
    return [{"type": kind} for kind in kinds]


def _resources(spec: RunSpec, swap: bool) -> dict[str, Any]:
    resources: dict[str, Any] = {"devices": _devices()}
    if spec.memory is not None:
        # "swap" is memory and swap together: equal values mean no swap.
        resources["memory"] = {"limit": spec.memory, **({"swap": spec.memory} if swap else {})}
    if spec.cpus is not None:
        resources["cpu"] = {"quota": max(1000, round(spec.cpus * _PERIOD)), "period": _PERIOD}
    if spec.pids is not None:
        resources["pids"] = {"limit": spec.pids}
    return resources


def _devices() -> list[dict[str, Any]]:
    """Nothing but the harmless character devices: null, zero, full, random, urandom, tty, console, ptmx, pts. mknod itself stays allowed: packages use it."""
    named = ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, None))
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    rules += [{"allow": True, "type": kind, "access": "m"} for kind in ("c", "b")]
    for major, minor in named:
        rules.append({"allow": True, "type": "c", "major": major, **({} if minor is None else {"minor": minor}), "access": "rwm"})
    return rules
