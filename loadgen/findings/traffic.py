"""Recorded traffic: how it arrives, and where each arm lost time on it, in its bursts or in quiet.

A request is in a burst if more than `BURST_FACTOR` times as many others as on average, and more than one, fall due
within `Company.near_s` of it.

    DIR/replayed_traffic.json   ReplayedTraffic   the traffic, as it was when the run began
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from loadgen.experiment.replay import Replay
from loadgen.metrics.breakdown import contradictions_in
from loadgen.metrics.facts import Facts, WorkloadFacts
from loadgen.metrics.tokens import samples_of
from loadgen.records.run import Found, Label, Record
from loadgen.records.samples import NS_PER_S, Samples, latencies_ms
from loadgen.records.targets import Kind
from loadgen.stats.percentiles import percentile
from loadgen.stats.ratios import estimate_ratio, lone_correlation


class Company(NamedTuple):
    """How requests of a kind are put beside those that are due at about their time."""

    near_s: float
    """As long as a request may still be waiting for those before it."""
    title: str
    """What is shown of them."""
    times_ms: Callable[[Samples], Array]
    has_batches: bool
    """Whether executions are batches of whole requests; those of tokens are steps."""


COMPANY: Mapping[Kind, Company] = {
    Kind.TENSORS: Company(0.05, "Latencies", latencies_ms, has_batches=True),
    Kind.TOKENS: Company(0.5, "Times to the first token", itemgetter("ttft_ms"), has_batches=False),
}
BURST_FACTOR = 2.0
LEAST_REQUESTS = 3
"""Of a block, for a median that is compared."""
MOST_BARS = 240
MOST_SHAPES = 12
Array = np.ndarray[Any, Any]


class ReplayedTraffic(Record, frozen=True, kw_only=True):
    """The requests of a recording that are replayed; figures of time are those of the recording, at speed 1."""

    FILE = "replayed_traffic.json"
    requests: int
    seconds: float
    """From the first to the last."""
    rate_per_s: float
    bar_seconds: float
    arrivals: tuple[int, ...]
    """Requests in each `bar_seconds`."""
    together_seconds: float
    dispersion: float | None
    """Variance over mean of the requests in each `together_seconds`: 1 for independent arrivals, more with bursts."""
    gap_variation: float | None
    """Standard deviation of the gaps over their mean: 1 for independent arrivals."""
    shapes: dict[str, int]
    """The requests of the most frequent shapes, or of routes."""
    further_shapes: int
    contents: int
    """Different contents."""
    repeated_share: float
    """The share of requests whose content came before."""
    bytes: dict[str, int]
    """Sizes of the contents: min, p50, p99, max."""
    left_out_seconds: float = 0.0
    answers: int = 0
    """Requests with a recorded answer."""


class PartOfTraffic(Record, frozen=True, kw_only=True):
    """The good requests of one arm in one workload that are in bursts, or that are not. Latencies are from the intended
    start; of streamed answers to the first token."""

    requests: int
    p50_ms: float | None
    p99_ms: float | None
    under_way: float | None
    """Mean requests that the arm had not answered when one of these was sent."""
    executed_batch: float | None = None
    """Mean items per execution of the arm, in the half of the blocks with the larger share of requests in bursts, or in
    the other half: servers count their executions per block, and none says those of a request."""
    ratio: float | None = None
    """Of the arm's median over the baseline's, the mean of all rounds; None for the baseline."""
    ci95: tuple[float, float] | None = None


class BurstLatency(Record, frozen=True, kw_only=True):
    """Latencies of one arm in one workload."""

    workload: str
    label: Label
    bursts: PartOfTraffic
    quiet: PartOfTraffic
    by_crowd: dict[int, float]
    """Median latency in ms of the requests with so many due near them, themselves included, and fewer than twice as
    many."""


class TrafficFound(Found, frozen=True, kw_only=True):
    """The replayed traffic."""

    STUDY = "traffic"
    traffic: ReplayedTraffic | None = None
    """None in runs without one."""
    latencies: tuple[BurstLatency, ...] = ()


def describe(replay: Replay, near_s: float) -> ReplayedTraffic:
    """How the traffic of a replay arrives, and what it consists of; `near_s` is that of its kind. Raises
    `TrafficError`."""
    requests = replay.requests()
    at_s = np.array([request.at_ns for request in requests], dtype=np.float64) / NS_PER_S
    at_s -= at_s[0]
    seconds = float(at_s[-1])
    bar_seconds = next(step for step in _steps() if seconds / step <= MOST_BARS)
    gaps = np.diff(at_s)
    together = np.bincount((at_s / (2 * near_s)).astype(np.int64))[: int(seconds / (2 * near_s))]  # whole ones only
    shapes = Counter(request.shape for request in requests).most_common()
    sizes = [request.content_bytes for request in requests]
    contents = {request.content for request in requests}
    low, median, high, top = np.percentile(sizes, [0, 50, 99, 100], method="inverted_cdf")
    return ReplayedTraffic(
        requests=len(requests),
        seconds=seconds,
        rate_per_s=(len(requests) - 1) / seconds,
        bar_seconds=bar_seconds,
        arrivals=tuple(np.bincount((at_s / bar_seconds).astype(np.int64)).tolist()),
        together_seconds=2 * near_s,
        dispersion=float(together.var(ddof=1) / together.mean()) if len(together) > 1 else None,
        gap_variation=float(gaps.std() / gaps.mean()) if len(gaps) > 1 else None,
        shapes=dict(shapes[:MOST_SHAPES]),
        further_shapes=max(0, len(shapes) - MOST_SHAPES),
        contents=len(contents),
        repeated_share=1.0 - len(contents) / len(requests),
        bytes={"min": int(low), "p50": int(median), "p99": int(high), "max": int(top)},
        left_out_seconds=replay.left_out_seconds(),
        answers=sum(request.answer is not None for request in requests),
    )


def _steps() -> Iterator[float]:
    """Round widths of a bar."""
    width = 0.001
    while True:
        yield from (width, 2 * width, 5 * width)
        width *= 10


def analyse(facts: Facts) -> TrafficFound:
    """The stored traffic, and the latencies of every workload that replays it."""
    traffic = facts.run.record_of(ReplayedTraffic)
    if traffic is None:
        return TrafficFound()
    loads = (load for load in facts.loads if load.workload.traffic is not None)
    latencies = (latency for load in loads for latency in _latencies(facts, load, traffic))
    return TrafficFound(traffic=traffic, latencies=tuple(latencies))


def _latencies(facts: Facts, load: WorkloadFacts, traffic: ReplayedTraffic) -> Iterator[BurstLatency]:
    """The arms with blocks in a workload, the baseline first."""
    company = COMPANY[load.workload.kind]
    near_s = company.near_s
    most_quiet = max(1.0, BURST_FACTOR * 2.0 * near_s * traffic.rate_per_s * load.workload.speed)
    medians: dict[bool, dict[Label, dict[int, float]]] = {True: {}, False: {}}
    baseline = facts.run.experiment.baseline_in(load.workload.name)
    for label in facts.run.experiment.labels:
        parts: list[Array] = []
        counted: list[tuple[float, int, int]] = []
        for block in load.stored:
            record, samples = block.record, samples_of(block)
            if record.label != label or not record.complete or samples is None or not len(samples):
                continue
            times_ms = company.times_ms(samples)
            is_good = (samples["error"] < 0) & np.isfinite(times_ms)
            times_ms = times_ms[is_good]
            crowd, under_way = _company(samples, near_s)
            stages = record.stages if company.has_batches and not contradictions_in(block) else None
            if stages is not None and stages.executed_items and stages.executions:
                counted.append((float(np.mean(crowd > most_quiet)), stages.executed_items, stages.executions))
            crowd, under_way = crowd[is_good], under_way[is_good]
            parts.append(np.vstack((times_ms, crowd, under_way)))
            for is_burst, of_label in medians.items():
                chosen = times_ms[(crowd > most_quiet) == is_burst]
                if len(chosen) >= LEAST_REQUESTS:
                    of_label.setdefault(label, {})[record.round] = float(np.median(chosen))
        if not parts:
            continue
        pooled = np.hstack(parts)
        bursts, quiet = (
            _part(
                pooled[:, (pooled[1] > most_quiet) == is_burst], _ratios(of_label, baseline, label),
                _mean_batch(counted, of_bursts=is_burst), facts,
            )
            for is_burst, of_label in medians.items()
        )  # fmt: skip
        yield BurstLatency(
            workload=load.workload.name, label=label, bursts=bursts, quiet=quiet,
            by_crowd=_by_crowd(pooled[0], pooled[1]),
        )  # fmt: skip


def _mean_batch(blocks: Sequence[tuple[float, int, int]], *, of_bursts: bool) -> float | None:
    """Of blocks, each with its share of requests in bursts, its items and its executions, those with more or fewer
    bursts than the median one; None if they do not differ."""
    middle = float(np.median([part for part, _, _ in blocks])) if blocks else 0.0
    halves = {
        half: [(items, executions) for part, items, executions in blocks if (part > middle) == half]
        for half in (True, False)
    }
    if not all(halves.values()):
        return None
    return sum(items for items, _ in halves[of_bursts]) / sum(executions for _, executions in halves[of_bursts])


def _part(pooled: Array, ratios: Sequence[float], executed_batch: float | None, facts: Facts) -> PartOfTraffic:
    times_ms, _, under_way = pooled
    estimate = estimate_ratio(ratios, facts.run.experiment.equivalence_margin, lone_correlation(ratios))
    return PartOfTraffic(
        requests=len(times_ms),
        p50_ms=percentile(times_ms, 0.5),
        p99_ms=percentile(times_ms, 0.99),
        under_way=float(under_way.mean()) if len(under_way) else None,
        executed_batch=executed_batch,
        ratio=estimate.ratio,
        ci95=estimate.ci95,
    )


def _company(samples: Samples, near_s: float) -> tuple[Array, Array]:
    """For each request how many others fall due near it, and how many were under way when it was sent."""
    due_ns, near_ns = np.sort(samples["intended_ns"]), int(near_s * NS_PER_S)
    after = np.searchsorted(due_ns, samples["intended_ns"] + near_ns, side="right")
    crowd = after - np.searchsorted(due_ns, samples["intended_ns"] - near_ns, side="left") - 1
    begun = np.searchsorted(np.sort(samples["send_ns"]), samples["send_ns"], side="left")
    ended = np.searchsorted(np.sort(samples["end_ns"]), samples["send_ns"], side="right")
    return crowd, begun - ended


def _by_crowd(times_ms: Array, crowd: Array) -> dict[int, float]:
    """The medians by powers of two of the requests that fall due together."""
    levels = 2 ** np.floor(np.log2(crowd + 1)).astype(np.int64)
    medians = {int(level): percentile(times_ms[levels == level], 0.5) for level in np.unique(levels)}
    return {level: median for level, median in medians.items() if median is not None}


def _ratios(medians: Mapping[Label, Mapping[int, float]], baseline: Label, label: Label) -> list[float]:
    """Of an arm to the baseline, by the rounds that both have."""
    base, arm = medians.get(baseline, {}), medians.get(label, {})
    if label == baseline:
        return []
    return [arm[number] / base[number] for number in sorted(base.keys() & arm.keys()) if base[number] > 0.0]
