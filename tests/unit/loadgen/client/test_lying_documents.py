"""Whatever a server's own documents hold: records that can be stored, judged and shown, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadgen.base.documents import read_record
from loadgen.checks.registry import make_checks
from loadgen.client.endpoint import Endpoint, EndpointError
from loadgen.findings.gpu.decision import judge_placement
from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS
from loadgen.launch.deployment import RemoteDeployment
from loadgen.measure.arms import Arm, requests_seen, stage_totals
from loadgen.measure.probes.fairness import as_condition
from loadgen.metrics.facts import Facts
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.probes import Conditions
from loadgen.records.run import ArmRecord, ArmRequest, Experiment, StageTotals, Workload
from loadgen.records.store import StoredRun
from tests.hostile_server import HostileServer, hostile_server

MODEL = "/v2/models/m"
DEEP = "[" * 100_000
HOSTILE = "\x1b[31m\r\n# VALID\u202e<script>"

scalars = (
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=6)
    | st.sampled_from([-1, 0, 2**62, 2**63 - 1, 1e308, "9" * 30, "²", "1e400", "nan", "KIND_GPU", "cuda:0"])
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def some(**keys: Any) -> Any:
    """An object with some of these keys, each as it should be or anything at all."""
    return st.fixed_dictionaries({}, optional={name: value | values for name, value in keys.items()}) | values


duration = some(count=scalars, ns=scalars)
texts = st.fixed_dictionaries({}, optional={"string_value": scalars})
configs = some(
    backend=scalars, platform=scalars, max_batch_size=scalars,
    parameters=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("device", "precision", "threads", "engine", "instances"), texts | values)
    ),
    dynamic_batching=some(max_queue_delay_microseconds=scalars, preferred_batch_size=st.lists(scalars, max_size=3)),
    instance_group=st.lists(some(count=scalars, kind=scalars, profile=st.lists(scalars, max_size=2)), max_size=3),
    model_warmup=st.lists(some(batch_size=scalars), max_size=2),
    optimization=some(
        cuda=some(graphs=st.booleans(), graph_spec=st.lists(some(batch_size=scalars), max_size=2)),
        execution_accelerators=some(gpu_execution_accelerator=st.lists(some(name=scalars, parameters=some()))),
    ),
    response_cache=some(enable=scalars),
    input=st.lists(some(data_type=st.sampled_from(["TYPE_STRING", "TYPE_FP32"])), max_size=2),
    output=st.lists(some(data_type=st.sampled_from(["TYPE_UINT8"]), dims=st.lists(scalars, max_size=3)), max_size=2),
    ensemble_scheduling=some(
        step=st.lists(some(model_name=st.sampled_from(["m", "n"]) | scalars, model_version=scalars), max_size=3)
    ),
)  # fmt: skip
gpu_infos = some(
    runtime=some(
        used_device_uuid=scalars, kind=scalars, kernel_probe=some(kernel_count=scalars),
        placement=some(result=scalars, ep_nodes=some(CUDAExecutionProvider=scalars), params_by_device=some(cpu=scalars),
                       cpu_time_ratio=scalars, cpu_non_shape_ops=st.lists(scalars, max_size=2)),
    ),
    devices=st.lists(some(uuid=scalars, name=scalars, utilization_ratio=scalars, processes=values), max_size=2),
)  # fmt: skip
statistics = some(
    model_stats=st.lists(some(
        inference_count=scalars, execution_count=scalars,
        inference_stats=some(success=duration, fail=duration, queue=duration), abserve_stages=some(receive=duration),
        batch_stats=st.lists(some(batch_size=scalars, compute_infer=duration), max_size=2),
    ), max_size=2)
)  # fmt: skip
tensors = st.lists(some(name=scalars, datatype=scalars, shape=st.lists(scalars, max_size=3)), max_size=2)
EXPERIMENT = Experiment(
    arms=tuple(ArmRequest(label=label, target=f"http://{label}:1") for label in "abc"), model="m", weights="random:0",
    payload="fp32", transport="http", preset="quick", seed=0, equivalence_margin=0.05, threads=0,
    workloads=(
        Workload(scenario="batched", batch_size=2, concurrency=4, requests=5, seconds=0.1, max_seconds=5.0, rounds=2),
    ),
)  # fmt: skip
quickly = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with hostile_server() as started:
        yield started


def put(server: HostileServer, path: str, document: object) -> None:
    server.answers[path] = (200, {}, json.dumps(document).encode())


def kept(record: Any, kind: Any) -> None:
    """It comes back from its file as it was."""
    assert read_record(msgspec.json.encode(record), kind) == record


@quickly
@given(some(name=st.sampled_from(["triton"]), version=scalars), configs, configs, gpu_infos)
def test_any_description_of_an_arm(
    server: HostileServer, name: object, config: object, step: object, gpu_info: object
) -> None:
    put(server, "/v2", name)
    put(server, f"{MODEL}/config", config)
    put(server, "/v2/models/n/config", step)
    put(server, "/gpu-info", gpu_info)
    deployment = RemoteDeployment(server.url)
    arms = [Arm(ArmRequest(label=label, target=server.url), deployment, "m") for label in "abc"]
    try:
        records = [arm.record() for arm in arms]
    except EndpointError:
        return
    for record in records:
        kept(record, ArmRecord)
    document = records[0].gpu_info
    devices = own_devices(document, used_gpus(document))
    taken = Conditions(
        taken_at="", arms=(), cpu_busy_share=None, cpu_governors=None, gpus=tuple(map(as_condition, devices))
    )
    kept(taken, Conditions)
    stored = StoredRun(directory=Path(), experiment=EXPERIMENT, arms=tuple(records), records={Conditions: (taken,)})
    checks = list(make_checks(Facts(stored), before_load=True))
    assert all(check.detail.isprintable() for check in checks)
    kept(checks, list[type(checks[0])])  # type: ignore[misc]
    judge_placement(document, records[0].model_config, DEFAULT_THRESHOLDS)


@quickly
@given(some(inputs=tensors, outputs=tensors))
def test_any_metadata(server: HostileServer, document: object) -> None:
    put(server, MODEL, document)
    try:
        signature = Endpoint(server.url).signature("m")
    except EndpointError as exc:
        said = str(exc)
    else:
        said = ""
        assert signature.inputs
        assert all(size >= -1 for tensor in signature.outputs for size in tensor.shape)
    assert said.isprintable()


@quickly
@given(statistics, statistics)
def test_any_statistics(server: HostileServer, first: object, second: object) -> None:
    read = []
    for document in (first, second):
        put(server, f"{MODEL}/stats", document)
        read.append(Endpoint(server.url).statistics("m"))
    before, after = read
    if before is not None and after is not None:
        requests_seen(after)
        totals = stage_totals(before, after)
        if totals is not None:
            kept(totals, StageTotals)
            kept([(totals.requests or 0) * 1000], list[int])


def test_of_several_versions_the_latest_is_the_one_that_answers(server: HostileServer) -> None:
    entries = [{"version": version, "inference_count": int(version)} for version in ("9", "10", "8")]
    put(server, f"{MODEL}/stats", {"model_stats": [3, *entries, {"version": "x"}]})
    assert Endpoint(server.url).statistics("m") == entries[1]


@pytest.mark.parametrize("body", [DEEP, f'{{"name": {DEEP}', "[]", "9" * 5000, '"\\ud800"', "\xff", " " * 2**21])
def test_an_unusable_document_is_reported_in_one_sentence(server: HostileServer, body: str) -> None:
    server.answers[MODEL] = (200, {}, body.encode("latin-1"))
    with pytest.raises(EndpointError, match=r"^GET http://127.0.0.1:\d+/v2/models/m: .+$") as raised:
        Endpoint(server.url).signature("m")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_texts_are_cleaned_where_they_enter(server: HostileServer) -> None:
    put(server, "/v2", {"name": HOSTILE * 1000, "version": HOSTILE})
    put(server, f"{MODEL}/config", {"parameters": {HOSTILE: {"string_value": HOSTILE}}})
    record = Arm(ArmRequest(label="a", target=server.url), RemoteDeployment(server.url), "m").record()
    texts = (record.title, record.server_name, record.server_version, *map(str, record.in_effect.items()))
    assert all(text is not None and text.isprintable() and len(text) <= 200 for text in texts)
    assert "# VALID" in record.title  # what can be printed stays: it is the renderers that escape it
