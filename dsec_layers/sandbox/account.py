"""Users and groups of an environment, from its own passwd and group files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from dsec_layers.errors import UsageError
from dsec_layers.sandbox.config import Identity
from dsec_layers.sandbox.syscalls import open_in_root

__all__ = ["find_identity", "parse_identity"]

_MAX_FILE: Final = 4 << 20
_MAX_ID: Final = (1 << 32) - 2


def find_identity(root: Path, user: str) -> Identity:
    """Whom ``user`` (see RunSpec) is in the mounted tree ``root``. Raises UsageError if the tree has no such user."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return parse_identity(user, _read(fd, "/etc/passwd"), _read(fd, "/etc/group"))
    finally:
        os.close(fd)


def parse_identity(user: str, passwd: str, group: str) -> Identity:
    """Whom ``user`` is by the text of a passwd and a group file. Numbers need no entry; names do."""
    name, _, group_name = (user or "0").partition(":")
    entry = next((item for item in _entries(passwd, 6) if item[0] == name or item[2] == name), None)
    if entry is not None:
        uid, gid, home, login = _number(entry[2], user), _number(entry[3], user), entry[5], entry[0]
    elif name.isdecimal():
        uid, gid, home, login = _number(name, user), 0, "/root" if int(name) == 0 else "/", ""
    else:
        raise UsageError(f"the environment has no user {name!r}")
    if group_name:
        return Identity(uid, _group(group_name, group, user), (), home or "/")
    groups = {_number(item[2], user) for item in _entries(group, 4) if login and login in item[3].split(",") and item[2].isdecimal()}
    return Identity(uid, gid, tuple(sorted(groups - {gid})), home or "/")


def _group(name: str, group: str, user: str) -> int:
    for item in _entries(group, 3):
        if item[0] == name:
            return _number(item[2], user)
    if name.isdecimal():
        return _number(name, user)
    raise UsageError(f"the environment has no group {name!r}")


def _entries(text: str, least: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) >= least and not line.startswith("#"):
            yield fields


def _number(text: str, user: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) > _MAX_ID:
        raise UsageError(f"user {user!r} has an id that is no number: {text[:40]!r}")
    return int(text)


def _read(root: int, path: str) -> str:
    """A file of the environment, "" if there is none or it is no regular file."""
    try:
        fd = open_in_root(root, path)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        with open(f"/proc/self/fd/{fd}", "rb") as stream:
            return stream.read(_MAX_FILE).decode(errors="replace")
    finally:
        os.close(fd)
