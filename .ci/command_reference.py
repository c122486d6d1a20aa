"""Prints docs/commands.md: every command with its options, defaults and environment variables, from the code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import typer

from loadgen.entry import build

HEAD = """# Commands

Made from the code by `make reference`. `abserve COMMAND --help` shows the same on the terminal.
"""


def visible_commands(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Every command that the help lists, with the words that call it; those of groups in place of the group."""
    for name in group.commands:
        command = group.get_command(None, name)
        if not command.hidden:
            yield from (
                visible_commands(command, f"{words} {name}")
                if hasattr(command, "commands")
                else [(f"{words} {name}", command)]
            )


def section(words: str, command: Any) -> Iterator[str]:
    """A heading, the command's help, and one table of its arguments and options."""
    yield f"\n## {words}\n\n{command.help}\n"
    context = command.make_context(words, [], resilient_parsing=True)
    rows = [(parameter, parameter.get_help_record(context)) for parameter in command.get_params(context)]
    groups = [getattr(parameter, "rich_help_panel", None) or "" for parameter, record in rows if record]
    for group in dict.fromkeys([*filter(None, groups), ""]):
        shown = [
            record
            for parameter, record in rows
            if record and (getattr(parameter, "rich_help_panel", None) or "") == group
        ]
        if shown:
            yield f"\n| {group or 'Option'} | |\n| --- | --- |\n"
            yield from (f"| `{name}` | {cell(text)} |\n" for name, text in shown)


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    root = typer.main.get_command(build())
    print(
        HEAD,
        *(part for words, command in visible_commands(root, "abserve") for part in section(words, command)),
        sep="",
        end="",
    )
