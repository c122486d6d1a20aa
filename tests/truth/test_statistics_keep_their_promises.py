"""Seeded simulations of whole runs: false winners, coverage of the interval, power at the stated effect.

The noise is what a shared machine makes: a slow drift, weather that lasts for some blocks, blocks that a neighbour
slows down, the second block of a pair a little slower than the first, and percentiles noisier the higher they are.
`docs/measurement.md` holds the figures that these tests print with `-s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.comparisons import Comparison, compare_all
from loadgen.records import ArmRequest, Cell, Experiment
from loadgen.statistics import SIGNIFICANCE, detectable_effect
from loadgen.summaries import BlockSummary, LatencySummary

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


def experiment(cells: int, pairs: int, margin: float) -> Experiment:
    return Experiment(
        a=ArmRequest(label="a", target="native"), b=ArmRequest(label="b", target="native"), model="m",
        weights="random:0", payload="fp32", transport="http", preset="full", seed=0, equivalence_margin=margin,
        threads=1, cells=tuple(cell(n + 1, pairs) for n in range(cells)),
    )  # fmt: skip


def cell(batch_size: int, pairs: int) -> Cell:
    return Cell(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=100, seconds=0, max_seconds=1, pairs=pairs
    )


def simulate(
    plan: Experiment, rng: np.random.Generator, noise: Noise, effect: float = 1.0, on: str = ""
) -> tuple[Comparison, ...]:
    """One run of `plan`; B's blocks of the cell `on` (all of them where empty) are `effect` times as fast."""
    pairs = plan.cells[0].pairs
    logs = noise(rng, 2 * pairs * len(plan.cells))
    blocks = []
    for place, cell in enumerate(plan.cells):
        swapped = rng.random() < 0.5
        for slot in range(2 * pairs):
            pair, position = divmod(slot, 2)
            label = "ab"[(position + (pair % 4 in (1, 2)) + swapped) % 2]
            seconds = math.exp(logs[place * 2 * pairs + slot])
            if label == "b" and on in ("", cell.name):
                seconds /= effect
            p50, p90, p99 = (seconds * math.exp(rng.normal(0.0, spread)) for spread in (0.004, 0.012, 0.05))
            blocks.append(
                BlockSummary(
                    index=len(blocks), cell=cell.name, pair=pair, label=label, position=position, start_s=0.0,
                    duration_s=1.0, complete=True, requests=700, errors=0, items=700,
                    throughput_per_s=100.0 / seconds, full_load_share=1.0,
                    latency=LatencySummary(samples=700, mean_ms=p50, p50_ms=p50, p90_ms=p90, p95_ms=p90, p99_ms=p99,
                                           p99_9_ms=None),
                    send_lag_p99_ms=0.0, send_lag_max_ms=0.0, warm_up_share=0.0, warm_up_error_share=0.0,
                    generator_cpu_share=0.1, server_cpu_cores=1.0, request_bytes=1.0, response_bytes=1.0, note=None,
                )
            )  # fmt: skip
    return compare_all(plan, blocks, [])


def upper_bound(events: int, trials: int) -> float:
    """Of a share, one-sided 97.5 %, normal approximation."""
    share = events / trials
    return share + 1.96 * math.sqrt(max(share * (1 - share), 1 / trials) / trials)


@pytest.mark.parametrize("noise", [plain, weather])
@pytest.mark.parametrize("pairs", [4, 12])
def test_identical_arms_name_a_winner_in_at_most_one_run_in_twenty(noise: Noise, pairs: int) -> None:
    """Seven cells with four metrics each: one false name among 28 spoils the run."""
    plan, rng, runs = experiment(7, pairs, 0.05), np.random.default_rng(2024), 1000
    spoiled = sum(any(c.verdict in ("a_faster", "b_faster") for c in simulate(plan, rng, noise)) for _ in range(runs))
    print(f"{noise.__name__}, {pairs} pairs: a winner in {spoiled} of {runs} runs of identical arms")  # noqa: T201
    assert spoiled / runs <= 0.05
    assert upper_bound(spoiled, runs) <= 0.08


def test_without_the_adjustment_most_runs_would_name_one() -> None:
    """The test above can fail: the same runs judged by their raw p do."""
    plan, rng = experiment(7, 12, 0.0001), np.random.default_rng(2024)
    spoiled = sum(any((c.p_value or 1.0) < SIGNIFICANCE for c in simulate(plan, rng, plain)) for _ in range(200))
    assert spoiled / 200 > 0.2


@pytest.mark.parametrize("noise", [plain, weather])
@pytest.mark.parametrize("pairs", [4, 12])
def test_the_interval_covers_the_truth(noise: Noise, pairs: int) -> None:
    """92 to 98 % of single intervals. Under weather the intervals may only be wider than promised, never narrower."""
    plan, rng, runs = experiment(1, pairs, 0.05), np.random.default_rng(7), 2000
    covered, effect = 0, 1.05
    for _ in range(runs):
        found = simulate(plan, rng, noise, effect)[0]
        assert found.ci95 is not None
        covered += found.ci95[0] <= effect <= found.ci95[1]
    print(f"{noise.__name__}, {pairs} pairs: covered {covered / runs:.1%}")  # noqa: T201
    assert covered / runs >= 0.92
    if noise is plain:
        assert covered / runs <= 0.98


@pytest.mark.parametrize("pairs", [4, 8, 16])
def test_a_difference_of_the_stated_size_is_found_in_four_runs_of_five(pairs: int) -> None:
    """The effect that a run of identical arms states is planted into an independent run of the same plan."""
    plan, rng, runs = experiment(5, pairs, 0.0001), np.random.default_rng(11), 500
    target, found = plan.cells[2].name, 0
    for _ in range(runs):
        stated = next(c for c in simulate(plan, rng, plain) if c.scenario == target).minimal_detectable_effect
        assert stated is not None
        again = next(c for c in simulate(plan, rng, plain, 1.0 + stated, target) if c.scenario == target)
        found += again.verdict == "b_faster"
    print(f"{pairs} pairs: {found / runs:.1%} of differences of the stated size were named")  # noqa: T201
    assert found / runs >= 0.80 - 2.5 * math.sqrt(0.16 / runs)


def test_pairing_absorbs_a_drift_that_would_fool_one_arm_after_the_other() -> None:
    """The same drifting machine: all of A before all of B names a winner nearly always, pairs hardly ever."""
    rng = np.random.default_rng(5)
    sequential = interleaved = 0
    plan = experiment(1, 8, 0.001)
    for _ in range(200):
        drift = np.linspace(0.0, 0.15, 16) + rng.normal(0.0, 0.01, size=16)
        sequential += abs(drift[:8].mean() - drift[8:].mean()) > 0.03
        verdict = simulate(plan, rng, lambda _, __, found=drift: found)[0].verdict
        interleaved += verdict in ("a_faster", "b_faster")
    assert sequential > 190
    assert interleaved <= 14


def test_more_comparisons_cost_sensitivity() -> None:
    """What the family costs at 4 and 12 pairs, for a spread of 2 %; the figures stand in the documentation."""
    for pairs in (4, 6, 12):
        effects = [detectable_effect(0.02, pairs, family) for family in (1, 10, 20)]
        print(f"{pairs} pairs: {[f'{e:.1%}' for e in effects if e is not None]}")  # noqa: T201
        assert effects == sorted(effects, key=lambda e: e or 0.0)
