"""Starting the daemon: ``python -m dsec_layers.fuse.daemon --cache DIR``.

Checks the host, takes the cache's lock, makes what must outlive every worker (lock, fanotify group, shared memory, control socket) and then becomes the
keeper, in the background unless told otherwise. Returns, or tells systemd, when the daemon serves. Standard error says why if it does not.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from dsec_layers.cache.directory import CacheDirectory, lock
from dsec_layers.errors import Conflict, DsecError, HostError
from dsec_layers.fsio import map_os_error
from dsec_layers.fuse.client import control
from dsec_layers.fuse.client.options import LOG, Options
from dsec_layers.fuse.daemon.requirements import check_fanotify, check_root, watch
from dsec_layers.fuse.events.adopt import adopt_group
from dsec_layers.fuse.events.keeper import Hand, become_keeper
from dsec_layers.fuse.mounts.aftermath import look_for_orphans, poisoned_folders, put_aside
from dsec_layers.linux.process import in_background, set_descriptor_limit

__all__ = ["main"]

_START: Final = 30.0
"""Seconds a daemon may take to start."""
_TAIL: Final = 2000


def main(argv: list[str] | None = None) -> int:
    """Start the daemon of a cache, or find that it runs already."""
    arguments = _parse(argv)
    try:
        check_root()
        kept = adopt_group(arguments.cache.absolute()) if arguments.foreground else None
        return _start(arguments.cache.absolute(), _options(arguments), kept, foreground=arguments.foreground)
    except OSError as error:
        return _fail(map_os_error(error, f"cache {arguments.cache}"))
    except DsecError as error:
        return _fail(error)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="dsec_layers.fuse.daemon", description="Serve lazily mounted layers from a cache directory.")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="the cache directory")
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground (for systemd)")
    parser.add_argument("--linger", type=float, default=defaults.linger, metavar="S", help="keep unused layers mounted for S seconds")
    parser.add_argument("--idle", type=float, default=defaults.idle, metavar="S", help="end after S seconds without mounts; 0: never")
    parser.add_argument("--fetches", type=int, default=defaults.fetches, metavar="N", help="fetch at most N segments at once")
    parser.add_argument("--deadline", type=float, default=defaults.deadline, metavar="S", help="readers get an error after S seconds")
    parser.add_argument(
        "--limit", type=int, default=defaults.limit, metavar="BYTES", help="keep unused segments below so many bytes; 0: no limit"
    )
    parser.add_argument(
        "--drop", type=float, default=defaults.drop, metavar="S", help="give back doubly cached pages of a fetched segment after S seconds"
    )
    parser.add_argument("--directio", action="store_true", help="mount with directio: nothing is cached twice, small reads cost more")
    parser.add_argument("--holes", action="store_true", help="absent segments are holes, as on kernels that need it")
    return parser.parse_args(argv)


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        linger=arguments.linger,
        idle=arguments.idle,
        fetches=arguments.fetches,
        deadline=arguments.deadline,
        limit=arguments.limit,
        drop=arguments.drop,
        direct=arguments.directio,
        holes=arguments.holes,
    )


def _fail(error: DsecError) -> int:
    sys.stderr.write(f"{error.message}\n{error.hint or ''}\n")
    return error.exit_code


def _start(cache: Path, options: Options, kept: tuple[int, int] | None, *, foreground: bool) -> int:
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock_fd = _lock_unless_served(cache)
    if lock_fd is None:
        return 0
    if foreground:
        _become(cache, options, lock_fd, -1, kept)

    def serve(ready: int) -> int:
        try:
            _become(cache, options, lock_fd, ready)
        except DsecError as error:
            os.write(ready, f"{error.message}\n{error.hint or ''}\n".encode())
        except OSError as error:
            os.write(ready, f"{error}\n".encode())
        return 1

    ready = in_background(cache / LOG, serve)
    os.close(lock_fd)
    return _await_ready(ready, cache / LOG)


def _become(cache: Path, options: Options, lock_fd: int, ready: int, kept: tuple[int, int] | None = None) -> NoReturn:
    """Make what outlives the workers, or take it over (``kept``: group and shared memory), and execute the keeper."""
    set_descriptor_limit(65_536)
    directory = CacheDirectory(cache, lock_fd=lock_fd)
    listening = control.listen(cache)
    group, hand, unusable, aftermath = -1, -1, None, {}
    if kept is not None:
        group, hand = kept
    else:
        hand = Hand.create()
        orphans = look_for_orphans(cache)
        aftermath = {"orphans": orphans, "holes": put_aside(directory)} if orphans else {}
        try:
            check_fanotify(cache)
            group = watch([directory.absent, *poisoned_folders(directory)])
        except HostError as error:
            unusable = {"message": error.message, "hint": error.hint}
    spec: dict[str, Any] = {
        "cache": str(cache),
        "log": str(cache / LOG),
        "group": group,
        "hand": hand,
        "listen": listening.detach(),
        "lock": lock_fd,
        "ready": ready,
        "path": sys.path,
        "worker": "dsec_layers.fuse.daemon.worker",
        "options": {name: getattr(options, name) for name in Options.__slots__},
        "unusable": unusable,
        "aftermath": aftermath,
    }
    become_keeper(spec)
    raise AssertionError("exec returned")


def _await_ready(ready: int, log: Path) -> int:
    """Wait until the daemon says that it serves; if it ends instead, say why."""
    said = b""
    while select.select([ready], [], [], _START)[0]:
        part = os.read(ready, 4096)
        if not part:
            break
        said += part
        if said == b"ready\n":
            return 0
    message = said.decode(errors="replace").strip() or f"the daemon did not start: {_last_words(log)}\nsee {log}"
    sys.stderr.write(f"{message}\n")
    return HostError.exit_code


def _last_words(log: Path) -> str:
    """The end of the last error in the log."""
    try:
        lines = log.read_text(errors="replace")[-_TAIL:].splitlines()
    except OSError:
        return "it left no log"
    errors = [line.partition(" ERROR ")[2] for line in lines if " ERROR " in line]
    return errors[-1] if errors else " ".join(lines[-1:])


def _lock_unless_served(cache: Path) -> int | None:
    """The cache's lock, or None if a daemon that answers has it. One that is just ending is waited for."""
    due = time.monotonic() + _START
    while True:
        try:
            return lock(cache)
        except Conflict as error:
            if _answers(cache, due - time.monotonic()):
                return None
            if time.monotonic() > due:
                raise Conflict(f"{error.message}, which is no daemon", hint="wait for it to end, or use another cache") from None
        time.sleep(0.01)


def _answers(cache: Path, seconds: float) -> bool:
    channel = control.connect(cache, max(seconds, 0.1))
    if channel is None:
        return False
    with channel:
        try:
            received = control.receive(channel)
        except (OSError, ValueError):
            return False
    if received is not None:
        control.close_all(received[1])
    return received is not None


if __name__ == "__main__":
    sys.exit(main())
