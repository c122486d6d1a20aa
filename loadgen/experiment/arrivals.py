"""When the requests of an open loop are due: a pure function of kind, rate, count and seed, computed before the load.

Both arms of a pair get the same schedule, and each of n workers takes every n-th arrival of it. Poisson arrivals have
independent exponential gaps; constant ones are 1/rate apart. The first request is due at 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from loadgen.records.run import Arrivals

RATE_LIMIT_PER_S = 100_000.0
"""Above this rate the generator cannot send the requests one by one."""
_DRAIN_SHARE = 0.25
_LEAST_DRAIN_SECONDS = 1.0
_CHUNK = 4096

Offsets = npt.NDArray[np.int64]


def arrival_count(rate_per_s: float, requests: int, seconds: float, max_seconds: float) -> int:
    """Requests due in a block: at least `requests` and `seconds` of this rate, at most `max_seconds` of it,
    and never fewer than 2, so that there is a span."""
    least = max(requests, math.ceil(rate_per_s * seconds))
    return max(2, min(least, math.ceil(rate_per_s * max_seconds)))


def due_offsets_ns(arrivals: Arrivals, rate_per_s: float, count: int, seed: int) -> Offsets:
    """When each of `count` requests is due, in ns from the start of the block, ascending. The same arguments give the
    same schedule. Raises `ValueError` for a closed loop."""
    if arrivals == "closed" or rate_per_s <= 0.0 or count < 1:
        raise ValueError(f"no schedule for {count} {arrivals} arrivals at {rate_per_s:g}/s")
    gap_ns = 1e9 / rate_per_s
    if arrivals == "constant":
        return np.asarray(np.round(np.arange(count) * gap_ns), dtype=np.int64)
    gaps = np.random.default_rng(seed).exponential(gap_ns, count)
    gaps[0] = 0.0
    return np.asarray(np.round(np.cumsum(gaps)), dtype=np.int64)


def endless_offsets_ns(arrivals: Arrivals, rate_per_s: float, seed: int) -> Iterator[int]:
    """An endless schedule, for a test that a person stops; it draws other numbers than `due_offsets_ns`."""
    random = np.random.default_rng(seed)
    gap_ns, last = 1e9 / rate_per_s, 0.0
    for first in count(0, _CHUNK):
        if arrivals == "constant":
            yield from np.round(np.arange(first, first + _CHUNK) * gap_ns).astype(np.int64).tolist()
            continue
        moments = last + np.cumsum(random.exponential(gap_ns, _CHUNK))
        last = float(moments[-1])
        yield from np.round(moments).astype(np.int64).tolist()


def drain_ns(span_ns: int) -> int:
    """How long overdue requests are still sent after the last one was due: a quarter of the schedule's span, at least a
    second. Requests unsent by then stay unsent: the rate was not sustained."""
    return max(int(_LEAST_DRAIN_SECONDS * 1e9), int(_DRAIN_SHARE * span_ns))


def schedule_seed(seed: int, workload: str, pair: int) -> int:
    """The seed of one round's schedule: the same for all arms, different for every round and workload."""
    return int(np.random.SeedSequence([seed & (2**64 - 1), zlib.crc32(workload.encode()), pair]).generate_state(1)[0])
