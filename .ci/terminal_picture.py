"""Draws what a terminal shows, as SVG without a font from another host.

`python .ci/terminal_picture.py docs/results/DATE-MACHINE/RUN OUT.svg` draws a published run's verdict. The lines are
made again from the stored result by the code that prints them at the end of `abserve compare`, with today's headline.

`python .ci/terminal_picture.py --record OUT.cast COMMAND…` runs commands, one after the other, in a terminal, and
writes down what they print and when (asciinema's format, version 2). `python .ci/terminal_picture.py OUT.cast OUT.svg`
draws that as a film of 20 seconds, after which it begins again.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from bisect import bisect_right
from html import escape
from itertools import pairwise
from pathlib import Path
from time import monotonic

from msgspec.structs import replace
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from loadgen.report.contents import result_document
from loadgen.report.renderers.terminal import print_document
from loadgen.verdict.headline import consequence, headline
from loadgen.verdict.result import Result, stored_result

WIDTH, HEIGHT = 100, 30
FILM_SECONDS, LAST_SECONDS, FRAMES = 20.0, 7.0, 14
"""Of a film, its last frame, and its most frames."""
CHAR_WIDTH, LINE_HEIGHT = 8.4, 17.0
VERDICT = "╭"
"""The corner of the box with the verdict, with which a film ends."""
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


def with_todays_words(run: Path) -> Result:
    """The stored result of a published run with the headline that today's code gives it."""
    result = stored_result(run)
    reached = (result.experiment, result.arms, result.comparisons, result.verdict.rankings)
    verdict = replace(
        result.verdict, headline=headline(*reached, result.checks), consequence=consequence(*reached), sentence=""
    )
    return replace(result, verdict=verdict)


def picture(run: Path) -> str:
    """The box with the verdict of a published run, as SVG."""
    printed = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor", record=True)
    print_document(result_document(with_todays_words(run)), printed)
    lines = printed.export_text(styles=True).rstrip("\n").split("\n")
    end = next(number for number, line in enumerate(lines) if "╰" in line) + 1
    screen = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, color_system="truecolor")
    for line in lines[:end]:
        screen.print(Text.from_ansi(line), highlight=False, overflow="crop", no_wrap=True)
    screen.print(
        Text(f"… and {len(lines) - end} more lines: why, which processor did the work, every check", style="dim")
    )
    return screen.export_svg(title=run.name, code_format=CODE_FORMAT, unique_id="abserve")


def record(cast: Path, commands: list[str]) -> None:
    """Run each command in a terminal of its own, and write what it prints with its time."""
    began, events = monotonic(), []
    for command in commands:
        events.append([monotonic() - began, "o", f"\x1b[32m$\x1b[0m {command}\r\n"])
        inside, outside = pty.openpty()
        fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
        running = subprocess.Popen(
            ["bash", "-c", command], stdin=outside, stdout=outside, stderr=outside, env=environment
        )
        os.close(outside)
        while True:
            try:
                read = os.read(inside, 65_536)
            except OSError:  # the end of a terminal on Linux
                break
            events.append([monotonic() - began, "o", read.decode(errors="replace")])
        os.close(inside)
        print(f"{command}: status {running.wait()}")
    header = {"version": 2, "width": WIDTH, "height": HEIGHT, "command": "; ".join(commands)}
    lines = [header, *([round(at, 3), kind, text] for at, kind, text in events)]
    cast.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


CONTROL = re.compile(r"(\x1b\[\??[0-9;]*[A-Za-z]|\r|\n)")


class Screen:
    """The lines of a terminal, for programs that erase a line before they write it again, as Rich does."""

    def __init__(self) -> None:
        self.lines, self.row = [""], 0

    def write(self, text: str) -> None:
        for part in CONTROL.split(text):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row - len(self.lines) + 1)
            elif part.endswith("A") and part.startswith("\x1b["):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and not (part.startswith("\x1b[") and not part.endswith("m")):
                self.lines[self.row] += part

    def shown(self, since: str = "") -> tuple[str, ...]:
        """The last lines that fit on the screen, or as many from the last one on that holds `since`."""
        lines = [row for line in self.lines[: self.row + 1] for row in wrapped(line)]
        if not since:
            return tuple(lines[-HEIGHT:])
        first = max(number for number, row in enumerate(lines) if since in row)
        return tuple(lines[first : first + HEIGHT])


def wrapped(line: str) -> list[str]:
    """A line with its colours, in pieces that are no wider than the terminal."""
    text = Text.from_ansi(line)
    if len(text) <= WIDTH:
        return [line]
    console = Console(width=WIDTH, force_terminal=True, color_system="truecolor", soft_wrap=True)
    pieces = []
    for piece in text.divide(range(WIDTH, len(text), WIDTH)):
        with console.capture() as captured:
            console.print(piece, end="")
        pieces.append(captured.get())
    return pieces


def film(cast: Path) -> str:
    """The recording as an SVG that moves. Its time runs evenly, faster than it was, but for the verdict at its end."""
    _, *events = map(json.loads, cast.read_text().splitlines())
    whole, screen = events[-1][0], Screen()
    begins = [whole * number / FRAMES for number in range(FRAMES)]
    shown: list[tuple[str, ...]] = []
    for at, _, text in events:
        while len(shown) < bisect_right(begins, at):
            shown.append(screen.shown())
        screen.write(text)
    shown = [*shown[1:], screen.shown(since=VERDICT)]
    kept = [number for number, frame in enumerate(shown) if number == 0 or frame != shown[number - 1]]
    rows = {
        row: f"r{number}" for number, row in enumerate(dict.fromkeys(row for frame in shown for row in frame if row))
    }
    share = (1.0 - LAST_SECONDS / FILM_SECONDS) / (len(shown) - 1)
    ends = [*(100.0 * share * number for number in kept), 100.0]
    styles, frames = [], []
    for place, (number, (begin, end)) in enumerate(zip(kept, pairwise(ends), strict=True)):
        hidden = "0%{visibility:hidden}" if begin else ""
        gone = f"{end:.2f}%{{visibility:hidden}}" if end < 100.0 else ""
        styles.append(f"@keyframes f{place}{{{hidden}{begin:.2f}%{{visibility:visible}}{gone}}}")
        styles.append(f".f{place}{{visibility:hidden;animation:f{place} {FILM_SECONDS:g}s step-end infinite}}")
        uses = (
            f'<use href="#{rows[row]}" y="{LINE_HEIGHT * line:g}"/>' for line, row in enumerate(shown[number]) if row
        )
        frames.append(f'<g class="f{place}">{"".join(uses)}</g>')
    drawn = "\n".join(f'<g id="{name}">{svg_row(row)}</g>' for row, name in rows.items())
    width, height = CHAR_WIDTH * WIDTH + 24, LINE_HEIGHT * HEIGHT + 24
    return f"""<svg viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">
<style>text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }}
{"".join(styles)}
@media (prefers-reduced-motion: reduce) {{
g {{ animation: none !important }} .f{len(kept) - 1} {{ visibility: visible }} }}
</style>
<defs>
{drawn}
</defs>
<rect fill="#0d1117" width="{width:g}" height="{height:g}" rx="8"/>
<g transform="translate(12, 24)">
{"".join(frames)}
</g></svg>
"""


def svg_row(row: str) -> str:
    """A line of a terminal with its colours, every piece in the place of its column."""
    text, console, pieces, column = Text.from_ansi(row), Console(width=WIDTH, color_system="truecolor"), [], 0
    for segment in text.render(console):
        piece = segment.text.rstrip("\n")
        style = segment.style
        colour = style.color.get_truecolor(SVG_EXPORT_THEME).hex if style and style.color else "#c9d1d9"
        extra = (' font-weight="bold"' if style and style.bold else "") + (
            ' opacity="0.6"' if style and style.dim else ""
        )
        if piece.strip():
            pieces.append(f'<text x="{CHAR_WIDTH * column:g}" fill="{colour}"{extra}>{escape(piece)}</text>')
        column += len(piece)
    return "".join(pieces)


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        record(Path(sys.argv[2]), sys.argv[3:])
    else:
        source = Path(sys.argv[1])
        Path(sys.argv[2]).write_text(film(source) if source.suffix == ".cast" else picture(source))
