"""In which order blocks run: a pure function of the cells and a seed.

Blocks come in pairs, one of each arm side by side, so that what drifts slowly (temperature, clocks, neighbours) touches
both alike. Inside a pair the order is drawn at random, balanced: of every two successive pairs of a cell one starts
with a and one with b (ABBA or BAAB), so an advantage of coming first or second cancels.

Pairs of different cells are interleaved in rounds: each round holds one pair of every cell that has pairs left, in a
random order. A cell's pairs are thus spread over the whole run, their scatter includes the machine's drift and the
interval is not narrower than the truth; and a run that is interrupted has some pairs of every cell.

With several restarts of the servers each gets its share of every cell's pairs, as even as can be, in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from loadgen.records.run import Cell, Label


@dataclass(frozen=True, slots=True)
class ScheduledBlock:
    """One block to come. `position` is 0 where its arm is first in the pair."""

    index: int
    cell: Cell
    pair: int
    label: Label
    position: int
    restart: int = 0


def load_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that blocks are made of; cold starts, searches and ramps have their own order."""
    return [cell for cell in cells if cell.has_blocks]


def pair_orders(pairs: int, random: Random) -> list[tuple[Label, Label]]:
    """The order inside each of `pairs` successive pairs, balanced over every two of them."""
    orders: list[tuple[Label, Label]] = []
    while len(orders) < pairs:
        two: list[tuple[Label, Label]] = [("a", "b"), ("b", "a")]
        random.shuffle(two)
        orders.extend(two)
    return orders[:pairs]


def schedule(cells: Sequence[Cell], seed: int, restarts: int = 1) -> tuple[ScheduledBlock, ...]:
    """All load blocks, in order. The same cells, seed and number of restarts give the same schedule."""
    return _interleave(load_cells(cells), seed, restarts)


def search_schedule(cells: Sequence[Cell], seed: int, restarts: int = 1) -> tuple[ScheduledBlock, ...]:
    """The same for searches and ramps: each entry is one of them on one arm, with as many trials as it takes."""
    return _interleave([cell for cell in cells if cell.scenario in ("slo", "ramp")], seed, restarts)


def _interleave(load: Sequence[Cell], seed: int, restarts: int) -> tuple[ScheduledBlock, ...]:
    random = Random(seed)
    orders = {cell.name: pair_orders(cell.pairs, random) for cell in load}
    blocks: list[ScheduledBlock] = []
    for restart in range(restarts):
        shares = {cell.name: range(*_share(cell.pairs, restart, restarts)) for cell in load}
        for place in range(max((len(share) for share in shares.values()), default=0)):
            in_round = [cell for cell in load if place < len(shares[cell.name])]
            random.shuffle(in_round)
            for cell in in_round:
                pair = shares[cell.name][place]
                for position, label in enumerate(orders[cell.name][pair]):
                    blocks.append(ScheduledBlock(len(blocks), cell, pair, label, position, restart))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class RoundPair:
    """One pair of a round of an open-ended schedule, its arms in their order."""

    cell: Cell
    pair: int
    order: tuple[Label, Label]

    def blocks(self, index: int, restart: int) -> tuple[ScheduledBlock, ScheduledBlock]:
        """Its blocks, numbered from `index`."""
        first, second = self.order
        return (
            ScheduledBlock(index, self.cell, self.pair, first, 0, restart),
            ScheduledBlock(index + 1, self.cell, self.pair, second, 1, restart),
        )


def endless_rounds(cells: Sequence[Cell], seed: int, first: int = 0) -> Iterator[list[RoundPair]]:
    """Rounds without end, their pairs numbered from `first`: one pair of every load cell in a random order, balanced as
    in `schedule`. Which pairs of a round are run is the caller's to decide; leaving a cell out from some round on
    leaves it balanced."""
    random = Random(seed)
    load = load_cells(cells)
    pair = first
    while True:
        orders = {cell.name: pair_orders(2, random) for cell in load}
        for place in range(2):
            in_round = [RoundPair(cell, pair + place, orders[cell.name][place]) for cell in load]
            random.shuffle(in_round)
            yield in_round
        pair += 2


def _share(pairs: int, restart: int, restarts: int) -> tuple[int, int]:
    """First and past-the-last pair of one restart."""
    return pairs * restart // restarts, pairs * (restart + 1) // restarts
