"""Throughput of a closed loop while it is in its stride: after every user's first answer, before any user's last one.

On a rung of a ramp there may be many more users than the server works on at once. Their first requests then find an
empty queue and the later ones a full one, so the latencies grow through the first round; a window that begins with the
first request credits the queue's filling to the server (half a request a user). Here it begins when the queue is full.
"""

from __future__ import annotations

import numpy as np

from loadgen.analysis.full_load import throughput_per_s
from loadgen.records.samples import NS_PER_S, Samples, good


def steady_throughput_per_s(samples: Samples) -> float | None:
    """Items a second, from good answers that ended after every user had its first answer and no later than the first
    user's last one. For one user, and for batches that finish together, it is exact. Where no user has two answers in
    that time it is the throughput of full load."""
    if len(samples) == 0:
        return None
    users, places = np.unique(samples["user"], return_inverse=True)
    first = np.full(len(users), np.iinfo(np.int64).max)
    last = np.zeros(len(users), dtype=np.int64)
    np.minimum.at(first, places, samples["end_ns"])
    np.maximum.at(last, places, samples["end_ns"])
    start, end = int(first.max()), int(last.min())
    answered = good(samples)
    inside = answered[(answered["end_ns"] > start) & (answered["end_ns"] <= end)]
    if end <= start or len(inside) == 0:
        return throughput_per_s(samples)
    return float(inside["batch"].sum()) / ((end - start) / NS_PER_S)
