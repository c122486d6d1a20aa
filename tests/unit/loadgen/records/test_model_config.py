"""What a Triton configuration says about the arm: title, device, precision, settings; and what it leaves open."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgen.records.model_config import (
    executed_config,
    executed_models,
    read_triton,
    split_steps,
    step_calls,
    triton_title,
)
from loadgen.records.run import ArmRecord, StepRecord

GPU_0 = [{"name": "m_0", "kind": "KIND_GPU", "count": 2, "gpus": [0]}]
ONNX: dict[str, Any] = {
    "backend": "onnxruntime", "max_batch_size": 32, "instance_group": GPU_0, "default_model_filename": "model.onnx",
    "dynamic_batching": {"max_queue_delay_microseconds": "2000"},
    "input": [{"name": "x", "data_type": "TYPE_FP32"}], "output": [{"name": "y", "data_type": "TYPE_FP32"}],
    "parameters": {"cudnn_conv_algo_search": {"string_value": "1"}},
}  # fmt: skip
HALF = {"input": [{"data_type": "TYPE_FP16"}, {"data_type": "TYPE_INT64"}], "output": [{"data_type": "TYPE_FP16"}]}


def accelerated(name: str, processor: str = "gpu", **parameters: str) -> dict[str, Any]:
    entry = {"name": name, "parameters": parameters}
    return {"optimization": {"execution_accelerators": {f"{processor}_execution_accelerator": [entry]}}}


@pytest.mark.parametrize(
    ("config", "title", "device", "precision"),
    [
        (ONNX, "Triton 2.51, onnxruntime backend", "cuda:0", None),
        ({**ONNX, **HALF}, "Triton 2.51, onnxruntime backend, fp16", "cuda:0", "fp16"),
        ({**ONNX, "input": HALF["input"]}, "Triton 2.51, onnxruntime backend", "cuda:0", None),
        ({**ONNX, "instance_group": [{"kind": "KIND_CPU"}]}, "Triton 2.51, onnxruntime backend", "cpu", None),
        ({**ONNX, "instance_group": [{"kind": "KIND_AUTO"}]}, "Triton 2.51, onnxruntime backend", None, None),
        ({**ONNX, "instance_group": []}, "Triton 2.51, onnxruntime backend", None, None),
        ({**ONNX, "instance_group": [{"kind": "KIND_GPU"}]}, "Triton 2.51, onnxruntime backend", "cuda", None),
        ({**ONNX, "instance_group": [*GPU_0, {"kind": "KIND_CPU"}]}, "Triton 2.51, onnxruntime backend", None, None),
        ({"platform": "tensorrt_plan"}, "Triton 2.51, tensorrt backend", "cuda", None),
        ({"platform": "onnxruntime_onnx"}, "Triton 2.51, onnxruntime backend", None, None),
        (ONNX | accelerated("tensorrt", precision_mode="FP16"), "Triton 2.51, onnxruntime backend, fp16", "cuda:0",
         "fp16"),
        ({"backend": "python", "instance_group": GPU_0}, "Triton 2.51, python backend", None, None),
        ({"backend": "python", "instance_group": [{"kind": "KIND_CPU"}], "parameters": {
            "device": {"string_value": "cuda:1"}, "precision": {"string_value": "fp16"}}},
         "Triton 2.51, python backend, fp16", "cuda:1", "fp16"),
        ({}, "Triton 2.51", None, None),
        (None, "Triton 2.51", None, None),
    ],
)  # fmt: skip
def test_what_a_configuration_implies(
    config: dict[str, Any] | None, title: str, device: str | None, precision: str | None
) -> None:
    settings = read_triton(config)
    assert (settings.get("device"), settings.get("precision")) == (device, precision)
    assert triton_title(config, "2.51.0", precision) == title


def test_the_settings_in_effect() -> None:
    graphs = {"cuda": {"graphs": True}, **accelerated("cuda", use_tf32="0")["optimization"]}
    settings = read_triton({**ONNX, "optimization": graphs})
    assert settings == {
        "cudnn_conv_algo_search": "1", "backend": "onnxruntime", "max_batch_size": 32, "dynamic_batching": True,
        "max_queue_delay_us": 2000, "instances": 2, "device": "cuda:0",
        "optimization": "CUDA graphs, cuda accelerator (use_tf32=0)",
    }  # fmt: skip
    on_cpu = read_triton({**ONNX, **accelerated("openvino", "cpu")})
    assert on_cpu["optimization"] == "openvino accelerator"
    two = {**ONNX, "instance_group": [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}]}
    assert read_triton(two)["instances"] == 4, "a count is per GPU"
    assert read_triton(two)["device"] == "cuda:0,cuda:1"


STEPS = [{"model_name": "preprocess", "model_version": "-1"}, {"model_name": "m"}, {"model_name": "m"}]
ENSEMBLE: dict[str, Any] = {"platform": "ensemble", "max_batch_size": 16, "ensemble_scheduling": {"step": STEPS}}
PYTHON: dict[str, Any] = {"backend": "python", "instance_group": [{"kind": "KIND_CPU"}]}
DECODER: dict[str, Any] = {
    **PYTHON, "max_batch_size": 32, "dynamic_batching": {"max_queue_delay_microseconds": 30},
    "input": [{"data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"data_type": "TYPE_UINT8", "dims": [224, 224, 3]}],
    "parameters": {"decode_threads": {"string_value": "2"}, "precision": {"string_value": "int8"}},
}  # fmt: skip


def steps(*configs: dict[str, Any] | None) -> list[StepRecord]:
    return [StepRecord(model=f"step_{place}", config=config) for place, config in enumerate(configs)]


ON_CPU: dict[str, Any] = {**ONNX, "instance_group": [{"kind": "KIND_CPU"}]}


def with_parameter(config: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    return {**config, "parameters": {name: {"string_value": value}}}


@pytest.mark.parametrize(
    ("config", "spinning"),
    [
        (ONNX, None),
        (ON_CPU, "on"),
        (with_parameter(ON_CPU, "intra_op_thread_count", "2"), "on"),
        (with_parameter(ON_CPU, "intra_op_thread_count", "1"), "off"),
        (ON_CPU | accelerated("openvino", "cpu"), None),
        (with_parameter({**ON_CPU, "backend": "python"}, "spinning", "off"), "off"),
        ({**ON_CPU, "backend": "python"}, None),
        ({}, None),
    ],
)
def test_onnxruntimes_threads_spin_on_a_cpu(config: dict[str, Any], spinning: str | None) -> None:
    assert read_triton(config).get("spinning") == spinning
    assert read_triton({"platform": "ensemble"}, steps(None, config)).get("spinning") == spinning


def test_a_queue_policy_is_read_as_the_lines_that_make_it() -> None:
    policy = {"timeout_action": "REJECT", "default_timeout_microseconds": "600", "max_queue_size": 0}
    config = {**ONNX, "dynamic_batching": {"default_queue_policy": policy, "priority_levels": 2}}
    lines = "default_queue_policy { default_timeout_microseconds: 600 } and priority_levels: 2"
    assert read_triton(config)["queue_policy"] == lines
    assert read_triton({"platform": "ensemble"}, steps(ONNX, config, config))["queue_policy"] == lines
    assert "queue_policy" not in read_triton(ONNX)


def test_an_ensemble_is_what_its_steps_are() -> None:
    assert step_calls(ENSEMBLE) == {("preprocess", None): 1, ("m", None): 2}
    assert step_calls({"ensemble_scheduling": {"step": [{"model_name": "m", "model_version": "3"}]}}) == {("m", "3"): 1}
    models = steps(PYTHON, {**ONNX, **HALF})
    settings = read_triton(ENSEMBLE, models)
    title = triton_title(ENSEMBLE, "2.51.0", "fp16", models)
    assert title == "Triton 2.51, ensemble of the python and onnxruntime backends, fp16"
    assert (settings["device"], settings["precision"]) == ("cuda:0", "fp16")
    assert "device" not in read_triton(ENSEMBLE, steps(PYTHON))
    assert triton_title(ENSEMBLE, "2.51.0", None) == "Triton 2.51, ensemble"


def test_an_ensembles_settings_are_those_of_the_step_that_executes() -> None:
    on_cpu = {"instance_group": [{"kind": "KIND_CPU"}], "parameters": {
        name: {"string_value": value}
        for name, value in {"model": "resnet", "threads": "2", "precision": "fp32", "payload": "uint8"}.items()
    }}  # fmt: skip
    assert read_triton(ENSEMBLE, steps(DECODER, {**ONNX, **on_cpu})) == {
        "platform": "ensemble", "backend": "onnxruntime", "max_batch_size": 16, "dynamic_batching": True,
        "max_queue_delay_us": 2030, "instances": 1, "device": "cpu", "precision": "fp32", "model": "resnet",
        "threads": "2", "spinning": "on", "decode_threads": "2", "steps": "step_0 (python) → step_1 (onnxruntime)",
    }  # fmt: skip


def test_steps_that_differ_leave_a_setting_open_and_the_delays_add_up() -> None:
    many = {**ONNX, "instance_group": [{**GPU_0[0], "count": 3}]}
    settings = read_triton(ENSEMBLE, steps(ONNX, many))
    assert (settings["max_queue_delay_us"], settings["backend"], "instances" in settings) == (
        4000,
        "onnxruntime",
        False,
    )
    thrice = [msgspec.structs.replace(step, calls=3) for step in steps(ONNX)]
    assert read_triton(ENSEMBLE, thrice)["max_queue_delay_us"] == 6000
    alone = {name: value for name, value in ONNX.items() if name != "dynamic_batching"}
    settings = read_triton(ENSEMBLE, steps(alone, alone))
    assert (settings["dynamic_batching"], "max_queue_delay_us" in settings) == (False, False)


@pytest.mark.parametrize("unknown", [steps(DECODER, None), steps(None, ONNX), steps(ONNX, None), []])
def test_a_step_that_cannot_be_read_leaves_open_what_depends_on_it(unknown: list[StepRecord]) -> None:
    settings = read_triton(ENSEMBLE, unknown)
    assert not {"dynamic_batching", "max_queue_delay_us", "instances", "backend"} & set(settings)
    assert (settings["platform"], settings["max_batch_size"]) == ("ensemble", 16)


@pytest.mark.parametrize(
    ("takes", "returns", "dims", "decodes"),
    [
        ("STRING", "UINT8", [224, 224, 3], True),
        ("STRING", "FP32", [3, 224, 224], True),
        ("STRING", "INT64", [-1], True),
        ("STRING", "FP32", [1000], False),
        ("STRING", "STRING", [1], False),
        ("UINT8", "FP32", [3, 224, 224], False),
    ],
)
def test_a_step_that_decodes_turns_bytes_into_numbers_or_pixels(
    takes: str, returns: str, dims: list[int], decodes: bool
) -> None:
    config = {
        "input": [{"data_type": f"TYPE_{takes}"}], "output": [{"data_type": f"TYPE_{returns}", "dims": dims}],
    }  # fmt: skip
    decoding, executing = split_steps(steps(config, ONNX))
    assert ([step.model for step in decoding], len(executing)) == (["step_0"] if decodes else [], 1 if decodes else 2)
    assert split_steps(steps(config)) == ([], steps(config)), "something executes"


def test_the_models_that_execute_are_judged_as_arms() -> None:
    arm = ArmRecord(
        label="b", title="t", target="triton", url="", server_name="triton", server_version=None, launched=True,
        argv=None, settings={}, in_effect={}, model_config=ENSEMBLE, gpu_info=None, artefact=None,
        steps=tuple(steps(DECODER, ONNX, None)),
    )  # fmt: skip
    onnx, unknown = executed_models(arm)
    assert (onnx.model_config, onnx.in_effect["max_queue_delay_us"]) == (ONNX, 2000)
    assert (unknown.model_config, unknown.in_effect) == (None, {})
    (whole,) = executed_models(onnx)
    assert whole is onnx
    assert executed_config(arm) == ENSEMBLE
    assert executed_config(msgspec.structs.replace(arm, steps=arm.steps[:2])) == ONNX
    assert executed_config(onnx) == ONNX


@pytest.mark.parametrize(
    "config",
    [
        {"instance_group": "KIND_GPU", "input": 3, "optimization": [], "ensemble_scheduling": {"step": {}}},
        {"instance_group": [3, {"kind": 1, "gpus": "0"}], "input": [3], "optimization": {"execution_accelerators": {
            "gpu_execution_accelerator": [3]}}, "ensemble_scheduling": {"step": [3, {"model_name": None}]}},
    ],
)  # fmt: skip
def test_a_configuration_of_anything_is_read(config: dict[str, Any]) -> None:
    assert triton_title(config, None, read_triton(config).get("precision")) == "Triton"
    assert step_calls(config) == {}
