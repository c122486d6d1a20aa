"""The control run on the CPU, whatever the experiment sets for the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.planning import plan_experiment
from loadgen.measure.preparation import make_deployment
from loadgen.measure.probes.gpu import control_variant
from loadgen.records.store import RunStore


@pytest.mark.parametrize("option", ["precision", "--precision"])
def test_the_control_computes_in_fp32_in_the_default_mode(tmp_path: Path, option: str) -> None:
    settings = ExperimentSettings(
        arms={"a": {"target": "native", "options": {option: "fp16", "mode": "graph", "threads": "2"}}, "b": "triton"},
        precision="fp16",
    )
    experiment = plan_experiment(settings).runs[0][1]
    control = control_variant(experiment, experiment.baseline).request(experiment.baseline)
    assert control.settings == {"threads": "2", "precision": "fp32", "device": "cpu"}
    deployment = make_deployment(control, experiment, RunStore(tmp_path), tmp_path)
    assert deployment._options["precision"] == "fp32"  # type: ignore[attr-defined]
