"""The load: a fixed number of rounds, rounds for as long as the time lasts, or rounds until all is decided.

**By time** the rounds hold every scenario for the first part of it; the rest goes to the scenarios whose ratio is known
least well. They are chosen by the spread of their ratios and never by the ratios themselves, so a difference neither
attracts nor repels further rounds (Stein, Ann. Math. Statist. 16, 1945, proves it for one choice; for choices after
every pass `tests/truth/test_one_run_in_twenty.py` shows by simulation that the interval of a fixed plan holds).
**Until decided** a scenario drops out once its leading comparisons with the baseline name a winner or no meaningful
difference, judged by the comparisons of the report on intervals that allow repeated checks.

Rounds are whole, and no round begins that would end too late. Comparisons are made while nothing is under load.
"""

from __future__ import annotations

import math
from time import monotonic

from loadgen.bench.bench import Bench
from loadgen.experiment.schedule import OpenRound, ScheduledBlock, endless_passes, has_load, load_workloads, schedule
from loadgen.metrics.claims import claim
from loadgen.metrics.comparisons import PooledRequests, compare_all
from loadgen.metrics.registry import METRICS
from loadgen.metrics.summaries import summarise_blocks
from loadgen.quantities import counted
from loadgen.records.run import Workload
from loadgen.storage.stored_run import StoredBlock

DECIDED = ("arm_better", "baseline_better", "no_difference")
FOR_ALL = 0.6
"""Share of the time in which every round includes every scenario."""
NEEDY = 0.7
"""Scenarios with more than this share of the largest standard error get further rounds."""


wanted = has_load


def measure(bench: Bench) -> None:
    """Run this restart's share of the rounds, or rounds until the time is up or all is decided."""
    experiment = bench.experiment
    title = "load" if experiment.restarts == 1 else f"load, restart {bench.restart + 1} of {experiment.restarts}"
    rounds = None
    if experiment.until_decided or experiment.minutes is not None:
        rounds = Rounds(bench, bench.done, bench.load_deadline())
        title += f", {rounds.forecast()}"
    bench.enter(title)
    bench.forecast.load_begins()
    if rounds is not None:
        rounds.run()
        return
    planned = schedule(experiment)
    blocks = [block for block in planned if block.restart == bench.restart]
    bench.load_runner().run(blocks, bench.forecast, planned=len(planned))


class Rounds:
    """The load of one start of the servers, whose number of rounds is not fixed.

    `blocks` are those of earlier starts. The minimum of rounds of each workload runs in any case.
    """

    def __init__(self, bench: Bench, blocks: list[StoredBlock], deadline: float) -> None:
        self._bench = bench
        self._workloads = {workload.name: workload for workload in load_workloads(bench.experiment.workloads)}
        self._blocks = blocks
        self._summaries = list(summarise_blocks(blocks))
        self._requests = PooledRequests(blocks if bench.experiment.until_decided else ())
        self._open = dict(self._workloads)
        self._beside = 0.0
        """Seconds of a round outside its blocks, mostly idle gaps."""
        self._began = monotonic()
        self._deadline = deadline
        self._least = math.ceil(
            max(workload.rounds for workload in self._workloads.values()) / bench.experiment.restarts
        )

    def forecast(self) -> str:
        """How many rounds in how much time, for the title of the phase."""
        seconds = sum(self._bench.forecast.round_s(workload) for workload in self._workloads.values())
        scenarios = counted(len(self._workloads), "scenario")
        left = max(0.0, self._deadline - self._began)
        if self._bench.experiment.until_decided:
            return f"rounds of {scenarios} until all are decided, {left / 60.0:.1f} minutes at most"
        rounds = max(self._least, int(left / seconds))
        return f"about {rounds} rounds of {scenarios} in {max(left, rounds * seconds) / 60.0:.1f} minutes"

    def run(self) -> None:
        """Run the rounds. Raises as `LoadRunner.run` does."""
        bench, runner = self._bench, self._bench.load_runner()
        experiment = bench.experiment
        bench.forecast.load_ends_within(self._deadline - monotonic())
        first = max((block.record.round for block in self._blocks), default=-1) + 1
        rounds = endless_passes(
            tuple(self._workloads.values()), experiment.labels, experiment.seed + bench.restart, first
        )
        for number, chosen in enumerate(rounds, start=1):
            own = [one for one in chosen if one.workload.name in self._open]
            if number > self._least:
                own = self._that_fit(own)
            if not own:
                break
            blocks: list[ScheduledBlock] = []
            began = monotonic()
            for one in own:
                blocks += one.blocks(len(self._blocks) + len(blocks), bench.restart)
            done = runner.run(blocks, bench.forecast, last=False)
            self._blocks += done
            self._summaries += summarise_blocks(done)
            self._beside = max(0.0, monotonic() - began - sum(bench.forecast.round_s(one.workload) for one in own))
            if experiment.until_decided:
                self._requests.add(done)
                self._close_decided()
                continue
            used = (monotonic() - self._began) / max(self._deadline - self._began, 1e-9)
            # Only after whole passes, in which each arm came equally often in each place.
            if number % len(experiment.arms) == 0 and number >= self._least and used > FOR_ALL:
                self._open = self._neediest()
        runner.idle()
        bench.forecast.load_ends()

    def _that_fit(self, own: list[OpenRound]) -> list[OpenRound]:
        """The workloads that the time allows; until decided all or none."""
        left = self._deadline - monotonic() - self._beside
        fitting: list[OpenRound] = []
        for one in own:
            seconds = self._bench.forecast.round_s(one.workload)
            if seconds <= left:
                fitting.append(one)
                left -= seconds
        return fitting if len(fitting) == len(own) or not self._bench.experiment.until_decided else []

    def _neediest(self) -> dict[str, Workload]:
        """The scenarios with the largest relative standard error of throughput and median."""
        errors: dict[str, float] = {}
        for one in compare_all(self._bench.experiment, self._summaries):
            if not METRICS[one.metric].is_tail and one.error_log is not None:
                errors[one.scenario] = max(errors.get(one.scenario, 0.0), one.error_log)
        most = max(errors.values(), default=0.0)
        return {name: workload for name, workload in self._workloads.items() if errors.get(name, most) >= NEEDY * most}

    def _close_decided(self) -> None:
        every = compare_all(self._bench.experiment, self._summaries, requests=self._requests.by_block)
        leading = [c for c in every if c.leading and c.baseline == self._bench.experiment.baseline.label]
        for name, workload in list(self._open.items()):
            own = [c for c in leading if c.scenario == name]
            if all(c.verdict in DECIDED and c.pairs >= workload.rounds for c in own):
                del self._open[name]
        standing = [
            f"{c.scenario}: {claim(c)} after {counted(c.pairs, 'pair')}"
            for c in leading
            if c.scenario in self._workloads
        ]
        self._bench.progress.now("; ".join(standing))
