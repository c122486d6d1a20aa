"""Engines measured alone after the load, by a program of its own: what fails is a note, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadgen.findings.ceiling import Ceiling, Ceilings, CeilingsFound
from loadgen.measure.probes import ceiling as ceiling_probe
from loadgen.measure.probes.ceiling import measure
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, RunState, Workload
from loadgen.records.store import RunStore
from loadgen.report.files import published
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, await_true, make_experiment, start_runner, stored

pytestmark = pytest.mark.usefixtures("no_process_left")

SINGLE = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.0, max_seconds=9.0, rounds=1)
CONCURRENT = Workload(
    scenario="concurrent", batch_size=1, concurrency=4, requests=20, seconds=0.0, max_seconds=9.0, rounds=2
)


def arm(kind: str) -> ArmRecord:
    """What a server of ours says of an engine of that kind."""
    return ArmRecord(
        label="a", title="", target="native", url="", server_name=None, server_version=None, launched=True, argv=None,
        settings={}, model_config=None, gpu_info=None, artefact=None,
        in_effect={"engine": kind, "precision": "fp32", "device": "cpu", "max_batch_size": 32},
    )  # fmt: skip


def context(tmp_path: Path, kind: str, abserve: Sequence[str]) -> Any:
    """What the probe reads of a run with one arm whose server says that it has this engine."""
    return SimpleNamespace(
        experiment=make_experiment(workloads=(SINGLE,), ceiling=True), records=[arm(kind)], inputs={}, work=tmp_path,
        arms={"a": SimpleNamespace(name="native")},
        store=RunStore(tmp_path / "run"), progress=RunProgress(), abserve=abserve, enter=lambda _: None,
    )  # fmt: skip


def measured(directory: Path) -> tuple[Ceiling, ...]:
    return stored(directory / "ceilings.json", Ceilings).measured


@pytest.mark.parametrize(
    ("kind", "timeout_s", "words"),
    [
        ("failing", 30.0, ["its measurement ended with exit status 1", "there is no such engine", "engine-a.log"]),
        ("hanging", 1.0, ["its measurement took more than 1 s", "engine-a.log"]),
        ("silent", 30.0, ["no readable result", "engine-a.json"]),
        ("another", 30.0, ["the measured engine is not the server's: engine none instead of another"]),
    ],
)
def test_a_measurement_that_fails_is_a_note_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, timeout_s: float, words: list[str]
) -> None:
    monkeypatch.setattr(ceiling_probe, "LOAD_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(ceiling_probe, "SIZE_TIMEOUT_S", 0.0)
    measure(context(tmp_path, kind, FAKE_ABSERVE))
    (ceiling,) = measured(tmp_path / "run")
    assert ceiling.document is None
    assert ceiling.reason is not None
    assert [word for word in words if word not in ceiling.reason] == []
    assert ceiling.command is not None
    assert ceiling.command.startswith(f"abserve engine --engine={kind} ")


def test_a_program_that_is_not_there_is_a_note_too(tmp_path: Path) -> None:
    measure(context(tmp_path, "torch", ["/no/such/program"]))
    (ceiling,) = measured(tmp_path / "run")
    assert ceiling.reason is not None
    assert "cannot start /no/such/program" in ceiling.reason


def engines(a: str, b: str, *others: str) -> Experiment:
    return make_experiment(
        workloads=(SINGLE, CONCURRENT),
        a=ArmRequest(label="a", target="native", settings={"tell-engine": a}),
        b=ArmRequest(label="b", target="triton", settings={"tell-engine": b}),
        others=[
            ArmRequest(label=label, target="native", settings={"tell-engine": kind})
            for label, kind in zip("cdefgh", others, strict=False)
        ],
        ceiling=True,
    )


def test_a_run_divides_what_it_served_and_outlives_a_failed_measurement(tmp_path: Path) -> None:
    out = tmp_path / "run"
    state = run_experiment(engines("good", "failing", "good"), out, RunProgress(), abserve=FAKE_ABSERVE)
    assert (state.state, state.error) == ("finished", None)
    a, b = measured(out)
    assert (a.labels, b.labels) == (("a", "c"), ("b",)), "the same engine is measured once"
    assert a.document is not None
    assert [one["batch"] for one in a.document["batches"]] == [1, 2, 4]
    assert b.document is None
    result = analyse(out)
    single = [one for one in result.of(CeilingsFound).shares if one.workload == "single"]
    assert [one.label for one in single] == ["a", "c"]
    for one in single:
        assert one.engine_images_per_s == pytest.approx(1000.0)
        assert one.share == pytest.approx(one.served_images_per_s / 1000.0)
    assert {one.label for one in result.of(CeilingsFound).shares} == {"a", "c"}
    assert [gap.label for gap in result.of(CeilingsFound).missing] == ["b"]
    assert not any("ended with exit status" in check.detail for check in result.checks)


@pytest.mark.slow
def test_ctrl_c_in_a_measurement_keeps_the_load_and_leaves_nobody(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_runner(engines("good", "hanging"), out)
    log = out / "logs" / "engine-b.log"
    await_true(lambda: log.exists() and "loading" in log.read_text(), "the engine of B is being measured", 60)
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("--engine=hanging" in child.cmdline() for child in children)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    _, left = psutil.wait_procs(children, 20)
    assert left == []
    state = stored(out / "run.json", RunState)
    assert (state.state, state.phase) == ("interrupted", "measuring the engines alone")
    result = analyse(out)
    published(result).write(out)
    assert all(block.complete for block in result.blocks)
    assert {one.label for one in result.of(CeilingsFound).shares} == {"a"}
    assert result.of(CeilingsFound).missing == ()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_engines_on_a_cpu_are_the_ceilings_of_their_servers(tmp_path: Path) -> None:
    """Torch on both arms, so with the same settings in effect: one measurement, and no server beats it by far."""
    out = tmp_path / "run"
    shape = ("--scenarios", "single,batched", "--batch-sizes", "4", "--rounds", "2", "--payload", "uint8")
    command = [sys.executable, "-P", "-m", "loadgen.entry", "compare", "--out", str(out), "--a", "native"]
    command += ["--b", "native", "--a-option", "device=cpu", "--b-option", "device=cpu", *shape, "--ceiling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode in (0, 1), done.stderr
    (ceiling,) = measured(out)
    assert (ceiling.labels, ceiling.reason) == (("a", "b"), None)
    assert ceiling.document is not None
    result = json.loads((out / "result.json").read_bytes())
    told = {arm["label"]: arm["in_effect"] for arm in result["arms"]}["a"]
    engine = ceiling.document["engine"]
    assert [engine[name] for name in ("kind", "precision", "mode", "device")] == [
        told[name] for name in ("engine", "precision", "mode", "device")
    ]
    assert str(engine["threads"]) == told["threads"]
    assert engine["max_batch_size"] == told["max_batch_size"]
    assert ceiling.document["model"] == "openclip_vit_b32_uint8"
    found = result["studies"]["ceiling"]
    shares = {(one["workload"], one["label"]): one for one in found["shares"]}
    assert sorted(shares) == [(workload, label) for workload in ("batched(4)", "single") for label in ("a", "b")]
    assert {workload: shares[workload, "a"]["batch"] for workload in ("single", "batched(4)")} == {
        "single": 1,
        "batched(4)": 4,
    }
    assert all(one["share"] > 0.0 for one in found["shares"])
    assert found["missing"] == []
    assert "Engine ceilings" in done.stdout
    for name in ("summary.md", "report.html"):
        assert "of its engine ceiling at batch 4" in (out / name).read_text()
