"""Seeded simulations of whole runs: false winners, coverage of the interval, power at the stated effect.

The default run is a look with few trials; `-m slow` has the full number, and `python -m tests.truth.tables` prints the
tables of docs/results/measured/statistics.md.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.checks.generator import WARM_UP_LIMIT, WARM_UP_SIGNIFICANCE
from loadgen.stats.estimates import SIGNIFICANCE, critical_t
from loadgen.stats.ratios import adjust_holm, detectable_effect, estimate_ratio
from tests.truth import promises
from tests.truth.closed_loops import KINDS, bias, slow_starts_of_pauses
from tests.truth.planted_runs import TRUTHS, Truth, try_truth
from tests.truth.simulated_runs import Noise, autoregression, experiment, plain, simulate, weather

NOISES = pytest.mark.parametrize("noise", [plain, weather])


def trials(few: int, many: int) -> pytest.MarkDecorator:
    """Few by default, many with `-m slow`."""
    return pytest.mark.parametrize("trials", [few, pytest.param(many, marks=pytest.mark.slow)])


def assert_at_most(share: promises.Share, promised: float = 0.05) -> None:
    """Not shown to be above what is promised; with many trials the bound itself stays within 8 %."""
    assert share.value - 2.5 * math.sqrt(promised * (1 - promised) / share.trials) <= promised
    if share.trials >= 1000:
        assert share.value <= promised
        assert share.upper <= 0.08


def assert_covers(share: promises.Share, *, may_exceed: bool = False) -> None:
    """92 to 98 %, a little wider where there are few trials."""
    room = 2.5 * math.sqrt(0.05 * 0.95 / share.trials) if share.trials < 400 else 0.0
    assert share.value >= 0.92 - room
    assert may_exceed or share.value <= 0.98 + room


@NOISES
@trials(50, 1000)
@pytest.mark.parametrize("pairs", [4, 12])
def test_identical_arms_name_a_winner_in_at_most_one_run_in_twenty(noise: Noise, pairs: int, trials: int) -> None:
    """Seven workloads with four metrics each: one false name among 28 spoils the run."""
    assert_at_most(promises.false_winners(trials, noise, pairs))


@NOISES
@trials(15, 1000)
def test_nor_do_four_identical_arms(noise: Noise, trials: int) -> None:
    """Three of them beside the baseline, and for the ranking among themselves: 105 chances of a false name."""
    assert_at_most(promises.false_winners(trials, noise, 12, arms=4))


@NOISES
@trials(10, 1000)
@pytest.mark.parametrize("lost", [0.0, 0.25, 0.5])
def test_nor_where_others_have_half_of_the_machine(noise: Noise, lost: float, trials: int) -> None:
    """One of two cores is busy, whatever part of it B loses and A does not; a B that is 20 % faster never loses."""
    for effect in (1.0, 1.2):
        _, wrong = promises.winners_on_a_busy_machine(trials, noise, effect, 0.5, lost)
        assert_at_most(wrong)
    named, _ = promises.winners_on_a_busy_machine(trials, noise, 5.0, 0.5, lost)
    assert named.value > 0.95, "what others cannot have made is named"


@trials(40, 1000)
def test_nor_among_many_workloads_where_others_took_just_what_makes_the_difference(trials: int) -> None:
    """Without Holm's adjustment for what lies beyond that, every fifth of these runs would name a winner."""
    _, wrong = promises.winners_on_a_busy_machine(trials, plain, 1.0, 0.5, 0.5, workloads=40, pairs=14)
    assert_at_most(wrong)


@trials(25, 600)
def test_four_arms_are_ranked_and_like_neighbours_not_told_apart(trials: int) -> None:
    right, wrong = promises.rankings(trials, plain, 12)
    assert right.value > 0.9
    assert_at_most(wrong)


@trials(50, 1000)
@pytest.mark.parametrize("pairs", [pytest.param(12, marks=pytest.mark.slow), 24])
def test_nor_where_each_round_resembles_the_next(pairs: int, trials: int) -> None:
    """Arms that drift each by itself: clocks, caches, neighbours."""
    assert_at_most(promises.false_winners(trials, plain, pairs, resemblance=0.5, margin=0.001))


@trials(30, 500)
def test_and_a_large_difference_is_still_named(trials: int) -> None:
    """By the widened spread alone, whose few degrees of freedom make the interval boundless, 6 in 10 would be."""
    assert promises.named_in_resembling_rounds(trials, 2.0, 6, 0.8).value > 0.95


def test_without_an_allowance_for_resemblance_they_would() -> None:
    """The test above can fail: by plain Student's t every other such run names a winner."""
    rng, named = np.random.default_rng(5), 0
    for _ in range(200):
        series = np.exp(autoregression(rng, 0.5, (14, 2, 24))).tolist()
        logs = [[b / a for a, b in zip(*arms, strict=True)] for arms in series]
        named += any((p or 1.0) < SIGNIFICANCE for p in adjust_holm([estimate_ratio(r, 0.05).p_value for r in logs]))
    assert named / 200 > 0.2


@pytest.mark.parametrize("users", [1, 64, *(pytest.param(users, marks=pytest.mark.slow) for users in (16, 256))])
@pytest.mark.parametrize("kind", ["exponential, CV 1", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS)])
def test_unlike_request_times_of_equal_mean_are_no_difference_in_throughput(kind: str, users: int) -> None:
    """64 users, exponential against constant: by the window up to the first user's end this named B in every run."""
    spans = 30.0 if users == 1 else 16.0
    error, naive = bias(40, KINDS[kind], users, spans)
    assert abs(error) < 0.03 or users == 1 or "CV 3" in kind
    covered, _ = promises.closed_loop_coverage(40, KINDS[kind], users, 12, spans)
    assert_covers(covered, may_exceed=True)
    if kind == "exponential, CV 1" and users >= 16:
        assert naive < -0.1, "the stopwatch charges the last requests to the server"


@trials(25, 1000)
@pytest.mark.parametrize(
    "slow", [0.012, *(pytest.param(slow, marks=pytest.mark.slow) for slow in (0.005, 0.009, 0.02))]
)
@pytest.mark.parametrize("pairs", [pytest.param(12, marks=pytest.mark.slow), 24])
def test_the_interval_of_a_p99_covers_it_also_at_a_jump(slow: float, pairs: int, trials: int) -> None:
    covered, by_blocks = promises.tail_coverage(trials, slow, pairs, 100)
    assert_covers(covered, may_exceed=True)
    if (slow, pairs) == (0.012, 24):
        assert by_blocks.value < 0.5, "the mean of the blocks' p99 is not the p99"


@trials(100, 2000)
def test_further_rounds_for_what_is_known_least_well_leave_the_promises_alone(trials: int) -> None:
    covered, _ = promises.two_stages(trials, 1.05)
    assert_covers(covered)
    _, named = promises.two_stages(trials, 1.0)
    assert_at_most(named)


def test_rare_pauses_of_a_warm_server_are_no_missing_warm_up() -> None:
    """64 users meet a pause at once: one observation, not 64. At 0.1 % nearly no A/A run may say so."""
    rng, fired = np.random.default_rng(6), 0
    for _ in range(40):
        lost = slow_starts_of_pauses(rng, 64, 12)
        error = float(np.std(lost, ddof=1)) / math.sqrt(len(lost))
        fired += float(np.mean(lost)) > max(WARM_UP_LIMIT, critical_t(11, 2 * WARM_UP_SIGNIFICANCE) * error)
    assert fired <= 1


@trials(50, 1000)
@pytest.mark.parametrize("spread", [0.0, 0.03])
def test_nor_with_restarts_that_shift_the_ratio(spread: float, trials: int) -> None:
    assert_at_most(promises.false_winners(trials, plain, 10, restarts=5, restart_spread=spread))


def test_without_the_adjustment_most_runs_would_name_one() -> None:
    """The test above can fail: the same runs judged by their raw p do."""
    plan, rng = experiment(7, 12, 0.0001), np.random.default_rng(2024)
    spoiled = sum(any((c.p_value or 1.0) < SIGNIFICANCE for c in simulate(plan, rng, plain)) for _ in range(100))
    assert spoiled / 100 >= 0.1


def test_the_interval_of_a_fixed_plan_does_not_survive_repeated_looks() -> None:
    assert promises.false_winners_of_repeated_t(1000, 60).value > 0.25


@NOISES
@trials(200, 2000)
@pytest.mark.parametrize("pairs", [4, 12])
def test_the_interval_covers_the_truth(noise: Noise, pairs: int, trials: int) -> None:
    """At least 92 % of single intervals: more, since the interval of few pairs allows for a correlation."""
    assert_covers(promises.coverage(trials, noise, pairs), may_exceed=True)


@pytest.mark.parametrize("between", [0.0, 0.01, 0.03])
@pytest.mark.parametrize(("restarts", "pairs"), [(2, 6), (5, 2), (5, 4), (10, 2)])
def test_the_interval_over_restarts_covers_the_truth(between: float, restarts: int, pairs: int) -> None:
    assert_covers(promises.coverage_with_restarts(2000, between, restarts, pairs))


def test_the_interval_over_the_pairs_of_restarts_would_not() -> None:
    assert promises.coverage_with_restarts(500, 0.03, 5, 4, as_pairs=True).value < 0.8


@trials(200, 2000)
@pytest.mark.parametrize("start", [0.0, 0.01, 0.05])
def test_the_interval_of_an_arms_own_figure_holds_it_over_unlike_numbers_of_blocks(start: float, trials: int) -> None:
    """The final of a tuning: three starts of 23, 17 and 7 blocks."""
    covered, over_blocks = promises.own_figure(trials, (23, 17, 7), start, 0.0)
    assert_covers(covered)
    assert start < 0.05 or over_blocks.value < 0.5, "a t interval over all blocks does not"


@trials(200, 2000)
@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.parametrize("blocks", [4, 14])
def test_and_within_one_start_whose_blocks_resemble_each_other(blocks: int, correlation: float, trials: int) -> None:
    covered, over_blocks = promises.own_figure(trials, (blocks,), 0.0, correlation)
    assert_covers(covered, may_exceed=True)
    assert not correlation or over_blocks.value < 0.9


def test_the_interval_of_every_look_covers_the_truth_at_once() -> None:
    assert promises.coverage_at_all_looks(2000, 60).value >= 0.95


@NOISES
@trials(30, 500)
@pytest.mark.parametrize("effect", [1.0, 1.02, 1.05])
def test_the_interval_at_the_stop_covers_the_truth(noise: Noise, effect: float, trials: int) -> None:
    """However favourable the moment at which the run stops."""
    assert_covers(promises.coverage_when_stopped(trials, effect, noise, 40), may_exceed=True)


def test_a_difference_of_the_margin_is_hardly_ever_called_equivalent() -> None:
    assert_at_most(promises.false_equivalence(2000, 60))


def test_large_differences_and_equivalence_are_decided_in_few_pairs() -> None:
    for effect in (1.0, 1.1):
        pairs_needed = promises.pairs_until_decided(500, effect, 7, 60)
        assert pairs_needed.decided.value == 1.0
        assert pairs_needed.median is not None
        assert pairs_needed.median <= 8


@trials(30, 500)
@pytest.mark.parametrize(("pairs", "restarts"), [(4, 1), (8, 1), (16, 1), (20, 5)])
def test_a_difference_of_the_stated_size_is_found_in_four_runs_of_five(pairs: int, restarts: int, trials: int) -> None:
    power = promises.power_at_the_stated_effect(trials, plain, pairs, restarts)
    assert power.value >= 0.80 - 2.5 * math.sqrt(0.16 / trials)


def test_the_noise_floor_stops_what_a_restart_would_make_a_winner_of() -> None:
    """One start of the servers, and a start shifts the ratio by 2 %: half of such runs name a winner without it."""
    assert promises.false_winners_beside_the_floor(1000, 0.02, floor=False).value > 0.4
    assert_at_most(promises.false_winners_beside_the_floor(1000, 0.02, floor=True))


@trials(3, 400)
@pytest.mark.parametrize("truth", TRUTHS, ids=lambda truth: truth.name)
def test_a_planted_truth_is_covered_and_gets_its_verdict(truth: Truth, trials: int) -> None:
    """Request by request, through the summaries too. The allowance for rounds that resemble each other, and what all
    blocks meet alike, may only widen the interval."""
    outcome = try_truth(truth, trials)
    assert_covers(promises.Share(outcome.covered, trials), may_exceed=True)
    assert outcome.right(truth) >= (0.9 if trials >= 400 else 0.5)


def exactly(values: np.ndarray) -> Noise:
    return lambda _, __: values


def test_pairing_absorbs_a_drift_that_would_fool_one_arm_after_the_other() -> None:
    """The same drifting machine: all of A before all of B names a winner nearly always, pairs hardly ever."""
    rng = np.random.default_rng(5)
    sequential = interleaved = 0
    plan = experiment(1, 8, 0.001)
    for _ in range(200):
        drift = np.linspace(0.0, 0.15, 16) + rng.normal(0.0, 0.01, size=16)
        sequential += abs(drift[:8].mean() - drift[8:].mean()) > 0.03
        verdict = simulate(plan, rng, exactly(drift))[0].verdict
        interleaved += verdict in ("baseline_better", "arm_better")
    assert sequential > 190
    assert interleaved <= 14


def test_more_comparisons_cost_sensitivity() -> None:
    for pairs in (4, 6, 12):
        effects = [detectable_effect(0.02 / math.sqrt(pairs), pairs - 1, family) for family in (1, 10, 20)]
        assert effects == sorted(effects, key=lambda e: e or 0.0)
