"""Checks on searches and ramps: did they end, did requests fail, was the generator the limit."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.outcome import Check, CheckName, cell_scope, make_check
from loadgen.analysis.searches import BUSY
from loadgen.quantities import number, share
from loadgen.records.calibration import CEILING_SHARE_LIMIT, ceiling_images_per_s
from loadgen.records.run import Cell, Label
from loadgen.records.searches import RampFound, RateFound, Trial
from loadgen.storage.stored_run import StoredRun

WAIT_LIMIT = 0.1
"""Of the latency bound, for p99 of the wait to be sent at the rate found."""


def check_searches(run: StoredRun, rates: Sequence[RateFound], ramps: Sequence[RampFound]) -> list[Check]:
    """Of every cell that is one, the checks one after the other."""
    checks: list[Check] = []
    for cell in run.experiment.cells:
        own = [trial for trial in run.trials if trial.cell == cell.name]
        if cell.scenario == "slo":
            found = [rate for rate in rates if rate.cell == cell.name]
            reached = [(one.label, one.rate_per_s) for one in found if one.rate_per_s is not None]
            checks += [_searched(cell, found), _search_generator(cell, found, own), _ceiling(run, cell, reached)]
            checks.append(_connections(cell, found, own))
        elif cell.scenario == "ramp":
            climbed = [ramp for ramp in ramps if ramp.cell == cell.name]
            reached = [(one.label, one.saturation_per_s) for one in climbed if one.saturation_per_s is not None]
            checks += [_errors(cell, own), _climbed(cell, climbed), _ramp_generator(cell, climbed, own)]
            checks += [_ceiling(run, cell, reached)]
    return checks


def _searched(cell: Cell, found: Sequence[RateFound]) -> Check:
    """Every search came to a rate. That none holds, or that all do, is no rate to compare."""
    done = [one for one in found if one.ended == "found"]
    other = [one for one in found if one.ended in ("none", "highest")]
    note = ""
    if other:
        one = other[0]
        note = f"; {one.label.upper()} " + (
            f"is late even at {number(one.failed_rate_per_s or 0.0)}/s, the lowest rate tried"
            if one.ended == "none"
            else f"holds {number(one.rate_per_s or 0.0)}/s, the highest rate tried"
        )
    return _ended(cell, len(done), f"searches found a rate{note}")


def _climbed(cell: Cell, ramps: Sequence[RampFound]) -> Check:
    done = [ramp for ramp in ramps if ramp.saturated]
    short = [ramp for ramp in ramps if not ramp.saturated and ramp.saturation_per_s is not None]
    note = ""
    if short:
        note = f"; {short[0].label.upper()} still gained with {cell.concurrency} users: raise --ramp-users"
    return _ended(cell, len(done), f"ramps reached saturation{note}")


def _ended(cell: Cell, done: int, what: str) -> Check:
    """Whether all of a cell did, one a pair and arm."""
    planned = 2 * cell.pairs
    return make_check(
        CheckName.SEARCHES_ENDED,
        done >= planned,
        scope=cell_scope(cell.name),
        value=done,
        threshold=planned,
        detail=f"{done} of {planned} {what}",
    )


def _errors(cell: Cell, trials: Sequence[Trial]) -> Check:
    """Of a ramp; a search counts a failed request as a late one."""
    requests, errors = sum(t.requests for t in trials), sum(t.errors for t in trials)
    messages = [message for trial in trials for message in trial.error_messages]
    detail = f"{errors:,} of {requests:,} requests failed" + (f"; first message: {messages[0]}" if messages else "")
    return make_check(
        CheckName.REQUEST_ERRORS,
        errors == 0 if requests else None,
        scope=cell_scope(cell.name),
        value=errors / requests if requests else None,
        threshold=0,
        detail=detail if requests else "no request was sent",
    )


def _search_generator(cell: Cell, found: Sequence[RateFound], trials: Sequence[Trial]) -> Check:
    """A rate that failed while the generator was busy may be one that the server holds."""
    limited = [one for one in found if one.client_limited]
    deciding = [
        trial.generator_cpu_share or 0.0
        for trial in trials
        for one in found
        if (one.pair, one.label) == (trial.pair, trial.label) and trial.rate_per_s == one.failed_rate_per_s
    ]
    return _generator(cell, bool(limited), deciding, "the lowest rate that failed")


def _connections(cell: Cell, found: Sequence[RateFound], trials: Sequence[Trial]) -> Check:
    """At the rates found: a request that waits for a free connection waits here and not in the server's queue, as one
    of independent clients would. Its wait counts as latency all the same."""
    bound_ms = cell.latency_bound_ms or 1.0
    lags = [
        trial.send_lag_p99_ms
        for trial in trials
        for one in found
        if (one.pair, one.label, one.rate_per_s) == (trial.pair, trial.label, trial.rate_per_s)
        and trial.held
        and trial.send_lag_p99_ms is not None
    ]
    longest = max(lags, default=None)
    detail = "no trial has requests enough for a p99"
    if longest is not None:
        detail = (
            f"at the rates found, p99 of the wait to be sent was {number(longest)} ms at most, "
            f"{share(longest / bound_ms)} of the bound, with {cell.concurrency} connections"
        )
    return make_check(
        CheckName.CONNECTIONS_FREE,
        None if longest is None else longest / bound_ms <= WAIT_LIMIT,
        scope=cell_scope(cell.name),
        value=None if longest is None else longest / bound_ms,
        threshold=WAIT_LIMIT,
        detail=detail,
    )


def _ramp_generator(cell: Cell, ramps: Sequence[RampFound], trials: Sequence[Trial]) -> Check:
    best = {
        (ramp.pair, ramp.label): max(ramp.rungs, key=lambda rung: rung.throughput_per_s).concurrency
        for ramp in ramps
        if ramp.rungs
    }
    deciding = [
        trial.generator_cpu_share or 0.0 for trial in trials if best.get((trial.pair, trial.label)) == trial.concurrency
    ]
    return _generator(cell, any(ramp.client_limited for ramp in ramps), deciding, "the best rung")


def _generator(cell: Cell, limited: bool, deciding: Sequence[float], where: str) -> Check:
    highest = max(deciding, default=None)
    return make_check(
        CheckName.GENERATOR_CPU,
        None if highest is None else not limited,
        scope=cell_scope(cell.name),
        value=highest,
        threshold=BUSY,
        detail="its CPU time is unknown" if highest is None else f"it used {share(highest)} of a core at {where}",
    )


def _ceiling(run: StoredRun, cell: Cell, reached: Sequence[tuple[Label, float]]) -> Check:
    """What the arms reached against the most that this generator can ask for here, by `abserve calibrate`."""
    experiment, worst = run.experiment, None
    for label, speed in reached:
        payload = experiment.payload_of(experiment.a if label == "a" else experiment.b)
        ceiling = None
        if run.calibration is not None:
            ceiling = ceiling_images_per_s(
                run.calibration, experiment.transport, payload, cell.batch_size, experiment.processes
            )
        if ceiling:
            worst = max(worst or (0.0, label, speed, ceiling), (speed / ceiling, label, speed, ceiling))
    if worst is None:
        detail = "no calibration of this machine" if run.calibration is None else "the calibration has no such cell"
    else:
        used, label, speed, ceiling = worst
        detail = (
            f"{label.upper()} reached {number(speed)} images/s, {share(used)} of the {number(ceiling)} that the "
            "generator was calibrated for"
        )
    return make_check(
        CheckName.GENERATOR_CEILING,
        None if worst is None else worst[0] <= CEILING_SHARE_LIMIT,
        scope=cell_scope(cell.name),
        value=None if worst is None else worst[0],
        threshold=CEILING_SHARE_LIMIT,
        detail=detail,
    )
