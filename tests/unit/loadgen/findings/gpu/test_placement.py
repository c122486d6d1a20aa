"""Placement from a server's documents: nobody's word is taken where a decisive signal is missing."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.findings.gpu.decision import judge_placement
from loadgen.findings.gpu.records import DEFAULT_THRESHOLDS


def runtime(kind: str, kernel_probe: Any = None, **placement: Any) -> dict[str, Any]:
    return {"runtime": {"kind": kind, "placement": {"result": "gpu"} | placement, "kernel_probe": kernel_probe}}


CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("info", "result", "share"),
    [
        (None, "unreported", None),
        ({"runtime": None}, "unreported", None),
        (runtime("triton"), "unreported", None),
        (runtime("torch"), "unknown", None),  # its own "gpu" is not taken
        (runtime("torch", params_by_device={"cpu": 152}), "cpu", 1.0),
        (runtime("torch", params_by_device={"cuda:0": 152}), "unknown", None),
        (runtime("torch", {"kernel_count": 0}, params_by_device={"cuda:0": 152}), "unknown", None),
        (runtime("torch", {"kernel_count": 9}, params_by_device={"cuda:0": 152}), "gpu", 0.0),
        (runtime("torch", {"kernel_count": 9}, params_by_device={"cuda:0": 150, "cpu": 2}), "partial", None),
        (runtime("onnxruntime", ep_nodes={CPU: 300}), "cpu", 1.0),
        (runtime("onnxruntime", ep_nodes={CUDA: 300}), "gpu", 0.0),
        (runtime("onnxruntime", ep_nodes={CUDA: 290, CPU: 10}), "partial", None),
        (runtime("onnxruntime", ep_nodes={CUDA: 290, CPU: 10}, cpu_non_shape_ops=[]), "gpu", None),
        (runtime("onnxruntime", ep_nodes={CUDA: 290, CPU: 10}, cpu_time_ratio=0.01), "gpu", 0.01),
        (runtime("onnxruntime", ep_nodes={CUDA: 290, CPU: 10}, cpu_time_ratio=0.02), "partial", 0.02),
        (
            runtime("onnxruntime", ep_nodes={CUDA: 9, CPU: 1}, cpu_time_ratio=0.001, cpu_non_shape_ops=["Softmax"]),
            "partial",
            0.001,
        ),
        (runtime("tensorrt"), "gpu", 0.0),
        (runtime("tensorrt-jax"), "gpu", 0.0),
        (runtime("onnxruntime", result="cpu"), "cpu", 1.0),
    ],
)
def test_from_gpu_info(info: Any, result: str, share: float | None) -> None:
    placement = judge_placement(info, None, DEFAULT_THRESHOLDS)
    assert (placement.result, placement.cpu_share) == (result, share)


@pytest.mark.parametrize(
    ("config", "result"),
    [
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_CPU"}]}, "cpu"),
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU"}]}, "unreported"),
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_GPU"}, {"kind": "KIND_CPU"}]}, "unknown"),
        ({"backend": "python", "instance_group": [{"kind": "KIND_CPU"}]}, "unreported"),
        ({"backend": "python", "instance_group": [{"kind": "KIND_GPU"}]}, "unreported"),
        ({"backend": "tensorrt", "instance_group": [{"kind": "KIND_GPU"}]}, "gpu"),
        ({"platform": "tensorrt_plan"}, "gpu"),
        ({"backend": "onnxruntime", "instance_group": [{"kind": "KIND_AUTO"}]}, "unreported"),
        ({"platform": "ensemble"}, "unreported"),
        ({}, "unreported"),
    ],
)
def test_from_tritons_configuration(config: dict[str, Any], result: str) -> None:
    assert judge_placement(None, config, DEFAULT_THRESHOLDS).result == result


def test_the_device_in_use_is_named() -> None:
    info = {"runtime": {"kind": "tensorrt", "used_device_uuid": "GPU-1"}}
    assert judge_placement(info, None, DEFAULT_THRESHOLDS).used_device_uuid == "GPU-1"


@pytest.mark.parametrize("counts", [{"ep_nodes": {"CUDAExecutionProvider": 9, "CPUExecutionProvider": "x"}},
                                    {"params_by_device": {"cuda:0": 9, "cpu": None}}])  # fmt: skip
def test_counts_that_are_no_numbers_are_never_taken_for_none(counts: dict[str, Any]) -> None:
    assert (
        judge_placement(runtime("torch", {"kernel_count": 9}, **counts), None, DEFAULT_THRESHOLDS).result == "unknown"
    )
