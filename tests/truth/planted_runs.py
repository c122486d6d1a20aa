"""Runs of arms with a planted truth, simulated request by request and put through the real summaries and comparisons.

The machine is restless too: each block is slower or faster as a whole by a normal factor of 1 %. Truths are computed
from the planted distributions: means for throughput, quantiles for percentiles.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from loadgen.metrics.comparisons import PooledRequests, compare_all
from loadgen.metrics.summaries import summarise_blocks
from loadgen.records.run import ArmRequest, BlockRecord, Experiment, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.records.store import StoredBlock

BLOCK_NOISE = 0.01
NS = 1e9


@dataclass(frozen=True)
class Arm:
    """A server's time for a request, in seconds."""

    mean_s: float = 0.008
    cv: float = 0.0
    """Gamma distributed about that mean; 0: always the same."""
    tail_share: float = 0.0
    tail_factor: float = 1.0
    stall_s: float = 0.0
    stall_every_s: float = 10.0
    body_s: float = 0.0
    drift_per_minute: float = 0.0
    capacity_per_s: float = math.inf

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Of so many requests, without stalls and queues."""
        times = np.full(count, self.mean_s)
        if self.cv:
            times = rng.gamma(1 / self.cv**2, self.mean_s * self.cv**2, size=count)
        slow = rng.random(count) < self.tail_share
        return np.asarray(np.where(slow, times * self.tail_factor, times) + self.body_s)

    def closed_loop(self, rng: np.random.Generator, start_s: float, factor: float, requests: int) -> np.ndarray:
        """(due, end) of each request of one user."""
        times = self.times(rng, requests) * factor * (1 + self.drift_per_minute * start_s / 60)
        if not self.stall_s:
            ends = start_s + np.cumsum(times)
            return np.stack([np.concatenate([[start_s], ends[:-1]]), ends])
        pairs, now = np.empty((2, requests)), start_s
        for index, time in enumerate(times):
            end = self.after_stall(now + time)
            pairs[:, index] = now, end
            now = end
        return pairs

    def open_loop(self, rng: np.random.Generator, start_s: float, factor: float, rate: float, requests: int):
        """(due, end) of requests that fall due at random (Poisson)."""
        due = start_s + np.cumsum(rng.exponential(1 / rate, size=requests))
        ends = due + self.times(rng, requests) * factor
        if math.isfinite(self.capacity_per_s):
            for index in range(1, requests):
                ends[index] = max(ends[index], ends[index - 1] + factor / self.capacity_per_s)
        return np.stack([due, np.array([self.after_stall(end) for end in ends]) if self.stall_s else ends])

    def after_stall(self, end_s: float) -> float:
        """When an answer that is ready at `end_s` gets out."""
        into = end_s % self.stall_every_s
        return end_s + self.stall_s - into if into < self.stall_s else end_s


@dataclass(frozen=True)
class Truth:
    """What is planted, where it is looked for, and what must come out."""

    name: str
    a: Arm
    b: Arm
    metric: str
    ratio: float
    right: tuple[str, ...]
    """Verdicts that are true."""
    margin: float = 0.05
    pairs: int = 8
    requests: int = 200
    rate_per_s: float | None = None

    @property
    def experiment(self) -> Experiment:
        """As the comparison would be asked for."""
        shape: dict[str, object] = {"arrivals": "poisson", "rate_per_s": self.rate_per_s} if self.rate_per_s else {}
        workload = Workload(
            scenario="open" if self.rate_per_s else "single", batch_size=1, concurrency=64 if self.rate_per_s else 1,
            requests=self.requests, seconds=0.0, max_seconds=60.0, rounds=self.pairs, **shape,  # type: ignore[arg-type]
        )  # fmt: skip
        return Experiment(
            arms=(ArmRequest(label="a", target="native"), ArmRequest(label="b", target="triton")), model="m",
            weights="random:0", payload="fp32", transport="http", preset="quick", seed=0,
            equivalence_margin=self.margin, threads=1, workloads=(workload,),
        )  # fmt: skip


BASE = Arm()
GAMMA = Arm(cv=0.5)
SLOWER = ("baseline_better",)
ALIKE = ("no_difference", "inconclusive")
TRUTHS = (
    Truth("fixed delay, identical", BASE, BASE, "throughput", 1.0, ("no_difference",), pairs=16),
    Truth("random delay (gamma, CV 0.5), identical", GAMMA, GAMMA, "throughput", 1.0, ALIKE),
    *(
        Truth(
            f"+{percent} %", BASE, replace(BASE, mean_s=BASE.mean_s * (1 + percent / 100)), "latency_p50",
            1 + percent / 100, SLOWER, margin=0.001, pairs=pairs,
        )
        for percent, pairs in ((1, 48), (2, 24), (5, 16))
    ),
    Truth("+5 % of a random delay", GAMMA, replace(GAMMA, mean_s=0.0084), "throughput", 1 / 1.05,
          ("baseline_better", "inconclusive"), margin=0.001),
    Truth("heavier tail only: its p50", BASE, Arm(tail_share=0.03, tail_factor=4.0), "latency_p50", 1.0,
          ("no_difference",), pairs=16, requests=700),
    Truth("heavier tail only: its p99", BASE, Arm(tail_share=0.03, tail_factor=4.0), "latency_p99", 4.0, SLOWER,
          pairs=16, requests=700),
    Truth("200 ms stall every 10 s, open loop", BASE, Arm(stall_s=0.2), "latency_p99", 0.108 / 0.008, SLOWER,
          pairs=16, requests=1000, rate_per_s=100.0),
    Truth("200 ms stall every 10 s, closed loop", BASE, Arm(stall_s=0.2), "latency_p99", 1.0,
          ALIKE, requests=1250),
    Truth("5 ms from the first byte to the last", BASE, Arm(body_s=0.005), "latency_p50", 13 / 8, SLOWER,
          pairs=16),
    Truth("both slow down by 60 % a minute", Arm(drift_per_minute=0.6), Arm(drift_per_minute=0.6), "throughput", 1.0,
          ALIKE),
    Truth("150/s at most, asked for 200/s", BASE, Arm(capacity_per_s=150.0), "achieved_rate", 0.75, SLOWER,
          pairs=16, requests=800, rate_per_s=200.0),
)  # fmt: skip


@dataclass
class Found:
    """Over many trials of one truth."""

    trials: int = 0
    covered: int = 0
    """Intervals that hold the true ratio."""
    verdicts: Counter[str] = field(default_factory=Counter)

    def right(self, truth: Truth) -> float:
        """Share of true verdicts."""
        return sum(self.verdicts[verdict] for verdict in truth.right) / self.trials


def try_truth(truth: Truth, trials: int) -> Found:
    """Seeded runs, each compared as one of the command is."""
    plan, outcome = truth.experiment, Found()
    for trial in range(trials):
        rng = np.random.default_rng((*truth.name.encode(), trial))
        blocks = simulate(truth, plan, rng)
        every = compare_all(plan, summarise_blocks(blocks), requests=PooledRequests(blocks).by_block)
        (comparison,) = [c for c in every if c.metric == truth.metric]
        outcome.trials += 1
        low, high = comparison.ci95 or (math.nan, math.nan)
        outcome.covered += low <= truth.ratio <= high
        outcome.verdicts[comparison.verdict] += 1
    return outcome


def simulate(truth: Truth, plan: Experiment, rng: np.random.Generator) -> list[StoredBlock]:
    """All blocks of one run, one after the other, in ABBA order."""
    (workload,) = plan.workloads
    now, blocks = float(rng.uniform(0.0, 10.0)), []
    for slot in range(2 * workload.rounds):
        pair, position = divmod(slot, 2)
        label = "ab"[(position + (pair % 4 in (1, 2))) % 2]
        arm = truth.a if label == "a" else truth.b
        factor = math.exp(rng.normal(0.0, BLOCK_NOISE))
        if workload.rate_per_s is None:
            due, end = arm.closed_loop(rng, now, factor, workload.requests)
        else:
            due, end = arm.open_loop(rng, now, factor, workload.rate_per_s, workload.requests)
        record = _record(workload, slot, pair, label, position, due, end)
        blocks.append(StoredBlock(record, workload, _samples(due, end)))
        now = float(end.max()) + 0.3
    return blocks


def _samples(due: np.ndarray, end: np.ndarray) -> Samples:
    samples = np.zeros(len(due), dtype=SAMPLE_DTYPE)
    samples["intended_ns"] = samples["send_ns"] = (due * NS).astype(np.int64)
    samples["first_byte_ns"] = samples["end_ns"] = (end * NS).astype(np.int64)
    samples["batch"], samples["status"], samples["error"] = 1, 200, -1
    free: list[float] = []
    if np.all(due[1:] >= end[:-1]):  # one connection is enough
        return samples
    for index, (start, done) in enumerate(zip(due, end, strict=True)):  # the first connection that is free
        user = next((place for place, at in enumerate(free) if at <= start), len(free))
        free[user : user + 1] = [done]
        samples["user"][index] = user
    return samples


def _record(
    workload: Workload, index: int, pair: int, label: str, position: int, due: np.ndarray, end: np.ndarray
) -> BlockRecord:
    is_open = workload.rate_per_s is not None
    return BlockRecord(
        index=index, workload=workload.name, round=pair, label=label, position=position,
        started_at="", window_start_ns=int(due[0] * NS), window_end_ns=int(end.max() * NS), samples="", complete=True,
        requests=len(due), items=len(due), errors=0, error_messages=(), generator_cpu_ns=0, server_cpu_ns=None,
        stages=None, offered=len(due) if is_open else None,
        due_span_ns=int((due[-1] - due[0]) * NS) if is_open else None,
    )  # fmt: skip
