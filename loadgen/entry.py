"""The `abserve` command line: finds the installed commands and imports only the one that runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points, version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS, INTERNAL = "abserve.commands", "abserve.internal_commands"
"""Entry points: the name of a command and its function or Typer group. The help leaves out the internal ones."""
UsageError: Any = typer.BadParameter.__base__
"""Of click, which some versions of typer import and others hold in a private module."""
STYLE = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class PanelledCommand(TyperCommand):
    """A command whose help lists its options in groups, by their `rich_help_panel`, in order of first appearance.

    Rich's own tables would cut the names of long options at 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group of options; options without a group come last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            group = "Arguments" if parameter.param_type_name == "argument" else ""
            if record := parameter.get_help_record(ctx):
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or group, []).append(record)
        rest = groups.pop("", [])
        for title, records in [
            *groups.items(),
            ("Other options" if groups.keys() - {"Arguments"} else "Options", rest),
        ]:
            with formatter.section(title):
                formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """Lists each command with the whole first paragraph of its help, which typer would cut after some words."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the caller passes it
        """Write the section of the commands that are not hidden."""
        listed = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(listed)


class InstalledCommands(Mapping[str, Any]):
    """The commands of all installed packages by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._points = {point.name: point for group in (INTERNAL, COMMANDS) for point in entry_points(group=group)}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load_command(self._points[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._points))

    def __len__(self) -> int:
        return len(self._points)


def load_command(point: EntryPoint) -> Any:
    """The command of an entry point, which is a function or a `typer.Typer` with several commands."""
    target, app = point.load(), typer.Typer(add_completion=False, rich_markup_mode=None)
    hidden = point.group == INTERNAL
    if not isinstance(target, typer.Typer):
        app.command(point.name, cls=PanelledCommand, context_settings=STYLE, hidden=hidden)(target)
        return typer.main.get_command(app)
    for command in target.registered_commands:
        command.cls = PanelledCommand
    app.add_typer(target, name=point.name, cls=CommandGroup, context_settings=STYLE, hidden=hidden)
    parent: Any = typer.main.get_command(app)
    return parent.commands[point.name]


class RootCommand(CommandGroup):
    """The root of the command line. A mistake in an option is one sentence with exit status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = InstalledCommands()  # type: ignore[assignment]  # nothing changes it

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the options of the root."""
        with one_sentence():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command and run it."""
        with one_sentence():
            return super().invoke(ctx)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Show a usage error as every other error, without the usage that click prints before it. The help that click
    shows for no arguments stays."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        from loadgen.cli.output import fail  # imports what only an error needs

        fail(error.format_message())


def show_version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        typer.echo(f"abserve {version('abserve')}")
        raise typer.Exit


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="abserve",
        cls=RootCommand,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=STYLE,
    )

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """PyTorch or Triton: which should serve this model, by how much, why, and is that true?"""

    return app


def main() -> None:
    """Run the command line. A usage error ends with one sentence on standard error and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows ?, and the run goes on
    build()(prog_name="abserve")


if __name__ == "__main__":
    main()
