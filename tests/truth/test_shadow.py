"""What `abserve shadow` promises: equal servers have no winner in 19 of 20 runs, looked at after every block."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.metrics.comparisons import Outcome
from loadgen.recorder.shadow_run import judged

RUNS, BLOCKS = 100, 48


def outcomes(correlation: float, ratio: float, seed: int = 0) -> list[set[Outcome]]:
    """The verdicts of runs whose blocks scatter by 10 % and resemble each other, at every second look."""
    noise = np.random.default_rng(seed).normal(0.0, 1.0, (BLOCKS + 50, RUNS))
    state, logs = np.zeros(RUNS), []
    for fresh in noise:
        state = correlation * state + np.sqrt(1.0 - correlation**2) * fresh
        logs.append(state)
    ratios = ratio * np.exp(0.1 * np.array(logs[50:]).T)
    return [{judged(run[:looks], 0.05)[1] for looks in range(2, BLOCKS + 1, 2)} for run in ratios.tolist()]


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_equal_servers_have_no_winner_in_19_of_20_runs(correlation: float) -> None:
    wins = sum(bool(verdicts & {"arm_better", "baseline_better"}) for verdicts in outcomes(correlation, 1.0))
    assert wins <= 0.05 * RUNS


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_candidate_that_takes_30_percent_longer_is_found(correlation: float) -> None:
    found = outcomes(correlation, 1.3)
    assert all("baseline_better" in verdicts and "arm_better" not in verdicts for verdicts in found)
