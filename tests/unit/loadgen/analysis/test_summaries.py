"""Throughput over the time of full load, latency from the intended start, failed requests apart."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.analysis.full_load import full_load_window, throughput_per_s, warm_up_cost
from loadgen.records.samples import SAMPLE_DTYPE, Samples, good, latencies_ms


def samples(rows: list[tuple[float, float, int]], batch: int = 1) -> Samples:
    """(send, end) in ms and the user."""
    result = np.zeros(len(rows), dtype=SAMPLE_DTYPE)
    for sample, (sent, end, user) in zip(result, rows, strict=True):
        sample["intended_ns"] = sample["send_ns"] = int(sent * 1e6)
        sample["end_ns"] = int(end * 1e6)
        sample["user"], sample["batch"], sample["error"], sample["status"] = user, batch, -1, 200
    return result


def test_one_user_is_items_over_time() -> None:
    block = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(50)], batch=4)
    assert throughput_per_s(block) == pytest.approx(50 * 4 / 0.5)


def test_constant_latency_is_exact_although_the_users_do_not_divide_the_requests() -> None:
    """16 users, 200 requests, 100 ms each: 8 users get a thirteenth; items up to the last answer would say 153.8."""
    block = samples([(100.0 * (i // 16), 100.0 * (i // 16) + 100.0, i % 16) for i in range(200)])
    assert throughput_per_s(block) == pytest.approx(160.0)
    assert full_load_window(block) == (0, 1_200_000_000)


def test_a_straddling_request_counts_by_its_share() -> None:
    block = samples([(0, 100, 0), (0, 50, 1), (50, 150, 1)])
    assert throughput_per_s(block) == pytest.approx((1 + 1 + 0.5) / 0.1)


def test_failed_requests_add_no_throughput_and_no_latency() -> None:
    block = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(20)])
    block["error"][::2] = 0
    assert throughput_per_s(block) == pytest.approx(50.0)
    assert len(latencies_ms(good(block))) == 10
    block["error"] = 0
    assert throughput_per_s(block) is None
    assert throughput_per_s(block[:0]) is None


def test_latency_counts_from_the_intended_start() -> None:
    block = samples([(0, 10, 0)])
    block["send_ns"] = 8_000_000
    assert latencies_ms(block).tolist() == [10.0]


def test_slow_first_requests_are_weighed_by_the_time_they_cost() -> None:
    warm = samples([(10.0 * i, 10.0 * i + 10.0, 0) for i in range(100)])
    assert warm_up_cost(warm) == pytest.approx((0.0, 0.0))
    cold = samples([(0, 510, 0)] + [(500 + 10.0 * i, 510 + 10.0 * i, 0) for i in range(1, 100)])
    found = warm_up_cost(cold)
    assert found is not None
    assert found[0] == pytest.approx(500 / 1500, rel=0.01)
    assert warm_up_cost(warm[:10]) is None


def test_noise_alone_is_not_taken_for_a_cold_server() -> None:
    """Latencies that vary by half, 20 requests a block: the cost stays within four of its errors."""
    rng = np.random.default_rng(8)
    scores = []
    for _ in range(2000):
        ends = np.cumsum(rng.lognormal(2.0, 0.5, size=20))
        rows = [(float(start), float(end), 0) for start, end in zip(np.r_[0.0, ends[:-1]], ends, strict=True)]
        cost = warm_up_cost(samples(rows))
        assert cost is not None
        scores.append(cost[0] / cost[1])
    assert abs(np.mean(scores)) < 0.35
    assert np.mean(np.array(scores) > 4.0) < 0.02
