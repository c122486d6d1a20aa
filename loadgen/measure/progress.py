"""The events that a run reports, the ratios during the run, and how long the rest takes; `loadgen.report` shows them.

The ratios are the final formulas applied to the blocks stored so far. They decide nothing. With a fixed number of pairs
their intervals are not tests: stopping a run when one looks good finds differences that do not exist (`--until decided`
has intervals that allow it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from time import monotonic
from typing import Any

import msgspec

from loadgen.experiment.plan import PRESETS
from loadgen.experiment.schedule import ScheduledBlock, block_seconds, load_workloads
from loadgen.metrics.barrier import attempt
from loadgen.metrics.comparisons import PairedMetric, PooledRequests, estimate_pairs, pair_metrics, seen_correlations
from loadgen.metrics.registry import in_parts, leading_metric
from loadgen.metrics.summaries import BlockSummary
from loadgen.metrics.tokens import samples_of
from loadgen.records.checks import Check
from loadgen.records.probes import ServerStart
from loadgen.records.run import ArmRecord, Experiment, Label, ParityRecord, Workload
from loadgen.records.store import StoredBlock
from loadgen.records.targets import Kind
from loadgen.stats.ratios import RatioEstimate, estimate_ratio, lone_correlation


class RunProgress:
    """Listens to a run and shows nothing. Calls come in order, from one thread."""

    def plan(self, seconds: float) -> None:
        """The remaining time, if known."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def now(self, text: str) -> None:
        """The current step."""

    def rule_decided(self, rule: str) -> None:
        """What holds for all arms, in a sentence, before they start: how they pad batches, or their protocol."""

    def inputs_ready(self, about: Mapping[str, str | int]) -> None:
        """The inputs are made, as described in the stored environment."""

    def arm_ready(self, record: ArmRecord) -> None:
        """A server is up."""

    def cold_start_done(self, record: ServerStart) -> None:
        """One cold start is done."""

    def arm_left_out(self, label: Label, why: str) -> None:
        """A screening goes on without an arm."""

    def first_figure(self, ratios: Sequence[LiveRatio]) -> None:
        """How the arms compare in seconds of load, right after their start and before any check."""

    def parity_done(self, record: ParityRecord) -> None:
        """All servers have answered the same inputs."""

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """The arms and the machine were checked, right before the load."""

    def block_done(self, block: StoredBlock, summary: BlockSummary) -> None:
        """One block is stored; `summary` is computed from its samples."""


class Unfailing(RunProgress):
    """Passes every call on, and whatever it raises costs that call only: nothing that is shown ends a run."""

    def __init__(self, listener: RunProgress) -> None:
        self._listener = listener

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        return lambda *arguments: attempt(lambda: getattr(self._listener, name)(*arguments), lambda _: None)


class LiveRatio(RatioEstimate, frozen=True, kw_only=True):
    """An arm against the baseline in one workload, by its leading metric. Until there is a ratio with an interval,
    `reason` says why."""

    workload: str
    baseline: Label
    arm: Label
    metric: str
    """The metric's title."""
    planned: int | None = None
    """None when the number of pairs is not fixed."""
    within: tuple[float, float] | None = None
    """Of the first pair: the 95 % interval by how the five parts of its two blocks differ. How blocks differ from each
    other is not in it."""


class LiveRatios:
    """The ratios of one run. Not thread-safe."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._workloads = {workload.name: workload for workload in load_workloads(experiment.workloads)}
        self._blocks: dict[str, list[BlockSummary]] = {name: [] for name in self._workloads}
        self._latest: dict[tuple[str, Label], LiveRatio] = {}
        self._parts: dict[tuple[str, Label], list[float]] = {}
        """Of the block that ran last, until there is a ratio."""
        self._requests = PooledRequests()
        """Of the workloads that a percentile leads."""

    @property
    def latest(self) -> tuple[LiveRatio, ...]:
        """Every workload and arm with a complete pair, in the order of the experiment."""
        loads = self._workloads.items()
        every = ((name, arm) for name, load in loads for _, arm in self.experiment.pairings_in(load))
        return tuple(self._latest[key] for key in every if key in self._latest)

    def add(self, summary: BlockSummary, block: StoredBlock | None = None) -> list[LiveRatio]:
        """Add a stored block; returns the ratios of the pairs that it completes. Without the block itself a first pair
        has no range, and a percentile that leads no ratio."""
        workload = self._workloads.get(summary.workload)
        if workload is None or not summary.complete:
            return []
        blocks = self._blocks[workload.name]
        blocks.append(summary)
        ran = {block.label for block in blocks if block.round == summary.round}
        pairings = self.experiment.pairings_in(workload)
        completed = {two for two in pairings if ran.issuperset(two) and summary.label in two}
        metric = leading_metric(workload)
        if block is not None and metric.quantile is not None:
            self._requests.add([block])
        is_first = any((workload.name, two.arm) not in self._latest for two in pairings)
        if is_first and block is not None and (samples := samples_of(block)) is not None:
            self._parts[workload.name, summary.label] = in_parts(metric, samples, workload)
        alone = msgspec.structs.replace(self.experiment, workloads=(workload,))
        ratios = [
            self._estimate(paired)
            for paired in pair_metrics(alone, blocks, requests=self._requests.by_block)
            if paired.metric == metric and paired.pairing in completed
        ]
        self._latest |= {(ratio.workload, ratio.arm): ratio for ratio in ratios}
        return ratios

    def _estimate(self, paired: PairedMetric) -> LiveRatio:
        workload, metric = paired.workload, paired.metric
        _, estimate, _ = estimate_pairs(paired, self.experiment, seen_correlations([paired]))
        return LiveRatio(
            **msgspec.structs.asdict(msgspec.structs.replace(estimate, reason=paired.reason or estimate.reason)),
            workload=workload.name,
            baseline=paired.pairing.baseline,
            arm=paired.pairing.arm,
            metric=metric.title,
            planned=workload.rounds if self.experiment.minutes is None and not self.experiment.until_decided else None,
            within=self._within(paired, estimate.ratio) if estimate.pairs == 1 else None,
        )

    def _within(self, paired: PairedMetric, ratio: float | None) -> tuple[float, float] | None:
        """The range of the only pair's ratio within its blocks, by Student's t over their parts in order; None without
        parts."""
        base, arm = (self._parts.get((paired.workload.name, label)) for label in paired.pairing)
        if ratio is None or not base or not arm:
            return None
        ratios = [b / a for a, b in zip(base, arm, strict=True)]
        parts = estimate_ratio(ratios, self.experiment.equivalence_margin, lone_correlation(ratios))
        if parts.ratio is None or parts.ci95 is None:
            return None
        low, high = parts.ci95
        return low * ratio / parts.ratio, high * ratio / parts.ratio


_START_SECONDS = 10.0
_BEFORE_LOAD_SECONDS = 45.0
_TRIALS = 8
"""Assumed trials per search, before one has run."""


class Forecast:
    """Seconds still to come: from the preset for parts that have not run yet, later from parts like them."""

    def __init__(self, experiment: Experiment, blocks: Sequence[ScheduledBlock]) -> None:
        arms, preset = len(experiment.labels), PRESETS.get(experiment.preset, PRESETS["quick"])
        self.blocks = list(blocks)
        """Planned blocks that have not run; empty where time limits the load."""
        self.load_ends_at: float | None = None
        """When the load ends (`time.monotonic`), where time limits it."""
        self.before_load_s = _BEFORE_LOAD_SECONDS
        """The rest of what comes before the first block."""
        self.checks_s = 0.0
        """The comparison of answers under load, which follows the load."""
        self.start_s = _START_SECONDS
        """A cold start, before one has run."""
        self.searches_s = sum(
            arms * workload.rounds * _TRIALS * 2 * workload.seconds
            for workload in experiment.workloads
            if workload.is_search
        )
        """The remaining searches."""
        self.request_s: Mapping[str, Mapping[Label, float]] = {}
        """Seconds of a request by workload and arm, from the warm-up."""
        self._labels = experiment.labels
        self._took: dict[tuple[str, Label], list[float]] = {}
        self._preset_seconds = 60.0 * (experiment.minutes or preset.minutes)
        self._starts = sum(
            arms * (workload.rounds + (workload.rounds > 1))  # where there are several, a first start as well
            for workload in experiment.workloads
            if workload.scenario == "cold-start"
        )
        self._starts_took: list[float] = []

    def start_took(self, seconds: float) -> None:
        """One cold start is done."""
        self._starts_took.append(seconds)
        self._starts -= 1

    def block_took(self, block: ScheduledBlock, seconds: float) -> None:
        """One block is done."""
        self._took.setdefault((block.workload.name, block.label), []).append(seconds)
        self.leave_out(block)

    def leave_out(self, block: ScheduledBlock) -> None:
        """One block will not be run."""
        if block in self.blocks:
            self.blocks.remove(block)

    def round_s(self, workload: Workload) -> float:
        """Seconds of one round of a workload."""
        return sum(self._block_s(workload, label) for label in workload.loaded(self._labels))

    def after_load_s(self) -> float:
        """Seconds of the checks, cold starts and searches still to come."""
        start_s = fmean(self._starts_took) if self._starts_took else self.start_s
        return self.checks_s + self._starts * start_s + self.searches_s

    def remaining_s(self) -> float:
        """Seconds still to come."""
        if not self._took and self.before_load_s:
            return max(self._preset_seconds, self.before_load_s)
        blocks_s = sum(self._block_s(block.workload, block.label) for block in self.blocks)
        if self.load_ends_at is not None:
            blocks_s = max(0.0, self.load_ends_at - monotonic())
        return self.before_load_s + blocks_s + self.after_load_s()

    def _block_s(self, workload: Workload, label: Label) -> float:
        took = self._took.get((workload.name, label), [])
        if not took and workload.kind is Kind.TENSORS:
            took = [seconds for (name, _), many in self._took.items() if name == workload.name for seconds in many]
        return fmean(took) if took else block_seconds(workload, self.request_s.get(workload.name, {}).get(label))
