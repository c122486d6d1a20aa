"""Whatever a run left behind is analysed, and nothing that it did not leave is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.records.run import Workload
from loadgen.records.store import StoredRunError, read_run
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run


def test_a_killed_run_keeps_its_finished_blocks(tmp_path: Path) -> None:
    """SIGKILL in block 50: a .part file with a header that counts nothing and a cut last record."""
    write_run(tmp_path, Plan(pairs=4, state="running", cut_after=50))
    run = read_run(tmp_path)
    assert run.partial_blocks == {"samples/0050.npy.part": 37}
    result = analyse(tmp_path)
    assert not result.valid
    assert "killed" in result.verdict.failed[0]
    verdicts = {c.workload: c.verdict for c in result.comparisons if c.metric == "throughput"}
    assert verdicts["single"] == "arm_better"
    assert verdicts["concurrent(16)"] == "invalid"
    unfinished = next(c for c in result.checks if c.name == "blocks_complete" and c.scope == "workload concurrent(16)")
    assert "2 of 8 blocks" in unfinished.detail
    assert "37 requests of an unfinished block" in unfinished.detail


def test_a_run_that_ended_before_its_first_block(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2, state="failed", cut_after=0))
    for name in ("arms.json", "parity.json", "environment.json", "cold_starts.json"):
        (tmp_path / name).unlink()
    result = analyse(tmp_path)
    assert not result.valid
    assert result.blocks == ()
    assert result.parity is None
    assert {c.ratio for c in result.comparisons} == {None}
    assert any("died" in text for text in result.verdict.failed)


def test_an_interrupted_run_judges_the_workloads_that_are_whole(tmp_path: Path) -> None:
    result = analyse(write_run(tmp_path, Plan(pairs=4, state="interrupted", cut_after=50)))
    assert not result.valid
    assert result.verdict.sentence.startswith("No verdict on 1 of 8 workloads")
    assert "Triton is faster" in result.verdict.sentence


def test_only_a_cold_start(tmp_path: Path) -> None:
    workload = Workload(
        scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=3
    )
    result = analyse(write_run(tmp_path, Plan(workloads=(workload,))))
    assert result.valid
    assert result.verdict.sentence.startswith("PyTorch (native) has 1.")
    assert result.verdict.main_scenario == "cold-start"


def test_a_cold_start_does_not_stand_for_the_load_beside_it(tmp_path: Path) -> None:
    workloads = (
        Workload(scenario="cold-start", batch_size=1, concurrency=1, requests=1, seconds=0, max_seconds=60, rounds=3),
        Workload(scenario="single", batch_size=1, concurrency=1, requests=40, seconds=1, max_seconds=60, rounds=3),
    )
    verdict = analyse(write_run(tmp_path, Plan(workloads=workloads))).verdict
    assert verdict.main_scenario == "single"
    assert next(scenario for scenario in verdict.scenarios if scenario.workload == "single").reasons


def test_analysing_twice_gives_the_same(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    assert analyse(tmp_path) == analyse(tmp_path)


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoredRunError, match=r"holds no run: experiment\.json is missing"):
        analyse(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"schema": "abserve.experiment/9"}'])
def test_an_unreadable_record_is_named_and_not_skipped(tmp_path: Path, content: str) -> None:
    write_run(tmp_path, Plan(pairs=2))
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(StoredRunError, match=r"experiment\.json cannot be read"):
        analyse(tmp_path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace("{", '{"surprise":1,', 1))
    result = analyse(tmp_path)
    assert not result.valid
    assert any("surprise" in check.detail for check in result.checks if check.name == "analysed")
