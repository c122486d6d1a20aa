"""Faults of a run as a whole, each caused: what is kept, what is said, and with which exit status it ends.

Those of the servers and of the disk are in test_run, of the load generator in test_generator, test_transports and
test_distributed_generator. docs/experiments.md has the table of all of them.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import psutil
import pytest

from loadgen.checks.registry import invalidating
from loadgen.findings.cold_start import ColdStartsFound
from loadgen.findings.gpu.analysis import GpuFound
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, RunState, Workload
from loadgen.report.files import published
from loadgen.verdict.result import Result, analyse
from tests.integration.loadgen.conftest import (
    FAKE_ABSERVE,
    UNWATCHED,
    UNWATCHED_ABSERVE,
    await_true,
    make_experiment,
    programs_of,
    start_runner,
)

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.slow]

STEPPED_CLOCK = """
import loadgen.measure.load_runner
from datetime import UTC, datetime, timedelta
calls = []
def stepped():
    calls.append(1)
    return (datetime.now(UTC) + timedelta(hours=3 if len(calls) > 2 else 0)).isoformat(timespec="seconds")
loadgen.measure.load_runner.utc_now = stepped
"""
SAMPLER = (sys.executable, str(Path(__file__).parents[2] / "scripted_sampler.py"))


def reported(out: Path) -> Result:
    """The result; every report of it can be written."""
    result = analyse(out)
    published(result).write(out)
    return result


def single(rounds: int, seconds: float = 0.1) -> Workload:
    return Workload(
        scenario="single", batch_size=1, concurrency=1, requests=5, seconds=seconds, max_seconds=60, rounds=rounds
    )


def test_ctrl_c_in_a_cold_start_keeps_the_blocks_and_the_starts_and_leaves_nobody(tmp_path: Path) -> None:
    out = tmp_path / "run"
    cold = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=3)
    process = start_runner(
        make_experiment(workloads=(cold, single(2)), b_settings={"startup-ms": "4000"}), out, UNWATCHED
    )

    def starts() -> list[dict[str, object]]:
        path = out / "cold_starts.json"
        return json.loads(path.read_bytes()) if path.exists() else []

    await_true(lambda: any(start["label"] == "b" for start in starts()), "B has started once", 60)
    children = programs_of(process)
    kept = len(starts())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert msgspec.json.decode((out / "run.json").read_bytes(), type=RunState).state == "interrupted"
    result = reported(out)
    assert not result.valid
    assert [block.complete for block in result.blocks] == [True] * 4
    assert kept <= len(result.of(ColdStartsFound).starts) < 6
    load = next(c for c in result.comparisons if c.workload == "single" and c.metric == "throughput")
    assert load.pairs == 2
    against = {check.name for check in invalidating(result.checks) if check.scope in ("run", "workload single")}
    assert against <= {"generator_cpu", "warm_up"}, "what was finished is compared, where the machine was not too busy"
    assert {c.verdict for c in result.comparisons if c.workload == "cold-start"} == {"invalid"}


def test_a_wall_clock_that_steps_by_hours_moves_no_latency_and_is_noted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert start_runner(make_experiment(workloads=(single(3),)), out, UNWATCHED + STEPPED_CLOCK).wait(60) == 0
    result = reported(out)
    (noted,) = [check for check in result.checks if check.name == "wall_clock"]
    assert noted.ok is False
    assert noted.value == pytest.approx(3 * 3600, abs=5)
    assert "before block" in noted.detail
    assert noted.severity == "informs"
    assert all(block.duration_s < 30 for block in result.blocks)
    assert all((block.latency_ms("mean") or 0) < 1000 for block in result.blocks)


def gpu_run(out: Path, *options: str) -> RunState:
    device = {"device": "cuda:0"}
    experiment = make_experiment(
        a=ArmRequest(label="a", target="native", settings=device),
        b=ArmRequest(label="b", target="triton", settings=device),
        workloads=(single(2, 0.3),),
        gpu_control=False,
    )
    sampler = (*SAMPLER, "--blocks", "4", *options)
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE, sampler=sampler)


def test_a_gpu_that_the_driver_loses_mid_run_leaves_the_evidence_inconclusive(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert gpu_run(out, "--lose-in-block", "2").state == "finished"
    result = reported(out)
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    assert {record.finding.value for record in evidence.records} == {"INCONCLUSIVE"}
    assert all(record.inputs.health.gpu_lost for record in evidence.records)
    assert not result.valid
    assert {comparison.verdict for comparison in result.comparisons} == {"invalid"}
    assert [block.complete for block in result.blocks] == [True] * 4, "the load itself goes on"


DYING_SAMPLER = """
import os, signal, sys, threading
sys.path.insert(0, {folder!r})
sys.argv = ["scripted_sampler.py", *sys.argv[1:]]
import scripted_sampler
before = scripted_sampler.ObedientRecording.edge
def edge(self, label):
    if label == "block 1 before":
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, label)
scripted_sampler.ObedientRecording.edge = edge
scripted_sampler.main()
"""


def test_a_sampler_that_is_killed_mid_run_does_the_same(tmp_path: Path) -> None:
    out = tmp_path / "run"
    program = DYING_SAMPLER.format(folder=str(Path(__file__).parents[2]))
    experiment = make_experiment(
        a=ArmRequest(label="a", target="native", settings={"device": "cuda:0"}),
        b=ArmRequest(label="b", target="triton", settings={"device": "cuda:0"}),
        workloads=(single(2, 0.3),),
        gpu_control=False,
    )
    sampler = (sys.executable, "-c", program, "--blocks", "4")
    state = run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE, sampler=sampler)
    assert state.state == "finished"
    result = reported(out)
    evidence = result.of(GpuFound).evidence
    assert evidence is not None
    assert {record.finding.value for record in evidence.records} == {"INCONCLUSIVE"}
    assert not result.valid


NULL_ENGINES = ["--a", "native", "--b", "native", "--a-option", "engine=null", "--b-option", "engine=null"]


def test_thresholds_decide_the_exit_status_of_a_valid_run_and_stand_in_its_files(tmp_path: Path) -> None:
    """B takes 20 ms longer; of a p99.9 there are too few samples to say anything."""
    written = tmp_path / "experiment.yaml"
    written.write_text(
        "scenarios: single\npayload: uint8\nrounds: 2\nhandicap_check: false\nb: {options: {added-delay-ms: 20}}\n"
        "fail_if: [b.p50 > 1e9, b.p99_9 > 1e9]\n"
    )
    formats = ["--junit", str(tmp_path / "j.xml"), "--csv", str(tmp_path / "c.csv")]
    command = [*UNWATCHED_ABSERVE, "compare", str(written), *NULL_ENGINES, *formats]
    out = tmp_path / "run"
    done = subprocess.run(
        [*command, "--fail-if", "b.p50 > 1.5 * a.p50", "--out", str(out)],
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_bytes())
    assert result["valid"]
    assert [outcome["state"] for outcome in result["thresholds"]] == ["kept", "not_measurable", "broken"]
    root = ET.parse(tmp_path / "j.xml").getroot()
    assert len(root.findall("testsuite[@name='abserve.thresholds']/testcase/failure")) == 2
    assert len(list(csv.DictReader((tmp_path / "c-blocks.csv").read_text().splitlines()))) == 4
    again = subprocess.run(
        [sys.executable, "-P", "-m", "loadgen.entry", "compare", str(out / "experiment.yaml"), "--print-experiment"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert again.stdout == (out / "experiment.yaml").read_text()
