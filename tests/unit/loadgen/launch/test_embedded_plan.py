"""Planning a launch has a time limit, which a screening shortens."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from loadgen.experiment.plan import SCREENING
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import EmbeddedDeployment, to_arguments
from loadgen.measure.preparation import make_deployment
from loadgen.records.store import RunStore
from tests.integration.loadgen.conftest import make_experiment


def test_a_plan_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    planner = (sys.executable, "-c", "import time; time.sleep(60)")
    deployment = EmbeddedDeployment("native", {}, tmp_path / "log", abserve=planner)
    deployment.plan_seconds = 0.2
    with pytest.raises(DeploymentError, match=r"--print-launch did not answer within 0\.2 s"):
        deployment.start()
    deployment.stop()


def test_a_screening_waits_less_for_a_plan(tmp_path: Path) -> None:
    experiment = make_experiment()
    limits = []
    for screening in (False, True):
        asked = msgspec.structs.replace(experiment, screening=screening)
        deployment = make_deployment(asked.arms[0], asked, RunStore(tmp_path / str(screening)), tmp_path)
        assert isinstance(deployment, EmbeddedDeployment)
        limits.append(deployment.plan_seconds)
    assert limits[1] == SCREENING.plan_s
    assert limits[1] < limits[0]


def test_a_switch_is_on_or_off() -> None:
    options = {"graphs": "false", "allow-shared-memory": "true", "no-eager": "", "mode": "graph"}
    assert to_arguments(options) == ("--no-graphs", "--allow-shared-memory", "--no-eager", "--mode", "graph")
