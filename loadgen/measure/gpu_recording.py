"""The GPU sampler of a run, a process that records GPU readings during the load, and what servers report on GPUs.

The run goes on when the sampler fails: missing readings only make the GPU verification inconclusive.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from time import perf_counter_ns, sleep

import msgspec

from loadgen.base.child_process import OWN_MODULE, ChildProcess, ProcessError
from loadgen.base.documents import read_json
from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS, TimeSpan
from loadgen.measure.arms import Arm
from loadgen.records.machine import used_gpus
from loadgen.records.run import ArmRecord, Label
from loadgen.records.store import RunStore

SAMPLER: tuple[str, ...] = (*OWN_MODULE, "servers.gpu.sampler")
"""Runs as a separate process, because the load generator does not import the servers."""
READY_SECONDS = 30.0
ANSWER_SECONDS = 10.0
GPU_INFO_SECONDS = 60.0
GAP_SECONDS = DEFAULT_THRESHOLDS.min_gap_s + DEFAULT_THRESHOLDS.gap_settle_s + DEFAULT_THRESHOLDS.gap_margin_s + 0.5
"""Length of an idle gap: long enough once both its ends are cut off."""


class GpuRecording:
    """The sampler of a run, and what is known of the arms on GPUs. Life: `start` when the servers are warm, at each of
    their starts → `edge`, `gap`, `processes` → `stop`, at any time."""

    FILE = "gpu/0000.jsonl"
    """Where the readings are, relative to the run's folder."""

    def __init__(self, store: RunStore, abserve: Sequence[str], sampler: Sequence[str]) -> None:
        """`abserve` is the command that describes a server's GPUs, `sampler` the one that records them."""
        self.gaps: list[TimeSpan] = []
        self.pids: dict[Label, set[int]] = {}
        self.processes_unknown: dict[Label, str] = {}
        """The arms whose processes are unknown, and why."""
        self.records: tuple[ArmRecord, ...] = ()
        """The arms' records, each with its `/gpu-info` document."""
        self._store = store
        self._abserve = tuple(abserve)
        self._sampler = tuple(sampler)
        self._arms: Mapping[Label, Arm] = {}
        self._process: ChildProcess | None = None

    @property
    def running(self) -> bool:
        """Whether the sampler records; not without a GPU, nor when all arms say that they run on the CPU."""
        return self._process is not None

    def start(self, arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> None:
        """Start the sampler unless all arms run on the CPU, and complete the arms' records. After a restart of the
        servers the sampler goes on and learns their new processes."""
        if not self.running and all(_on_cpu(record) for record in records):
            return
        self._arms = arms
        described = tuple(self.describe(record, self._store) for record in records)
        if not self.running:
            self._start_sampler(gpu_options(described))
        if self.running:
            self.records = described
            self._store.write_all(ArmRecord, self.records)
            self.note_processes()

    def _start_sampler(self, options: Sequence[str]) -> None:
        """Start it and wait for its first line, whose status is "ok" with a GPU; without one it is stopped."""
        path = self._store.directory / self.FILE
        argv = [*self._sampler, *options, "--out", str(path)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._process = ChildProcess(argv, log_path=self._store.log_path("gpu-sampler"), pipes=True)
            document = msgspec.json.decode(self._process.read_line(READY_SECONDS) or b"null")
        except (OSError, ProcessError, msgspec.DecodeError):
            document = None
        if not isinstance(document, dict) or document.get("status") != "ok":
            self.stop()

    def edge(self, label: str) -> None:
        """Read everything now; returns when the readings are in the file or the sampler does not answer."""
        self._command(f"edge {label}")

    def gap(self) -> None:
        """Record the GPU while nothing is sent."""
        number = len(self.gaps)
        self.edge(f"gap {number} start")
        start_ns = perf_counter_ns()
        sleep(GAP_SECONDS)
        end_ns = perf_counter_ns()
        self.edge(f"gap {number} end")
        self.gaps.append(TimeSpan(start_ns=start_ns, end_ns=end_ns))

    def note_processes(self) -> None:
        """Record the current processes of the arms' servers."""
        for label, arm in self._arms.items():
            self.processes(label, arm.deployment.pids(), arm.deployment.processes_unknown)

    def processes(self, label: Label, pids: Collection[int], unknown: str | None) -> None:
        """Add processes of an arm's server; those that end stay in the set. `unknown`: why there are none."""
        arm_pids = self.pids.setdefault(label, set())
        arm_pids.update(pids)
        if arm_pids:
            self.processes_unknown.pop(label, None)
        else:
            self.processes_unknown[label] = unknown or "they cannot be seen"

    def stop(self) -> None:
        """Let the sampler write its last line and end it. Bounded and idempotent."""
        if self._process is not None:
            self._command("stop")
            self._process.stop(timeout_s=ANSWER_SECONDS)
            self._process = None

    def _command(self, text: str) -> None:
        if self._process is not None and self._process.send(text.encode()):
            self._process.read_line(ANSWER_SECONDS)

    def describe(self, record: ArmRecord, store: RunStore) -> ArmRecord:
        """The record with a `/gpu-info` document, which Triton does not offer: `abserve gpu-info` makes it from
        Triton's configuration and log."""
        if record.gpu_info is not None:
            return record
        argv = [*self._abserve, "gpu-info", record.url, "--model", self._arms[record.label].model, "--json"]
        log_path = store.log_path(f"{record.label}-{record.target}")
        if record.launched and log_path.exists():
            argv += ["--log", str(log_path)]
        try:
            done = subprocess.run(argv, capture_output=True, check=False, timeout=GPU_INFO_SECONDS)
            document = read_json(done.stdout) if done.returncode == 0 else None
        except (OSError, subprocess.TimeoutExpired, ValueError):
            document = None
        return msgspec.structs.replace(record, gpu_info=document if isinstance(document, dict) else None)


def gpu_options(records: Sequence[ArmRecord]) -> tuple[str, ...]:
    """The sampler's options: the GPUs that the arms name. When one does not name its GPUs, those of
    CUDA_VISIBLE_DEVICES, which launched servers have inherited; for servers by URL all GPUs."""
    on_gpu = [record for record in records if not _on_cpu(record)]
    named = [used_gpus(record.gpu_info) for record in on_gpu]
    if named and all(named):
        return tuple(part for uuid in dict.fromkeys(chain(*named)) for part in ("--gpu", uuid))
    return () if all(record.launched for record in on_gpu) else ("--gpu", "all")


def _on_cpu(record: ArmRecord) -> bool:
    return str(record.in_effect.get("device", "")).startswith("cpu")
