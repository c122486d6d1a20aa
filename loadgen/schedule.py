"""In which order blocks run: a pure function of the cells and a seed.

Blocks come in pairs, one of each arm side by side, so that what drifts slowly (temperature, clocks, neighbours) touches
both alike. Inside a pair the order is drawn at random, balanced: of every two successive pairs of a cell one starts
with a and one with b (ABBA or BAAB), so an advantage of coming first or second cancels.

Pairs of different cells are interleaved in rounds: each round holds one pair of every cell that has pairs left, in a
random order. A cell's pairs are thus spread over the whole run, their scatter includes the machine's drift and the
interval is not narrower than the truth; and a run that is interrupted has some pairs of every cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from loadgen.records import Cell, Label


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """One block to come. `position` is 0 where its arm is first in the pair."""

    index: int
    cell: Cell
    pair: int
    label: Label
    position: int


def pair_orders(pairs: int, random: Random) -> list[tuple[Label, Label]]:
    """The order inside each of `pairs` successive pairs, balanced over every two of them."""
    orders: list[tuple[Label, Label]] = []
    while len(orders) < pairs:
        two: list[tuple[Label, Label]] = [("a", "b"), ("b", "a")]
        random.shuffle(two)
        orders.extend(two)
    return orders[:pairs]


def schedule(cells: Sequence[Cell], seed: int) -> tuple[ScheduledBlock, ...]:
    """All load blocks, in order; cold starts have their own. The same cells and seed give the same schedule."""
    random = Random(seed)
    load = [cell for cell in cells if cell.scenario != "cold-start"]
    orders = {cell.name: pair_orders(cell.pairs, random) for cell in load}
    blocks: list[ScheduledBlock] = []
    for pair in range(max((cell.pairs for cell in load), default=0)):
        in_round = [cell for cell in load if pair < cell.pairs]
        random.shuffle(in_round)
        for cell in in_round:
            for position, label in enumerate(orders[cell.name][pair]):
                blocks.append(ScheduledBlock(len(blocks), cell, pair, label, position))
    return tuple(blocks)
