"""From a stored result to the options that can be ranked, and what of it cannot be, with the reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loadgen.engine_matrix.cells import has_copies
from loadgen.engine_matrix.records import ConfigurationResult, Estimate, Matrix
from loadgen.probes.gpu.analysis import GpuFound
from loadgen.probes.rate_search_analysis import RatesFound
from loadgen.quantities import Interval
from loadgen.ranking.records import Candidate, LeftOut, Machine, Point, Work
from loadgen.records.run import ArmRecord, Environment, Label, Workload, item_of, shown
from loadgen.stats.ratios import geometric_mean, interval_of_mean
from loadgen.verdict.checks.registry import complaints
from loadgen.verdict.result_file import Result

NOT_REPORTED = "not reported"
_NS_PER_MS = 1e6
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_JOINED = {"kernel": "kernels", "python": "Python versions", "virtualisation": "virtualisations"}
"""Fields of `Environment.host` that do not tell kinds of machines apart, but are named where they differ."""


@dataclass(frozen=True, slots=True)
class Read:
    """What one result holds: `environment` None means that it failed before it knew its machine."""

    name: str
    environment: Environment | None
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]


def machine_of(environment: Environment) -> Machine:
    """The kind of machine, without results; `name` is not unique yet."""
    host = environment.host
    gpus = tuple(sorted(str(device.get("name") or "GPU") for device in _devices(environment.gpu)))
    cores = host.get("cpu_count")
    known = {
        "architecture": _text(host.get("architecture")),
        "cpu_model": _text(host.get("cpu_model")),
        "cpu_count": cores if isinstance(cores, int) else None,
        "gpus": gpus,
    }
    digest = hashlib.sha256(msgspec.json.encode(known, order="sorted")).hexdigest()[:12]
    kinds = [f"{count} × {name}" if (count := gpus.count(name)) > 1 else name for name in dict.fromkeys(gpus)]
    counted = f"{cores} cores" if isinstance(cores, int) else "unknown CPU"
    name = ", ".join([*(kind.replace("NVIDIA ", "") for kind in kinds), counted])
    return msgspec.convert({"id": digest, "name": name, **known}, Machine)


def join_machines(reads: list[Read]) -> tuple[Machine, ...]:
    """One machine per kind with its results, and what differs between those; the names are unique."""
    found: dict[str, Machine] = {}
    environments: dict[str, list[Environment]] = {}
    for read in reads:
        if read.environment is not None:
            machine = machine_of(read.environment)
            before = found.get(machine.id, machine)
            found[machine.id] = msgspec.structs.replace(before, results=(*before.results, read.name))
            environments.setdefault(machine.id, []).append(read.environment)
    names = [machine.name for machine in found.values()]
    unique = []
    for key, machine in found.items():
        name = machine.name
        if names.count(name) > 1:
            name = f"{name} ({names[: list(found).index(key)].count(name) + 1})"
        unique.append(msgspec.structs.replace(machine, name=name, notes=tuple(_notes(environments[key]))))
    return tuple(unique)


def _notes(environments: list[Environment]) -> Iterator[str]:
    """What differs between results of one kind of machine."""
    for field, words in _JOINED.items():
        values = {str(one.host.get(field)) for one in environments}
        if len(values) > 1:
            yield f"the results have different {words}: {', '.join(sorted(values))}"
    drivers = {str(nvml.get("driver_version")) for one in environments if isinstance(nvml := one.gpu.get("nvml"), dict)}
    if len(drivers) > 1:
        yield f"the results have different GPU drivers: {', '.join(sorted(drivers))}"
    uuids = {tuple(sorted(str(d.get("uuid")) for d in _devices(one.gpu))) for one in environments}
    if len(uuids) > 1:
        yield f"the results come from {len(uuids)} machines of this kind, told apart by their GPUs"


def _devices(gpu: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    devices = (gpu or {}).get("devices")
    return [one for one in devices if isinstance(one, dict)] if isinstance(devices, list) else []


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def from_matrix(name: str, matrix: Matrix) -> Read:
    """One option per configuration and sequence length, with a point per batch size."""
    machine = machine_of(matrix.environment).id
    candidates, left_out = [], []
    for place, found in enumerate(matrix.configurations):
        cells = [cell for cell in matrix.cells if cell.configuration == place]
        copied = any(has_copies(cell, found.configuration.device) for cell in cells)
        own = configuration_name(found) + (" (with copies)" if copied else "")
        payload = matrix.plan.settings.get("payload")
        if not cells:
            error = found.errors[0] if found.errors else "no cell was measured"
            left_out.append(LeftOut(result=name, what=f"{own}, {found.configuration.model}", reason=error))
        for length in dict.fromkeys(cell.length for cell in cells):
            points = []
            for cell in (one for one in cells if one.length == length):
                reason = cell.excluded or cell.fault
                if reason is None and not cell.items_per_second.value > 0.0:
                    reason = "no throughput was measured"
                if reason is not None:
                    what = f"{own}, {found.configuration.model}, batch {cell.batch}{_at(length)}"
                    left_out.append(LeftOut(result=name, what=what, reason=reason))
                    continue
                points.append(
                    Point(
                        name=f"batch {cell.batch}",
                        kind="batch",
                        items_per_second=cell.items_per_second,
                        latency_ms=_scaled(cell.latency_ns, 1 / _NS_PER_MS),
                        joules_per_item=cell.joules_per_item,
                    )
                )
            if points:
                work = Work(
                    source="engines",
                    model=found.configuration.model,
                    precision=found.configuration.precision,
                    weights=_weights_of(found, matrix),
                    length=None if length is None else str(length),
                    payload=None if payload is None else str(payload),
                    item=found.item,
                )
                candidates.append(Candidate(work=work, name=own, machine=machine, result=name, points=tuple(points)))
    if matrix.state is None or matrix.state.state != "finished":
        reason = "the run did not finish; continue it with abserve engines --resume DIR"
        left_out.append(LeftOut(result=name, what="the rounds that are missing", reason=reason))
    refused = [
        LeftOut(result=name, what=_configured(one.configuration), reason=one.reason) for one in matrix.plan.refused
    ]
    return Read(name, matrix.environment, tuple(candidates), (*left_out, *refused))


def configuration_name(found: ConfigurationResult) -> str:
    """torch/graph; onnxruntime/extended on the CPU with 2 threads."""
    one = found.configuration
    threads = "" if one.threads is None else f", {one.threads} thread{'' if one.threads == 1 else 's'}"
    return f"{one.engine}/{one.mode}{' CPU' if one.device == 'cpu' else ''}{threads}"


def _configured(one: Any) -> str:
    return f"{one.engine}/{one.mode}, {one.model}, {one.precision}, {one.device}"


def _weights_of(found: ConfigurationResult, matrix: Matrix) -> str:
    return str(found.description.get("weights") or matrix.plan.settings.get("weights") or NOT_REPORTED)


def _at(length: int | None) -> str:
    return "" if length is None else f", length {length}"


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    low, high = (None if bound is None else bound * factor for bound in (estimate.low, estimate.high))
    return Estimate(value=estimate.value * factor, low=low, high=high)


def from_result(name: str, result: Result) -> Read:
    """One option per arm and sequence length, with a point per workload."""

    def nothing(reason: str) -> Read:
        left = LeftOut(result=name, what=f"the comparison of {result.experiment.model}", reason=reason)
        return Read(name, result.environment, (), (left,))

    if not result.valid:
        return nothing(f"it is INVALID: {'; '.join(complaints(result.checks)) or 'see its report'}")
    if result.environment is None:
        return nothing("it does not describe its machine")
    machine = machine_of(result.environment).id
    weights = next((str(arm.in_effect["weights"]) for arm in result.arms if arm.in_effect.get("weights")), None)
    candidates: list[Candidate] = []
    left_out: list[LeftOut] = []
    for arm in result.arms:
        what = f"{shown(arm.label)} {arm.title}"
        if not arm.launched and (urlsplit(arm.url).hostname or "") not in _LOOPBACK:
            reason = "the result describes the load generator's machine, and this server ran on another one"
            left_out.append(LeftOut(result=name, what=what, reason=reason))
            continue
        request = result.experiment.arm(arm.label)
        by_length: dict[str | None, list[Point]] = {}
        for workload in result.experiment.workloads:
            point, reason = _point(result, arm.label, workload)
            if point is not None:
                by_length.setdefault(_length(result.environment, workload), []).append(point)
            elif reason:
                left_out.append(LeftOut(result=name, what=f"{what} in {workload.name}", reason=reason))
        for length, points in by_length.items():
            work = Work(
                source="comparison",
                model=result.experiment.reference_of(request),
                precision=str(arm.in_effect.get("precision") or NOT_REPORTED),
                weights=str(arm.in_effect.get("weights") or weights or result.experiment.weights),
                payload=result.experiment.payload_of(request),
                transport=result.experiment.transport,
                length=length,
                item=item_of(result.environment),
            )
            own = _arm_name(arm)
            candidates.append(Candidate(work=work, name=own, machine=machine, result=name, points=tuple(points)))
    return Read(name, result.environment, tuple(candidates), tuple(left_out))


def _arm_name(arm: ArmRecord) -> str:
    """The arm's title; the device is named where the title does not."""
    mode = str(arm.in_effect.get("mode") or "")
    return arm.title if not mode or mode in arm.title else f"{arm.title} ({mode})"


def _length(environment: Environment, workload: Workload) -> str | None:
    fixed = environment.length_of(workload)
    if fixed is not None:
        return str(fixed)
    least, most = environment.inputs.get("length_min"), environment.inputs.get("length_max")
    return None if most is None else f"{least}–{most}"


def _point(result: Result, label: Label, workload: Workload) -> tuple[Point | None, str]:
    """What an arm did in a workload, or why that is not ranked; no reason for a workload of another kind."""
    if any(
        one.scenario == workload.name and label in (one.baseline, one.arm) and one.verdict == "invalid"
        for one in result.comparisons
    ):
        return None, "a check that covers it failed"
    if workload.scenario == "slo":
        return _slo_point(result, label, workload)
    if not workload.has_blocks:
        return None, ""
    summary = next((s for s in result.summaries if (s.workload, s.label) == (workload.name, label)), None)
    if summary is None or not summary.throughput_per_s:
        return None, "no throughput was measured"
    if summary.open_loop is not None and summary.open_loop.saturation is not None:
        return None, f"{summary.open_loop.saturation}, so that its latency depends on the length of the run"
    p99 = summary.latency.p99_ms
    return Point(
        name=workload.name,
        kind="open" if workload.is_open else "closed",
        items_per_second=_estimate(summary.throughput_per_s, summary.throughput_ci95),
        latency_ms=None if p99 is None else Estimate(value=p99),
        joules_per_item=_joules(result, label, workload.name),
    ), ""


def _slo_point(result: Result, label: Label, workload: Workload) -> tuple[Point | None, str]:
    """The rate that held the bound: the geometric mean of the searches, in items."""
    study = result.of(RatesFound)
    found = [one for one in study.rates if (one.workload, one.label) == (workload.name, label)]
    rates = [one.rate_per_s * workload.batch_size for one in found if one.rate_per_s]
    if not rates:
        return None, "no rate held the latency bound"
    if len(rates) < len(found):
        return None, f"only {len(rates)} of {len(found)} searches found a rate that held the latency bound"
    at_rates = {(one.round, one.rate_per_s) for one in found}
    tails = [
        trial.p99_ms
        for trial in study.trials
        if (trial.workload, trial.label) == (workload.name, label)
        and trial.held
        and trial.p99_ms is not None
        and (trial.round, trial.rate_per_s) in at_rates
    ]
    return Point(
        name=workload.name,
        kind="slo",
        items_per_second=_estimate(geometric_mean(rates), interval_of_mean(rates)),
        latency_ms=Estimate(value=max(tails)) if tails else None,
    ), ""


def _joules(result: Result, label: Label, workload: str) -> Estimate | None:
    evidence = result.of(GpuFound).evidence
    for record in () if evidence is None else evidence.records:
        if (record.label, record.workload, record.control, record.no_energy) == (label, workload, False, None):
            gpu = record.inputs.gpu
            return None if gpu is None or gpu.joules_per_item is None else Estimate(value=gpu.joules_per_item)
    return None


def _estimate(value: float, interval: Interval | None) -> Estimate:
    low, high = interval or (None, None)
    return Estimate(value=value, low=low, high=high)
