"""Finds stalls of 0.5 s in a closed loop: requests that met a timer, apart from a latency that is simply broad.

A request stalled if it took 0.45 to 0.6 s more than a prompt one: the fastest tenth of the requests, or the fastest
request of its size if that took longer, so that a long text is not a stall. The tail of a broad latency falls, so at
most a third of the requests that took 0.15 to 0.6 s more are stalls; an arm has stalls if it has more of them than
chance explains (one-sided binomial test, p ≤ 5 %), which takes three at least.

The test needs independent cases, and one sleep of a server delays all of its users at once. So of the slow requests
that overlap only the first to begin is a case: its length does not depend on which request was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from loadgen.records.samples import NS_PER_MS, SAMPLE_DTYPE, Samples, latencies_ms
from loadgen.storage.stored_run import StoredBlock

PROMPT_MS = 200.0
"""Latency of the fastest tenth below which a wait of 0.5 s stands apart."""
SLOW_MS, STALL_MS = 150.0, (450.0, 600.0)
"""What a slow request takes beyond a prompt one, and what a stalled one does: the last third of SLOW_MS to its end."""
SIGNIFICANCE = 0.05
UNAVAILABLE = (503, 1014)
"""The status of a request whose time in the queue was over, in HTTP and gRPC."""

_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls of one arm in one closed loop."""

    requests: int
    stalled: int
    """Requests that took about 0.5 s more than a prompt one, or were refused as unavailable after so long; 0 unless
    there are more than a broad latency has."""
    refused: int
    """Those of them that were refused."""
    median_ms: float
    """Median latency of the good responses that did not stall."""
    factor: float
    """The mean latency of the good responses over that of those that did not stall: what the stalls cost in
    throughput."""


def find_stalls(blocks: Sequence[StoredBlock]) -> Stalls | None:
    """The stalls in blocks of one arm and closed loop; None without good responses, and if prompt ones take too long to
    tell a stall from them."""
    stored = [(block, block.samples) for block in blocks if block.samples is not None and len(block.samples)]
    samples = np.concatenate([np.empty(0, dtype=SAMPLE_DTYPE), *(own for _, own in stored)])
    latency, answered = latencies_ms(samples), samples["error"] < 0
    prompt_ms = float(np.quantile(latency[answered], 0.1)) if answered.any() else PROMPT_MS
    if prompt_ms >= PROMPT_MS:
        return None
    sizes = np.concatenate([_sizes(block, own) for block, own in stored])
    refused = ~answered & np.isin(samples["status"], UNAVAILABLE)
    beyond = np.where(refused, latency, latency - np.maximum(prompt_ms, _fastest(sizes, latency, answered)))
    slow = (answered | refused) & (beyond >= SLOW_MS) & (beyond <= STALL_MS[1])
    stalled = slow & (beyond >= STALL_MS[0])
    places = np.repeat(np.arange(len(stored)), [len(own) for _, own in stored])
    cases = np.array([row for place in range(len(stored)) for row in _cases(samples, slow & (places == place))], int)
    chance = special.bdtrc(stalled[cases].sum() - 1, len(cases), 1.0 / 3.0) if len(cases) else 1.0
    if chance > SIGNIFICANCE:
        stalled = np.zeros_like(stalled)
    others = latency[answered & ~stalled]
    return Stalls(
        requests=len(samples),
        stalled=int(stalled.sum()),
        refused=int((stalled & refused).sum()),
        median_ms=float(np.median(others)),
        factor=float(np.mean(latency[answered]) / np.mean(others)),
    )


def _sizes(block: StoredBlock, samples: Samples) -> _Values:
    """Bytes of each request's tensors; 0 where they are not recorded."""
    sizes = np.array(block.record.body_payload_bytes or (0,), dtype=np.float64)
    bodies = samples["body"]
    known = (bodies >= 0) & (bodies < len(sizes))
    return np.where(known, sizes[np.where(known, bodies, 0)], 0.0)


def _fastest(sizes: _Values, latency: _Values, answered: _Mask) -> _Values:
    """For each request the least latency of a good response of its size; 0 without one."""
    _, places = np.unique(sizes, return_inverse=True)
    least = np.full(int(places.max()) + 1, np.inf)
    np.minimum.at(least, places[answered], latency[answered])
    return np.where(np.isfinite(least), least, 0.0)[places]


def _cases(samples: Samples, slow: _Mask) -> list[int]:
    """The rows of one block's slow requests, without those that overlap the one before by another user."""
    rows = np.flatnonzero(slow)
    cases: list[int] = []
    for row in rows[np.argsort(samples["intended_ns"][rows], kind="stable")]:
        last = cases[-1] if cases else None
        ended = last is None or samples["intended_ns"][row] >= samples["end_ns"][last] - SLOW_MS * NS_PER_MS
        if last is None or ended or samples["user"][row] == samples["user"][last]:
            cases.append(int(row))
    return cases
