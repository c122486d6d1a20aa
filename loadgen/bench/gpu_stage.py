"""The GPU sampler of one run: when it starts and ends, and what the servers say of their GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.bench.arms import Arm
from loadgen.bench.gpu_recording import GpuRecording
from loadgen.documents import read_json
from loadgen.records.machine import used_gpu
from loadgen.records.run import ArmRecord, Label
from loadgen.storage.store import RunStore

GPU_INFO_SECONDS = 60.0


class GpuStage:
    """Life: `start` when the servers are warm → load with `recording` → `close`, at any time."""

    def __init__(
        self,
        store: RunStore,
        abserve: Sequence[str],
        sampler: Sequence[str],
    ) -> None:
        self._store = store
        self._abserve = tuple(abserve)
        self._sampler = tuple(sampler)
        self._arms: Mapping[Label, Arm] = {}
        self.records: tuple[ArmRecord, ...] = ()
        """Of the arms, with the `/gpu-info` document of each."""
        self.recording: GpuRecording | None = None
        """None without a GPU, or where all arms say that they execute on the CPU."""

    def start(self, arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> None:
        """Start the sampler where there is something for it to see, and complete the arms' records. Called again
        after a restart of the servers, it goes on and learns their new processes."""
        if self.recording is None and all(_on_cpu(record) for record in records):
            return
        self._arms = arms
        described = tuple(self.describe(record, self._store) for record in records)
        if self.recording is None:
            sampler = (*self._sampler, *gpu_options(described))
            self.recording = GpuRecording(self._store.directory, self._store.log_path("gpu-sampler"), sampler)
            if not self.recording.ok:
                self.close()
                return
        self.records = described
        self._store.write_all(ArmRecord, self.records)
        self.note_processes()

    def close(self) -> None:
        """End the sampler."""
        if self.recording is not None:
            self.recording.stop()
            self.recording = None

    def note_processes(self) -> None:
        """Which processes the arms' servers are now, for a recording that goes on."""
        assert self.recording is not None
        for label, arm in self._arms.items():
            self.recording.processes(label, arm.deployment.pids())

    def describe(self, record: ArmRecord, store: RunStore) -> ArmRecord:
        """With the `/gpu-info` document that a Triton does not offer itself."""
        if record.gpu_info is not None:
            return record
        log_path = store.log_path(f"{record.label}-{record.target}") if record.launched else Path()
        document = ask_gpu_info(record, self._arms[record.label].model, log_path, self._abserve)
        return msgspec.structs.replace(record, gpu_info=document)


def gpu_options(records: Sequence[ArmRecord]) -> tuple[str, ...]:
    """For the sampler: the GPUs that the arms name. Where one is silent, those of CUDA_VISIBLE_DEVICES, which servers
    that we started have inherited, and of somebody else's servers all."""
    on_gpu = [record for record in records if not _on_cpu(record)]
    named = [used_gpu(record.gpu_info) for record in on_gpu]
    if named and None not in named:
        return tuple(part for uuid in dict.fromkeys(named) for part in ("--gpu", str(uuid)))
    return () if all(record.launched for record in on_gpu) else ("--gpu", "all")


def _on_cpu(record: ArmRecord) -> bool:
    return str(record.in_effect.get("device", "")).startswith("cpu")


def ask_gpu_info(arm: ArmRecord, model: str, log_path: Path, abserve: Sequence[str]) -> dict[str, Any] | None:
    """The `/gpu-info` document of a server that has no such route, made up from its config and its log by
    `abserve gpu-info`; None where that fails."""
    argv = [*abserve, "gpu-info", arm.url, "--model", model, "--json"]
    argv += ["--log", str(log_path)] if log_path.exists() else []
    try:
        done = subprocess.run(argv, capture_output=True, check=False, timeout=GPU_INFO_SECONDS)
        document = read_json(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return document if isinstance(document, dict) else None
