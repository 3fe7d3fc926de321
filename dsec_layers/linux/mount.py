"""Mounting by the file system context calls: fsopen(2), fsconfig(2), fsmount(2), move_mount(2).

Unlike mount(2) they take one option a call, so that thousands of devices and hundreds of lower directories need no string that fits a page, nothing has
to be escaped, and a failure comes with the kernel's own words. Root only. The call numbers are the same on every architecture Linux added them to
at once (all but alpha).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self, TypeAlias

from dsec_layers.errors import Conflict, DsecError, HostError, NotFound, UsageError
from dsec_layers.linux.mountinfo import mount_of

__all__ = ["MountTarget", "mount_bind", "mount_erofs", "mount_overlay", "umount"]

StrPath: TypeAlias = str | os.PathLike[str]

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_FSOPEN_CLOEXEC = 1
_OPEN_TREE_CLONE = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_FSMOUNT_CLOEXEC = 1
_MOUNT_ATTR_RDONLY = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_AT_FDCWD = -100
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8

_LONGEST_VALUE = 255  # fsconfig(2) copies at most 256 bytes of a string, NUL included
_LONGEST_LOG = 8192

_libc = ctypes.CDLL(None, use_errno=True)
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


def _call(number: int, *arguments: int | bytes | None) -> int:
    """One raw system call; raises OSError."""
    converted = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class MountTarget:
    """A directory that was looked at and can be mounted on, held by a descriptor so that the mount comes to it and not to what has its name by then.

    ``path`` must be absolute and without links (UsageError), an existing directory (NotFound, UsageError) on which nothing is mounted (Conflict).
    Use as a context, or close.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        wrong = UsageError(f"{path} is not an absolute path without links")
        if not os.path.isabs(path):  # noqa: PTH117 - a Path would tidy it
            raise wrong
        try:
            self.fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{path} does not exist", hint=f"mkdir {path}") from error
        except OSError as error:
            raise HostError(f"cannot open {path}: {error.strerror}") from error
        try:
            mode = os.fstat(self.fd).st_mode
            if stat.S_ISLNK(mode) or not self.is_in_place():
                raise wrong
            if not stat.S_ISDIR(mode):
                raise UsageError(f"{path} is not a directory")
            mount = mount_of(self.fd)
            if mount is not None and mount.target == path:
                raise Conflict(f"something is mounted at {path} already", hint=f"umount {path} first, or choose another directory")
        except BaseException:
            os.close(self.fd)
            raise

    def is_in_place(self) -> bool:
        """Whether the directory still has the path."""
        return os.readlink(f"/proc/self/fd/{self.fd}") == self.path  # noqa: PTH115 - a Path would tidy it

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _attach(mount: int, target: StrPath | MountTarget) -> None:
    """Put the mount that a descriptor is of at ``target``. Raises OSError; Conflict, and nothing is mounted, if the target was moved away meanwhile."""
    if not isinstance(target, MountTarget):
        _call(_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        return
    _call(_MOVE_MOUNT, mount, b"", target.fd, b"", _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH)
    if not target.is_in_place():
        _libc.umount2(b"/proc/self/fd/%d" % mount, _MNT_DETACH)
        raise Conflict(f"{target.path} was moved while something was being mounted there", hint="try again")


class _Context:
    """One fsopen context. Everything it opens is closed with it."""

    def __init__(self, kind: str, what: str) -> None:
        self._what = what
        self._kind = kind
        self._stack = ExitStack()
        self._opened: dict[str, int] = {}
        self._fd = -1
        try:
            self._fd = _call(_FSOPEN, kind.encode(), _FSOPEN_CLOEXEC)
        except OSError as error:
            raise self._failure(error, "") from error
        self._stack.callback(os.close, self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def flag(self, key: str) -> None:
        """Set an option that has no value."""
        self._config(_SET_FLAG, key, None)

    def text(self, key: str, value: str) -> None:
        """Set an option to a string."""
        self._config(_SET_STRING, key, os.fsencode(value))

    def path(self, key: str, value: StrPath, *, escape: bool = False) -> None:
        """Set an option to an absolute path of any length; ``escape`` for options that the file system unescapes."""
        text = os.path.abspath(os.fspath(value))  # noqa: PTH100 - resolve() would follow links
        quote = "\\\\" if escape else "\\"
        if len(os.fsencode(text.replace("\\", quote))) > _LONGEST_VALUE:
            directory, name = os.path.split(text)
            text = f"/proc/self/fd/{self._open(directory)}/{name}"
            if len(os.fsencode(text.replace("\\", quote))) > _LONGEST_VALUE:
                text = f"/proc/self/fd/{self._open(os.path.join(directory, name))}"  # noqa: PTH118
        self._config(_SET_STRING, key, os.fsencode(text.replace("\\", quote)))

    def _open(self, path: str) -> int:
        """A descriptor that stands for a path which is too long for fsconfig(2); kept until the mount is done."""
        fd = self._opened.get(path)
        if fd is None:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError as error:
                raise self._failure(error, path) from error
            self._stack.callback(os.close, fd)
            self._opened[path] = fd
        return fd

    def mount(self, target: StrPath | MountTarget, attributes: int = 0) -> None:
        """Create the file system and put it at ``target``."""
        self._config(_CMD_CREATE, None, None)
        try:
            fd = _call(_FSMOUNT, self._fd, _FSMOUNT_CLOEXEC, attributes)
            try:
                _attach(fd, target)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failure(error, _name(target)) from error

    def _config(self, command: int, key: str | None, value: bytes | None) -> None:
        try:
            _call(_FSCONFIG, self._fd, command, key.encode() if key is not None else None, value, 0)
        except OSError as error:
            raise self._failure(error, f"{key}={os.fsdecode(value or b'')}" if key else "") from error

    def _failure(self, error: OSError, where: str) -> HostError:
        words = self._log()
        hint = None
        if error.errno == errno.EPERM:
            hint = "mounting needs root (CAP_SYS_ADMIN)"
        elif error.errno == errno.ENODEV:
            hint = f"this kernel has no {self._kind} file system"
        elif error.errno == errno.ENOTBLK:
            hint = "mounting EROFS from files needs Linux 6.12 or newer"
        elif error.errno in (errno.EINVAL, errno.EUCLEAN) and not words and self._kind == "erofs":
            hint = "the kernel's log (dmesg) says what is wrong with the image"
        elif error.errno == errno.ENOSYS:
            hint = "Linux 5.2 or newer is needed"
        return HostError(f"{self._what}: {': '.join(filter(None, [where, words, error.strerror]))}", hint=hint)

    def _log(self) -> str:
        """What the kernel wrote to the context about the failure."""
        lines: list[str] = []
        try:
            while len(lines) < 16:
                lines.append(os.read(self._fd, _LONGEST_LOG).decode(errors="replace").strip()[2:])
        except OSError:  # ENODATA: no more; EBADF: fsopen itself failed
            pass
        return "; ".join(lines)


def _name(target: StrPath | MountTarget) -> str:
    return target.path if isinstance(target, MountTarget) else os.fspath(target)


def mount_erofs(metadata: StrPath, target: StrPath, devices: Sequence[StrPath] = (), flags: Sequence[str] = ()) -> None:
    """Mount the EROFS image ``metadata`` (a file or block device) read-only at ``target``, with its extra devices in order.

    Without devices an image that has a device table is taken for a flat image. ``flags`` are options without a value, such as ``directio``.
    Raises HostError with the kernel's message. Source: Documentation/filesystems/erofs.rst.
    """
    with _Context("erofs", f"cannot mount {os.fspath(metadata)}") as context:
        context.path("source", metadata)
        for flag in flags:
            context.flag(flag)
        for device in devices:
            context.path("device", device)
        context.mount(target, _MOUNT_ATTR_RDONLY)


def mount_overlay(
    target: StrPath | MountTarget,
    lowers: Sequence[StrPath],
    *,
    upper: StrPath | None = None,
    work: StrPath | None = None,
    options: Mapping[str, str | None] | None = None,
    source: str = "overlay",
) -> None:
    """Mount overlayfs at ``target``; ``lowers`` are directories, the topmost first, one option call each, so that hundreds work.

    ``upper`` and ``work`` make it writable. ``options`` are further overlayfs options, None for those without a value. ``source`` is what
    /proc/mounts shows. Needs Linux >= 6.8 (``lowerdir+``). Raises HostError with the kernel's message. Source: Documentation/filesystems/overlayfs.rst.
    """
    with _Context("overlay", f"cannot mount an overlay at {_name(target)}") as context:
        context.text("source", source)
        for lower in lowers:
            context.path("lowerdir+", lower)
        if upper is not None:
            context.path("upperdir", upper, escape=True)
        if work is not None:
            context.path("workdir", work, escape=True)
        for key, value in (options or {}).items():
            if value is None:
                context.flag(key)
            else:
                context.text(key, value)
        context.mount(target, _MOUNT_ATTR_RDONLY if upper is None else 0)


def mount_bind(source: StrPath, target: StrPath | MountTarget) -> None:
    """Show the mount at the directory ``source`` at ``target`` as well, without what is mounted inside it. Raises HostError."""
    try:
        fd = _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC)
        try:
            _attach(fd, target)
        finally:
            os.close(fd)
    except OSError as error:
        raise HostError(f"cannot bind {os.fspath(source)} to {_name(target)}: {error.strerror}") from error


def umount(target: StrPath, lazy: bool = False) -> None:
    """Unmount what is mounted at ``target``; ``lazy`` detaches it now and frees it when its last user is gone.

    Raises Conflict when it is in use, NotFound when nothing is mounted there, HostError for the rest.
    """
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if _libc.umount2(os.fsencode(target), flags) == 0:
        return
    code = ctypes.get_errno()
    kinds: dict[int, type[DsecError]] = {errno.EBUSY: Conflict, errno.EINVAL: NotFound, errno.ENOENT: NotFound}
    reasons = {errno.EBUSY: "it is in use", errno.EINVAL: "nothing is mounted there"}
    raise kinds.get(code, HostError)(f"cannot unmount {os.fspath(target)}: {reasons.get(code, os.strerror(code))}")
