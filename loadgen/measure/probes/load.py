"""Load: rounds of blocks on every arm.

The load is a fixed number of rounds, rounds for as long as the time lasts, or rounds until all is decided.

**By time** the rounds hold every scenario for the first part of it; the rest goes to the scenarios whose ratio is known
least well. They are chosen by the spread of their ratios and never by the ratios themselves, so a difference neither
attracts nor repels further rounds (Stein, Ann. Math. Statist. 16, 1945, proves it for one choice; for choices after
every pass `tests/truth/test_one_run_in_twenty.py` shows by simulation that the interval of a fixed plan holds).
**Until decided** a scenario drops out once its leading comparisons with the baseline name a winner or no meaningful
difference, judged by the comparisons of the report on intervals that allow repeated checks. **A surface** has the same
intervals, and rounds where `loadgen.metrics.surface` finds the winner uncertain, for as long as the time lasts.

Rounds are whole, and no round begins that would end too late. Comparisons are made while nothing is under load.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

from loadgen.base.quantities import counted
from loadgen.experiment.schedule import (
    ScheduledBlock,
    endless_passes,
    has_load,
    load_workloads,
    passes_in_balance,
    schedule,
)
from loadgen.findings.load import LoadFound, analyse
from loadgen.findings.registry import Probe
from loadgen.metrics.barrier import attempt
from loadgen.metrics.claims import claim
from loadgen.metrics.comparisons import PooledRequests, compare_all
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import summarise_blocks
from loadgen.metrics.surface import counts_in_words, surface_of, uncertain
from loadgen.records.run import Workload
from loadgen.records.store import StoredBlock

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

DECIDED = ("arm_better", "baseline_better", "no_difference")
FOR_ALL = 0.6
"""Share of the time in which every round includes every scenario."""
NEEDY = 0.7
"""Scenarios with more than this share of the largest standard error get further rounds."""


def measure(context: RunContext) -> None:
    """Run this restart's share of the rounds, or rounds until the time is up or all is decided."""
    experiment = context.experiment
    title = "load" if experiment.restarts == 1 else f"load, restart {context.restart + 1} of {experiment.restarts}"
    rounds = None
    if experiment.until_decided or experiment.minutes is not None:
        rounds = Rounds(context, context.done, context.load_deadline())
        title += f", {rounds.forecast()}"
    context.enter(title)
    context.forecast.before_load_s = 0.0
    if rounds is not None:
        rounds.run()
        return
    planned = schedule(experiment)
    blocks = [block for block in planned if block.restart == context.restart]
    context.load_runner().run(blocks, context.forecast, planned=len(planned))


class Rounds:
    """The load of one start of the servers, whose number of rounds is not fixed. `blocks` are those of earlier starts.
    The minimum of rounds of each workload runs in any case."""

    def __init__(self, context: RunContext, blocks: list[StoredBlock], deadline: float) -> None:
        self._context = context
        self._workloads = {workload.name: workload for workload in load_workloads(context.experiment.workloads)}
        self._blocks = blocks
        self._summaries = list(summarise_blocks(blocks))
        decides = context.experiment.until_decided and not context.experiment.is_surface
        self._requests = PooledRequests(blocks if decides else ())
        self._open = dict(self._workloads)
        self._beside = 0.0
        """Seconds of a round outside its blocks, mostly idle gaps."""
        self._began = monotonic()
        self._deadline = deadline
        self._least = math.ceil(
            max(workload.rounds for workload in self._workloads.values()) / context.experiment.restarts
        )

    def forecast(self) -> str:
        """How many rounds in how much time, for the title of the phase."""
        seconds = sum(self._context.forecast.round_s(workload) for workload in self._workloads.values())
        scenarios = counted(len(self._workloads), "scenario")
        left = max(0.0, self._deadline - self._began)
        if self._context.experiment.is_surface:
            minutes = counted(round(left / 60.0, 1), "minute")
            return f"rounds of {scenarios}, more where the winner is uncertain, {minutes} at most"
        if self._context.experiment.until_decided:
            return f"rounds of {scenarios} until all are decided, {counted(round(left / 60.0, 1), 'minute')} at most"
        rounds = max(self._least, int(left / seconds))
        minutes = counted(round(max(left, rounds * seconds) / 60.0, 1), "minute")
        return f"about {counted(rounds, 'round')} of {scenarios} in {minutes}"

    def run(self) -> None:
        """Run the rounds. Raises as `LoadRunner.run` does."""
        context, runner = self._context, self._context.load_runner()
        experiment = context.experiment
        context.forecast.blocks, context.forecast.load_ends_at = [], self._deadline
        first = max((block.record.round for block in self._blocks), default=-1) + 1
        rounds = endless_passes(
            tuple(self._workloads.values()),
            experiment.labels,
            experiment.seed + context.restart,
            first,
            context.restart,
        )
        for pass_number, offered in enumerate(rounds, start=1):
            if context.faults is not None:
                self._open = {name: w for name, w in self._open.items() if not context.faults.ends(name)}
            chosen = [blocks for blocks in offered if blocks[0].workload.name in self._open]
            if pass_number > self._least:
                chosen = self._fitting(chosen)
            if not chosen:
                break
            began = monotonic()
            following = 1 + max((summary.index for summary in self._summaries), default=-1)
            numbered = enumerate(chain.from_iterable(chosen), following)
            blocks = [replace(block, index=index) for index, block in numbered]
            done = runner.run(blocks, context.forecast, last=False)
            self._blocks += done
            self._summaries += summarise_blocks(done)
            self._beside = max(
                0.0, monotonic() - began - sum(context.forecast.round_s(blocks[0].workload) for blocks in chosen)
            )
            if experiment.is_surface:
                self._open = attempt(self._uncertain, self._undecided) if pass_number >= self._least else self._open
                continue
            if experiment.until_decided:
                self._requests.add(done)
                attempt(self._close_decided, self._undecided)
                continue
            used = (monotonic() - self._began) / max(self._deadline - self._began, 1e-9)
            # Only after whole passes, in which each arm came equally often in each place.
            is_balanced = pass_number % passes_in_balance(tuple(self._workloads.values()), experiment.labels) == 0
            if is_balanced and pass_number >= self._least and used > FOR_ALL:
                self._open = attempt(self._neediest, self._undecided)
        runner.idle()
        context.forecast.load_ends_at = None

    def _undecided(self, why: str) -> dict[str, Workload]:
        """The open workloads stay open where a comparison fails: the time limit ends them."""
        self._context.progress.now(f"no decision after this round: {why}")
        return self._open

    def _fitting(self, chosen: list[list[ScheduledBlock]]) -> list[list[ScheduledBlock]]:
        """The rounds that the time allows; until decided all or none, but of a surface as many as there are."""
        left = self._deadline - monotonic() - self._beside
        fitting: list[list[ScheduledBlock]] = []
        for blocks in chosen:
            seconds = self._context.forecast.round_s(blocks[0].workload)
            if seconds <= left:
                fitting.append(blocks)
                left -= seconds
        experiment = self._context.experiment
        return fitting if len(fitting) == len(chosen) or experiment.is_surface or not experiment.until_decided else []

    def _uncertain(self) -> dict[str, Workload]:
        """The points of the surface that get a further round. High percentiles, which take long, decide none."""
        experiment = self._context.experiment
        surface = surface_of(experiment, compare_all(experiment, self._summaries))
        if surface is None:
            return {}
        self._context.progress.now(
            counts_in_words(surface, {label: arm.name for label, arm in self._context.arms.items()})
        )
        return {name: self._workloads[name] for name in uncertain(surface) if name in self._workloads}

    def _neediest(self) -> dict[str, Workload]:
        """The scenarios with the largest relative standard error of throughput and median."""
        errors: dict[str, float] = {}
        for comparison in compare_all(self._context.experiment, self._summaries):
            error = comparison.error_log
            if not METRICS[comparison.metric].is_tail and error is not None:
                errors[comparison.workload] = max(errors.get(comparison.workload, 0.0), error)
        most = max(errors.values(), default=0.0)
        return {name: workload for name, workload in self._workloads.items() if errors.get(name, most) >= NEEDY * most}

    def _close_decided(self) -> None:
        every = compare_all(self._context.experiment, self._summaries, requests=self._requests.by_block)
        leading = [c for c in every if c.leading and c.baseline == self._context.experiment.baseline_in(c.workload)]
        for name, workload in list(self._open.items()):
            faults = self._context.faults
            comparisons = [c for c in leading if c.workload == name and not (faults and faults.is_out(name, c.arm))]
            if all(c.verdict in DECIDED and c.pairs >= workload.rounds for c in comparisons):
                del self._open[name]
        standing = [
            f"{c.workload}: {claim(c)} after {counted(c.pairs, 'pair')}"
            for c in leading
            if c.workload in self._workloads
        ]
        self._context.progress.now("; ".join(standing))


PROBE = Probe(
    wanted=has_load, measure=measure, finding=LoadFound, analyse=analyse, sections="loadgen.report.sections.load"
)
