"""Closed loops of 64 clients before one engine, with the native server's rule for batches or a simpler one.

The execution times are those of ViT-B-32 in FP16 on an H200 (docs/results/measured/engines.md). Between an answer and
the next request lies everything else: front ends, the transport, the kernel and the client. One part of that time is
the same for each request, the rest is exponential.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from servers.native.engine.batcher import BatchFormer
from tests.unit.native.engine.test_batch_former import MOST, MS, Simulation, pauses

EXECUTION_MS = {1: 0.324, 8: 0.442, 16: 0.525, 32: 0.712, 64: 1.237}
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CLIENTS = 64
LEAST_ROWS = (1, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
PATIENCE_NS = 2 * MS
PLACES = tuple(itertools.product((0.6, 1.0, 1.4, 2.0), (0.0, 0.5, 0.9)))
"""Mean of the clients' time in ms, and the share of it that is the same for each request."""


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= rows)


class OnGpu(Simulation):
    def execution_ns(self, rows: int) -> int:
        return int(np.interp(bucket_of(rows), list(EXECUTION_MS), list(EXECUTION_MS.values())) * MS)


class WaitsFor(BatchFormer):
    """Starts a batch when `least` rows wait, or the oldest of them has for as long as it may."""

    def __init__(self, least: int) -> None:
        super().__init__(MOST, PATIENCE_NS, bucket_of)
        self._least = least

    def wait_ns(self, now_ns: int, rows: int, oldest_ns: int) -> int:
        if rows < self._least:
            return max(0, oldest_ns + PATIENCE_NS - now_ns)
        return super().wait_ns(now_ns, rows, oldest_ns) if self._running else 0


class Served(NamedTuple):
    rows_per_s: float
    rows: float
    """Of a batch on average."""


def served(former: BatchFormer, mean_ms: float, same: float, seconds: float = 2.0) -> Served:
    """What 64 clients get, after the first half of the time."""
    simulation = OnGpu(bucket_of=bucket_of)
    simulation.former = former
    simulation.closed_loop(CLIENTS, int(seconds * 1000 * MS), pauses(round(mean_ms * MS), same=same))
    return Served(simulation.settled_rows_per_s(), float(np.mean([batch.rows for batch in simulation.settled()])))


def own(mean_ms: float, same: float, seconds: float = 2.0) -> Served:
    """By the rule of the server."""
    return served(BatchFormer(MOST, PATIENCE_NS, bucket_of), mean_ms, same, seconds)


def best(mean_ms: float, same: float, seconds: float = 2.0) -> Served:
    """By the best of the rules that wait for a fixed number of rows."""
    return max(served(WaitsFor(least), mean_ms, same, seconds) for least in LEAST_ROWS)
