"""A store in a directory: the embedded default, and right on a 3FS mount as well (docs/formats/store.md).

    dsec-store.json                 says that this is a store; without it nothing is "absent", the file system is not mounted
    blobs/sha256/ab/<64 hex>        a blob; complete and durable before it has this name
    refs/<name>/<tag>/<number>      store/posix_refs.py
    tmp/<random>                    being written; swept when a day old
    trash/ab/<hex>.<cutoff>.<time>  on its way out; stays some hours where an open file does not outlive its last name (3FS)

Only what POSIX and 3FS both promise is used: O_EXCL, write, fsync, link(2) that fails when the name exists, rename(2) without flags, utimensat(2).
No locks, xattrs, fallocate, SEEK_HOLE, O_APPEND, shared memory, no time stamps finer than seconds, and no fsync of directories where they are refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from dsec_layers.descriptors import Descriptors, OpenFile
from dsec_layers.digest import Buffer, Digest, check_digest
from dsec_layers.errors import CorruptError, NotFound, StoreError, UsageError
from dsec_layers.fsio import fsync_directory, map_os_error, pread_exact, write_atomic
from dsec_layers.linux.mountinfo import TABLE, file_system_of
from dsec_layers.store.base import BlobInfo, BlobWriter, Capabilities, Ref, Store, check_range
from dsec_layers.store.posix_refs import PosixRefs, make_directory

__all__ = ["PosixStore", "is_3fs", "open_url"]

MARKER: Final = "dsec-store.json"
_READABLE: Final = 0o444
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""No hard links on this file system, or (fs.protected_hardlinks) not to another user's file."""
_OURS: Final = ("blobs", "refs", "tmp", "trash")
_CONTENT: Final = b'{"format":1,"kind":"dsec-layers store"}\n'
_HEX: Final = re.compile(r"[0-9a-f]{64}\Z")
_SHARD: Final = re.compile(r"[0-9a-f]{2}\Z")
_TRASHED: Final = re.compile(r"([0-9a-f]{64})\.([0-9]{1,19})\.([0-9]{1,19})\Z")
_NEVER: Final = 2**63 - 1
_NOT_A_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
_KINDS: Final = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFLNK: "symbolic link",
}
_T = TypeVar("_T")
_BUFFER: Final = 1 << 20
_OPEN_BLOBS: Final = 256
_RECHECK: Final = 30.0
"""Seconds after which a kept file is looked at again."""

TEMPORARY_AGE: Final = 24 * 3600.0
"""Seconds after its last write when a temporary file's writer is taken for dead."""

TRASH_AGE: Final = 6 * 3600.0
"""Seconds that a removed blob stays on 3FS, where a file that is still open reads as zeros a few minutes after its last name is gone."""

PATIENCE_3FS: Final = 7.0
"""Seconds to look again for a missing blob on 3FS: another client's "no such file" lasts 5 s there."""


def open_url(url: str, *, create: bool = True) -> Store:
    """``file:///path`` with the options ``?patience=SECONDS`` and ``?keep-removed=SECONDS``."""
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    unknown = options.keys() - {"patience", "keep-removed"}
    if unknown or parts.netloc not in ("", "localhost"):
        raise UsageError(f"not a store: {url}", hint="file:///absolute/path, with ?patience=SECONDS and ?keep-removed=SECONDS if need be")
    try:
        patience, keep = (float(options[key][-1]) if key in options else None for key in ("patience", "keep-removed"))
    except ValueError as error:
        raise UsageError(f"not a number of seconds in {url}") from error
    return PosixStore(Path(unquote(parts.path)), create=create, patience=patience, keep_removed=keep)


def is_3fs(path: Path, table: Path = TABLE) -> bool:
    """Whether ``path`` (absolute, without symbolic links) is on a 3FS mount, by the mount table alone."""
    return file_system_of(path, table) == "fuse.hf3fs"


class PosixStore:
    """A directory as a store.

    ``patience``: seconds for which a blob that somebody says exists is looked for again before it is NotFound (None: 7 on 3FS, else 0).
    ``keep_removed``: seconds for which removed blobs stay in ``trash/`` (None: 6 hours on 3FS, else 0). ``create``: make the store if the directory
    is absent or empty. UsageError if it is neither a store nor empty.
    """

    def __init__(self, root: Path, *, create: bool = True, patience: float | None = None, keep_removed: float | None = None) -> None:
        self.root = root.absolute()
        shared = is_3fs(root.resolve())
        options = {"patience": patience, "keep-removed": keep_removed}
        query = urlencode({key: f"{value:g}" for key, value in options.items() if value is not None})
        self.url = f"file://{quote(str(self.root))}" + (f"?{query}" if query else "")
        self.capabilities = Capabilities(connections=16 if shared else 4, read_size=(1 << 20) if shared else (64 << 10), local=True)
        self._patience = patience if patience is not None else (PATIENCE_3FS if shared else 0.0)
        self._keep_removed = keep_removed if keep_removed is not None else (TRASH_AGE if shared else 0.0)
        self._blobs = self.root / "blobs" / "sha256"
        self._refs = PosixRefs(self, self.root / "refs", max(self._patience, 1.0))
        self._descriptors = Descriptors[Digest](_OPEN_BLOBS, recheck=_RECHECK)
        self._durable: set[Path] = set()
        self._swept = False
        with self.mapped("open"):
            self._check_root(create)

    def __repr__(self) -> str:
        return f"PosixStore({str(self.root)!r})"

    def stat(self, digest: Digest) -> BlobInfo:
        """The size and age of a blob, or NotFound."""
        path = self._path(digest)
        with self.mapped(f"stat {digest}"):
            return self._info(digest, self._found(digest, path.lstat))

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``offset``."""
        check_range(offset, length)
        check_digest(digest)
        with self.mapped(f"read {digest}"):
            try:
                return self._read(digest, offset, length)
            except (EOFError, OSError):
                # A descriptor from before the blob was replaced or its file system mounted again, or a length that another client has not heard of yet.
                self._descriptors.drop(digest)
            try:
                return self._read(digest, offset, length)
            except EOFError as error:
                raise CorruptError(f"{digest} in {self.url}: {error}") from error

    def writer(self) -> BlobWriter:
        """Start a blob."""
        with self.mapped("start a blob"):
            if not self._swept:
                self._swept = True
                try:
                    self.housekeep()
                except PermissionError:
                    pass  # another user's leftovers are that user's
            return _PosixWriter(self)

    def touch(self, digest: Digest) -> BlobInfo:
        """Make ``modified`` now, or NotFound."""
        path = self._path(digest)
        with self.mapped(f"touch {digest}"):
            try:
                self._found(digest, lambda: os.utime(path))
            except PermissionError:
                self._own(digest)
            return self._info(digest, self._found(digest, path.lstat))

    def suspect(self, digest: Digest) -> None:
        """Open the blob's file anew at the next read: on 3FS an old descriptor of a replaced file reads as zeros."""
        self._descriptors.drop(check_digest(digest))

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        """Remove a blob unless it was touched since ``older_than``: it is renamed away, looked at again, and put back if somebody touched it."""
        path = self._path(digest)
        with self.mapped(f"delete {digest}"):
            try:
                if older_than is not None and path.stat().st_mtime >= older_than:
                    return False
                kept = self._discard(path, older_than)
            except FileNotFoundError:
                self._check_root(False)
                kept = False
        self._descriptors.drop(digest)
        return not kept

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose digest begins with ``prefix``."""
        with self.mapped("list"):
            self._check_root(False)
            wanted = prefix.removeprefix("sha256:") if len(prefix) > 7 else ""
            if not f"sha256:{wanted}".startswith(prefix):
                return
            for shard in _shards(self._blobs):
                if shard.name.startswith(wanted[:2]):
                    for path, found in _files(shard, _HEX):
                        if path.name.startswith(wanted):
                            yield _info(f"sha256:{path.name}", found)

    def get_ref(self, name: str) -> Ref:
        """The ref ``name:tag``, or NotFound."""
        return self._refs.get(name)

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        """Change a ref from ``expected`` to ``new``, or Conflict."""
        self._refs.set(name, new, expected)

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        """Every ref whose ``name:tag`` begins with ``prefix``, sorted."""
        return self._refs.list(prefix)

    def close(self) -> None:
        """Close the files that are kept open."""
        self._descriptors.close()

    def local_path(self, digest: Digest) -> Path:
        """The file that is the blob, or NotFound."""
        self.stat(digest)
        return self._path(digest)

    def open_fd(self, digest: Digest) -> int:
        """A descriptor open for reading, which the caller closes, or NotFound. Read it by offset: its position is shared."""
        check_digest(digest)
        with self.mapped(f"open {digest}"):
            file = self._file(digest)
            return os.dup(file.fd)

    def housekeep(self) -> None:
        """Remove temporary files of dead writers, settle what a killed ``delete`` left in the trash, and empty it of what is old."""
        now = time.time_ns()
        for path, found in _files(self.root / "tmp"):
            if now - found.st_mtime_ns > TEMPORARY_AGE * 1e9:
                path.unlink(missing_ok=True)
        for shard in _shards(self.root / "trash"):
            for path, _ in _files(shard, _TRASHED):
                self._settle(path, now)

    @contextmanager
    def mapped(self, what: str) -> Iterator[None]:
        """Errors of the operating system become this package's."""
        try:
            yield
        except OSError as error:
            raise map_os_error(error, f"{self.url}: {what}") from error

    def temporary(self) -> Path:
        """A name for a new file that nobody else has."""
        return self.root / "tmp" / os.urandom(16).hex()

    def require_mounted(self) -> None:
        """StoreError unless the store is there: a name that is missing below an unmounted directory says nothing."""
        self._check_root(False)

    def publish(self, temporary: Path, digest: Digest, size: int) -> BlobInfo:
        """Give a complete, durable file its blob name. One that has it already stays, unless its size is wrong (lost in a power failure)."""
        path = self._path(digest)
        make_directory(path.parent)
        if path.parent not in self._durable:
            fsync_directory(path.parent.parent)  # whoever made it may have died before doing so
            self._durable.add(path.parent)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            if not self._renew(path, size):
                temporary.rename(path)
                self._descriptors.drop(digest)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            temporary.rename(path)  # no hard links here; the name stands for the bytes, so replacing is as good
        temporary.unlink(missing_ok=True)
        fsync_directory(path.parent)
        return _info(digest, path.stat())

    def _renew(self, path: Path, size: int) -> bool:
        try:
            os.utime(path)
            return path.stat().st_size == size
        except (FileNotFoundError, PermissionError):
            return False  # gone, or another user's: the new file takes its place

    def _own(self, digest: Digest) -> None:
        """Put a copy in the place of another user's blob, whose time only that user can change. PermissionError where this one must not write at all."""
        file, at = self._file(digest), 0
        with self.writer() as writer:
            while data := os.pread(file.fd, _BUFFER, at):
                writer.write(data)
                at += len(data)
            writer.commit(digest)

    def _check_root(self, create: bool) -> None:
        try:
            (self.root / MARKER).stat()
            return
        except (FileNotFoundError, NotADirectoryError):
            if not create:
                hint = "is the file system mounted? is the path right?"
                raise StoreError(f"{self.url} is not a store (there is no {MARKER})", hint=hint) from None
        make_directory(self.root)
        if any(path.name not in _OURS and MARKER not in path.name for path in self.root.iterdir()) and not (self.root / MARKER).exists():
            raise UsageError(f"{self.root} is neither a store nor an empty directory", hint="name an empty or a new directory")
        for name in ("blobs/sha256", "refs", "tmp", "trash"):
            make_directory(self.root / name)
        write_atomic(self.root / MARKER, _CONTENT)

    def _found(self, digest: Digest, call: Callable[[], _T]) -> _T:
        """``call``, which works on the blob's file. Once more if the blob was in the trash by mistake, NotFound if it is gone."""
        try:
            return call()
        except FileNotFoundError:
            self._check_root(False)
            if not self._rescue(digest):
                raise NotFound(f"no blob {digest} in {self.url}") from None
        return call()

    def _path(self, digest: Digest) -> Path:
        name = check_digest(digest)[7:]
        return self._blobs / name[:2] / name

    def _file(self, digest: Digest) -> OpenFile:
        return self._descriptors.take(digest, lambda: self._open(digest))

    def _open(self, digest: Digest) -> int:
        path = self._path(digest)
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._found(digest, lambda: self._open_file(digest, path))
            except NotFound:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(min(0.25, self._patience / 8))

    def _open_file(self, digest: Digest, path: Path) -> int:
        """Open without waiting for anybody: a FIFO would wait for a writer, for good. Only a regular file is a blob."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise self._not_a_blob(digest, path.lstat()) from error
            if error.errno == errno.ENOTDIR:
                message = f"{digest} cannot be in {self.url}: {path.parent} is no directory"
                raise CorruptError(message, hint="remove what is there and store the blob again", final=True) from error
            if error.errno in (errno.EACCES, errno.EPERM):
                message = f"the file of {digest} in {self.url} cannot be read: {error.strerror}"
                raise CorruptError(message, hint=f"give this user the right to read {path}", final=True) from error
            raise
        try:
            self._info(digest, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _info(self, digest: Digest, found: os.stat_result) -> BlobInfo:
        if not stat.S_ISREG(found.st_mode):
            raise self._not_a_blob(digest, found)
        return _info(digest, found)

    def _not_a_blob(self, digest: Digest, found: os.stat_result) -> CorruptError:
        path = self._path(digest)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "file that changes its kind")
        return CorruptError(f"{digest} in {self.url} is a {kind}, not a blob", hint=f"remove {path} and store the blob again", final=True)

    def _read(self, digest: Digest, offset: int, length: int) -> bytes:
        file = self._file(digest)
        return pread_exact(file.fd, length, offset)

    def _discard(self, path: Path, older_than: float | None) -> bool:
        """Rename into the trash, then settle. Whether the blob was put back."""
        cutoff = _NEVER if older_than is None else int(older_than * 1e9)
        trashed = self.root / "trash" / path.name[:2] / f"{path.name}.{cutoff}.{time.time_ns()}"
        make_directory(trashed.parent)
        path.rename(trashed)
        return self._settle(trashed, time.time_ns())

    def _rescue(self, digest: Digest) -> bool:
        """Put a blob back that was touched while somebody deleted it: who deletes may be killed, or see the touch late (3FS caches attributes for 30 s)."""
        name = digest[7:]
        entries = [path for path, _ in _files(self.root / "trash" / name[:2], _TRASHED) if path.name.startswith(name)]
        return any(self._settle(path, 0) for path in entries)

    def _settle(self, trashed: Path, now: int) -> bool:
        """Put a trashed blob back if it was touched after the cutoff in its name, else remove it once it has been there long enough. Whether put back."""
        name, cutoff, when = trashed.name.split(".")
        try:
            if trashed.stat().st_mtime_ns >= int(cutoff):
                try:
                    self._path(f"sha256:{name}").hardlink_to(trashed)
                except FileExistsError:
                    pass  # stored again meanwhile
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    trashed.rename(self._path(f"sha256:{name}"))
                trashed.unlink(missing_ok=True)
                return True
            if now - int(when) >= self._keep_removed * 1e9:
                trashed.unlink()
        except FileNotFoundError:
            pass  # another process settles the same
        return False


class _PosixWriter:
    def __init__(self, store: PosixStore) -> None:
        self._store = store
        self._path = store.temporary()
        self._hash = hashlib.sha256()
        self._size = 0
        self._stream = _create(self._path)

    def write(self, data: Buffer) -> int:
        with self._store.mapped("write a blob"):
            if self._stream.closed:
                raise StoreError("write after the end of a blob")
            self._stream.write(data)
        self._hash.update(data)
        count = memoryview(data).nbytes
        self._size += count
        return count

    def commit(self, expected: Digest | None = None) -> BlobInfo:
        digest = "sha256:" + self._hash.hexdigest()
        if self._stream.closed:
            raise StoreError("a blob is committed once")
        if expected is not None and digest != expected:
            raise CorruptError(f"wrote {digest}, expected {expected}")
        with self._store.mapped(f"publish {digest}"):
            self._stream.flush()
            found = os.fstat(self._stream.fileno())
            os.fchmod(self._stream.fileno(), found.st_mode & _READABLE)  # whoever the umask lets read; nobody writes to a blob
            os.fsync(self._stream.fileno())
            size = found.st_size
            self._stream.close()  # a write error may show as late as here
            if size != self._size:
                raise StoreError(f"{self._store.url}: wrote {self._size} bytes of {digest}, the file has {size}")
            return self._store.publish(self._path, digest, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stream.close()
        except OSError:
            pass  # the disk is full, or the mount gone: the blob is given up either way
        finally:
            with self._store.mapped("remove a temporary file"):
                self._path.unlink(missing_ok=True)


def _create(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb", buffering=_BUFFER)


def _info(digest: Digest, found: os.stat_result) -> BlobInfo:
    return BlobInfo(digest, found.st_size, found.st_mtime)


def _shards(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _SHARD.match(path.name)]


def _files(directory: Path, pattern: re.Pattern[str] | None = None) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files of a directory whose names match. One that goes meanwhile is left out."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            if (pattern is None or pattern.match(entry.name)) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
