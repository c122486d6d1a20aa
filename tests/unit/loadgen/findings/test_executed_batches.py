"""Whether the servers merged requests, from the mean of what they executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from loadgen.findings.load import ExecutedBatches, LoadFound, analyse
from loadgen.metrics.facts import Facts
from loadgen.metrics.summaries import WorkloadSummary
from loadgen.records.store import read_run
from loadgen.verdict.result import analyse as analyse_run
from tests.golden.synthetic_run import Plan, write_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), Plan(pairs=2))


def judged(directory: Path, mean: float | None) -> ExecutedBatches:
    """The first arm's batched(4), with this mean executed batch."""

    def changed(summary: WorkloadSummary) -> WorkloadSummary:
        return msgspec.structs.replace(summary, executed_batch_mean=mean, executed_batches={})

    summaries = [changed(summary) for summary in analyse_run(directory).summaries]
    batches = analyse(Facts(read_run(directory), summaries=summaries))
    return next(entry for entry in batches.executed_batches if entry.workload == "batched(4)")


@pytest.mark.parametrize(("mean", "formed"), [(None, None), (4.0, False), (4.39, False), (4.4, True), (9.0, True)])
def test_requests_were_merged_from_a_mean_of_a_tenth_above_their_size(
    directory: Path, mean: float | None, formed: bool | None
) -> None:
    batches = judged(directory, mean)
    assert (batches.request_items, batches.mean, batches.formed) == (4, mean, formed)
    assert ("not merged" in batches.sentence) == (formed is False)


@pytest.mark.parametrize(("mean", "formed"), [(8.0, False), (9.0, True)])
def test_recorded_requests_of_several_items_are_not_merged_ones(directory: Path, mean: float, formed: bool) -> None:
    """A replay counts requests, whatever they hold: eight items of one were told as eight requests in one batch."""
    run, result = read_run(directory), analyse_run(directory)
    summaries = tuple(msgspec.structs.replace(s, executed_batch_mean=mean) for s in result.summaries)
    blocks = tuple(msgspec.structs.replace(block, items=8 * block.requests) for block in result.blocks)
    loads = tuple(
        msgspec.structs.replace(load, batch_size=1, traffic="recorded") for load in result.experiment.workloads
    )
    facts = Facts(replace(run, experiment=msgspec.structs.replace(run.experiment, workloads=loads)), blocks, summaries)
    found = analyse(facts).executed_batches
    assert {(batches.request_items, batches.formed) for batches in found} == {(8.0, formed)}


def test_every_arm_and_workload_is_there(directory: Path) -> None:
    result = analyse_run(directory)
    batches = result.of(LoadFound).executed_batches
    assert {(entry.workload, entry.label) for entry in batches} == {
        (entry.workload, entry.label) for entry in result.summaries
    }
