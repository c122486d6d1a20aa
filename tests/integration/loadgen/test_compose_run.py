"""A whole run on a stack whose containers are scripted: fake servers as processes, no Docker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import loadgen.launch.compose as compose
from loadgen.findings.cold_start import ColdStartsFound
from loadgen.launch.compose import LogLine
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import PortReservation
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.probes import ContainerStart, ServerStart
from loadgen.records.run import ArmRequest, RunState, Workload
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE, FAKE_ABSERVE, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")
MODEL = "openclip_vit_b32"
COLD = Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=2)
SINGLE = Workload(scenario="single", batch_size=1, concurrency=1, requests=5, seconds=0.1, max_seconds=5.0, rounds=2)
CACHED = ("stop", "start", "stop")
UNCACHED = ("start", "empty caches", "stop", "start", "stop")


class ScriptedContainer:
    """A container as `ServiceContainer` shows it, around one fake server. `said` is what was asked of the engine."""

    image = "fake:1 sha256:0"
    command = ("fake",)

    def __init__(self, service: str, model: str, also: str = "", *, inside: bool = True) -> None:
        self.service = self.name = service
        self.models = ("--model", model, *(("--also", also) if also else ()))
        self.inside = inside
        self.said: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at_ns = 0
        reservation = PortReservation(1)
        (self.port,) = reservation.ports
        reservation.release()
        self.start()
        self.said.clear()

    def start(self) -> None:
        self.said.append("start")
        self.started_at_ns = time.time_ns()
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE), "--http-port", str(self.port), *self.models], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self, grace_s: int) -> None:
        self.said.append("stop")
        if self.process is not None:
            self.process.terminate()
            self.process.wait(grace_s)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    exit_code = restarts = 0

    def status(self) -> str:
        return "running" if self.process is not None and self.process.poll() is None else "exited"

    def execute(self, *argv: str) -> tuple[int, str]:
        self.said.append("empty caches" if "-delete" in argv[-1] else " ".join(argv))
        return 0, ""

    def addresses(self, port: int) -> tuple[str | None, str | None]:
        address = f"127.0.0.1:{self.port}"
        return (address, None) if self.inside else (None, address)

    def created_process_ns(self) -> int:
        return self.started_at_ns + 1_000

    def log_since(self, wall_s: float) -> list[LogLine]:
        texts = ("hello", "engine imported", "weights loaded", "engine ready")
        return [(self.started_at_ns + 2_000 + 1_000 * n, text) for n, text in enumerate(texts)]

    def last_words(self) -> str:
        return "nothing"

    def cpu_ns(self) -> int:
        return time.process_time_ns()

    def main_pid(self) -> int | None:
        return None if self.process is None else self.process.pid


Stack = dict[str, ScriptedContainer]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Both services; Triton's model is called as its ONNX backend's is on a GPU. With "both", TensorRT's too."""
    asked = getattr(request, "param", True)
    also = f"{MODEL}_tensorrt" if asked == "both" else ""
    containers = {
        "native": ScriptedContainer("native", MODEL),
        "triton": ScriptedContainer("triton", f"{MODEL}_onnx", also, inside=bool(asked)),
    }

    def find(service: str, project: str) -> ScriptedContainer:
        if project != "mine":
            raise DeploymentError(f"no container of the service {service} in the compose project {project}")
        return containers[service]

    monkeypatch.setattr(compose, "find_container", find)
    yield containers
    for container in containers.values():
        container.stop(10)


def run(out: Path, *workloads: Workload, project: str = "mine", **arms: Any) -> RunState:
    experiment = make_experiment(workloads=workloads, deployment="compose", compose_project=project, **arms)
    return run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE)


def test_a_run_on_a_stack_takes_cold_starts_apart_and_leaves_it_running(tmp_path: Path, stack: Stack) -> None:
    state = run(tmp_path, COLD, SINGLE)
    assert (state.state, state.error) == ("finished", None)
    starts = msgspec.json.decode((tmp_path / "container_cold_starts.json").read_bytes(), type=list[ContainerStart])
    assert sorted((s.label, s.caches, s.repetition) for s in starts) == [
        (label, caches, n) for label in "ab" for caches, n in (("cached", 0), ("cached", 1), ("uncached", 0))
    ]
    for start in starts:
        assert start.error is None
        assert start.started_ns is not None
        assert start.ready_ns is not None
        assert start.first_answer_ns is not None
        names = ["process", "imported", "weights_loaded", "engine_ready"]
        assert [start.milestones_ns[name] for name in names] == sorted(start.milestones_ns[name] for name in names)
        assert start.started_ns < start.milestones_ns["process"] < start.ready_ns < start.first_answer_ns
        assert list(start.batch_answers_ns) == [1, 8]
    compared = msgspec.json.decode((tmp_path / "cold_starts.json").read_bytes(), type=list[ServerStart])
    cached = [s for s in starts if s.caches == "cached"]
    assert [(s.label, s.repetition, s.ready_ns) for s in compared] == [
        (s.label, s.repetition, s.ready_ns) for s in cached
    ]
    for container in stack.values():
        assert container.said == ["stop", *CACHED, *CACHED, *UNCACHED, "start"]
        assert container.status() == "running"

    result = analyse(tmp_path)
    assert {c.workload for c in result.comparisons if c.ratio} == {"cold-start", "single"}
    assert [arm.in_effect.get("precision") for arm in result.arms] == ["fp32", "fp32"]
    same_model = next(check for check in result.checks if check.name == "same_model")
    assert same_model.ok, same_model.detail
    assert len(result.of(ColdStartsFound).containers) == 6


def test_without_cold_starts_no_container_is_touched(tmp_path: Path, stack: Stack) -> None:
    state = run(tmp_path, SINGLE)
    assert (state.state, state.error) == ("finished", None)
    assert [container.said for container in stack.values()] == [[], []]
    assert not (tmp_path / "container_cold_starts.json").exists()


@pytest.mark.parametrize("stack", [False], indirect=True)
def test_arms_that_are_reached_by_different_ways_are_not_compared(tmp_path: Path, stack: Stack) -> None:
    state = run(tmp_path, SINGLE)
    assert state.state == "failed"
    assert state.error is not None
    assert "reached in different ways" in state.error
    assert [container.said for container in stack.values()] == [[], []]


def test_a_stack_that_is_not_there_is_one_sentence(tmp_path: Path, stack: Stack) -> None:
    state = run(tmp_path, SINGLE, project="yours")
    assert state.state == "failed"
    assert state.error == "no container of the service native in the compose project yours"


@pytest.mark.parametrize("stack", ["both"], indirect=True)
def test_three_arms_are_the_native_server_and_both_models_of_one_triton(tmp_path: Path, stack: Stack) -> None:
    third = ArmRequest(label="c", target="triton", settings={"backend": "tensorrt"})
    state = run(tmp_path, COLD, SINGLE, b_settings={"backend": "onnxruntime"}, others=[third])
    assert (state.state, state.error) == ("finished", None)
    result = analyse(tmp_path)
    assert {(one.arm, one.workload) for one in result.comparisons if one.ratio} >= {
        (label, scenario) for label in "bc" for scenario in ("cold-start", "single")
    }
    onnx, tensorrt = "Triton with backend onnxruntime", "Triton with backend tensorrt"
    shared = next(check for check in result.checks if check.name == "shared_server")
    assert (shared.ok, shared.severity, shared.value) == (False, "informs", f"{onnx}, {tensorrt}")
    starts = msgspec.json.decode((tmp_path / "cold_starts.json").read_bytes(), type=list[ServerStart])
    beside = {start.label: str(start.conditions).partition("the other servers stopped")[2] for start in starts}
    there = "loaded in the same container"
    assert beside == {"a": "", "b": f", {tensorrt} {there}", "c": f", {onnx} {there}"}
    assert all(container.status() == "running" for container in stack.values())


@pytest.mark.parametrize("stack", ["both"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "choose one with an option of that arm, backend=onnxruntime or backend=tensorrt"),
        ({"backend": "onnxruntime"}, None),
    ],
)
def test_an_arm_on_a_triton_with_both_models_names_one(
    tmp_path: Path, stack: Stack, settings: dict[str, str], said: str | None
) -> None:
    state = run(tmp_path, SINGLE, b_settings=settings)
    assert state.state == ("failed" if said else "finished")
    assert (said or "") in (state.error or "")


def test_a_backend_that_the_stack_does_not_serve_is_named(tmp_path: Path, stack: Stack) -> None:
    state = run(tmp_path, SINGLE, b_settings={"backend": "tensorrt"})
    assert state.error is not None
    assert f"triton has no model {MODEL}_tensorrt for backend=tensorrt, but it serves {MODEL}_onnx; set" in state.error
