"""Captive mode: serve on a private socket for as long as one client command runs."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dsec_layers.fuse.nbd.exports import Export
from dsec_layers.fuse.nbd.server import Server
from dsec_layers.fuse.nbd.transmission import Limits
from dsec_layers.proc import INHERIT, clean_environment, spawn
from dsec_layers.progress import SILENT, Progress

__all__ = ["run_captive"]

_VARIABLE = re.compile(r"\$(?:(uri|unixsocket)\b|\{(uri|unixsocket)\})")


def run_captive(
    exports: Iterable[Export],
    command: Sequence[str],
    *,
    read_only: bool = False,
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> int:
    """Serve ``exports`` on a Unix socket in a private folder, run ``command``, stop, and return the command's exit code.

    ``$uri`` (of the first export) and ``$unixsocket`` are replaced in the command's arguments and are variables in its environment, which otherwise
    is ``env`` or a clean one. The command has the caller's standard input and output. One that a signal ended gives 128 and the signal's number, as in
    a shell. Raises ToolError when it cannot be started.
    """
    exports = list(exports)
    with tempfile.TemporaryDirectory(prefix="nbd-") as folder:
        path = Path(folder) / "socket"
        with Server(exports, unix=path, read_only=read_only, limits=limits, progress=progress) as server:
            values = {"uri": server.uri(exports[0].name), "unixsocket": str(path)}
            argv = [_VARIABLE.sub(lambda found: values[found[1] or found[2]], part) for part in command]
            environment = {**(clean_environment() if env is None else env), **values}
            with spawn(argv, stdin=INHERIT, stdout=INHERIT, stderr=INHERIT, env=environment) as process:
                code = process.wait()
    return code if code >= 0 else 128 - code
