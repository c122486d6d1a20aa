"""What is read at both ends of a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from loadgen.experiment.schedule import ScheduledBlock
from loadgen.measure.gpu_recording import GpuRecording
from loadgen.measure.load_runner import _Readings
from tests.integration.loadgen.conftest import make_experiment


class Recorded(GpuRecording):
    """A recording without a sampler: it keeps what it is told, in order."""

    def __init__(self) -> None:
        self.pids, self.processes_unknown = {}, {}
        self.known_at: dict[str, set[int]] = {}

    def edge(self, label: str) -> None:
        self.known_at[label] = set(self.pids["b"])


def test_a_process_that_is_restarted_between_two_blocks_is_known_when_the_gpu_is_read() -> None:
    """The GPU's list at an edge must not show a restarted engine as a foreign process."""
    running = {10, 11}
    deployment = SimpleNamespace(pids=lambda: tuple(running), processes_unknown=None, cpu_ns=lambda: None)
    arm: Any = SimpleNamespace(deployment=deployment, statistics=lambda: SimpleNamespace(read=lambda: None))
    block = ScheduledBlock(3, make_experiment().workloads[0], 0, "b", 0)
    recorded = Recorded()
    readings = _Readings(block, arm, (), recorded)
    readings.begin()
    running.remove(11)
    running.add(12)
    readings.end(cast("Any", None))
    assert recorded.known_at == {"block 3 before": {10, 11}, "block 3 after": {10, 11, 12}}
