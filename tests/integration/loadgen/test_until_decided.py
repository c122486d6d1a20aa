"""Runs that go on until they are decided, on fake servers whose difference is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.analysis.analysis import analyse
from loadgen.records.run import Cell, Experiment
from loadgen.run.progress import SilentProgress
from loadgen.run.runner import run_experiment
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")


def cell(batch_size: int, pairs: int = 2) -> Cell:
    return Cell(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=6, seconds=0, max_seconds=9, pairs=pairs
    )


def until_decided(*cells: Cell, minutes: float, b_settings: dict[str, str]) -> Experiment:
    return make_experiment(cells=cells, until_decided=True, time_limit_minutes=minutes, b_settings=b_settings)


@pytest.mark.slow
def test_a_large_difference_ends_the_run_before_the_limit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment = until_decided(cell(1), cell(2), minutes=5.0, b_settings={"delay-ms": "15"})
    assert run_experiment(experiment, out, SilentProgress(), abserve=FAKE_ABSERVE).error is None
    result = analyse(out)
    leading = [c for c in result.comparisons if c.leading]
    assert {c.verdict for c in leading} == {"a_faster"}
    assert {c.method for c in leading} == {"anytime-valid over pairs"}
    assert all(4 <= c.pairs < 40 for c in leading)
    assert (result.stopping.rule, result.stopping.ended_by) == ("until decided", "decided")
    assert result.stopping.pairs == {c.scenario: c.pairs for c in leading}
    assert "when every scenario was decided" in result.stopping.sentence
    assert result.stopping.sentence in result.verdict.caveats


def test_the_least_pairs_are_run_and_then_the_limit_ends_what_is_open(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment = until_decided(cell(1, pairs=3), minutes=1e-6, b_settings={})
    assert run_experiment(experiment, out, SilentProgress(), abserve=FAKE_ABSERVE).error is None
    result = analyse(out)
    (leading,) = [c for c in result.comparisons if c.leading]
    assert (leading.verdict, leading.pairs) == ("undecided", 3)
    assert result.stopping.ended_by == "time limit"
    assert result.stopping.undecided == ("batched(1)",)
    assert "undecided: batched(1)" in result.stopping.sentence
