"""What is concluded of a run on a compose stack, whose settings nobody asked for here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.experiment.plan import AS_SERVED
from loadgen.records.checks import Check
from loadgen.report.sections.conditions import experiment_rows
from loadgen.verdict.result import Result, analyse
from tests.golden.synthetic_run import Plan, write_run


def stack_run(folder: Path, a: dict[str, Any], b: dict[str, Any], deployment: str = "compose") -> Result:
    """The synthetic run, as if on a stack whose servers tell this."""
    write_run(folder, Plan(pairs=2))
    experiment = json.loads((folder / "experiment.json").read_text())
    if deployment == "compose":
        experiment |= {"deployment": "compose", "compose_project": "mine", "weights": AS_SERVED}
    (folder / "experiment.json").write_text(json.dumps(experiment))
    arms = json.loads((folder / "arms.json").read_text())
    for arm, told in zip(arms, (a, b), strict=True):
        arm["in_effect"] = {k: v for k, v in arm["in_effect"].items() if k not in ("weights", "model")} | told
    (folder / "arms.json").write_text(json.dumps(arms))
    return analyse(folder)


def check(result: Result, name: str) -> Check:
    return next(check for check in result.checks if check.name == name)


@pytest.mark.parametrize(
    ("a", "b", "ok", "said"),
    [
        ({}, {}, None, "PyTorch (native) and Triton do not report the weights"),
        ({"weights": "laion2b"}, {}, None, "weights: laion2b; Triton does not report the weights"),
        ({"weights": "laion2b"}, {"weights": "laion2b"}, True, "weights: laion2b"),
        ({"weights": "laion2b"}, {"weights": "random:3"}, False, "random (random:3)"),
    ],
)
def test_the_weights_are_those_that_the_servers_tell(
    tmp_path: Path, a: dict[str, Any], b: dict[str, Any], ok: bool | None, said: str
) -> None:
    judged = check(stack_run(tmp_path, a, b), "trained_weights")
    assert judged.ok is ok
    assert said in judged.detail


@pytest.mark.parametrize(("deployment", "ok"), [("compose", True), ("embedded", False)])
def test_a_backends_variant_is_the_same_model_in_a_stack_alone(tmp_path: Path, deployment: str, ok: bool) -> None:
    told = {"model": "openclip_vit_b32"}, {"model": "openclip_vit_b32_tensorrt"}
    assert check(stack_run(tmp_path, *told, deployment), "same_model").ok is ok


def test_another_model_is_another_one_in_a_stack_too(tmp_path: Path) -> None:
    told = {"model": "openclip_vit_b32"}, {"model": "openclip_vit_l14_onnx"}
    assert check(stack_run(tmp_path, *told), "same_model").ok is False


def test_the_report_says_whose_settings_they_are(tmp_path: Path) -> None:
    rows = dict(experiment_rows(stack_run(tmp_path, {}, {})))
    assert rows["deployment"] == "the compose stack mine, with its own settings"
    assert rows["weights"] == rows["threads"] == "as in the stack's .env"
