"""``dsec-layers doctor``."""

from __future__ import annotations

import click

from dsec_layers.cli.common import App, Command, app_options, pass_app


@click.command("doctor", cls=Command, example="dsec-layers doctor")
@app_options
@pass_app
def command(app: App) -> int:
    """Say what this host can do, what is missing and how to get it. Exit code 15 when something is missing."""
    from dsec_layers.api.doctor import doctor

    settings = app.settings
    checks = doctor(settings.cache, memory=settings.memory, pids=settings.pids)

    def show() -> None:
        app.console.table(("check", "status", "found", "needed for"), [(c.name, c.status, c.detail, c.needed_for) for c in checks])
        for check in checks:
            if check.remedy:
                app.console.out(f"{check.name}: {check.remedy}")

    app.console.result(checks, show)
    return 15 if any(check.status == "missing" for check in checks) else 0
