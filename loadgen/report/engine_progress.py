"""The progress of a matrix of engines: a line per visit, and on a terminal what happens now and how long it takes."""

from __future__ import annotations

from statistics import median
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from loadgen.quantities import number, per_second
from loadgen.report.progress import clock
from loadgen.studies.engines.plan import NO_MODEL
from loadgen.studies.engines.progress import Progress, name_of
from loadgen.studies.engines.records import Configuration, Measured, Visit


class EngineProgress(Progress):
    """A context manager that always gives the terminal back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = monotonic()
        self._ends_at: float | None = None
        self._now = ""
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._line, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> EngineProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def now(self, text: str) -> None:
        """Change the moving line; a log gets a line of preparations alone, since every visit has its own."""
        self._now = text
        if not self._console.is_terminal and not text.startswith("round "):
            self._say(text)

    def visit_done(self, configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        """Print one visit: its rate at the largest cell, or why it failed."""
        self._ends_at = monotonic() + seconds_left
        faults = [one.fault for one in visit.cells if one.fault is not None and configuration.engine != NO_MODEL]
        text = f"{done}/{of}  {name_of(configuration)}: {_rates(visit)}"
        left = "" if self._console.is_terminal or done == of else f"  (about {clock(seconds_left).strip()} left)"
        self._say(text + left)
        for problem, style in ((visit.error, "red"), (faults[0] if faults else None, "red")):
            if problem is not None:
                self._say(f"! {problem}", style)

    def _line(self) -> Spinner:
        left = ""
        if self._ends_at is not None:
            remaining = self._ends_at - monotonic()
            left = f", about {clock(remaining).strip()} left" if remaining > 0 else ", almost done"
        text = f"{clock(monotonic() - self._started).strip()}{left}  {self._now}"
        self._spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _say(self, text: str, style: str = "") -> None:
        line = Text(text, style=style)
        self._console.print(line, soft_wrap=not self._console.is_terminal)  # a log has no width


def _rates(visit: Visit) -> str:
    """The rates of the smallest and the largest cell of a visit."""
    if not visit.cells:
        return "failed"
    ordered = sorted(visit.cells, key=lambda one: (one.length or 0, one.batch))
    chosen = ordered[:1] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    return ", ".join(f"{_named(one)} {number(_rate(one))} {per_second(visit.item)}" for one in chosen)


def _named(one: Measured) -> str:
    return f"batch {one.batch}" + ("" if one.length is None else f" × {one.length}")


def _rate(one: Measured) -> float:
    return one.batch / median(one.executions_ns or one.calls_ns) * 1e9
