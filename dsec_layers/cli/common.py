"""What every command shares: the context object, the global options, and how errors become exit codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from dsec_layers.cli.console import Console, human_bytes
from dsec_layers.cli.settings import Settings, load_settings
from dsec_layers.errors import DsecError

if TYPE_CHECKING:
    from dsec_layers.api.build import Built
    from dsec_layers.api.environment import Copied
    from dsec_layers.api.session import Session

__all__ = ["REF", "App", "Command", "CommandLine", "app_options", "limit_option", "pass_app", "show_built", "show_copied"]

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """The state of one invocation: options as given, the console, and the session when a command asks for it."""

    def __init__(self) -> None:
        self.store: str | None = None
        self.cache: str | None = None
        self.console = Console()

    @functools.cached_property
    def settings(self) -> Settings:
        """The effective settings."""
        return load_settings(self.store, self.cache)

    @functools.cached_property
    def session(self) -> Session:
        """A session on the effective store and cache."""
        from dsec_layers.api.session import Session

        return Session(self.settings.store, self.settings.cache, progress=self.console, driver=self.settings.driver)

    def close(self) -> None:
        """Close the session if one was opened."""
        session = self.__dict__.pop("session", None)
        if session is not None:
            session.close()


class Command(click.Command):
    """A command whose help ends with an example: every one has it, by test."""

    def __init__(self, *args: Any, example: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the example."""
        if self.example:
            with formatter.section("Example"):
                for line in self.example.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n")


class CommandLine(Command):
    """A command that takes one argument and then a command line of its own, in the last parameter.

    Options may stand before and after the first argument. What follows ``--``, or begins with the first other word, is the command line, untouched.
    ``usage_code``: the exit code of a mistake in our own options.
    """

    def __init__(self, *args: Any, usage_code: int = click.UsageError.exit_code, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.usage_code = usage_code
        self.allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, each part in its turn: click's own parser knows options before all arguments only, or anywhere."""
        try:
            return super().parse_args(ctx, self._sorted(ctx, args))
        except click.NoSuchOption as error:
            raise click.UsageError(f"{error.format_message()} What is meant for CMD stands after CMD or after --.", ctx) from error

    def _sorted(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The same arguments with all our options in front."""
        before, rest = self._split(ctx, args)
        if not rest:
            return args
        between, line = ([], rest[1:]) if before[-1:] == ["--"] else self._split(ctx, rest[1:])
        if between[-1:] != ["--"] and line[:1] == ["--"]:
            line = line[1:]
        return [*(item for part in (before, between) for item in part[: len(part) - (part[-1:] == ["--"])]), "--", rest[0], *line]

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Our options at the beginning of ``args``, and the ``--`` that ends them; and the rest."""
        options = click.Command(None, params=[item for item in self.params if isinstance(item, click.Option)])
        options.allow_interspersed_args = False
        _, rest, _ = options.make_parser(ctx).parse_args(list(args))
        cut = len(args) - len(rest)
        return args[:cut], args[cut:]


class RefType(click.ParamType[str]):
    """A reference on the command line; completes from the store's refs."""

    name = "ref"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The store's refs that begin with what is typed; none when the store cannot be read."""
        from dsec_layers.api.look import names

        app = ctx.ensure_object(App)
        try:
            return [CompletionItem(name) for name in names(app.session, incomplete)]
        except (DsecError, OSError):
            return []


REF = RefType()

limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=SIZE",
    help="What the input may cost: entries, attributes (bytes), holes (chunks), memory (bytes for entries of tars), spool (bytes of a temporary copy). May be given again; docs/sources.md has the defaults.",
)
"""The option of commands that read inputs which may be hostile."""

pass_app = click.make_pass_decorator(App, ensure=True)


def app_options(function: Callable[P, R]) -> Callable[P, R]:
    """The global options. They may stand before or after the command's name."""
    for option in reversed(
        (
            click.option(
                "--store", metavar="URL", expose_value=False, callback=_set("store"), help="Where layers are stored. [env: DSEC_STORE]"
            ),
            click.option("--cache", metavar="DIR", expose_value=False, callback=_set("cache"), help="The local cache. [env: DSEC_CACHE]"),
            click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_set_json, help="Print the result as JSON."),
            click.option("-v", "--verbose", count=True, expose_value=False, callback=_verbosity(1), help="Say more."),
            click.option("-q", "--quiet", count=True, expose_value=False, callback=_verbosity(-1), help="Say only what went wrong."),
        )
    ):
        function = option(function)
    return function


def show_built(app: App, made: Built) -> None:
    """Print what a build or an import made."""
    app.console.out(f"{made.name}  {made.digest}")
    image, new, same = human_bytes(made.image_bytes), human_bytes(made.stored_bytes), human_bytes(made.dedup_bytes)
    app.console.info(f"image {image}, stored {new} new, {same} deduplicated, {made.seconds:.1f} s")


def show_copied(app: App, copied: Copied) -> None:
    """Print what a push or pull moved."""
    moved, there = human_bytes(copied.copied_bytes), human_bytes(copied.present_bytes)
    app.console.out(f"{copied.digest}: {copied.copied} blobs ({moved}) copied, {copied.present} ({there}) were there")


def _app(context: click.Context) -> App:
    return context.ensure_object(App)


def _set(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            setattr(_app(context), name, value)

    return callback


def _set_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        _app(context).console.as_json = True


def _verbosity(step: int) -> Callable[[click.Context, click.Parameter, int], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: int) -> None:
        _app(context).console.verbosity += step * value

    return callback
