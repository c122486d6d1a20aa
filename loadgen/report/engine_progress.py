"""The progress of a matrix of engines: a line per visit, and on a terminal what happens now and how long it takes."""

from __future__ import annotations

from statistics import median
from time import monotonic

from rich.spinner import Spinner
from rich.text import Text

from loadgen.engine_matrix.cells import samples_ns
from loadgen.engine_matrix.plan import NO_MODEL
from loadgen.engine_matrix.progress import Progress, name_of
from loadgen.engine_matrix.records import Configuration, Measured, Visit
from loadgen.quantities import number, per_second
from loadgen.report.progress import MovingLine, clock


class EngineProgress(MovingLine, Progress):
    """What `abserve engines` shows while it measures."""

    def now(self, text: str) -> None:
        """Change the moving line; a log gets a line of preparations alone, since every visit has its own."""
        self._now = text
        if not self._console.is_terminal and not text.startswith("round "):
            self._say(text)

    def visit_done(self, configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        """Print one visit: its rate at the largest cell, or why it failed."""
        self._ends_at = monotonic() + seconds_left
        faults = [one.fault for one in visit.cells if one.fault is not None and configuration.engine != NO_MODEL]
        text = f"{done}/{of}  {name_of(configuration)}: {_rates(visit, configuration.device)}"
        left = "" if self._console.is_terminal or done == of else f"  (about {clock(seconds_left).strip()} left)"
        self._say(text + left)
        for problem, style in ((visit.error, "red"), (faults[0] if faults else None, "red")):
            if problem is not None:
                self._say(f"! {problem}", style)

    def _line(self) -> Spinner:
        text = f"{clock(self._elapsed()).strip()}{self._left()}  {self._now}"
        self._spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return self._spinner

    def _say(self, text: str, style: str = "") -> None:
        line = Text(text, style=style)
        self._console.print(line, soft_wrap=not self._console.is_terminal)  # a log has no width


def _rates(visit: Visit, device: str) -> str:
    """The rates of the smallest and the largest cell of a visit."""
    if not visit.cells:
        return "failed"
    ordered = sorted(visit.cells, key=lambda one: (one.length or 0, one.batch))
    chosen = ordered[:1] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    return ", ".join(f"{_named(one)} {number(_rate(one, device))} {per_second(visit.item)}" for one in chosen)


def _named(one: Measured) -> str:
    return f"batch {one.batch}" + ("" if one.length is None else f" × {one.length}")


def _rate(one: Measured, device: str) -> float:
    return one.batch / median(samples_ns(one, device)) * 1e9
