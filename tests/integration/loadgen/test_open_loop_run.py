"""Whole runs of open loops on fake servers: the same moments for all arms, and an end whatever an arm can do."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from loadgen.experiment.schedule import due_offsets_ns, schedule_seed
from loadgen.measure.progress import RunProgress
from loadgen.measure.runner import run_experiment
from loadgen.records.run import ArmRequest, Arrivals, BlockRecord, Workload
from loadgen.verdict.result import analyse
from tests.integration.loadgen.conftest import FAKE_ABSERVE, blocks, make_experiment

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.slow]


def open_workload(
    rate: float, *, seconds: float, connections: int, pairs: int, arrivals: Arrivals = "poisson"
) -> Workload:
    return Workload(
        scenario="open", batch_size=1, concurrency=connections, requests=1, seconds=seconds, max_seconds=seconds,
        rounds=pairs, arrivals=arrivals, rate_per_s=rate,
    )  # fmt: skip


def offsets(out: Path, record: BlockRecord) -> list[int]:
    due = np.sort(np.load(out / record.samples)["intended_ns"])
    return (due - due[0]).tolist()


@pytest.mark.parametrize("processes", [1, 2])
def test_all_arms_of_a_round_get_the_same_moments_and_every_round_others(tmp_path: Path, processes: int) -> None:
    out = tmp_path / "run"
    workload = open_workload(40.0, seconds=1.0, connections=16, pairs=2)
    third = ArmRequest(label="c", target="native")
    experiment = make_experiment(workloads=(workload,), others=[third], seed=6, processes=processes)
    assert run_experiment(experiment, out, RunProgress(), abserve=FAKE_ABSERVE).state == "finished"
    records = {(record.round, record.label): record for record in blocks(out)}
    for pair in (0, 1):
        planned = due_offsets_ns("poisson", 40.0, 40, schedule_seed(6, workload.name, pair)).tolist()
        assert [offsets(out, records[pair, label]) for label in "abc"] == [planned] * 3
        assert records[pair, "a"].offered == 40
        assert len(records[pair, "b"].workers) == (0 if processes == 1 else 2)
    assert offsets(out, records[0, "a"]) != offsets(out, records[1, "a"])


def test_an_arm_that_cannot_keep_up_ends_in_time_with_its_capacity(tmp_path: Path) -> None:
    """Four connections and 200 ms give 20 a second where 80 are asked for, so most is never sent."""
    out = tmp_path / "run"
    workload = open_workload(80.0, seconds=2.0, connections=4, pairs=1, arrivals="constant")
    started = time.monotonic()
    state = run_experiment(
        make_experiment(workloads=(workload,), b_settings={"delay-ms": "200"}), out, RunProgress(), abserve=FAKE_ABSERVE
    )
    assert state.state == "finished"
    assert time.monotonic() - started < 60
    (slow,) = [record for record in blocks(out) if record.label == "b"]
    assert slow.complete
    assert slow.offered == 160
    assert slow.requests < 100
    result = analyse(out)
    loops = {summary.label: summary.open_loop for summary in result.summaries}
    assert loops["b"] is not None
    assert loops["b"].unsent == 160 - slow.requests
    assert 5.0 < (loops["b"].achieved_per_s or 0.0) < 21.0  # late timers only make it less
    assert "saturated at this rate: answered" in str(loops["b"].saturation)
    assert result.comparisons[0].metric == "achieved_rate"
    assert result.comparisons[0].leading
