"""When the load of a start of the servers must end, by what the experiment says about its length."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.context import GPU_CONTROL_SECONDS, RunContext
from loadgen.measure.gpu_recording import GpuRecording
from loadgen.measure.planning import plan_experiment
from loadgen.measure.progress import RunProgress
from loadgen.records.store import RunStore


def context_of(tmp_path: Path, **settings: Any) -> RunContext:
    """The run context of one comparison without cold starts, which would follow the load."""
    ((_, experiment),) = plan_experiment(ExperimentSettings.model_validate({"scenarios": ["single"], **settings})).runs
    return RunContext(experiment, RunStore(tmp_path / "run"), RunProgress(), (), ("no-such-sampler",))


def seconds_left(context: RunContext) -> float:
    return context.load_deadline() - monotonic()


def test_the_time_since_the_start_of_the_run_counts(tmp_path: Path) -> None:
    context = context_of(tmp_path, minutes=5.0)
    context.began_s -= 60.0
    assert seconds_left(context) == pytest.approx(240.0, abs=1.0)
    context.began_s -= 600.0
    assert seconds_left(context) == pytest.approx(0.0, abs=1.0)


def test_time_is_left_for_the_checks_and_for_the_control_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path, minutes=5.0)
    context.forecast.checks_s = 20.0
    monkeypatch.setattr(GpuRecording, "running", True)
    assert seconds_left(context) == pytest.approx(300.0 - 20.0 - GPU_CONTROL_SECONDS, abs=1.0)


@pytest.mark.parametrize(("restart", "seconds"), [(0, 100.0), (1, 150.0), (2, 300.0)])
def test_restarts_share_what_is_left(tmp_path: Path, restart: int, seconds: float) -> None:
    context = context_of(tmp_path, minutes=5.0, restarts=3)
    context.restart = restart
    assert seconds_left(context) == pytest.approx(seconds, abs=1.0)


def test_until_decided_the_limit_is_of_the_load_alone(tmp_path: Path) -> None:
    context = context_of(tmp_path, until="decided", time_limit=2.0)
    context.began_s -= 600.0
    context.forecast.checks_s = 20.0
    assert seconds_left(context) == pytest.approx(120.0, abs=1.0)
