"""Runs with a scripted GPU: a real recording through the sampler's own code, read back from a file, then assessed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.findings.gpu.analysis import assess
from loadgen.findings.gpu.records import EvidenceRecord, TimeSpan, read_readings
from loadgen.records.run import BlockRecord
from servers.gpu.readings import GpuReader
from servers.gpu.sampler import INTERVALS_S, Recording
from tests.scripted_reader import Fault, Phase, ScriptedReader

SECOND = 1_000_000_000
WALL_OFFSET_NS = 1_700_000_000 * SECOND
UUID = "GPU-5c719ed0-0000-0000-0000-000000000000"


def seconds(value: float) -> int:
    return int(value * SECOND)


@dataclass
class FakeClock:
    now_ns: int = seconds(100)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns + WALL_OFFSET_NS


@dataclass
class Plan:
    """Blocks of load on one arm, 100 s after boot: a gap of 10 s, blocks with pauses between, a gap of 10 s."""

    busy: float = 0.9
    watts: float = 600.0
    block_s: float = 10.0
    blocks: int = 4
    pause_s: float = 1.0
    gap_s: float = 10.0
    idle_watts: float = 80.0
    idle_busy: float = 0.0
    pids: Sequence[int] = (4711,)
    faults: Sequence[Fault] = ()
    requests_per_s: float = 50.0
    errors: int = 0
    server_cpu_s_per_request: float | None = 0.002
    drop: Callable[[dict[str, object]], bool] = field(default=lambda _: False)
    machine: Callable[[ScriptedReader, FakeClock], GpuReader] = field(default=lambda gpu, _: gpu)
    """What the arm's GPU is built into."""

    @property
    def windows(self) -> list[TimeSpan]:
        start = 100.0 + self.gap_s
        step = self.block_s + self.pause_s
        return [
            TimeSpan(start_ns=seconds(start + n * step), end_ns=seconds(start + n * step + self.block_s))
            for n in range(self.blocks)
        ]

    @property
    def gaps(self) -> list[TimeSpan]:
        first, last = self.windows[0].start_ns, self.windows[-1].end_ns
        return [
            TimeSpan(start_ns=seconds(100), end_ns=first),
            TimeSpan(start_ns=last + seconds(0.5), end_ns=last + seconds(0.5 + self.gap_s)),
        ]

    def record(self) -> list[dict[str, object]]:
        """The lines of a sampler that ran all the time; the runner asks for an edge around every gap."""
        clock = FakeClock()
        phases = [Phase(w.start_ns, w.end_ns, self.busy, self.watts) for w in self.windows]
        gpu = ScriptedReader(
            clock.monotonic_ns, clock.wall_ns, phases, self.faults,
            idle_watts=self.idle_watts, idle_busy=self.idle_busy, pids=self.pids,
        )  # fmt: skip
        recording = Recording(self.machine(gpu, clock), INTERVALS_S, clock.monotonic_ns, clock.wall_ns)
        lines = [recording.header(pid=1)]
        edges = sorted(t for gap in self.gaps for t in (gap.start_ns, gap.end_ns))
        end_ns = edges[-1]
        while clock.now_ns < end_ns:
            lines += recording.tick()
            clock.now_ns = min(recording.next_due_ns(), edges[0])
            if clock.now_ns == edges[0]:
                lines += recording.edge("gap")
                edges.pop(0)
        lines += recording.close()
        return [line for line in lines if not self.drop(line)]

    def block_records(self) -> list[BlockRecord]:
        requests = int(self.requests_per_s * self.block_s)
        cpu = self.server_cpu_s_per_request
        return [
            BlockRecord(
                index=number, workload="single", round=number, label="a", position=0, started_at="", samples="",
                window_start_ns=window.start_ns, window_end_ns=window.end_ns, requests=requests, items=requests,
                errors=self.errors, error_messages=(), generator_cpu_ns=0,
                server_cpu_ns=None if cpu is None else int(cpu * requests * 1e9), stages=None, complete=True,
            )
            for number, window in enumerate(self.windows)
        ]  # fmt: skip

    def completions_ns(self) -> np.ndarray:
        per_block = int(self.requests_per_s * self.block_s)
        return np.concatenate([np.linspace(w.start_ns, w.end_ns - 1, per_block, dtype=np.int64) for w in self.windows])


GPU_INFO: dict[str, Any] = {
    "runtime": {
        "kind": "torch",
        "used_device_uuid": UUID,
        "placement": {"result": "gpu", "params_by_device": {"cuda:0": 152}},
        "kernel_probe": {"kernel_count": 97},
    }
}
CPU_INFO: dict[str, Any] = {
    "runtime": {"kind": "torch", "placement": {"result": "cpu", "params_by_device": {"cpu": 152}}, "kernel_probe": None}
}


def assess_plan(directory: Path, plan: Plan, **changes: Any) -> EvidenceRecord:
    """Record and assess. Keywords replace those of `assess`."""
    path = directory / "0000.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in plan.record()))
    arm: dict[str, Any] = {
        "label": "a", "workload": "single", "blocks": plan.block_records(), "gaps": plan.gaps,
        "ended_before": partial(np.searchsorted, plan.completions_ns()), "gpu_info": GPU_INFO, "model_config": None,
        "server_pids": {4711}, "own_pids": {4711, 4712},
    } | changes  # fmt: skip
    return assess(read_readings(path.parent, [path.name]), **arm)


Run = Callable[..., EvidenceRecord]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return partial(assess_plan, tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="session")
def plan() -> type[Plan]:
    return Plan


@pytest.fixture(scope="session")
def gpu_info() -> dict[str, Any]:
    return GPU_INFO


@pytest.fixture(scope="session")
def cpu_info() -> dict[str, Any]:
    return CPU_INFO
