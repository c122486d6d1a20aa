"""What a block of a closed loop gives: throughput over the time of full load, and what missing warm-up cost.

A closed loop of N users that ends after a number of requests has a tail: the users stop one by one, and the last
requests run at less than the asked-for load. Items divided by the time up to the last answer then charges the tail to
the server, and more so to the arm with the more variable latency. The window used here is the time of full load: from
the first intended start until the first user retires, that is the earliest of the users' last answers. A request that
straddles its end counts by the share of its life inside the window. For constant latencies, for batches that finish
together and for one user this is exact; for N independent users its relative bias is about CV²/2 · N/n (renewal
theory; CV of the latencies, n requests), where items up to the last answer are off by the longest remaining latency:
see `tests/truth` for both, side by side.
"""

from __future__ import annotations

import numpy as np

from loadgen.records.samples import NS_PER_MS, NS_PER_S, Samples, good, latencies_ms


def full_load_window(samples: Samples) -> tuple[int, int]:
    """(start, end) in ns of the time during which every user had a request under way; see the module's text.

    `samples` is not empty and includes failed requests: a user that failed and went on was still under load.
    """
    users, places = np.unique(samples["user"], return_inverse=True)
    retired = np.zeros(len(users), dtype=np.int64)
    np.maximum.at(retired, places, samples["end_ns"])
    return int(samples["intended_ns"].min()), int(retired.min())


def throughput_per_s(samples: Samples) -> float | None:
    """Items a second in the full-load window, from good answers; a straddling request counts by its share inside."""
    if len(samples) == 0:
        return None
    start, end = full_load_window(samples)
    answered = good(samples)
    if end <= start or len(answered) == 0:
        return None
    life = np.maximum(answered["end_ns"] - answered["intended_ns"], 1)
    inside = np.minimum(answered["end_ns"], end) - np.maximum(answered["intended_ns"], start)
    items = float(np.sum(answered["batch"] * np.clip(inside / life, 0.0, 1.0)))
    return items / ((end - start) / NS_PER_S) if items > 0.0 else None


def warm_up_cost(samples: Samples) -> tuple[float, float] | None:
    """How much of a block's user time its first requests lost against the mean of the others, with its standard error.

    Sum over the first max(users, 5) requests of (latency − mean of the rest), over users × duration. This is the
    relative error that missing warm-up can have put into the throughput. The error is of that sum if the first
    requests were like the rest and all independent. None with fewer than 20 good answers.
    """
    answered = np.sort(good(samples), order="intended_ns")
    users = len(np.unique(answered["user"]))
    first = max(users, 5)
    if len(answered) < max(20, 2 * first):
        return None
    latency = latencies_ms(answered)
    rest = latency[first:]
    duration_ms = (int(answered["end_ns"].max()) - int(answered["intended_ns"].min())) / NS_PER_MS
    if duration_ms <= 0.0:
        return None
    error_ms = float(np.std(rest, ddof=1)) * float(np.sqrt(first * (1.0 + first / len(rest))))
    return float(np.sum(latency[:first] - np.mean(rest))) / (users * duration_ms), error_ms / (users * duration_ms)
