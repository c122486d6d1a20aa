"""The order of blocks, over all numbers of arms, seeds and sizes that hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiment.plan import make_cells
from loadgen.experiment.schedule import ScheduledBlock, endless_passes, interleave
from loadgen.experiment.settings import ExperimentSettings
from loadgen.records.run import Cell, Label
from loadgen.studies.cold_start.measure import cold_start_order

CELLS = st.lists(st.integers(1, 12), min_size=0, max_size=8).map(
    lambda pairs: tuple(
        Cell(scenario="batched", batch_size=i + 1, concurrency=1, requests=1, seconds=0, max_seconds=1, rounds=n)
        for i, n in enumerate(pairs)
    )
)
LABELS = st.sampled_from(["ab", "abc", "abcd", "abcdefgh"]).map(tuple)
SEEDS = st.integers(0, 2**31)


def rounds_of(blocks: Sequence[ScheduledBlock], arms: int) -> list[Sequence[ScheduledBlock]]:
    assert len(blocks) % arms == 0
    return [blocks[first : first + arms] for first in range(0, len(blocks), arms)]


def assert_balanced(orders: Sequence[Sequence[Label]], labels: Sequence[Label]) -> None:
    """In every k successive rounds of k arms each arm comes once in each place."""
    for first in range(0, len(orders) - len(labels) + 1, len(labels)):
        for place in range(len(labels)):
            assert {order[place] for order in orders[first : first + len(labels)]} == set(labels)


@given(CELLS, LABELS, SEEDS)
def test_every_round_is_adjacent_blocks_one_of_each_arm(
    cells: tuple[Cell, ...], labels: tuple[Label, ...], seed: int
) -> None:
    blocks = interleave(cells, labels, seed)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert len(blocks) == len(labels) * sum(cell.rounds for cell in cells)
    for one in rounds_of(blocks, len(labels)):
        assert len({(block.cell, block.round) for block in one}) == 1
        assert sorted(block.label for block in one) == list(labels)
        assert [block.position for block in one] == list(range(len(labels)))


@given(CELLS, LABELS, SEEDS)
def test_each_cell_gets_its_rounds_in_order(cells: tuple[Cell, ...], labels: tuple[Label, ...], seed: int) -> None:
    blocks = interleave(cells, labels, seed)
    for cell in cells:
        assert [block.round for block in blocks if block.cell == cell and block.position == 0] == list(
            range(cell.rounds)
        )


@given(CELLS, LABELS, SEEDS)
def test_the_order_inside_rounds_is_balanced_over_as_many_as_there_are_arms(
    cells: tuple[Cell, ...], labels: tuple[Label, ...], seed: int
) -> None:
    blocks = interleave(cells, labels, seed)
    for cell in cells:
        own = [block for block in blocks if block.cell == cell]
        assert_balanced([[block.label for block in one] for one in rounds_of(own, len(labels))], labels)


@given(CELLS, LABELS, SEEDS)
def test_an_interrupted_run_has_rounds_of_every_cell(
    cells: tuple[Cell, ...], labels: tuple[Label, ...], seed: int
) -> None:
    """At any moment no cell is more than one round ahead of another that still has rounds left."""
    done: Counter[str] = Counter()
    for one in rounds_of(interleave(cells, labels, seed), len(labels)):
        done[one[0].cell.name] += 1
        left = [done[cell.name] for cell in cells if done[cell.name] < cell.rounds]
        assert max(done.values()) - min(left, default=max(done.values())) <= 1


@given(CELLS, LABELS, SEEDS)
def test_a_seed_decides_everything(cells: tuple[Cell, ...], labels: tuple[Label, ...], seed: int) -> None:
    assert interleave(cells, labels, seed) == interleave(cells, labels, seed)


@pytest.mark.parametrize("labels", ["ab", "abc", "abcd"])
def test_seeds_differ_and_every_arm_comes_first(labels: str) -> None:
    cells = make_cells(ExperimentSettings.model_validate({"scenarios": "single,batched"}))
    orders = {tuple((b.cell.name, b.label) for b in interleave(cells, labels, seed)) for seed in range(10)}
    assert len(orders) == 10
    assert {interleave(cells, labels, seed)[0].label for seed in range(40)} == set(labels)


@given(st.integers(1, 4), LABELS, SEEDS)
def test_endless_passes_hold_every_cell_once_and_are_balanced(
    number: int, labels: tuple[Label, ...], seed: int
) -> None:
    cells = tuple(
        Cell(scenario="batched", batch_size=i + 1, concurrency=1, requests=1, seconds=0, max_seconds=1, rounds=1)
        for i in range(number)
    )
    passes = list(islice(endless_passes(cells, labels, seed, first=5), 2 * len(labels)))
    for place, chosen in enumerate(passes, start=5):
        assert {(one.cell, one.round) for one in chosen} == {(each, place) for each in cells}
    for cell in cells:
        assert_balanced([one.order for chosen in passes for one in chosen if one.cell == cell], labels)
    blocks = passes[0][0].blocks(8, 3)
    assert [(block.index, block.position, block.restart) for block in blocks] == [
        (8 + place, place, 3) for place in range(len(labels))
    ]


@pytest.mark.parametrize("labels", ["ab", "abcd"])
def test_cold_starts_have_their_own_order(labels: str) -> None:
    order = cold_start_order(tuple(labels), 4, 0)
    assert [repetition for repetition, _ in order] == [number for number in range(4) for _ in labels]
    assert_balanced([[label for number, label in order if number == one] for one in range(4)], labels)
