"""The verdict on recorded readings: every file in tests/captures, real or synthetic, must give the same answers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.checks.gpu import may_rank
from loadgen.findings.gpu.analysis import assess
from loadgen.findings.gpu.records import EvidenceRecord, TimeSpan, read_readings
from loadgen.records.run import BlockRecord

ROOT = Path(__file__).resolve().parents[5]
CAPTURES = sorted((ROOT / "tests/captures").glob("*.json"))
RECORDER = ROOT / "tests/gpu/evidence/record_capture.py"


def arm(capture: dict[str, Any], kind: str, placement: str) -> dict[str, Any]:
    """One phase of a capture as an arm's only block, the idle phases as gaps; what its runtime says is given."""
    (phase,) = [phase for phase in capture["phases"] if phase["kind"] == kind]
    device = {"gpu": "cuda:0", "cpu": "cpu"}[placement]
    block = BlockRecord(
        index=0, workload="single", round=0, label="a", position=0, started_at="", samples="",
        window_start_ns=phase["start_ns"], window_end_ns=phase["end_ns"], requests=phase["completed"],
        items=phase["completed"], errors=0, error_messages=(), generator_cpu_ns=0, server_cpu_ns=phase["cpu_ns"],
        stages=None, complete=True,
    )  # fmt: skip
    runtime = {
        "kind": "torch",
        "used_device_uuid": capture["uuid"],
        "placement": {"params_by_device": {device: 1}},
        "kernel_probe": {"kernel_count": capture["kernel_count"]},
    }
    return {
        "label": "a",
        "workload": "single",
        "blocks": [block],
        "gaps": [
            TimeSpan(start_ns=p["start_ns"], end_ns=p["end_ns"]) for p in capture["phases"] if p["kind"] == "idle"
        ],
        "ended_before": partial(np.searchsorted, np.sort(np.array(phase["completions_ns"], dtype=np.int64))),
        "gpu_info": {"runtime": runtime},
        "model_config": None,
        "server_pids": {capture["pid"]},
        "own_pids": {capture["pid"]},
    }


def of_the_same_work(control: EvidenceRecord) -> EvidenceRecord:
    """The recorder's CPU request is one product of 1024², its GPU request ten of 8192²: a CPU witness compares requests
    of equal work, so the control is told per GPU request."""
    factor = 10 * (8192 / 1024) ** 3
    witness = control.inputs.witness
    assert witness.cpu_s_per_request is not None
    assert witness.requests_per_s is not None
    scaled = replace(
        witness, cpu_s_per_request=witness.cpu_s_per_request * factor, requests_per_s=witness.requests_per_s / factor
    )
    return replace(control, inputs=replace(control.inputs, witness=scaled))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_capture(path: Path, tmp_path: Path) -> None:
    capture = json.loads(path.read_text())
    file = tmp_path / "0.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in capture["lines"]))
    readings = read_readings(file.parent, [file.name])

    def judge(kind: str, placement: str, **more: Any) -> EvidenceRecord:
        return assess(readings, **arm(capture, kind, placement), **more)

    control = judge("cpu", "cpu", is_control=True)
    assert (control.finding, control.activity) == ("CPU_FALLBACK", "idle"), control
    liar = judge("cpu", "gpu", control=control)
    assert (liar.finding, liar.inputs.placement.result) == ("CPU_FALLBACK", "gpu"), liar
    gpu = judge("gpu", "gpu", control=of_the_same_work(control))
    assert (gpu.activity, gpu.cpu_witness) == ("active", False), gpu
    assert gpu.finding == "GPU_VERIFIED" or gpu.code == "unattributed", gpu  # PIDs may be hidden, 31 s are no 100 bins
    assert not may_rank({"a": gpu, "b": liar}, {"a": "A", "b": "B"})[0]


def test_there_are_captures_and_they_say_what_they_are() -> None:
    assert CAPTURES
    for path in CAPTURES:
        origin = json.loads(path.read_text())["origin"]
        assert origin in ("real", "synthetic")
        assert path.name.startswith("synthetic-") == (origin == "synthetic")


def test_the_synthetic_capture_is_what_its_script_makes(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    subprocess.run([sys.executable, str(RECORDER), "--synthetic", "--out", str(made)], check=True, capture_output=True)
    assert made.read_text() == (ROOT / "tests/captures/synthetic-h200.json").read_text()
