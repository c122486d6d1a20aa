"""What searches and ramps came to follows from their trials alone, finished or cut short."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.metrics.comparisons import PairedMetric, pair_metrics
from loadgen.metrics.registry import SATURATION, SLO_RATE
from loadgen.probes.rate_search_analysis import (
    RampFound,
    RateFound,
    RateSearch,
    RatesFound,
    Trial,
    find_ramps,
    find_rates,
)
from loadgen.records.run import Label, Workload
from tests.unit.loadgen.verdict.test_fairness import EXPERIMENT

SLO = Workload(
    scenario="slo", batch_size=1, concurrency=8, requests=459, seconds=1.0, max_seconds=60.0, rounds=2,
    arrivals="poisson", latency_bound_ms=50.0,
)  # fmt: skip
RAMP = Workload(scenario="ramp", batch_size=1, concurrency=64, requests=20, seconds=1.0, max_seconds=9.0, rounds=1)


def trial(workload: Workload, label: Label, step: int, *, round_: int = 0, cpu: float = 0.5, **more: object) -> Trial:
    fields: dict[str, object] = {
        "index": step, "workload": workload.name, "round": round_, "restart": 0, "label": label,
        "position": int(label == "b"), "step": step, "concurrency": 8, "started_at": "", "window_start_ns": 0,
        "window_end_ns": 2_000_000_000, "samples": "", "requests": 459, "errors": 0,
        "generator_cpu_ns": int(cpu * 2e9), "throughput_per_s": None, "p50_ms": None, "p99_ms": None,
    }  # fmt: skip
    return Trial(**{**fields, **more})  # type: ignore[arg-type]


def search(
    label: Label, capacity: float, *, round_: int = 0, cpu: float = 0.5, workload: Workload = SLO
) -> list[Trial]:
    steps: list[Trial] = []
    rate_search = RateSearch(20.0, lowest=459 / 60)
    while (rate := rate_search.next_rate) is not None:
        held = rate <= capacity
        steps.append(
            trial(workload, label, len(steps), round_=round_, cpu=cpu, rate_per_s=rate, held=held, planned=459, late=0)
        )
        rate_search.record(held)
    return steps


def climb(label: Label, capacity: float, users: int, cpu: float = 0.5) -> list[Trial]:
    rungs = []
    for step in range(users.bit_length()):
        speed = min(100.0 * 2**step, capacity)
        rungs.append(
            trial(
                RAMP, label, step, cpu=cpu, concurrency=2**step, throughput_per_s=speed, p50_ms=1000 * 2**step / speed
            )
        )
    return rungs


def paired_in(
    workload: Workload, *, rates: Sequence[RateFound] = (), ramps: Sequence[RampFound] = ()
) -> list[PairedMetric]:
    figures = RatesFound(rates=tuple(rates), ramps=tuple(ramps)).figures()
    return pair_metrics(msgspec.structs.replace(EXPERIMENT, workloads=(workload,)), (), figures)


def test_rates_and_their_pairs() -> None:
    trials = [*search("a", 300.0), *search("b", 150.0), *search("a", 310.0, round_=1), *search("b", 155.0, round_=1)]
    rates = find_rates([SLO, RAMP], trials)
    assert [(rate.round, rate.label, rate.ended) for rate in rates] == [
        (0, "a", "found"), (0, "b", "found"), (1, "a", "found"), (1, "b", "found"),
    ]  # fmt: skip
    assert all(
        rate.rate_per_s and rate.failed_rate_per_s and rate.failed_rate_per_s / rate.rate_per_s <= 1.05
        for rate in rates
    )
    assert rates[0].seconds == 2.0 * rates[0].trials
    (paired,) = paired_in(SLO, rates=rates)
    assert paired.metric == SLO_RATE
    assert [0.45 < pair.ratio < 0.55 for pair in paired.pairs] == [True, True]


def test_a_search_that_was_cut_short_has_no_rate() -> None:
    (rate,) = find_rates([SLO], search("a", 300.0)[:-1])
    assert (rate.rate_per_s, rate.ended) == (None, None)
    (paired,) = paired_in(SLO, rates=[rate])
    assert paired.pairs == ()


def test_nothing_holds() -> None:
    (rate,) = find_rates([SLO], search("a", 1.0))
    assert (rate.ended, rate.rate_per_s) == ("none", None)


def test_a_busy_generator_is_told() -> None:
    assert [rate.client_limited for rate in find_rates([SLO], search("a", 300.0, cpu=0.95))] == [True]
    assert [ramp.client_limited for ramp in find_ramps([RAMP], climb("a", 800.0, 32, cpu=0.95))] == [True]


def test_several_generator_processes_share_the_load() -> None:
    trials = [msgspec.structs.replace(trial, generator_processes=4) for trial in search("a", 300.0, cpu=2.0)]
    assert [rate.client_limited for rate in find_rates([SLO], trials)] == [False]


def test_ramps_and_their_pairs() -> None:
    ramps = find_ramps([SLO, RAMP], [*climb("a", 800.0, 32), *climb("b", 400.0, 16)])
    assert [(ramp.label, ramp.saturation_per_s, ramp.knee_concurrency, ramp.saturated) for ramp in ramps] == [
        ("a", 800.0, 8, True), ("b", 400.0, 4, True),
    ]  # fmt: skip
    (paired,) = paired_in(RAMP, ramps=ramps)
    assert paired.metric == SATURATION
    assert [pair.ratio for pair in paired.pairs] == [0.5]


def test_a_ladder_too_short_says_so() -> None:
    (ramp,) = find_ramps([RAMP], climb("a", 1e9, 64))
    assert (ramp.saturated, ramp.saturation_per_s, ramp.knee_concurrency) == (False, 6400.0, 64)
    (cut,) = find_ramps([RAMP], climb("a", 1e9, 8))
    assert (cut.saturated, cut.saturation_per_s) == (False, None)
    broken = [*climb("a", 800.0, 16), msgspec.structs.replace(climb("a", 800.0, 32)[-1], note="the server died")]
    (died,) = find_ramps([RAMP], broken)
    assert len(died.rungs) == 5
