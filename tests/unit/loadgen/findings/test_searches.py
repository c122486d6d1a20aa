"""What searches came to follows from their trials alone, finished or cut short."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.findings.rate_search import RateFound, RateSearch, RatesFound, Trial, find_rates
from loadgen.metrics.comparisons import PairedMetric, pair_metrics
from loadgen.metrics.registry import SLO_RATE
from loadgen.records.run import Label, Workload
from tests.unit.loadgen.checks.test_fairness import EXPERIMENT

SLO = Workload(
    scenario="slo", batch_size=1, concurrency=8, requests=459, seconds=1.0, max_seconds=60.0, rounds=2,
    arrivals="poisson", latency_bound_ms=50.0,
)  # fmt: skip


def trial(workload: Workload, label: Label, step: int, *, round_: int = 0, cpu: float = 0.5, **more: object) -> Trial:
    fields: dict[str, object] = {
        "index": step, "workload": workload.name, "round": round_, "restart": 0, "label": label,
        "position": int(label == "b"), "step": step, "concurrency": 8, "started_at": "", "window_start_ns": 0,
        "window_end_ns": 2_000_000_000, "samples": "", "requests": 459, "errors": 0,
        "generator_cpu_ns": int(cpu * 2e9), "throughput_per_s": None, "p50_ms": None, "p99_ms": None,
        "planned": 459, "late": 0, "late_allowed": 0,
    }  # fmt: skip
    return Trial(**{**fields, **more})  # type: ignore[arg-type]


def search(
    label: Label, capacity: float, *, round_: int = 0, cpu: float = 0.5, workload: Workload = SLO
) -> list[Trial]:
    steps: list[Trial] = []
    rate_search = RateSearch(20.0, lowest=459 / 60)
    while (rate := rate_search.next_rate) is not None:
        held = rate <= capacity
        steps.append(trial(workload, label, len(steps), round_=round_, cpu=cpu, rate_per_s=rate, held=held))
        rate_search.record(held)
    return steps


def paired_in(workload: Workload, rates: Sequence[RateFound]) -> list[PairedMetric]:
    figures = RatesFound(rates=tuple(rates)).figures()
    return pair_metrics(msgspec.structs.replace(EXPERIMENT, workloads=(workload,)), (), figures)


def test_rates_and_their_pairs() -> None:
    trials = [*search("a", 300.0), *search("b", 150.0), *search("a", 310.0, round_=1), *search("b", 155.0, round_=1)]
    rates = find_rates([SLO], trials)
    assert [(rate.round, rate.label, rate.ended) for rate in rates] == [
        (0, "a", "found"), (0, "b", "found"), (1, "a", "found"), (1, "b", "found"),
    ]  # fmt: skip
    assert all(
        rate.rate_per_s and rate.failed_rate_per_s and rate.failed_rate_per_s / rate.rate_per_s <= 1.05
        for rate in rates
    )
    assert rates[0].seconds == 2.0 * rates[0].trials
    (paired,) = paired_in(SLO, rates)
    assert paired.metric == SLO_RATE
    assert [0.45 < pair.ratio < 0.55 for pair in paired.pairs] == [True, True]


def test_a_search_that_was_cut_short_has_no_rate() -> None:
    (rate,) = find_rates([SLO], search("a", 300.0)[:-1])
    assert (rate.rate_per_s, rate.ended) == (None, None)
    (paired,) = paired_in(SLO, [rate])
    assert paired.pairs == ()


def test_nothing_holds() -> None:
    (rate,) = find_rates([SLO], search("a", 1.0))
    assert (rate.ended, rate.rate_per_s) == ("none", None)


def test_a_busy_generator_is_told() -> None:
    assert [rate.client_limited for rate in find_rates([SLO], search("a", 300.0, cpu=0.95))] == [True]


def test_several_generator_processes_share_the_load() -> None:
    trials = [msgspec.structs.replace(trial, generator_processes=4) for trial in search("a", 300.0, cpu=2.0)]
    assert [rate.client_limited for rate in find_rates([SLO], trials)] == [False]
