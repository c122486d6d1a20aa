"""The `abserve` command: finds the command groups that are installed, mounts them, runs."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperGroup

GROUP = "abserve.commands"
HELP_COLUMNS = 110


class Commands(TyperGroup):
    """Lists each command with the whole of its first paragraph; click's own list cuts it after some words."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands that are not hidden."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in found
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def build() -> typer.Typer:
    """The whole command line. Each package registers a function `commands(app)` under the entry points of GROUP."""
    app = typer.Typer(
        name="abserve",
        cls=Commands,
        help="PyTorch or Triton: which should serve this model, by how much, why, and is that true?",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut the names of long options and commands at 80 columns
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
    )
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        point.load()(app)
    return app


def main() -> None:
    """Run the command line; a package's own errors end as one sentence on standard error and exit status 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × shows ?, and no run ends for it
    build()(prog_name="abserve")


if __name__ == "__main__":
    main()
