"""The events that a run reports as it progresses; the display is in `loadgen.report.progress`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.comparison.summaries import BlockSummary
from loadgen.probes.cold_start.records import ColdStart
from loadgen.records.run import ArmRecord, BlockRecord, ParityRecord
from loadgen.verdict.checks.registry import Check


class Progress:
    """Listens to a run and shows nothing. Calls come in order, from one thread."""

    def plan(self, seconds: float) -> None:
        """The remaining time, if known."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def now(self, text: str) -> None:
        """The current step."""

    def padding_decided(self, rule: str) -> None:
        """How the servers pad batches, in a sentence, before they start."""

    def inputs_ready(self, about: Mapping[str, str | int]) -> None:
        """The inputs are made, as described in the stored environment."""

    def arm_ready(self, record: ArmRecord) -> None:
        """A server is up."""

    def cold_start_done(self, record: ColdStart) -> None:
        """One cold start is done."""

    def parity_done(self, record: ParityRecord) -> None:
        """All servers have answered the same inputs."""

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """The arms and the machine were checked, right before the load."""

    def block_done(self, record: BlockRecord, summary: BlockSummary) -> None:
        """One block is stored; `summary` is computed from its samples."""
