"""Whole runs that never happened: seeded block summaries with known truths, given to the real comparisons.

The noise is what a shared machine makes: a slow drift, weather that lasts for some blocks, blocks that a neighbour
slows down, the second block of a pair a little slower than the first, and percentiles noisier the higher they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from loadgen.metrics.comparisons import Comparison, RequestValues, compare_all
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.run import ArmRequest, Experiment, Workload
from loadgen.records.samples import latencies_ms

Noise = Callable[[np.random.Generator, int], np.ndarray]


def plain(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """Independent, normal on the log scale: the method's own assumption."""
    return rng.normal(0.0, 0.02, size=blocks)


def weather(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """What the method does not assume."""
    drift = np.linspace(0.0, rng.normal(0.0, 0.08), blocks)
    lasting = np.zeros(blocks)
    for index in range(1, blocks):
        lasting[index] = 0.8 * lasting[index - 1] + rng.normal(0.0, 0.008)
    neighbours = (rng.random(blocks) < 0.05) * rng.exponential(0.10, size=blocks)
    second = 0.004 * (np.arange(blocks) % 2)
    return drift + lasting + neighbours + second + rng.normal(0.0, 0.01, size=blocks)


def autoregression(rng: np.random.Generator, phi: float, shape: tuple[int, ...]) -> np.ndarray:
    """Stationary first-order series along the last axis, with a spread of 2 %."""
    values = rng.normal(0.0, 0.02, size=shape)
    for place in range(1, shape[-1]):
        values[..., place] = phi * values[..., place - 1] + math.sqrt(1.0 - phi**2) * values[..., place]
    return values


def latencies(blocks: Sequence[BlockSummary], rng: np.random.Generator) -> RequestValues:
    """Requests behind such blocks: log-normal about the block's median, 660 in four pairs and as many in more."""
    count = -(-700 // (len({block.round for block in blocks})))
    return {
        (latencies_ms, block.index): (block.latency_ms("p50") or 1.0) * np.exp(rng.normal(0.0, 0.3, count))
        for block in blocks
    }


def experiment(
    workloads: int, pairs: int, margin: float, *, restarts: int = 1, until_decided: bool = False, arms: int = 2
) -> Experiment:
    """So many batched scenarios."""
    return Experiment(
        arms=tuple(ArmRequest(label=label, target="native", settings={"x": label}) for label in "abcdefgh"[:arms]),
        model="m", weights="random:0", payload="fp32", transport="http", preset="full", seed=0,
        equivalence_margin=margin, threads=1, workloads=tuple(workload(n + 1, pairs) for n in range(workloads)),
        restarts=restarts, until_decided=until_decided,
    )  # fmt: skip


def workload(batch_size: int, pairs: int) -> Workload:
    """One scenario."""
    return Workload(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=100, seconds=0, max_seconds=1, rounds=pairs
    )


def block(
    rng: np.random.Generator,
    index: int,
    name: str,
    pair: int,
    label: str,
    position: int,
    seconds: float,
    restart: int = 0,
) -> BlockSummary:
    """One block of a workload whose requests take that many times a hundredth of a second; percentiles have noise of
    their own."""
    p50, p90, p99 = (seconds * math.exp(deviation) for deviation in rng.normal(0.0, (0.004, 0.012, 0.05)).tolist())
    return BlockSummary(
        index=index, workload=name, round=pair, label=label, position=position, start_s=0.0,
        duration_s=1.0, complete=True, requests=700, errors=0, items=700,
        full_load_share=1.0, samples=700,
        figures={"throughput": 100.0 / seconds, "latency_mean": p50, "latency_p50": p50, "latency_p90": p90,
                 "latency_p99": p99},
        send_lag_p99_ms=0.0, send_lag_max_ms=0.0, warm_up_share=0.0,
        generator_cpu_share=0.1, server_cpu_cores=1.0, request_bytes=1.0, response_bytes=1.0, note=None,
        restart=restart,
    )  # fmt: skip


def simulate_blocks(
    plan: Experiment,
    rng: np.random.Generator,
    noise: Noise,
    effect: float | Mapping[str, float] = 1.0,
    on: str = "",
    restart_spread: float = 0.0,
    resemblance: float = 0.0,
) -> list[BlockSummary]:
    """One run of `plan`; B's blocks (or those of the arms in it) of the workload `on` (all where empty) are `effect`
    times as fast. Each
    restart shifts each arm by a normal factor of `restart_spread`/√2, so that the ratio has that spread. With
    `resemblance` φ the noise of each arm's blocks, in each workload, is a first-order autoregression of its own."""
    pairs, labels = plan.workloads[0].rounds, plan.labels
    arms, effects = len(labels), {"b": effect} if isinstance(effect, float) else effect
    logs = noise(rng, arms * pairs * len(plan.workloads))
    drifts = autoregression(rng, resemblance, (len(plan.workloads), arms, pairs)) if resemblance else None
    blocks: list[BlockSummary] = []
    for place, one in enumerate(plan.workloads):
        swapped = rng.random() < 0.5
        shifts = rng.normal(0.0, restart_spread / math.sqrt(2.0), size=(plan.restarts, arms))
        for slot in range(arms * pairs):
            pair, position = divmod(slot, arms)
            turn = (pair % 4 in (1, 2)) if arms == 2 else pair
            label = labels[(position + turn + swapped) % arms]
            restart = pair * plan.restarts // pairs
            weather = logs[place * arms * pairs + slot] if drifts is None else drifts[place, labels.index(label), pair]
            seconds = math.exp(weather + shifts[restart, labels.index(label)])
            if on in ("", one.name):
                seconds /= effects.get(label, 1.0)
            blocks.append(block(rng, len(blocks), one.name, pair, label, position, seconds, restart))
    return blocks


def simulate(
    plan: Experiment,
    rng: np.random.Generator,
    noise: Noise,
    effect: float | Mapping[str, float] = 1.0,
    on: str = "",
    restart_spread: float = 0.0,
    resemblance: float = 0.0,
    *,
    tails: bool = False,
) -> tuple[Comparison, ...]:
    """The comparisons of `simulate_blocks`; `tails` for those of p90 and p99 too, which take a hundred times as
    long."""
    blocks = simulate_blocks(plan, rng, noise, effect, on, restart_spread, resemblance)
    return compare_all(plan, blocks, requests=latencies(blocks, rng) if tails else None)


def names_a_winner(comparisons: Sequence[Comparison]) -> bool:
    """Anywhere in the run."""
    return any(c.winner is not None for c in comparisons)
