"""A root directory for tests that run programs in sandboxes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.kit.tools import tool

__all__ = ["make_busybox_root"]

APPLETS = (
    *(
        "sh",
        "cat",
        "echo",
        "ls",
        "sleep",
        "true",
        "false",
        "id",
        "env",
        "mkdir",
        "rm",
        "rmdir",
        "mv",
        "cp",
        "ln",
        "touch",
        "chmod",
        "chown",
        "stat",
    ),
    *(
        "dd",
        "head",
        "tail",
        "wc",
        "grep",
        "sed",
        "find",
        "tar",
        "mknod",
        "mount",
        "umount",
        "unshare",
        "ip",
        "ping",
        "ps",
        "kill",
        "hostname",
        "readlink",
    ),
    *("seq", "sort", "sha256sum", "setsid", "stty", "tty", "yes", "date", "mkfifo", "nslookup", "wget", "test", "chroot", "printf"),
)


def make_busybox_root(root: Path) -> Path:
    """Fill an empty directory with a static busybox and little else: no /proc, /dev, /sys, and of /etc only passwd and group. Needs root."""
    program = tool("busybox")
    root.chmod(0o755)
    for name in ("bin", "etc", "home", "root", "tmp", "usr/bin", "var/tmp", "run"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    shutil.copy(program, root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000:Ann:/home/ann:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nann:x:1000:\nwheel:x:10:ann\n")
    (root / "home/ann").mkdir()
    os.chown(root / "home/ann", 1000, 1000)
    return root
