"""The system calls a sandbox may not make: everything that reaches past its namespaces into the one kernel all share.

A deny-list: its default is to allow (ADR 0031). Most of these calls already fail without the capabilities a sandbox lacks; refusing them earlier keeps the
kernel code behind them out of reach. Names that the host's libseccomp does not know are left out by the runtimes.
"""

from __future__ import annotations

import errno
from typing import Any, Final

__all__ = ["seccomp_profile"]

_DENIED: Final[dict[str, tuple[str, ...]]] = {
    "mounts": (
        *("mount", "umount", "umount2", "pivot_root", "mount_setattr", "move_mount"),
        *("fsopen", "fsconfig", "fsmount", "fspick", "open_tree", "open_tree_attr"),
    ),
    "namespaces": ("unshare", "setns"),
    "files by handle: past the mount namespace": ("open_by_handle_at",),
    "watching whole file systems": ("fanotify_init",),
    "keys: not namespaced": ("add_key", "keyctl", "request_key"),
    "kernel programs and probes": ("bpf", "perf_event_open", "kcmp", "lookup_dcookie"),
    "page faults handled by the program: helps to win kernel races": ("userfaultfd",),
    "submission rings: their own way around this filter": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    "modules and kernels": (
        *("init_module", "finit_module", "delete_module", "create_module", "get_kernel_syms", "query_module"),
        *("kexec_load", "kexec_file_load", "reboot"),
    ),
    "devices, swap, accounting, quotas": ("iopl", "ioperm", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd"),
    "the clock: not namespaced": ("clock_settime", "clock_settime64", "clock_adjtime", "clock_adjtime64", "settimeofday", "stime"),
    "memory policy of other processes": ("move_pages", "migrate_pages"),
    "long obsolete": ("_sysctl", "sysfs", "uselib", "ustat", "nfsservctl", "vm86", "vm86old", "vserver", "afs_syscall"),
    "terminals of the whole machine": ("vhangup",),
}

_NAMESPACE_FLAGS: Final = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET (linux/sched.h)."""

_ARCHITECTURES: Final = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
}

_AF_ALG, _AF_VSOCK = 38, 40


def seccomp_profile(machine: str) -> dict[str, Any]:
    """The ``linux.seccomp`` object of the OCI runtime specification for a machine as ``uname -m`` names it."""
    # The 32-bit and x32 calls must be named too: a filter that only knows the native numbers is stepped around through them.
    names = sorted(name for group in _DENIED.values() for name in group)
    refuse = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    profile: dict[str, Any] = {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": names, **refuse},
            *(
                # One rule a flag: a masked comparison can ask for "all of these bits", not for "any of these".
                {"names": ["clone"], **refuse, "args": [_masked(0, flag)]}
                for flag in _bits(_NAMESPACE_FLAGS)
            ),
            # Its flags are behind a pointer, where a filter cannot look; "no such call" makes the C library fall back to clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
            *(
                {"names": ["socket"], **refuse, "args": [{"index": 0, "value": family, "op": "SCMP_CMP_EQ"}]}
                for family in (_AF_ALG, _AF_VSOCK)
            ),
        ],
    }
    if machine in _ARCHITECTURES:
        profile["architectures"] = list(_ARCHITECTURES[machine])
    return profile


def _masked(index: int, mask: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": mask, "op": "SCMP_CMP_MASKED_EQ"}


def _bits(value: int) -> list[int]:
    return [1 << position for position in range(64) if value >> position & 1]
