"""Whole runs of three arms: which is slower, which two are not told apart, and which one gives other answers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from loadgen.experiment.schedule import schedule
from loadgen.findings.causes import CausesFound, Explanation
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.probes import ServerStart
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, ParityRecord, RunState, Workload
from loadgen.report.files import published
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import (
    FAKE_ABSERVE,
    UNWATCHED_ABSERVE,
    assert_stored,
    blocks,
    make_experiment,
    stored,
)

pytestmark = pytest.mark.usefixtures("no_process_left")

MODEL = "/v2/models/openclip_vit_b32"


def run(experiment: Experiment, out: Path) -> RunState:
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE)


def native(label: str, **settings: str) -> ArmRequest:
    own = {name.replace("_", "-"): value for name, value in settings.items()}
    return ArmRequest(label=label, target="native", settings=own)


def single(pairs: int, requests: int = 5) -> Workload:
    return Workload(
        scenario="single", batch_size=1, concurrency=1, requests=requests, seconds=0.1, max_seconds=9.0, rounds=pairs
    )


@pytest.mark.slow
def test_20_ms_on_the_third_of_three_native_servers_are_found_and_the_other_two_are_not_told_apart(
    tmp_path: Path,
) -> None:
    """All without a model, so the delay is all the difference there is; δ is a factor of 2, which noise is not."""
    out = tmp_path / "run"
    arms = [word for label in "abc" for word in (f"--{label}", "native", f"--{label}-option", "engine=null")]
    load = ("--scenarios", "single", "--payload", "uint8", "--rounds", "6", "--margin", "1", "--c-option")
    done = subprocess.run(
        [*UNWATCHED_ABSERVE, "compare", "--out", str(out), *arms, *load, "added-delay-ms=20", "--no-handicap-check"],
        capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    result = json.loads((out / "result.json").read_bytes())
    assert result["valid"], done.stdout
    leading = {(one["baseline"], one["arm"]): one for one in result["comparisons"] if one["leading"]}
    assert list(leading) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert {one["metric"] for one in leading.values()} == {"throughput"}
    assert leading["a", "b"]["verdict"] in ("no_difference", "inconclusive"), done.stdout
    assert [leading[two]["verdict"] for two in (("a", "c"), ("b", "c"))] == ["baseline_better"] * 2, done.stdout
    besides = {(one["baseline"], one["arm"]) for one in result["comparisons"] if not one["leading"]}
    assert besides == {("a", "b"), ("a", "c")}, "of the others among themselves only what ranks them is compared"
    (ranking,) = result["verdict"]["rankings"]
    assert set(ranking["order"][:2]) == {"a", "b"}
    assert (ranking["order"][2], ranking["not_separated"]) == ("c", [ranking["order"][:2]])
    assert [(one["baseline"], one["arm"]) for one in result["verdict"]["scenarios"]] == [("a", "b"), ("a", "c")]
    for name in ("summary.md", "report.html"):
        assert "A and B (not separated), then C" in (out / name).read_text()


def test_a_run_of_named_arms_stores_every_record_of_each(tmp_path: Path) -> None:
    out, names = tmp_path / "run", ("torch", "onnx-fp16", "trt")
    cold = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=1)
    concurrent = Workload(
        scenario="concurrent", batch_size=1, concurrency=4, requests=20, seconds=0.1, max_seconds=9.0, rounds=2
    )
    first, second, third = map(native, names)
    experiment = make_experiment(a=first, b=second, others=[third], workloads=(cold, single(3), concurrent), restarts=2)
    state = run(experiment, out)
    assert (state.state, state.error) == ("finished", None)
    assert_stored(out, experiment)
    assert [arm.label for arm in stored(out / "arms.json", list[ArmRecord])] == list(names)
    starts = stored(out / "cold_starts.json", list[ServerStart])
    assert sorted(start.label for start in starts) == sorted(names)
    records = blocks(out)
    assert [(r.index, r.workload, r.round, r.label, r.position, r.restart) for r in records] == [
        (b.index, b.workload.name, b.round, b.label, b.position, b.restart) for b in schedule(experiment)
    ]
    assert all(record.complete and record.errors == 0 for record in records)
    assert all(earlier.window_end_ns <= later.window_start_ns for earlier, later in pairwise(records))
    result = analyse(out)
    published(result).write(out)
    assert {(one.label, one.workload) for one in result.summaries} == {
        (name, workload) for name in names for workload in ("single", "concurrent(4)")
    }
    page = (out / "report.html").read_text()
    assert all(name in page for name in names)


@pytest.mark.parametrize("fault", ["wrong", "wrong_batches"])
def test_parity_names_the_arm_that_answers_differently(tmp_path: Path, fault: str) -> None:
    out = tmp_path / "run"
    state = run(make_experiment(a=native("torch"), b=native("onnx"), others=[native("trt", **{fault: "true"})]), out)
    assert state.state == "failed"
    assert state.error is not None
    assert "their speed is not compared: trt: " in state.error
    assert "onnx" not in state.error
    cases = stored(out / "parity.json", ParityRecord).cases
    assert {case.label for case in cases if not case.ok} == {"trt"}
    assert {case.label for case in cases if case.kind == "reference"} == {"onnx", "trt"}
    assert {case.label for case in cases if case.kind == "alone"} == {"torch", "onnx", "trt"}
    assert blocks(out) == []


def test_an_arm_that_serves_another_model_is_named(tmp_path: Path) -> None:
    lies = tmp_path / "lies.json"
    tensor = {"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}
    inputs = [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 32, 32]}]
    lies.write_text(json.dumps({MODEL: (json.dumps({"inputs": inputs, "outputs": [tensor]}), 200, 0)}))
    state = run(make_experiment(others=[native("c", lies=str(lies))]), tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert "the arms do not serve the same model" in state.error
    assert "c has pixel_values (FP32) → logits" in state.error
    assert "b has" not in state.error


def test_an_arm_that_does_not_start_is_named_and_the_others_are_stopped(tmp_path: Path) -> None:
    state = run(make_experiment(others=[native("c", crash="true")]), tmp_path / "run")
    assert state.state == "failed"
    assert state.error is not None
    assert "native with crash: the server ended with exit status 3" in state.error


@pytest.mark.slow
def test_rounds_go_on_until_every_arm_is_decided(tmp_path: Path) -> None:
    """C is far slower, which is soon seen; that A and B are alike takes longer, and C runs along until then."""
    out = tmp_path / "run"
    experiment = make_experiment(
        others=[native("c", delay_ms="15")], workloads=(single(2, 20),), until_decided=True, time_limit_minutes=5.0,
        equivalence_margin=1.0,
    )  # fmt: skip
    assert run(experiment, out).error is None
    result = analyse(out)
    against = {one.arm: one for one in result.comparisons if one.leading and one.baseline == "a"}
    assert (against["b"].verdict, against["c"].verdict) == ("no_difference", "baseline_better")
    assert against["b"].pairs == against["c"].pairs
    assert result.stopping is not None
    assert (result.stopping.ended_by, result.stopping.undecided) == ("decided", ())


@pytest.mark.slow
def test_each_arm_has_its_own_causes_beside_the_baseline(tmp_path: Path, fake_url: Callable[..., str]) -> None:
    """C waits 40 ms in its queue; A and B are somebody else's and do not wait."""
    out = tmp_path / "run"
    a, b = (ArmRequest(label=label, target=fake_url("--max-queue-delay-us", "0")) for label in "ab")
    experiment = make_experiment(
        a=a, b=b, others=[native("c", max_queue_delay_us="40000")], workloads=(single(3, 8),), explain=True,
        equivalence_margin=0.3,
    )  # fmt: skip
    state = run(experiment, out)
    assert (state.state, state.error) == ("finished", None)
    done = msgspec.json.decode((out / "causes.json").read_bytes(), type=Explanation).done
    assert [(one.cause, one.label) for one in done] == [("queue_delay", "c"), ("compute", "c")]
    for one in done:
        labels = sorted(block.label for block in blocks(out / one.folder))
        assert labels == ["as-is"] * 3 + ["without"] * 3
    result = analyse(out)
    causes = {(one.baseline, one.arm): one for one in result.of(CausesFound).workloads}
    assert list(causes) == [("a", "b"), ("a", "c")]
    assert causes["a", "c"].slower == "c"
    queue = next(cause for cause in causes["a", "c"].causes if cause.name == "queue_delay")
    assert [(one.label, one.changed) for one in queue.effects] == [("c", "max-queue-delay-us 40000 → 0")]
    assert queue.difference_ms is not None
    assert queue.difference_ms > 20.0
    assert not any(effect.label == "c" for cause in causes["a", "b"].causes for effect in cause.effects)
