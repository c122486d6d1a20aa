"""Which window tells the truth about a closed loop that ends after a number of requests.

The truth is the rate of the same users over a very long run. Two windows are compared: up to the last answer, and
the full-load window of `loadgen.analysis.summaries`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.analysis.full_load import throughput_per_s
from loadgen.records.samples import SAMPLE_DTYPE, Samples

Latency = Callable[[np.random.Generator], float]
USERS, REQUESTS = 16, 200

LATENCIES: dict[str, Latency] = {
    "constant": lambda _: 100.0,
    "gamma, CV 0.3": lambda rng: float(rng.gamma(1 / 0.09, 100.0 * 0.09)),
    "exponential": lambda rng: float(rng.exponential(100.0)),
    "one in ten 5× slower": lambda rng: float((500.0 if rng.random() < 0.1 else 55.56) * rng.normal(1.0, 0.02)),
}


def closed_loop(latency: Latency, rng: np.random.Generator, requests: int) -> Samples:
    """Users that share a number of requests, as the load generator's do."""
    samples = np.zeros(requests, dtype=SAMPLE_DTYPE)
    free = [(0.0, user) for user in range(USERS)]
    for sample in samples:
        now, user = heapq.heappop(free)
        end = now + latency(rng)
        sample["intended_ns"] = sample["send_ns"] = int(now * 1e6)
        sample["end_ns"], sample["user"], sample["batch"], sample["error"] = int(end * 1e6), user, 1, -1
        heapq.heappush(free, (end, user))
    return samples


@pytest.mark.parametrize("name", LATENCIES)
def test_the_full_load_window_is_the_least_biased(name: str) -> None:
    rng = np.random.default_rng(3)
    truth = USERS / 0.1
    ours, naive = [], []
    for _ in range(300):
        samples = closed_loop(LATENCIES[name], rng, REQUESTS)
        ours.append((throughput_per_s(samples) or 0.0) / truth - 1.0)
        naive.append(REQUESTS / (int(samples["end_ns"].max()) / 1e9) / truth - 1.0)
    print(f"{name}: full load {np.mean(ours):+.1%}, up to the last answer {np.mean(naive):+.1%}")  # noqa: T201
    assert abs(np.mean(ours)) < abs(np.mean(naive))
    assert abs(np.mean(ours)) < (0.001 if name == "constant" else 0.02 if "gamma" in name else 0.12)
