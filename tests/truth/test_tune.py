"""The promises of a tuning, by simulation: the best settings or some within 3 % are found, also if three settings pay
only together; equal servers get no winner; wrong answers and what misses the limit never win; a tuning that resumes
goes on as if nothing had happened.

`python -m tests.truth.tables tunings` prints the shares of docs/tuning.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.records.run import Label
from loadgen.tune import search as searching
from loadgen.tune.search import Search, pooled_limits
from tests.truth.other_searches import RandomSearch
from tests.truth.promises import Share
from tests.truth.simulated_tuning import (
    CLOSE,
    Machine,
    Planted,
    changed_without_reason,
    final,
    found_best,
    named_among_equals,
    only_together,
    planted,
    play,
    space_of,
    wrong_is_fastest,
)
from tests.truth.test_statistics_keep_their_promises import assert_at_most

BUDGETS = ((48, 16), (240, 24))
"""Contenders of a target, and screenings of five contenders of two targets that find the best of each."""


def missed(share: Share) -> Share:
    return Share(share.trials - share.events, share.trials)


def test_the_best_or_one_within_3_percent_is_found() -> None:
    assert_at_most(missed(found_best(planted, 48, 16, 6)))


def test_a_best_that_needs_three_settings_together_is_found() -> None:
    assert_at_most(missed(found_best(only_together, 48, 16, 6)))


@pytest.mark.slow
@pytest.mark.parametrize(("contenders", "screenings"), BUDGETS)
def test_the_best_is_found_in_19_of_20_tunings(contenders: int, screenings: int) -> None:
    assert_at_most(missed(found_best(planted, contenders, screenings, 200)))
    assert_at_most(missed(found_best(only_together, contenders, screenings, 200)))


def test_without_the_regression_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(searching, "FIRST", 1000)
    assert found_best(planted, 240, 12, 6).value < 0.8


def test_contenders_at_random_find_the_best_less_often() -> None:
    found, at_random = (found_best(planted, 240, 10, 10, kind).value for kind in (Search, RandomSearch))
    assert found > at_random + 0.2


def test_equal_targets_get_no_winner() -> None:
    """Also if the starts of servers differ by 2 %: the final restarts them."""
    assert_at_most(named_among_equals(48, 16, 4, finals=10))


@pytest.mark.slow
def test_equal_targets_get_a_winner_in_at_most_one_tuning_in_twenty() -> None:
    assert_at_most(named_among_equals(48, 16, 300, finals=1))


def test_a_final_without_restarts_would_name_one() -> None:
    """The test above can fail."""
    assert named_among_equals(48, 16, 3, finals=20, restarts=1).value > 0.15


@pytest.mark.parametrize("restarts", [1, 3])
def test_where_no_setting_matters_the_defaults_are_kept(restarts: int) -> None:
    """Though the runs that choose name another contender in most tunings: only the final may change a default."""
    assert_at_most(changed_without_reason(3, 20, restarts=restarts))


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 3, 5])
@pytest.mark.parametrize("start", [0.0, 0.01, 0.02])
def test_where_no_setting_matters_one_tuning_in_twenty_changes_a_default(restarts: int, start: float) -> None:
    assert_at_most(changed_without_reason(3, 300, restarts=restarts, start=start))


def test_a_better_target_wins() -> None:
    """By 12 %."""
    truth = planted(48, np.random.default_rng(3))
    better = Planted(space_of(48, "triton"), lambda values: truth.speed(values) + 0.12, truth.broken)
    played = play({"native": truth, "triton": better}, 3, 12)
    wins = sum(final(played, np.random.default_rng(seed), rounds=15, restarts=5)[0] for seed in range(20))
    assert wins >= 18


@pytest.mark.parametrize("seed", range(4))
def test_wrong_answers_never_win_and_run_once(seed: int) -> None:
    rng = np.random.default_rng([seed, 9])
    targets = {name: wrong_is_fastest(48, rng, name) for name in ("native", "triton")}
    played = play(targets, seed, 8)
    for choice in played.choices:
        assert choice.winner is not None
        assert not targets[choice.target].is_broken(choice.winner.settings)
    runs = played.runs
    blamed = [name for run in runs for name in run.out]
    assert blamed
    assert len(blamed) == len(set(blamed))
    assert not {*blamed} & {score.contender for run in runs for score in run.scores}


def test_what_misses_the_limit_never_wins_and_the_best_that_keeps_it_is_found() -> None:
    """Fresh runs of finalists whose limited metric has an error of 5 % cannot show a contender closer than that."""
    close = 0
    for seed in range(5):
        rng = np.random.default_rng([seed, 48])
        targets = {name: planted(48, rng, name, limited=True) for name in ("native", "triton")}
        played = play(targets, seed, 12)
        for choice in played.choices:
            assert choice.winner is not None
            over = targets[choice.target].over_limit(choice.winner.settings)
            fresh = [score for run in played.runs if run.stage == "finalists" for score in run.scores]
            limits = pooled_limits([score for score in fresh if score.contender == choice.winner.name])
            assert over <= (0.0 if all(high <= 1.0 for _, _, high in limits.values()) else 0.05)
            close += played.lost(choice, room=0.05) < CLOSE
    assert close >= 8


def two_targets(seed: int) -> dict[str, Planted]:
    rng = np.random.default_rng(seed)
    return {name: planted(48, rng, name) for name in ("native", "triton")}


def test_a_resumed_tuning_goes_on_as_if_nothing_had_happened() -> None:
    targets = two_targets(5)
    spaces = [target.space for target in targets.values()]
    machine, search = Machine(targets, np.random.default_rng(5)), Search(spaces, 5)
    for number in range(7):
        resumed = Search(spaces, 5, contenders=search.contenders, runs=machine.runs)
        replayed = Search(spaces, 5)
        for run in machine.runs:
            replayed.next_screening(5)
            replayed.tell(run)
        chosen = search.next_screening(5)
        assert chosen == resumed.next_screening(5) == replayed.next_screening(5), number
        search.tell(machine.measure("screening", chosen))
    resumed = Search(spaces, 5, contenders=search.contenders, runs=machine.runs)
    assert resumed.finalists() == search.finalists()
    assert Search(spaces, 6).next_screening(5) != Search(spaces, 5).next_screening(5)


def test_an_interruption_before_the_run_is_stored_changes_nothing() -> None:
    """Then the contenders have names, but no scores."""
    targets = two_targets(6)
    spaces = [target.space for target in targets.values()]
    machine, search = Machine(targets, np.random.default_rng(6)), Search(spaces, 6)
    for _ in range(4):
        search.tell(machine.measure("screening", search.next_screening(5)))
    chosen = search.next_screening(5)
    resumed = Search(spaces, 6, contenders=search.contenders, runs=machine.runs)
    assert resumed.next_screening(5) == chosen
    names: list[Label] = [contender.name for contender in resumed.contenders]
    assert len(names) == len(set(names))
