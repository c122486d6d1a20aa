"""Finds stalls of 0.5 s in a closed loop: requests that met a timer, apart from a latency that is simply broad.

A request stalled if it took 0.45 to 0.6 s more than a prompt one: the fastest tenth of the requests, or the fastest
request of its size if that took longer, so that a long text is not a stall. The tail of a broad latency falls, so at
most a third of the requests that took 0.15 to 0.6 s more are stalls; an arm has stalls if it has more of them than
chance explains (one-sided binomial test, p ≤ 5 %), which takes three at least.

The test needs independent cases, and one sleep of a server delays all of its users at once. So of the slow requests
that overlap only the first to begin is a case: its length does not depend on which request was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from loadgen.comparison.pool import Pool
from loadgen.records.samples import NS_PER_MS, Samples, latencies_ms
from loadgen.run.storage import StoredBlock

PROMPT_MS = 200.0
"""Latency of the fastest tenth below which a wait of 0.5 s stands apart."""
SLOW_MS, STALL_MS = 150.0, (450.0, 600.0)
"""What a slow request takes beyond a prompt one, and what a stalled one does: the last third of SLOW_MS to its end."""
SIGNIFICANCE = 0.05
UNAVAILABLE = (503, 1014)
"""The status of a request whose time in the queue was over, in HTTP and gRPC."""

_Values = np.ndarray[tuple[int], np.dtype[np.float64]]
_Times = npt.NDArray[np.int64]
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
    stored = [block for block in blocks if block.has_samples]
    every, fastest = Pool(), dict[float, float]()
    for block in stored:
        requests = _read(block)
        every.add(block.record.index, requests.latency[requests.answered])
        for size, least in zip(*_least(requests), strict=True):
            fastest[size] = min(least, fastest.get(size, math.inf))
    prompt_ms = float(np.quantile(every.values, 0.1)) if every.count else PROMPT_MS
    if prompt_ms >= PROMPT_MS:
        return None
    count = stalled = refused = cases = stalled_cases = 0
    others = Pool()
    for block in stored:
        requests = _read(block)
        slow, stalls = _slow(requests, prompt_ms, fastest)
        count, own = count + len(slow), _cases(requests, slow)
        cases, stalled_cases = cases + len(own), stalled_cases + int(stalls[own].sum())
        stalled, refused = stalled + int(stalls.sum()), refused + int((stalls & requests.refused).sum())
        others.add(block.record.index, requests.latency[requests.answered & ~stalls])
    chance = special.bdtrc(stalled_cases - 1, cases, 1.0 / 3.0) if cases else 1.0
    if chance > SIGNIFICANCE:
        stalled, refused, others = 0, 0, every
    return Stalls(
        requests=count,
        stalled=stalled,
        refused=refused,
        median_ms=float(np.median(others.values)),
        factor=(every.mean or 0.0) / (others.mean or math.nan),
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests of one block: a row each."""

    begun_ns: _Times
    ended_ns: _Times
    user: _Times
    latency: _Values
    answered: _Mask
    refused: _Mask
    sizes: _Values


def _read(block: StoredBlock) -> _Requests:
    samples = block.samples
    assert samples is not None
    answered = samples["error"] < 0
    return _Requests(
        begun_ns=samples["intended_ns"],
        ended_ns=samples["end_ns"],
        user=samples["user"],
        latency=latencies_ms(samples),
        answered=answered,
        refused=~answered & np.isin(samples["status"], UNAVAILABLE),
        sizes=_sizes(block, samples),
    )


def _slow(requests: _Requests, prompt_ms: float, fastest: Mapping[float, float]) -> tuple[_Mask, _Mask]:
    """The slow requests of a block, and those of them that stalled. `fastest` is the least latency of each size."""
    sizes, places = np.unique(requests.sizes, return_inverse=True)
    prompt = np.array([max(prompt_ms, fastest.get(size, 0.0)) for size in sizes.tolist()])[places]
    beyond = np.where(requests.refused, requests.latency, requests.latency - prompt)
    slow = (requests.answered | requests.refused) & (beyond >= SLOW_MS) & (beyond <= STALL_MS[1])
    return slow, slow & (beyond >= STALL_MS[0])


def _sizes(block: StoredBlock, samples: Samples) -> _Values:
    """Bytes of each request's tensors; 0 where they are not recorded."""
    sizes = np.array(block.record.body_payload_bytes or (0,), dtype=np.float64)
    bodies = samples["body"]
    known = (bodies >= 0) & (bodies < len(sizes))
    return np.where(known, sizes[np.where(known, bodies, 0)], 0.0)


def _least(requests: _Requests) -> tuple[list[float], list[float]]:
    """The sizes of the good responses, and the least latency of each."""
    sizes, places = np.unique(requests.sizes[requests.answered], return_inverse=True)
    least = np.full(len(sizes), np.inf)
    np.minimum.at(least, places, requests.latency[requests.answered])
    return sizes.tolist(), least.tolist()


def _cases(requests: _Requests, slow: _Mask) -> list[int]:
    """The rows of one block's slow requests, without those that overlap the one before by another user."""
    rows = np.flatnonzero(slow)
    cases: list[int] = []
    begun_ns, ended_ns, user = requests.begun_ns, requests.ended_ns, requests.user
    for row in rows[np.argsort(begun_ns[rows], kind="stable")]:
        last = cases[-1] if cases else None
        ended = last is None or begun_ns[row] >= ended_ns[last] - SLOW_MS * NS_PER_MS
        if last is None or ended or user[row] == user[last]:
            cases.append(int(row))
    return cases
