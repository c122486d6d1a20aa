"""The progress of a run on a terminal: what happens now, how long it still takes, what each block has shown so far.

On a terminal one line is always moving, below the cells with their ratios so far; elsewhere (a log, CI) only finished
things are printed, a line each.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from loadgen.bench.live_ratios import LiveRatios
from loadgen.bench.progress import Progress
from loadgen.comparison.summaries import BlockSummary
from loadgen.records.run import ArmRecord, BlockRecord, ParityRecord, shown
from loadgen.report.live import FIXED, OPEN, ratio_line, ratio_table
from loadgen.report.sections.checks import fairness_lines, fairness_summary
from loadgen.result.checks.registry import Check
from loadgen.result.checks.run import parity_figures
from loadgen.studies.cold_start.records import ColdStart


class RichProgress(Progress):
    """A context manager, so that the terminal is always given back."""

    def __init__(self, console: Console, ratios: LiveRatios | None = None) -> None:
        self._console = console
        self._ratios = ratios
        self._unprinted = False
        self._last_block = ""
        self._started = monotonic()
        self._ends_at: float | None = None
        self._phase = ""
        self._now = ""
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> RichProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._leave_ratios()

    def plan(self, seconds: float) -> None:
        """The estimate of what is left."""
        self._ends_at = monotonic() + seconds

    def phase(self, title: str) -> None:
        """A new phase, printed once."""
        self._leave_ratios()
        self._phase, self._now, self._last_block = title, "", ""
        self._console.print(Text(f"{_clock(self._elapsed())}  {title}", style="bold"))

    def now(self, text: str) -> None:
        """The moving line."""
        self._now = text
        if not self._console.is_terminal:
            self._say(text)

    def arm_ready(self, record: ArmRecord) -> None:
        """Which server answers as which arm."""
        self._say(f"{shown(record.label)} is {record.title} at {record.url}")

    def cold_start_done(self, record: ColdStart) -> None:
        """One start."""
        if record.error is not None or record.ready_ns is None or record.first_answer_ns is None:
            self._say(f"{shown(record.label)}  did not start: {record.error}", style="red")
            return
        self._say(
            f"{shown(record.label)}  ready after {record.ready_ns / 1e9:.2f} s, "
            f"first answer after {record.first_answer_ns / 1e9:.2f} s"
        )

    def parity_done(self, record: ParityRecord) -> None:
        """The outcome in a line."""
        if record.ok:
            self._say(f"same answers: {len(record.cases)} cases, {parity_figures(record)}", style="green")
        else:
            self._say(f"different answers: {record.error or 'see parity.json'}", style="red")

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """How many passed, and what each of the others says."""
        lines = fairness_lines(checks)
        self._say(fairness_summary(checks) or "", style="yellow" if lines else "green")
        for line in lines:
            self._say(f"! {line}")

    def block_done(self, record: BlockRecord, summary: BlockSummary, p50_ns: int | None) -> None:
        """Throughput and median of one block; after the second of a pair its ratio."""
        seconds = (record.window_end_ns - record.window_start_ns) / 1e9
        rate = f"{record.items / seconds:9.1f} items/s" if seconds > 0 else "  no items  "
        p50 = "p50 –" if p50_ns is None else f"p50 {p50_ns / 1e6:8.2f} ms"
        problem = "" if record.complete and not record.errors else f"  {record.errors} errors {record.note or ''}"
        line = f"{shown(record.label)}  {record.cell:<14} pair {record.round + 1:<3}{rate}  {p50}{problem}"
        if problem or not self._console.is_terminal or self._ratios is None:
            self._say(line, style="red" if problem else "")
        self._last_block = " ".join(f"{shown(record.label)} {record.cell}: {rate}, {p50}".split())
        found = self._ratios.add(summary) if self._ratios is not None else []
        if found:
            self._unprinted = True
        if found and self._console.is_terminal:
            self._live.refresh()
        elif found:
            for one in found:
                self._say(ratio_line(one))

    def _elapsed(self) -> float:
        return monotonic() - self._started

    def _line(self) -> RenderableType:
        left = ""
        if self._ends_at is not None:
            remaining = self._ends_at - monotonic()
            left = f", about {_clock(remaining)} left" if remaining > 0 else ", almost there"
        self._spinner.update(text=Text(f"{self._phase}: {self._now}  ({_clock(self._elapsed())}{left})"))
        if not self._unprinted or self._ratios is None:
            return self._spinner
        room = max(1, self._console.height - 5)
        latest = self._ratios.latest[-room:]  # what is higher than the terminal would hide the moving line
        note = OPEN if self._ratios.until_decided else FIXED
        table = ratio_table(latest, self._console.width)
        return Group(table, Text(f"last: {self._last_block}", style="dim"), Text(note, style="dim"), self._spinner)

    def _leave_ratios(self) -> None:
        """The table as it stands stays on the screen when its phase is over."""
        if self._unprinted and self._ratios is not None and self._console.is_terminal:
            self._console.print(ratio_table(self._ratios.latest, self._console.width))
        self._unprinted = False

    def _say(self, text: str, style: str = "") -> None:
        if self._console.is_terminal:
            self._console.print(Padding(Text(text, style=style), (0, 0, 0, 7)))
        else:  # a log has no width
            self._console.print(Text(f"       {text}", style=style), soft_wrap=True)


def _clock(seconds: float) -> str:
    """m:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 60:2d}:{whole % 60:02d}"
