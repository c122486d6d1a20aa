"""The verdict on where an arm ran: gates first, then placement, activity, attribution and the CPU witness.

A pure function of the stored inputs and thresholds. It knows three answers and says "no" when the data say so.

Placement (S) is where the runtime says the model is, judged from the raw signals of the `/gpu-info` document, strictest
first. A server's own word that it runs on the GPU is never taken (that it runs on the CPU is): parameters on a CUDA
device are necessary and not sufficient, and ONNX Runtime lists its CUDA provider even where it executes nothing. A
document without the decisive signal is "unknown".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.studies.gpu_proof.records import (
    Activity,
    Code,
    EvidenceInputs,
    Finding,
    Placement,
    PlacementResult,
    Thresholds,
    Witness,
)
from loadgen.studies.gpu_proof.signals import judge_activity, judge_attribution

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


@dataclass(frozen=True, slots=True)
class Decision:
    """A finding with what led to it; the last three are None where nothing could be said."""

    finding: Finding
    code: Code | None
    sentence: str
    notes: tuple[str, ...]
    activity: Activity | None
    attributed: bool | None
    cpu_witness: bool | None


def decide(inputs: EvidenceInputs, thresholds: Thresholds) -> Decision:
    """GPU_VERIFIED, CPU_FALLBACK or INCONCLUSIVE with a code."""
    placement, gpu = inputs.placement, inputs.gpu
    activity = judge_activity(gpu, inputs.load.window_s, thresholds) if gpu is not None else None
    attributed = judge_attribution(inputs.attribution, thresholds) if gpu is not None else None
    witness = judge_witness(inputs.witness, thresholds)
    notes = _notes(inputs, activity, witness, thresholds)

    def answer(finding: Finding, code: Code | None, sentence: str) -> Decision:
        return Decision(finding, code, sentence, notes, activity, attributed, witness)

    # Rests on the runtime's own account, not on readings: no gate can take it back.
    if placement.result == "cpu":
        return answer(Finding.CPU_FALLBACK, None, f"The model runs on the CPU: {placement.reason}.")
    gate = _gate(inputs, thresholds)
    if gate is not None:
        return answer(Finding.INCONCLUSIVE, *gate)
    if activity is None:
        return answer(
            Finding.INCONCLUSIVE, Code.LOW_COVERAGE, "Energy or the idle baseline could not be read for the whole load."
        )
    code, sentence = _weigh(placement, activity, attributed is True, witness, thresholds)
    if code is not None:
        return answer(Finding.INCONCLUSIVE, code, sentence)
    finding = Finding.CPU_FALLBACK if activity == "idle" else Finding.GPU_VERIFIED
    return answer(finding, None, sentence)


def judge_witness(witness: Witness, thresholds: Thresholds) -> bool | None:
    """C: True when the CPU worked per request as in the deliberate CPU run, and was no faster than that allows."""
    if (
        witness.cpu_s_per_request is None
        or witness.requests_per_s is None
        or witness.control_cpu_s_per_request is None
        or witness.control_requests_per_s is None
    ):
        return None
    return (
        witness.cpu_s_per_request >= thresholds.witness_cpu_share * witness.control_cpu_s_per_request
        and witness.requests_per_s <= thresholds.witness_throughput_factor * witness.control_requests_per_s
    )


def _gate(inputs: EvidenceInputs, thresholds: Thresholds) -> tuple[Code, str] | None:
    """The first reason for which the data carry no verdict."""
    health, load, gpu = inputs.health, inputs.load, inputs.gpu
    used = inputs.placement.used_device_uuid
    if health.gpu_lost:
        return Code.GPU_LOST_MIDRUN, "The driver lost a GPU during the run."
    if health.status != "ok":
        return Code.NO_NVML, f"The GPU could not be read ({health.status or 'no readings were stored'})."
    if health.device_changed:
        return Code.DEVICE_CHANGED, "The GPU's UUID, its driver or its energy counter changed during the run."
    if used is not None and used.startswith("MIG-"):
        return Code.WRONG_GPU, f"The server uses {used}, a part of a GPU, and readings are of whole GPUs only."
    if used is not None and health.uuid != used:
        return Code.WRONG_GPU, f"The server uses {used}, of which there are no readings."
    if gpu is None:
        return Code.WRONG_GPU, "There are several GPUs, and nothing tells which one the server uses."
    if health.healthy_before is not True or health.healthy_after is not True:
        return Code.NVML_UNHEALTHY, "A reading at the edges of the load failed or is missing."
    if load.window_s < thresholds.min_window_s:
        return Code.SHORT_WINDOW, f"{load.window_s:.1f} s of load, {thresholds.min_window_s:.0f} s are needed."
    if load.completed < thresholds.min_requests:
        return Code.FEW_REQUESTS, f"{load.completed} completed requests, {thresholds.min_requests} are needed."
    if load.errors > thresholds.max_error_share * (load.completed + load.errors):
        return Code.MANY_ERRORS, f"{load.errors} of {load.completed + load.errors} requests failed."
    if not load.gaps_before or not load.gaps_after:
        return Code.NO_IDLE_GAP, "There is no idle gap on both sides of the load to compare with."
    coverage = min(gpu.coverage, gpu.gap_coverage)
    if coverage < thresholds.min_coverage:
        return Code.LOW_COVERAGE, f"The readings cover {100 * coverage:.0f} % of the time."
    if (busy := _busy_gaps(inputs, thresholds)) is not None:
        return Code.UNATTRIBUTED, f"{busy}, so what it did under load cannot be attributed to this server."
    return None


def _busy_gaps(inputs: EvidenceInputs, thresholds: Thresholds) -> str | None:
    """What is known of work that no request of this arm asked for, as the beginning of a sentence."""
    gpu, pids = inputs.gpu, inputs.attribution.foreign_pids
    if gpu is None or gpu.idle_utilisation_low <= thresholds.max_gap_utilisation:
        return None
    whose = f" (other processes on it: {', '.join(map(str, pids))})" if pids else ""
    return f"With nothing sent, the GPU was busy {100 * gpu.idle_utilisation_low:.0f} % of the time{whose}"


def _weigh(
    placement: Placement, activity: Activity, attributed: bool, witness: bool | None, thresholds: Thresholds
) -> tuple[Code | None, str]:
    """No code: CPU_FALLBACK for an idle GPU, else GPU_VERIFIED."""
    if activity == "idle" and witness:
        return None, "The GPU did no more than with nothing sent, and the CPU worked as in the deliberate CPU run."
    if placement.result == "unknown" or (placement.result == "partial" and placement.cpu_share is None):
        return Code.UNKNOWN_PLACEMENT, f"It is not known where the model is: {placement.reason}."
    if placement.result == "partial" and (placement.cpu_share or 0.0) > thresholds.max_partial_cpu_share:
        return Code.CONFLICT, f"Too much of the model runs on the CPU: {placement.reason}."
    if activity == "idle":
        return Code.CONFLICT, f"The GPU did no more than with nothing sent, although {placement.reason}."
    if witness:
        return Code.CONFLICT, "The GPU was active, yet the CPU worked as it does in the deliberate CPU run."
    if activity == "weak":
        return Code.LOW_DUTY, "The GPU did more than when idle, but too little to tell from noise."
    if not attributed:
        return Code.UNATTRIBUTED, "The GPU was active, but nothing ties that to this server."
    return None, f"The GPU was active with this server's requests, and {placement.reason}."


def _notes(
    inputs: EvidenceInputs, activity: Activity | None, witness: bool | None, thresholds: Thresholds
) -> tuple[str, ...]:
    notes = []
    if inputs.placement.result == "cpu" and (busy := _busy_gaps(inputs, thresholds)) is not None:
        notes.append(f"{busy[0].lower()}{busy[1:]}")
    if inputs.placement.result == "partial":
        notes.append(f"partly on the CPU: {inputs.placement.reason}")
    if inputs.placement.result == "cpu" and activity == "active":
        notes.append("the GPU was active nevertheless: something else used it")
    if inputs.attribution.foreign_pids:
        pids = ", ".join(map(str, inputs.attribution.foreign_pids))
        notes.append(f"processes on the GPU that are not ours, or ours under the host's numbers: {pids}")
    if inputs.gpu is not None and inputs.gpu.energy_source == "power":
        notes.append("energy integrated from power readings: this GPU has no energy counter")
    if witness is None:
        notes.append("no deliberate CPU run to compare the CPU's work with")
    return tuple(notes)
