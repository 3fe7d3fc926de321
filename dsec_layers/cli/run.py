"""``dsec-layers run``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dsec_layers.cli.common import REF, App, CommandLine, app_options, pass_app
from dsec_layers.errors import DsecError
from dsec_layers.fsio import map_os_error


@click.command(
    "run",
    cls=CommandLine,
    usage_code=125,
    example="dsec-layers run dev:1 -- python3 -m pytest\ndsec-layers run -it --network host --memory 2G dev:1 -- bash",
)
@click.argument("ref", type=REF)
@click.argument("argv", metavar="[--] [CMD...]", nargs=-1, type=click.UNPROCESSED)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input to the command.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.option("--memory", metavar="SIZE", help="Memory limit, such as 512M or 4G, 2G unless set; 0: none.")
@click.option("--cpus", type=click.FloatRange(0.01), metavar="N", help="Processor limit, such as 1.5.")
@click.option("--pids", type=click.IntRange(0), metavar="N", help="Limit of processes and threads, 1024 unless set; 0: none.")
@click.option(
    "--network",
    type=click.Choice(["none", "host"]),
    default="none",
    show_default=True,
    help="none: only loopback; host: the host's network.",
)
@click.option(
    "-e",
    "--env",
    "environment",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="An environment variable; without a value, the one it has here. May be given again.",
)
@click.option(
    "--env-file",
    "env_files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Variables, a NAME[=VALUE] a line; -e wins.",
)
@click.option(
    "--bind",
    "binds",
    multiple=True,
    metavar="SRC:DST[:ro]",
    help="Show a file or directory of this host inside; :ro for read-only. May be given again.",
)
@click.option(
    "--entrypoint", metavar="PROGRAM", help="The program to run with CMD as its arguments, instead of the image's; empty: CMD alone."
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    help="End the command after this time; the exit code is then 124.",
)
@click.option("--name", default="", help="The sandbox's name, and its host name unless given; only one of a name runs at a time.")
@click.option("-w", "--workdir", default="", metavar="DIR", help="The working directory; made if it is not there.")
@click.option("-u", "--user", default="", metavar="USER", help="uid, uid:gid or a name of the environment's /etc/passwd.")
@click.option("--hostname", default="", help="The host name inside.")
@app_options
@pass_app
def command(
    app: App,
    ref: str,
    argv: tuple[str, ...],
    interactive: bool,
    tty: bool,
    memory: str | None,
    cpus: float | None,
    pids: int | None,
    network: str,
    environment: tuple[str, ...],
    env_files: tuple[Path, ...],
    binds: tuple[str, ...],
    entrypoint: str | None,
    timeout: float | None,
    name: str,
    workdir: str,
    user: str,
    hostname: str,
) -> int:
    """Run CMD in a sandbox on the lazily mounted environment (or layer) REF.

    Without CMD the image's own runs; its entry point, user, variables, working directory and stop signal count as docker has them.

    The exit code is the command's own (128 + n when signal n ended it); 125 when the sandbox itself failed. What the command writes is gone afterwards.
    """
    from dsec_layers.api.mounts import run
    from dsec_layers.cli.values import parse_environment, parse_size, read_env_files

    try:
        env = read_env_files(env_files, os.environ) | parse_environment(environment, os.environ)
        limits = (app.settings.memory if memory is None else parse_size(memory), app.settings.pids if pids is None else pids)
        return run(
            app.session, ref, argv,
            interactive=interactive, tty=tty, memory=limits[0], cpus=cpus, pids=limits[1], network=network,
            env=env, environ=os.environ, workdir=workdir, user=user, hostname=hostname, binds=binds,
            entrypoint=None if entrypoint is None else list(filter(None, [entrypoint])), timeout=timeout, name=name,
        ).code  # fmt: skip
    except (DsecError, OSError) as caught:
        error = caught if isinstance(caught, DsecError) else map_os_error(caught, "running a sandbox")
        error.exit_code = 125
        raise error from caught
