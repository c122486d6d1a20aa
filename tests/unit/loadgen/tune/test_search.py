"""What a search measures next, how it pools scores and whom it chooses, by hand-made scores."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from loadgen.records.run import Label
from loadgen.records.tuning import Score, Space, Stage, TunableSetting, TuningRun
from loadgen.stats.estimates import Estimate
from loadgen.tune.search import Search, least_squares, pooled_limits


def space(target: str, **values: tuple[str, ...]) -> Space:
    settings = (TunableSetting(name=name, default=options[0], values=options) for name, options in values.items())
    return Space(target=target, settings=tuple(settings))


SPACES = space("native", a=("0", "1", "2"), b=("0", "1")), space("triton", a=("0", "1"))


def run(
    logs: Mapping[Label, float],
    stage: Stage = "screening",
    limits: Mapping[Label, tuple[float, float, float]] | None = None,
    out: Mapping[Label, str] | None = None,
    problem: str | None = None,
) -> TuningRun:
    of_p99 = {name: {"latency_p99": limit} for name, limit in (limits or {}).items()}
    scores = (
        Score(contender=name, log_ratio=log, error=0.01, value=1.0, limits=of_p99.get(name, {}))
        for name, log in logs.items()
    )
    limits_of_anchor = of_p99.get("native-0", {})
    anchor = Score(contender="native-0", log_ratio=0.0, error=0.0001, value=1.0, limits=limits_of_anchor)
    return TuningRun(folder="", stage=stage, scores=tuple(scores), anchor=anchor, out=dict(out or {}), problem=problem)


def names(contenders: list) -> list[Label]:
    return [contender.name for contender in contenders]


def search_all(logs: Mapping[Label, float] | None = None) -> Search:
    """With one screening of every contender."""
    search = Search(SPACES, 0)
    contenders = search.next_screening(20)
    search.tell(run({contender.name: (logs or {}).get(contender.name, 0.0) for contender in contenders}))
    return search


def test_the_first_screening_begins_with_the_defaults_and_then_takes_the_targets_in_turn() -> None:
    """Those of the first target are the anchor, which every run measures."""
    first = Search(SPACES, 0).next_screening(5)
    assert names(first) == ["triton-0", "native-1", "triton-1", "native-2", "native-3"]
    assert first[0].settings == {}


def test_a_target_without_new_contenders_leaves_its_places_to_the_others() -> None:
    contenders = Search(SPACES, 0).next_screening(20)
    assert len(contenders) == 7
    assert len({(c.target, *sorted(c.settings.items())) for c in contenders}) == 7


def test_the_best_race_on_when_all_are_measured_until_one_is_left() -> None:
    search = search_all({"native-1": 0.5, "native-2": 0.5, "triton-1": 0.3})
    assert set(names(search.next_screening(20))) == {"native-1", "native-2"}
    search = search_all({"native-1": 0.5, "triton-1": 0.3})
    assert search.next_screening(20) == []


def test_a_run_that_counts_for_nothing_is_repeated_without_those_that_are_out() -> None:
    search = Search(SPACES, 0)
    chosen = names(search.next_screening(5))
    search.tell(run(dict.fromkeys(chosen, 0.3), out={chosen[2]: "Wrong answers."}, problem="The machine is busy."))
    assert names(search.next_screening(4)) == [name for name in chosen if name != chosen[2]]
    assert search.standings("triton")[-1].out == "Wrong answers."
    assert search.finalists() == []


def test_one_that_is_out_after_it_was_measured_is_no_finalist_and_no_winner() -> None:
    search = search_all({"native-1": 0.5, "native-2": 0.3})
    assert names(search.finalists(1)) == ["native-1", search.finalists(1)[1].name]
    search.tell(run({"native-1": 0.5, "native-2": 0.3}, "finalists"))
    search.tell(run({}, "finalists", out={"native-1": "It crashed."}))
    assert "native-1" not in names(search.finalists())
    assert search.winners()[0].winner == search.contenders[names(list(search.contenders)).index("native-2")]


def test_the_winner_is_chosen_from_the_fresh_runs_alone_if_there_are_some() -> None:
    search = search_all({"native-1": 0.9, "native-2": 0.8})
    assert [choice.winner.name for choice in search.winners() if choice.winner] == ["native-1", "triton-0"]
    search.tell(run({"native-1": 0.1, "native-2": 0.3}, "finalists"))
    native, triton = search.winners()
    assert native.winner is not None
    assert native.winner.name == "native-2"
    assert native.equals == ()
    assert triton.winner is not None
    assert triton.winner.name == "triton-0"


def test_among_equals_the_one_nearest_to_the_defaults_wins() -> None:
    search = search_all()
    simple = next(c for c in search.contenders if c.target == "native" and len(c.settings) == 1)
    other = next(c for c in search.contenders if c.target == "native" and len(c.settings) == 2)
    search.tell(run({simple.name: 0.2, other.name: 0.205}, "finalists"))
    assert search.winners()[0].winner == simple
    assert search.winners()[0].equals == (other,)
    search.tell(run({simple.name: 0.2, other.name: 0.26}, "finalists"))
    assert search.winners()[0].winner == other
    assert search.winners()[0].equals == ()


def test_what_surely_keeps_the_limit_comes_before_what_is_faster() -> None:
    search = search_all()
    limits = {"native-1": (1.2, 1.1, 1.3), "native-2": (0.98, 0.9, 1.06), "native-3": (0.8, 0.7, 0.9)}
    search.tell(run({"native-1": 0.5, "native-2": 0.4, "native-3": 0.1}, "finalists", limits))
    choice = search.winners()[0]
    assert choice.winner is not None
    assert choice.winner.name == "native-3"


def test_if_nothing_surely_keeps_the_limit_what_measured_within_it_wins_or_the_nearest_is_named() -> None:
    search = search_all()
    limits = {"native-1": (1.2, 1.1, 1.3), "native-2": (0.98, 0.9, 1.06), "triton-1": (1.4, 1.3, 1.5)}
    limits["native-0"] = limits["triton-1"]
    search.tell(run({"native-1": 0.5, "native-2": 0.4, "triton-1": 0.1}, "finalists", limits))
    native, triton = search.winners()
    assert native.winner is not None
    assert native.winner.name == "native-2"
    assert triton.winner is None
    assert triton.nearest is not None
    assert triton.nearest.name == "triton-1"


def test_finalists_have_one_that_surely_keeps_the_limit() -> None:
    search = Search(SPACES, 0)
    chosen = [c.name for c in search.next_screening(20) if c.target == "native"]
    limits = dict.fromkeys(["native-0", *chosen], (0.97, 0.92, 1.02)) | {
        chosen[1]: (0.6, 0.5, 0.7),
        chosen[2]: (2.0, 1.9, 2.1),
    }
    search.tell(run({name: 0.0 if name == chosen[1] else 0.3 for name in chosen}, limits=limits))
    finalists = names(search.finalists(3))
    assert len(finalists) == 3
    assert chosen[1] in finalists
    assert chosen[2] not in finalists
    assert not next(s for s in search.standings("native") if s.contender.name == chosen[2]).racing


def test_the_anchor_is_what_it_is_compared_with() -> None:
    search = search_all()
    search.tell(run({"native-1": 0.02}, "finalists"))
    for stage in ("screening", "finalists"):
        standing = next(s for s in search.standings("native", stage) if s.contender.name == "native-0")
        assert standing.log_ratio == 0.0


def test_each_setting_is_put_back_alone() -> None:
    search = search_all()
    contender = next(c for c in search.contenders if len(c.settings) == 2)
    without = search.put_back(contender)
    assert without.keys() == {"a", "b"}
    assert without["a"].settings == {"b": contender.settings["b"]}
    assert without["a"] in search.contenders


def test_scores_are_pooled_over_runs_that_have_contenders_in_common() -> None:
    """In the second run the anchor was 10 % slower; c was in this run alone."""
    pooled = least_squares([run({"a": 0.0, "b": 0.2}), run({"a": 0.1, "c": 0.3})], 0.0001)
    a, apart = pooled.of("a"), pooled.difference("b", "c")
    assert a is not None
    assert apart is not None
    assert a[0] == pytest.approx(0.05, abs=0.001)
    assert apart[0] == pytest.approx(-0.1 + 0.5 * 0.1, abs=0.01)
    alone = least_squares([run({"a": 0.0, "b": 0.2})], 0.02)
    assert alone.of("b") == pytest.approx((0.2, math.hypot(0.01, math.sqrt(2.0) * 0.02)))
    assert alone.of("c") is None


def test_what_two_contenders_of_a_run_share_is_no_part_of_their_difference() -> None:
    """The anchor's start and noise. Each score has the variance 2τ² + e², so the difference has that, too, not twice
    that."""
    search = search_all()
    search.tell(run({"native-1": 0.1, "native-2": 0.3}, "settings"))
    one, other = (next(c for c in search.contenders if c.name == name) for name in ("native-2", "native-1"))
    found = search.gain(one, other, "settings")
    assert found is not None
    assert math.log(found.value) == pytest.approx(0.2)
    error = math.hypot(0.01, math.sqrt(2.0) * search.start_spread)
    assert _error(found) == pytest.approx(error)
    assert search.gain(one, other, "finalists") is None
    anchor = next(c for c in search.contenders if c.name == search.anchor)
    beside = search.gain(one, anchor, "settings")
    assert beside is not None
    assert _error(beside) == pytest.approx(error, rel=1e-3)


def _error(gain: Estimate) -> float:
    low, high = gain.interval or (1.0, 1.0)
    return math.log(high / low) / (2 * 1.96)


def test_every_limit_counts_by_its_own_interval() -> None:
    """Not only the one whose value is the largest."""
    search = search_all()

    def limited(name: Label, **limits: tuple[float, float, float]) -> Score:
        return Score(contender=name, log_ratio=0.1, error=0.01, value=1.0, limits=limits)

    scores = (
        limited("native-1", p99=(0.90, 0.4, 1.6), ttft=(0.95, 0.94, 0.96)),
        limited("native-2", p99=(0.5, 0.49, 0.51), ttft=(1.2, 1.19, 1.21)),
        limited("native-3", p99=(0.5, 0.49, 0.51), ttft=(0.6, 0.59, 0.61)),
    )
    search.tell(TuningRun(folder="", stage="finalists", scores=scores))
    standings = {s.contender.name: s for s in search.standings("native", "finalists")}
    assert [standings[f"native-{n}"].is_safe for n in (1, 2, 3)] == [False, False, True]
    assert [standings[f"native-{n}"].beyond_limit for n in (1, 2, 3)] == [False, True, False]
    assert search.winners()[0].winner == standings["native-3"].contender


def test_limits_are_pooled_by_their_certainty() -> None:
    once = pooled_limits(run({"a": 0.0}, limits={"a": (0.9, 0.8, 1.0125)}).scores)["latency_p99"]
    assert once[0] == pytest.approx(0.9)
    assert once[1] < 0.8
    both = [
        *run({"a": 0.0}, limits={"a": (0.9, 0.8, 1.0125)}).scores,
        *run({"a": 0.0}, limits={"a": (1.2, 0.5, 2.9)}).scores,
    ]
    twice = pooled_limits(both)["latency_p99"]
    assert 0.9 < twice[0] < 0.93
    assert pooled_limits(run({"a": 0.0}).scores) == {}
    unknown = pooled_limits(run({"a": 0.0}, limits={"a": (1e9, 0.0, 1e9)}).scores)["latency_p99"]
    assert unknown[1] < 1.0


def test_a_space_too_large_to_be_listed_is_searched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.tune.search.MOST_LISTED", 20)
    large = space("native", **dict.fromkeys("abcdef", ("0", "1", "2")))
    search = Search([large], 0)
    chosen = search.next_screening(6)
    assert len({frozenset(c.settings.items()) for c in chosen}) == 6
    search.tell(run(dict.fromkeys(names(chosen), 0.1)))
    assert len({*names(search.next_screening(30))} - {*names(chosen)}) == 13
