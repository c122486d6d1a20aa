"""What `abserve engines` shows while it measures."""

from __future__ import annotations

from statistics import median
from time import monotonic

from rich.spinner import Spinner
from rich.text import Text

from loadgen.base.quantities import number, per_second
from loadgen.engines.analyse import samples_ns
from loadgen.records.matrix import NO_MODEL, Configuration, Measured, Visit, described
from loadgen.report.progress import MovingLine, clock


class EngineProgress(MovingLine):
    """What `abserve engines` shows while it measures."""

    def now(self, text: str) -> None:
        """Change the moving line; a log gets a line only for preparations, because every visit has its own line."""
        self._now = text
        if not self._console.is_terminal and not text.startswith("round "):
            self._say(text)

    def visit_done(self, configuration: Configuration, visit: Visit, done: int, of: int, seconds_left: float) -> None:
        """Print one visit: its rate at the largest cell, or why it failed."""
        self._ends_at = monotonic() + seconds_left
        faults = [cell.fault for cell in visit.cells if cell.fault is not None and configuration.engine != NO_MODEL]
        text = f"{done}/{of}  {described(configuration)}: {_rates(visit, configuration.device)}"
        left = "" if self._console.is_terminal or done == of else f"  (about {clock(seconds_left).strip()} left)"
        self._say(text + left)
        for problem, style in ((visit.error, "red"), (faults[0] if faults else None, "red")):
            if problem is not None:
                self._say(f"! {problem}", style)

    def _line(self) -> Spinner:
        text = f"{clock(self._elapsed()).strip()}{self._left()}  {self._now}"
        self._spinner.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        return self._spinner


def _rates(visit: Visit, device: str) -> str:
    """The rates of the smallest and the largest cell of a visit."""
    if not visit.cells:
        return "failed"
    ordered = sorted(visit.cells, key=lambda cell: (cell.length or 0, cell.batch))
    chosen = ordered[:1] if len(ordered) == 1 else [ordered[0], ordered[-1]]
    return ", ".join(
        f"{_named(comparison)} {number(_rate(comparison, device))} {per_second(visit.item)}" for comparison in chosen
    )


def _named(cell: Measured) -> str:
    return f"batch {cell.batch}" + ("" if cell.length is None else f" × {cell.length}")


def _rate(cell: Measured, device: str) -> float:
    return cell.batch / median(samples_ns(cell, device)) * 1e9
