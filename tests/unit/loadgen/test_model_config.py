"""What a Triton configuration says about the arm: title, device, precision, settings; and what it leaves open."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.records.model_config import read_triton, step_names

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
    found = read_triton(config, "2.51.0")
    assert (found.title, found.device, found.precision) == (title, device, precision)
    assert (found.settings.get("device"), found.settings.get("precision")) == (device, precision)


def test_the_settings_in_effect() -> None:
    graphs = {"cuda": {"graphs": True}, **accelerated("cuda", use_tf32="0")["optimization"]}
    found = read_triton({**ONNX, "optimization": graphs}, "2.51.0").settings
    assert found == {
        "cudnn_conv_algo_search": "1", "backend": "onnxruntime", "max_batch_size": 32, "dynamic_batching": True,
        "max_queue_delay_us": 2000, "instances": 2, "device": "cuda:0",
        "optimization": "CUDA graphs, cuda accelerator (use_tf32=0)",
    }  # fmt: skip
    on_cpu = read_triton({**ONNX, **accelerated("openvino", "cpu")}, "2.51.0").settings
    assert on_cpu["optimization"] == "openvino accelerator"
    two = {**ONNX, "instance_group": [{"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}]}
    assert read_triton(two, "2.51.0").settings["instances"] == 4, "a count is per GPU"
    assert read_triton(two, "2.51.0").device == "cuda:0,cuda:1"


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
    assert read_triton(config, "2.51.0").settings.get("spinning") == spinning
    assert read_triton({"platform": "ensemble"}, "2.51.0", [{}, config]).settings.get("spinning") == spinning


def test_a_queue_policy_is_read_as_the_lines_that_make_it() -> None:
    policy = {"timeout_action": "REJECT", "default_timeout_microseconds": "600", "max_queue_size": 0}
    config = {**ONNX, "dynamic_batching": {"default_queue_policy": policy, "priority_levels": 2}}
    lines = "default_queue_policy { default_timeout_microseconds: 600 } and priority_levels: 2"
    assert read_triton(config, "2.51.0").settings["queue_policy"] == lines
    assert read_triton({"platform": "ensemble"}, "2.51.0", [ONNX, config, config]).settings["queue_policy"] == lines
    assert "queue_policy" not in read_triton(ONNX, "2.51.0").settings


def test_an_ensemble_is_what_its_steps_are() -> None:
    steps = [{"model_name": "preprocess"}, {"model_name": "m"}, {"model_name": "m"}]
    ensemble = {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}
    assert step_names(ensemble) == ["preprocess", "m"]
    python = {"backend": "python", "instance_group": [{"kind": "KIND_CPU"}]}
    found = read_triton(ensemble, "2.51.0", [python, {**ONNX, **HALF}])
    assert found.title == "Triton 2.51, ensemble of the python and onnxruntime backends, fp16"
    assert (found.device, found.precision) == ("cuda:0", "fp16")
    assert read_triton(ensemble, "2.51.0", [python]).device is None
    assert read_triton(ensemble, "2.51.0").title == "Triton 2.51, ensemble"


@pytest.mark.parametrize(
    "config",
    [
        {"instance_group": "KIND_GPU", "input": 3, "optimization": [], "ensemble_scheduling": {"step": {}}},
        {"instance_group": [3, {"kind": 1, "gpus": "0"}], "input": [3], "optimization": {"execution_accelerators": {
            "gpu_execution_accelerator": [3]}}, "ensemble_scheduling": {"step": [3, {"model_name": None}]}},
    ],
)  # fmt: skip
def test_a_configuration_of_anything_is_read(config: dict[str, Any]) -> None:
    assert read_triton(config, None).title == "Triton"
    assert step_names(config) == []
