"""Searches through real sockets, on servers whose capacity is programmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.findings.rate_search import RatesFound
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Workload
from loadgen.report.files import published
from loadgen.verdict.result import Result, analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("no_process_left")]


def run(folder: Path, workload: Workload, delay_ms: int, *slots: int) -> Result:
    """Every arm is the fake server: as fast as the others, and so many requests at a time."""
    a, b, *others = (
        ArmRequest(label=label, target="native", settings={"delay-ms": str(delay_ms), "slots": str(number)})
        for label, number in zip("abc", slots, strict=False)
    )
    experiment = make_experiment(workloads=(workload,), a=a, b=b, others=others)
    state = run_experiment(experiment, folder, RunProgress(), abserve=FAKE_ABSERVE)
    assert state.state == "finished", state
    result = analyse(folder)
    published(result).write(folder)
    return result


def test_a_search_finds_half_the_rate_on_half_the_server(tmp_path: Path) -> None:
    """A answers up to 8 / 20 ms = 400 a second, B 200; timers make both a little slower, other programs more."""
    workload = Workload(
        scenario="slo", batch_size=1, concurrency=96, requests=459, seconds=2.0, max_seconds=30.0, rounds=1,
        arrivals="poisson", latency_bound_ms=200.0,
    )  # fmt: skip
    result = run(tmp_path / "run", workload, 20, 8, 4)
    assert [one.ended for one in result.of(RatesFound).rates] == ["found"] * 2
    rates = {one.label: one.rate_per_s or 0.0 for one in result.of(RatesFound).rates}
    assert rates["a"] <= 440.0
    assert rates["b"] <= 220.0
    (comparison,) = result.comparisons
    assert comparison.metric == "slo_rate"
    assert comparison.ratio is not None
    assert 0.2 <= comparison.ratio <= 0.8
    failed = [trial for trial in result.of(RatesFound).trials if not trial.held]
    assert any(trial.requests < trial.planned for trial in failed), "no failing trial was ended early"
    assert "The highest rate within the bound" in (tmp_path / "run" / "summary.md").read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="slo-trials"' in page
