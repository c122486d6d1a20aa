"""The decision surface from comparisons: winners, crossings with their intervals, further rounds, and the words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec
import pytest

from loadgen.metrics.comparisons import Comparison, Outcome
from loadgen.metrics.surface import Surface, counts_in_words, place_of_users, rows_in_words, surface_of, uncertain
from loadgen.records.run import ArmRequest, Experiment, Label, Workload

USERS = (1, 2, 4, 8, 16)


def workload(users: int, batch_size: int = 1, **more: object) -> Workload:
    return Workload(
        scenario="surface", batch_size=batch_size, concurrency=users, requests=1, seconds=0.5, max_seconds=1.0,
        rounds=4, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def experiment(workloads: Sequence[Workload], arms: str = "ab") -> Experiment:
    return Experiment(
        arms=tuple(ArmRequest(label=label, target="native") for label in arms), model="m", weights="", payload="fp32",
        transport="http", workloads=tuple(workloads), preset="quick", seed=0, equivalence_margin=0.05, threads=1,
        until_decided=True, minutes=5.0,
    )  # fmt: skip


def compared(load: Workload, ratio: float, spread: float, baseline: Label = "a", arm: Label = "b") -> Comparison:
    """A throughput's ratio with an interval of ± `spread` on the log scale, which decides the winner."""
    low, high = ratio * math.exp(-spread), ratio * math.exp(spread)
    verdict: Outcome = "arm_better" if low > 1.0 else "baseline_better" if high < 1.0 else "inconclusive"
    if low > 1 / 1.05 and high < 1.05:
        verdict = "no_difference"
    return Comparison(
        workload=load.name, metric="throughput", unit="items/s", higher_is_better=True, baseline=baseline, arm=arm,
        baseline_value=1.0, arm_value=ratio, ratio=ratio, ci95=(low, high) if math.isfinite(high) else None,
        verdict=verdict, pairs=6, minimal_detectable_effect=None, p_value=0.01, p_adjusted=0.01, p_equivalence=1.0,
        ratios=(), reason=None, leading=True,
    )  # fmt: skip


def row(ratios: Sequence[float], spreads: Sequence[float] | float = 0.1, users: Sequence[int] = USERS) -> Surface:
    """Two arms at one batch size."""
    loads = [workload(number) for number in users]
    widths = [spreads] * len(ratios) if isinstance(spreads, float) else spreads
    made = surface_of(experiment(loads), [compared(*each) for each in zip(loads, ratios, widths, strict=True)])
    assert made is not None
    return made


def test_an_experiment_without_a_surface_has_none() -> None:
    single = Workload(scenario="single", batch_size=1, concurrency=1, requests=1, seconds=1, max_seconds=1, rounds=4)
    assert surface_of(experiment([single]), [compared(single, 2.0, 0.1)]) is None


def test_the_crossing_lies_where_the_log_ratio_is_0_on_the_log_of_the_users() -> None:
    """½ with 2 users and 2 with 8: equal with 4, and the interval by the ends of both."""
    surface = row([0.5, 2.0], 0.3, users=(2, 8))
    (crossing,) = surface.crossings
    assert (crossing.below, crossing.above, crossing.size) == ("a", "b", 1)
    assert crossing.users == pytest.approx(4.0)
    factor = 2.0 ** (0.3 / math.log(2.0))  # the line rises by log 2 where the users are doubled
    assert crossing.ci95 == pytest.approx((4.0 / factor, 4.0 * factor))
    assert crossing.words == "4 users (2–6)"


def test_undecided_points_between_two_winners_widen_the_interval_and_those_without_one_say_nothing() -> None:
    (narrow,) = row([0.4, 0.6, 1.02, 1.5, 2.0], 0.1).crossings
    assert 2.0 < narrow.ci95[0] < narrow.users < narrow.ci95[1] < 8.0
    (wide,) = row([0.4, 0.6, 1.02, 1.5, 2.0], [0.1, 0.1, 2.0, 0.1, 0.1]).crossings
    assert wide.users == pytest.approx(narrow.users)
    assert wide.ci95[0] < narrow.ci95[0]
    assert wide.ci95[1] > narrow.ci95[1]
    (unknown,) = row([0.4, 0.6, 1.02, 1.5, 2.0], [0.1, 0.1, math.inf, 0.1, 0.1]).crossings
    assert unknown.ci95 == pytest.approx((2.0, 8.0))


def test_there_is_no_crossing_without_a_winner_on_both_sides() -> None:
    assert row([0.5, 0.9, 1.1, 1.2, 1.3], [0.1, 0.2, 0.2, 0.3, 0.4]).crossings == ()
    assert row([1.5, 1.6, 2.0, 2.0, 3.0]).crossings == ()
    twice = row([0.5, 2.0, 2.0, 2.0, 0.5])
    assert [(crossing.below, crossing.above) for crossing in twice.crossings] == [("a", "b"), ("b", "a")]


def test_a_metric_of_which_less_is_better_crosses_the_other_way() -> None:
    loads = [workload(1), workload(4)]
    made = [compared(load, ratio, 0.1) for load, ratio in zip(loads, (0.5, 2.0), strict=True)]
    times = [
        msgspec.structs.replace(each, higher_is_better=False, verdict=verdict)
        for each, verdict in zip(made, ("arm_better", "baseline_better"), strict=True)
    ]
    surface = surface_of(experiment(loads), times)
    assert surface is not None
    (crossing,) = surface.crossings
    assert (crossing.below, crossing.above) == ("b", "a")
    assert crossing.users == pytest.approx(2.0)


def test_further_rounds_go_to_what_is_undecided_and_to_both_sides_of_a_change() -> None:
    surface = row([0.5, 0.6, 1.5, 1.6, 1.1], [0.1, 0.1, 0.1, 0.1, 0.3])
    assert uncertain(surface) == {"surface(2, batch 1)", "surface(4, batch 1)", "surface(16, batch 1)"}
    assert uncertain(row([1.5, 1.5, 1.0, 1.5, 1.5], [0.1, 0.1, 0.01, 0.1, 0.1])) == set()
    assert uncertain(row([1.0, 1.0], math.inf, users=(1, 2))) == {"surface(1, batch 1)", "surface(2, batch 1)"}


def among_three(speeds: Mapping[str, float], spread: float = 0.1) -> Surface:
    load = workload(4)
    made = [
        compared(load, speeds[arm] / speeds[base], spread, base, arm) for base, arm in combinations(sorted(speeds), 2)
    ]
    surface = surface_of(experiment([load, workload(8)], "abc"), made)
    assert surface is not None
    return surface


def test_of_several_arms_the_best_must_beat_every_other_and_its_margin_is_over_the_next() -> None:
    point = among_three({"a": 1.0, "b": 1.3, "c": 2.0}).points[0]
    assert (point.winner, point.best, point.runner_up) == ("c", "c", "b")
    assert point.ratio == pytest.approx(2.0 / 1.3)
    tied = among_three({"a": 1.0, "b": 1.95, "c": 2.0}).points[0]
    assert (tied.winner, tied.best, tied.state) == (None, "c", "inconclusive")
    assert among_three({"a": 1.0, "b": 1.99, "c": 2.0}, 0.01).points[0].state == "no_difference"


def test_a_point_without_measurements_is_undecided() -> None:
    point = among_three({"a": 1.0, "b": 1.3, "c": 2.0}).points[1]
    assert (point.workload, point.state, point.best, point.ratio) == ("surface(8, batch 1)", "inconclusive", None, None)


def test_what_a_check_has_taken_is_invalid_and_crosses_nothing() -> None:
    loads = [workload(number) for number in USERS]
    made = [compared(load, ratio, 0.1) for load, ratio in zip(loads, (0.5, 0.5, 2.0, 2.0, 2.0), strict=True)]
    gone = [msgspec.structs.replace(each, verdict="invalid") for each in made[:2]]
    surface = surface_of(experiment(loads), [*gone, *made[2:]])
    assert surface is not None
    assert [point.state for point in surface.points] == ["invalid"] * 2 + ["winner"] * 3
    assert surface.crossings == ()


def test_places_of_users_are_on_the_log_scale_between_the_rows() -> None:
    assert [place_of_users(users, USERS) for users in (1.0, math.sqrt(2.0), 16.0)] == pytest.approx([0.0, 0.5, 4.0])
    assert place_of_users(10.0, (1, 100)) == pytest.approx(0.5)


def test_the_words_name_the_crossing_with_its_interval_and_who_wins_where_there_is_none() -> None:
    names = {"a": "A (native)", "b": "B (Triton)"}
    assert rows_in_words(row([0.5, 2.0], 0.3, users=(2, 8)), names) == [
        "B (Triton) is faster from 4 users (2–6) on at batch 1, A (native) below"
    ]
    assert rows_in_words(row([0.5, 2.0, 1.1], [0.3, 0.3, 0.3], users=(2, 8, 16)), names) == [
        "B (Triton) overtakes A (native) at 4 users (2–6), batch 1"
    ], "with 16 users nobody is known to be faster"
    called = {"a": "A", "b": "B"}
    assert rows_in_words(row([1.5, 1.5], users=(2, 8)), called) == ["B is faster at batch 1 with any number of users"]
    assert rows_in_words(row([1.5, 1.1], 0.2, users=(2, 8)), called) == [
        "B is faster at batch 1 with 2 users, no winner with the others"
    ]
    assert rows_in_words(row([1.1, 1.5, 1.5], 0.2, users=(2, 8, 16)), called) == [
        "B is faster at batch 1 from 8 users on, no winner below"
    ]
    assert rows_in_words(row([1.1, 1.1], 0.2, users=(2, 8)), called) == ["no winner at batch 1"]
    assert counts_in_words(row([0.5, 0.5, 1.0, 1.1, 1.5], [0.1, 0.1, 0.01, 0.3, 0.1]), called) == (
        "A is faster at 2 of 5 loads, B at 1; equal at 1, undecided at 1"
    )


@pytest.mark.parametrize(
    ("more", "across", "name", "place"),
    [
        ({"sequence_length": 128}, "length", "surface(2, batch 1, length 128)", "length 128"),
        ({"prompt_tokens": 256, "output_tokens": 32}, "prompt", "surface(2, prompt 256)", "256-token prompts"),
    ],
)
def test_the_other_axis_may_be_a_length_or_a_prompt(more: dict[str, int], across: str, name: str, place: str) -> None:
    first = next(iter(more))
    loads = [workload(2, **more), workload(2, **{**more, first: 64})]
    surface = surface_of(experiment(loads), [])
    assert surface is not None
    assert surface.across == across
    assert [point.size for point in surface.points] == sorted([more[first], 64])
    assert loads[0].name == name
    assert surface.at(more[first]) == place
