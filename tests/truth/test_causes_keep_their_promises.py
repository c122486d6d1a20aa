"""Do the intervals of causes cover the truth, and does a cause that is none stay unnamed? Seeded simulations.

`docs/results/measured/statistics.md` holds the figures that these tests print with `-s`. An ablation is
simulated as its pairs of block means: both blocks of a pair share a level (the machine's weather), each has its own
noise.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from loadgen.findings.causes import CauseEffect, CauseName, MeasuredEffect, combine, difference, rank_causes
from loadgen.records.run import Label, Pairing, Workload

WEATHER, NOISE = 0.03, 0.01
AS_IS_MS: dict[Label, float] = {"a": 10.0, "b": 20.0}
SAVED_MS: dict[Label, float] = {"a": 2.0, "b": 3.0}
NAMES: tuple[CauseName, CauseName, CauseName] = ("transfer", "queue_delay", "compute")
WORKLOAD = Workload(scenario="single", batch_size=1, concurrency=1, requests=9, seconds=1.0, max_seconds=9.0, rounds=6)


def pairs(rng: np.random.Generator, count: int, first: float, second: float) -> list[tuple[float, float]]:
    level = np.exp(WEATHER * rng.standard_normal(count) - WEATHER**2 / 2)
    noise = np.exp(NOISE * rng.standard_normal((2, count)) - NOISE**2 / 2)
    return [(float(a), float(b)) for a, b in zip(first * level * noise[0], second * level * noise[1], strict=True)]


def measured(rng: np.random.Generator, name: CauseName, label: Label, count: int, saved_ms: float) -> MeasuredEffect:
    saved = difference(pairs(rng, count, AS_IS_MS[label] - saved_ms, AS_IS_MS[label]))
    assert saved is not None
    effect = CauseEffect(
        label=label, changed="", as_is_ms=AS_IS_MS[label], without_ms=AS_IS_MS[label] - saved_ms,
        saved_ms=saved.mean_ms, ci95_ms=saved.ci95_ms, ratio=None, ratio_ci95=None, pairs=count, folder="",
    )  # fmt: skip
    return MeasuredEffect(name, effect, saved)


@pytest.mark.parametrize("trials", [400, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [3, 4, 6])
def test_intervals_cover_and_what_is_no_cause_stays_unnamed(count: int, trials: int) -> None:
    rng = np.random.default_rng(count)
    covered = named = named_rightly = 0
    for _ in range(trials):
        real = [measured(rng, "transfer", label, count, SAVED_MS[label]) for label in ("a", "b")]
        none = [measured(rng, name, label, count, 0.0) for name in NAMES[1:] for label in ("a", "b")]
        total = combine([(1.0 if cause.effect.label == "b" else -1.0, cause.saved) for cause in real])
        low, high = total.ci95_ms or (0.0, 0.0)
        covered += low <= SAVED_MS["b"] - SAVED_MS["a"] <= high
        causes = rank_causes(WORKLOAD, Pairing("a", "b"), pairs(rng, 12, 10.0, 20.0), [*real, *none], [], None)
        assert causes is not None
        found = {cause.name for cause in causes.causes if cause.found}
        named += len(found - {"transfer"})
        named_rightly += "transfer" in found
    coverage, false = covered / trials, named / (2 * trials)
    found_share = named_rightly / trials
    sys.stdout.write(f"\n| {count} | {coverage:.1%} | {false:.1%} | {found_share:.0%} |")
    assert 0.92 <= coverage <= 0.985
    assert false <= 0.06
