"""Run by test_store_crash.py as a program of one thread: kill -9 at every file system call of a store operation, one after the other.

For each operation and each number n a child is forked which kills itself just before, or just after, its n-th call that changes something. Then the parent looks at
what is there as the next process would, and does the operation again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import NotFound
from dsec_layers.store.base import Store
from dsec_layers.store.posix import PosixStore
from dsec_layers.store.transfer import put_bytes

OLD = b"old" * 5000
NEW = b"new" * 500_000
OLD_DIGEST, NEW_DIGEST = sha256_digest(OLD), sha256_digest(NEW)
CALLS = ("open", "write", "fsync", "link", "unlink", "rename", "mkdir", "utime", "close")


def open_(root: Path) -> None:
    """Make a store."""
    PosixStore(root)


def put(root: Path) -> None:
    """Store a blob."""
    put_bytes(PosixStore(root), NEW)


def move(root: Path) -> None:
    """Move a ref."""
    PosixStore(root).set_ref("a/b:1", NEW_DIGEST, expected=OLD_DIGEST)


def make(root: Path) -> None:
    """Make a ref."""
    PosixStore(root).set_ref("c:1", NEW_DIGEST, expected=None)


def delete(root: Path) -> None:
    """Delete a blob by age."""
    PosixStore(root).delete(OLD_DIGEST, older_than=time.time() + 60)


OPERATIONS: dict[str, Callable[[Path], None]] = {"open": open_, "put": put, "move": move, "make": make, "delete": delete}


def prepare(root: Path, operation: str) -> None:
    """The state before the operation."""
    shutil.rmtree(root, ignore_errors=True)
    if operation != "open":
        store = PosixStore(root)
        put_bytes(store, OLD)
        store.set_ref("a/b:1", OLD_DIGEST, expected=None)


def value(store: Store, name: str) -> str | None:
    """What a ref is."""
    try:
        return store.get_ref(name).digest
    except NotFound:
        return None


def check(root: Path, operation: str) -> None:
    """After a crash: the state before, or the state after; and the operation can be done again."""
    store = PosixStore(root)
    for info in store.list():
        assert sha256_digest(store.read(info.digest, 0, info.size)) == info.digest
    have = {info.digest for info in store.list()}
    if operation != "open":
        assert have | {NEW_DIGEST} == {OLD_DIGEST, NEW_DIGEST} or operation == "delete", have
        assert value(store, "a/b:1") in ((OLD_DIGEST, NEW_DIGEST) if operation == "move" else (OLD_DIGEST,))
        assert value(store, "c:1") in ((None, NEW_DIGEST) if operation == "make" else (None,))
    if (operation, value(store, "a/b:1")) != ("move", NEW_DIGEST) and (operation, value(store, "c:1")) != ("make", NEW_DIGEST):
        OPERATIONS[operation](root)
    have = {info.digest for info in store.list()}
    assert (operation == "put") == (NEW_DIGEST in have)
    assert (operation in ("delete", "open")) == (OLD_DIGEST not in have)
    leftovers = list((root / "tmp").iterdir())
    assert len(leftovers) <= 1, leftovers
    for path in leftovers:
        os.utime(path, (0, 0))
    PosixStore(root).housekeep()
    assert not list((root / "tmp").iterdir())
    assert not [path for path in (root / "trash").rglob("*") if path.is_file()]


def crash(root: Path, operation: str, at: int, after: bool) -> bool:
    """Do the operation in a child that kills itself at its call number ``at``. Whether it got that far."""
    child = os.fork()
    if not child:
        left = at

        def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return call(*arguments, **options)
                finally:
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            return run

        for name in CALLS:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            OPERATIONS[operation](root)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), f"{operation} failed"
    return os.WIFSIGNALED(status)


def no_fsync(fd: object) -> None:
    """Nothing: a killed process loses nothing that it wrote, unlike a host without power."""


def main(root: Path) -> None:
    """Every operation, every call, before and after."""
    os.fsync = no_fsync
    for operation in OPERATIONS:
        points, reached = 0, True
        while reached:
            points += 1
            for after in (False, True):
                prepare(root, operation)
                reached = crash(root, operation, points, after)
                check(root, operation)
        print(operation, points - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
