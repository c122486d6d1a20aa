"""Stored runs whose GPU readings are a recording of a real H200, tests/captures/h200.json: one block of each arm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.findings.gpu.analysis import ControlRun, assess_run
from loadgen.findings.gpu.records import EvidenceFile, TimeSpan
from loadgen.records.run import ArmRecord, BlockRecord, Workload
from loadgen.records.samples import SAMPLE_DTYPE, Samples
from loadgen.records.store import read_run
from tests.golden.synthetic_run import Plan, SimulatedArm, write_run

CAPTURE = json.loads((Path(__file__).parents[3] / "captures/h200.json").read_text())
WORKLOAD = Workload(
    scenario="single", batch_size=1, concurrency=1, requests=100, seconds=30.0, max_seconds=60.0, rounds=1
)

IMAGES_OF_CPU_REQUEST = 10 * (8192 / 1024) ** 3
"""The recorder's CPU request is one product of 1024², its GPU request ten of 8192²: so many make one "image"."""


def phase(kind: str) -> dict[str, Any]:
    (captured,) = [phase for phase in CAPTURE["phases"] if phase["kind"] == kind]
    return captured


def samples(kind: str) -> Samples:
    """One request after the other, each answered when the recording says so."""
    ends = np.array(phase(kind)["completions_ns"], dtype=np.int64)
    rows = np.zeros(len(ends), dtype=SAMPLE_DTYPE)
    rows["end_ns"] = rows["first_byte_ns"] = ends
    rows["send_ns"][1:] = ends[:-1]
    rows["send_ns"][0] = phase(kind)["start_ns"]
    rows["intended_ns"] = rows["send_ns"]
    rows["batch"], rows["status"], rows["error"] = 1, 200, -1
    rows["request_bytes"], rows["response_bytes"] = 600_000, 2_000
    return rows


def block(index: int, label: Any, kind: str) -> BlockRecord:
    """The recording keeps the times of some 4,000 answers at most."""
    here = phase(kind)
    answered = len(here["completions_ns"])
    return BlockRecord(
        index=index, workload="single", round=0, label=label, position=index, started_at="", requests=answered,
        samples=f"samples/{index:04d}.npy", window_start_ns=here["start_ns"], window_end_ns=here["end_ns"],
        items=answered, errors=0, error_messages=(), generator_cpu_ns=0, server_cpu_ns=here["cpu_ns"],
        stages=None, complete=True,
    )  # fmt: skip


def on_gpu(arm: ArmRecord, device: str, kernels: int | None) -> ArmRecord:
    """What the arm's server says of itself."""
    info = {
        "status": "ok",
        "runtime": {
            "kind": "torch",
            "used_device_uuid": CAPTURE["uuid"] if device != "cpu" else None,
            "placement": {"params_by_device": {device: 152}},
            "kernel_probe": None if kernels is None else {"kernel_count": kernels},
        },
    }
    return msgspec.structs.replace(arm, gpu_info=info, in_effect={**arm.in_effect, "device": device})


def write_gpu_run(
    directory: Path, a: str = "gpu", b: str = "gpu", *others: str, b_says: str = "cuda:0", evidence: bool = True
) -> Path:
    """`a`, `b` and `others`: what the arm did under load, by the recording: gpu, or cpu (the GPU idled). All say cuda:0
    and show kernels, but for `b_says`."""
    write_run(directory, Plan(workloads=(WORKLOAD,), gpu_status="ok", others=(SimulatedArm(),) * len(others)))
    for folder in ("blocks", "samples"):
        for path in (directory / folder).iterdir():
            path.unlink()
    arms = msgspec.json.decode((directory / "arms.json").read_bytes(), type=list[ArmRecord])
    says = {"b": b_says}
    arms = [on_gpu(arm, says.get(arm.label, "cuda:0"), None if says.get(arm.label) == "cpu" else 97) for arm in arms]
    (directory / "arms.json").write_bytes(msgspec.json.encode(arms))
    for index, (label, kind) in enumerate(zip("abcdefgh", (a, b, *others), strict=False)):
        (directory / "blocks" / f"{index:04d}.json").write_bytes(msgspec.json.encode(block(index, label, kind)))
        np.save(directory / "samples" / f"{index:04d}.npy", samples(kind))
    if evidence:
        (directory / "evidence.json").write_bytes(msgspec.json.encode(assess_stored(directory, arms)))
    return directory


def assess_stored(directory: Path, arms: list[ArmRecord]) -> EvidenceFile:
    """As the runner does at the end of a run; the control is the recording's CPU phase, in images of a GPU request."""
    (directory / "gpu").mkdir(exist_ok=True)
    (directory / "gpu/0000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CAPTURE["lines"]))
    done = phase("cpu")["completed"]
    control = msgspec.structs.replace(
        block(0, "a", "cpu"), requests=done, items=max(1, round(done / IMAGES_OF_CPU_REQUEST))
    )
    return assess_run(
        directory,
        ["gpu/0000.jsonl"],
        arms=arms,
        blocks=read_run(directory).blocks,
        gaps=[TimeSpan(start_ns=p["start_ns"], end_ns=p["end_ns"]) for p in CAPTURE["phases"] if p["kind"] == "idle"],
        pids={arm.label: {CAPTURE["pid"]} for arm in arms},
        controls={"a": ControlRun(on_gpu(arms[0], "cpu", None), control, samples("cpu"), frozenset())},
    )
