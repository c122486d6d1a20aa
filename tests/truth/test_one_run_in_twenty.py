"""The promise: of runs of identical arms at most one in twenty names a winner, by whatever rule the run ends.

The largest share in docs/results/measured/statistics.md is that of the slow test;
`python -m tests.truth.tables one_run_in_twenty` prints all of them.
"""

from __future__ import annotations

import pytest

from loadgen.metrics import comparisons
from tests.truth.promises import Share
from tests.truth.simulated_rules import ENDINGS, LASTING, MACHINES, STEADY, Ending, Machine, winners
from tests.truth.tables import RUNS
from tests.truth.test_statistics_keep_their_promises import assert_at_most

STRONGEST = LASTING[-1]
QUICK = {"rounds": 300, "by time": 100, "until decided": 60}
"""Trials that take a second."""


@pytest.mark.parametrize("ending", ENDINGS, ids=str)
def test_identical_arms_name_a_winner_in_at_most_one_run_in_twenty(ending: Ending) -> None:
    trials = QUICK[ending.rule] // (ending.workloads * (ending.arms - 1))
    assert_at_most(Share(winners(ending, STRONGEST, trials), trials))


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
def test_nor_on_any_machine(ending: Ending, machine: Machine) -> None:
    assert winners(ending, machine, RUNS) / RUNS <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("ending", [ENDINGS[0], ENDINGS[1], ENDINGS[-2]], ids=str)
def test_nor_with_high_percentiles(ending: Ending) -> None:
    """High percentiles add no false winners: too few trials to show the second decimal."""
    assert_at_most(Share(winners(ending, STRONGEST, 500, tails=True), 500))


def test_with_intervals_for_independent_rounds_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr(comparisons, "plausible_correlation", lambda _: (0.0, 0.0))
    assert winners(Ending("rounds", 3), STRONGEST, 300) / 300 > 0.1
    assert winners(Ending("by time", 8, workloads=4), STRONGEST, 60) / 60 > 0.1
    assert_at_most(Share(winners(Ending("rounds", 6), STEADY, 300), 300))
