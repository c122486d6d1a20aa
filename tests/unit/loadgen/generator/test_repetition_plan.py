"""How often a comparison is repeated, from the options on: what is planned, and what is refused with a remedy."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadgen.commands.assembly import plan_experiment
from loadgen.commands.noise_floor import self_comparison
from loadgen.entry import build
from loadgen.experiment.plan import PlanError
from loadgen.experiment.schedule import endless_rounds, load_cells, schedule
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Cell, Experiment


def experiment(**settings: object) -> Experiment:
    ((_, planned),) = plan_experiment(ExperimentSettings.model_validate(settings)).runs
    return planned


def pairs(planned: Experiment) -> set[int]:
    return {cell.pairs for cell in load_cells(planned.cells)}


def test_as_many_rounds_of_one_start_as_fit_are_the_default() -> None:
    planned = experiment()
    assert (planned.restarts, planned.until_decided, planned.time_limit_minutes) == (1, False, None)
    assert (planned.minutes, experiment(preset="full").minutes, experiment(minutes=2).minutes) == (5.0, 25.0, 2.0)
    assert (pairs(planned), experiment(pairs=9).minutes) == ({4}, None)


def test_restarts_get_two_pairs_each_unless_told_otherwise() -> None:
    assert pairs(experiment(restarts=5)) == {10}
    assert pairs(experiment(restarts=5, pairs=7)) == {7}


def test_until_decided_has_a_limit_and_a_least_number_of_pairs() -> None:
    planned = experiment(until="decided", preset="full", time_limit=3)
    assert (planned.until_decided, planned.time_limit_minutes) == (True, 3.0)
    assert pairs(planned) == {4}
    assert pairs(experiment(until="decided", pairs=9)) == {9}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minutes": 3, "pairs": 3}, "--minutes and --pairs both say how long"),
        ({"minutes": 3, "until": "decided"}, "--minutes and --until decided both say how long"),
        ({"until": "bored"}, "--until bored: give planned or decided"),
        ({"until": "decided", "restarts": 5}, "choose one of them"),
        ({"restarts": 5, "pairs": 3}, "ask for --pairs 5 or more"),
        ({"restarts": 2, "b": "http://127.0.0.1:8000"}, "--b http://127.0.0.1:8000 is not started by us"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        experiment(**settings)


def test_the_noise_floor_compares_an_arm_with_itself() -> None:
    settings = self_comparison(ExperimentSettings.model_validate({"a": {"target": "triton", "options": {"x": "1"}}}))
    ((_, planned),) = plan_experiment(settings).runs
    assert (planned.b.target, planned.b.settings) == ("triton", {"x": "1"})
    assert (planned.restarts, pairs(planned)) == (6, {24})
    assert "cold-start" not in {cell.scenario for cell in planned.cells}
    chosen = self_comparison(ExperimentSettings.model_validate({"restarts": 3, "pairs": 6, "scenarios": "single"}))
    assert (chosen.restarts, chosen.pairs, chosen.scenarios) == (3, 6, ("single",))
    remote = self_comparison(ExperimentSettings.model_validate({"a": "http://127.0.0.1:8000"}))
    assert remote.restarts == 1


def test_what_is_no_comparison_of_an_arm_with_itself_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(build(), ["noise-floor", "--b", "triton"])
    assert refused.exit_code == 2
    assert "leave --b and its options out" in refused.output
    nothing = CliRunner().invoke(build(), ["noise-floor", "--from", str(tmp_path)])
    assert nothing.exit_code == 2
    assert "holds no run" in nothing.output


def cell(batch_size: int, number: int) -> Cell:
    return Cell(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=1, seconds=0, max_seconds=1, pairs=number
    )


@given(st.lists(st.integers(2, 12), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 99))
def test_restarts_share_the_pairs_in_order_and_as_evenly_as_can_be(
    numbers: list[int], restarts: int, seed: int
) -> None:
    cells = tuple(cell(place + 1, number) for place, number in enumerate(numbers))
    blocks = schedule(cells, seed, restarts)
    assert [block.index for block in blocks] == list(range(2 * sum(numbers)))
    assert [block.restart for block in blocks] == sorted(block.restart for block in blocks)
    for one in cells:
        own = [block for block in blocks if block.cell == one]
        assert [block.pair for block in own[::2]] == list(range(one.pairs))
        shares = [sum(block.restart == restart for block in own) // 2 for restart in range(restarts)]
        assert max(shares) - min(shares) <= 1


@given(st.integers(1, 4), st.integers(0, 99))
def test_endless_rounds_hold_every_cell_once_and_are_balanced_over_two(number: int, seed: int) -> None:
    cells = tuple(cell(place + 1, 1) for place in range(number))
    rounds = list(islice(endless_rounds(cells, seed), 6))
    for place, chosen in enumerate(rounds):
        assert {(one.cell, one.pair) for one in chosen} == {(each, place) for each in cells}
    for one in cells:
        first = [pair.order[0] for chosen in rounds for pair in chosen if pair.cell == one]
        assert all(set(first[place : place + 2]) == {"a", "b"} for place in (0, 2, 4))
    blocks = rounds[0][0].blocks(8, 3)
    assert [(block.index, block.position, block.restart) for block in blocks] == [(8, 0, 3), (9, 1, 3)]


@pytest.mark.parametrize("arms", [{"a": "http://127.0.0.1:8100"}, {"a": "http://h:1", "b": "http://h:2"}])
def test_the_default_asks_no_cold_starts_of_a_server_that_others_started(arms: dict[str, str]) -> None:
    """They would all fail, and the comparison of the README's example with them."""
    names = {cell.scenario for cell in experiment(**arms).cells}
    assert names == {"single", "batched", "concurrent"}
    assert "cold-start" in {cell.scenario for cell in experiment().cells}
    with pytest.raises(PlanError, match="leave cold-start out of --scenarios"):
        experiment(**arms, scenarios="single,cold-start")
