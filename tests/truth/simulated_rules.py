"""Runs of identical arms on a noisy machine, ended by each of the rules that end a run, with the project's own loop.

The load is `loadgen.measure.probes.load`, whose servers, blocks and clock are replaced: a block takes one second, and
its speed is the machine's. So what is simulated is which rounds run, when the run ends and what is then compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from loadgen.experiment.plan import DECIDED_ROUNDS
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.measure.probes import load as load_probe
from loadgen.metrics.comparisons import Comparison, compare_all
from loadgen.metrics.summaries import BlockSummary
from loadgen.records.run import Experiment, Workload
from tests.truth.simulated_runs import block, experiment, latencies, names_a_winner


@dataclass(frozen=True)
class Ending:
    """A rule that ends a run, and the size of the run."""

    rule: str
    """"rounds", "by time" or "until decided"."""
    rounds: int
    """With "rounds" so many of each workload; else the run has time for so many."""
    workloads: int = 1
    arms: int = 2

    def __str__(self) -> str:
        sizes = f"{self.workloads} workloads" if self.workloads > 1 else f"{self.arms} arms"
        return f"{self.rule}, {self.rounds}, {sizes}"


ENDINGS = (
    Ending("rounds", 3),
    Ending("rounds", 6),
    Ending("rounds", 30),
    Ending("rounds", 12, arms=4),
    Ending("rounds", 12, workloads=4),
    Ending("by time", 8, workloads=4),
    Ending("until decided", 30),
    Ending("until decided", 12, workloads=4),
)
SPREAD = 0.02


@dataclass(frozen=True)
class Machine:
    """What makes the blocks of identical arms differ, on the log scale."""

    name: str
    correlation: float = 0.0
    """That of an arm's successive rounds in one workload, a first-order autoregression with a spread of 2 %."""
    shared: bool = False
    """Whether the state of an arm that lasts is that of all workloads, and each block has as much noise of its own."""
    drift: float = 0.0
    """From the first to the last block."""
    slow_share: float = 0.0
    """Share of the rounds during which a neighbour slows each block, by a tenth on average."""


STEADY = Machine("independent")
LASTING = Machine("correlation 0.3", 0.3), Machine("correlation 0.5", 0.5)
MACHINES = (
    STEADY,
    *LASTING,
    Machine("correlation 0.5, shared by all workloads", 0.5, shared=True),
    Machine("10 % slower at the end", drift=0.1),
    Machine("5 % slow rounds", slow_share=0.05),
    Machine("correlation 0.3, drift and slow rounds", 0.3, drift=0.1, slow_share=0.05),
)
BEYOND = Machine("correlation 0.8", 0.8)
"""Beyond the promise: no published run comes near."""


@dataclass
class Load:
    """Stands for the run context, its runner and its forecast: one run of `plan`, whose blocks it makes up."""

    experiment: Experiment
    machine: Machine
    rng: np.random.Generator
    limit_s: float
    clock_s: float = 0.0
    blocks: list[BlockSummary] = field(default_factory=list)
    _states: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    _slow: dict[tuple[str, int], bool] = field(default_factory=dict)
    restart: int = 0
    faults: None = None
    done: list[BlockSummary] = field(default_factory=list)
    lead: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """log of how many times as fast an arm is in a workload, where arms are not identical."""

    @property
    def forecast(self) -> Any:
        return SimpleNamespace(round_s=self.round_s)

    @property
    def arms(self) -> Any:
        return {label: SimpleNamespace(name=label) for label in self.experiment.labels}

    @property
    def progress(self) -> Any:
        return self

    def enter(self, _: str) -> None: ...

    def idle(self) -> None: ...

    def now(self, _: str) -> None: ...

    def load_runner(self) -> Load:
        return self

    def load_deadline(self) -> float:
        return self.limit_s

    def round_s(self, _: Workload) -> float:
        return float(len(self.experiment.arms))

    def run(self, blocks: Sequence[ScheduledBlock], *_: object, **__: object) -> list[BlockSummary]:
        begun = len(self.blocks)
        for scheduled in blocks:
            seconds = math.exp(self._log_seconds(scheduled))
            self.clock_s += 1.0
            made = block(
                self.rng,
                len(self.blocks),
                scheduled.workload.name,
                scheduled.round,
                scheduled.label,
                scheduled.position,
                seconds,
            )
            self.blocks.append(made)
        return self.blocks[begun:]

    def _log_seconds(self, scheduled: ScheduledBlock) -> float:
        machine, name = self.machine, scheduled.workload.name
        seconds = machine.drift * self.clock_s / self.limit_s - self.lead.get((name, scheduled.label), 0.0)
        if machine.shared:
            seconds += self._lasting("", scheduled) + self.rng.normal(0.0, SPREAD)
        else:
            seconds += self._lasting(name, scheduled)
        if (name, scheduled.round) not in self._slow:
            self._slow[name, scheduled.round] = bool(self.rng.random() < machine.slow_share)
        if self._slow[name, scheduled.round]:
            seconds += self.rng.exponential(0.1)
        return seconds

    def _lasting(self, of: str, scheduled: ScheduledBlock) -> float:
        """The arm's state in this round, which follows from that in the round before."""
        phi, (last, state) = self.machine.correlation, self._states.get((of, scheduled.label), (-1, 0.0))
        if scheduled.round != last:
            new = self.rng.normal(0.0, SPREAD)
            state = new if last < 0 else phi * state + math.sqrt(1.0 - phi**2) * new
            self._states[of, scheduled.label] = scheduled.round, state
        return state


def play(ending: Ending, machine: Machine, rng: np.random.Generator, *, tails: bool = False) -> tuple[Comparison, ...]:
    """The comparisons of one run of identical arms. The margin is so small that no workload is decided by "no
    meaningful difference", which would only end the run earlier."""
    until_decided = ending.rule == "until decided"
    least = ending.rounds if ending.rule == "rounds" else min(DECIDED_ROUNDS if until_decided else 4, ending.rounds)
    plan = msgspec.structs.replace(
        experiment(ending.workloads, least, 0.001, arms=ending.arms, until_decided=until_decided),
        minutes=1.0 if ending.rule == "by time" else None,
        seed=int(rng.integers(2**31)),
    )
    load = Load(plan, machine, rng, limit_s=float(ending.rounds * ending.arms * ending.workloads))
    run(load)
    return compare_all(plan, load.blocks, requests=latencies(load.blocks, rng) if tails else None)


def run(load: Load) -> None:
    """Run the project's own loop on such a load."""
    unread = SimpleNamespace(add=lambda _: None, by_block=None)
    with patch.multiple(
        load_probe, monotonic=lambda: load.clock_s, summarise_blocks=tuple, PooledRequests=lambda _: unread
    ):
        load_probe.measure(load)  # type: ignore[arg-type]


def winners(ending: Ending, machine: Machine, trials: int, *, tails: bool = False) -> int:
    """So many of the runs name a winner, which is false."""
    rng = np.random.default_rng(29)
    return sum(names_a_winner(play(ending, machine, rng, tails=tails)) for _ in range(trials))
