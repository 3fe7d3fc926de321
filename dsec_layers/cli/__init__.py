"""The command line: one thin module a command. This module only knows their names, so that ``--help`` and completion stay fast."""

from __future__ import annotations

import errno
import importlib
import io
import os
import select
import signal
import sys
from types import FrameType

import click

from dsec_layers.cli.common import App, CommandLine, app_options
from dsec_layers.errors import DsecError, Interrupted, NoSpace, NotFound, UsageError

__all__ = ["COMMANDS", "cli", "main"]

COMMANDS = {
    "build": "Build a layer from a layer file.",
    "import": "Import a directory, tar, OCI image or Debian root as a layer.",
    "env": "Compose layers into environments.",
    "mount": "Mount a layer or environment lazily.",
    "umount": "Unmount what mount mounted.",
    "ps": "Show mounts and the daemon.",
    "run": "Run a command in an environment.",
    "ls": "List layers, environments and disks.",
    "inspect": "Show a layer, environment or blob.",
    "verify": "Check that stored bytes match their digests.",
    "diff": "Compare two layers or environments.",
    "dump": "Dump the bytes of an image or layer, field by field.",
    "export": "Write a layer or environment as tar, EROFS image or OCI layout.",
    "rm": "Remove a ref.",
    "gc": "Delete blobs that nothing refers to.",
    "push": "Copy a layer or environment to another store.",
    "pull": "Copy a layer or environment from another store.",
    "disk": "Make, serve, snapshot and branch writable disks.",
    "nbd": "Serve disks and images over NBD.",
    "cache": "Look at and clear the local cache.",
    "catalog": "Rebuild the chunk catalog.",
    "doctor": "Say what this host can do and what is missing.",
    "completion": "Print a shell completion script.",
}
"""Command name to the first line of its help; the module is ``dsec_layers.cli.<name>`` (``import_`` for import)."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would end with code 1 and no word, whichever pipe it was
            if not _output_is_gone():
                raise DsecError("the other end of a pipe or socket went away", hint="is the mount daemon still there? try again") from error
            # The reader of our output went away (head, less): that is no failure of ours. Keep the interpreter's exit from trying again.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            raise click.exceptions.Exit(128 + signal.SIGPIPE) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"dsec_layers.cli.{cmd_name + '_' if cmd_name == 'import' else cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib  # only a mistyped command pays for it

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if near:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@app_options
@click.version_option(package_name="dsec-layers", prog_name="dsec-layers")
def cli() -> None:
    """Build, store and lazily mount deduplicated EROFS layers for agent sandboxes.

    \b
    dsec-layers import rootfs.tar --kind base --name debian:12
    dsec-layers env create dev:1 --base debian:12
    dsec-layers run dev:1 -- /bin/sh -c 'cat /etc/os-release'
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit. The one place where errors become messages and exit codes."""
    _open_standard_streams()
    app = App()
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        code = _run(app, argv)
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
        app.close()
        signal.signal(signal.SIGINT, before)
    sys.exit(code)


def _run(app: App, argv: list[str] | None) -> int:
    try:
        result = cli.main(args=argv, prog_name="dsec-layers", standalone_mode=False, obj=app)
        return result if isinstance(result, int) else 0
    except DsecError as error:
        app.console.error(error)
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        app.console.as_json |= "--json" in (sys.argv[1:] if argv is None else argv)  # parsing may have failed before it got there
        if app.console.as_json:
            usage = UsageError(error.format_message(), hint="see --help")
            usage.exit_code = _usage_code(error)
            app.console.error(usage)
        else:
            error.show()
        return _usage_code(error)
    except (click.Abort, KeyboardInterrupt):
        app.console.error(Interrupted("interrupted"))
        return Interrupted.exit_code
    except OSError as error:
        return _os_error(app, error)
    except Exception as error:  # noqa: BLE001 - the last resort: one message and one exit code, whatever happened
        app.console.error(
            DsecError(f"internal error: {type(error).__name__}: {error}", hint="this is a bug; run again with -v for the traceback")
        )
        if app.console.verbosity > 0:
            app.console.traceback()
        return 1


def _open_standard_streams() -> None:
    """Give a process that was started without standard input, output or error /dev/null instead.

    The next file that is opened would get the free number, and be read or written for what is not there: a blob as a command's input, an index as its output.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(number, mode, closefd=False)  # noqa: SIM115 - they last as long as the process
        for number, mode, stream in ((0, "r", sys.stdin), (1, "w", sys.stdout), (2, "w", sys.stderr))
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that is no text must not end a command that worked


def _usage_code(error: click.ClickException) -> int:
    """The exit code of a mistake on the command line; a command that passes on another's exit code has one of its own."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    return context.command.usage_code if context and isinstance(context.command, CommandLine) else error.exit_code


def _output_is_gone() -> bool:
    """Whether nobody reads our standard output any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _os_error(app: App, error: OSError) -> int:
    where = f"{error.filename}: " if error.filename else ""
    kinds: dict[int | None, type[DsecError]] = {errno.ENOSPC: NoSpace, errno.EDQUOT: NoSpace, errno.ENOENT: NotFound}
    mapped = kinds.get(error.errno, DsecError)(f"{where}{error.strerror or error}")
    app.console.error(mapped)
    if app.console.verbosity > 0:
        app.console.traceback()
    return mapped.exit_code


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
