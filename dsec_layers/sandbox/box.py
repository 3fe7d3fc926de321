"""A sandbox from its first mount to its last trace.

Who holds what::

    caller's thread      the directory STATE/sandboxes/ID and its lock, the streams, signals, the clean-up
    sandbox thread       a mount namespace of its own: the overlay, and beside it no trace of the sandbox in the host's mount table
      └ runtime          first process of a process namespace; dies with the thread, and the kernel ends everything below it
          └ command      its own pid, mount, ipc, uts, cgroup (and network) namespaces

So if this process is killed, the kernel ends the sandbox and drops its mounts at once; its directory and its emptied control groups go with the next run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dsec_layers import proc
from dsec_layers.errors import HostError, ToolError, UsageError
from dsec_layers.linux.mount import mount_overlay, umount
from dsec_layers.progress import SILENT, Progress
from dsec_layers.sandbox.account import find_identity
from dsec_layers.sandbox.cgroups import OomWatch, group_path, read_cgroup_mounts
from dsec_layers.sandbox.config import Mountpoint, oci_config
from dsec_layers.sandbox.hostnet import host_environment, lend
from dsec_layers.sandbox.mountpoints import Wanted, copy_attributes, plan, write_helper
from dsec_layers.sandbox.runtime import Failure, Runtime, choose_runtime, read_failure
from dsec_layers.sandbox.signals import deliver, first_process, forwarding
from dsec_layers.sandbox.spec import Bind, RunSpec
from dsec_layers.sandbox.state import make_place, remove_place, remove_tree, sweep
from dsec_layers.sandbox.stdio import Streams
from dsec_layers.sandbox.syscalls import private_namespaces
from dsec_layers.sandbox.terminal import resize_inside, restore, save, window_size

__all__ = ["Outcome", "Sandbox", "run"]

_SYSTEM: Final = tuple(Wanted(path, directory=True) for path in ("/proc", "/sys", "/dev"))

MAX_TIMEOUT: Final = 1 << 25
"""Seconds, more than a year."""
_STOP_WAIT: Final = 10.0
_LATE: Final = 124

_OVERLAY: Final[dict[str, str | None]] = {
    # The writable layer is to be a plain difference that any overlay understands: no redirects, no metadata-only copies, no index of hard links.
    **dict.fromkeys(("redirect_dir", "metacopy", "index", "nfs_export"), "off"),
    # What a sandbox writes need not survive a crash of the host: fsync inside, and the sync at unmount, cost nothing.
    "volatile": None,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. ``code``: its exit code, or 128 + n if signal n ended it, or 126 or 127 if it could not be started (``reason`` says why).

    ``oom``: the kernel killed a process because the memory limit was reached.
    """

    code: int
    oom: bool = False
    reason: str = ""


def run(
    spec: RunSpec,
    lowerdirs: Sequence[Path],
    *,
    state: Path,
    upper: Path | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: int = 0,
    stdout: int = 1,
    stderr: int = 2,
    timeout: float | None = None,
    progress: Progress = SILENT,
) -> int:
    """Run one command to its end, pass this process's signals on to it, and return its exit code (see Outcome). Parameters: see Sandbox.

    SIGTERM, which asks for the end, becomes the spec's stop signal. ``timeout``: after so many seconds the command gets its stop signal, ten seconds later everything is killed; the code is then 124, as timeout(1) has it.
    Raises DsecError for everything that is the sandbox's failure and not the command's; docker's 125.
    """
    if timeout is not None and not 0 < timeout <= MAX_TIMEOUT:
        raise UsageError(f"a time limit of {timeout:g} s is not between 0 and {MAX_TIMEOUT} s")
    box = Sandbox(spec, lowerdirs, state=state, upper=upper, environ=environ, stdin=stdin, stdout=stdout, stderr=stderr)

    def forward(number: int) -> None:
        box.signal(spec.stop_signal if number == signal.SIGTERM else number)

    with box, forwarding(forward, box.kill, box.resize if spec.tty else None):
        outcome, late = _wait(box, spec.stop_signal, timeout)
    if outcome.oom:
        what = "the command was killed" if outcome.code == 128 + signal.SIGKILL else "a process was killed"
        progress.warning(f"{what} because the memory limit of {(spec.memory or 0) >> 20} MiB was reached; --memory SIZE sets another")
    if late:
        progress.warning(f"the command was ended: its {timeout:g} s were over")
    return _LATE if late else outcome.code


def _wait(box: Sandbox, stop_signal: int, timeout: float | None) -> tuple[Outcome, bool]:
    """How the command ended, and whether its time was up."""
    try:
        return box.wait(timeout), False
    except TimeoutError:
        box.signal(stop_signal)
    try:
        return box.wait(_STOP_WAIT), True
    except TimeoutError:
        box.kill()
    return box.wait(), True


class Sandbox:
    """One command running over ``lowerdirs`` (directories, topmost first) and a writable layer. A context: it runs until the context ends at the latest.

    ``state``: a directory on local disk for what lives as long as the sandbox. ``upper``: an empty directory on local disk that becomes the writable layer and
    is kept, in overlayfs form (whiteouts, opaque directories); None for one that is thrown away. ``environ``: the host's environment, from which a sandbox on
    the host's network gets its proxy and CA settings (None: this process's). ``stdin``, ``stdout``, ``stderr``: descriptors; stdin counts only if the spec is interactive.
    """

    def __init__(
        self,
        spec: RunSpec,
        lowerdirs: Sequence[Path],
        *,
        state: Path,
        upper: Path | None = None,
        environ: Mapping[str, str] | None = None,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
        runtime: Runtime | None = None,
    ) -> None:
        if not lowerdirs:
            raise UsageError("a sandbox needs at least one layer")
        if spec.tty and not os.isatty(stdin):
            raise UsageError("a terminal is asked for, but standard input is none", hint="leave out -t, or run it from a terminal")
        if upper is not None and any(upper.iterdir()):
            raise UsageError(f"the writable layer {upper} is not empty")
        self._spec = spec
        self._lower = [path.absolute() for path in lowerdirs]
        self._state = state.absolute()
        self._upper = upper
        self._environ = host_environment() if environ is None else dict(environ)
        self._stdio = (stdin, stdout, stderr)
        self._runtime = runtime
        self._cgroups = read_cgroup_mounts(Path("/proc/self/mounts").read_text())
        # Reentrant: a signal handler may interrupt its own thread inside it.
        self._lock = threading.RLock()
        self._pidfd = -1
        # The streams' threads are begun by the caller's thread: one whose children are to be in another process namespace can start no thread.
        self._spawned = threading.Event()
        self._process: proc.Process | None = None
        self._thread: threading.Thread | None = None
        self._watch: OomWatch | None = None
        self._error: BaseException | None = None
        self._ended_by = 0
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise HostError("running a sandbox needs root")
        sweep(self._state, self._cgroups.end)
        runtime = self._runtime or choose_runtime(self._state, self._cgroups, lambda candidate: _try(candidate, self._state))
        with ExitStack() as stack:
            self._place = make_place(self._state, self._spec.name)
            stack.callback(remove_place, self._place)
            stack.callback(self._cgroups.end, self._place.identifier)
            self._make_layer(stack)
            self._streams = self._open_streams()
            stack.callback(self._streams.finish)
            if self._spec.memory is not None:
                self._watch = OomWatch(self._cgroups, self._place.identifier, self._spec.memory)
                stack.callback(self._watch.close)
            if self._spec.tty:
                stack.callback(restore, self._stdio[0], save(self._stdio[0]))
            self._thread = threading.Thread(target=self._live, args=(runtime,), name=f"sandbox-{self._place.identifier}")
            self._thread.start()
            stack.callback(self._stop)
            self._spawned.wait()
            self._streams.started()
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._cleanup.close()

    @property
    def upper(self) -> Path:
        """The writable layer, in overlayfs form. When the command has ended it may be moved away, within its file system."""
        return self._layer

    @property
    def identifier(self) -> str:
        """The sandbox's name: of its directory, its control groups and its container."""
        return self._place.identifier

    def wait(self, timeout: float | None = None) -> Outcome:
        """How the command ended, as soon as it has. Raises TimeoutError after ``timeout`` seconds (it runs on), and DsecError if the sandbox failed."""
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the sandbox still runs after {timeout:g} s")
        self._streams.finish()
        if self._error is not None:
            raise self._error
        code = self._exit_code()
        failure = None if self._ended_by else read_failure(self._place.path / "log", code)
        if failure is not None and failure.code == 125:
            raise ToolError(f"cannot start the sandbox: {failure.message}")
        return self._outcome(code, failure)

    def signal(self, number: int) -> None:
        """Send the command a signal. One that it neither handles nor ignores ends it, as it would end any process outside."""
        if number == signal.SIGKILL or not deliver(self._cgroups.pids_of(self._place.identifier), number):
            self._end(number)

    def resize(self) -> None:
        """Tell the sandbox's terminal that the caller's has changed its size."""
        first = first_process(self._cgroups.pids_of(self._place.identifier))
        if first is not None:
            resize_inside(first, window_size(self._stdio[0]))

    def kill(self) -> None:
        """End everything in the sandbox at once."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        with self._lock:
            if self._error is None and not self._ended_by and (self._process is None or self._process.returncode is None):
                self._ended_by = number
            # The runtime is the first process of its namespace: with it the kernel kills all others.
            if self._pidfd >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _stop(self) -> None:
        self.kill()
        if self._thread is not None:
            self._thread.join()

    def _exit_code(self) -> int:
        if self._ended_by:
            return 128 + self._ended_by
        assert self._process is not None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def _outcome(self, code: int, failure: Failure | None) -> Outcome:
        oom = self._watch is not None and self._watch.happened()
        return Outcome(code, oom) if failure is None else Outcome(failure.code, oom, failure.message)

    def _make_layer(self, stack: ExitStack) -> None:
        """The writable layer's directory and the one overlayfs works in, which must be on the same file system."""
        self._layer = self._upper or self._place.path / "upper"
        self._work = self._layer.with_name(f".{self._layer.name}.work")
        self._layer.mkdir(exist_ok=True)
        stack.callback(remove_tree, self._work)
        # The root directory of an overlay is its upper directory: without this the sandbox's / would be root's own.
        copy_attributes(self._lower[0], self._layer)

    def _open_streams(self) -> Streams:
        stdin, stdout, stderr = self._stdio
        return Streams(stdin if self._spec.interactive or self._spec.tty else None, stdout, stderr, relay=not self._spec.tty)

    def _live(self, runtime: Runtime) -> None:
        """The sandbox thread. What it does to itself is not undone, so it must never be one of somebody's pool."""
        try:
            with private_namespaces():
                if runtime.hide_unified and self._cgroups.hybrid is not None:
                    umount(self._cgroups.hybrid, lazy=True)
                bundle = self._prepare(self._place.path / "merged")
                self._execute(
                    runtime.command(self._place.identifier, root=self._place.path / "runtime", bundle=bundle, log=self._place.path / "log")
                )
        except BaseException as error:  # noqa: BLE001 - raised again by wait(), in the caller's thread
            self._error = error
        finally:
            self._spawned.set()

    def _execute(self, command: list[str]) -> None:
        streams = self._streams
        with ExitStack() as stack:
            with self._lock:
                if self._ended_by:
                    return
                process = stack.enter_context(
                    proc.spawn(command, stdin=streams.stdin, stdout=streams.stdout, stderr=streams.stderr, new_session=True)
                )
                self._process, self._pidfd = process, os.pidfd_open(process.pid)
            self._spawned.set()
            process.wait()
            with self._lock:
                os.close(self._pidfd)
                self._pidfd = -1

    def _prepare(self, merged: Path) -> Path:
        """Mount the environment, and write the bundle that describes the sandbox; returns its directory."""
        bundle, empty, helper = (self._place.path / name for name in ("bundle", "empty", "mountpoints"))
        for path in (merged, bundle, empty, helper):
            path.mkdir()
        loan = lend(bundle, self._spec.network, self._spec.hostname, self._environ)
        wanted = [*_SYSTEM, *loan.wanted, *(Wanted(bind.target, bind.source.is_dir()) for bind in self._spec.binds)]
        # First without the writable layer, to see what the environment is like. (Such an overlay needs at least two layers.)
        mount_overlay(merged, [empty, *self._lower])
        try:
            identity = find_identity(merged, self._spec.user)
            places = plan(merged, wanted)
            write_helper(merged, helper, places.missing)
        finally:
            # Lazily: a process started meanwhile by another thread may hold a copy of our descriptors until it has executed.
            umount(merged, lazy=True)
        self._mount(merged, [helper, *self._lower] if places.missing else self._lower)
        mounts = [*loan.binds, *(Mountpoint(str(bind.source), bind.target, bind.read_only) for bind in self._spec.binds)]
        config = oci_config(
            self._spec,
            rootfs=str(merged),
            cgroup=group_path(self._place.identifier),
            machine=os.uname().machine,
            identity=identity,
            binds=[replace(mount, target=places.resolved[mount.target]) for mount in mounts],
            host_env={**loan.env, **({"TERM": self._environ["TERM"]} if self._spec.tty and "TERM" in self._environ else {})},
            swap=self._cgroups.limits_swap(),
            open_files=_open_files(),
            console=window_size(self._stdio[0]) if self._spec.tty else None,
        )
        (bundle / "config.json").write_text(json.dumps(config))
        return bundle

    def _mount(self, merged: Path, lower: Sequence[Path]) -> None:
        self._work.mkdir()
        try:
            mount_overlay(merged, lower, upper=self._layer, work=self._work, options=_OVERLAY)
        except HostError as error:
            raise HostError(
                error.message,
                hint=error.hint or "the state directory must be on a local file system such as ext4, xfs or tmpfs, and not on an overlay",
            ) from error


def _try(candidate: Runtime, state: Path) -> None:
    """Run the host's own ``true`` in a sandbox."""
    shared = [Path("/") / name for name in ("bin", "sbin", "usr", "lib", "lib32", "lib64", "libx32")]
    with tempfile.TemporaryDirectory(dir=state, prefix="probe-") as name, open(os.devnull, "r+b") as null:
        lower = Path(name)
        binds = []
        for path in shared:
            if path.is_symlink():
                (lower / path.name).symlink_to(path.readlink())
            elif path.is_dir():
                binds.append(Bind(path, str(path)))
        spec = RunSpec(argv=("/bin/true",), binds=tuple(binds))
        quiet = null.fileno()
        with Sandbox(spec, [lower], state=state, stdout=quiet, stderr=quiet, runtime=candidate) as box:
            outcome = box.wait()
    if outcome.code != 0:
        raise ToolError(outcome.reason or f"a trial run ended with exit code {outcome.code}")


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return int(Path("/proc/sys/fs/nr_open").read_text()) if hard == resource.RLIM_INFINITY else hard
