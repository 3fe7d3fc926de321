"""The keeper: holds the fanotify group, starts the worker, starts it again when it dies. Nothing else, so that it has no reason to die itself.

When the last descriptor of a fanotify group is closed the kernel lets every waiting reader go on, without data. So two processes share *one descriptor table*
(clone(2) with CLONE_FILES, no exec in between): the group, and the descriptors of the events in hand, stay open when either of them dies. The numbers of
the events in hand are in shared memory (``Hand``), written by the kernel itself before an event can be answered, so that there is no moment in which one is lost.

    worker dies      the keeper closes what the worker had open except the events in hand, and starts another one, which goes on with them
    keeper dies      the worker notices and executes this file: it becomes the keeper, with the table as it is, and starts a worker
    both die         the group is gone unless systemd holds it (its descriptor store); fuse/daemon/__main__.py says so at the next start

Standard library only; run by path, not as a module, so that nothing of the package is loaded in this process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["EXIT_PARKED", "EXIT_STOPPED", "Hand", "become_keeper", "inherited_descriptors", "notify"]

EXIT_STOPPED = 0
"""The worker is done and nothing is mounted: the keeper ends as well."""
EXIT_PARKED = 3
"""The worker was told to stop but mounts remain: the keeper goes on holding the group, and starts a worker at the next connection."""

SLOTS = 65_536
EVENT_BUFFER = 65_536
_STATES = EVENT_BUFFER + 4096
_DIGESTS = _STATES + SLOTS
_SIZE = _DIGESTS + 32 * SLOTS
_READY = EVENT_BUFFER
_METADATA = struct.Struct("=IBBHQii")

_SYS_CLONE3 = 435
_CLONE_FILES, _CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x400, 0x0100_0000, 0x0020_0000
_PR_SET_NAME, _PR_GET_TID_ADDRESS = 15, 40

_FIRST_PAUSE, _LONGEST_PAUSE, _GOOD_RUN = 0.05, 5.0, 2.0


class Hand:
    """Shared memory: the buffer that events are read into, and which event descriptors are in hand, with the segment each is about.

    An event is in the buffer before the kernel accepts an answer to it; ``add`` is called for each event of the buffer before ``clear_buffer``.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _SIZE)
        self.buffer = memoryview(self._map)[:EVENT_BUFFER]

    @staticmethod
    def create() -> int:
        """New shared memory; returns its descriptor."""
        fd = os.memfd_create("dsec-hand")
        os.ftruncate(fd, _SIZE)
        return fd

    def add(self, number: int, digest: bytes = b"") -> None:
        """Event ``number`` is in hand; ``digest`` once it is known."""
        if digest:
            self._map[_DIGESTS + 32 * number : _DIGESTS + 32 * number + 32] = digest
        self._map[_STATES + number] = 2 if digest else 1

    def drop(self, number: int) -> None:
        """Event ``number`` was answered."""
        self._map[_STATES + number] = 0

    def clear_buffer(self, length: int = EVENT_BUFFER) -> None:
        """All events of the buffer, its first ``length`` bytes, are in the table.

        All of them are zeroed: if they stayed behind a zero in front, a shorter batch that is read over them would end in what is left of the longer one,
        and if its reader died before clearing it, the numbers in that would be taken for events. The front goes first, so that a clearing which is cut
        off leaves no batch; its rest goes when the next worker clears the whole buffer.
        """
        self._map[:4] = bytes(4)
        self._map[4:length] = bytes(max(0, length - 4))

    def numbers(self) -> dict[int, bytes]:
        """The events in hand, and those only read so far, with their digests (empty if unknown)."""
        states = self._map[_STATES : _STATES + SLOTS]
        found: dict[int, bytes] = {}
        for number, state in enumerate(states):
            if state:
                found[number] = self._map[_DIGESTS + 32 * number : _DIGESTS + 32 * number + 32] if state == 2 else b""
        at = 0
        while at + _METADATA.size <= EVENT_BUFFER:
            length, _, _, _, _, fd, _ = _METADATA.unpack_from(self._map, at)
            if length < _METADATA.size:
                break
            if 0 <= fd < SLOTS:
                found.setdefault(fd, b"")
            at += length
        return found

    @property
    def ready(self) -> bool:
        """Whether a worker was ever ready."""
        return self._map[_READY] == 1

    def set_ready(self) -> None:
        """A worker is ready."""
        self._map[_READY] = 1


def notify(text: str, fds: Sequence[int] = ()) -> bool:
    """Tell systemd something (sd_notify(3)); False if it did not start this."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            socket.send_fds(channel, [text.encode()], list(fds))
        except OSError:
            return False
    return True


def inherited_descriptors() -> dict[str, int]:
    """What systemd's descriptor store (or socket activation) hands over: name -> descriptor (sd_listen_fds_with_names(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    count = int(os.environ.get("LISTEN_FDS", "0"))
    return {name: 3 + at for at, name in enumerate(names[:count])}


def become_keeper(spec: dict[str, Any]) -> None:
    """Execute the keeper in this process. ``spec``: see ``main``. Does not return."""
    for name in ("group", "hand", "listen", "lock", "ready"):
        if spec[name] >= 0:
            os.set_inheritable(spec[name], True)
    os.execv(sys.executable, [sys.executable, "-P", os.path.abspath(__file__), json.dumps(spec)])  # noqa: PTH100 - no pathlib here, it costs memory


def main(spec: dict[str, Any]) -> int:
    """Hold the descriptors of ``spec`` and keep a worker alive until it says that it is done.

    ``group`` (-1: none), ``hand``, ``listen``, ``lock``, ``ready`` (-1 when told already): descriptors. ``log``: path. ``path``: sys.path. ``worker``: module.
    """
    _protect()
    hand = Hand(spec["hand"])
    keeper = _Keeper(spec, hand)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, keeper.forward)
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        code = keeper.run_worker()
        if code == EXIT_STOPPED:
            return 0
        if code == EXIT_PARKED:
            if notify("STATUS=stopped; the descriptor store holds the readers"):
                return 0
            keeper.log("stopped with mounts in place; readers of absent segments wait until the daemon is started again")
            keeper.stopping = False
            asked = select.poll()  # select() knows no descriptor above 1023
            asked.register(spec["listen"], select.POLLIN)
            asked.poll()
            continue
        if not hand.ready:
            keeper.log(f"the worker failed to start ({_describe(code)})")
            return 1
        if keeper.stopping:
            keeper.log(f"the worker ended while stopping ({_describe(code)}); it is started again, as readers may wait")
            keeper.stopping = False
        pause = _FIRST_PAUSE if time.monotonic() - began > _GOOD_RUN else min(2 * pause, _LONGEST_PAUSE)
        keeper.log(f"the worker died ({_describe(code)}); readers wait; starting another in {pause:.2f} s")
        time.sleep(pause)


class _Keeper:
    def __init__(self, spec: dict[str, Any], hand: Hand) -> None:
        self._spec = spec
        self._hand = hand
        self._worker = 0
        self.stopping = False

    def forward(self, number: int, _frame: object) -> None:
        """Signal handler: the worker decides how to end."""
        self.stopping = True
        if self._worker:
            try:
                os.kill(self._worker, signal.SIGTERM)
            except ProcessLookupError:
                pass

    def run_worker(self) -> int:
        """Start a worker, wait for its end, tidy the descriptor table; returns its exit code, minus the signal that ended it."""
        self._worker = _share_files(self._child)
        if self.stopping:  # the signal came before there was a worker to pass it on to
            self.forward(signal.SIGTERM, None)
        _, status = os.waitpid(self._worker, 0)
        self._worker = 0
        self._close_leftovers()
        self._spec["ready"] = -1
        return os.waitstatus_to_exitcode(status)

    def _child(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        sys.path[:] = self._spec["path"]
        code: int = importlib.import_module(self._spec["worker"]).main(self._spec)
        return code

    def _close_leftovers(self) -> None:
        keep = {0, 1, 2, *self._hand.numbers(), *(self._spec[name] for name in ("group", "hand", "listen", "lock"))}
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) not in keep:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the descriptor of this listing

    def log(self, message: str) -> None:
        """A line in the daemon's log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with open(self._spec["log"], "a") as stream:
                stream.write(f"{stamp} keeper[{os.getpid()}] WARNING {message}\n")
        except OSError:
            pass


def _share_files(function: Callable[[], int]) -> int:
    """fork(2), but with one descriptor table for both processes; the child runs ``function`` and exits with its result. Returns the child's pid."""
    libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: calls keep the interpreter's lock, as fork must
    flags = _CLONE_FILES
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0 and address.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID  # where the C library keeps the thread's id, as its own fork does
    arguments = struct.pack("=8Q", flags, 0, address.value or 0, 0, signal.SIGCHLD, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(_SYS_CLONE3, ctypes.c_char_p(arguments), ctypes.c_size_t(len(arguments)))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        if pid < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return pid
    ctypes.pythonapi.PyOS_AfterFork_Child()
    code = 1
    try:
        code = function()
    except BaseException as error:  # noqa: BLE001 - a child must never return into the parent's code
        sys.stderr.write(f"worker: {error!r}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)


def _protect() -> None:
    """Be the last process the kernel kills when memory is short, and be found under a name of its own."""
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("-1000")
    except OSError:
        pass
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"dsec-keeper", 0, 0, 0)


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
