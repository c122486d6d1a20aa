"""Draws a published run's verdict: `python .ci/terminal_picture.py docs/results/DATE-MACHINE/RUN OUT.svg`.

The lines are made again from the stored result by the code that prints them at the end of `abserve compare`, with
today's headline. The picture loads no font from another host.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from loadgen.report.contents import result_document
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.headline import consequence, headline
from loadgen.verdict.result import stored_result

WIDTH = 100
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
    """The box with the verdict of a published run, as SVG."""
    printed = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor", record=True)
    result = stored_result(run)
    reached = (result.experiment, result.arms, result.comparisons, result.verdict.rankings)
    verdict = replace(
        result.verdict, headline=headline(*reached, result.checks), consequence=consequence(*reached), sentence=""
    )
    print_document(result_document(replace(result, verdict=verdict)), printed)
    lines = printed.export_text(styles=True).rstrip("\n").split("\n")
    end = next(number for number, line in enumerate(lines) if "╰" in line) + 1
    screen = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor")
    for line in lines[:end]:
        screen.print(Text.from_ansi(line), highlight=False, overflow="crop", no_wrap=True)
    screen.print(
        Text(f"… and {len(lines) - end} more lines: why, which processor did the work, every check", style="dim")
    )
    return screen.export_svg(title=run.name, code_format=CODE_FORMAT, unique_id="abserve")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])))
