"""The promise: of runs of identical arms at most one in twenty names a winner, by whatever rule the run ends; of arms
that stay fast or slow from fourteen rounds on.

The largest share in docs/results/measured/statistics.md is that of the slow test;
`python -m tests.truth.tables one_run_in_twenty` prints all of them.
"""

from __future__ import annotations

import pytest

from loadgen.metrics import comparisons
from tests.truth.promises import Share
from tests.truth.simulated_rules import ENDINGS, LASTING, MACHINES, STEADY, Ending, Machine, winners
from tests.truth.simulated_states import GAUSSIAN, JUMPS, ONE_OF_FIVE, PLANS, Plan, States, false_winners
from tests.truth.tables import RUNS
from tests.truth.test_statistics_keep_their_promises import assert_at_most

STRONGEST = LASTING[-1]
QUICK = {"rounds": 150, "by time": 60, "until decided": 30}
"""Trials that take half a second."""


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


FEW = [plan for plan in PLANS if plan.rounds < 14]
PROMISED = [plan for plan in PLANS if plan not in FEW]


@pytest.mark.parametrize("states", [JUMPS[-1], *ONE_OF_FIVE], ids=str)
@pytest.mark.parametrize("plan", PROMISED, ids=str)
def test_nor_do_arms_that_stay_fast_or_slow(plan: Plan, states: States) -> None:
    trials = 20 if plan.until_decided or plan.arms > 2 else 100
    assert_at_most(false_winners(plan, states, trials))


@pytest.mark.slow
@pytest.mark.parametrize("states", [GAUSSIAN, *JUMPS, *ONE_OF_FIVE], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_nor_in_any_plan_unless_states_far_apart_fill_few_rounds(plan: Plan, states: States) -> None:
    """In few rounds both arms often stay in one state each, which looks like a difference."""
    if plan in FEW and states.jump > 2 and not states.only_first:
        pytest.skip("docs/results/measured/statistics.md has the shares")
    assert_at_most(false_winners(plan, states, 400 if plan.until_decided or plan.arms > 2 else 2000))


def test_in_few_rounds_states_far_apart_are_not_told_from_a_difference() -> None:
    """What is not promised is said with its number, which this one is."""
    assert 0.06 < false_winners(Plan(3, 1), JUMPS[-1], 1000).value < 0.14


def test_with_intervals_for_independent_rounds_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    monkeypatch.setattr(comparisons, "plausible_correlation", lambda *_: (0.0, 0.0))
    assert winners(Ending("rounds", 3), STRONGEST, 300) / 300 > 0.1
    assert winners(Ending("by time", 8, workloads=4), STRONGEST, 60) / 60 > 0.1
    assert_at_most(Share(winners(Ending("rounds", 6), STEADY, 300), 300))
