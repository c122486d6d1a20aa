"""Decision surfaces of arms with planted crossings, or of identical arms, measured by the project's own loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from loadgen.metrics.comparisons import compare_all
from loadgen.metrics.surface import Surface, surface_of
from loadgen.records.run import Experiment, Workload
from tests.truth.simulated_rules import Load, Machine, run
from tests.truth.simulated_runs import experiment

USERS, SIZES = (1, 2, 4, 8, 16, 32), (1, 8, 32)
FIRST = 4
"""Rounds of every point."""
STEEPNESS = 0.2
"""What the log ratio of planted arms gains when the users are doubled."""


def grid(sizes: tuple[int, ...] = SIZES) -> tuple[Workload, ...]:
    return tuple(
        Workload(
            scenario="surface", batch_size=size, concurrency=users, requests=100, seconds=0, max_seconds=1, rounds=FIRST
        )
        for size in sizes
        for users in USERS
    )


@dataclass(frozen=True)
class Played:
    """One run: what it found, and how many rounds each point got."""

    surface: Surface
    rounds: Mapping[tuple[int, int], int]
    """By users and size."""


def play_surface(
    machine: Machine,
    rng: np.random.Generator,
    crossings: Mapping[int, float] | None = None,
    *,
    arms: int = 2,
    rounds: int = 12,
    sizes: tuple[int, ...] = SIZES,
) -> Played:
    """One run with time for so many rounds of every point. From so many users on, by size, B is faster than A; without
    `crossings` the arms are identical. The margin is so small that no point is decided by "no meaningful
    difference"."""
    plan = surface_plan(arms, sizes, int(rng.integers(2**31)))
    lead = {
        (workload.name, "b"): STEEPNESS * math.log2(workload.concurrency / crossings[workload.batch_size])
        for workload in plan.workloads
        if crossings is not None
    }
    load = Load(plan, machine, rng, limit_s=float(rounds * arms * len(plan.workloads)), lead=lead)
    run(load)
    surface = surface_of(plan, compare_all(plan, load.blocks))
    assert surface is not None
    places = {workload.name: (workload.concurrency, workload.batch_size) for workload in plan.workloads}
    counts = Counter(places[block.workload] for block in load.blocks if block.label == "a")
    return Played(surface, counts)


def surface_plan(arms: int, sizes: tuple[int, ...], seed: int) -> Experiment:
    plan = experiment(1, FIRST, 0.001, arms=arms, until_decided=True)
    return msgspec.structs.replace(plan, workloads=grid(sizes), minutes=1.0, seed=seed)


def names_a_point(played: Played) -> bool:
    """Whether any point of the map has a winner."""
    return any(point.winner is not None for point in played.surface.points)
