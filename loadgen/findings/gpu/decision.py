"""The decision which processor executed an arm's model: gates first, then placement, activity, attribution and the CPU.

A pure function of the stored inputs and thresholds, with three answers: GPU_VERIFIED, CPU_FALLBACK, INCONCLUSIVE.

**Placement** is where the runtime says the model is, judged from the raw signals of the `/gpu-info` document, strictest
first. A server that says it runs on the CPU is believed; one that says it runs on the GPU is not: parameters on a CUDA
device are necessary and not sufficient, and ONNX Runtime lists its CUDA provider even where it executes nothing. A
document without a decisive signal is "unknown"; a server that has no such report is "unreported", and only its process
on the GPU can verify it.

**Activity** is whether the GPU did more under the load than in the idle gaps, by utilisation and by energy together.
**Attribution** is whether that was this arm's doing: by process, by exclusion, or by moving with its requests. A hole
in a series of readings leaves the answer unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any, Literal

import msgspec
import numpy as np

from loadgen.findings.gpu.records import (
    Activity,
    Attribution,
    DeviceReadings,
    EdgeLine,
    EvidenceInputs,
    EvidenceRecord,
    Gpu,
    GpuFinding,
    InconclusiveCode,
    Ns,
    Placement,
    PlacementResult,
    Thresholds,
    TimeSpan,
    Values,
    Witness,
)
from loadgen.records.machine import used_gpus
from loadgen.records.model_config import GPU_ONLY_BACKENDS, backend_name, groups, mapping, real
from loadgen.records.run import Label

EndedBefore = Callable[[Ns], Ns]
"""How many good answers of a load had ended before each of some moments."""
PERIOD_QUANTILE = 0.1
"""Quantile of the distances between samples that is taken as the driver's period: low, so that lost samples do not
stretch it."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Utilisation over some windows."""

    busy_s: float
    covered_s: float
    window_s: float

    @property
    def coverage(self) -> float:
        """Share of the windows' time that samples cover; 0 without windows."""
        return min(1.0, self.covered_s / self.window_s) if self.window_s > 0 else 0.0

    @property
    def low(self) -> float:
        """Share of time busy if the GPU was idle wherever there is no sample."""
        return self.busy_s / self.window_s if self.window_s > 0 else 0.0

    @property
    def high(self) -> float:
        """Share of time busy if the GPU was busy wherever there is no sample."""
        if self.window_s <= 0:
            return 1.0
        return min(1.0, (self.busy_s + max(0.0, self.window_s - self.covered_s)) / self.window_s)


def busy(device: DeviceReadings, windows: Sequence[TimeSpan], thresholds: Thresholds) -> Busy:
    """`busy_s = Σ u·Δt` and `covered_s = ΣΔt` over the parts of the samples that lie in the windows. A sample ends at
    its time stamp and begins at the one before, but not earlier than `max_sample_stretch` periods."""
    ends = device.sample_end_ns
    starts = _sample_starts(ends, thresholds)
    busy_s = covered_s = 0.0
    for window in windows:
        overlap = np.clip(np.minimum(ends, window.end_ns) - np.maximum(starts, window.start_ns), 0, None) / 1e9
        covered_s += float(overlap.sum())
        busy_s += float((overlap * device.sample_busy).sum())
    return Busy(busy_s, covered_s, sum(window.seconds for window in windows))


def _sample_starts(ends: Ns, thresholds: Thresholds) -> Ns:
    if len(ends) < 2:
        return ends.copy()
    distances = np.diff(ends)
    longest = int(np.quantile(distances, PERIOD_QUANTILE) * thresholds.max_sample_stretch)
    starts: Ns = ends - np.minimum(np.concatenate([distances[:1], distances]), longest)
    return starts


@dataclass(frozen=True, slots=True)
class EnergyCurve:
    """Joules against time: the device's counter, or the running integral of its power where it has no counter."""

    source: Literal["counter", "power"]
    at_ns: Ns
    joules: Values
    bracket_ns: int
    backwards: bool = False
    """The counter fell: the driver was reloaded, or this is another device."""

    def between(self, window: TimeSpan) -> float | None:
        """Energy over a window; None where a reading is missing at an edge, or power anywhere inside."""
        if self.backwards:
            return None
        start, end = self._at(window.start_ns), self._at(window.end_ns)
        if start is None or end is None:
            return None
        if self.source == "power":
            first, last = np.searchsorted(self.at_ns, (window.start_ns, window.end_ns))
            inside = self.at_ns[max(0, first - 1) : last + 1]
            if len(inside) > 1 and int(np.diff(inside).max()) > self.bracket_ns:
                return None
        return end - start

    def total(self, windows: Sequence[TimeSpan]) -> float | None:
        """Energy over all windows; None if one is unknown or there are no windows."""
        parts = [self.between(window) for window in windows]
        joules = [part for part in parts if part is not None]
        return sum(joules) if parts and len(joules) == len(parts) else None

    def coverage(self, windows: Sequence[TimeSpan]) -> float:
        """Share of the windows' time with a known energy."""
        whole = sum(window.seconds for window in windows)
        covered = sum(window.seconds for window in windows if self.between(window) is not None)
        return covered / whole if whole > 0 else 0.0

    def _at(self, at_ns: int) -> float | None:
        after = int(np.searchsorted(self.at_ns, at_ns))
        if after < len(self.at_ns) and self.at_ns[after] == at_ns:
            return float(self.joules[after])
        if after in (0, len(self.at_ns)) or self.at_ns[after] - self.at_ns[after - 1] > self.bracket_ns:
            return None
        return float(np.interp(at_ns, self.at_ns[after - 1 : after + 1], self.joules[after - 1 : after + 1]))


def energy_curve(device: DeviceReadings, thresholds: Thresholds) -> EnergyCurve:
    """The counter if it was read at least twice, else the power's integral (trapezoids), which may be empty."""
    bracket_ns = int(thresholds.max_energy_bracket_s * 1e9)
    if len(device.energy_at_ns) > 1:
        backwards = bool((np.diff(device.energy_joules) < 0).any())
        return EnergyCurve("counter", device.energy_at_ns, device.energy_joules, bracket_ns, backwards)
    watts = device.power_watts
    steps = (watts[1:] + watts[:-1]) / 2.0 * np.diff(device.power_at_ns) / 1e9
    return EnergyCurve("power", device.power_at_ns, np.concatenate([[0.0], np.cumsum(steps)]), bracket_ns)


def bins(windows: Sequence[TimeSpan], bin_s: float) -> tuple[TimeSpan, ...]:
    """Whole bins inside the windows, from each window's start; a shorter rest at its end is dropped."""
    step = int(bin_s * 1e9)
    return tuple(
        TimeSpan(start_ns=start, end_ns=start + step)
        for window in windows
        for start in range(window.start_ns, window.end_ns - step + 1, step)
    )


def usable_gaps(gaps: Sequence[TimeSpan], thresholds: Thresholds) -> tuple[TimeSpan, ...]:
    """The gaps without their settling time and their margin, if they are still long enough."""
    settle_ns, margin_ns = int(thresholds.gap_settle_s * 1e9), int(thresholds.gap_margin_s * 1e9)
    cut = [TimeSpan(start_ns=gap.start_ns + settle_ns, end_ns=gap.end_ns - margin_ns) for gap in gaps]
    return tuple(gap for gap in cut if gap.seconds >= thresholds.min_gap_s)


def measure_gpu(
    device: DeviceReadings, windows: Sequence[TimeSpan], gaps: Sequence[TimeSpan], items: int, thresholds: Thresholds
) -> Gpu:
    """Figures of one device; `gaps` as `usable_gaps` returns them, `items` executed in the windows. The sigmas are of 1
    s bins, not divided by the root of their number: neighbouring bins are not independent, and what differs between two
    gaps would differ in the load too."""
    load, idle = busy(device, windows, thresholds), busy(device, gaps, thresholds)
    curve = energy_curve(device, thresholds)
    energy = curve.total(windows)
    gap_energies = [(joules, gap.seconds) for gap in gaps if (joules := curve.between(gap)) is not None]
    gaps_s = sum(seconds for _, seconds in gap_energies)
    idle_power = sum(joules for joules, _ in gap_energies) / gaps_s if gaps_s > 0 else None
    excess = None if energy is None or idle_power is None else energy - idle_power * load.window_s
    idle_bins = bins(gaps, thresholds.bin_s)
    idle_watts = [joules / part.seconds for part in idle_bins if (joules := curve.between(part)) is not None]
    idle_parts = [busy(device, [part], thresholds) for part in idle_bins]
    idle_busy = [part.busy_s / part.covered_s for part in idle_parts if part.coverage >= thresholds.min_coverage]
    return Gpu(
        busy_s=load.busy_s,
        covered_s=load.covered_s,
        coverage=min(load.coverage, curve.coverage(windows)),
        gap_coverage=min(idle.coverage, curve.coverage(gaps)),
        utilisation_low=load.low,
        utilisation_high=load.high,
        idle_utilisation_low=idle.low,
        idle_utilisation_high=idle.high,
        gap_utilisation_high=tuple(busy(device, [gap], thresholds).high for gap in gaps),
        idle_utilisation_sigma=stdev(idle_busy) if len(idle_busy) > 1 else None,
        energy_joules=energy,
        energy_source=None if energy is None else curve.source,
        idle_power_watts=idle_power,
        idle_power_sigma_watts=stdev(idle_watts) if len(idle_watts) > 1 else None,
        energy_excess_joules=excess,
        joules_per_item=energy / items if energy is not None and items > 0 else None,
        excess_joules_per_item=excess / items if excess is not None and items > 0 else None,
    )


def together(gpus: Sequence[Gpu]) -> Gpu:
    """Several GPUs as one: the mean of what is a share, the least coverage, the sum of power and energy."""

    def total(values: Iterable[float | None]) -> float | None:
        known = list(values)
        return None if None in known else sum(value for value in known if value is not None)

    first, count = gpus[0], len(gpus)
    sums = {
        name: total(getattr(gpu, name) for gpu in gpus)
        for name in (
            "energy_joules", "idle_power_watts", "energy_excess_joules", "joules_per_item", "excess_joules_per_item",
        )
    }  # fmt: skip
    return msgspec.structs.replace(
        first,
        **sums,
        **{name: sum(getattr(gpu, name) for gpu in gpus) for name in ("busy_s", "covered_s")},
        **{name: min(getattr(gpu, name) for gpu in gpus) for name in ("coverage", "gap_coverage")},
        **{
            name: sum(getattr(gpu, name) for gpu in gpus) / count
            for name in ("utilisation_low", "utilisation_high", "idle_utilisation_low", "idle_utilisation_high")
        },
        gap_utilisation_high=tuple(map(max, zip(*(gpu.gap_utilisation_high for gpu in gpus), strict=True))),
        idle_utilisation_sigma=None,
        idle_power_sigma_watts=None,
    )


def judge_activity(gpu: Gpu, window_s: float, thresholds: Thresholds) -> Activity | None:
    """`active`, `idle` or `weak`; None without energy or an idle baseline, or if the GPU was busy in the gaps. Each
    side must hold under the assumption that is worst for it: "active" counts unsampled load as idle and unsampled gaps
    as busy, "idle" the other way round. So a lost reading never makes an arm look idle."""
    if gpu.energy_excess_joules is None or gpu.idle_power_watts is None or window_s <= 0:
        return None
    if gpu.idle_utilisation_low > thresholds.max_gap_utilisation:
        return None
    idle_energy = gpu.idle_power_watts * window_s
    if (
        gpu.utilisation_high - gpu.idle_utilisation_low <= thresholds.idle_utilisation_points / 100.0
        and abs(gpu.energy_excess_joules) <= thresholds.idle_energy_share * idle_energy
    ):
        return "idle"
    if gpu.idle_utilisation_sigma is None or gpu.idle_power_sigma_watts is None:
        return None
    rise = max(thresholds.active_utilisation_points / 100.0, thresholds.sigmas * gpu.idle_utilisation_sigma)
    extra = max(thresholds.active_energy_share * idle_energy, thresholds.sigmas * gpu.idle_power_sigma_watts * window_s)
    if gpu.utilisation_low - gpu.idle_utilisation_high >= rise and gpu.energy_excess_joules >= extra:
        return "active"
    return "weak"


def measure_attribution(
    device: DeviceReadings,
    edges: Sequence[EdgeLine],
    windows: Sequence[TimeSpan],
    gaps: Sequence[TimeSpan],
    gpu: Gpu,
    ended_before: EndedBefore,
    server_pids: Collection[int],
    own_pids: Collection[int],
    thresholds: Thresholds,
    unknown: Mapping[Label, str],
    label: Label,
) -> Attribution:
    """Measure the attribution. `edges`: of this arm's load. `server_pids`: the process tree of the arm's server;
    `own_pids`: of all arms'. Both in the PID namespace of this machine; empty if unknown. `unknown`: the arms whose
    processes are unknown, and why."""
    lists = [reading.processes or () for edge in edges for reading in edge.devices if reading.uuid == device.uuid]
    listed = {process.pid for processes in lists for process in processes}
    held = [[p.used_bytes for p in processes if p.pid in server_pids] for processes in lists]
    of_arms = set(own_pids) | set(server_pids)
    correlation, p_value, count = correlate(device, (*windows, *gaps), ended_before, thresholds)
    idle_limit = thresholds.idle_utilisation_points / 100.0
    return Attribution(
        pid_resolved=bool(listed & set(server_pids)) if listed and server_pids else None,
        exclusive=listed <= of_arms if listed and of_arms else None,
        foreign_pids=tuple(sorted(listed - of_arms)) if of_arms else (),
        gaps_idle=max(gpu.gap_utilisation_high) <= idle_limit if len(gpu.gap_utilisation_high) > 1 else None,
        correlation=correlation,
        p_value=p_value,
        bins=count,
        foreign=bool(listed - of_arms) if listed & of_arms and not unknown else None,
        memory_bytes=max((sum(size or 0 for size in sizes) for sizes in held), default=0) or None,
        processes_unknown=unknown.get(label),
    )


def judge_attribution(attribution: Attribution, thresholds: Thresholds) -> bool:
    """Whether one of the three ways attributes the activity to the arm; a way that could not be tried does not."""
    if attribution.pid_resolved or (attribution.exclusive and attribution.gaps_idle):
        return True
    return (
        attribution.correlation is not None
        and attribution.p_value is not None
        and attribution.correlation >= thresholds.min_correlation
        and attribution.p_value < thresholds.max_p_value
    )


def correlate(
    device: DeviceReadings, windows: Sequence[TimeSpan], ended_before: EndedBefore, thresholds: Thresholds
) -> tuple[float | None, float | None, int]:
    """Pearson's ρ of completed requests per second and busy share, its p by circular shift, and the number of bins.

    Bins are 1 s, or a whole window that is shorter; those that the samples do not cover are left out. The shift keeps
    the autocorrelation of both series, which a permutation would destroy (and thereby find significance everywhere).
    `windows`: the arm's load and the gaps, never another arm's load; they are joined in order of time.
    """
    points: list[tuple[float, float]] = []
    ordered_windows = sorted(windows, key=lambda w: w.start_ns)
    parts = [part for w in ordered_windows for part in (bins([w], thresholds.bin_s) or (w,))]
    edges_ns = np.array([(part.start_ns, part.end_ns) for part in parts], dtype=np.int64).reshape(-1, 2)
    done = np.diff(ended_before(edges_ns), axis=1)[:, 0].tolist()
    for part, answers in zip(parts, done, strict=True):
        share = busy(device, [part], thresholds)
        if share.coverage >= thresholds.min_coverage:
            points.append((answers / part.seconds, share.busy_s / share.covered_s))
    if len(points) < 3:
        return None, None, len(points)
    requests, activity = np.array(points, dtype=np.float64).T
    correlation = _pearson(requests, activity)
    if correlation is None:
        return None, None, len(points)
    # The unshifted series counts among the shifts (Phipson & Smyth 2010), so p is never 0.
    shifted = [_pearson(np.roll(requests, shift), activity) for shift in range(len(points))]
    as_good = sum(1 for value in shifted if value is not None and value >= correlation - 1e-12)
    return correlation, as_good / len(points), len(points)


def _pearson(a: Values, b: Values) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else None


GPU_PROVIDERS = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")

Judgement = tuple[PlacementResult, float | None, str]
"""The model's device, the CPU's share of it, the reason."""


def judge_placement(
    gpu_info: Mapping[str, Any] | None, model_config: Mapping[str, Any] | None, thresholds: Thresholds
) -> Placement:
    """Placement from the server's documents; other servers may offer neither, or anything at all."""
    runtime = mapping((gpu_info or {}).get("runtime"))
    result, share, reason = _judge(runtime, model_config or {}, thresholds)
    used = used_gpus(gpu_info)
    return Placement(
        result=result, cpu_share=share, reason=reason, used_device_uuid=used[0] if len(used) == 1 else None
    )


def _judge(runtime: Mapping[str, Any], config: Mapping[str, Any], thresholds: Thresholds) -> Judgement:
    placement = mapping(runtime.get("placement"))
    nodes, params = mapping(placement.get("ep_nodes")), mapping(placement.get("params_by_device"))
    if any(real(count) is None for count in (*nodes.values(), *params.values())):
        return "unknown", None, "the server's counts are not numbers"
    if nodes:
        return _from_nodes(nodes, placement, thresholds)
    if params:
        return _from_parameters(params, real(mapping(runtime.get("kernel_probe")).get("kernel_count")))
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
    share = real(placement.get("cpu_time_ratio"))
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


def decide(
    label: Label, workload: str | None, inputs: EvidenceInputs, thresholds: Thresholds, *, control: bool = False
) -> EvidenceRecord:
    """GPU_VERIFIED, CPU_FALLBACK or INCONCLUSIVE with a code; without the energy per item where the GPU's energy must
    not be charged to the arm."""
    placement, gpu = inputs.placement, inputs.gpu
    activity = judge_activity(gpu, inputs.load.window_s, thresholds) if gpu is not None else None
    attributed = None
    if gpu is not None:
        shared = inputs.attribution.foreign or _busy_gaps(inputs, thresholds) is not None
        attributed = not shared and judge_attribution(inputs.attribution, thresholds)
    witness = judge_witness(inputs.witness, thresholds)
    code: InconclusiveCode | None = None
    finding = GpuFinding.INCONCLUSIVE
    if placement.result == "cpu":  # the runtime reports this itself, so no gate can overrule it
        finding, sentence = GpuFinding.CPU_FALLBACK, f"The model runs on the CPU: {placement.reason}."
    elif (gate := _gate(inputs, thresholds)) is not None:
        code, sentence = gate
    elif activity is None:
        code, sentence = (
            InconclusiveCode.LOW_COVERAGE,
            "Energy or the idle baseline could not be read for the whole load.",
        )
    else:
        code, sentence = _weigh(inputs, activity, attributed is True, witness, thresholds)
        if code is None:
            finding = GpuFinding.CPU_FALLBACK if activity == "idle" else GpuFinding.GPU_VERIFIED
    no_energy = None if gpu is None else _no_energy(inputs, finding, activity, attributed, thresholds)
    if gpu is not None and no_energy is not None:
        uncharged = msgspec.structs.replace(gpu, joules_per_item=None, excess_joules_per_item=None)
        inputs = msgspec.structs.replace(inputs, gpu=uncharged)
    return EvidenceRecord(
        finding=finding,
        code=code,
        sentence=sentence,
        notes=_notes(inputs, finding, activity, witness, thresholds),
        activity=activity,
        attributed=attributed,
        cpu_witness=witness,
        no_energy=no_energy,
        label=label,
        workload=workload,
        control=control,
        inputs=inputs,
        thresholds=thresholds,
    )


def decide_together(records: Sequence[EvidenceRecord]) -> EvidenceRecord:
    """The finding for an arm on several GPUs, of which there is a record each: verified only if it is on all of them.
    Where one is not, its finding, code and sentence count. The activity is the least of all, of the CPU control run,
    whose GPUs have to be idle, the most."""
    worst = next((record for record in records if record.finding is not GpuFinding.GPU_VERIFIED), None)
    first, activities = records[0], [record.activity for record in records]
    order: tuple[Activity | None, ...] = (None, "idle", "weak", "active")
    if first.control:
        order = ("active", "weak", None, "idle")
    gpus = [record.inputs.gpu for record in records if record.inputs.gpu is not None]
    telling = worst or first
    uuids = ",".join(str(record.uuid) for record in records)
    inputs = msgspec.structs.replace(
        telling.inputs,
        gpu=together(gpus) if len(gpus) == len(records) else None,
        health=msgspec.structs.replace(telling.inputs.health, uuid=uuids),
    )
    return msgspec.structs.replace(
        telling,
        sentence=f"On each of {len(records)} GPUs: {first.sentence[0].lower()}{first.sentence[1:]}"
        if worst is None
        else f"{worst.uuid}: {worst.sentence}",
        notes=tuple(dict.fromkeys(note for record in records for note in record.notes)),
        activity=next(one for one in order if one in activities),
        attributed=None if None in [one.attributed for one in records] else all(one.attributed for one in records),
        no_energy=next((record.no_energy for record in records if record.no_energy is not None), None),
        inputs=inputs,
        gpus=tuple(records),
    )


def _no_energy(
    inputs: EvidenceInputs,
    finding: GpuFinding,
    activity: Activity | None,
    attributed: bool | None,
    thresholds: Thresholds,
) -> str | None:
    """Why the GPU's energy must not be charged to the arm; None if it may."""
    if finding is GpuFinding.CPU_FALLBACK:
        return "the arm ran on the CPU, so the GPU's energy is not its own"
    if inputs.attribution.foreign:
        return "another process used the GPU"
    if _busy_gaps(inputs, thresholds) is not None:
        return "the GPU was busy with nothing sent"
    if activity == "idle":
        return "the GPU did no more than with nothing sent"
    return None if attributed else "the GPU's work cannot be attributed to this arm"


def judge_witness(witness: Witness, thresholds: Thresholds) -> bool | None:
    """True if the CPU worked per request as in the CPU control run, and the arm was no faster than that allows."""
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


def _gate(inputs: EvidenceInputs, thresholds: Thresholds) -> tuple[InconclusiveCode, str] | None:
    """The first reason why the data support no verdict."""
    health, load, gpu = inputs.health, inputs.load, inputs.gpu
    used = inputs.placement.used_device_uuid
    if health.gpu_lost:
        return InconclusiveCode.GPU_LOST_MIDRUN, "The driver lost a GPU during the run."
    if health.status != "ok":
        return InconclusiveCode.NO_NVML, f"The GPU could not be read ({health.status or 'no readings were stored'})."
    if health.device_changed:
        return (
            InconclusiveCode.DEVICE_CHANGED,
            "The GPU's UUID, its driver or its energy counter changed during the run.",
        )
    if used is not None and used.startswith("MIG-"):
        return (
            InconclusiveCode.WRONG_GPU,
            f"The server uses {used}, a part of a GPU, and readings exist of whole GPUs only.",
        )
    if used is not None and health.uuid != used:
        return InconclusiveCode.WRONG_GPU, f"The server uses {used}, and there are no readings of it."
    if gpu is None:
        return (
            InconclusiveCode.WRONG_GPU,
            "There are several GPUs, and the server uses more than one, or does not report which.",
        )
    if health.healthy_before is not True or health.healthy_after is not True:
        return InconclusiveCode.NVML_UNHEALTHY, "A reading at the edges of the load failed or is missing."
    if load.window_s < thresholds.min_window_s:
        return (
            InconclusiveCode.SHORT_WINDOW,
            f"{load.window_s:.1f} s of load, {thresholds.min_window_s:.0f} s are needed.",
        )
    if load.completed < thresholds.min_requests:
        return (
            InconclusiveCode.FEW_REQUESTS,
            f"{load.completed} completed requests, {thresholds.min_requests} are needed.",
        )
    if load.errors > thresholds.max_error_share * (load.completed + load.errors):
        return InconclusiveCode.MANY_ERRORS, f"{load.errors} of {load.completed + load.errors} requests failed."
    if not load.gaps_before or not load.gaps_after:
        return (
            InconclusiveCode.NO_IDLE_GAP,
            "Idle gaps before and after the load are needed, and at least one is missing.",
        )
    coverage = min(gpu.coverage, gpu.gap_coverage)
    if coverage < thresholds.min_coverage:
        return InconclusiveCode.LOW_COVERAGE, f"The readings cover {100 * coverage:.0f} % of the time."
    if (busy := _busy_gaps(inputs, thresholds)) is not None:
        return InconclusiveCode.UNATTRIBUTED, f"{busy}, so its activity under load cannot be attributed to this server."
    if inputs.attribution.foreign:
        pids = ", ".join(map(str, inputs.attribution.foreign_pids))
        return (
            InconclusiveCode.UNATTRIBUTED,
            f"Another process used the GPU ({pids}), so its work cannot be attributed to any arm.",
        )
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
) -> tuple[InconclusiveCode | None, str]:
    """Without a code the finding is CPU_FALLBACK for an idle GPU, else GPU_VERIFIED."""
    placement, by_process = inputs.placement, inputs.placement.result == "unreported"
    if activity == "idle" and witness:
        return None, "The GPU did no more than with nothing sent, and the CPU worked as in the CPU control run."
    if placement.result == "unknown" or (placement.result == "partial" and placement.cpu_share is None):
        return InconclusiveCode.UNKNOWN_PLACEMENT, f"It is not known where the model is: {placement.reason}."
    if by_process and (missing := _missing_for_process(inputs, activity)) is not None:
        return (
            InconclusiveCode.UNKNOWN_PLACEMENT,
            f"It is not known where the model is: {placement.reason}, and {missing}.",
        )
    if placement.result == "partial" and (placement.cpu_share or 0.0) > thresholds.max_partial_cpu_share:
        return InconclusiveCode.CONFLICT, f"Too much of the model runs on the CPU: {placement.reason}."
    if activity == "idle":
        return InconclusiveCode.CONFLICT, f"The GPU did no more than with nothing sent, although {placement.reason}."
    if witness:
        return InconclusiveCode.CONFLICT, "The GPU was active, yet the CPU worked as it does in the CPU control run."
    if activity == "weak":
        return InconclusiveCode.LOW_DUTY, "The GPU did more than when idle, but too little to tell from noise."
    if not attributed:
        return (
            InconclusiveCode.UNATTRIBUTED,
            "The GPU was active, but the activity cannot be attributed to this server.",
        )
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
    inputs: EvidenceInputs, finding: GpuFinding, activity: Activity | None, witness: bool | None, thresholds: Thresholds
) -> tuple[str, ...]:
    notes = []
    on_cpu = inputs.placement.result == "cpu"
    if on_cpu and (busy := _busy_gaps(inputs, thresholds)) is not None:
        notes.append(f"{busy[0].lower()}{busy[1:]}")
    if inputs.placement.result == "partial":
        notes.append(f"partly on the CPU: {inputs.placement.reason}")
    if on_cpu and activity == "active":
        notes.append("the GPU was active all the same: another process used it")
    if inputs.placement.result == "unreported" and finding is GpuFinding.GPU_VERIFIED:
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
