"""Planning a launch has a time limit, which a screening shortens."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from loadgen.experiment.plan import SCREENING
from loadgen.launch.deployment import DeploymentError
from loadgen.launch.embedded import EmbeddedDeployment, stages_in, to_arguments
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


@pytest.mark.parametrize(
    ("log", "stages"),
    [
        ("05:32:08.2 [info     ] start          build_s=0.55 describe_s=0.0 model=m warm_up_s=0.94", (0.55, 0.0, 0.94)),
        ("start build_s=1.5 describe_s=0.25 warm_up_s=2\nINFO: started", (1.5, 0.25, 2.0)),
        ('I 2830 python_backend.py:206] "start describe_s=0.0 build_s=0.5 warm_up_s=1.99"', (0.5, 0.0, 1.99)),
        ("start build_s=1.0 describe_s=0.1 warm_up_s=3.0\nstart build_s=2.0 warm_up_s=1.0", (2.0, 0.1, 3.0)),
    ],
)
def test_the_stages_of_a_start_are_those_of_the_log(log: str, stages: tuple[float, ...]) -> None:
    around = "[info ] ready load_s=7.06 warm_up_s=9.0\n{}\nto start load_s=1.0x, give more\n"
    assert stages_in(around.format(log)) == dict(zip(("build", "describe", "warm_up"), stages, strict=True))


def test_a_switch_is_on_or_off() -> None:
    options = {"graphs": "false", "allow-shared-memory": "true", "no-eager": "", "mode": "graph"}
    assert to_arguments(options) == ("--no-graphs", "--allow-shared-memory", "--no-eager", "--mode", "graph")
