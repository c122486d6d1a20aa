"""What must not count as a difference under load: new connections, and request times that vary."""

from __future__ import annotations

import sys

import pytest

from loadgen.metrics.comparisons import judge
from loadgen.records.run import Workload
from tests.again import again
from tests.truth.conftest import Compare


def users(number: int, requests: int, pairs: int) -> Workload:
    return Workload(
        scenario="concurrent", batch_size=1, concurrency=number, requests=requests, seconds=0.0, max_seconds=30.0,
        rounds=pairs,
    )  # fmt: skip


@again
def test_a_slow_first_answer_of_a_connection_is_in_no_percentile(compare: Compare) -> None:
    """Every block has new connections: with 12 requests on each, 60 ms for the first would halve B's throughput and be
    its p99. δ is a factor of 1.5, which noise is not."""
    b = "--delay-ms 4 --no-spin --first-ms 60"
    result = compare("--delay-ms 4 --no-spin", b, users(8, 96, 3), margin=0.5)
    verdicts = {c.metric: c.verdict for c in result.comparisons}
    assert "baseline_better" not in verdicts.values()
    first = {summary.label: summary.first_answer_ms or 0.0 for summary in result.summaries}
    assert first["b"] >= 60.0
    assert first["b"] > first["a"] + 40.0
    p90 = {summary.label: summary.latency_ms("p90") or 0.0 for summary in result.summaries}
    assert p90["b"] < 60.0


@again
def test_of_three_arms_the_slow_one_is_named_and_the_like_ones_are_not_told_apart(compare: Compare) -> None:
    """An interval of 95 % misses 1 once in 20 runs of equal servers, so the rule judges it, with a δ beyond all
    noise. Neither a check that fails nor the number of comparisons excuses a winner here."""
    result = compare(
        "--delay-ms 4 --no-spin", "--delay-ms 4 --no-spin", users(1, 60, 6), others=["--delay-ms 12 --no-spin"]
    )
    found = {(one.baseline, one.arm): one for one in result.comparisons if one.metric == "throughput"}
    alike = judge(found["a", "b"].ci95, p_adjusted=0.0, margin=0.5, higher_is_better=True)
    assert alike in ("no_difference", "inconclusive")
    slow = [found[pair].ci95 or (0.0, 9.0) for pair in (("a", "c"), ("b", "c"))]
    assert all(0.1 < low < high < 1 for low, high in slow), slow
    for round_ in range(6):
        positions = {block.label: block.position for block in result.blocks if block.round == round_}
        assert sorted(positions) == ["a", "b", "c"]
        assert sorted(positions.values()) == [0, 1, 2]


@pytest.mark.benchmark
def test_request_times_that_vary_are_no_difference_in_throughput(compare: Compare) -> None:
    """16 users, exponential against constant, equal means."""
    result = compare("--delay-ms 120 --no-spin", "--delay-ms 120 --cv 1 --no-spin", users(16, 160, 8))
    found = next(c for c in result.comparisons if c.metric == "throughput")
    sys.stdout.write(f"\nexponential against constant: {found.ratio} {found.ci95} {found.verdict}\n")
    assert found.verdict not in ("baseline_better", "arm_better")
