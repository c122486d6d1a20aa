"""What must be the same for two runs to be compared, and what else differs between them, each by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from loadgen.analysis.result import Result
from loadgen.evidence.devices import own_devices, used_gpu
from loadgen.records.run import Experiment, Record

Kind = Literal["machine", "gpu", "software", "load", "arm"]
HOST = ("cpu_model", "cpu_count", "kernel", "architecture", "glibc", "os", "virtualisation", "python")
BINDING: frozenset[Kind] = frozenset(("machine", "gpu", "software", "load"))
"""Differences that refuse a comparison of two runs. Those of an arm are what one compares runs for."""


class Difference(Record, frozen=True, kw_only=True):
    """One thing that is not the same in both runs; None where a run does not tell."""

    kind: Kind
    name: str
    old: str | None
    new: str | None


def differences(old: Result, new: Result) -> tuple[Difference, ...]:
    """All of them: machine, GPU, software and load first, then the arms."""
    both = (old, new)
    parts: tuple[tuple[Kind, tuple[dict[str, str | None], dict[str, str | None]]], ...] = (
        ("machine", (_machine(old), _machine(new))),
        ("gpu", (_gpu(old), _gpu(new))),
        ("software", (_software(old), _software(new))),
        ("load", (_load(old.experiment), _load(new.experiment))),
        ("load", (_inputs(old), _inputs(new))),
        ("arm", (_arms(old), _arms(new))),
    )
    if any(result.environment is None for result in both):
        unknown = ["recorded" if result.environment is not None else None for result in both]
        missing = Difference(kind="machine", name="environment", old=unknown[0], new=unknown[1])
        parts = parts[3:]
        return (missing, *(found for kind, sides in parts for found in _between(kind, *sides)))
    return tuple(found for kind, sides in parts for found in _between(kind, *sides))


def _between(kind: Kind, old: Mapping[str, str | None], new: Mapping[str, str | None]) -> Iterator[Difference]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before != after:
            yield Difference(kind=kind, name=name, old=before, new=after)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _machine(result: Result) -> dict[str, str | None]:
    host = result.environment.host if result.environment else {}
    return {name: _text(host.get(name)) for name in HOST} | {"memory": _memory(host.get("memory_bytes"))}


def _memory(size: object) -> str | None:
    """In GiB: what the kernel keeps for itself differs by some pages from boot to boot."""
    return f"{size / 2**30:.0f} GiB" if isinstance(size, int | float) else None


def _gpu(result: Result) -> dict[str, str | None]:
    gpu = result.environment.gpu if result.environment else {}
    found: dict[str, str | None] = {}
    nvml = gpu.get("nvml")
    if isinstance(nvml, Mapping):
        found |= {name: _text(nvml.get(name)) for name in ("driver_version", "cuda_driver_version")}
    used = used_gpu(gpu)
    for number, device in enumerate(own_devices(gpu, () if used is None else (used,))):
        found[f"GPU {number}"] = _text(device.get("name"))
    return found


def _software(result: Result) -> dict[str, str | None]:
    return dict(result.environment.packages) if result.environment else {}


def _load(experiment: Experiment) -> dict[str, str | None]:
    cells = {f"cell {cell.name}": f"{cell.requests} requests, {cell.seconds:g} s a block" for cell in experiment.cells}
    return {
        "model": experiment.model,
        "weights": experiment.weights,
        "transport": experiment.transport,
        "payload of a": experiment.payload_of(experiment.a),
        "payload of b": experiment.payload_of(experiment.b),
        "threads": str(experiment.threads),
        "deployment": experiment.deployment,
        **cells,
    }


def _inputs(result: Result) -> dict[str, str | None]:
    inputs = result.environment.inputs if result.environment else {}
    return {f"inputs, {name}": _text(value) for name, value in inputs.items()}


def _arms(result: Result) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for request in (result.experiment.a, result.experiment.b):
        found[f"{request.label}: target"] = request.target
        found |= {f"{request.label}: {name}": value for name, value in request.settings.items()}
    for arm in result.arms:
        found[f"{arm.label}: server"] = arm.title
        effect = {f"{arm.label}: {name} in effect": _text(value) for name, value in arm.in_effect.items()}
        found |= dict(sorted(effect.items()))
    if result.environment is not None:
        found["git commit"] = result.environment.git_commit
    return found
