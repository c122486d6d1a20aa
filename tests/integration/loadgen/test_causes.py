"""Ablations on running servers: their effects are measured, causes that cannot be removed are reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loadgen.findings.causes import CausesFound, Explanation
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Workload
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")


@pytest.mark.slow
def test_a_cause_is_removed_and_the_rest_is_reported_as_untested(tmp_path: Path, fake_url: Callable[..., str]) -> None:
    """B waits 40 ms in its queue and A does not; abserve did not start A, and neither server offers shared memory."""
    workload = Workload(
        scenario="single", batch_size=1, concurrency=1, requests=8, seconds=0.0, max_seconds=9.0, rounds=3
    )
    a = ArmRequest(label="a", target=fake_url("--max-queue-delay-us", "0"))
    b = ArmRequest(label="b", target="triton", settings={"max-queue-delay-us": "40000"})
    experiment = make_experiment(workloads=(workload,), a=a, b=b, explain=True, equivalence_margin=0.001)
    state = run_experiment(experiment, tmp_path / "run", RunProgress(), abserve=FAKE_ABSERVE)
    assert (state.state, state.error) == ("finished", None)
    stored = msgspec.json.decode((tmp_path / "run" / "causes.json").read_bytes(), type=Explanation)
    assert stored.workloads == ("single",)
    assert [(one.cause, one.label) for one in stored.done] == [
        ("queue_delay", "b"),
        ("compute", "b"),
    ]
    untested = {(one.cause, one.label): one for one in stored.untested}
    assert untested["queue_delay", "a"].moot
    assert "404" in untested["transfer", "a"].reason
    assert "the arm without it" in untested["transfer", "a"].reason
    assert "404" in untested["transfer", "b"].reason
    assert "did not start" in untested["compute", "a"].reason
    for one in stored.done:
        assert len(list((tmp_path / "run" / one.folder / "blocks").glob("*.json"))) == 6
    result = analyse(tmp_path / "run")
    (causes,) = result.of(CausesFound).workloads
    queue = next(cause for cause in causes.causes if cause.name == "queue_delay")
    (effect,) = queue.effects
    assert (effect.label, effect.changed, effect.pairs) == ("b", "max-queue-delay-us 40000 → 0", 3)
    assert effect.saved_ms > 20.0
    assert causes.slower == "b"
    assert any("Not tested: payload transfer" in note for note in causes.notes)
    (scenario,) = result.verdict.scenarios
    assert scenario.reasons[0] == causes.sentence
    assert (tmp_path / "run" / "conditions.json").exists()


def compare(out: Path, *options: str) -> str:
    command = [sys.executable, "-P", "-m", "loadgen.entry", "compare", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False).stdout


PLANTED = (
    "--a", "triton", "--b", "triton", "--a-option", "engine=null", "--b-option", "engine=null",
    "--a-option", "max-queue-delay-us=0", "--b-option", "max-queue-delay-us=60000",
    "--a-payload", "fp32", "--b-payload", "uint8",
)  # fmt: skip


@pytest.mark.benchmark
@pytest.mark.timeout(600)
def test_a_planted_queue_delay_and_a_planted_payload_are_found_on_their_arms(tmp_path: Path) -> None:
    """60 ms of queue delay on B, four times the bytes on A: opposite causes of one difference.

    Both are Triton, which holds every batch for all of its delay; the native server waits only where that saves time.
    """
    out = tmp_path / "run"
    said = compare(out, *PLANTED, "--scenarios", "batched", "--batch-sizes", "24", "--rounds", "8", "--explain")
    result = json.loads((out / "result.json").read_bytes())
    assert result["verdict"]["sentence"].startswith("No winner"), said
    (causes,) = result["studies"]["causes"]["workloads"]
    found = {cause["name"]: cause for cause in causes["causes"] if cause["found"]}
    (queue,) = found["queue_delay"]["effects"]
    assert queue["label"] == "b"
    assert queue["ci95_ms"][1] > 57.0
    assert 54.0 < queue["saved_ms"] < 90.0  # the delay, and a server that wakes up after each, late on a busy machine
    (payload,) = found["payload"]["effects"]
    assert payload["label"] == "a"
    assert payload["saved_ms"] > 0.0
    assert found["payload"]["share"] < 0.0 < found["queue_delay"]["share"]
    assert causes["causes"][0]["name"] == "queue_delay"
    assert "queue delay of Triton" in causes["sentence"]
    assert re.search(r"payload format of \S+ \(fp32 → uint8\)", causes["sentence"])
    assert causes["sentence"] in " ".join(said.split())
    for name in ("summary.md", "report.html"):
        text = (out / name).read_text()
        assert "Causes of the difference in batched(24)" in text
        assert "max-queue-delay-us 60000 → 0" in text
