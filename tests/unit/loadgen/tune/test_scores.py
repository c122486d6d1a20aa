"""The score of a contender: its error is that of the truth, whatever all arms of a round share."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.checks.registry import Judgement
from loadgen.checks.run import same_payload
from loadgen.checks.tokens import cached_prompts
from loadgen.experiment.tuning import TuneSettings
from loadgen.metrics.registry import METRICS, THROUGHPUT
from loadgen.records.run import Workload
from loadgen.records.store import StoredRun, read_run
from loadgen.records.tuning import ANCHOR
from loadgen.tune.screening import LEAST_ERROR, judge, scores_of
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run

ARMS = {ANCHOR: 0.0, "native-1": 0.1, "native-2": -0.3, "triton-0": 0.0, "triton-1": 0.02}

LOAD = Workload(
    scenario="concurrent", batch_size=1, concurrency=16, requests=160, seconds=1.0, max_seconds=30.0, rounds=8
)


def blocks(rng: np.random.Generator, rounds: int, noise: float, sign: float = 1.0) -> list[Any]:
    """Of arms with these log leads. All arms of a round are faster or slower by 20 %."""
    drift = rng.normal(0.0, 0.2, rounds)
    return [
        SimpleNamespace(
            round=number, label=label, complete=True,
            figures={
                "throughput": 100.0 * math.exp(sign * (lead + drift[number] + rng.normal(0.0, noise))),
                "latency_mean": 10.0 * math.exp(-(lead + drift[number] + rng.normal(0.0, noise))),
            },
        )
        for number in range(rounds)
        for label, lead in ARMS.items()
    ]  # fmt: skip


def test_the_error_covers_the_truth_in_nineteen_of_twenty() -> None:
    rng, outside, trials = np.random.default_rng(5), 0, 600
    for _ in range(trials):
        scores = scores_of(blocks(rng, 4, 0.03), THROUGHPUT, ANCHOR)
        log_ratio, error, _ = scores["native-1"]
        outside += abs(log_ratio - ARMS["native-1"]) > 1.96 * error
    assert 0.025 < outside / trials < 0.08


def test_better_is_above_zero_whatever_the_metric() -> None:
    rng = np.random.default_rng(1)
    for metric in (THROUGHPUT, METRICS["latency_mean"]):
        scores = scores_of(blocks(rng, 6, 0.001), metric, ANCHOR)
        assert scores["native-1"][0] == pytest.approx(0.1, abs=0.01)
        assert scores["native-2"][0] == pytest.approx(-0.3, abs=0.01)
    value = scores["native-2"][2]
    assert value == pytest.approx(10.0 * math.exp(0.3), rel=0.3)


def test_an_arm_that_lacks_a_round_has_no_score_and_costs_the_others_nothing() -> None:
    made = [b for b in blocks(np.random.default_rng(2), 4, 0.01) if (b.label, b.round) != ("triton-1", 2)]
    scores = scores_of(made, THROUGHPUT, ANCHOR)
    assert set(scores) == set(ARMS) - {"triton-1"}


def test_without_the_anchor_or_a_second_round_there_is_no_score() -> None:
    made = blocks(np.random.default_rng(3), 4, 0.01)
    assert scores_of([b for b in made if b.label != ANCHOR], THROUGHPUT, ANCHOR) == {}
    assert scores_of([b for b in made if b.round == 0], THROUGHPUT, ANCHOR) == {}


def test_a_regular_server_has_an_error_too() -> None:
    scores = scores_of(blocks(np.random.default_rng(4), 4, 0.0), THROUGHPUT, ANCHOR)
    assert scores["native-1"][1] == LEAST_ERROR


def of_a_tuning(folder: Path, plan: Plan) -> StoredRun:
    """A run of two arms, as a screening of the anchor and one contender."""
    write_run(folder, plan)
    for path in [*folder.glob("*.json"), *folder.glob("blocks/*.json")]:
        text = path.read_text().replace('"label":"a"', f'"label":"{ANCHOR}"')
        path.write_text(text.replace('"label":"b"', '"label":"native-1"'))
    return read_run(folder)


@pytest.mark.parametrize(("rounds", "is_used"), [(1, False), (2, True), (4, True)])
def test_an_interrupted_run_counts_by_its_whole_rounds(tmp_path: Path, rounds: int, is_used: bool) -> None:
    """So that a resumed tuning need not repeat it. The round under way does not count."""
    whole = of_a_tuning(tmp_path / "whole", Plan(workloads=(LOAD,)))
    part = of_a_tuning(tmp_path / "part", Plan(workloads=(LOAD,), state="interrupted", cut_after=2 * rounds + 1))
    judged, at_end = (judge(run, analyse(run.directory), TuneSettings()) for run in (part, whole))
    assert (judged.problem is None, judged.out) == (is_used, {})
    assert [score.contender for score in judged.scores] == ["native-1"] * is_used
    for score, final in zip(judged.scores, at_end.scores, strict=False):
        assert abs(score.log_ratio - final.log_ratio) < 5.0 * math.hypot(score.error, final.error)
        assert score.error > final.error


def test_a_contender_that_answers_prompts_from_a_cache_is_out(tmp_path: Path) -> None:
    """It is an unfair configuration, of which others are tolerated, and that would show in the final only."""
    run = of_a_tuning(tmp_path, Plan(workloads=(LOAD,)))
    result = analyse(tmp_path)
    for check, blamed in ((cached_prompts, ("native-1",)), (same_payload, ())):
        failed = check.stated(Judgement(False, "12 prompt tokens came from a cache", arms=blamed))
        judged = judge(run, msgspec.structs.replace(result, checks=(failed,)), TuneSettings())
        assert list(judged.out) == list(blamed)
        assert judged.problem is None
