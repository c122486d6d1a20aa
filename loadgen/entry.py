"""The `abserve` command line: finds the installed commands and imports only the one that runs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from inspect import cleandoc
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS, INTERNAL = "abserve.commands", "abserve.internal_commands"
"""Entry points: the name of a command and its function or Typer group. The help leaves out the internal ones."""
GROUPS = ("Compare", "Explore", "Serve", "Machine")
"""The groups of the help in their order. A command's is the constant `HELP_GROUP` of its module."""
EXAMPLES = (
    ("abserve doctor", "What this machine lacks for a comparison."),
    ("abserve compare --model torchvision:resnet50", "PyTorch against Triton, in five minutes."),
    ("abserve compare --a http://HOST:8000 --b http://HOST:9000", "Two servers that run already."),
)
OWN_PACKAGES = ("abserve", "loadgen", "servers", "tests")
EXTRAS = {"grpc": "conformance", "tritonclient": "conformance", "locust": "locust"}
"""The extra of abserve that brings a module; of every other one it is `servers`."""
MOST_MEANT = 3
"""Options that are suggested in place of a wrong one."""
STYLE = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class PanelledCommand(TyperCommand):
    """A command whose help lists its options in groups, by their `rich_help_panel`, in order of first appearance.

    If it has an option `--help-all`, `--help` shows only the group of that one. Rich's own tables would cut the names
    of long options at 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group of options; options without a group come last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        only = None
        for parameter in self.get_params(ctx):
            record, group = parameter.get_help_record(ctx), getattr(parameter, "rich_help_panel", None)
            if record is None:
                continue
            if parameter.name == "help_all":
                only = None if ctx.meta.get("help_all") else {"Arguments", group}
                rest.append(record)
            elif parameter.param_type_name == "argument":
                groups.setdefault(group or "Arguments", []).append(record)
            else:
                (groups.setdefault(group, []) if group else rest).append(record)
        shown = {title: records for title, records in groups.items() if only is None or title in only}
        for title, records in [*shown.items(), ("Other options" if groups.keys() - {"Arguments"} else "Options", rest)]:
            with formatter.section(title):
                formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """Lists each command with the whole first paragraph of its help, which typer would cut after some words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a command, show the help; that is a mistake."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands that are not hidden."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        listed = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(listed)


@cache
def read_head(point: EntryPoint) -> tuple[str, str]:
    """The group of a command and the first paragraph of its help, read from its source, because importing all commands
    takes seconds.

    The help is the function's docstring or, of a Typer group, its argument `help`."""
    package, *rest = point.module.split(".")
    spec = find_spec(package)  # not of the module: that would import the packages between
    path = Path(*(spec.submodule_search_locations or ())[:1], *rest).with_suffix(".py") if spec else Path()
    group, text = "Other", ""
    for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="HELP_GROUP")], value=ast.Constant(value=str(value))):
                group = value
            case ast.FunctionDef(name=name) if name == point.attr:
                text = ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(keywords=keywords)) if name == point.attr:
                helps = [k.value.value for k in keywords if k.arg == "help" and isinstance(k.value, ast.Constant)]
                text = cleandoc(str(helps[0])) if helps else ""
    return group, " ".join(text.partition("\n\n")[0].split())


class RootCommand(CommandGroup):
    """The commands of all installed packages, each imported when it is asked for. A mistake in an option is one
    sentence with exit status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        installed = entry_points()  # once for both groups: it reads a file of every installed package
        points = (point for group in (INTERNAL, COMMANDS) for point in installed.select(group=group))
        self.commands: Any = {point.name: point for point in sorted(points, key=lambda point: point.name)}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the caller passes it
        """Import the command of this name; None without one."""
        point = self.commands.get(cmd_name)
        return point if point is None else load_command(point)

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        """Parse the options of the root."""
        with one_sentence():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command and run it."""
        with one_sentence():
            return super().invoke(ctx)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write what abserve is for, and how to begin."""
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            for command, result in EXAMPLES:
                formatter.write_text(command)
                with formatter.indentation():
                    formatter.write_text(result)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the caller passes it
        """Write the commands in their groups, without importing them; the internal ones are left out."""
        heads = [(name, *read_head(point)) for name, point in self.commands.items() if point.group == COMMANDS]
        for group in dict.fromkeys((*GROUPS, *(of for _, of, _ in heads))):
            if listed := [(name, text) for name, of, text in heads if of == group]:
                with formatter.section(f"{group} commands" if group == "Other" else group):
                    formatter.write_dl(listed)


@cache
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


@contextmanager
def one_sentence() -> Iterator[None]:
    """Show a usage error as every other error, without the usage that typer prints before it, and a package that is not
    installed as what to install: an installation that only loads servers by URL has none of the servers' own."""
    try:
        yield
    except ModuleNotFoundError as error:
        from loadgen.cli.output import fail

        fail(what_to_install(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # only a usage error has it; typer exports no class of them all
            raise
        from loadgen.cli.output import fail  # imports what only an error needs

        fail(unknown_option(error) if hasattr(error, "possibilities") else error.format_message())


def what_to_install(error: ModuleNotFoundError) -> str:
    """The sentence for a package that is not installed; one of ours is a fault, and its error is raised again."""
    missing = (error.name or "").partition(".")[0]
    if missing in OWN_PACKAGES or not missing:
        raise error
    return f"this needs {missing}, which is not installed; run: pip install 'abserve[{EXTRAS.get(missing, 'servers')}]'"


def unknown_option(error: Any) -> str:
    """The sentence for an option that does not exist, with those that may be meant, the closest first: one that the
    help leaves out only if it is the closest, and no arm's option (`--a-model`) beside the plain one (`--model`)."""
    parameters = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
    hidden = {flag: getattr(each, "hidden", False) for each in parameters for flag in each.opts if flag[:2] == "--"}
    close = get_close_matches(error.option_name, hidden, n=len(hidden) or 1)
    plain = {flag[1:] for flag in close}
    meant = [flag for flag in close if flag == close[0] or not (hidden[flag] or flag[3:] in plain)][:MOST_MEANT]
    return f"{error.message}. Did you mean {' or '.join(meant)}?" if meant else str(error.message)


def show_version(value: bool) -> None:
    """Print the version and exit."""
    if value:
        typer.echo(f"abserve {version('abserve')}")
        raise typer.Exit


def build() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        name="abserve", cls=RootCommand, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=STYLE
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
