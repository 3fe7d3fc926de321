"""``dsec-layers cache``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app
from dsec_layers.cli.console import human_bytes


@click.group("cache", short_help="Look at and clear the local cache.")
def command() -> None:
    """The local cache: segments that were read on this host, and the metadata of layers."""


@command.command("show", cls=Command, example="dsec-layers cache show")
@app_options
@pass_app
def show(app: App) -> None:
    """Show what the cache holds and what was fetched since the daemon began."""
    from dsec_layers.api.mounts import cache_show

    report = cache_show(app.session)

    def text() -> None:
        out = app.console.out
        out(f"{app.settings.cache}: {report.segments} segments, {human_bytes(report.bytes)}")
        out(
            f"fetched {report.fetched} segments, {human_bytes(report.fetched_bytes)}; {report.events} events, {report.retries} retries, {report.failures} failures"
        )
        out(f"daemon {report.pid}, keeper {report.keeper}, {report.leases} leases")
        if report.layers:
            out()
            rows = [(layer.digest[7:19], layer.driver, layer.users, layer.segments) for layer in report.layers]
            app.console.table(("layer", "driver", "users", "segments"), rows, right=(2, 3))

    app.console.result(report, text)


@command.command("clear", cls=Command, example="dsec-layers cache clear\ndsec-layers cache clear --steps")
@click.option("--steps", is_flag=True, help="Remove kept results of build steps instead.")
@app_options
@pass_app
def clear(app: App, steps: bool) -> None:
    """Remove everything that no mount uses."""
    from dsec_layers.api.mounts import cache_clear

    if steps:
        from dsec_layers.api.build import clear_steps

        clear_steps(app.session)
        app.console.result({"cleared": "steps"}, lambda: app.console.out("removed the results of build steps"))
        return
    cleared = cache_clear(app.session)
    app.console.result(cleared, lambda: app.console.out(f"removed {cleared.segments} segments, {human_bytes(cleared.bytes)}"))


@command.command("stop", cls=Command, example="dsec-layers cache stop")
@click.option("--force", is_flag=True, help="Unmount what is mounted first.")
@app_options
@pass_app
def stop(app: App, force: bool) -> None:
    """End the mount daemon. It starts by itself at the next mount."""
    from dsec_layers.api.mounts import stop as end

    end(app.session, force=force)
    app.console.result({"stopped": True}, lambda: app.console.out("stopped"))
