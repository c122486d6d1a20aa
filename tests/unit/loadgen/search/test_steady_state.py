"""The throughput of a rung is the server's, whatever the number of users that wait."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from loadgen.analysis.full_load import throughput_per_s
from loadgen.analysis.steady_state import steady_throughput_per_s
from loadgen.records.samples import SAMPLE_DTYPE, Samples

SERVICE_NS = 50_000_000


def closed_loop(users: int, requests: int, slots: int) -> Samples:
    """A server with so many slots of 50 ms each: 20 · slots images a second once there are as many users."""
    free = [0] * slots
    ready = [(0, user) for user in range(users)]
    samples = np.zeros(requests, dtype=SAMPLE_DTYPE)
    for number in range(requests):
        sent, user = heapq.heappop(ready)
        end = max(heapq.heappop(free), sent) + SERVICE_NS
        heapq.heappush(free, end)
        heapq.heappush(ready, (end, user))
        samples[number] = (sent, sent, end, end, 1, 1, 1, user, 0, 200, -1)
    return samples


@pytest.mark.parametrize("users", [1, 2, 4, 8, 32, 128])
def test_a_queue_is_not_throughput(users: int) -> None:
    slots = 4
    found = steady_throughput_per_s(closed_loop(users, max(20, 4 * users), slots))
    assert found == pytest.approx(20.0 * min(users, slots), rel=0.035)


def test_the_full_load_window_would_credit_the_filling_queue() -> None:
    assert (throughput_per_s(closed_loop(32, 128, 4)) or 0.0) > 1.05 * 80.0


def test_too_short_a_loop_falls_back() -> None:
    samples = closed_loop(4, 4, 4)
    assert steady_throughput_per_s(samples) == throughput_per_s(samples)
    assert steady_throughput_per_s(samples[:0]) is None
