"""How long the rest of a run takes, from how long its parts have taken so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from time import monotonic

from loadgen.experiment.plan import PRESETS
from loadgen.experiment.schedule import ScheduledBlock
from loadgen.records.run import Cell, Experiment, Label

_START_SECONDS = 10.0
_BEFORE_LOAD_SECONDS = 45.0
_BETWEEN_BLOCKS_SECONDS = 0.3
_WHOLE_BLOCK = 1.25
"""With the cool-down, over the time in which requests begin."""
_TRIALS = 8
"""Of a search, or rungs of a ramp, before any has run."""


class Forecast:
    """Seconds still to come. Parts that have not run yet are taken from the preset, later from their likes."""

    def __init__(self, experiment: Experiment, blocks: Sequence[ScheduledBlock]) -> None:
        self._blocks = list(blocks)
        self._labels = experiment.labels
        self._starts = sum(
            len(self._labels) * cell.rounds for cell in experiment.cells if cell.scenario == "cold-start"
        )
        self._start_seconds: list[float] = []
        self._start_guess = _START_SECONDS
        self._check_seconds = 0.0
        self._seconds: dict[tuple[str, Label], list[float]] = {}
        self._preset_seconds = 60.0 * (
            experiment.minutes or (PRESETS[experiment.preset].minutes if experiment.preset in PRESETS else 5.0)
        )
        self._before_load = _BEFORE_LOAD_SECONDS
        self._load_ends_at: float | None = None
        self._search_seconds = sum(
            len(self._labels) * cell.rounds * _TRIALS * 2 * cell.seconds
            for cell in experiment.cells
            if cell.scenario in ("slo", "ramp")
        )

    def blocks_are(self, blocks: Sequence[ScheduledBlock]) -> None:
        """What is planned, now that the blocks' lengths are known."""
        self._blocks = list(blocks)

    def searches_take(self, seconds: float) -> None:
        """Searches and ramps that are still to come, as far as those that have run tell."""
        self._search_seconds = seconds

    def load_ends_within(self, seconds: float) -> None:
        """How many blocks are to come is not known, only how long they may take."""
        self._blocks, self._load_ends_at = [], monotonic() + seconds

    def load_ends(self) -> None:
        """No block is to come."""
        self._load_ends_at = None

    def load_begins(self) -> None:
        """Everything before the first block is done."""
        self._before_load = 0.0

    def block_took(self, block: ScheduledBlock, seconds: float) -> None:
        """One block is done."""
        self._seconds.setdefault((block.cell.name, block.label), []).append(seconds)
        if block in self._blocks:
            self._blocks.remove(block)

    def round_s(self, cell: Cell) -> float:
        """Seconds of one round of a cell."""
        return sum(self._block_seconds(cell, label, self._seconds) for label in self._labels)

    def checks_take(self, seconds: float) -> None:
        """Comparing the answers under load, after it."""
        self._check_seconds = seconds

    def start_takes(self, seconds: float) -> None:
        """What a start of all servers has taken; a cold start is one of them."""
        self._start_guess = seconds

    def after_load_s(self) -> float:
        """Checks, cold starts and searches that are still to come."""
        return self._check_seconds + self._starts * self._start_s() + self._search_seconds

    def _start_s(self) -> float:
        return fmean(self._start_seconds) if self._start_seconds else self._start_guess

    def start_took(self, seconds: float) -> None:
        """One cold start is done."""
        self._start_seconds.append(seconds)
        self._starts -= 1

    def remaining_s(self) -> float:
        """Seconds still to come."""
        if not self._seconds and self._before_load:
            return max(self._preset_seconds, self._before_load)
        blocks = sum(self._block_seconds(block.cell, block.label, self._seconds) for block in self._blocks)
        if self._load_ends_at is not None:
            blocks = max(0.0, self._load_ends_at - monotonic())
        return self._before_load + blocks + self.after_load_s()

    @staticmethod
    def _block_seconds(cell: Cell, label: Label, seen: Mapping[tuple[str, Label], list[float]]) -> float:
        own = seen.get((cell.name, label)) or [s for (name, _), many in seen.items() if name == cell.name for s in many]
        return fmean(own) if own else _WHOLE_BLOCK * cell.seconds + _BETWEEN_BLOCKS_SECONDS
