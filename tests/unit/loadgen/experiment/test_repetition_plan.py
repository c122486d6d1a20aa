"""How often a comparison is repeated, from the options on: what is planned, and what is refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadgen.cli.noise_floor import self_comparison
from loadgen.entry import build
from loadgen.experiment.plan import PlanError
from loadgen.experiment.schedule import interleave, load_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.planning import plan_experiment
from loadgen.records.run import Experiment, Label, Workload


def experiment(**settings: object) -> Experiment:
    ((_, planned),) = plan_experiment(ExperimentSettings.model_validate(settings)).runs
    return planned


def rounds(planned: Experiment) -> set[int]:
    return {workload.rounds for workload in load_workloads(planned.workloads)}


def test_as_many_rounds_of_one_start_as_fit_are_the_default() -> None:
    planned = experiment()
    assert (planned.restarts, planned.until_decided, planned.time_limit_minutes) == (1, False, None)
    assert (planned.minutes, experiment(preset="full").minutes, experiment(minutes=2).minutes) == (5.0, 25.0, 2.0)
    assert (rounds(planned), experiment(rounds=9).minutes) == ({4}, None)


def test_restarts_get_two_rounds_each_unless_told_otherwise() -> None:
    assert rounds(experiment(restarts=5)) == {10}
    assert rounds(experiment(restarts=5, rounds=7)) == {7}


def test_of_several_arms_there_are_so_many_rounds_that_each_comes_equally_often_in_each_place() -> None:
    three, five = {"c": "native"}, {"c": "native", "d": "native", "e": "native"}
    assert [rounds(experiment(**arms)) for arms in ({}, three, five)] == [{4}, {6}, {5}]
    assert rounds(experiment(**three, restarts=4)) == {9}
    assert rounds(experiment(**three, rounds=4)) == {4}


def test_until_decided_has_a_limit_and_a_least_number_of_rounds() -> None:
    planned = experiment(until="decided", preset="full", time_limit=3)
    assert (planned.until_decided, planned.time_limit_minutes) == (True, 3.0)
    assert rounds(planned) == {8}
    assert rounds(experiment(until="decided", rounds=9)) == {9}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minutes": 3, "rounds": 3}, "--minutes and --rounds both"),
        ({"minutes": 3, "until": "decided"}, "--minutes and --until decided both"),
        ({"until": "decided", "restarts": 5}, "give one of the two options"),
        ({"restarts": 5, "rounds": 3}, "give --rounds 5 or more"),
        ({"restarts": 2, "b": "http://127.0.0.1:8000"}, "did not start --b http://127.0.0.1:8000"),
        ({"restarts": 2, "c": "http://127.0.0.1:8000"}, "did not start --c http://127.0.0.1:8000"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        experiment(**settings)


def test_the_noise_floor_compares_an_arm_with_itself() -> None:
    settings = self_comparison(ExperimentSettings.model_validate({"a": {"target": "triton", "options": {"x": "1"}}}))
    ((_, planned),) = plan_experiment(settings).runs
    assert [(arm.target, arm.settings) for arm in planned.arms] == [("triton", {"x": "1"})] * 2
    assert (planned.restarts, rounds(planned)) == (6, {24})
    assert "cold-start" not in {workload.scenario for workload in planned.workloads}
    chosen = self_comparison(ExperimentSettings.model_validate({"restarts": 3, "rounds": 6, "scenarios": "single"}))
    assert (chosen.restarts, chosen.rounds, chosen.scenarios) == (3, 6, ("single",))
    remote = self_comparison(ExperimentSettings.model_validate({"a": "http://127.0.0.1:8000"}))
    assert remote.restarts == 1
    named = ExperimentSettings.model_validate({"arms": {"torch": "native", "onnx": "triton", "trt": "triton"}})
    ((_, planned),) = plan_experiment(self_comparison(named)).runs
    assert [(arm.label, arm.target) for arm in planned.arms] == [("a", "native"), ("b", "native")]


@pytest.mark.parametrize("option", [("--b", "triton"), ("--c-option", "x=1")])
def test_what_is_no_comparison_of_an_arm_with_itself_is_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    refused = CliRunner().invoke(build(), ["noise-floor", *option])
    assert refused.exit_code == 2
    assert f"{option[0]}: the noise floor compares --a with itself; leave the other arms out" in refused.output
    nothing = CliRunner().invoke(build(), ["noise-floor", "--from", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "holds no run" in nothing.output


def workload(batch_size: int, number: int) -> Workload:
    return Workload(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=1, seconds=0, max_seconds=1, rounds=number
    )


@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=4),
    st.sampled_from(["ab", "abc", "abcd"]).map(tuple),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_restarts_share_the_rounds_in_order_and_as_evenly_as_can_be(
    numbers: list[int], labels: tuple[Label, ...], restarts: int, seed: int
) -> None:
    workloads = tuple(workload(place + 1, number) for place, number in enumerate(numbers))
    blocks = interleave(workloads, labels, seed, restarts)
    assert [block.index for block in blocks] == list(range(len(labels) * sum(numbers)))
    assert [block.restart for block in blocks] == sorted(block.restart for block in blocks)
    for planned in workloads:
        of_workload = [block for block in blocks if block.workload == planned and block.position == 0]
        assert [block.round for block in of_workload] == list(range(planned.rounds))
        shares = [sum(block.restart == restart for block in of_workload) for restart in range(restarts)]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    "arms", [{"a": "http://127.0.0.1:8100"}, {"a": "http://h:1", "b": "http://h:2"}, {"c": "http://h:3"}]
)
def test_the_default_asks_no_cold_starts_of_a_server_that_others_started(arms: dict[str, str]) -> None:
    """They would all fail, and the comparison of the README's example with them."""
    names = {workload.scenario for workload in experiment(**arms).workloads}
    assert names == {"single", "batched", "concurrent"}
    assert "cold-start" in {workload.scenario for workload in experiment().workloads}
    with pytest.raises(PlanError, match="leave cold-start out of --scenarios"):
        experiment(**arms, scenarios="single,cold-start")
