"""What a command shows while it measures: the step, the time left, and the ratios so far with narrowing intervals.

On a terminal one line is always moving, below a table of the workloads with their ratios so far. In a log or in CI only
finished things are printed: of the load the first ratio at once, and then one line per round, or per 10 s of a longer
one, with the ratios so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from loadgen.base.documents import one_line
from loadgen.base.quantities import counted, excludes_one, is_determined, number, per_second
from loadgen.checks.run import parity_figures
from loadgen.measure.progress import LiveRatio, LiveRatios, RunProgress
from loadgen.metrics.barrier import attempt
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.checks import Check
from loadgen.records.names import names_of
from loadgen.records.payloads import inputs_in_words
from loadgen.records.probes import ServerStart
from loadgen.records.run import ArmRecord, Label, Pairing, ParityRecord, shown
from loadgen.records.store import StoredBlock
from loadgen.report.sections.checks import fairness_lines, fairness_summary
from loadgen.report.sections.comparisons import LEAST_SPAN, better_of, reach

FIXED = "These intervals do not stop the run; the verdict follows after the checks."
OPEN = "Pairs are added where the winner is uncertain; these intervals stay valid when checked after every pair."
WITHIN = "within one pair"
"""After the range of a first ratio, which shows how its two blocks vary, and not yet how pairs differ."""
LOG_SECONDS = 10.0
"""A log gets a line of the ratios at the end of every round, and within a longer one not more often than this."""
BELOW_THE_TIME = 7
"""Columns by which lines below one with the time are indented."""
MIN_TRACK, MAX_TRACK = 10, 40
_HIGHER_IS_BETTER = {metric.title: metric.higher_is_better for metric in METRICS.values()}


class MovingLine:
    """The line at the end of a terminal that shows what happens now and how long it takes; a context manager that
    always gives the terminal back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = monotonic()
        self._ends_at: float | None = None
        self._now = ""
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        attempt(self._leave, lambda _: None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the terminal to another line for a while."""
        self._live.stop()
        try:
            yield
        finally:
            if self._console.is_terminal:
                self._live.start()

    def _line(self) -> RenderableType:
        raise NotImplementedError

    def _leave(self) -> None:
        """Print what stays on the screen at the end."""

    def _say(self, text: str, style: str = "", indent: int = 0) -> None:
        if self._console.is_terminal:
            self._console.print(Padding.indent(Text(text, style=style), indent))
        else:  # a log has no width
            self._console.print(Text(" " * indent + text, style=style), soft_wrap=True)

    def _elapsed(self) -> float:
        return monotonic() - self._started

    def _left(self) -> str:
        """The time left, as the end of a text; empty while it is unknown."""
        if self._ends_at is None:
            return ""
        remaining = self._ends_at - monotonic()
        return f", about {clock(remaining).strip()} left" if remaining > 0 else ", almost done"


class RichProgress(MovingLine, RunProgress):
    """What `abserve compare` shows while it measures."""

    def __init__(self, console: Console, ratios: LiveRatios | None = None) -> None:
        self._ratios = ratios
        self._unprinted = False
        self._last_block = ""
        self._round: int | None = None
        self._told_at = -math.inf
        """When a log got its last line of ratios."""
        self._of_round: list[LiveRatio] = []
        """The ratios that the blocks of this round have changed, for the line of a log."""
        self._unit = per_second("item")
        self._phase = ""
        self._records: list[ArmRecord] = []
        super().__init__(console)  # draws the line

    def plan(self, seconds: float) -> None:
        """Update the estimate of the time left."""
        self._ends_at = monotonic() + seconds

    def phase(self, title: str) -> None:
        """Print a new phase."""
        self._leave()
        self._phase, self._now, self._last_block = title, "", ""
        self._console.print(Text(f"{clock(self._elapsed())}  {title}", style="bold"))

    def now(self, text: str) -> None:
        """Change the moving line; a log gets a line for preparations only, because every round has its own."""
        self._now = text
        if not self._console.is_terminal and not text.startswith("block "):
            self._say(text)

    def arm_ready(self, record: ArmRecord) -> None:
        """Name the server behind an arm."""
        self._records.append(record)
        self._say(f"{shown(record.label)} is {record.title} at {record.url}")

    def rule_decided(self, rule: str) -> None:
        """Say what holds for all arms."""
        self._say(rule)

    def inputs_ready(self, about: Mapping[str, str | int]) -> None:
        """Name what is sent."""
        self._unit = per_second(str(about.get("item", "item")))
        self._say(f"inputs: {inputs_in_words(about)}")

    def cold_start_done(self, record: ServerStart) -> None:
        """Print one cold start."""
        which = " at a first start" if record.caches == "uncached" else " without its settings" if record.plain else ""
        if record.error is not None or record.ready_ns is None or record.first_answer_ns is None:
            answered = "gave no answer" if record.first_answer_ns is None else "does not count"
            how = "did not start" if record.ready_ns is None else answered
            self._say(f"{self._name(record.label)}{which} {how}: {record.error}", style="red")
            return
        self._say(
            f"{self._name(record.label)}{which} is ready after {record.ready_ns / 1e9:.2f} s, "
            f"first answer after {record.first_answer_ns / 1e9:.2f} s"
        )

    def arm_left_out(self, label: Label, why: str) -> None:
        """Say why an arm is not measured."""
        self._say(f"{self._name(label)} is left out: {one_line(why)}", style="red")

    def first_figure(self, ratios: Sequence[LiveRatio]) -> None:
        """Say how the arms compare before the checks, and that it decides nothing."""
        figure = in_one_line(ratios, self._names())
        self._say(f"first figure, before the checks and the warm-up, not stored: {figure}", style="bold")

    def parity_done(self, record: ParityRecord) -> None:
        """Print whether the arms give the same answers."""
        if record.ok:
            self._say(f"same answers: {counted(len(record.cases), 'case')}, {parity_figures(record)}", style="green")
        else:
            wrong = sum(not case.ok for case in record.cases)
            why = record.error or f"in {wrong} of {len(record.cases)} cases; see parity.json"
            self._say(f"different answers: {why}" if record.answered else why, style="red")

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """Print how many checks passed, and each of the others."""
        lines = fairness_lines(checks)
        self._say(f"before the load: {fairness_summary(checks)}", style="yellow" if lines else "green")
        for line in lines:
            self._say(f"! {line}")

    def block_done(self, block: StoredBlock, summary: BlockSummary) -> None:
        """Update the ratios; print a block with errors, and in a log the round before this one."""
        record = block.record
        if record.round != self._round:
            self._print_round()
            self._round = record.round
        speed, p50_ms = summary.throughput_per_s, summary.latency_ms("p50")
        rate = f"{'–' if speed is None else number(speed):>9} {self._unit}"
        p50 = "p50 –" if p50_ms is None else f"p50 {number(p50_ms):>8} ms"
        problem = (
            "" if record.complete and not record.errors else f"  {counted(record.errors, 'error')} {record.note or ''}"
        )
        who = self._name(record.label)
        if problem or self._ratios is None:
            line = f"{who}, {record.workload:<14} pair {record.round + 1:<3}{rate}  {p50}{problem}"
            self._say(line, style="red" if problem else "")
        self._last_block = " ".join(f"{who}, {record.workload}: {rate}, {p50}".split())
        ratios: list[LiveRatio] = []
        try:
            ratios = self._ratios.add(summary, block) if self._ratios is not None else []
        except Exception as exc:  # noqa: BLE001 (what only shows may not end a run)
            self._ratios = None
            self._say(
                f"no ratios during this run ({type(exc).__name__}: {one_line(str(exc), 100)}); the report has them",
                style="yellow",
            )
        if not ratios:
            return
        self._unprinted = True
        if self._console.is_terminal:
            self._live.refresh()
        else:
            self._of_round += ratios
            if monotonic() - self._told_at >= LOG_SECONDS:
                self._print_round()
                self._round = record.round

    def _line(self) -> RenderableType:
        self._spinner.update(text=Text(f"{self._phase}: {self._now}  ({clock(self._elapsed())}{self._left()})"))
        if not self._unprinted or self._ratios is None:
            return self._spinner
        room = max(1, self._console.height - 5)
        latest = self._ratios.latest[-room:]  # a table higher than the terminal would hide the moving line
        note = OPEN if self._ratios.experiment.until_decided else FIXED
        table = ratio_table(latest, self._console.width)
        return Group(table, Text(f"last: {self._last_block}", style="dim"), Text(note, style="dim"), self._spinner)

    def _leave(self) -> None:
        """Leave the table on the screen, and the last round in a log, when the phase is over."""
        self._print_round()
        if self._unprinted and self._ratios is not None and self._console.is_terminal:
            self._console.print(ratio_table(self._ratios.latest, self._console.width))
        self._unprinted = False

    def _names(self) -> dict[Label, str]:
        """The arms as sentences call them, by what is known of them so far."""
        return {} if self._ratios is None else names_of(self._ratios.experiment.arms, self._records)

    def _name(self, label: Label) -> str:
        return self._names().get(label, shown(label))

    def _print_round(self) -> None:
        if self._round is not None and self._of_round:
            self._say(round_line(self._round + 1, self._of_round, self._names()))
            self._told_at = monotonic()
        self._round, self._of_round = None, []

    def _say(self, text: str, style: str = "", indent: int = BELOW_THE_TIME) -> None:
        super()._say(text, style, indent)


def clock(seconds: float) -> str:
    """A duration as m:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 60:2d}:{whole % 60:02d}"


def _better(ratio: LiveRatio, names: Mapping[Label, str] | None = None) -> tuple[str, str]:
    shown_interval = ratio.ci95 or ratio.within
    better, interval = better_of(
        Pairing(ratio.baseline, ratio.arm), ratio.ratio, shown_interval, _HIGHER_IS_BETTER[ratio.metric], ratio.pairs,
        names,
    )  # fmt: skip
    is_within = ratio.ci95 is None and shown_interval is not None and is_determined(shown_interval)
    return better, f"{interval} {WITHIN}" if is_within else interval


def round_line(place: int, ratios: Sequence[LiveRatio], names: Mapping[Label, str] | None = None) -> str:
    """For a log: "round 3 of 8: batched(8) throughput Triton 1.31× (1.22–1.40); single p50 vLLM 1.05×"."""
    planned = [ratio.planned for ratio in ratios if ratio.planned is not None]
    return f"round {place}{f' of {max(planned)}' if planned else ''}: {in_one_line(ratios, names)}"


def in_one_line(ratios: Sequence[LiveRatio], names: Mapping[Label, str] | None = None) -> str:
    """Each ratio with its workload, its metric and, among several, its two arms."""
    names = names or {}
    several = len({ratio.arm for ratio in ratios}) > 1
    parts = []
    for ratio in ratios:
        better, interval = _better(ratio, names)
        arm, base = (names.get(label, shown(label)) for label in (ratio.arm, ratio.baseline))
        arms = f"{arm} against {base} " if several else ""
        bounds = "" if interval == "–" else f" ({interval})"
        known = f"{better}{bounds}" if ratio.ratio is not None else f"no ratio: {ratio.reason}"
        parts.append(f"{ratio.workload} {ratio.metric.removesuffix(' latency')} {arms}{known}")
    return "; ".join(parts)


def ratio_table(ratios: Sequence[LiveRatio], width: int) -> Table:
    """A row per workload and arm, for a terminal of `width` columns; all intervals share one axis around 1."""
    arms = {shown(ratio.arm) for ratio in ratios}
    labels = max((len(shown(label)) for ratio in ratios for label in (ratio.arm, ratio.baseline)), default=1)
    several = len(arms) > 1
    used = 66 + labels + (2 + max(map(len, arms)) if several else 0)
    track = min(MAX_TRACK, max(MIN_TRACK, width - used))
    span = max((reach(ratio.ratio or 1.0, ratio.ci95 or ratio.within) for ratio in ratios), default=LEAST_SPAN)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("workload", no_wrap=True)
    table.add_column("pairs", justify="right", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    if several:
        table.add_column("arm", overflow="fold")
    table.add_column("better arm", justify="right", overflow="fold")
    table.add_column("95 % interval", justify="right", no_wrap=True)
    low, high = f"{math.exp(-span):.2f}", f"{math.exp(span):.2f}"
    room = track - len(low) - len(high)
    axis = low + "1".center(room) + high if room > 2 else "1".center(track)
    table.add_column(Text(axis, style="dim"), no_wrap=True, width=track)
    for ratio in ratios:
        table.add_row(
            ratio.workload,
            f"{ratio.pairs}" if ratio.planned is None else f"{ratio.pairs}/{ratio.planned}",
            ratio.metric.removesuffix(" latency"),
            *([shown(ratio.arm)] if several else []),
            *_better(ratio),
            track_of(ratio, track, span),
        )
    return table


def track_of(ratio: LiveRatio, track: int, span: float) -> Text:
    """The interval of the ratio to the baseline as a line on a logarithmic axis from exp(-span) to exp(span), dotted if
    it is within one pair; the ratio as a dot, 1 as a bar."""

    def column(value: float) -> int:
        return min(max(track // 2 + round(math.log(value) / span * (track // 2)), 0), track - 1)

    marks = [" "] * track
    marks[track // 2] = "│"
    if (interval := ratio.ci95 or ratio.within) is not None:
        low, high = map(column, interval)
        for place in range(low, high + 1):
            marks[place] = "┼" if place == track // 2 else "┄" if ratio.ci95 is None else "─"
    if ratio.ratio is not None:
        marks[column(ratio.ratio)] = "●"
    style = "bold" if excludes_one(ratio.ci95) else ""
    return Text("".join(marks), style=style)
