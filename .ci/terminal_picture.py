"""Draws what a published run printed: `python .ci/terminal_picture.py docs/results/DATE-MACHINE/RUN OUT.svg`.

The lines are made again from the stored result by the code that prints them at the end of `abserve compare`; the
command is the one of the manifest. The picture loads no font from another host.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from loadgen.report.contents import result_document
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.result import stored_result

WIDTH, LINES = 100, 40
CODE_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect fill="#0d1117" width="{width}" height="{height}" rx="8"/>
<g transform="translate(12, 12)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def picture(run: Path) -> str:
    """The command of a published run and the first lines that it printed, as SVG."""
    command = json.loads((run.parent / "manifest.json").read_text())["commands"][run.name]
    printed = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor", record=True)
    print_document(result_document(stored_result(run)), printed)
    lines = printed.export_text(styles=True).rstrip("\n").split("\n")
    shown = lines[:LINES]
    screen = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor")
    screen.print(Text.assemble(("$ ", "bold green"), *wrapped(command)), highlight=False)
    for line in shown:
        screen.print(Text.from_ansi(line), highlight=False, overflow="crop", no_wrap=True)
    rest = f"… and {len(lines) - LINES} more lines: why, which processor did the work, every check"
    screen.print(Text(rest, style="dim"), highlight=False)
    return screen.export_svg(title=command, code_format=CODE_FORMAT, unique_id="abserve")


def wrapped(command: str) -> list[str]:
    """The command in lines that a shell would take, broken before options."""
    first, *options = shlex.join(shlex.split(command)).split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) > WIDTH - 12:
            lines[-1] += " \\\n"
            lines.append("     ")
        lines[-1] += f" --{option}"
    return lines


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])))
