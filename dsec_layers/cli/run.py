"""``dsec-layers run``."""

from __future__ import annotations

import os

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
@click.argument("argv", metavar="[--] CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-i", "--interactive", is_flag=True, help="Pass standard input to the command.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.option("--memory", metavar="SIZE", help="Memory limit, such as 512M or 2G.")
@click.option("--cpus", type=click.FloatRange(0.01), metavar="N", help="Processor limit, such as 1.5.")
@click.option("--pids", type=click.IntRange(1), metavar="N", help="Limit of processes and threads.")
@click.option(
    "--network",
    type=click.Choice(["none", "host"]),
    default="none",
    show_default=True,
    help="none: only loopback; host: the host's network.",
)
@click.option("-e", "--env", "environment", multiple=True, metavar="NAME=VALUE", help="An environment variable; may be given again.")
@click.option("-w", "--workdir", default="", metavar="DIR", help="The working directory.")
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
    workdir: str,
    user: str,
    hostname: str,
) -> int:
    """Run CMD in a sandbox on the lazily mounted environment (or layer) REF.

    The exit code is the command's own (128 + n when signal n ended it); 125 when the sandbox itself failed. What the command writes is gone afterwards.
    """
    from dsec_layers.api.mounts import run
    from dsec_layers.cli.values import parse_environment, parse_size

    try:
        return run(
            app.session, ref, argv,
            interactive=interactive, tty=tty, memory=parse_size(memory), cpus=cpus, pids=pids, network=network,
            env=parse_environment(environment), environ=os.environ, workdir=workdir, user=user, hostname=hostname,
        ).code  # fmt: skip
    except (DsecError, OSError) as caught:
        error = caught if isinstance(caught, DsecError) else map_os_error(caught, "running a sandbox")
        error.exit_code = 125
        raise error from caught
