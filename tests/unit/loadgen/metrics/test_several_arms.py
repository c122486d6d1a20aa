"""Three arms: what is compared with what, one family for Holm, the ranking, and the sentence over it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.metrics.claims import WorkloadRanking, neighbours, rank
from loadgen.metrics.comparisons import Comparison, Outcome
from loadgen.metrics.registry import METRICS
from loadgen.records.run import Label, Pairing, Workload
from loadgen.stats.ratios import adjust_holm
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

COMMON: dict[str, Any] = {"seconds": 1.0, "max_seconds": 30.0, "rounds": 6}
WORKLOADS = (
    Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, **{**COMMON, "rounds": 4}),
    Workload(scenario="single", batch_size=1, concurrency=1, requests=60, **COMMON),
    Workload(scenario="concurrent", batch_size=1, concurrency=16, requests=200, **COMMON),
)
FAST = SimulatedArm(3.0, 4.0, 1.5)
"""Serves a request at a time in 8.5 ms, where A takes 16 and B 13.5."""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three arms of different speed, C before B before A; from a cold start A and C are alike."""
    return analyse(write_run(tmp_path_factory.mktemp("apart"), Plan(others=(FAST,), workloads=WORKLOADS)))


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A, B and C are one arm."""
    arm = SimulatedArm()
    plan = Plan(a=arm, b=arm, others=(arm,), workloads=WORKLOADS, seed=5)
    return analyse(write_run(tmp_path_factory.mktemp("alike"), plan))


def test_every_metric_is_compared_with_the_baseline_and_the_leading_one_among_the_others(apart: Result) -> None:
    metrics_of_pairing: dict[Pairing, set[tuple[str, str]]] = {}
    for comparison in apart.comparisons:
        metrics_of_pairing.setdefault(comparison.pairing, set()).add((comparison.workload, comparison.metric))
    assert set(metrics_of_pairing) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert metrics_of_pairing[Pairing("a", "b")] == metrics_of_pairing[Pairing("a", "c")]
    assert len(metrics_of_pairing[Pairing("a", "b")]) == 2 + 4 + 4
    assert metrics_of_pairing[Pairing("b", "c")] == {
        ("cold-start", "time_to_first_answer"), ("single", "throughput"), ("concurrent(16)", "throughput"),
    }  # fmt: skip


def test_the_planted_ratio_of_every_two_arms_is_found(apart: Result) -> None:
    """Overhead, one image and the transport with 5 % of it: 16.05, 13.625 and 8.575 ms."""
    times = {"a": 16.05, "b": 13.625, "c": 8.575}
    for comparison in apart.comparisons:
        if (comparison.workload, comparison.metric) == ("single", "throughput"):
            assert comparison.ci95 is not None
            assert comparison.ci95[0] < times[comparison.baseline] / times[comparison.arm] < comparison.ci95[1]
            assert (comparison.winner, comparison.loser) == (comparison.arm, comparison.baseline)


def test_all_comparisons_are_one_family(apart: Result) -> None:
    p_values = [comparison.p_value for comparison in apart.comparisons]
    assert {comparison.pairing for comparison in apart.comparisons if comparison.p_value is not None} == {
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    }
    assert [comparison.p_adjusted for comparison in apart.comparisons] == pytest.approx(adjust_holm(p_values))
    known = sorted(p for p in p_values if p is not None)
    least = min(
        (comparison for comparison in apart.comparisons if comparison.p_value is not None),
        key=lambda c: c.p_value or 0.0,
    )
    assert least.p_adjusted == pytest.approx(known[0] * len(known)), "the smallest p counts once for each of them"


def separated(ranking: WorkloadRanking) -> tuple[bool, ...]:
    """Of each arm but the last: whether it is better than the next one."""
    return tuple(two not in ranking.not_separated for two in pairwise(ranking.order))


def test_each_scenario_has_its_ranking_and_words_that_separate(apart: Result) -> None:
    assert {
        ranking.workload: (ranking.order, separated(ranking))
        for ranking in apart.verdict.rankings
        if ranking.metric == "throughput"
    } == {
        "single": (("c", "b", "a"), (True, True)),
        "concurrent(16)": (("c", "b", "a"), (True, True)),
    }
    (cold,) = [ranking for ranking in apart.verdict.rankings if ranking.workload == "cold-start"]
    assert set(cold.order[:2]) == {"a", "c"}
    assert (cold.order[2], separated(cold)) == ("b", (False, True))
    assert cold.words() == "A and C (not separated), then B"


def test_the_sentence_names_the_arms_in_their_order_and_what_separates_neighbours(apart: Result) -> None:
    said = apart.verdict.sentence
    assert said.startswith(
        "By throughput with 16 users: native (C), then Triton, then native (A). Native (C) handles 1."
    )
    assert "times the load of Triton (" in said
    assert "; Triton handles 1." in said
    assert "Native (C) handles 2" not in said, "the first and the last are no neighbours"
    assert "from a cold start: native (A) and native (C) (not separated), then Triton" in said.replace("From", "from")
    assert "one request at a time: native (C), then Triton, then native (A)" in said.replace("One", "one")


def test_each_arm_has_a_verdict_beside_the_baseline(apart: Result) -> None:
    verdicts = {(scenario.workload, scenario.arm): scenario for scenario in apart.verdict.scenarios}
    assert set(verdicts) == {(workload.name, arm) for workload in WORKLOADS for arm in ("b", "c")}
    assert {scenario.baseline for scenario in apart.verdict.scenarios} == {"a"}
    assert verdicts["single", "c"].sentence.startswith("Native (C) handles 1.")
    assert "the load of native (A)" in verdicts["single", "c"].sentence
    assert any(
        "on native (A) and " in reason and "on native (C)" in reason for reason in verdicts["single", "c"].reasons
    )
    assert not any("on Triton" in reason for reason in verdicts["single", "c"].reasons)


def test_identical_arms_have_no_winner_and_are_not_separated(alike: Result) -> None:
    assert alike.valid
    assert {comparison.verdict for comparison in alike.comparisons} <= {"no_difference", "inconclusive"}
    for ranking in alike.verdict.rankings:
        assert separated(ranking) == (False, False)
        assert ranking.words() == "A, B and C (not separated)"
    assert "faster" not in alike.verdict.sentence
    assert " handles " not in alike.verdict.sentence


def compared(
    baseline: Label,
    arm: Label,
    ratio: float | None,
    verdict: Outcome,
    metric: str = "throughput",
    *,
    leading: bool = True,
) -> Comparison:
    interval = None if ratio is None else (0.99 * ratio, 1.01 * ratio)
    return Comparison(
        workload="single", metric=metric, unit="", higher_is_better=METRICS[metric].higher_is_better,
        baseline=baseline, arm=arm, baseline_value=None, arm_value=None, ratio=ratio, ci95=interval, verdict=verdict,
        pairs=6, minimal_detectable_effect=None, p_value=None, p_adjusted=None, p_equivalence=None, ratios=(),
        reason=None, leading=leading,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "order", "words"),
    [
        ("throughput", ("c", "a", "b"), "C, then A and B (not separated)"),
        ("time_to_first_answer", ("b", "a", "c"), "A and B (not separated), then C"),
    ],
)
def test_the_best_comes_first_whatever_is_better(metric: str, order: tuple[Label, ...], words: str) -> None:
    """B is 1 % below A and undecided, C at twice A's figure."""
    c_wins = metric == "throughput"
    comparisons = [
        compared("a", "b", 0.99, "inconclusive", metric),
        compared("a", "c", 2.0, "arm_better" if c_wins else "baseline_better", metric),
        compared("b", "c", 2.02, "arm_better" if c_wins else "baseline_better", metric),
    ]
    (ranking,) = rank(comparisons, lambda _: "a")
    assert (ranking.order, ranking.words()) == (order, words)
    assert [neighbour.pairing for neighbour in neighbours(comparisons, ranking)] == [
        Pairing(*sorted(two)) for two in zip(ranking.order, ranking.order[1:], strict=False)
    ]


def test_neighbours_without_a_winner_among_themselves_are_not_separated_though_others_are() -> None:
    """B and C both lead A, and nothing tells them apart."""
    comparisons = [
        compared("a", "b", 1.30, "arm_better"),
        compared("a", "c", 1.32, "arm_better"),
        compared("b", "c", 1.02, "no_difference"),
    ]
    (ranking,) = rank(comparisons, lambda _: "a")
    assert (ranking.order, separated(ranking)) == (("c", "b", "a"), (False, True))
    assert ranking.words() == "B and C (not separated), then A"


def test_where_an_arm_does_not_sustain_the_rate_all_are_ranked_by_what_they_achieved() -> None:
    """A and C do, so their p99 leads; B is told apart by the rate alone."""
    comparisons = [
        compared("a", "b", 0.4, "baseline_better", "achieved_rate"),
        compared("a", "c", 1.0, "no_difference", "achieved_rate", leading=False),
        compared("a", "c", 1.3, "baseline_better", "latency_p99"),
        compared("b", "c", 2.5, "arm_better", "achieved_rate"),
    ]
    (ranking,) = rank(comparisons, lambda _: "a")
    assert ranking.metric == "achieved_rate"
    assert ranking.words() == "A and C (not separated), then B"


def test_a_chain_of_like_neighbours_with_unlike_ends_is_no_group() -> None:
    comparisons = [
        compared("a", "b", 1.02, "inconclusive"),
        compared("a", "c", 1.06, "arm_better"),
        compared("b", "c", 1.04, "inconclusive"),
    ]
    (ranking,) = rank(comparisons, lambda _: "a")
    assert separated(ranking) == (False, False)
    assert ranking.words() == "B and C (not separated), then A (not separated from B)"


def test_an_arm_without_a_value_is_left_out_and_an_invalid_scenario_has_no_ranking() -> None:
    comparisons = [
        compared("a", "b", 1.30, "arm_better"),
        compared("a", "c", None, "inconclusive"),
        compared("b", "c", None, "inconclusive"),
    ]
    (ranking,) = rank(comparisons, lambda _: "a")
    assert ranking.order == ("b", "a")
    lost = [msgspec.structs.replace(comparison, verdict="invalid") for comparison in comparisons]
    assert rank(lost, lambda _: "a") == ()


def test_arms_with_names_are_called_by_them() -> None:
    ranking = WorkloadRanking(
        workload="single", metric="throughput", order=("onnx", "torch", "a"), not_separated=(("torch", "a"),)
    )
    assert ranking.words() == "onnx, then A and torch (not separated)"


def test_without_a_leading_metric_there_is_no_ranking(tmp_path: Path) -> None:
    """Too few requests for a median: the run is analysed all the same, as with two arms."""
    rare = Workload(
        scenario="open", batch_size=1, concurrency=4, requests=4, seconds=0.1, max_seconds=1.0, rounds=1,
        arrivals="constant", rate_per_s=20.0,
    )  # fmt: skip
    verdict = analyse(write_run(tmp_path, Plan(others=(FAST,), workloads=(rare,), pairs=1))).verdict
    assert verdict.rankings == ()
    assert verdict.sentence.startswith("No ranking of native (A), Triton and")
    assert verdict.sentence.endswith("): inconclusive at 20 requests/s.")
