"""The files that deploy a tuning's winners do what they are for: in a shell, in compose, in compare and in Triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from loadgen.base.child_process import ABSERVE
from loadgen.base.documents import indented, kind_of
from loadgen.experiment.settings import ArmSettings, ExperimentSettings
from loadgen.launch.embedded import PortReservation
from loadgen.tune.deploy import compose_override, deployed_files, no_compose_file, winner, write_deployment
from loadgen.tune.files import published, read_tuning, stored_outcome
from loadgen.tune.outcome import TuningOutcome, outcome_of
from loadgen.verdict.result import Result, encode_result
from tests.synthetic_tuning import final, tuning
from tests.unit.triton.test_config import parse

ROOT = Path(__file__).resolve().parents[3]
BEST = {
    "native-3": {"engine": "null", "max-batch-size": "16", "max-queue-delay-us": "500"},
    "triton-2": {"engine": "null", "max-batch-size": "8", "max-queue-delay-us": "2000"},
}
"""An engine that executes nothing needs no exported file."""


def with_settings(result: Result) -> Result:
    """The result of a final whose arms have these options, with the settings that asked for it."""
    arms = tuple(
        msgspec.structs.replace(arm, settings=BEST.get(arm.label, {"engine": "null"})) for arm in result.experiment.arms
    )
    asked = ExperimentSettings(
        arms={arm.label: ArmSettings(target=arm.target, options=arm.settings) for arm in arms},
        model="openclip_vit_b32",
        scenarios=("concurrent",),
        minutes=4.0,
        handicap_check=False,
    )
    experiment = msgspec.structs.replace(
        result.experiment, arms=arms, settings=asked.content(), settings_sha256=asked.sha256()
    )
    return msgspec.structs.replace(result, experiment=experiment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def outcome(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TuningOutcome:
    """Of a tuning in the folder, whose deployment is written."""
    result = with_settings(final(tmp_path_factory.mktemp("run")))
    (folder / "final").mkdir()
    (folder / "final/result.json").write_bytes(encode_result(result))
    (folder / "tuning.json").write_bytes(indented(tuning()))
    outcome = outcome_of(tuning(), result)
    assert write_deployment(folder, outcome) == ()
    return outcome


def launch_plan(script: Path) -> dict[str, Any]:
    """What the script's command would start."""
    ports = PortReservation(3)
    try:
        http, grpc, metrics = map(str, ports.ports)
        more = ["--metrics-port", metrics] if script.stem == "triton" else []
        work = ["--work-dir", str(script.parent.parent / "work")] if script.stem == "triton" else []
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [script, "--http-port", http, "--grpc-port", grpc, *more, *work, "--print-launch"],
            capture_output=True, check=False, env=environment,
        )  # fmt: skip
    finally:
        ports.release()
    assert done.returncode == 0, done.stderr.decode()
    plan: dict[str, Any] = json.loads(done.stdout.strip().rpartition(b"\n")[2])
    return plan


def test_the_native_command_starts_the_best(folder: Path, outcome: TuningOutcome) -> None:
    plan = launch_plan(folder / "deploy/native.sh")
    settings = json.loads(plan["argv"][-1])
    assert (settings["engine"], settings["max_batch_size"], settings["max_queue_delay_us"]) == ("null", 16, 500)
    assert outcome.targets[0].best is not None


@pytest.mark.triton
def test_the_triton_command_serves_the_repository_that_is_written(folder: Path, outcome: TuningOutcome) -> None:
    """Which is the one that the final had: the same options lay it out."""
    launch_plan(folder / "deploy/triton.sh")
    (written,) = (folder / "deploy/triton/models").glob("*/config.pbtxt")
    config = parse(written.read_text())
    assert config.max_batch_size == 8
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert (folder / "work/models" / written.parent.name / "config.pbtxt").read_text() == written.read_text()
    assert [path.name for path in (folder / "deploy/triton").iterdir()] == ["models"]


def test_compare_takes_the_experiment(folder: Path, outcome: TuningOutcome) -> None:
    assert outcome.final is not None
    done = subprocess.run(
        [*ABSERVE, "compare", str(folder / "deploy/experiment.yaml"), "--print-experiment"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = yaml.safe_load(done.stdout)
    assert again == outcome.final.experiment.settings
    assert again["arms"]["triton-2"]["options"]["max-batch-size"] == "8"


def test_the_containers_plan_the_best(folder: Path, outcome: TuningOutcome, tmp_path: Path) -> None:
    """The service that fills the volume gets these variables beside those of docker-compose.yml."""
    assert outcome.final is not None
    stack = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    services = yaml.safe_load((folder / "deploy/compose.override.yml").read_text())["services"]
    assert set(services) == {"models", "models-cpu"} <= set(stack)
    added = services["models-cpu"]["environment"]
    assert services["models"]["environment"] == added
    environment = os.environ | {"ABSERVE_MODELS_ROOT": str(tmp_path)} | added
    specification = importlib.util.spec_from_file_location("model_volume", ROOT / "docker/model_volume.py")
    assert specification is not None
    assert specification.loader is not None
    volume = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(volume)
    ports = PortReservation(2)
    try:
        http, grpc = map(str, ports.ports)
        options = {"model": added["ABSERVE_MODELS_MODEL"], "weights": added["ABSERVE_MODELS_WEIGHTS"]}
        options |= {"http-port": http, "grpc-port": grpc}
        volume._write_launch_plan(tmp_path, "native", options, environment)
    finally:
        ports.release()
    settings = json.loads(json.loads((tmp_path / "launch/native.json").read_text())["argv"][-1])
    assert (settings["engine"], settings["max_batch_size"], settings["max_queue_delay_us"]) == ("null", 16, 500)
    assert added["ABSERVE_TRITON_MAX_BATCH_SIZE"] == "8"


def test_the_winner_is_put_behind_tls_and_keys(folder: Path, outcome: TuningOutcome) -> None:
    assert winner(outcome, ["native", "triton"]) == "triton"
    services = yaml.safe_load((folder / "deploy/exposed/compose.yml").read_text())["services"]
    command = services["server"]["command"]
    assert command[:3] == ["abserve", "serve", "triton"]
    assert command[command.index("--max-queue-delay-us") + 1] == BEST["triton-2"]["max-queue-delay-us"]
    assert services["server"]["deploy"]["resources"] == {"limits": {"cpus": "2", "memory": "16G", "pids": 4096}}
    *_, deployment = list(yaml.safe_load_all((folder / "deploy/exposed/kubernetes.yml").read_text()))[:2]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["command"] == command


def test_what_compose_cannot_serve_gets_no_file(tmp_path: Path) -> None:
    checkpoint = tmp_path / "weights.pt"
    checkpoint.touch()
    native = {"model": "openclip_vit_b32", "weights": "random:0", "precision": "fp32"}
    assert no_compose_file({"native": native, "triton": native}) is None
    for options, why in (
        ({"native": native | {"model": "language:demo"}}, "language"),
        ({"native": native | {"model": "model.py:build"}}, "model.py:build"),
        ({"native": native | {"weights": str(checkpoint)}}, str(checkpoint)),
        ({"native": native, "triton": native | {"precision": "fp16"}}, "precision"),
        ({"fastapi": native}, "native and triton"),
    ):
        reason = no_compose_file(options)
        assert reason is not None
        assert why in reason


def test_the_override_says_what_the_image_of_nvidia_ignores() -> None:
    best = {"triton": {"model": "m", "backend": "onnxruntime", "max-batch-size": "4", "queue-size": "64"}}
    best["triton"] |= {"tritonserver": "/opt/here", "artefacts": "/data/here"}
    text = compose_override(best)
    assert "here" not in text, "what is on this machine alone"
    assert "takes nothing of: queue-size\n" in text
    environment = yaml.safe_load(text)["services"]["models"]["environment"]
    assert environment["ABSERVE_MODELS_TRITON_BACKENDS"] == "onnxruntime"


def test_an_invalid_final_deploys_nothing_but_can_be_repeated(outcome: TuningOutcome, tmp_path: Path) -> None:
    """Its winner may give wrong answers."""
    assert outcome.final is not None
    invalid = outcome_of(tuning(), msgspec.structs.replace(outcome.final, valid=False))
    (problem,) = write_deployment(tmp_path, invalid)
    assert "not valid" in problem
    assert [path.name for path in (tmp_path / "deploy").iterdir()] == ["experiment.yaml"]


def test_the_reports_are_made_from_what_is_stored(folder: Path, outcome: TuningOutcome) -> None:
    assert kind_of(folder) == "tuning"
    stored = stored_outcome(folder, read_tuning(folder))
    assert stored.headline == outcome.headline
    report, summary = published(folder, stored).write(folder)
    for name in deployed_files(folder):
        assert (folder / name).exists()
        assert f"]({name})" in summary.read_text()
        assert f'href="{name}"' in report.read_text()
    assert "abserve serve triton --model openclip_vit_b32" in summary.read_text()
