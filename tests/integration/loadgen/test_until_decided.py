"""Runs whose number of rounds is not fixed, on fake servers: by time, and until they are decided."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Experiment, Workload
from loadgen.verdict.result import Result, analyse
from loadgen.verdict.verdict import Stopping
from tests.again import again
from tests.integration.loadgen.conftest import FAKE_ABSERVE, make_experiment

pytestmark = pytest.mark.usefixtures("no_process_left")


def workload(batch_size: int, pairs: int = 2) -> Workload:
    return Workload(
        scenario="batched", batch_size=batch_size, concurrency=1, requests=6, seconds=0, max_seconds=9, rounds=pairs
    )


def until_decided(*workloads: Workload, minutes: float, b_settings: dict[str, str]) -> Experiment:
    return make_experiment(workloads=workloads, until_decided=True, time_limit_minutes=minutes, b_settings=b_settings)


def analysed(out: Path) -> tuple[Result, Stopping]:
    result = analyse(out)
    assert result.stopping is not None
    return result, result.stopping


@pytest.mark.slow
def test_a_large_difference_ends_the_run_before_the_limit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment = until_decided(workload(1), workload(2), minutes=5.0, b_settings={"delay-ms": "15"})
    assert run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE).error is None
    result, stopping = analysed(out)
    leading = [c for c in result.comparisons if c.leading]
    assert {c.winner for c in leading} == {"a"}
    assert {c.method for c in leading} == {"anytime-valid over pairs"}
    assert all(4 <= c.pairs < 40 for c in leading)
    assert (stopping.rule, stopping.ended_by) == ("until decided", "decided")
    assert stopping.pairs == {c.workload: c.pairs for c in leading}
    assert "when every workload was decided" in stopping.sentence
    assert stopping.sentence in result.verdict.caveats


@again  # three pairs of equal arms are decided now and then
def test_the_least_rounds_are_run_and_then_the_limit_ends_what_is_open(tmp_path: Path) -> None:
    out = tmp_path / "run"
    experiment = until_decided(workload(1, pairs=3), minutes=1e-6, b_settings={})
    assert run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE).error is None
    result, stopping = analysed(out)
    (leading,) = [c for c in result.comparisons if c.leading]
    assert (leading.winner, leading.pairs) == (None, 3)  # invalid where the other tests keep the cores busy
    assert stopping.ended_by == "time limit"
    assert stopping.undecided == ("batched(1)",)
    assert "inconclusive: batched(1)" in stopping.sentence


@pytest.mark.parametrize("labels", ["ab", pytest.param("abc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("minutes", [1e-6, pytest.param(0.6, marks=pytest.mark.slow)])
def test_rounds_go_on_for_as_long_as_there_is_time(tmp_path: Path, minutes: float, labels: str) -> None:
    """Every scenario in each of the first rounds, each arm as often in each place, and the end when it was promised."""
    out = tmp_path / "run"
    experiment = make_experiment(
        workloads=(workload(1), workload(2)),
        minutes=minutes,
        b_settings={"delay-ms": "5"},
        others=[ArmRequest(label=label, target="native") for label in labels[2:]],
    )
    began = monotonic()
    assert run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE).error is None
    took = monotonic() - began
    result, stopping = analysed(out)
    leading = [c for c in result.comparisons if c.leading]
    pairs = {c.workload: c.pairs for c in leading}
    assert all(c.pairs == pairs[c.workload] for c in leading), "rounds are whole"
    if minutes < 0.1:
        assert set(pairs.values()) == {2}, "the least"
    else:
        assert min(pairs.values()) > 2
        assert took < 60.0 * minutes + 10.0
    assert (stopping.rule, stopping.ended_by) == ("by time", "time")
    assert "minutes allowed" in stopping.sentence
    for scenario in pairs:
        for place in range(len(labels)):
            here = [b.label for b in result.blocks if b.workload == scenario and b.position == place]
            counts = [here.count(label) for label in labels]
            assert max(counts) - min(counts) <= 1
    assert [block.index for block in result.blocks] == list(range(len(result.blocks)))
    assert all(block.complete for block in result.blocks)
