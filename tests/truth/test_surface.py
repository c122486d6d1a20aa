"""The promises of a decision surface: of maps of identical arms at most one in twenty names a winner anywhere, although
the rounds go to where the winner is uncertain; planted crossings are found where they are, and lie in their intervals.

`python -m tests.truth.tables surfaces` prints the shares of docs/results/measured/statistics.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loadgen.metrics import comparisons
from loadgen.metrics.surface import surface_of
from loadgen.records.run import Workload
from loadgen.stats.ratios import RatioEstimate, estimate_ratio
from tests.truth.conftest import Compare
from tests.truth.simulated_rules import MACHINES, STEADY, Machine
from tests.truth.simulated_surfaces import USERS, names_a_point, play_surface
from tests.truth.tables import MAPS, STRONGEST, false_maps, planted_maps
from tests.truth.test_statistics_keep_their_promises import assert_at_most

PLANTED = {1: 3.0, 8: 11.0}
"""Users from which B is faster, by batch size."""


@pytest.mark.parametrize(("arms", "maps"), [(2, 20), (3, 8)])
def test_identical_arms_have_a_winner_in_at_most_one_map_in_twenty(arms: int, maps: int) -> None:
    assert_at_most(false_maps(STRONGEST, maps, arms, sizes=(8,)))


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_nor_on_any_machine(machine: Machine) -> None:
    assert_at_most(false_maps(machine, MAPS, 2))


@pytest.mark.slow
def test_nor_among_three_arms() -> None:
    assert_at_most(false_maps(STRONGEST, MAPS, 3))


def test_with_intervals_of_a_fixed_plan_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""

    def fixed(ratios: Sequence[float], margin: float, _: float = 0.0) -> RatioEstimate:
        return estimate_ratio(ratios, margin)

    monkeypatch.setattr(comparisons, "estimate_anytime", fixed)
    monkeypatch.setattr(comparisons, "adjust_holm", lambda p_values, _=None: list(p_values))
    assert false_maps(STEADY, 8, 2, sizes=(8,)).value > 0.3


def test_planted_crossings_are_found_where_they_are() -> None:
    found, covered = planted_maps(STEADY, 8, PLANTED)
    assert found.value >= 0.9
    assert covered.value >= 0.9


@pytest.mark.slow
def test_planted_crossings_lie_in_their_intervals() -> None:
    for machine in MACHINES:
        found, covered = planted_maps(machine, MAPS // 2, PLANTED)
        assert covered.value >= 0.95, machine
        assert found.value >= 0.8 or machine is not STEADY


def test_rounds_go_to_where_the_winner_is_uncertain() -> None:
    """B is 2.6 times as slow with one user and as much faster with 32: there the first rounds decide, beside the
    crossing of batch 8 none do."""
    played = play_surface(STEADY, np.random.default_rng(5), {1: 100_000.0, 8: 6.0}, sizes=(1, 8))
    beside = [played.rounds[users, 8] for users in (4, 8)]
    certain = [played.rounds[users, 1] for users in USERS]
    assert min(beside) > 1.5 * max(certain)
    assert {point.winner for point in played.surface.points if point.size == 1} == {"a"}
    assert [(crossing.size, crossing.below, crossing.above) for crossing in played.surface.crossings] == [(8, "a", "b")]


@pytest.mark.slow
def test_two_real_servers_cross_where_it_was_planted(compare: Compare) -> None:
    """A answers each user after 20 ms; B answers 200 requests a second in all. With four users both serve the
    same."""
    workloads = [
        Workload(
            scenario="surface", batch_size=4, concurrency=users, requests=20, seconds=0.4, max_seconds=10.0, rounds=4
        )
        for users in (1, 2, 8, 16)
    ]
    result = compare("--delay-ms 20 --no-spin", "--rate 200 --no-spin", *workloads, until_decided=True, minutes=1.0)
    surface = surface_of(result.experiment, comparisons.compare_all(result.experiment, result.blocks))
    assert surface is not None, "before the checks, which on a busy machine take every verdict"
    if any(point.winner is None for point in surface.points):
        pytest.skip(f"this machine is too restless: {surface.points}")
    (crossing,) = surface.crossings
    assert (crossing.below, crossing.above) == ("b", "a")
    assert crossing.users == pytest.approx(4.0, rel=0.25)
    assert crossing.ci95[0] < crossing.users < crossing.ci95[1]
    rounds = {point.users: 0 for point in surface.points}
    for block in result.blocks:
        rounds[int(block.workload.partition("(")[2].partition(",")[0])] += block.label == "a"
    assert min(rounds[2], rounds[8]) > max(rounds[1], rounds[16])
    if result.valid:
        assert result.headline.startswith(f"{result.names['a']} is faster from {crossing.words} on at batch 4, ")


def test_the_share_of_false_maps_counts_every_winner() -> None:
    assert names_a_point(play_surface(STEADY, np.random.default_rng(2), {1: 3.0}, sizes=(1,)))
