"""From the visits of an engine matrix to what they say; a pure function, also for interrupted runs.

Latency is the geometric mean over rounds of each round's median, with a 95 % t interval on logs over rounds; which
times count is in `cells.samples_ns`.
Speed-ups and the ratios of winners are paired by round. A cell whose answers are wrong, or whose cosine or top-1
agreement is below the plan's limits, is shown and never wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from loadgen.engine_matrix.break_even import break_even
from loadgen.engine_matrix.cells import (
    Cell,
    baseline_cell,
    cells_of,
    estimate,
    first_call_ns,
    ratios,
    samples_ns,
    worst,
)
from loadgen.engine_matrix.questions import answers
from loadgen.engine_matrix.records import (
    CellResult,
    ConfigurationResult,
    Conversion,
    Estimate,
    Matrix,
    Plan,
    Visit,
    Winner,
)
from loadgen.records.run import Environment, RunState
from loadgen.stats.percentiles import percentile
from loadgen.stats.ratios import SIGNIFICANCE, RatioEstimate, adjust_holm, estimate_ratio, geometric_mean

MOST_WAITING = 2.0
"""Times its latency that a batch may take while its energy is measured."""
NO_MARGIN = 1.0
"""`estimate_ratio` also tests for equivalence, which is not used here."""


def analyse(plan: Plan, environment: Environment, visits: Sequence[Visit], state: RunState | None) -> Matrix:
    """Everything that the visits so far say. `state` None: the run was killed before it could write one."""
    found = cells_of(plan, visits)
    by_place = {(one.configuration, one.shape): one for one in found}
    configurations = tuple(_configuration(plan, place, visits) for place in range(len(plan.configurations)))
    return Matrix(
        state=state,
        environment=environment,
        plan=plan,
        configurations=configurations,
        cells=tuple(_result(plan, one, baseline_cell(plan, by_place, one)) for one in found),
        winners=winners(plan, found),
        break_even=break_even(plan, configurations, visits, by_place),
        answers=answers(plan, found),
    )


def _result(plan: Plan, one: Cell, baseline: Cell | None) -> CellResult:
    measured = one.measured
    latency = estimate(list(one.latencies_ns.values()))
    assert latency is not None  # a cell has at least one round with calls
    call = estimate([float(median(m.calls_ns)) for m in measured])
    assert call is not None
    device = plan.configurations[one.configuration].device
    energies = [m for m in measured if m.energy_joules and m.energy_items]
    energy = estimate([m.energy_joules / m.energy_items for m in energies if m.energy_joules])
    sustained = estimate([float(m.sustained_ns) for m in energies if m.sustained_ns])
    waited = sustained is not None and sustained.value > MOST_WAITING * latency.value
    flops = next((m.flops_per_item for m in measured if m.flops_per_item is not None), None)
    fault = next((m.fault for m in measured if m.fault is not None), None)
    return CellResult(
        configuration=one.configuration,
        batch=one.batch,
        length=one.length,
        rounds=len(measured),
        latency_ns=latency,
        call_ns=call,
        p99_ns=_p99_ns([samples_ns(m, device) for m in measured]),
        items_per_second=_rate(one.batch, latency),
        speedup=None if baseline is None or fault else estimate(ratios(one, baseline)),
        tflops=None if flops is None else one.batch * flops / latency.value / 1e3,
        first_call_seconds=first_call_ns(plan, one) / 1e9,
        cosine_min=worst((m.cosine_min for m in measured), min),
        top1=worst((m.top1 for m in measured), min),
        relative_error=worst((m.relative_error for m in measured), max),
        fault=fault,
        excluded=one.excluded,
        allocated_bytes=max((m.allocated_bytes for m in measured if m.allocated_bytes is not None), default=None),
        reserved_bytes=max((m.reserved_bytes for m in measured if m.reserved_bytes is not None), default=None),
        process_device_bytes=max(
            (m.process_device_bytes for m in measured if m.process_device_bytes is not None), default=None
        ),
        rss_bytes=max((m.rss_bytes for m in measured if m.rss_bytes is not None), default=None),
        joules_per_item=None if waited else energy,
        sustained_ns=sustained,
        kernels=next((m.kernels for m in measured if m.kernels), ()),
    )


def _p99_ns(rounds: Sequence[Sequence[int]]) -> int | None:
    """Of all rounds together."""
    value = percentile([sample for samples in rounds for sample in samples], 0.99)
    return None if value is None else round(value)


def _rate(batch: int, latency: Estimate) -> Estimate:
    def per_second(ns: float | None) -> float | None:
        return None if not ns else batch / ns * 1e9

    return Estimate(value=batch / latency.value * 1e9, low=per_second(latency.high), high=per_second(latency.low))


def _configuration(plan: Plan, place: int, visits: Sequence[Visit]) -> ConfigurationResult:
    own = sorted((one for one in visits if one.configuration == place), key=lambda one: one.round)
    started = [one for one in own if one.description]  # also those of which one cell failed
    described = next(iter(started), None)
    timed = {(one.batch, one.length) for visit in own for one in visit.cells if one.calls_ns}
    untimed = dict.fromkeys(
        f"batch {one.batch}{'' if one.length is None else f', length {one.length}'}: {one.fault or 'no timed call'}"
        for visit in own
        for one in visit.cells
        if (one.batch, one.length) not in timed
    )
    conversions: list[Conversion] = []
    for visit in started:
        known = {one.step for one in conversions}
        conversions += [one for one in visit.conversions if one.step not in known]
    return ConfigurationResult(
        configuration=plan.configurations[place],
        item=described.item if described else "item",
        description=described.description if described else {},
        load_seconds=estimate([one.load_seconds for one in started if one.load_seconds]),
        conversions=tuple(conversions),
        errors=(*(f"round {one.round}: {one.error}" for one in own if one.error is not None), *untimed),
    )


def winners(plan: Plan, found: Sequence[Cell]) -> tuple[Winner, ...]:
    """The fastest ranked configuration of every (model, device, threads, batch, length).

    It is certain if it is faster than *every* other ranked configuration there: its p is the largest of the paired
    tests against them (an intersection-union test; Berger, Technometrics 24, 1982), adjusted by Holm's method over all
    winners of the matrix. Of two equal configurations only one can beat the other, so choosing the fastest first does
    not raise the chance of a false certain winner.
    """
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for one in found:
        configuration = plan.configurations[one.configuration]
        if one.excluded is None:
            groups.setdefault((*configuration.group, configuration.threads, *one.shape), []).append(one)
    drafts = [_winner(plan, cells) for cells in groups.values()]
    adjusted = adjust_holm([p_value for _, p_value in drafts])
    return tuple(
        replace(winner, certain=True, unbeaten=None) if p_value is not None and p_value < SIGNIFICANCE else winner
        for (winner, _), p_value in zip(drafts, adjusted, strict=True)
    )


def _winner(plan: Plan, cells: Sequence[Cell]) -> tuple[Winner, float | None]:
    """The winner among cells of one shape, and the p of "it is not faster than every other"; None without a test."""
    best = min(cells, key=lambda one: geometric_mean(list(one.latencies_ns.values())))
    # Of an interrupted run some cells have fewer rounds; the rounds that two cells share decide between them.
    best = next((one for one in cells if all(_over(one, other) > 1.0 for other in cells if other is not one)), best)
    tests = {
        other.configuration: estimate_ratio(ratios(best, other), NO_MARGIN) for other in cells if other is not best
    }
    known = {place: one for place, one in tests.items() if one.ratio is not None}
    runner_up = min(known, key=lambda place: known[place].ratio or 0.0, default=None)
    p_values = {place: _p_value(one) for place, one in tests.items()}
    unbeaten = max(p_values, key=lambda place: p_values[place], default=None)
    configuration = plan.configurations[best.configuration]
    winner = Winner(
        model=configuration.model,
        device=configuration.device,
        threads=configuration.threads,
        batch=best.batch,
        length=best.length,
        configuration=best.configuration,
        runner_up=runner_up,
        ratio=None if runner_up is None else as_estimate(known[runner_up]),
        certain=False,
        unbeaten=unbeaten,
    )
    return winner, None if unbeaten is None or p_values[unbeaten] == math.inf else p_values[unbeaten]


def _p_value(found: RatioEstimate) -> float:
    """The p of "it is not faster", two-sided because the winner comes from the same data; infinite without a test."""
    if (found.ratio or 0.0) <= 1.0:
        return 1.0
    return math.inf if found.p_value is None else found.p_value


def _over(one: Cell, other: Cell) -> float:
    """How much faster one cell is in the rounds that both have; 0 without such a round."""
    shared = ratios(one, other)
    return geometric_mean(shared) if shared else 0.0


def as_estimate(found: RatioEstimate) -> Estimate:
    low, high = found.ci95 or (None, None)
    return Estimate(value=found.ratio or 0.0, low=low, high=high)
