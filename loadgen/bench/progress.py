"""What a run tells while it goes on; the rich display is in `loadgen.report.progress`."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.comparison.summaries import BlockSummary
from loadgen.records.run import ArmRecord, BlockRecord, ParityRecord
from loadgen.result.checks.registry import Check
from loadgen.studies.cold_start.records import ColdStart


class Progress:
    """Listens to a run and says nothing. Calls come in order, from one thread."""

    def plan(self, seconds: float) -> None:
        """How long everything still to come will take, as far as is known now."""

    def phase(self, title: str) -> None:
        """A phase begins."""

    def now(self, text: str) -> None:
        """What is being done at this moment."""

    def arm_ready(self, record: ArmRecord) -> None:
        """A server is up; this is what it is."""

    def cold_start_done(self, record: ColdStart) -> None:
        """One server was started from nothing."""

    def parity_done(self, record: ParityRecord) -> None:
        """All servers have answered the same images."""

    def fairness_checked(self, checks: Sequence[Check]) -> None:
        """The arms and the machine were looked at, right before the load."""

    def block_done(self, record: BlockRecord, summary: BlockSummary, p50_ns: int | None) -> None:
        """One block is on disk; `summary` is made from there, `p50_ns` is the generator's."""
