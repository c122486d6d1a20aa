"""Checks on the run as a whole: did it finish, are the answers right, is everything there that is compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import numpy as np

from loadgen.comparison.claims import join
from loadgen.comparison.comparisons import MIN_PAIRS
from loadgen.comparison.facts import PLAN, Facts, cell_scope
from loadgen.quantities import number, share
from loadgen.records.run import Cell, Label, ParityRecord, shown
from loadgen.result.checks.registry import Outcome, check, leading_by_scenario
from loadgen.studies.answers.records import AnswersCompared
from loadgen.studies.fairness.records import CacheProbe
from loadgen.studies.rate_search.records import RatesFound

LEAST_SHARE = 0.9
"""Of a new request's time, in the median: what a repeated one takes on a server that computes each answer."""
SIGNIFICANCE = 0.005
"""Of the test of one arm: of two arms without a cache 1 % at most is called one, if they repeat faster by chance."""


@check(
    title="the run finished as planned",
    severity="invalidates",
    unknown="invalidates",
    remedy="Run the comparison again and let it finish.",
)
def run_finished(facts: Facts) -> Iterator[Outcome]:
    state = facts.run.state
    if state is None:
        yield Outcome(None, "run.json is missing", threshold="finished", scope=PLAN)
        return
    unfinished = "the run still runs" if facts.run.running else "the run was killed during"
    detail = {
        "running": f"{unfinished}: {state.phase}",
        "finished": "finished",
        "interrupted": f"interrupted during: {state.phase}",
        "failed": f"failed during {state.phase}: {state.error}",
    }[state.state]
    yield Outcome(state.state == "finished", detail, state.state, "finished", PLAN)


@check(
    title="the arms give the same answers",
    severity="invalidates",
    unknown="invalidates",
    remedy="Make every arm serve the same weights, precision and preprocessing; the parity table names the case.",
)
def parity(facts: Facts) -> Iterator[Outcome]:
    record = facts.run.parity
    if record is None or (not record.cases and record.error is None):
        yield Outcome(None, "parity was not measured")
        return
    relative, figures = record.largest_relative_error, parity_figures(record)
    failed = [case.name for case in record.cases if not case.ok]
    if record.error is not None:
        detail = record.error
    elif failed:
        detail = f"{len(failed)} of {len(record.cases)} cases disagree ({', '.join(failed)}); {figures}"
    else:
        detail = f"{figures} over {len(record.cases)} cases"
    yield Outcome(
        record.ok and not failed and record.error is None,
        detail,
        record.lowest_cosine if relative is None else relative,
        record.threshold_cosine if relative is None else record.tolerance_relative,
    )


def parity_figures(record: ParityRecord) -> str:
    """The figures of the worst case, for people."""
    relative, cosine = record.largest_relative_error, f"lowest cosine {record.lowest_cosine or 0.0:.6f}"
    if relative is None or record.tolerance_relative is None:
        return cosine
    return f"largest relative error {relative:.1e} (tolerance {record.tolerance_relative:.1e}), {cosine}"


@check(title="the arms were sent the same payload", severity="invalidates", remedy="Give every arm the same --payload.")
def same_payload(facts: Facts) -> Iterator[Outcome]:
    experiment = facts.run.experiment
    first, *others = experiment.payloads
    if others:
        apart = [arm for arm in experiment.arms[1:] if experiment.payload_of(arm) != first]
        told = ", ".join(f"{shown(arm.label)} {experiment.payload_of(arm)}" for arm in apart)
        detail = f"{shown(experiment.baseline.label)} is sent {first}, {told}: not a comparison of servers"
        yield Outcome(False, detail, ", ".join(experiment.payloads), "equal")
    elif facts.run.blocks or facts.run.cold_starts:
        yield Outcome(True, f"{first} over {experiment.transport}", first, "equal")
    else:
        yield Outcome(None, "nothing was sent", first, "equal")


@check(
    title="no request failed",
    severity="invalidates",
    unknown="invalidates",
    remedy="Read the error messages and the log of the server named.",
)
def request_errors(facts: Facts) -> Iterator[Outcome]:
    """A search has none: it counts a failed request as a late one."""
    for load in facts.loads:
        labels = facts.run.experiment.labels
        sent = {label: sum(b.requests for b in load.blocks if b.label == label) for label in labels}
        errors = sum(block.errors for block in load.blocks)
        silent = [shown(label) for label, requests in sent.items() if not requests]
        found = _errors(
            load.cell, sum(sent.values()), errors, (m for b in load.stored for m in b.record.error_messages)
        )
        if silent:
            detail = f"no request was sent to {join(silent)}"
            found = Outcome(False if errors else None, detail, found.value, 0, load.scope)
        yield found
    for cell in facts.run.experiment.cells:
        if cell.scenario == "ramp":
            trials = [trial for trial in facts.run.trials if trial.cell == cell.name]
            requests, errors = sum(t.requests for t in trials), sum(t.errors for t in trials)
            found = _errors(cell, requests, errors, (m for trial in trials for m in trial.error_messages))
            yield found if requests else Outcome(None, "no request was sent", None, 0, found.scope)


def _errors(cell: Cell, requests: int, errors: int, messages: Iterable[str]) -> Outcome:
    detail = f"{errors:,} of {requests:,} requests failed"
    first = next(iter(messages), None)
    if first is not None:
        detail += f"; first message: {first}"
    return Outcome(not errors, detail, errors / requests if requests else None, 0, cell_scope(cell.name))


@check(
    title="answers under load equal those to the same inputs alone",
    severity="invalidates",
    unknown="invalidates",
    remedy="Look at what that server answers to several requests at once: its speed means nothing while it is wrong.",
)
def answers_under_load(facts: Facts) -> Iterator[Outcome]:
    """None in runs of before answers under load were compared."""
    run = facts.run
    if run.answers is None:
        return
    for cell in run.experiment.cells:
        loaded = {(block.record.label, block.record.restart) for block in run.blocks if block.record.cell == cell.name}
        loaded |= {(trial.label, trial.restart) for trial in run.trials if trial.cell == cell.name}
        if loaded:
            yield _answers(cell, run.experiment.labels, [one for one in run.answers if one.cell == cell.name], loaded)


def _answers(
    cell: Cell, labels: Sequence[Label], found: Sequence[AnswersCompared], loaded: set[tuple[Label, int]]
) -> Outcome:
    wrong = [one for one in found if one.wrong]
    errors = [one.error for one in found if one.error]
    silent = {label for label, _ in loaded - {(one.label, one.restart) for one in found}}
    missing = [shown(label) for label in labels if label in silent]
    if wrong:
        detail = "; ".join(
            f"{sum(one.wrong for one in wrong if one.label == label):,} of "
            f"{sum(one.answers for one in found if one.label == label):,} answers of {shown(label)} are wrong: "
            + next(str(one.fault) for one in wrong if one.label == label)
            for label in dict.fromkeys(one.label for one in wrong)
        )
    elif errors:
        detail = errors[0]
    elif missing:
        detail = f"no answers of {join(missing)} were compared"
    else:
        worst = max((one.relative_max or 0.0 for one in found), default=0.0)
        detail = (
            f"{sum(one.answers for one in found):,} answers ({sum(one.items for one in found):,} items) differ by at "
            f"most {worst:.1e} (tolerance {found[0].tolerance_relative:.1e})"
        )
    checked = not errors and not missing
    return Outcome(
        False if wrong else True if checked else None,
        detail,
        sum(one.wrong for one in found) if checked else None,
        0,
        cell_scope(cell.name),
    )


@check(
    title="a repeated request takes as long as a new one",
    severity="invalidates",
    remedy="Turn off the response cache of that server.",
)
def repeated_requests(facts: Facts) -> Iterator[Outcome]:
    probes = facts.run.cache_probes
    if not probes:
        return
    shares = {probe.label: found for probe in probes if (found := shortened_to(probe)) is not None}
    cached = [probe.label for probe in probes if answers_from_memory(probe)]
    errors = [f"{shown(probe.label)} did not answer it: {probe.error}" for probe in probes if probe.error]
    told = join([f"{share(found)} on {shown(label)}" for label, found in shares.items()])
    detail = "; ".join([*([f"a repeated request takes the time of a new one to {told}"] if told else []), *errors])
    ok = False if cached else None if errors else True
    yield Outcome(ok, detail, min(shares.values(), default=None), LEAST_SHARE)


def shortened_to(probe: CacheProbe) -> float | None:
    """Median share of a new request's time that a repeated one of its group takes; None without a whole probe."""
    return median(median(group) / fresh for fresh, group in _groups(probe)) if probe.fresh_ns else None


def answers_from_memory(probe: CacheProbe) -> bool:
    """Whether repeated requests are faster by what matters and by more than chance (see `chance`)."""
    found = shortened_to(probe)
    return found is not None and found < LEAST_SHARE and chance(probe) < SIGNIFICANCE


def chance(probe: CacheProbe) -> float:
    """One-sided p of new requests being slower. Where none is remembered, the new one of a group has each rank with the
    same probability, so the sum of ranks has a known distribution; it assumes nothing of the times but that groups are
    independent."""
    groups = _groups(probe)
    if not groups:
        return 1.0
    size = len(groups[0][1]) + 1
    ranks = sum(sum(again < fresh for again in group) for fresh, group in groups)
    sums = np.ones(1)
    for _ in groups:
        sums = np.convolve(sums, np.full(size, 1.0 / size))
    return float(sums[ranks:].sum())


def _groups(probe: CacheProbe) -> list[tuple[int, tuple[int, ...]]]:
    each = len(probe.repeated_ns) // max(1, len(probe.fresh_ns))
    return [(fresh, probe.repeated_ns[n * each : (n + 1) * each]) for n, fresh in enumerate(probe.fresh_ns)]


@check(
    title="every planned block is complete",
    severity="invalidates",
    unknown="invalidates",
    remedy="Find out what cut the block short (a dead server, Ctrl-C, a full disk) and run again.",
)
def blocks_complete(facts: Facts) -> Iterator[Outcome]:
    for load in facts.planned:
        planned = len(facts.run.experiment.arms) * load.cell.rounds
        complete = [block for block in load.blocks if block.complete]
        notes = [f"block {block.index}: {block.note}" for block in load.blocks if not block.complete and block.note]
        detail = f"{len(complete)} of {planned} blocks are complete"
        if notes:
            detail += f"; {notes[0]}"
        elif len(complete) < planned and facts.run.partial_blocks:
            lost = sum(partial.requests for partial in facts.run.partial_blocks)
            detail += f"; {lost:,} requests of an unfinished block are not compared"
        ok = len(complete) >= planned and len(complete) == len(load.blocks)
        yield Outcome(ok, detail, len(complete), planned, load.scope)


@check(
    title="every search and ramp came to a value",
    severity="invalidates",
    unknown="invalidates",
    remedy="Choose a bound within every server's reach (--slo-p99-ms), let a ramp go further (--ramp-users), or find "
    "out what cut it short.",
)
def searches_ended(facts: Facts) -> Iterator[Outcome]:
    """One for each round and arm. That no rate holds the bound, or that all do, is no rate to compare."""
    for cell in facts.run.experiment.cells:
        note = ""
        if cell.scenario == "slo":
            rates = [rate for rate in facts.of(RatesFound).rates if rate.cell == cell.name]
            done = sum(rate.ended == "found" for rate in rates)
            for one in [rate for rate in rates if rate.ended in ("none", "highest")][:1]:
                note = f"; {shown(one.label)} " + (
                    f"is late even at {number(one.failed_rate_per_s or 0.0)}/s, the lowest rate tried"
                    if one.ended == "none"
                    else f"holds {number(one.rate_per_s or 0.0)}/s, the highest rate tried"
                )
            what = f"searches found a rate{note}"
        elif cell.scenario == "ramp":
            ramps = [ramp for ramp in facts.of(RatesFound).ramps if ramp.cell == cell.name]
            done = sum(ramp.saturated for ramp in ramps)
            for short in [ramp for ramp in ramps if not ramp.saturated and ramp.saturation_per_s is not None][:1]:
                note = f"; {shown(short.label)} still gained with {cell.concurrency} users: raise --ramp-users"
            what = f"ramps reached saturation{note}"
        else:
            continue
        planned = len(facts.run.experiment.arms) * cell.rounds
        yield Outcome(done >= planned, f"{done} of {planned} {what}", done, planned, cell_scope(cell.name))


@check(
    title="no sample was lost",
    severity="invalidates",
    unknown="invalidates",
    remedy="Check the disk and run again: a lost sample hides a slow one.",
)
def samples_complete(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        problems = [block.problem for block in load.stored if block.problem]
        detail = problems[0] if problems else f"{len(load.stored)} sample files agree with their records"
        yield Outcome(not problems, detail, len(problems), 0, load.scope)


@check(
    title="every start came up",
    severity="invalidates",
    unknown="invalidates",
    remedy="Read the log of the server that did not start.",
)
def cold_starts_succeeded(facts: Facts) -> Iterator[Outcome]:
    for cell in facts.run.experiment.cells:
        if cell.scenario != "cold-start":
            continue
        planned, starts = len(facts.run.experiment.arms) * cell.rounds, facts.run.cold_starts
        good = sum(start.error is None and start.first_answer_ns is not None for start in starts)
        errors = [start.error for start in starts if start.error]
        detail = f"{good} of {planned} starts came up" + (f"; first error: {errors[0]}" if errors else "")
        yield Outcome(good >= planned and not errors, detail, good, planned, cell_scope(cell.name))


@check(
    title="enough pairs for an interval",
    severity="warns",
    unknown="warns",
    remedy="Ask for more pairs: 2 are the least, 6 or more are useful.",
)
def enough_pairs(facts: Facts) -> Iterator[Outcome]:
    for scenario, leading in leading_by_scenario(facts.comparisons).items():
        fewest = min(one.pairs for one in leading)
        detail = f"{fewest} complete pair{'' if fewest == 1 else 's'}"
        yield Outcome(fewest >= MIN_PAIRS, detail, fewest, MIN_PAIRS, cell_scope(scenario))
