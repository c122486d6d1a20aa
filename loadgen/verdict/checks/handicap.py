"""Checks that no arm is slow because of its own configuration."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.comparison.claims import join
from loadgen.comparison.facts import RUN, Facts, workload_scope
from loadgen.experiment.schedule import load_workloads
from loadgen.probes.handicap_analysis import LARGEST_HIDDEN, ArmTuning, HandicapRecord, HandicapsFound, LoadHandicap
from loadgen.quantities import ratio, ratio_interval
from loadgen.records.run import Workload, shown
from loadgen.verdict.checks.registry import Outcome, check


@check(
    "no arm is slower than the same server with its own defaults",
    "invalidates",
    "Remove these settings from the arm, or give --no-handicap-check to compare the arms as they are configured.",
    threshold="within the margin",
)
def handicap(facts: Facts) -> Iterator[Outcome]:
    """One outcome per workload in which an arm is slow, and one for each arm that is not slow or was not compared."""
    stored = facts.run.record_of(HandicapRecord)
    if stored is None:
        return
    slow = [one for one in facts.of(HandicapsFound).loads if one.slower]
    for workload in load_workloads(facts.run.experiment.workloads):
        own = [one for one in slow if _stands_for(one, workload)]
        if own:
            detail = "; ".join(f"{shown(one.label)} {slow_words(one)}" for one in own)
            worst = max(one.ratio.ratio for one in own)
            yield Outcome(False, detail, round(worst, 4), scope=workload_scope(workload.name))
    for arm in stored.arms:
        if arm.label not in {one.label for one in slow}:
            yield _not_slow(arm, [one for one in facts.of(HandicapsFound).loads if one.label == arm.label])


def _stands_for(load: LoadHandicap, workload: Workload) -> bool:
    """Whether a load of the probe is like this workload: one user, or several."""
    return (load.users == 1) == (workload.concurrency == 1 and not workload.is_open)


def slow_words(load: LoadHandicap) -> str:
    """The end of a sentence about a slow arm: "is slowed by its own settings: …"."""
    at = "for one user" if load.users == 1 else f"for {load.users} users"
    plain = (
        f"the same server without them has {ratio(load.ratio.ratio, _bounds(load))} its throughput {at} "
        f"({ratio_interval(_bounds(load))})"
    )
    causes = ", ".join(
        f"{name} {ratio(part.ratio, (part.low, part.high))}" if len(load.explained_by) > 1 else name
        for name, part in load.explained_by
    )
    return f"is slowed by its own settings{f' ({causes})' if causes else ''}: {plain}"


def _bounds(load: LoadHandicap) -> tuple[float, float]:
    return load.ratio.low, load.ratio.high


def _not_slow(arm: ArmTuning, found: list[LoadHandicap]) -> Outcome:
    label = shown(arm.label)
    if arm.reason is not None:
        return Outcome(None, f"{label} {arm.reason}", scope=RUN, severity="informs")
    if not arm.settings:
        return Outcome(True, f"{label} has its server's own defaults", 1.0)
    if not found:
        return Outcome(None, f"{label} was not compared with its plain server")
    worst = max(found, key=lambda one: one.ratio.ratio)
    detail = (
        f"without {join(list(arm.settings))} {label} has {ratio(worst.ratio.ratio, _bounds(worst))} its throughput "
        f"({ratio_interval(_bounds(worst))})"
    )
    hidden = max(one.ratio.high for one in found)
    return Outcome(True if hidden <= LARGEST_HIDDEN else None, detail, round(worst.ratio.ratio, 4))
