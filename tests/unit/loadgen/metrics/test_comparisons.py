"""The verdict rule, metric by metric."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.base.quantities import excludes_one, ratio
from loadgen.checks.registry import CHECKS
from loadgen.measure.progress import LiveRatios
from loadgen.metrics.comparisons import (
    LEADING_SHARE,
    Comparison,
    Method,
    Outcome,
    Pair,
    PairedMetric,
    adjust,
    as_measured,
    compare_all,
    estimate_pairs,
    judge,
    roughen,
    seen_correlations,
)
from loadgen.metrics.registry import METRICS, leading_metric, metrics_of
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.run import ArmRequest, Experiment, Figure, Pairing, Workload
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run
from tests.truth.simulated_runs import experiment as simulated
from tests.truth.simulated_runs import plain, simulate, simulate_blocks


@pytest.mark.parametrize(
    ("ci95", "p_adjusted", "higher", "verdict"),
    [
        ((0.98, 1.02), 0.9, True, "no_difference"),
        ((1.001, 1.04), 0.001, True, "no_difference"),
        ((1.10, 1.20), 0.001, True, "arm_better"),
        ((1.10, 1.20), 0.001, False, "baseline_better"),
        ((0.80, 0.90), 0.001, True, "baseline_better"),
        ((0.80, 0.90), 0.001, False, "arm_better"),
        ((1.10, 1.20), 0.06, True, "inconclusive"),
        ((0.90, 1.20), 0.30, True, "inconclusive"),
        (None, None, True, "inconclusive"),
    ],
)
def test_the_rule(ci95: tuple[float, float] | None, p_adjusted: float | None, higher: bool, verdict: str) -> None:
    assert judge(ci95, p_adjusted, 0.05, higher) == verdict


def test_a_planted_difference_is_found_and_named(tmp_path: Path) -> None:
    """B executes in 5 + 6n ms and A in 6 + 9n: served one at a time, 16 against 13.5 ms with the transport."""
    result = analyse(write_run(tmp_path))
    by_metric = {(c.workload, c.metric): c for c in result.comparisons}
    single = by_metric["single", "throughput"]
    assert single.verdict == "arm_better"
    assert single.ci95 is not None
    assert single.ci95[0] < 16.05 / 13.625 < single.ci95[1]
    assert by_metric["single", "latency_p50"].verdict == "arm_better"
    assert by_metric["cold-start", "time_to_ready"].verdict == "baseline_better"
    assert by_metric["cold-start", "time_to_ready"].unit == "s"


def test_values_and_ratio_belong_together(tmp_path: Path) -> None:
    for c in analyse(write_run(tmp_path)).comparisons:
        if c.ratio is None:
            assert c.baseline_value is None
            assert c.arm_value is None
            assert c.verdict == "inconclusive"
            assert c.reason
        else:
            assert c.baseline_value is not None
            assert c.arm_value is not None
            assert c.arm_value / c.baseline_value == pytest.approx(c.ratio)
            assert len(c.ratios) == c.pairs or "order statistics" in c.method


def test_a_percentile_without_the_samples_says_how_many_it_needs(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(requests=40, pairs=2)))
    p99 = next(c for c in result.comparisons if (c.workload, c.metric) == ("concurrent(16)", "latency_p99"))
    assert p99.ratio is None
    assert "662 samples per arm; one arm has 18" in (p99.reason or "")


@pytest.mark.parametrize(("rate", "leads", "ok"), [(40.0, "latency_p90", False), (18.0, "latency_p50", True)])
def test_a_replay_is_led_by_a_percentile_that_its_rate_supports(
    tmp_path: Path, rate: float, leads: str, ok: bool
) -> None:
    workload = Workload(
        scenario="traffic", batch_size=1, concurrency=4, requests=18, seconds=1.0, max_seconds=1.0, rounds=3,
        arrivals="trace", rate_per_s=rate, traffic="traffic",
    )  # fmt: skip
    assert leading_metric(msgspec.structs.replace(workload, requests=100, max_seconds=30.0)).name == leads
    result = analyse(write_run(tmp_path, Plan(pairs=3, workloads=(workload,))))
    assert [c.metric for c in result.comparisons if c.leading] == [leads]
    [check] = [check for check in result.checks if check.name == "enough_pairs"]
    assert (check.ok, check.title == CHECKS["enough_pairs"].not_known) == (ok, False)
    assert ("--open-seconds" in check.remedy, "3 complete rounds" in check.detail) == (not ok, True)


def test_one_pair_decides_nothing(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=1)))
    assert {c.verdict for c in result.comparisons} == {"inconclusive"}
    assert any(c.name == "enough_pairs" and c.ok is False for c in result.checks)


def test_identical_arms_are_not_told_apart(tmp_path: Path) -> None:
    arm = SimulatedArm()
    result = analyse(write_run(tmp_path, Plan(a=arm, b=arm, seed=5)))
    assert result.valid
    assert {c.verdict for c in result.comparisons} <= {"no_difference", "inconclusive"}
    assert result.verdict.sentence.startswith("No winner")


def plant_a_tail(directory: Path, label: str) -> None:
    """Every fiftieth answer of an arm takes 60 ms longer; its median and its throughput stay as they are."""
    for path in sorted((directory / "blocks").glob("*.json")):
        block = json.loads(path.read_text())
        if block["label"] == label:
            samples = np.load(directory / block["samples"])
            samples["end_ns"][25:-25:50] += 60_000_000
            np.save(directory / block["samples"], samples)


def test_the_headline_names_a_decided_tail_beside_an_equivalent_throughput(tmp_path: Path) -> None:
    """The attacker's case: "No winner: equivalent" stood over a p99 that was decided."""
    arm = SimulatedArm(noise=0.01)
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=700, seconds=1, max_seconds=60, rounds=8
    )
    write_run(tmp_path, Plan(a=arm, b=arm, block_noise=0.002, margin=0.05, workloads=(workload,)))
    plant_a_tail(tmp_path, "b")
    result = analyse(tmp_path)
    verdicts = {c.metric: c.verdict for c in result.comparisons}
    assert (verdicts["throughput"], verdicts["latency_p99"]) == ("no_difference", "baseline_better")
    headline = result.verdict.sentence
    assert headline.startswith("No winner in throughput between PyTorch (native) and Triton: ")
    assert "; but PyTorch (native) has the lower p99 latency one request at a time (" in headline
    p99 = next(c for c in result.comparisons if c.metric == "latency_p99")
    assert f"({ratio(p99.ratio, p99.ci95)})" in headline


def test_the_headline_names_every_metric_with_a_decided_difference(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path))
    headline = result.verdict.sentence
    for c in result.comparisons:
        if c.verdict in ("baseline_better", "arm_better") and not c.leading:
            assert METRICS[c.metric].title in headline, c
    assert "time to ready, p50 latency and p90 latency favour the same arm" in headline


STREAMED = Workload(
    scenario="single", batch_size=1, concurrency=1, requests=1, seconds=1, max_seconds=1, rounds=3, prompt_tokens=8,
    output_tokens=8,
)  # fmt: skip
STARTS = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=1, max_seconds=1, rounds=3)
FIGURES = st.one_of(
    st.floats(), st.sampled_from([0.0, 1.0, 1.0 + 1e-12, -1.0, 1e-320, 5e-324, 1.7e308, math.nan, math.inf])
)


def planned(**more: Any) -> Experiment:
    return Experiment(
        arms=(ArmRequest(label="a", target="native"), ArmRequest(label="b", target="native")), model="m", weights="",
        payload="tokens", transport="completions", workloads=(STREAMED, STARTS), preset="quick", seed=0,
        equivalence_margin=0.05, threads=1, **more,
    )  # fmt: skip


def figures_in(label: str, pair: int, figure: float | None, restart: int = 0) -> BlockSummary:
    """A block of which every metric has the same figure."""
    empty: dict[str, Any] = dict.fromkeys(BlockSummary.__struct_fields__)
    return BlockSummary(
        **{
            **empty, "index": pair, "workload": STREAMED.name, "round": pair, "label": label, "restart": restart,
            "complete": True, "requests": 1, "errors": 0, "samples": 0,
            "figures": {metric.name: figure for metric in metrics_of(STREAMED)},
        }
    )  # fmt: skip


def compare(
    a: list[float | None], b: list[float | None], *, values: bool = False, **more: Any
) -> tuple[Comparison, ...]:
    """Every metric of both workloads, all with these figures, one per round; with `values` each block also has requests
    for the percentiles, which all took that long."""
    experiment = planned(**more)
    restart_of = [number * experiment.restarts // len(a) for number in range(len(a))]
    blocks = [
        figures_in(label, pair, figure, restart_of[pair])
        for label, figures in (("a", a), ("b", b))
        for pair, figure in enumerate(figures)
    ]
    starts = [
        Figure(metric.name, STARTS.name, label, pair, pair, figure)
        for metric in metrics_of(STARTS)
        for label, figures in (("a", a), ("b", b))
        for pair, figure in enumerate(figures)
    ]
    requests = {
        (metric.of_requests, pair): np.full(800, figure or 0.0)
        for metric in metrics_of(STREAMED)
        if metric.of_requests is not None
        for pair, figure in enumerate(b if values else [])
    }
    live = LiveRatios(experiment)
    for block in blocks:
        live.add(block)
    return compare_all(experiment, blocks, starts, requests)


@given(
    st.lists(st.tuples(FIGURES, FIGURES), min_size=1, max_size=5), st.booleans(), st.booleans(), st.sampled_from([1, 2])
)
def test_no_figure_ends_the_comparison(
    pairs: list[tuple[float, float]], values: bool, until_decided: bool, restarts: int
) -> None:
    """And what has a ratio can be inverted, shown on a logarithmic axis, stored and read."""
    a, b = zip(*pairs, strict=True)
    for c in compare(list(a), list(b), values=values, until_decided=until_decided, restarts=restarts):
        assert c.ratio is not None or c.reason
        for number in (c.ratio, *(c.ci95 or ()), *c.ratios, c.baseline_value, c.arm_value):
            assert number is None or (math.isfinite(math.log(number)) and math.isfinite(1.0 / number)), c
        assert msgspec.json.decode(msgspec.json.encode(c), type=Comparison) == c


@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("arms", ["a", "b", "ab"])
def test_a_figure_without_a_ratio_is_named(figure: float, arms: str) -> None:
    """Whichever arm it is of; the other workload keeps its verdict."""
    good: list[float | None] = [1.0, 1.1, 1.2]
    of: dict[str, list[float | None]] = {arm: [1.0, figure, 1.2] if arm in arms else good for arm in "ab"}
    by_metric = {c.metric: c for c in compare(of["a"], of["b"])}
    tpot, ready = by_metric["tpot"], by_metric["time_to_ready"]
    for c in (tpot, ready):
        assert c.verdict == "inconclusive"
        assert (c.ratio, c.pairs, c.ratios) == (None, 0, ())
    assert tpot.reason == f"{arms[0].upper()}'s TPOT is {figure:.4g} ms in pair 2 of 3, so there is no ratio"


def series_of(workload: Workload, logs: list[float]) -> PairedMetric:
    pairs = tuple(Pair(1.0, math.exp(log)) for log in logs)
    return PairedMetric(workload, METRICS["throughput"], Pairing("a", "b"), pairs)


def test_an_early_decision_is_adjusted_for_all_that_was_planned() -> None:
    """Also for what has no interval yet: else the first workload with one would have the whole 5 %."""
    one_so_far: list[float | None] = [0.008, *[None] * 4]
    assert adjust([True] * 5, one_so_far, until_decided=True) == [pytest.approx(5 * 0.008), *[None] * 4]
    assert adjust([True, *[False] * 4], one_so_far, until_decided=True)[0] == pytest.approx(0.008 / LEADING_SHARE)
    assert adjust([True] * 5, [0.008, *[0.5] * 4], until_decided=False)[0] == pytest.approx(5 * 0.008)


@pytest.mark.parametrize(("ratio", "wins"), [(1.5, False), (2.1, True), (0.4, True)])
@pytest.mark.parametrize(
    ("method", "error_log"),
    [("t over pairs", 0.004), ("order statistics", 0.0), ("anytime-valid order statistics", 0.0004),
     ("anytime-valid over pairs", None)],
)  # fmt: skip
def test_a_winner_of_a_rough_run_lies_beyond_what_others_could_make(
    ratio: float, wins: bool, method: Method, error_log: float | None
) -> None:
    """Half of the machine was taken: up to twice as fast, or half."""
    verdict: Outcome = "arm_better" if ratio > 1.0 else "baseline_better"
    around = tuple(ratio * math.exp(log) for log in (0.01, -0.01, 0.005, -0.005, 0.002, -0.002, 0.01, -0.01))
    measured = Comparison(
        workload="single", metric="throughput", unit="", higher_is_better=True, baseline="a", arm="b",
        baseline_value=1.0, arm_value=ratio, ratio=ratio, ci95=(0.99 * ratio, 1.01 * ratio), verdict=verdict, pairs=8,
        minimal_detectable_effect=None, p_value=1e-9, p_adjusted=1e-9, p_equivalence=1.0, ratios=around, leading=True,
        method=method, error_log=error_log, degrees=7.0,
    )  # fmt: skip
    (rough,) = roughen([measured], {"single": {"a": 0.5, "b": 0.5}}, 0.05)
    assert rough.verdict == (verdict if wins else "inconclusive")
    assert rough.ci95 == pytest.approx((0.99 * ratio / 2.0, 1.01 * ratio * 2.0))
    assert as_measured(rough).ci95 == pytest.approx(measured.ci95)


def test_an_interval_without_one_names_no_winner_among_many_comparisons() -> None:
    compared = simulate(simulated(6, 12, 1e-4), np.random.default_rng(8), plain, 1.02)
    tested = [c for c in compared if c.p_value is not None]
    least = min(tested, key=lambda c: c.p_value or 1.0)
    assert least.p_adjusted == pytest.approx((least.p_value or 1.0) * len(tested))
    unadjusted = [c for c in tested if excludes_one(c.ci95) and c.winner is None]
    assert unadjusted, "the adjustment decides some of them"
    assert all(c.verdict == "inconclusive" and "Holm" in (c.reason or "") for c in unadjusted)


@pytest.mark.parametrize(("of_a", "of_b", "wins"), [(0, 0, True), (0, 30, True), (0, 70, False), (70, 70, True)])
def test_an_arm_that_refuses_more_requests_does_not_win_by_the_times_of_the_others(
    of_a: int, of_b: int, wins: bool
) -> None:
    """B is 1.5 times as fast, with so many of its 700 requests a block failed; of the median 5 % may have."""
    plan, failed = simulated(1, 6, 0.05), {"a": of_a, "b": of_b}
    blocks = simulate_blocks(plan, np.random.default_rng(1), plain, 1.5)
    blocks = [msgspec.structs.replace(block, errors=failed[block.label]) for block in blocks]
    compared = {comparison.metric: comparison for comparison in compare_all(plan, blocks)}
    assert compared["throughput"].verdict == "arm_better", "which counts what was answered"
    assert compared["latency_p50"].verdict == ("arm_better" if wins else "inconclusive")
    assert wins or "B failed 10 % of its requests" in (compared["latency_p50"].reason or "")


@pytest.mark.parametrize("rounds", [6, 14, 40])
@pytest.mark.parametrize("until_decided", [False, True])
def test_a_comparison_allows_for_its_own_correlation_where_the_others_show_none(
    rounds: int, until_decided: bool
) -> None:
    """One correlated workload of five named false winners, since the correlation was pooled over workloads."""
    plan = simulated(5, rounds, 0.05, until_decided=until_decided)
    lasting = [0.02 if n < rounds // 2 else -0.02 for n in range(rounds)]
    independent = np.random.default_rng(4).normal(0.0, 0.02, (5, rounds)).tolist()
    alike = [series_of(workload, logs) for workload, logs in zip(plan.workloads, independent, strict=True)]
    paired = [series_of(plan.workloads[0], lasting), *alike[1:]]

    def allowed(comparisons: list[PairedMetric], place: int) -> float:
        return estimate_pairs(comparisons[place], plan, seen_correlations(comparisons))[1].correlation

    assert allowed(paired, 0) > allowed(alike, 0) + 0.1
    assert allowed(paired, 0) > np.median([allowed(paired, place) for place in range(1, 5)]) + 0.1
