"""An ensemble by its models: configurations and statistics of tritonserver 2.51, and others that a server may give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.base.documents import read_record
from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.arms import Arm, ensemble_totals
from loadgen.records.run import ArmRecord, ArmRequest, StageTotals, StepRecord
from tests.hostile_server import HostileServer, hostile_server

RECORDED = json.loads(Path(__file__).with_name("ensemble_statistics.json").read_bytes())
"""Of a JPEG ensemble, before and after 32 requests of 4 users."""
ENSEMBLE, DECODER, EXECUTOR = RECORDED["configs"]
QUEUE_NS, DECODE_NS, INFER_NS = 58_711_164 + 151_765_563, 1_171_141 + 199_258_030 + 8_764_237, 239_705_004
UNKNOWN = ("executions", "queue_ns", "compute_input_ns", "compute_infer_ns", "compute_output_ns", "decode_ns")


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with hostile_server() as started:
        put(started, "/v2", {"name": "triton", "version": "2.51.0"})
        for name, config in RECORDED["configs"].items():
            put(started, f"/v2/models/{name}/config", config)
        yield started


def put(server: HostileServer, path: str, document: object) -> None:
    server.answers[path] = (200, {}, json.dumps(document).encode())


def put_statistics(server: HostileServer, model: str, statistics: object) -> None:
    put(server, f"/v2/models/{model}/stats", {"model_stats": [statistics]})


def arm_of(server: HostileServer, model: str = ENSEMBLE) -> Arm:
    return Arm(ArmRequest(label="b", target=server.url), RemoteDeployment(server.url), model)


def growth(server: HostileServer, model: str = ENSEMBLE, **changed: Any) -> StageTotals:
    """The totals of the recorded requests; `changed` are other models' statistics after them, None those of a model
    without any."""
    arm, snapshots = arm_of(server, model), []
    for moment in ("before", "after"):
        for name, statistics in RECORDED[moment].items():
            put_statistics(server, name, statistics)
        for name, statistics in changed.items():
            put_statistics(server, name, statistics if moment == "after" else {})
            if statistics is None:
                del server.answers[f"/v2/models/{name}/stats"]
        snapshot = arm.statistics().read()
        assert snapshot is not None
        snapshots.append(snapshot)
    totals = arm.statistics().totals(*snapshots)
    assert totals is not None
    assert read_record(msgspec.json.encode(totals), StageTotals) == totals
    return totals


def test_times_are_summed_over_the_steps_and_batches_are_those_of_the_step_that_executes(server: HostileServer) -> None:
    totals = growth(server)
    assert (totals.requests, totals.items) == (32, 32)
    assert (totals.queue_ns, totals.decode_ns, totals.compute_infer_ns) == (QUEUE_NS, DECODE_NS, INFER_NS)
    assert (totals.executions, totals.executed_items) == (19, 32)
    assert totals.batches == {1: 9, 2: 7, 3: 3}, "without the batches of model_warmup"
    roles = [(step.model, step.calls, step.decodes, step.executes) for step in totals.steps]
    assert roles == [(DECODER, 1, True, False), (EXECUTOR, 1, False, True)]
    assert [step.totals and step.totals.executions for step in totals.steps] == [23, 19]


def without_times(statistics: dict[str, Any]) -> dict[str, Any]:
    counts = {name: statistics["inference_stats"][name] for name in ("success", "fail")}
    return {**statistics, "inference_stats": counts}


@pytest.mark.parametrize(
    "changed", [{DECODER: None}, {EXECUTOR: None}, {EXECUTOR: without_times(RECORDED["after"][EXECUTOR])}]
)
def test_with_a_step_whose_statistics_are_missing_nothing_is_zero(
    server: HostileServer, changed: dict[str, Any]
) -> None:
    totals = growth(server, **changed)
    assert [getattr(totals, name) for name in UNKNOWN] == [None] * len(UNKNOWN)
    assert (totals.requests, totals.items, totals.batches) == (32, 32, {})
    assert [step.model for step in totals.steps if step.totals is None] == list(changed)


def test_a_step_whose_configuration_is_missing_may_be_an_ensemble_itself(server: HostileServer) -> None:
    del server.answers[f"/v2/models/{EXECUTOR}/config"]
    assert growth(server).queue_ns is None
    record = arm_of(server).record()
    assert [(step.model, step.config is None) for step in record.steps] == [(DECODER, False), (EXECUTOR, True)]
    assert "dynamic_batching" not in record.in_effect


def test_a_configuration_that_cannot_be_read_may_be_that_of_an_ensemble(server: HostileServer) -> None:
    server.answers[f"/v2/models/{ENSEMBLE}/config"] = (200, {}, b"{")
    assert growth(server).queue_ns is None
    del server.answers[f"/v2/models/{ENSEMBLE}/config"]  # a server without that extension has no ensembles
    assert growth(server).queue_ns == 41_148


def test_the_record_has_the_settings_of_the_steps(server: HostileServer) -> None:
    record = arm_of(server).record()
    assert read_record(msgspec.json.encode(record), ArmRecord) == record
    assert record.title == "Triton 2.51, ensemble of the python and onnxruntime backends, fp32"
    assert {
        "model": "torchvision:mobilenet_v3_small", "weights": "random weights (seed 0)", "backend": "onnxruntime",
        "device": "cpu", "threads": "1", "dynamic_batching": True, "max_queue_delay_us": 2000, "instances": 1,
        "max_batch_size": 8,
    }.items() <= record.in_effect.items()  # fmt: skip
    assert record.model_config == RECORDED["configs"][ENSEMBLE]


@pytest.mark.parametrize("behind", [ENSEMBLE, DECODER, EXECUTOR])
def test_the_last_request_is_awaited_in_every_model(server: HostileServer, behind: str) -> None:
    source = arm_of(server).statistics()
    taken = []
    for moment in ("before", "after"):
        for name, statistics in RECORDED[moment].items():
            put_statistics(server, name, statistics)
        taken.append(source.read())
    late = deepcopy(RECORDED["after"][behind])
    late["inference_stats"]["success"]["count"] -= 1
    put_statistics(server, behind, late)
    before, after, not_yet = *taken, source.read()
    assert before is not None
    assert after is not None
    assert not_yet is not None
    assert (source.settled(before, after, 32), source.settled(before, not_yet, 32)) == (True, False)


def ensemble(*calls: str, **fields: object) -> dict[str, Any]:
    steps = [{"model_name": name, "model_version": -1, **fields} for name in calls]
    return {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}


def test_the_steps_of_an_ensemble_in_an_ensemble_stand_in_its_place(server: HostileServer) -> None:
    put(server, "/v2/models/outer/config", ensemble(EXECUTOR, ENSEMBLE, ENSEMBLE))
    totals = growth(server, "outer", outer=RECORDED["after"][ENSEMBLE])
    assert [(step.model, step.calls) for step in totals.steps] == [(EXECUTOR, 3), (DECODER, 2)]
    assert (totals.queue_ns, totals.decode_ns) == (QUEUE_NS, DECODE_NS)


@pytest.mark.parametrize("calls", [("around",), ("around", EXECUTOR), [f"model_{n}" for n in range(50)]])
def test_an_endless_ensemble_ends_as_unknown(server: HostileServer, calls: tuple[str, ...]) -> None:
    put(server, "/v2/models/around/config", ensemble(*calls))
    steps = arm_of(server, "around").statistics().steps
    assert 1 <= len(steps) <= 17
    assert any(step.config is None for step in steps)


def test_a_step_of_a_version_is_asked_for_that_version(server: HostileServer) -> None:
    put(server, "/v2/models/outer/config", ensemble(EXECUTOR, model_version="3"))
    put_statistics(server, "outer", RECORDED["after"][ENSEMBLE])
    of_version = f"/v2/models/{EXECUTOR}/versions/3"
    put(server, f"{of_version}/config", RECORDED["configs"][EXECUTOR])
    put(server, f"{of_version}/stats", {"model_stats": [{"inference_count": 7}]})
    source = arm_of(server, "outer").statistics()
    snapshot = source.read()
    assert (source.steps[0].version, snapshot and snapshot[1]) == ("3", ({"inference_count": 7},))


def step(name: str, infer_ns: int, executions: int) -> tuple[StepRecord, StageTotals]:
    return StepRecord(model=name, config={}), StageTotals(
        requests=10, items=20, executions=executions, queue_ns=1, compute_input_ns=1, compute_infer_ns=infer_ns,
        compute_output_ns=1, batches={4: executions},
    )  # fmt: skip


def test_of_several_steps_the_one_that_computes_longest_executes() -> None:
    ensemble = StageTotals(
        requests=10, items=10, executions=10, queue_ns=0, compute_input_ns=0, compute_infer_ns=0, compute_output_ns=0
    )
    totals = ensemble_totals(ensemble, [step("detect", 50, 5), step("classify", 70, 2), step("format", 9, 10)])
    assert [part.model for part in totals.steps if part.executes] == ["classify"]
    assert (totals.executions, totals.batches, totals.items, totals.executed_items) == (2, {4: 2}, 10, 20)
    assert (totals.queue_ns, totals.compute_infer_ns, totals.decode_ns) == (3, 129, None)
