"""S: where the runtime says the model is, judged from the raw signals of the `/gpu-info` document, strictest first.

A server's own word that it runs on the GPU is never taken (that it runs on the CPU is): parameters on a CUDA device are
necessary and not sufficient, and ONNX Runtime lists its CUDA provider even where it executes nothing. A document
without the decisive signal is "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.evidence.records import Placement, PlacementResult
from loadgen.evidence.thresholds import Thresholds

GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
CPU_PROVIDER = "CPUExecutionProvider"
GPU_ONLY_BACKENDS = ("tensorrt",)
"""Triton backends that execute on a GPU or not at all."""


def judge_placement(
    gpu_info: Mapping[str, Any] | None, model_config: Mapping[str, Any] | None, thresholds: Thresholds
) -> Placement:
    """From the server's documents; either may be missing, for a server without our extras."""
    runtime = _mapping(gpu_info, "runtime")
    placement = _mapping(runtime, "placement")
    uuid = runtime.get("used_device_uuid")
    result, share, reason = _judge(runtime, placement, model_config or {}, thresholds)
    return Placement(
        result=result, cpu_share=share, reason=reason, used_device_uuid=uuid if isinstance(uuid, str) else None
    )


Judgement = tuple[PlacementResult, float | None, str]


def _judge(
    runtime: Mapping[str, Any], placement: Mapping[str, Any], config: Mapping[str, Any], thresholds: Thresholds
) -> Judgement:
    nodes = placement.get("ep_nodes")
    params = placement.get("params_by_device")
    for counts in (nodes, params):
        if isinstance(counts, Mapping) and any(_number(count) is None for count in counts.values()):
            return "unknown", None, "the server's counts are no numbers"
    if isinstance(nodes, Mapping) and nodes:
        return _from_nodes(nodes, placement, thresholds)
    canary = runtime.get("canary")
    if isinstance(params, Mapping) and params:
        return _from_parameters(params, canary if isinstance(canary, Mapping) else None)
    if placement.get("result") == "cpu":
        return "cpu", 1.0, "the server says that it executes on the CPU"
    if runtime.get("kind") == "tensorrt":
        return "gpu", 0.0, "TensorRT executes on a GPU or not at all"
    return _from_config(config)


def _from_nodes(nodes: Mapping[str, Any], placement: Mapping[str, Any], thresholds: Thresholds) -> Judgement:
    on_gpu = sum(int(nodes.get(name, 0)) for name in GPU_PROVIDERS)
    on_cpu = sum(int(count) for name, count in nodes.items() if name not in GPU_PROVIDERS)
    share = _number(placement.get("cpu_time_ratio"))
    others = placement.get("cpu_non_shape_ops")
    counts = f"{on_gpu} nodes on the GPU, {on_cpu} on the CPU"
    if on_gpu == 0:
        return "cpu", 1.0, counts
    if on_cpu == 0:
        return "gpu", 0.0, counts
    if share is not None:
        timed = f"{counts}, {100 * share:.2g} % of the node time on the CPU"
        if share <= thresholds.max_cpu_node_share and not others:
            return "gpu", share, timed
        return "partial", share, timed
    if isinstance(others, list | tuple) and not others:
        return "gpu", None, f"{counts}, all of them shape operators"
    return "partial", None, f"{counts}, whose time nobody measured"


def _from_parameters(params: Mapping[str, Any], canary: Mapping[str, Any] | None) -> Judgement:
    on_gpu = sum(int(count) for device, count in params.items() if str(device).startswith("cuda"))
    on_cpu = sum(int(count) for device, count in params.items() if not str(device).startswith("cuda"))
    if on_gpu == 0:
        return "cpu", 1.0, "no parameter is on a CUDA device"
    if canary is None or _number(canary.get("kernel_count")) is None:
        return "unknown", None, "parameters are on a CUDA device, but no profile shows a kernel"
    kernels = int(canary["kernel_count"])
    if kernels == 0:
        # Also what a profiler says that may not read the GPU's counters: no proof of the CPU.
        return "unknown", None, "parameters are on a CUDA device, but the profiled inference shows no kernel"
    if on_cpu:
        return "partial", None, f"{on_cpu} parameters stayed on the CPU; {kernels} kernels ran"
    return "gpu", 0.0, f"all parameters on a CUDA device; a profiled inference ran {kernels} kernels"


def _from_config(config: Mapping[str, Any]) -> Judgement:
    """Triton's configuration alone. Decides only for backends that honour the instance kind."""
    backend = str(config.get("backend") or config.get("platform") or "").partition("_")[0]
    groups = config.get("instance_group")
    listed = groups if isinstance(groups, list | tuple) else ()
    kinds = {str(group.get("kind", "KIND_AUTO")) for group in listed if isinstance(group, Mapping)}
    if backend in GPU_ONLY_BACKENDS:
        return "gpu", 0.0, f"Triton's {backend} backend executes on a GPU or not at all"
    if backend == "python":
        return "unknown", None, "to Triton's python backend the instance kind is only a string"
    if kinds == {"KIND_CPU"}:
        return "cpu", 1.0, "every instance is KIND_CPU"
    if kinds:
        return (
            "unknown",
            None,
            f"{', '.join(sorted(kinds))}, but nothing tells which nodes the {backend} backend placed",
        )
    return "unknown", None, "the server tells nothing about where its model is"


def _mapping(parent: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    value = (parent or {}).get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
