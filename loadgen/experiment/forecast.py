"""Predicts how long the rest of a run takes from the parts that have run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from time import monotonic

from loadgen.experiment.plan import PRESETS
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.records.run import Experiment, Label, Workload

_START_SECONDS = 10.0
_BEFORE_LOAD_SECONDS = 45.0
_BETWEEN_BLOCKS_SECONDS = 0.3
_WHOLE_BLOCK = 1.25
"""Length of a block with its cool-down, divided by the time in which its requests begin."""
_TRIALS = 8
"""Assumed trials per search, or rungs per ramp, before one has run."""


class Forecast:
    """Seconds still to come: from the preset for parts that have not run yet, later from parts like them."""

    def __init__(self, experiment: Experiment, blocks: Sequence[ScheduledBlock]) -> None:
        arms, preset = len(experiment.labels), PRESETS.get(experiment.preset, PRESETS["quick"])
        self._labels = experiment.labels
        self._blocks = list(blocks)
        self._took: dict[tuple[str, Label], list[float]] = {}
        self._load_ends_at: float | None = None
        self._before_load = _BEFORE_LOAD_SECONDS
        self._preset_seconds = 60.0 * (experiment.minutes or preset.minutes)
        self._checks = 0.0
        self._starts = sum(
            arms * workload.rounds for workload in experiment.workloads if workload.scenario == "cold-start"
        )
        self._starts_took: list[float] = []
        self._start_guess = _START_SECONDS
        self._searches = sum(
            arms * workload.rounds * _TRIALS * 2 * workload.seconds
            for workload in experiment.workloads
            if workload.scenario in ("slo", "ramp")
        )

    def start_takes(self, seconds: float) -> None:
        """Expect a cold start to take as long as starting all servers took."""
        self._start_guess = seconds

    def start_took(self, seconds: float) -> None:
        """One cold start is done."""
        self._starts_took.append(seconds)
        self._starts -= 1

    def load_begins(self) -> None:
        """Everything before the first block is done."""
        self._before_load = 0.0

    def blocks_are(self, blocks: Sequence[ScheduledBlock]) -> None:
        """Replace the planned blocks, once their lengths are known."""
        self._blocks = list(blocks)

    def block_took(self, block: ScheduledBlock, seconds: float) -> None:
        """One block is done."""
        self._took.setdefault((block.workload.name, block.label), []).append(seconds)
        if block in self._blocks:
            self._blocks.remove(block)

    def load_ends_within(self, seconds: float) -> None:
        """Limit the load by time, where the number of blocks to come is not known."""
        self._blocks, self._load_ends_at = [], monotonic() + seconds

    def load_ends(self) -> None:
        """The last block is done."""
        self._load_ends_at = None

    def checks_take(self, seconds: float) -> None:
        """Expect the comparison of answers under load, which follows the load, to take this long."""
        self._checks = seconds

    def searches_take(self, seconds: float) -> None:
        """Expect the remaining searches and ramps to take this long, from those that have run."""
        self._searches = seconds

    def round_s(self, workload: Workload) -> float:
        """Seconds of one round of a workload."""
        return sum(self._block_s(workload, label) for label in self._labels)

    def after_load_s(self) -> float:
        """Seconds of the checks, cold starts and searches still to come."""
        start = fmean(self._starts_took) if self._starts_took else self._start_guess
        return self._checks + self._starts * start + self._searches

    def remaining_s(self) -> float:
        """Seconds still to come."""
        if not self._took and self._before_load:
            return max(self._preset_seconds, self._before_load)
        blocks = sum(self._block_s(block.workload, block.label) for block in self._blocks)
        if self._load_ends_at is not None:
            blocks = max(0.0, self._load_ends_at - monotonic())
        return self._before_load + blocks + self.after_load_s()

    def _block_s(self, workload: Workload, label: Label) -> float:
        took = self._took.get((workload.name, label)) or [
            seconds for (name, _), many in self._took.items() if name == workload.name for seconds in many
        ]
        return fmean(took) if took else _WHOLE_BLOCK * workload.seconds + _BETWEEN_BLOCKS_SECONDS
