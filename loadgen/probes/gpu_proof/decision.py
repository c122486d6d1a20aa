"""The verdict on where an arm ran: gates first, then placement, activity, attribution and the CPU witness.

A pure function of the stored inputs and thresholds, with three answers.

Placement (S) is where the runtime says the model is, judged from the raw signals of the `/gpu-info` document, strictest
first. A server that says it runs on the CPU is believed; one that says it runs on the GPU is not: parameters on a CUDA
device are necessary and not sufficient, and ONNX Runtime lists its CUDA provider even where it executes nothing. A
document without a decisive signal is "unknown"; a server that has no such report is "unreported", and only its process
on the GPU can verify it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.probes.gpu_proof.records import (
    Activity,
    Code,
    Decision,
    EvidenceInputs,
    Finding,
    Placement,
    PlacementResult,
    Thresholds,
    Witness,
)
from loadgen.probes.gpu_proof.signals import judge_activity, judge_attribution
from loadgen.records.model_config import GPU_ONLY_BACKENDS, backend_name, groups, mapping

GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")

Judgement = tuple[PlacementResult, float | None, str]
"""The model's device, the CPU's share of it, the reason."""


def judge_placement(
    gpu_info: Mapping[str, Any] | None, model_config: Mapping[str, Any] | None, thresholds: Thresholds
) -> Placement:
    """Placement from the server's documents; other servers may offer neither, or anything at all."""
    runtime = mapping((gpu_info or {}).get("runtime"))
    result, share, reason = _judge(runtime, model_config or {}, thresholds)
    uuid = runtime.get("used_device_uuid")
    return Placement(
        result=result, cpu_share=share, reason=reason, used_device_uuid=uuid if isinstance(uuid, str) else None
    )


def _judge(runtime: Mapping[str, Any], config: Mapping[str, Any], thresholds: Thresholds) -> Judgement:
    placement = mapping(runtime.get("placement"))
    nodes, params = mapping(placement.get("ep_nodes")), mapping(placement.get("params_by_device"))
    if any(_number(count) is None for count in (*nodes.values(), *params.values())):
        return "unknown", None, "the server's counts are not numbers"
    if nodes:
        return _from_nodes(nodes, placement, thresholds)
    if params:
        return _from_parameters(params, _number(mapping(runtime.get("kernel_probe")).get("kernel_count")))
    if placement.get("result") == "cpu":
        return "cpu", 1.0, "the server says that it executes on the CPU"
    if str(runtime.get("kind")).startswith("tensorrt"):
        return "gpu", 0.0, "TensorRT executes on a GPU or not at all"
    if runtime.get("kind") not in (None, "triton"):
        return "unknown", None, "the server does not report where its model is"
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
        placed: PlacementResult = "gpu" if share <= thresholds.max_cpu_node_share and not others else "partial"
        return placed, share, f"{counts}, {100 * share:.2g} % of the node time on the CPU"
    if isinstance(others, list | tuple) and not others:
        return "gpu", None, f"{counts}, all of them shape operators"
    return "partial", None, f"{counts}, and their share of the time was not measured"


def _from_parameters(params: Mapping[str, Any], kernels: float | None) -> Judgement:
    """Placement by the model's parameters. `kernels`: how many the kernel probe saw at the server's start."""
    on_cpu = sum(int(count) for device, count in params.items() if not str(device).startswith("cuda"))
    if not any(int(count) for device, count in params.items() if str(device).startswith("cuda")):
        return "cpu", 1.0, "no parameter is on a CUDA device"
    if kernels is None:
        return "unknown", None, "parameters are on a CUDA device, but the server reports no kernel probe"
    if kernels == 0:
        # A profiler without access to the GPU's counters reports 0 as well: no proof of the CPU.
        return "unknown", None, "parameters are on a CUDA device, but the kernel probe saw no kernel"
    if on_cpu:
        return "partial", None, f"{on_cpu} parameters stayed on the CPU; {int(kernels)} kernels ran"
    return "gpu", 0.0, f"all parameters are on a CUDA device and the kernel probe saw {int(kernels)} kernels"


def _from_config(config: Mapping[str, Any]) -> Judgement:
    """Triton's configuration alone decides only for backends that honour the instance kind."""
    backend = backend_name(config)
    kinds = {str(group.get("kind", "KIND_AUTO")) for group in groups(config)}
    if backend in GPU_ONLY_BACKENDS:
        return "gpu", 0.0, f"Triton's {backend} backend executes on a GPU or not at all"
    if backend == "python":
        return "unreported", None, "Triton's python backend does not enforce the instance kind"
    if kinds == {"KIND_CPU"}:
        return "cpu", 1.0, "every instance is KIND_CPU"
    if kinds:
        named = ", ".join(sorted(kinds))
        result: PlacementResult = "unknown" if "KIND_CPU" in kinds else "unreported"
        return result, None, f"{named}, but the server does not report where the {backend} backend placed the nodes"
    return "unreported", None, "the server does not report where its model is"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def decide(inputs: EvidenceInputs, thresholds: Thresholds) -> Decision:
    """GPU_VERIFIED, CPU_FALLBACK or INCONCLUSIVE with a code."""
    placement, gpu = inputs.placement, inputs.gpu
    activity = judge_activity(gpu, inputs.load.window_s, thresholds) if gpu is not None else None
    attributed = None
    if gpu is not None:
        shared = inputs.attribution.foreign or _busy_gaps(inputs, thresholds) is not None
        attributed = not shared and judge_attribution(inputs.attribution, thresholds)
    witness = judge_witness(inputs.witness, thresholds)
    code: Code | None = None
    finding = Finding.INCONCLUSIVE
    if placement.result == "cpu":  # the runtime reports this itself, so no gate can overrule it
        finding, sentence = Finding.CPU_FALLBACK, f"The model runs on the CPU: {placement.reason}."
    elif (gate := _gate(inputs, thresholds)) is not None:
        code, sentence = gate
    elif activity is None:
        code, sentence = Code.LOW_COVERAGE, "Energy or the idle baseline could not be read for the whole load."
    else:
        code, sentence = _weigh(inputs, activity, attributed is True, witness, thresholds)
        if code is None:
            finding = Finding.CPU_FALLBACK if activity == "idle" else Finding.GPU_VERIFIED
    return Decision(
        finding=finding,
        code=code,
        sentence=sentence,
        notes=_notes(inputs, finding, activity, witness, thresholds),
        activity=activity,
        attributed=attributed,
        cpu_witness=witness,
        no_energy=None if gpu is None else _no_energy(inputs, finding, activity, attributed, thresholds),
    )


def _no_energy(
    inputs: EvidenceInputs, finding: Finding, activity: Activity | None, attributed: bool | None, thresholds: Thresholds
) -> str | None:
    """Why the GPU's energy must not be charged to the arm; None if it may."""
    if finding is Finding.CPU_FALLBACK:
        return "the arm ran on the CPU, so the GPU's energy is not its own"
    if inputs.attribution.foreign:
        return "another process used the GPU"
    if _busy_gaps(inputs, thresholds) is not None:
        return "the GPU was busy with nothing sent"
    if activity == "idle":
        return "the GPU did no more than with nothing sent"
    return None if attributed else "the GPU's work cannot be attributed to this arm"


def judge_witness(witness: Witness, thresholds: Thresholds) -> bool | None:
    """C: True if the CPU worked per request as in the CPU control run, and the arm was no faster than that allows."""
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
    """The first reason why the data support no verdict."""
    health, load, gpu = inputs.health, inputs.load, inputs.gpu
    used = inputs.placement.used_device_uuid
    if health.gpu_lost:
        return Code.GPU_LOST_MIDRUN, "The driver lost a GPU during the run."
    if health.status != "ok":
        return Code.NO_NVML, f"The GPU could not be read ({health.status or 'no readings were stored'})."
    if health.device_changed:
        return Code.DEVICE_CHANGED, "The GPU's UUID, its driver or its energy counter changed during the run."
    if used is not None and used.startswith("MIG-"):
        return Code.WRONG_GPU, f"The server uses {used}, a part of a GPU, and readings exist of whole GPUs only."
    if used is not None and health.uuid != used:
        return Code.WRONG_GPU, f"The server uses {used}, and there are no readings of it."
    if gpu is None:
        return Code.WRONG_GPU, "There are several GPUs, and the server uses more than one, or does not report which."
    if health.healthy_before is not True or health.healthy_after is not True:
        return Code.NVML_UNHEALTHY, "A reading at the edges of the load failed or is missing."
    if load.window_s < thresholds.min_window_s:
        return Code.SHORT_WINDOW, f"{load.window_s:.1f} s of load, {thresholds.min_window_s:.0f} s are needed."
    if load.completed < thresholds.min_requests:
        return Code.FEW_REQUESTS, f"{load.completed} completed requests, {thresholds.min_requests} are needed."
    if load.errors > thresholds.max_error_share * (load.completed + load.errors):
        return Code.MANY_ERRORS, f"{load.errors} of {load.completed + load.errors} requests failed."
    if not load.gaps_before or not load.gaps_after:
        return Code.NO_IDLE_GAP, "Idle gaps before and after the load are needed, and at least one is missing."
    coverage = min(gpu.coverage, gpu.gap_coverage)
    if coverage < thresholds.min_coverage:
        return Code.LOW_COVERAGE, f"The readings cover {100 * coverage:.0f} % of the time."
    if (busy := _busy_gaps(inputs, thresholds)) is not None:
        return Code.UNATTRIBUTED, f"{busy}, so its activity under load cannot be attributed to this server."
    if inputs.attribution.foreign:
        pids = ", ".join(map(str, inputs.attribution.foreign_pids))
        return Code.UNATTRIBUTED, f"Another process used the GPU ({pids}), so its work cannot be attributed to any arm."
    return None


def _busy_gaps(inputs: EvidenceInputs, thresholds: Thresholds) -> str | None:
    """A clause that the GPU was busy with nothing sent, to begin a sentence; None if it was idle."""
    gpu, pids = inputs.gpu, inputs.attribution.foreign_pids
    if gpu is None or gpu.idle_utilisation_low <= thresholds.max_gap_utilisation:
        return None
    whose = f" (other processes on it: {', '.join(map(str, pids))})" if pids else ""
    return f"With nothing sent, the GPU was busy {100 * gpu.idle_utilisation_low:.0f} % of the time{whose}"


def _weigh(
    inputs: EvidenceInputs, activity: Activity, attributed: bool, witness: bool | None, thresholds: Thresholds
) -> tuple[Code | None, str]:
    """Without a code the finding is CPU_FALLBACK for an idle GPU, else GPU_VERIFIED."""
    placement, by_process = inputs.placement, inputs.placement.result == "unreported"
    if activity == "idle" and witness:
        return None, "The GPU did no more than with nothing sent, and the CPU worked as in the CPU control run."
    if placement.result == "unknown" or (placement.result == "partial" and placement.cpu_share is None):
        return Code.UNKNOWN_PLACEMENT, f"It is not known where the model is: {placement.reason}."
    if by_process and (missing := _missing_for_process(inputs, activity)) is not None:
        return Code.UNKNOWN_PLACEMENT, f"It is not known where the model is: {placement.reason}, and {missing}."
    if placement.result == "partial" and (placement.cpu_share or 0.0) > thresholds.max_partial_cpu_share:
        return Code.CONFLICT, f"Too much of the model runs on the CPU: {placement.reason}."
    if activity == "idle":
        return Code.CONFLICT, f"The GPU did no more than with nothing sent, although {placement.reason}."
    if witness:
        return Code.CONFLICT, "The GPU was active, yet the CPU worked as it does in the CPU control run."
    if activity == "weak":
        return Code.LOW_DUTY, "The GPU did more than when idle, but too little to tell from noise."
    if not attributed:
        return Code.UNATTRIBUTED, "The GPU was active, but the activity cannot be attributed to this server."
    if by_process:
        held = f"{(inputs.attribution.memory_bytes or 0) / 2**20:,.0f} MiB"
        return (
            None,
            f"The GPU was active with this server's requests; its processes held {held} there, and no other did.",
        )
    return None, f"The GPU was active with this server's requests, and {placement.reason}."


def _missing_for_process(inputs: EvidenceInputs, activity: Activity) -> str | None:
    """A clause with what is missing to verify a server by its process alone; None if nothing is."""
    attribution = inputs.attribution
    if attribution.processes_unknown is not None:
        return f"the server's processes are unknown: {attribution.processes_unknown}"
    if not attribution.pid_resolved:
        return "none of the server's processes is on the GPU's process list"
    if attribution.memory_bytes is None:
        return "the driver does not report that its processes hold memory of the GPU"
    if attribution.foreign is not False:
        return "processes on the GPU may belong to no arm"
    if inputs.control_idle is False:
        return "the CPU control run was not recognised"
    return "the GPU did no more than with nothing sent" if activity == "idle" else None


def _notes(
    inputs: EvidenceInputs, finding: Finding, activity: Activity | None, witness: bool | None, thresholds: Thresholds
) -> tuple[str, ...]:
    notes = []
    on_cpu = inputs.placement.result == "cpu"
    if on_cpu and (busy := _busy_gaps(inputs, thresholds)) is not None:
        notes.append(f"{busy[0].lower()}{busy[1:]}")
    if inputs.placement.result == "partial":
        notes.append(f"partly on the CPU: {inputs.placement.reason}")
    if on_cpu and activity == "active":
        notes.append("the GPU was active all the same: another process used it")
    if inputs.placement.result == "unreported" and finding is Finding.GPU_VERIFIED:
        cpu_s = inputs.witness.cpu_s_per_request
        hint = "" if cpu_s is None else f"; the server used {1000 * cpu_s:.3g} ms of CPU time per request"
        notes.append(f"not every node is shown to run on the GPU: the server does not report nodes on the CPU{hint}")
    if inputs.attribution.processes_unknown is not None:
        notes.append(f"the server's processes are unknown: {inputs.attribution.processes_unknown}")
    if inputs.attribution.foreign:
        notes.append(f"other processes on the GPU: {', '.join(map(str, inputs.attribution.foreign_pids))}")
    elif inputs.attribution.foreign_pids:
        pids = ", ".join(map(str, inputs.attribution.foreign_pids))
        notes.append(f"processes on the GPU that belong to no arm, or to an arm under the host's PIDs: {pids}")
    if inputs.gpu is not None and inputs.gpu.energy_source == "power":
        notes.append("energy is integrated from power readings: this GPU has no energy counter")
    if witness is None:
        notes.append("no CPU control run to compare the CPU's work with")
    return tuple(notes)
