"""The order of blocks, over all numbers of arms, seeds and sizes that hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiment.plan import make_workloads
from loadgen.experiment.schedule import ScheduledBlock, endless_passes, interleave
from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.probes.cold_start_measurement import cold_start_order
from loadgen.records.run import Label, Workload

WORKLOADS = st.lists(st.integers(1, 12), min_size=0, max_size=8).map(
    lambda pairs: tuple(
        Workload(scenario="batched", batch_size=i + 1, concurrency=1, requests=1, seconds=0, max_seconds=1, rounds=n)
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


@given(WORKLOADS, LABELS, SEEDS)
def test_every_round_is_adjacent_blocks_one_of_each_arm(
    workloads: tuple[Workload, ...], labels: tuple[Label, ...], seed: int
) -> None:
    blocks = interleave(workloads, labels, seed)
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert len(blocks) == len(labels) * sum(workload.rounds for workload in workloads)
    for round_blocks in rounds_of(blocks, len(labels)):
        assert len({(block.workload, block.round) for block in round_blocks}) == 1
        assert sorted(block.label for block in round_blocks) == list(labels)
        assert [block.position for block in round_blocks] == list(range(len(labels)))


@given(WORKLOADS, LABELS, SEEDS)
def test_each_workload_gets_its_rounds_in_order(
    workloads: tuple[Workload, ...], labels: tuple[Label, ...], seed: int
) -> None:
    blocks = interleave(workloads, labels, seed)
    for workload in workloads:
        assert [block.round for block in blocks if block.workload == workload and block.position == 0] == list(
            range(workload.rounds)
        )


@given(WORKLOADS, LABELS, SEEDS)
def test_the_order_inside_rounds_is_balanced_over_as_many_as_there_are_arms(
    workloads: tuple[Workload, ...], labels: tuple[Label, ...], seed: int
) -> None:
    blocks = interleave(workloads, labels, seed)
    for workload in workloads:
        of_workload = [block for block in blocks if block.workload == workload]
        rounds = rounds_of(of_workload, len(labels))
        assert_balanced([[block.label for block in round_blocks] for round_blocks in rounds], labels)


@given(WORKLOADS, LABELS, SEEDS)
def test_an_interrupted_run_has_rounds_of_every_workload(
    workloads: tuple[Workload, ...], labels: tuple[Label, ...], seed: int
) -> None:
    """At any moment no workload is more than one round ahead of another that still has rounds left."""
    done: Counter[str] = Counter()
    for round_blocks in rounds_of(interleave(workloads, labels, seed), len(labels)):
        done[round_blocks[0].workload.name] += 1
        left = [done[workload.name] for workload in workloads if done[workload.name] < workload.rounds]
        assert max(done.values()) - min(left, default=max(done.values())) <= 1


@given(WORKLOADS, LABELS, SEEDS)
def test_a_seed_decides_everything(workloads: tuple[Workload, ...], labels: tuple[Label, ...], seed: int) -> None:
    assert interleave(workloads, labels, seed) == interleave(workloads, labels, seed)


@pytest.mark.parametrize("labels", ["ab", "abc", "abcd"])
def test_seeds_differ_and_every_arm_comes_first(labels: str) -> None:
    workloads = make_workloads(ExperimentSettings.model_validate({"scenarios": "single,batched"}))
    orders = {tuple((b.workload.name, b.label) for b in interleave(workloads, labels, seed)) for seed in range(10)}
    assert len(orders) == 10
    assert {interleave(workloads, labels, seed)[0].label for seed in range(40)} == set(labels)


@given(st.integers(1, 4), LABELS, SEEDS)
def test_endless_passes_hold_every_workload_once_and_are_balanced(
    number: int, labels: tuple[Label, ...], seed: int
) -> None:
    workloads = tuple(
        Workload(scenario="batched", batch_size=i + 1, concurrency=1, requests=1, seconds=0, max_seconds=1, rounds=1)
        for i in range(number)
    )
    passes = list(islice(endless_passes(workloads, labels, seed, first=5, restart=3), 2 * len(labels)))
    for place, rounds in enumerate(passes, start=5):
        assert {(blocks[0].workload, blocks[0].round) for blocks in rounds} == {(each, place) for each in workloads}
    for workload in workloads:
        orders = [[block.label for block in blocks] for rounds in passes for blocks in rounds]
        workloads_of = [blocks[0].workload for rounds in passes for blocks in rounds]
        assert_balanced([order for order, of in zip(orders, workloads_of, strict=True) if of == workload], labels)
    assert [(block.index, block.position, block.restart) for block in passes[0][0]] == [
        (place, place, 3) for place in range(len(labels))
    ]


@pytest.mark.parametrize("labels", ["ab", "abcd"])
def test_cold_starts_have_their_own_order(labels: str) -> None:
    order = cold_start_order(tuple(labels), 4, 0)
    assert [repetition for repetition, _ in order] == [number for number in range(4) for _ in labels]
    assert_balanced([[label for number, label in order if number == repetition] for repetition in range(4)], labels)
