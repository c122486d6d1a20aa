"""Blocks of closed loops that never happened, as the load generator stores them, with independent request times.

Every user sends its next request when the last one is answered. The block has had enough at a moment that is fixed
beforehand; requests begun before it are stored, those of the cool-down are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from loadgen.metrics.registry import slow_start, throughput_per_s
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.stats.ratios import estimate_ratio

MEAN_NS = 10_000_000
Times = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def constant(_: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Always the same."""
    return np.ones(shape)


def exponential(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """CV 1."""
    return rng.exponential(1.0, shape)


def lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """CV 3."""
    spread = math.sqrt(math.log(10.0))
    return np.exp(rng.normal(-(spread**2) / 2.0, spread, shape))


def bimodal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One in ten takes five times as long."""
    return np.where(rng.random(shape) < 0.1, 5.0, 1.0) / 1.4


KINDS: dict[str, Times] = {
    "constant": constant, "exponential, CV 1": exponential, "lognormal, CV 3": lognormal, "bimodal": bimodal,
}  # fmt: skip


def block(rng: np.random.Generator, times: Times, users: int, spans: float, factor: float = 1.0) -> Samples:
    """One block that has had enough after `spans` mean request times; every request takes `factor` times as long."""
    count = int(4 * spans) + 40
    lives = (times(rng, (users, count)) * MEAN_NS * factor).astype(np.int64) + 1
    ends = np.cumsum(lives, axis=1)
    while ends[:, -1].min() < spans * MEAN_NS:  # many short ones in a row
        more = (times(rng, (users, count)) * MEAN_NS * factor).astype(np.int64) + 1
        ends = np.concatenate([ends, ends[:, -1:] + np.cumsum(more, axis=1)], axis=1)
    starts = np.concatenate([np.zeros((users, 1), dtype=np.int64), ends[:, :-1]], axis=1)
    user, place = np.nonzero(starts < spans * MEAN_NS)
    samples = np.zeros(len(user), dtype=SAMPLE_DTYPE)
    samples["intended_ns"] = samples["send_ns"] = starts[user, place]
    samples["end_ns"], samples["user"], samples["batch"], samples["error"] = ends[user, place], user, 1, -1
    return samples


def up_to_the_last_answer(samples: Samples) -> float:
    """Requests per second as a stopwatch would have it."""
    return len(samples) / (int(samples["end_ns"].max()) / 1e9)


def bias(trials: int, times: Times, users: int, spans: float) -> tuple[float, float]:
    """Mean relative error of the throughput, and of that up to the last answer."""
    rng, truth = np.random.default_rng(3), users / (MEAN_NS / 1e9)
    blocks = [block(rng, times, users, spans) for _ in range(trials)]
    error = float(np.mean([throughput_per_s(samples) or 0.0 for samples in blocks])) / truth - 1.0
    return error, float(np.mean([up_to_the_last_answer(samples) for samples in blocks])) / truth - 1.0


def compare(rng: np.random.Generator, times: Times, users: int, spans: float, rounds: int) -> tuple[float, float]:
    """The 95 % interval of the throughput of an arm with these request times over that of a constant one of the same
    mean, on a machine whose blocks differ by 1 %."""
    ratios = []
    for _ in range(rounds):
        noise = np.exp(rng.normal(0.0, 0.01, 2))
        a = throughput_per_s(block(rng, constant, users, spans, noise[0]))
        b = throughput_per_s(block(rng, times, users, spans, noise[1]))
        ratios.append((b or math.nan) / (a or math.nan))
    return estimate_ratio(ratios, 0.05).ci95 or (math.nan, math.nan)


def slow_starts_of_pauses(rng: np.random.Generator, users: int, blocks: int) -> list[float]:
    """`slow_start` of blocks of a warm server that pauses for 150 ms about once in two blocks, for all users at
    once."""
    costs = []
    for _ in range(blocks):
        lives = (rng.normal(1.0, 0.05, (100, users)) * MEAN_NS).astype(np.int64)
        lives[rng.random(100) < 0.005] += 150_000_000
        longest = lives.max(axis=1)
        start = np.repeat(np.cumsum(longest) - longest, users)
        samples = np.zeros(lives.size, dtype=SAMPLE_DTYPE)
        samples["intended_ns"], samples["end_ns"] = start, start + lives.ravel()
        samples["user"], samples["error"] = np.tile(np.arange(users), 100), -1
        costs.append(slow_start(samples) or 0.0)
    return costs
