"""Whole runs beside a scripted GPU: what is recorded, and what the findings make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import loadgen.measure.load_runner
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.findings.gpu.records import EvidenceFile, read_readings
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRecord, ArmRequest, RunState, Workload
from loadgen.report.files import published
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")

SAMPLER = (sys.executable, str(Path(__file__).parents[2] / "scripted_sampler.py"))


def gpu_run(out: Path, *workloads: Workload, busy_blocks: int, control: bool, others: int = 0) -> RunState:
    """Two servers that both say cuda:0; on the CPU, A would need far more of it."""
    experiment = make_experiment(
        a=ArmRequest(label="a", target="native", settings={"device": "cuda:0", "cpu-burn-ms": "40"}),
        b=ArmRequest(label="b", target="triton", settings={"device": "cuda:0"}),
        workloads=workloads,
        gpu_control=control,
    )
    sampler = (*SAMPLER, "--blocks", str(busy_blocks), "--others", str(others))
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE, sampler=sampler)


def single(seconds: float, pairs: int) -> Workload:
    return Workload(
        scenario="single", batch_size=1, concurrency=1, requests=20, seconds=seconds, max_seconds=60, rounds=pairs
    )


@pytest.mark.slow
def test_of_four_gpus_the_one_that_the_servers_name_is_read(tmp_path: Path) -> None:
    state = gpu_run(tmp_path / "run", single(0.3, 1), busy_blocks=2, control=False, others=3)
    assert (state.state, state.error) == ("finished", None)
    own = "GPU-5c719ed0-0000-0000-0000-000000000000"
    readings = read_readings(tmp_path, ["run/gpu/0000.jsonl"])
    assert (readings.gpu_count, list(readings.devices)) == (4, [own])
    result = analyse(tmp_path / "run")
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    assert {(record.uuid, record.code) for record in evidence.records} == {(own, "short_window")}
    assert [series.uuid for series in result.of(GpuFound).series] == [own]


@pytest.mark.slow
def test_what_a_gpu_run_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short pairs: the gaps lie around the rounds, the edges beside the blocks; so little load proves nothing."""
    monkeypatch.setattr(loadgen.measure.load_runner, "GAP_EVERY_SECONDS", 0.0)
    out = tmp_path / "run"
    state = gpu_run(out, single(0.3, 2), busy_blocks=4, control=False)
    assert (state.state, state.error) == ("finished", None)
    readings = read_readings(out, ["gpu/0000.jsonl"])
    labels = [edge.label for edge in readings.edges if edge.label != "periodic"]
    rounds = [[f"gap {n} start", f"gap {n} end"] for n in range(3)]
    pairs = [[f"block {i} {when}" for i in pair for when in ("before", "after")] for pair in ((0, 1), (2, 3))]
    assert labels == [*rounds[0], *pairs[0], *rounds[1], *pairs[1], *rounds[2]]
    result = analyse(out)
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    assert [round(gap.seconds) for gap in evidence.gaps] == [6, 6, 6]
    for block in result.blocks:
        edges = {edge.label: edge.at_ns for edge in readings.edges}
        window = next(r for r in evidence.records if r.label == block.label).inputs.load.windows[0]
        assert window.seconds >= 0.3
        assert not any(window.start_ns < at_ns < window.end_ns for at_ns in edges.values())
    for record in evidence.records:
        assert (record.finding, record.code) == ("INCONCLUSIVE", "short_window")
        assert record.inputs.attribution.pid_resolved, "the server is on the GPU's process list"
        assert record.activity == "active"
    assert not result.valid
    assert result.verdict.caveats[0].startswith(
        f"GPU use is not verified: {result.names['a']} is INCONCLUSIVE (short_window)"
    )
    assert all(comparison.verdict == "invalid" for comparison in result.comparisons)
    published(result).write(out)
    assert "GPU verification" in (out / "report.html").read_text()
    assert msgspec.json.decode((out / "evidence.json").read_bytes(), type=EvidenceFile) == evidence


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("busy", [True, False])
def test_the_same_run_is_ranked_beside_a_busy_gpu_and_not_beside_an_idle_one(tmp_path: Path, busy: bool) -> None:
    out = tmp_path / "run"
    state = gpu_run(out, single(31.0, 1), busy_blocks=2 if busy else 0, control=True)
    assert (state.state, state.error) == ("finished", None)
    result = analyse(out)
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    found = {(r.label, r.workload, r.control): (r.finding.value, r.code) for r in evidence.records}
    (control,) = [r for r in evidence.records if r.control]
    assert (control.finding, control.activity) == ("CPU_FALLBACK", "idle")
    (present,) = [c for c in result.checks if c.name == "gpu_present"]
    assert present.ok == busy, found
    assert (result.comparisons[0].verdict == "invalid") == (not busy), found


def as_triton(path: Path, kind: str) -> Path:
    """The documents of a Triton with its onnxruntime backend, for `--lies` of the fake server."""
    config = {
        "name": "openclip_vit_b32", "backend": "onnxruntime", "max_batch_size": 32,
        "instance_group": [{"kind": kind, "count": 1, "gpus": [0] if kind == "KIND_GPU" else []}],
    }  # fmt: skip
    server = {"name": "triton", "version": "2.51.0", "extensions": []}
    documents = {"/v2": server, "/v2/models/openclip_vit_b32/config": config}
    lies = {name: [json.dumps(document), 200, 0] for name, document in documents.items()}
    path.write_text(json.dumps({**lies, "/gpu-info": ["", 404, 0]}))
    return path


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("alone", [True, False])
def test_tritons_by_url_are_verified_by_their_processes_unless_another_process_is_there(
    tmp_path: Path, fake_url: Callable[..., str], alone: bool
) -> None:
    """Seen: the arm's own tritonserver was reported as another process on the GPU, and a CPU arm's J/image. Beside
    the other process, B is on the CPU."""
    kinds = {"a": "KIND_GPU", "b": "KIND_GPU" if alone else "KIND_CPU"}
    a, b = (
        ArmRequest(label=label, target=fake_url("--lies", str(as_triton(tmp_path / f"{label}.json", kind))))
        for label, kind in kinds.items()
    )
    experiment = make_experiment(a=a, b=b, workloads=(single(11.0, 1),))
    sampler = (*SAMPLER, "--blocks", "2", *(() if alone else ("--stranger", "4711")))
    out = tmp_path / "run"
    state = run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE, sampler=sampler)
    assert (state.state, state.error) == ("finished", None)
    arms = msgspec.json.decode((out / "arms.json").read_bytes(), type=list[ArmRecord])
    assert {arm.title for arm in arms} == {"Triton 2.51, onnxruntime backend"}
    assert [arm.in_effect["device"] for arm in arms] == ["cuda:0", "cuda:0" if alone else "cpu"]
    result = analyse(out)
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    for record in evidence.records:
        assert record.inputs.attribution.pid_resolved
        assert record.inputs.attribution.foreign is not alone
        found = ("GPU_VERIFIED", None) if alone else ("INCONCLUSIVE", "unattributed")
        if kinds[record.label] == "KIND_CPU":
            found = ("CPU_FALLBACK", None)
        assert (record.finding, record.code) == found, record.sentence
        assert record.inputs.load.server_cpu_s is not None
        assert record.inputs.gpu is not None
        assert (record.inputs.gpu.joules_per_item is not None) == alone
    published(result).write(out)
    for name in ("report.html", "summary.md"):
        text = (out / name).read_text()
        for words in (
            "Another process used the GPU",
            "No J/image: another process",
            "No J/image: the arm ran on the CPU",
        ):
            assert (words in text) == (not alone)
        assert ("Not every node is shown to run on the GPU" in text) == alone
