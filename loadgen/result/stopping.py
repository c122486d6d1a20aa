"""When the load of a run ended and why, and what its intervals therefore cover, in a sentence for every report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loadgen.comparison.comparisons import Comparison
from loadgen.experiment.schedule import load_cells
from loadgen.quantities import number
from loadgen.records.run import Experiment, Record, RunState

WORTH_SAYING = 0.2
"""A correlation that makes an interval a fifth wider."""


class Stopping(Record, frozen=True, kw_only=True):
    """The rule that was laid down before the run, and how it ended."""

    rule: Literal["planned", "by time", "until decided"]
    ended_by: Literal["plan", "time", "decided", "time limit"] | None
    """None where the run did not end by itself."""
    time_limit_minutes: float | None
    """Of load, where pairs were added until decided."""
    restarts: int
    """Fresh starts of the servers."""
    pairs: dict[str, int]
    """Complete pairs of blocks by scenario; of several arms those that have the fewest."""
    undecided: tuple[str, ...]
    """Scenarios in which a leading comparison with the baseline names neither a winner nor equivalence."""
    sentence: str
    """How it ended."""
    coverage: str
    """What the intervals cover and what not."""


def describe_stopping(experiment: Experiment, state: RunState | None, comparisons: Sequence[Comparison]) -> Stopping:
    """Of the comparisons before any check takes a verdict away: when to stop was decided without the checks."""
    names = [cell.name for cell in load_cells(experiment.cells)]
    baseline = experiment.baseline.label
    leading = [c for c in comparisons if c.leading and c.scenario in names and c.baseline == baseline]
    undecided = tuple(dict.fromkeys(c.scenario for c in leading if c.verdict == "inconclusive"))
    ended: Literal["plan", "time", "decided", "time limit"] | None = None
    if state is not None and state.state == "finished":
        ended = "plan" if experiment.minutes is None else "time"
        if experiment.until_decided:
            ended = "time limit" if undecided else "decided"
    pairs: dict[str, int] = {}
    for c in leading:
        pairs[c.scenario] = min(c.pairs, pairs.get(c.scenario, c.pairs))
    return Stopping(
        rule="until decided" if experiment.until_decided else "planned" if experiment.minutes is None else "by time",
        ended_by=ended,
        time_limit_minutes=experiment.time_limit_minutes,
        restarts=experiment.restarts,
        pairs=pairs,
        undecided=undecided,
        sentence=_sentence(experiment, ended, pairs, undecided),
        coverage=_coverage(experiment) + _resemblance(leading) if pairs else "",
    )


def _sentence(
    experiment: Experiment,
    ended: Literal["plan", "time", "decided", "time limit"] | None,
    pairs: dict[str, int],
    undecided: Sequence[str],
) -> str:
    if not pairs:
        return "No round of blocks was planned."
    fewest, most = min(pairs.values()), max(pairs.values())
    count = f"{fewest} round{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} rounds"
    if experiment.until_decided:
        how = {
            "decided": f"Stopped when every scenario was decided, after {count} each",
            "time limit": f"Stopped by the time limit of {number(experiment.time_limit_minutes or 0.0)} minutes of "
            f"load, after {count} each; undecided: {', '.join(undecided)}",
        }.get(ended or "", f"Ended before it was decided, after {count} each")
        return f"{how}."
    starts = f" over {experiment.restarts} starts of the servers" if experiment.restarts > 1 else ""
    if ended is None:
        return f"Ended before the plan did, after {count} of each scenario{starts}."
    cold = sum(cell.rounds for cell in experiment.cells if cell.scenario == "cold-start")
    apart = f", {cold} of cold starts" if cold and cold != fewest else ""
    if experiment.minutes is not None:
        return f"As many rounds as {experiment.minutes:g} minutes allowed: {count} of each scenario{starts}{apart}."
    return f"As planned: {count} of each scenario{starts}{apart}."


def _coverage(experiment: Experiment) -> str:
    looks = "The intervals hold however often one looks. " if experiment.until_decided else ""
    if experiment.restarts > 1:
        return "The intervals cover what a restart changes."
    return looks + ONE_START


def _resemblance(leading: Sequence[Comparison]) -> str:
    """The allowance that is made in any case is too small to speak of."""
    most = max((c.correlation for c in leading), default=0.0)
    if most < WORTH_SAYING:
        return ""
    return f" Each round resembles the next (correlation up to {most:.1f}), and the intervals are wider for it."


ONE_START = "The servers were started once, so the intervals do not cover what a restart changes."
