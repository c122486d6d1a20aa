"""The verdict rule, metric by metric."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from loadgen.metrics.comparisons import judge
from loadgen.metrics.registry import METRICS
from loadgen.quantities import ratio
from loadgen.records.run import Workload
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run


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
    by_metric = {(c.scenario, c.metric): c for c in result.comparisons}
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
    p99 = next(c for c in result.comparisons if (c.scenario, c.metric) == ("concurrent(16)", "latency_p99"))
    assert p99.ratio is None
    assert "662 samples per arm; one arm has 18" in (p99.reason or "")


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
    assert headline.startswith("No winner in throughput between A (")
    assert "; but A has the lower p99 latency one request at a time (" in headline
    p99 = next(c for c in result.comparisons if c.metric == "latency_p99")
    assert f"({ratio(p99.ratio, p99.ci95)})" in headline


def test_the_headline_names_every_metric_with_a_decided_difference(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path))
    headline = result.verdict.sentence
    for c in result.comparisons:
        if c.verdict in ("baseline_better", "arm_better") and not c.leading:
            assert METRICS[c.metric].title in headline, c
    assert "time to ready, p50 latency and p90 latency favour the same arm" in headline
