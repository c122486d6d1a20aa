"""When and why the load of a run ended, and what its intervals include, in sentences for every report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from loadgen.comparison.comparisons import Comparison
from loadgen.experiment.schedule import load_workloads
from loadgen.quantities import counted, number
from loadgen.records.run import Experiment, Record, RunState

WORTH_SAYING = 0.2
"""A correlation that makes an interval a fifth wider."""
ONE_START = "The servers were started once, so the intervals do not include what a restart changes."


class Stopping(Record, frozen=True, kw_only=True):
    """The rule that was set before the run, and how the run ended."""

    rule: Literal["planned", "by time", "until decided"]
    ended_by: Literal["plan", "time", "decided", "time limit"] | None
    """None if the run did not end by itself."""
    time_limit_minutes: float | None
    """Time limit of the load, with the rule "until decided"."""
    restarts: int
    """Fresh starts of the servers."""
    pairs: dict[str, int]
    """Complete pairs of blocks by scenario; the fewest, with several arms."""
    undecided: tuple[str, ...]
    """Scenarios in which a leading comparison with the baseline is inconclusive."""
    sentence: str
    """How it ended."""
    coverage: str
    """What the intervals include and leave out."""


def describe_stopping(experiment: Experiment, state: RunState | None, comparisons: Sequence[Comparison]) -> Stopping:
    """Describe the end of a run by the comparisons before the checks, which do not affect when to stop."""
    names = [workload.name for workload in load_workloads(experiment.workloads)]
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
        coverage=_coverage(experiment, ended, leading) if pairs else "",
    )


def _sentence(experiment: Experiment, ended: str | None, pairs: dict[str, int], undecided: Sequence[str]) -> str:
    if not pairs:
        return "No round of blocks was planned."
    fewest, most = min(pairs.values()), max(pairs.values())
    count = counted(fewest, "round") if fewest == most else f"{fewest} to {most} rounds"
    if ended == "decided":
        return f"Stopped when every workload was decided, after {count} of each."
    if ended == "time limit":
        limit = number(experiment.time_limit_minutes or 0.0)
        names = ", ".join(undecided)
        return f"Stopped by the time limit of {limit} minutes of load, after {count} of each; inconclusive: {names}."
    if ended is None:
        return f"Ended early, after {count} of each workload."
    starts = f" over {experiment.restarts} starts of the servers" if experiment.restarts > 1 else ""
    cold = sum(workload.rounds for workload in experiment.workloads if workload.scenario == "cold-start")
    apart = f", {cold} of cold starts" if cold and cold != fewest else ""
    if ended == "time":
        return f"As many rounds as {experiment.minutes:g} minutes allowed: {count} of each workload{starts}{apart}."
    return f"As planned: {count} of each workload{starts}{apart}."


def _coverage(experiment: Experiment, ended: str | None, leading: Sequence[Comparison]) -> str:
    # A run that ended early may not have come to its second start.
    restarted = experiment.restarts > 1 if ended is not None else any(c.restarts > 1 for c in leading)
    text = "The intervals include what a restart changes." if restarted else ONE_START
    if experiment.until_decided:
        text = f"The intervals allow for being computed after every round. {text}"
    correlation = max((c.correlation for c in leading), default=0.0)
    if correlation < WORTH_SAYING:
        return text
    return f"{text} They are wide enough for a correlation of successive rounds of up to {correlation:.1f}."
