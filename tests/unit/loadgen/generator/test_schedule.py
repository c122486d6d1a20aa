"""The order of blocks, over all seeds and sizes that hypothesis can think of."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiment.plan import make_cells
from loadgen.experiment.schedule import schedule
from loadgen.records.run import Cell
from loadgen.run.cold_start import cold_start_order

CELLS = st.lists(st.integers(1, 12), min_size=0, max_size=8).map(
    lambda pairs: tuple(
        Cell(scenario="batched", batch_size=i + 1, concurrency=1, requests=1, seconds=0, max_seconds=1, pairs=n)
        for i, n in enumerate(pairs)
    )
)
SEEDS = st.integers(0, 2**31)


@given(CELLS, SEEDS)
def test_every_pair_is_two_adjacent_blocks_one_of_each_arm(cells: tuple[Cell, ...], seed: int) -> None:
    blocks = schedule(cells, seed)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert len(blocks) == 2 * sum(cell.pairs for cell in cells)
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        assert (first.cell, first.pair) == (second.cell, second.pair)
        assert {first.label, second.label} == {"a", "b"}
        assert (first.position, second.position) == (0, 1)


@given(CELLS, SEEDS)
def test_each_cell_gets_its_pairs_in_order(cells: tuple[Cell, ...], seed: int) -> None:
    blocks = schedule(cells, seed)
    for cell in cells:
        assert [block.pair for block in blocks if block.cell == cell][::2] == list(range(cell.pairs))


@given(CELLS, SEEDS)
def test_the_order_inside_pairs_is_balanced_over_every_two(cells: tuple[Cell, ...], seed: int) -> None:
    blocks = schedule(cells, seed)
    for cell in cells:
        firsts = [block.label for block in blocks if block.cell == cell and block.position == 0]
        for i in range(0, len(firsts) - 1, 2):
            assert {firsts[i], firsts[i + 1]} == {"a", "b"}


@given(CELLS, SEEDS)
def test_an_interrupted_run_has_pairs_of_every_cell(cells: tuple[Cell, ...], seed: int) -> None:
    """At any moment no cell is more than one pair ahead of another that still has pairs left."""
    done: Counter[str] = Counter()
    for block in schedule(cells, seed)[1::2]:
        done[block.cell.name] += 1
        left = [done[cell.name] for cell in cells if done[cell.name] < cell.pairs]
        assert max(done.values()) - min(left, default=max(done.values())) <= 1


@given(CELLS, SEEDS)
def test_a_seed_decides_everything(cells: tuple[Cell, ...], seed: int) -> None:
    assert schedule(cells, seed) == schedule(cells, seed)


def test_seeds_differ_and_both_orders_occur() -> None:
    cells = make_cells("quick", ["single", "batched"])
    orders = {tuple((b.cell.name, b.label) for b in schedule(cells, seed)) for seed in range(10)}
    assert len(orders) == 10
    assert {schedule(cells, seed)[0].label for seed in range(20)} == {"a", "b"}


def test_cold_starts_have_their_own_order() -> None:
    assert schedule(make_cells("quick", ["cold-start"]), 0) == ()
    order = cold_start_order(4, 0)
    assert Counter(label for _, label in order) == {"a": 4, "b": 4}
    assert Counter(repetition for repetition, _ in order) == {0: 2, 1: 2, 2: 2, 3: 2}
    firsts = [label for _, label in order[::2]]
    assert Counter(firsts) == {"a": 2, "b": 2}
