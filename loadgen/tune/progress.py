"""What `abserve tune` shows while it measures: one line per target with the best so far, and what happens now."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.base.documents import one_line
from loadgen.base.quantities import counted
from loadgen.records.run import Label
from loadgen.records.tuning import Space, TuningRun
from loadgen.report.progress import BELOW_THE_TIME, MovingLine, clock
from loadgen.tune.outcome import settings_in_words, times_in_words
from loadgen.tune.race import RaceProgress
from loadgen.tune.search import RaceLead
from loadgen.tune.space import size


class RichRaceProgress(MovingLine, RaceProgress):
    """Leaves the lines of the race on the screen at the end; a log gets them after every run."""

    def __init__(self, console: Console, spaces: Sequence[Space]) -> None:
        self._sizes = {space.target: size(space) for space in spaces}
        self._leads: Sequence[RaceLead] = ()
        self._stage = ""
        super().__init__(console)

    def _leave(self) -> None:
        if self._console.is_terminal:
            self._print_leads()

    def stage_begins(self, title: str) -> None:
        """Print what is measured next."""
        self._stage, self._now = title, ""
        self._say(f"{clock(self._elapsed())}  {title}{'' if self._console.is_terminal else self._left()}", "bold")

    def time_left(self, seconds: float) -> None:
        """Update the estimate of the time left."""
        self._ends_at = monotonic() + seconds

    def now(self, text: str) -> None:
        """Change the moving line; a log does not get it."""
        self._now = text

    def arm_left_out(self, label: Label, why: str) -> None:
        """Say that a contender is out."""
        self._say(f"{label} is out: {one_line(why)}", "red", BELOW_THE_TIME)

    def run_done(self, run: TuningRun, leads: Sequence[RaceLead]) -> None:
        """Update the lines of the race."""
        self._leads = leads
        if run.problem is not None:
            self._say(f"this run does not count: {one_line(run.problem)}", "yellow", BELOW_THE_TIME)
        if not self._console.is_terminal:
            self._print_leads()

    def _line(self) -> RenderableType:
        detail = f"{self._stage}: {self._now}" if self._now else self._stage
        self._spinner.update(text=Text(f"{detail}  ({clock(self._elapsed()).strip()}{self._left()})"))
        lines = [Text(lead_in_words(lead, self._sizes[lead.target])) for lead in self._leads]
        return Group(*lines, self._spinner)

    def _print_leads(self) -> None:
        for lead in self._leads:
            self._say(lead_in_words(lead, self._sizes[lead.target]), indent=BELOW_THE_TIME)


def lead_in_words(lead: RaceLead, contenders: int) -> str:
    """ "triton: best so far triton-7, 1.31× (1.22–1.40) of its defaults: max-batch-size=16; 9 of 216 tried, 1 out" """
    out = f", {len(lead.out)} out" if lead.out else ""
    tried = f"{lead.tried:,} of {counted(contenders, 'contender')} tried{out}"
    if lead.best is None:
        why = "all are out" if lead.tried == len(lead.out) else "nothing keeps the limit so far"
        return f"{lead.target}: {why if lead.tried else 'nothing measured yet'}; {tried}"
    contender = lead.best.contender
    if not contender.settings:
        return f"{lead.target}: its defaults are the best so far; {tried}"
    gain = "" if lead.gain is None else f", {times_in_words(lead.gain)} of its defaults"
    return f"{lead.target}: best so far {contender.name}{gain}: {settings_in_words(contender)}; {tried}"
