"""Real servers with a planted truth, the real load generator between them, and the verdict that must come out.

Each case is one comparison of two processes over sockets. `pytest -s -m benchmark tests/truth/test_planted_truths.py`
prints a line for each, as a row of the table in docs/results/measured/statistics.md; run it on an idle machine.
"""

from __future__ import annotations

import math
import re
import time

import msgspec
import pytest

from loadgen.base.quantities import ratio, ratio_interval
from loadgen.metrics.comparisons import Comparison
from loadgen.records.run import Workload
from loadgen.verdict.result import Result
from tests.truth.conftest import Compare, state


def closed(requests: int, pairs: int, *, batch_size: int = 1) -> Workload:
    return Workload(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=requests, seconds=0.0, max_seconds=30.0,
        rounds=pairs,
    )  # fmt: skip


def open_loop(rate: float, seconds: float, pairs: int) -> Workload:
    return Workload(
        scenario="open", batch_size=1, concurrency=256, requests=1, seconds=seconds, max_seconds=seconds, rounds=pairs,
        arrivals="constant", rate_per_s=rate,
    )  # fmt: skip


def metric(result: Result, name: str, scenario: str | None = None) -> Comparison:
    return next(c for c in result.comparisons if c.metric == name and scenario in (None, c.workload))


def tell(planted: str, comparison: Comparison) -> None:
    """One row of the table."""
    interval = "–" if comparison.ci95 is None else ratio_interval(comparison.ci95)
    value = "–" if comparison.ratio is None else ratio(comparison.ratio, comparison.ci95)
    verdict = comparison.verdict.replace("_", " ")
    print(f"| {planted} | {comparison.metric} | {value} | {interval} | {comparison.pairs} | {verdict} |")  # noqa: T201


def require_quiet(result: Result, comparison: Comparison, planted: float) -> None:
    """Skip where the machine is so restless that the planted difference (as a share) drowns in it, or that a late
    generator or other work on the processors took the verdict, as it must."""
    restless = ("send_lag", "generator_cpu", "cpu_steal", "other_processes")
    late = [c.detail for c in result.checks if c.name in restless and c.ok is False]
    if comparison.verdict == "invalid" and late:
        pytest.skip(f"this machine is too restless: {late[0]}")
    if comparison.verdict == "inconclusive" and comparison.ci95 is not None:
        half = math.log(comparison.ci95[1] / comparison.ci95[0]) / 2.0
        if half > planted / 2.0:
            pytest.skip(f"this machine is too restless: ±{half:.1%} where {planted:.1%} is planted")


# A short one, in every run of the tests; no speed decides it. More of them are in test_wrong_answers_are_caught.


def test_rows_mixed_up_in_a_batch_are_refused(compare: Compare) -> None:
    result = compare("", "--wrong-batches", closed(10, 1, batch_size=4))
    assert state(result, "parity") is False
    assert not result.valid
    assert result.blocks == ()


@pytest.mark.slow
def test_stalls_of_half_a_second_are_named_and_a_broad_latency_is_not(compare: Compare) -> None:
    """A takes about 0 to 0.6 s, B 1 ms and now and then 0.5 s more."""
    load = msgspec.structs.replace(closed(30, 2), seconds=2.5)
    result = compare("--delay-ms 90 --cv 1", "--delay-ms 1 --stall-ms 500 --stall-every-s 0.7", load)
    stalls = next(check for check in result.checks if check.name == "half_second_stalls")
    assert stalls.ok is False
    assert f"requests to {result.names['b']}" in stalls.detail
    assert f"requests to {result.names['a']}" not in stalls.detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "cause", "planted"),
    [
        ("--delay-ms 10", "--delay-ms 10 --queue-delay-ms 20", r"is \S+'s queue delay", 3.0),
        ("--delay-ms 30", "--delay-ms 30 --stall-ms 500 --stall-every-s 0.9", r"is stalls of 0.5 s on \S+", 2.0),
    ],
)
def test_the_headline_names_what_makes_a_lead(compare: Compare, a: str, b: str, cause: str, planted: float) -> None:
    """B waits 20 of its 30 ms in its queue; or it serves nothing in 5 of 9 tenths of a second."""
    load = msgspec.structs.replace(closed(20, 4), seconds=1.5)
    result = compare(a, b, load)
    comparison = metric(result, "throughput")
    tell(cause, comparison)
    if comparison.verdict != "baseline_better":
        pytest.skip(f"this machine is too restless: {comparison.verdict}")
    part = re.search(rf"(?:of which ([0-9.]+)× {cause}|all of which {cause} \(([0-9.]+)×\))", result.verdict.sentence)
    assert part is not None, result.verdict.sentence
    assert float(part[1] or part[2]) == pytest.approx(planted, rel=0.3)


@pytest.mark.slow
def test_identical_arms_have_no_cause_in_the_headline(compare: Compare) -> None:
    options = "--delay-ms 3 --queue-delay-ms 5"
    sentence = compare(options, options, closed(40, 4)).verdict.sentence
    assert "of which" not in sentence
    assert ", with" not in sentence


@pytest.mark.slow
def test_errors_under_load_take_the_verdict(compare: Compare) -> None:
    """The server is sound until parity and warm-up are over."""
    result = compare("--delay-ms 1", "--delay-ms 1 --good-first 150 --error-every 7", closed(100, 2))
    assert state(result, "request_errors") is False
    assert {c.verdict for c in result.comparisons} == {"invalid"}
    assert state(result, "repeated_requests") is True


# The rest needs an idle machine and minutes.


@pytest.mark.benchmark
@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_identical_arms_are_equivalent(compare: Compare, transport: str) -> None:
    result = compare("--delay-ms 5", "--delay-ms 5", closed(100, 8), transport=transport)
    comparison = metric(result, "throughput")
    tell(f"identical, {transport}", comparison)
    require_quiet(result, comparison, 0.05)
    assert comparison.verdict == "no_difference"


@pytest.mark.benchmark
@pytest.mark.parametrize(("percent", "pairs"), [(1, 10), (2, 8), (5, 5)])
def test_a_small_difference_is_named_and_measured(compare: Compare, percent: int, pairs: int) -> None:
    """Beside the planted 8 ms a request takes some tenths of a millisecond on the way."""
    result = compare("--delay-ms 8", f"--delay-ms {8 * (1 + percent / 100)}", closed(100, pairs), margin=0.001)
    for name in ("throughput", "latency_p50"):
        tell(f"+{percent} % of 8 ms", metric(result, name))
    comparison = metric(result, "latency_p50")
    require_quiet(result, comparison, percent / 100)
    assert comparison.verdict == "baseline_better"
    assert comparison.baseline_value is not None
    assert comparison.ci95 is not None
    planted = 0.08 * percent / comparison.baseline_value
    assert comparison.ci95[0] - 0.3 * planted < 1.0 + planted < comparison.ci95[1] + 0.3 * planted


@pytest.mark.benchmark
def test_a_difference_over_grpc(compare: Compare) -> None:
    result = compare("--delay-ms 8", "--delay-ms 8.4", closed(100, 4), margin=0.001, transport="grpc")
    comparison = metric(result, "latency_p50")
    tell("+5 % of 8 ms, grpc", comparison)
    require_quiet(result, comparison, 0.05)
    assert comparison.verdict == "baseline_better"


@pytest.mark.benchmark
def test_random_delays_are_seen_through(compare: Compare) -> None:
    """Gamma distributed with CV 0.3: the mean over a block is known to 3 %, the difference is 20 %."""
    result = compare("--delay-ms 5 --cv 0.3", "--delay-ms 6 --cv 0.3", closed(120, 16))
    comparison = metric(result, "throughput")
    tell("+20 % of a random 5 ms", comparison)
    require_quiet(result, comparison, 0.20)
    assert comparison.verdict == "baseline_better"


@pytest.mark.benchmark
def test_a_heavier_tail_alone_is_found_in_the_tail_alone(compare: Compare) -> None:
    result = compare("--delay-ms 2.6", "--delay-ms 2.6 --tail-share 0.03 --tail-factor 4", closed(700, 10))
    middle, tail = metric(result, "latency_p50"), metric(result, "latency_p99")
    tell("3 % of requests take 4×", middle)
    tell("3 % of requests take 4×", tail)
    require_quiet(result, middle, 0.05)
    assert middle.verdict == "no_difference"
    assert tail.verdict == "baseline_better"
    assert tail.ratio is not None
    assert tail.ratio > 2.0


@pytest.mark.benchmark
def test_a_stall_is_seen_by_those_who_would_have_come(compare: Compare) -> None:
    """100 ms in 2.5 s is 4 % of the time, so an open loop meets it with 4 % of its requests: p99 is three quarters of a
    stall. Each block holds two, whenever it starts; random delays, not the machine's bursts, are A's p99. Fewer rounds
    cannot tell how much they resemble each other, which leaves a percentile without an interval."""
    quiet = "--delay-ms 20 --cv 0.2 --no-spin"
    result = compare(quiet, f"{quiet} --stall-ms 100 --stall-every-s 2.5", open_loop(70.0, 5.0, 12))
    comparison = metric(result, "latency_p99")
    tell("100 ms stall every 2.5 s, open loop", comparison)
    assert comparison.ratio is not None
    assert comparison.ratio > 2.0
    require_quiet(result, comparison, 1.0)  # a generator that is late by 1 ms takes the verdict, and not the figures
    assert comparison.verdict == "baseline_better"


@pytest.mark.benchmark
def test_a_closed_loop_omits_it(compare: Compare) -> None:
    """One request in a block waits, and the others do not come meanwhile: why the open loop is there."""
    result = compare("--delay-ms 3 --no-spin", "--delay-ms 3 --no-spin --stall-ms 200", closed(700, 3))
    comparison = metric(result, "latency_p99")
    tell("200 ms stall every 10 s, closed loop", comparison)
    assert comparison.verdict in ("inconclusive", "no_difference")
    assert comparison.ratio is not None
    assert comparison.ratio < 2.5


@pytest.mark.benchmark
def test_saturation_is_found_where_it_was_planted(compare: Compare) -> None:
    """B serves 150 requests a second at most and is asked for 200."""
    workload = open_loop(200.0, 3.0, 3)
    result = compare("--delay-ms 20 --no-spin", "--delay-ms 20 --no-spin --rate 150", workload)
    achieved = metric(result, "achieved_rate", workload.name)
    tell("saturated at 150/s, asked for 200/s", achieved)
    require_quiet(result, achieved, 0.25)
    assert achieved.verdict == "baseline_better"
    assert achieved.ratio == pytest.approx(0.75, rel=0.08)
    assert metric(result, "latency_p99", workload.name).ratio is None
    assert state(result, "rate_sustained") is False


@pytest.mark.benchmark
def test_latency_counts_to_the_last_byte_of_a_slow_body(compare: Compare) -> None:
    result = compare("--delay-ms 5", "--delay-ms 5 --slow-body-ms 5", closed(100, 4))
    comparison = metric(result, "latency_p50")
    tell("5 ms from first byte to last, after 5 ms", comparison)
    require_quiet(result, comparison, 0.5)
    assert comparison.verdict == "baseline_better"
    assert comparison.ratio is not None
    assert 1.4 < comparison.ratio < 2.2


@pytest.mark.benchmark
def test_a_machine_that_slows_down_favours_nobody(compare: Compare) -> None:
    """Both arms take 60 % longer for every minute that passes."""
    drift = f"--delay-ms 5 --drift 0.6 --drift-from-ns {time.monotonic_ns()}"
    result = compare(drift, drift, closed(100, 10))
    comparison = metric(result, "throughput")
    tell("both slow down by 60 % a minute", comparison)
    assert comparison.verdict in ("no_difference", "inconclusive")
    first, *_, last = [block.throughput_per_s or 0.0 for block in result.blocks]
    assert last < 0.95 * first


@pytest.mark.benchmark
def test_a_run_until_decided_decides(compare: Compare) -> None:
    result = compare("--delay-ms 5", "--delay-ms 5.75", closed(60, 2), until_decided=True, time_limit_minutes=0.7)
    comparison = metric(result, "throughput")
    tell("+15 % of 5 ms, until decided", comparison)
    require_quiet(result, comparison, 0.15)
    assert comparison.verdict == "baseline_better"
    assert result.stopping is not None
    assert result.stopping.ended_by == "decided"
