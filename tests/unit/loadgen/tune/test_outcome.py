"""What a tuning tells: the answer comes from the final alone, and every claim is as certain as its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from loadgen.findings.gpu.analysis import GpuFound
from loadgen.metrics.comparisons import log_lead
from loadgen.records.tuning import Tuning, TuningRun
from loadgen.tune.outcome import TuningOutcome, outcome_of, percent
from loadgen.tune.search import Search
from loadgen.verdict.headline import MOST_WORDS, word_count
from loadgen.verdict.result import Result
from tests.golden.synthetic_run import SimulatedArm
from tests.synthetic_tuning import FINAL_ARMS, PlantedTuning, final, tuning

EQUAL = {name: SimulatedArm(5.0, 7.0, 1.0) for name in FINAL_ARMS}
WORSE = FINAL_ARMS | {"native-3": SimulatedArm(7.0, 10.0, 1.0)}
SAME = FINAL_ARMS | {"native-3": FINAL_ARMS["native-0"]}
"""What was chosen of native is its defaults again."""
FURTHER = ("fastapi", "litserve")
MANY = FINAL_ARMS | {
    "fastapi-0": SimulatedArm(9.0, 14.0, 1.0), "fastapi-1": SimulatedArm(7.0, 11.0, 1.0),
    "litserve-0": SimulatedArm(9.0, 14.0, 1.0), "litserve-1": SimulatedArm(6.5, 10.5, 1.0),
}  # fmt: skip
"""Of further targets the closest two are the slowest."""


@pytest.fixture(scope="module")
def final_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The result of a final with arms of these speeds, made once."""
    planted = {"planted": FINAL_ARMS, "equal": EQUAL, "worse": WORSE, "same": SAME}
    for count in (1, 2):
        planted[f"{2 + count} targets"] = {
            name: arm for name, arm in MANY.items() if name in FINAL_ARMS or name.startswith(FURTHER[:count])
        }

    @cache
    def final_of(name: str) -> Result:
        return final(tmp_path_factory.mktemp(name.replace(" ", "-")), PlantedTuning(arms=planted[name]))

    return final_of


@pytest.fixture
def outcome(final_of: Callable[[str], Result]) -> TuningOutcome:
    return outcome_of(tuning(), final_of("planted"))


def test_the_headline_has_the_winners_and_the_defaults_in_32_words(outcome: TuningOutcome) -> None:
    text = outcome.headline
    assert text.startswith("Triton at its best handles 1.1")
    assert "of native at its best (1." in text
    assert "; at their defaults native leads 1.2" in text
    assert word_count(text) <= MOST_WORDS


def test_the_report_of_a_large_space_draws_the_rows_that_the_race_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn by the tuning's own seed."""
    monkeypatch.setattr("loadgen.tune.search.MOST_LISTED", 6)
    stored = tuning(PlantedTuning(stages=("screening",), settings={"seed": 7}))
    race = Search(stored.spaces, 7, contenders=stored.contenders, runs=stored.runs)
    assert [target.race for target in outcome_of(stored, None).targets] == [race.lead("native"), race.lead("triton")]


def test_the_answer_does_not_change_with_the_scores(outcome: TuningOutcome) -> None:
    """Scores chose; they are no part of the answer."""
    flattered = msgspec.structs.replace(
        outcome.tuning,
        runs=tuple(
            msgspec.structs.replace(
                run, scores=tuple(msgspec.structs.replace(s, value=99.0 * s.value, p99_ms=1.0) for s in run.scores)
            )
            for run in outcome.tuning.runs
        ),
    )
    again = outcome_of(flattered, outcome.final)
    assert again.headline == outcome.headline
    assert [target.figures for target in again.targets] == [target.figures for target in outcome.targets]


def test_the_cost_of_the_defaults_is_a_share_of_what_the_best_serves(outcome: TuningOutcome) -> None:
    for target in outcome.targets:
        cost = target.cost_of_defaults
        assert cost is not None
        best, default = (
            target.figures[c.name]["throughput"].value for c in (target.chosen, target.default) if c is not None
        )
        assert best is not None
        assert default is not None
        assert cost.value == pytest.approx(1.0 - default / best, abs=1e-6)
        assert cost.interval is not None
        assert cost.interval[0] < cost.value < cost.interval[1]


def test_of_equal_arms_the_defaults_are_kept_and_cost_nothing(final_of: Callable[[str], Result]) -> None:
    outcome = outcome_of(tuning(), final_of("equal"))
    assert outcome.headline.startswith("No winner between native and Triton at their best")
    for target in outcome.targets:
        assert target.best == target.default
        assert target.cost_of_defaults is None
        assert target.gain is not None


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_headline_is_about_the_best_target_and_the_next(final_of: Callable[[str], Result], count: int) -> None:
    """Not about the closest two. Whatever the order of the targets."""
    name, more = "planted" if count == 2 else f"{count} targets", FURTHER[: count - 2]
    stored = tuning(PlantedTuning(more=more))
    for spaces in (stored.spaces, stored.spaces[::-1]):
        outcome = outcome_of(msgspec.structs.replace(stored, spaces=spaces), final_of(name))
        assert len(outcome.pairs) == count * (count - 1) // 2
        main = outcome.pairs[0].at_best
        assert main is not None
        assert (main.winner, main.loser) == ("triton-2", "native-3")
        assert outcome.headline.startswith("Triton at its best handles 1.1")
        assert (f", the next of {count}" in outcome.headline) == (count > 2)
        assert word_count(outcome.headline) <= MOST_WORDS


def test_the_first_two_may_have_no_winner_though_a_third_is_slower(final_of: Callable[[str], Result]) -> None:
    result = final_of("3 targets")
    close = tuple(
        msgspec.structs.replace(c, verdict="inconclusive") if {*c.pairing} == {"triton-2", "native-3"} else c
        for c in result.comparisons
    )
    outcome = outcome_of(tuning(PlantedTuning(more=FURTHER[:1])), msgspec.structs.replace(result, comparisons=close))
    assert outcome.headline.startswith("No winner between native and Triton, the first two of 3, at their best: ")


def test_a_choice_that_is_not_shown_to_be_better_leaves_the_defaults(final_of: Callable[[str], Result]) -> None:
    outcome = outcome_of(tuning(), final_of("same"))
    native, triton = outcome.targets
    assert native.lead is not None
    assert native.lead.winner is None
    assert (native.best, triton.best) == (native.default, triton.chosen)
    assert native.cost_of_defaults is None
    assert "native at its defaults" in outcome.headline
    main = outcome.pairs[0].at_best
    assert main is not None
    assert {*main.pairing} == {"native-0", "triton-2"}


def test_a_limit_that_only_the_choice_keeps_is_a_reason_to_change(final_of: Callable[[str], Result]) -> None:
    """A limit comes first, whichever of the two is faster; the cost of the defaults stays that of the goal."""
    result = final_of("same")
    p99 = {s.label: s.latency_ms("p99") for s in result.summaries}
    outcome = outcome_of(tuning(PlantedTuning(limit_ms=150.0)), result)
    native, _ = outcome.targets
    assert p99["native-3"] is not None
    assert not native.keeps_limits(native.default)
    assert native.best == native.default
    only = dict(native.figures)
    only["native-3"] = {
        name: replace(figure, value=1.0, ci95=(0.9, 1.1)) if figure.limit else figure
        for name, figure in native.figures["native-3"].items()
    }
    kept = replace(native, figures=only)
    assert kept.best == kept.chosen
    assert kept.meets_limit
    assert kept.cost_of_defaults is None


@pytest.mark.parametrize("gone", ["native-0", "native-3"])
def test_the_only_one_that_could_be_measured_is_the_best(final_of: Callable[[str], Result], gone: str) -> None:
    result = final_of("planted")
    left = msgspec.structs.replace(
        result,
        summaries=tuple(summary for summary in result.summaries if summary.label != gone),
        comparisons=tuple(c for c in result.comparisons if gone not in c.pairing),
    )
    native, _ = outcome_of(tuning(), left).targets
    assert native.best is not None
    assert {native.best.name, gone} == {"native-0", "native-3"}


def test_several_targets_without_a_comparison_are_told_in_clauses(final_of: Callable[[str], Result]) -> None:
    result = final_of("planted")
    outcome = outcome_of(tuning(), result)
    apart = replace(outcome, pairs=())
    assert "; Triton at its best handles" in apart.headline


def test_defaults_that_are_better_in_the_final_are_kept(final_of: Callable[[str], Result]) -> None:
    """The winner of the finalists may have been lucky; the final has the last word."""
    outcome = outcome_of(tuning(), final_of("worse"))
    native, triton = outcome.targets
    assert native.chosen is not None
    assert native.best == native.default
    assert triton.best == triton.chosen
    best = outcome.pairs[0].at_best
    assert best is not None
    assert {*best.pairing} == {"native-0", "triton-2"}
    lead = log_lead(native.lead, native.chosen.name)
    assert lead is not None
    assert (lead.high or 0.0) < 0.0
    assert "native at its defaults" in outcome.headline


def test_without_a_final_nothing_is_claimed(outcome: TuningOutcome) -> None:
    stopped = outcome_of(tuning(PlantedTuning(stages=("screening",), state="interrupted")), None)
    assert stopped.headline.startswith("No verdict: the tuning was interrupted after 11 ")
    assert stopped.pairs == ()
    for target in stopped.targets:
        gain = target.race.gain
        assert gain is not None
        assert gain.interval is not None
        assert gain.interval[0] < gain.value < gain.interval[1]
        assert not target.figures
        assert target.best is None


def test_settings_put_back_say_what_matters(outcome: TuningOutcome) -> None:
    native, triton = (
        {name: gain.interval or (0.0, 0.0) for name, gain in target.worth.items() if gain is not None}
        for target in outcome.targets
    )
    assert list(native) == ["engine", "max-batch-size"]
    assert native["engine"][0] > 1.0
    assert triton["max-batch-size"][0] > 1.0
    assert triton["max-queue-delay-us"][0] < 1.0, "planted without an effect"


def test_a_setting_that_was_not_put_back_has_no_worth() -> None:
    stopped = outcome_of(tuning(PlantedTuning(stages=("screening", "finalists"))), None)
    assert [gain for target in stopped.targets for gain in target.worth.values()] == [None] * 4


def test_the_only_setting_is_worth_what_the_final_shows(tmp_path: Path) -> None:
    """Without it the winner is the defaults, so no run puts it back."""
    planted = PlantedTuning(
        stages=("screening", "finalists", "final"),
        arms={"native-2" if name == "native-3" else name: arm for name, arm in FINAL_ARMS.items()},
    )
    one = msgspec.structs.replace(tuning(planted), winners=("native-2", "triton-2"))
    native, triton = outcome_of(one, final(tmp_path, planted)).targets
    assert native.lead is not None
    assert native.lead.ratio is not None
    worth = native.worth["engine"]
    assert worth is not None
    assert worth.value == pytest.approx(native.lead.ratio)
    assert worth.interval == pytest.approx(native.lead.ci95)
    assert set(triton.worth.values()) == {None}


def test_who_is_out_is_counted_and_named(outcome: TuningOutcome) -> None:
    native, triton = outcome.targets
    assert (native.race.tried, triton.race.tried) == (7, 5)
    ((contender, why),) = native.race.out
    assert contender.name == "native-4"
    assert "cosine 0.93" in why
    assert triton.race.out == ()


def test_a_run_that_counts_for_nothing_changes_nothing(outcome: TuningOutcome) -> None:
    scores = tuple(msgspec.structs.replace(score, log_ratio=3.0) for score in outcome.tuning.runs[0].scores)
    useless = TuningRun(folder="09-screening", stage="screening", scores=scores, problem="The machine was busy.")
    again = outcome_of(msgspec.structs.replace(outcome.tuning, runs=(*outcome.tuning.runs, useless)), outcome.final)
    assert [target.race.gain for target in again.targets] == [target.race.gain for target in outcome.targets]


def test_a_limit_is_judged_by_the_final(final_of: Callable[[str], Result]) -> None:
    held = outcome_of(tuning(PlantedTuning(limit_ms=150.0)), final_of("planted"))
    assert "within p99 ≤ 150 ms" in held.headline
    assert held.pairs
    states = {name: f["latency_p99"].state for t in held.targets for name, f in t.figures.items()}
    assert states == {"native-0": "exceeded", "native-3": "kept", "triton-0": "exceeded", "triton-2": "kept"}
    lucky = measured(tuning(PlantedTuning(limit_ms=125.0)), ("native", "triton"), (0.95, 0.92, 0.98))
    missed = outcome_of(lucky, final_of("planted"))
    assert missed.headline.startswith("Native is not shown to keep p99 ≤ 125 ms; Triton at its best ")
    assert word_count(missed.headline) <= MOST_WORDS


def measured(stored: Tuning, targets: tuple[str, ...], limit: tuple[float, float, float]) -> Tuning:
    """The tuning whose contenders of these targets had this share of the limit."""
    runs = [
        msgspec.structs.replace(
            run,
            scores=tuple(
                msgspec.structs.replace(score, limits={"latency_p99": limit})
                if score.contender.startswith(targets)
                else score
                for score in run.scores
            ),
        )
        for run in stored.runs
    ]
    return msgspec.structs.replace(stored, runs=tuple(runs))


def test_a_target_that_nothing_brings_within_the_limit_is_named(final_of: Callable[[str], Result]) -> None:
    """Its nearest runs in the final, too, but cannot be the answer."""
    stored = measured(tuning(PlantedTuning(limit_ms=125.0)), ("native",), (1.4, 1.3, 1.5))
    outcome = outcome_of(stored, final_of("planted"))
    assert outcome.pairs == ()
    assert outcome.headline.startswith("Native is not shown to keep p99 ≤ 125 ms; Triton at its best handles 1.7")
    hopeless = measured(tuning(PlantedTuning(limit_ms=100.0)), ("native", "triton"), (1.4, 1.3, 1.5))
    nothing = outcome_of(hopeless, final_of("planted"))
    assert nothing.headline == "Nothing that was tried is shown to keep p99 ≤ 100 ms; Triton comes nearest with 119 ms."


def test_a_goal_that_does_not_lead_is_compared_between_any_two_arms(final_of: Callable[[str], Result]) -> None:
    """Of the median latency a run stores the comparisons with its baseline only."""
    outcome = outcome_of(tuning(PlantedTuning(settings={"goal": "latency"})), final_of("planted"))
    (pair,) = outcome.pairs
    best = pair.at_best
    assert best is not None
    assert (best.metric, {best.baseline, best.arm}) == ("latency_p50", {"native-3", "triton-2"})
    assert best.winner == "triton-2"
    assert "lower p50 latency than native" in outcome.headline
    assert word_count(outcome.headline) <= MOST_WORDS


def test_an_invalid_final_gives_no_winner(final_of: Callable[[str], Result]) -> None:
    result = final_of("planted")
    refused = tuple(msgspec.structs.replace(c, verdict="invalid", reason="busy") for c in result.comparisons)
    verdict = msgspec.structs.replace(result.verdict, headline="No verdict: other programs used the CPU.")
    outcome = outcome_of(tuning(), msgspec.structs.replace(result, comparisons=refused, verdict=verdict, valid=False))
    assert outcome.headline == "No verdict: other programs used the CPU."


def test_shares_read_as_one_number_with_its_interval() -> None:
    assert percent(0.312, (0.28, 0.34)) == "31 % (28–34)"
    assert percent(0.012, (-0.01, 0.034)) == "1.2 % (−1.0 to 3.4)"
    assert percent(-0.05, None) == "−5.0 %"


def test_one_target_is_told_beside_its_own_defaults(final_of: Callable[[str], Result]) -> None:
    stored = tuning()
    alone = msgspec.structs.replace(
        stored,
        spaces=stored.spaces[:1],
        contenders=tuple(c for c in stored.contenders if c.target == "native"),
        runs=tuple(
            msgspec.structs.replace(run, scores=tuple(s for s in run.scores if s.contender.startswith("native")))
            for run in stored.runs
        ),
        winners=("native-3",),
    )
    outcome = outcome_of(alone, final_of("planted"))
    assert outcome.headline.startswith("Native at its best handles 1.2")
    assert "the load of its defaults (" in outcome.headline


def test_energy_is_compared_by_the_joules_of_the_final(
    final_of: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target that serves more is not the one that needs less energy."""
    joules = {"native-0": 2.0, "triton-0": 2.0, "native-3": 1.0, "triton-2": 1.5}
    monkeypatch.setattr(GpuFound, "joules_per_item", lambda _self, label, _workload: joules[label])
    outcome = outcome_of(tuning(PlantedTuning(settings={"goal": "energy"})), final_of("planted"))
    assert outcome.headline.startswith("Native at its best has 1.50")
    assert "lower energy per item than Triton at its best (1.4" in outcome.headline
    (pair,) = outcome.pairs
    assert pair.at_defaults is not None
    assert pair.at_defaults.verdict == "no_difference"
    costs = [target.cost_of_defaults for target in outcome.targets]
    assert [round(cost.value, 3) for cost in costs if cost is not None] == [1.0, 0.333]
    assert outcome.unit == "J"
    monkeypatch.setattr(GpuFound, "joules_per_item", lambda _self, _label, _workload: None)
    unknown = outcome_of(outcome.tuning, outcome.final)
    assert unknown.headline.startswith("No winner between native and Triton at their best: inconclusive")


def test_every_claim_names_both_sides_with_its_interval(final_of: Callable[[str], Result]) -> None:
    decided, equal = (outcome_of(tuning(), final_of(name)) for name in ("planted", "equal"))
    assert decided.claims[1].startswith(
        "native at its defaults handles 1.23 times the load of Triton at its defaults (1.2"
    )
    text = equal.claims[0]
    assert text.startswith(("no meaningful difference", "inconclusive"))
    assert "between native at its defaults and Triton at its defaults (1.0" in text
