"""What is run before the load: the warm-up ends in the time of the run, and the first figure alternates the arms."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.measure import load_runner
from loadgen.measure.load_runner import LoadRunner
from loadgen.measure.progress import RunProgress
from loadgen.records.run import Workload
from tests.integration.loadgen.conftest import make_experiment

LOADS = [
    Workload(
        scenario="single" if users == 1 else "concurrent", batch_size=1, concurrency=users, requests=1, seconds=1.0,
        max_seconds=30.0, rounds=2, prompt_tokens=32, output_tokens=tokens,
    )
    for users, tokens in ((1, 128), (4, 256), (16, 256), (64, 256))
]  # fmt: skip


def warmed_up(monkeypatch: pytest.MonkeyPatch, until_s: float | None) -> tuple[dict[str, dict[str, float]], list[Any]]:
    """Arm a answers in 0.4 s however many users there are; b makes 24 tokens/s in all."""
    ran: list[Any] = []

    def unstored(_: LoadRunner, __: str, label: str, load: Workload) -> Any:
        ran.append((label, load.concurrency))
        answers_per_s = load.concurrency / 0.4 if label == "a" else 24 / (load.output_tokens or 1)
        return SimpleNamespace(requests_per_s=answers_per_s)

    monkeypatch.setattr(LoadRunner, "unstored", unstored)
    arms: Any = {label: SimpleNamespace(name=label) for label in "ab"}
    runner = LoadRunner(arms, None, None, RunProgress())  # type: ignore[arg-type]
    return runner.warm_up(LOADS, until_s), ran


def test_loads_that_outlast_the_run_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    took, ran = warmed_up(monkeypatch, monotonic() + 200.0)
    assert ran == [("a", 1), ("a", 4), ("a", 16), ("a", 64), ("b", 1), ("b", 4), ("b", 16)]
    assert took["concurrent(16)"] == {"a": pytest.approx(0.4), "b": pytest.approx(16 * 256 / 24)}
    assert took["concurrent(64)"] == {"a": pytest.approx(0.4), "b": pytest.approx(64 * 256 / 24)}


def test_without_a_limit_every_load_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    took, ran = warmed_up(monkeypatch, None)
    assert len(ran) == 8
    assert took["concurrent(64)"]["b"] == pytest.approx(64 * 256 / 24)


def test_the_first_figure_alternates_the_arms_and_is_the_ratio_of_their_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, bool]] = []

    def unstored(_: LoadRunner, __: str, label: str, load: Workload) -> Any:
        ran.append((label, load.seconds > 0.0))
        return SimpleNamespace(requests_per_s=10.0 if label == "a" else 15.0 + len(ran) / 10.0)

    monkeypatch.setattr(LoadRunner, "unstored", unstored)
    monkeypatch.setattr(load_runner, "FIRST_FIGURE_SECONDS", 0.0)
    arms: Any = {label: SimpleNamespace(name=label) for label in "ab"}
    runner = LoadRunner(arms, None, None, RunProgress())  # type: ignore[arg-type]
    experiment = make_experiment()
    (figure,) = runner.first_figure(experiment, experiment.workloads[0])
    assert ran == [("a", False), ("b", False), ("a", True), ("b", True), ("b", True), ("a", True)]
    assert (figure.baseline, figure.arm, figure.pairs) == ("a", "b", 2)
    assert figure.ratio == pytest.approx(1.545, abs=0.001)
