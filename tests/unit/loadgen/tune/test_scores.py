"""The score of a contender: its error is that of the truth, whatever all arms of a round share."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen.metrics.registry import METRICS, THROUGHPUT
from loadgen.tune.records import ANCHOR
from loadgen.tune.screening import LEAST_ERROR, _by_blocks

ARMS = {ANCHOR: 0.0, "native-1": 0.1, "native-2": -0.3, "triton-0": 0.0, "triton-1": 0.02}


def blocks(rng: np.random.Generator, rounds: int, noise: float, sign: float = 1.0) -> list[Any]:
    """Of arms with these log leads. All arms of a round are faster or slower by 20 %."""
    drift = rng.normal(0.0, 0.2, rounds)
    return [
        SimpleNamespace(
            round=number, label=label, complete=True, figures={},
            throughput_per_s=100.0 * math.exp(sign * (lead + drift[number] + rng.normal(0.0, noise))),
            latency=SimpleNamespace(mean_ms=10.0 * math.exp(-(lead + drift[number] + rng.normal(0.0, noise)))),
        )
        for number in range(rounds)
        for label, lead in ARMS.items()
    ]  # fmt: skip


def test_the_error_covers_the_truth_in_nineteen_of_twenty() -> None:
    rng, outside, trials = np.random.default_rng(5), 0, 600
    for _ in range(trials):
        scores = _by_blocks(blocks(rng, 4, 0.03), THROUGHPUT, ANCHOR)
        log_ratio, error, _ = scores["native-1"]
        outside += abs(log_ratio - ARMS["native-1"]) > 1.96 * error
    assert 0.025 < outside / trials < 0.08


def test_better_is_above_zero_whatever_the_metric() -> None:
    rng = np.random.default_rng(1)
    for metric in (THROUGHPUT, METRICS["latency_mean"]):
        scores = _by_blocks(blocks(rng, 6, 0.001), metric, ANCHOR)
        assert scores["native-1"][0] == pytest.approx(0.1, abs=0.01)
        assert scores["native-2"][0] == pytest.approx(-0.3, abs=0.01)
    value = scores["native-2"][2]
    assert value == pytest.approx(10.0 * math.exp(0.3), rel=0.3)


def test_an_arm_that_lacks_a_round_has_no_score_and_costs_the_others_nothing() -> None:
    made = [b for b in blocks(np.random.default_rng(2), 4, 0.01) if (b.label, b.round) != ("triton-1", 2)]
    scores = _by_blocks(made, THROUGHPUT, ANCHOR)
    assert set(scores) == set(ARMS) - {"triton-1"}


def test_without_the_anchor_or_a_second_round_there_is_no_score() -> None:
    made = blocks(np.random.default_rng(3), 4, 0.01)
    assert _by_blocks([b for b in made if b.label != ANCHOR], THROUGHPUT, ANCHOR) == {}
    assert _by_blocks([b for b in made if b.round == 0], THROUGHPUT, ANCHOR) == {}


def test_a_regular_server_has_an_error_too() -> None:
    scores = _by_blocks(blocks(np.random.default_rng(4), 4, 0.0), THROUGHPUT, ANCHOR)
    assert scores["native-1"][1] == LEAST_ERROR
