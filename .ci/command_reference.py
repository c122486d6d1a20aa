"""Prints docs/commands.md: every command with its options, defaults and environment variables, from the code.

The commands that people look up come first. An option that reads the same as one further up is named there alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import typer

from loadgen.entry import build

HEAD = """# Commands: `abserve COMMAND`

Made from the code by `make reference`; `abserve COMMAND --help` (of some commands `--help-all`) shows the same.
Brackets hold the default. A switch `--NAME` that is on by default is switched off by `--no-NAME`.
"""
FIRST = ("compare", "tune", "serve", "report", "diff", "rank", "noise-floor", "doctor", "models")
UNSAID = {"--help", "--help-all"}
VARIABLE = re.compile(r"env var: (\w+)(?:; )?")
MOST_LISTED = 20
"""Names of options that are those of another command."""
Option = tuple[str, str]
"""An option's names with the form of its value, and its help."""


def visible_commands(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Every command that the help lists, with the words that call it; those of groups in place of the group."""
    for name in sorted(group.commands, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        command = group.get_command(None, name)
        if not command.hidden:
            yield from (
                visible_commands(command, f"{words} {name}")
                if hasattr(command, "commands")
                else [(f"{words} {name}", command)]
            )


def section(words: str, command: Any, above: dict[Option, str]) -> Iterator[str]:
    """A heading, the command's help, and its arguments and options by group; `above` gets those that are new."""
    yield f"\n## {words}\n\n{command.help}\n"
    context = command.make_context(words, [], resilient_parsing=True)
    groups: dict[str, list[Option]] = {"": []}
    variables: dict[str, str] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and not UNSAID & {*parameter.opts, *parameter.secondary_opts}:
            (*_, long) = (option for option in parameter.opts if option.startswith("--") or len(parameter.opts) == 1)
            name, text = record[0].replace(f" / --no-{long[2:]}", ""), " ".join(record[1].split())
            text = text.replace(f"default: no-{long[2:]}]", "default: off]").replace(
                f"default: {long[2:]}]", "default: on]"
            )
            of_option = long[2:].upper().replace("-", "_")
            for variable in VARIABLE.findall(text):
                if variable.endswith(f"_{of_option}") and variable != "ABSERVE_ANYWAY":
                    variables.setdefault(variable.removesuffix(of_option), f"{variable} for {long}")
                    text = VARIABLE.sub("", text).replace(" []", "")
            text = text.replace("[default: ", "[").replace("; default: ", "; ")
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append((name, text))
    every = [option for options in groups.values() for option in options]
    if variables:
        yield "\nEach option can also be set by an environment variable, such as "
        yield f"{' or '.join(list(variables.values())[:1])}.\n"
    if any(name.startswith("--b-") for name, _ in every):
        yield "\nEach option `--a-…` exists for the other arms too: `--b-…`, `--c-…` and so on.\n"
    said: dict[str, list[str]] = {}
    for group, options in [*((title, of) for title, of in groups.items() if title), ("", groups[""])]:
        new = [option for option in options if option not in above and not repeats_arm_a(option, every)]
        for name, text in options:
            if (name, text) in above:
                said.setdefault(above[name, text], []).append(f"`{name.split()[0]}`")
        if new:
            yield f"\n{group or ('Other options' if len(groups) > 1 else 'Options')}:\n\n"
            yield from (f"- `{name}`: {escaped(text)}\n" for name, text in new)
    for of, names in said.items():
        listed = ", ".join(names) if len(names) <= MOST_LISTED else f"{len(names)} options, all that make sense here"
        yield f"\nAs in [{of}](#{of.replace(' ', '-')}): {listed}.\n"
    above.update({option: above.get(option, words) for option in every})


def repeats_arm_a(option: Option, every: list[Option]) -> bool:
    """Whether an option of arm B says what that of arm A says."""
    as_a = option[0].replace("--b-", "--a-").replace("-no-b-", "-no-a-"), option[1].replace("arm B", "arm A")
    return option[0].startswith("--b-") and as_a in every


def escaped(text: str) -> str:
    """Text for an item of a Markdown list."""
    return text.replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    root = typer.main.get_command(build())
    above: dict[Option, str] = {}
    print(
        HEAD,
        *(part for words, command in visible_commands(root, "abserve") for part in section(words, command, above)),
        sep="",
        end="",
    )
