"""Each check before a load is triggered by a configuration or a reading, silent without it, unknown without data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.checks.arms import captured_sizes
from loadgen.checks.interpretation import native_backend
from loadgen.checks.registry import CHECKS, make_checks
from loadgen.client.connection import Address
from loadgen.experiment.plan import make_workloads
from loadgen.experiment.settings import ExperimentSettings
from loadgen.measure.probes.fairness import as_condition, connect_ms, read_governors
from loadgen.metrics.facts import Facts
from loadgen.records.checks import Check
from loadgen.records.model_config import effective_settings, read_triton
from loadgen.records.probes import ArmConditions, Conditions
from loadgen.records.run import ArmRecord, ArmRequest, Environment, Experiment, Label, StepRecord
from loadgen.records.store import StoredRun
from loadgen.report.sections.checks import fairness_lines, fairness_summary
from loadgen.verdict.result import analyse
from tests.golden.synthetic_run import Plan, write_run

EXPERIMENT = Experiment(
    arms=(ArmRequest(label="a", target="native"), ArmRequest(label="b", target="triton")),
    model="m", weights="random:0", payload="fp32", transport="http",
    workloads=make_workloads(
        ExperimentSettings.model_validate({"scenarios": "single,batched,concurrent", "batch_sizes": "1,8,32"})
    ),
    preset="quick", seed=0, equivalence_margin=0.05, threads=2,
)  # fmt: skip

SETTINGS = (
    "batch_limit", "serial_queue_delay", "tf32", "model_warm_up", "metrics", "response_cache", "cores", "cuda_graphs",
    "graph_sizes", "preferred_sizes", "queue_policy",
)  # fmt: skip
MACHINE = ("client_distance", "machine_idle", "cpu_governor", "gpu_exclusive", "gpu_idle", "gpu_clocks")

ONNX: dict[str, Any] = {
    "name": "m_onnx", "backend": "onnxruntime", "max_batch_size": 32,
    "dynamic_batching": {"max_queue_delay_microseconds": "0"},
    "instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}],
    "optimization": {
        "execution_accelerators": {"gpu_execution_accelerator": [{"name": "cuda", "parameters": {"use_tf32": "0"}}]}
    },
    "model_warmup": [{"name": "w1", "batch_size": 1}], "response_cache": {"enable": False},
}  # fmt: skip
SPEC = [{"batch_size": 1}, {"batch_size": 8, "graph_lower_bound": {"batch_size": 2}},
        {"batch_size": 32, "graph_lower_bound": {"batch_size": 9}}]  # fmt: skip
TENSORRT: dict[str, Any] = {
    **ONNX, "backend": "tensorrt", "optimization": {"cuda": {"graphs": True, "graph_spec": SPEC}},
}  # fmt: skip
NATIVE: dict[str, Any] = {
    "name": "m", "backend": "torch", "platform": "", "max_batch_size": 32,
    "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0},
    "instance_group": [{"kind": "KIND_CPU", "count": 1, "gpus": []}],
    "parameters": {key: {"string_value": value} for key, value in
                   {"engine": "torch", "precision": "fp32", "device": "cpu", "threads": "2",
                    "pad_to": "none", "spinning": "off"}.items()},
    "model_warmup": [],
}  # fmt: skip


def arm(config: dict[str, Any] | None, label: Label = "b", **changes: Any) -> ArmRecord:
    """As a run records it: what is in effect is read from the configuration."""
    record = ArmRecord(
        label=label, title="t", target="triton", url="http://127.0.0.1:1", server_name="triton", server_version="2",
        launched=True, argv=("tritonserver",), settings={}, in_effect=effective_settings(config), model_config=config,
        gpu_info=None, artefact=None,
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)


DECODER: dict[str, Any] = {
    "name": "m_preprocess", "backend": "python", "max_batch_size": 32,
    "input": [{"data_type": "TYPE_STRING", "dims": [1]}], "output": [{"data_type": "TYPE_UINT8", "dims": [2, 2, 3]}],
    "instance_group": [{"kind": "KIND_CPU"}], "dynamic_batching": {"max_queue_delay_microseconds": 0},
    "parameters": {"model": {"string_value": "m"}},
}  # fmt: skip


def ensemble(*configs: dict[str, Any] | None, **changes: Any) -> ArmRecord:
    """A JPEG ensemble with these steps, as a run records it."""
    steps = tuple(StepRecord(model=f"step_{place}", config=config) for place, config in enumerate(configs))
    config = {"name": "m_jpeg_onnx", "platform": "ensemble", "max_batch_size": 32}
    return arm(config, in_effect=read_triton(config, steps), steps=steps, **changes)


def native(config: dict[str, Any] | None = None) -> ArmRecord:
    return arm(config or NATIVE, "a", server_name="abserve-native", target="native")


def made(*arms: ArmRecord, conditions: Conditions | None = None) -> list[Check]:
    """Every check before the load, on a machine with two cores."""
    machine = Environment(started_at="", command="", git_commit=None, host={"cpu_count": 2}, packages={}, gpu={})
    readings = None if conditions is None else (conditions,)
    run = StoredRun(Path(), EXPERIMENT, machine, arms, records={Conditions: readings})
    return list(make_checks(Facts(run), before_load=True))


def of_settings(record: ArmRecord) -> list[Check]:
    """Those that look at one arm by itself."""
    return [check for check in made(record) if check.name in SETTINGS]


def of_machine(readings: Conditions, *arms: ArmRecord) -> list[Check]:
    return [check for check in made(*arms, conditions=readings) if check.name in MACHINE]


def found(record: ArmRecord, name: str) -> Check:
    (check,) = [check for check in of_settings(record) if check.name == name]
    return check


@pytest.mark.parametrize(
    "record",
    [arm(ONNX), arm(TENSORRT), native(), ensemble(DECODER, ONNX), ensemble(DECODER, TENSORRT)],
    ids=["onnxruntime", "tensorrt", "native", "ensemble of onnxruntime", "ensemble of tensorrt"],
)
def test_sound_settings_need_no_attention(record: ArmRecord) -> None:
    assert [check for check in of_settings(record) if check.ok is False] == []


def test_what_a_python_backend_does_not_measure_names_the_arms_it_is_about() -> None:
    python = {**ONNX, "backend": "python"}
    arms = [native(), *(arm(python, label, server_name="triton") for label in ("b", "d")), arm(ONNX, "c")]
    run = StoredRun(Path(), EXPERIMENT, None, tuple(arms))
    (outcome,) = native_backend.find(Facts(run))
    assert outcome.ok is False
    assert outcome.detail == (
        "Triton and D use the python backend of Triton 2: this does not measure Triton's onnxruntime and tensorrt "
        "backends; C measures the onnxruntime backend"
    )
    assert list(native_backend.find(Facts(StoredRun(Path(), EXPERIMENT, None, (native(), arm(ONNX)))))) == []


def test_the_preferred_size_that_triton_fills_in_itself_is_none() -> None:
    """Its configuration route names the largest batch where nothing is preferred."""
    check = found(arm(batching(ONNX, preferred_batch_size=[32])), "preferred_sizes")
    assert (check.ok, check.value) == (True, None)


def with_parameter(name: str, value: str) -> dict[str, Any]:
    return {**NATIVE, "parameters": {**NATIVE["parameters"], name: {"string_value": value}}}


def batching(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, "dynamic_batching": {**config["dynamic_batching"], **changes}}


def accelerated(**parameters: str) -> dict[str, Any]:
    entry = {"name": "cuda", "parameters": parameters}
    return {**ONNX, "optimization": {"execution_accelerators": {"gpu_execution_accelerator": [entry]}}}


@pytest.mark.parametrize(
    ("record", "name", "words"),
    [
        (arm({**ONNX, "max_batch_size": 16}), "batch_limit", "Triton accepts batches up to 16"),
        (native({**NATIVE, "max_batch_size": 8}), "batch_limit", "PyTorch (native) accepts batches up to 8"),
        (arm(batching(ONNX, max_queue_delay_microseconds="10000")), "serial_queue_delay", "10,000 µs"),
        (native(batching(NATIVE, max_queue_delay_microseconds=2000)), "serial_queue_delay", "in single, batched(1)"),
        (arm(accelerated()), "tf32", "turns TF32 on by default"),
        (arm(accelerated(use_tf32="1")), "tf32", "use_tf32 = 1"),
        (arm(accelerated(use_tf32="1") | {"parameters": {"precision": {"string_value": "fp32"}}}), "tf32", "_tf32 = 1"),
        (arm({**ONNX, "model_warmup": []}), "model_warm_up", "Triton has no model_warmup"),
        (arm(ONNX, argv=("tritonserver", "--metrics-config=summary_latencies=true")), "metrics", "summary_latencies"),
        (arm(ONNX, argv=("tritonserver", "--log-verbose=2")), "metrics", "log-verbose"),
        (arm(ONNX, argv=("tritonserver", "--trace-config", "level=TIMESTAMPS")), "metrics", "tracing"),
        (arm({**ONNX, "response_cache": {"enable": True}}), "response_cache", "without an inference"),
        (arm({**ONNX, "optimization": {"cuda": {"graphs": True}}}), "cuda_graphs", "(onnxruntime) that ignores"),
        (native({**NATIVE, "optimization": {"cuda": {"graphs": True}}}), "cuda_graphs", "(torch) that ignores"),
        (arm(accelerated(use_tf32="0", enable_cuda_graph="1")), "cuda_graphs", "stale inputs"),
        (arm({**TENSORRT, "optimization": {"cuda": {"graphs": True}}}), "graph_sizes", "2, 3, 4, 5 and 26 more"),
        (arm(batching(ONNX, preferred_batch_size=[8, 16])), "preferred_sizes", "wait for the whole queue delay"),
        (arm(batching(ONNX, preferred_batch_size=[64])), "preferred_sizes", "never form"),
        (native(with_parameter("threads", "3")), "cores", "PyTorch (native) uses 3 threads"),
        (native({**NATIVE, "instance_group": [{"kind": "KIND_CPU", "count": 2}]}), "cores", "4 threads (2 × 2"),
        (ensemble(DECODER, {**ONNX, "model_warmup": []}), "model_warm_up", "Triton has no model_warmup"),
        (ensemble(ONNX, {**ONNX, "name": "n", "model_warmup": []}), "model_warm_up", "may be slow (step n)"),
        (ensemble(DECODER, batching(ONNX, max_queue_delay_microseconds="900")), "serial_queue_delay", "of 900 µs"),
        (ensemble(DECODER, {**ONNX, "response_cache": {"enable": True}}), "response_cache", "without an inference"),
        (ensemble({**DECODER, "response_cache": {"enable": True}}, None), "response_cache", "without an inference"),
        (ensemble(DECODER, accelerated()), "tf32", "turns TF32 on by default"),
        (ensemble(DECODER, batching(ONNX, preferred_batch_size=[8])), "preferred_sizes", "wait for the whole queue"),
        (ensemble(DECODER, {**ONNX, "optimization": {"cuda": {"graphs": True}}}), "cuda_graphs", "that ignores"),
    ],
)  # fmt: skip
def test_a_setting_that_misleads_is_named(record: ArmRecord, name: str, words: str) -> None:
    check = found(record, name)
    assert check.ok is False
    assert words in check.detail
    assert check.remedy


def test_a_queue_delay_that_a_lone_request_does_not_wait_is_no_fault() -> None:
    parameters = {**NATIVE["parameters"], "lone_requests_wait": {"string_value": "false"}}
    config = batching({**NATIVE, "parameters": parameters}, max_queue_delay_microseconds=2000)
    check = found(native(config), "serial_queue_delay")
    assert check.ok is True
    assert "2,000 µs" in check.detail


def test_a_setting_left_to_the_server_is_not_requested() -> None:
    (check,) = [
        judged for judged in made(arm(ONNX, settings={"device": "auto"})) if judged.name == "settings_in_effect"
    ]
    assert (check.ok, check.detail) == (True, "Triton has no requested settings")


def test_a_server_that_reports_nothing_is_unknown_in_everything() -> None:
    checks = of_settings(arm(None, argv=None, server_name=None))
    assert {check.ok for check in checks} == {None}
    assert all(check.severity == "informs" for check in checks)


def test_a_step_that_cannot_be_read_is_unknown_in_everything_that_it_decides() -> None:
    known = {"batch_limit", "metrics"}
    checks = {check.name: check.ok for check in of_settings(ensemble(DECODER, None)) if check.name not in known}
    assert set(checks.values()) == {None}, checks


def same(a: ArmRecord, b: ArmRecord, what: str = "model", **changes: Any) -> bool | None:
    """Whether the arms are found to have the same."""
    run = StoredRun(Path(), msgspec.structs.replace(EXPERIMENT, **changes), None, (a, b))
    return next(check.ok for check in CHECKS[f"same_{what}"].checks(Facts(run)))


@pytest.mark.parametrize(
    ("a", "b", "payload", "ok"),
    [
        (with_parameter("model", "m"), ensemble(DECODER, ONNX), "jpeg", True),
        ({**NATIVE, "name": "m_jpeg"}, ensemble({**DECODER, "parameters": {}}, ONNX), "jpeg", True),
        ({**NATIVE, "name": "m"}, ensemble({**DECODER, "parameters": {}}, ONNX), "jpeg", True),
        (with_parameter("model", "open_clip:ViT-B-32"), arm({**ONNX, "name": "openclip_vit_b32_onnx"}), "fp32", True),
        (with_parameter("model", "timm:vit_tiny"), arm({**ONNX, "name": "timm_vit_tiny_uint8_onnx"}), "uint8", True),
        (with_parameter("model", "timm:vit_tiny"), arm({**ONNX, "name": "timm_vit_tiny_uint8_onnx"}), "fp32", False),
        (with_parameter("model", "m"), arm({**ONNX, "name": "m_tensorrt"}), "fp32", False),
        (with_parameter("model", "m"), ensemble({**DECODER, "parameters": {}}, None), "jpeg", True),
        (with_parameter("model", "n"), ensemble(DECODER, ONNX), "jpeg", False),
    ],
)  # fmt: skip
def test_the_models_are_compared_without_what_their_names_say_of_the_server(
    a: dict[str, Any], b: ArmRecord, payload: str, ok: bool
) -> None:
    assert same(native(a), b, payload=payload) is ok


@pytest.mark.parametrize(
    ("record", "python"),
    [
        (arm({**ONNX, "backend": "python"}), True),
        (ensemble(DECODER, {**ONNX, "backend": "python"}), True),
        (ensemble(DECODER, ONNX), False),
        (ensemble({**ONNX, "backend": "python"}, ONNX), False),
        (ensemble(DECODER, None), False),
    ],
)
def test_an_ensemble_measures_the_python_backend_if_nothing_else_executes_it(record: ArmRecord, python: bool) -> None:
    checks = CHECKS["native_backend"].checks(Facts(StoredRun(Path(), EXPERIMENT, None, (record,))))
    assert [check.ok for check in checks] == ([False] if python else [])


def test_an_ensemble_merges_as_many_requests_as_its_step() -> None:
    assert same(arm(ONNX, "a"), ensemble(DECODER, ONNX), "max_batch_size") is True
    assert same(arm(ONNX, "a"), ensemble(DECODER, {**ONNX, "max_batch_size": 64}), "max_batch_size") is False


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ({}, {1, 32}),
        ({"dynamic_batching": {"preferred_batch_size": [8, 16]}}, {1, 8, 16, 32}),
        ({"dynamic_batching": None}, {1, 2, 3, 4, 6, 8, 12, 16, 32}),
        ({"optimization": {"cuda": {"graph_spec": SPEC}}}, set(range(1, 33))),
        ({"optimization": {"cuda": {"graph_spec": [{"batch_size": 4}]}}}, {4}),
    ],
)
def test_the_sizes_with_a_graph_are_those_that_triton_captures(change: dict[str, Any], sizes: set[int]) -> None:
    config = {**ONNX, "optimization": {"cuda": {"graphs": True}}, **change}
    assert captured_sizes(config) == sizes


@pytest.mark.parametrize("key", ["max_queue_delay_us", "instances"])
def test_arms_whose_settings_differ_unasked_are_told_apart(key: str) -> None:
    b = msgspec.structs.replace(arm(ONNX), in_effect={**arm(ONNX).in_effect, key: 4})
    name = f"same_{key.removesuffix('_us').removeprefix('max_')}"
    (check,) = [c for c in made(native(), b) if c.name == name]
    assert (check.ok, check.severity) == (False, "warns")


@pytest.mark.parametrize(
    ("first", "second", "ok"),
    [("cuda:0", "cuda", True), ("cuda", "cuda:1", True), ("cuda:0", "cuda:1", False), ("cpu", "cuda", False)],
)
def test_a_gpu_without_its_number_is_no_other_device(first: str, second: str, ok: bool) -> None:
    a, b = arm(with_parameter("device", first), "a"), arm(with_parameter("device", second))
    (check,) = [judged for judged in made(a, b) if judged.name == "same_device"]
    assert check.ok is ok


GPU = {"uuid": "GPU-1", "name": "H200", "utilization_ratio": 0.0, "sm_clock_hertz": 1.98e9, "temperature_celsius": 35,
       "clock_event_reasons": ["idle"], "processes": [{"pid": 11}, {"pid": 12}]}  # fmt: skip


def conditions(gpu: dict[str, Any] | None = None, **changes: Any) -> Conditions:
    calm = Conditions(
        taken_at="2026-03-02T10:00:00Z",
        arms=(
            ArmConditions(label="a", loopback=True, connect_ms=0.03, pids=(11,)),
            ArmConditions(label="b", loopback=True, connect_ms=0.04, pids=(12,)),
        ),
        cpu_busy_share=0.01,
        cpu_governors=("performance",),
        gpus=(as_condition({**GPU, **(gpu or {})}),),
    )
    return msgspec.structs.replace(calm, **changes)


def test_a_gpu_that_nobody_tells_of_is_unknown_and_not_left_out() -> None:
    checks = {check.name: check.ok for check in of_machine(conditions(gpus=()), arm(ONNX))}
    assert {checks[name] for name in ("gpu_exclusive", "gpu_idle", "gpu_clocks")} == {None}
    assert "gpu_idle" not in {check.name for check in of_machine(conditions(gpus=()), native())}


def away(label: Label, connect_ms: float | None) -> ArmConditions:
    return ArmConditions(label=label, loopback=False, connect_ms=connect_ms, pids=())


def test_a_calm_machine_needs_no_look() -> None:
    assert {check.ok for check in of_machine(conditions())} == {True}


@pytest.mark.parametrize(
    ("readings", "name", "ok", "words"),
    [
        (conditions(arms=(away("a", 38.0), away("b", 39.0))), "client_distance", False, "native WAN (38.0 ms)"),
        (conditions(arms=(conditions().arms[0], away("b", 0.4))), "client_distance", False, "not equally far away"),
        (conditions(arms=(away("a", 0.3), away("b", 0.4))), "client_distance", True, "Triton LAN"),
        (conditions(arms=(away("a", None), away("b", 0.4))), "client_distance", None, "connection"),
        (conditions(cpu_busy_share=0.6), "machine_idle", False, "60 % of the cores"),
        (conditions(cpu_busy_share=None), "machine_idle", None, "unknown"),
        (conditions(cpu_governors=("performance", "powersave")), "cpu_governor", False, "powersave"),
        (conditions(cpu_governors=None), "cpu_governor", None, "does not report"),
        (conditions({"processes": [{"pid": 11}, {"pid": 12}, {"pid": 99}]}), "gpu_exclusive", False, "99"),
        (conditions({"processes": [{"pid": 98}, {"pid": 99}]}), "gpu_exclusive", None, "another host"),
        (conditions({"processes": [{"pid": 11}, {"pid": 99}]}, arms=(conditions().arms[0], away("b", 0.4))),
         "gpu_exclusive", None, "other processes use the GPU (99), and they may be the servers of Triton"),
        (conditions({"processes": []}), "gpu_exclusive", None, "lists no process on the GPU"),
        (conditions({"processes": None}), "gpu_exclusive", None, "does not report"),
        (conditions({"utilization_ratio": 0.4}), "gpu_idle", False, "40 % of the time"),
        (conditions({"utilization_ratio": None}), "gpu_idle", None, "does not report"),
        (conditions({"clock_event_reasons": ["software_thermal"]}), "gpu_clocks", False, "software thermal (H200"),
        (conditions({"clock_event_reasons": ["idle", "applications_clocks"]}), "gpu_clocks", True, "1,980 MHz, 35 °C"),
        (conditions({"clock_event_reasons": None}), "gpu_clocks", None, "does not report"),
    ],
)  # fmt: skip
def test_a_machine_that_is_not_fit_is_named(readings: Conditions, name: str, ok: bool | None, words: str) -> None:
    (check,) = [check for check in of_machine(readings) if check.name == name]
    assert check.ok is ok
    assert words in check.detail


def test_a_run_keeps_its_conditions_and_its_checks(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(pairs=2))
    (tmp_path / "conditions.json").write_bytes(msgspec.json.encode(conditions(cpu_busy_share=0.6)))
    result = analyse(tmp_path)
    (check,) = [check for check in result.checks if check.name == "machine_idle"]
    assert (check.ok, check.value, check.severity) == (False, 0.6, "warns")
    summary = fairness_summary(result.checks)
    assert summary is not None
    assert "1 warning" in summary
    assert any("60 % of the cores" in line and "→" in line for line in fairness_lines(result.checks))


def test_every_definition_is_made_somewhere(tmp_path: Path) -> None:
    """Those of slots and of the context's length only where an arm reports them, as language models do."""
    names = {check.name for check in made(native(), arm(ONNX), conditions=conditions())}
    defined = {name for name, definition in CHECKS.items() if definition.before_load}
    assert names == defined - {"same_slots", "same_max_length", "same_choices"}


def test_readings_are_taken_from_here(tmp_path: Path) -> None:
    for core, governor in enumerate(("powersave", "performance", "powersave")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(governor + "\n")
    assert read_governors(tmp_path) == ("performance", "powersave")
    assert read_governors(tmp_path / "none") is None
    assert connect_ms(Address.parse("http://127.0.0.1:1")) is None
    json.dumps(msgspec.to_builtins(conditions()))


ODD: tuple[Any, ...] = (None, "x", "12", -1, 1.5, True, [], {}, [None], {"a": None}, 10**20)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and index of a document."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [deeper for key, child in children for deeper in ((*path, key), *places(child, (*path, key)))]


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(node))
    target = copy
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return copy


def test_a_configuration_in_which_anything_is_anything_fails_nothing() -> None:
    """Another server may report anything; what makes no sense counts as not reported."""
    whole = {
        **TENSORRT,
        "parameters": NATIVE["parameters"],
        "optimization": ONNX["optimization"] | TENSORRT["optimization"],
    }
    for path in places(whole):
        for value in ODD:
            made(native(), arm(replaced(whole, path, value)))


def test_a_queue_delay_that_is_no_number_is_not_told() -> None:
    odd = {**ONNX, "dynamic_batching": {"max_queue_delay_microseconds": "soon"}}
    assert found(arm(odd), "serial_queue_delay").ok is None
