"""Checks on the machine right before the load: distance, GPUs, processors. Without readings all of them are unknown."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.analysis.checks.fairness.model_config import kind_of
from loadgen.analysis.checks.outcome import Check, CheckName, make_check
from loadgen.quantities import number, share
from loadgen.records.conditions import ArmConditions, Conditions, GpuCondition
from loadgen.records.run import ArmRecord

WAN_MS = 2.0
"""A round trip beyond it is no local network's."""
BUSY_CORES_LIMIT = 0.10
BUSY_GPU_LIMIT = 0.05
SLOWING = ("hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake", "software_power_cap")
"""Clock event reasons that slow a GPU down; idling and clocks that somebody set are none."""


def check_conditions(conditions: Conditions | None, arms: Sequence[ArmRecord]) -> list[Check]:
    """All of them, of a run that was to have load; `arms` say where they execute."""
    if conditions is None:
        names = (CheckName.CLIENT_DISTANCE, CheckName.MACHINE_IDLE, CheckName.CPU_GOVERNOR)
        return [make_check(name, None, detail="no readings were taken before the load") for name in names]
    on_gpu = bool(conditions.gpus) or any(
        str(arm.in_effect.get("device", "")).startswith("cuda") or kind_of(arm) == "KIND_GPU" for arm in arms
    )
    return [
        _distance(conditions.arms),
        _idle(conditions.cpu_busy_share),
        _governor(conditions.cpu_governors),
        *([_exclusive(conditions), _gpu_idle(conditions.gpus), _clocks(conditions.gpus)] if on_gpu else []),
    ]


def distance_of(arm: ArmConditions) -> str | None:
    """loopback, LAN or WAN by the measured round trip; None where it is unknown."""
    if arm.loopback:
        return "loopback"
    return None if arm.connect_ms is None else "WAN" if arm.connect_ms > WAN_MS else "LAN"


def _distance(arms: Sequence[ArmConditions]) -> Check:
    threshold = f"alike, and no WAN (> {WAN_MS:g} ms)"
    classes = {arm.label.upper(): distance_of(arm) for arm in arms}
    if not classes or None in classes.values():
        return make_check(
            CheckName.CLIENT_DISTANCE, None, threshold=threshold, detail="no connection could be timed to each arm"
        )
    told = ", ".join(
        f"{arm.label.upper()} {classes[arm.label.upper()]}"
        + ("" if arm.connect_ms is None else f" ({number(arm.connect_ms)} ms)")
        for arm in arms
    )
    found = set(classes.values())
    detail = told
    if "WAN" in found:
        detail += ": the network is a part of what is compared"
    elif len(found) > 1:
        detail += ": the arms are not equally far away"
    return make_check(
        CheckName.CLIENT_DISTANCE,
        len(found) == 1 and "WAN" not in found,
        value=max((arm.connect_ms for arm in arms if arm.connect_ms is not None), default=None),
        threshold=threshold,
        detail=detail,
    )


def _idle(busy: float | None) -> Check:
    if busy is None:
        return make_check(
            CheckName.MACHINE_IDLE, None, threshold=BUSY_CORES_LIMIT, detail="the processors' load is unknown"
        )
    return make_check(
        CheckName.MACHINE_IDLE,
        busy <= BUSY_CORES_LIMIT,
        value=busy,
        threshold=BUSY_CORES_LIMIT,
        detail=f"with nothing sent, {share(busy)} of the cores that the load generator may use were busy",
    )


def _governor(governors: tuple[str, ...] | None) -> Check:
    if governors is None:
        detail = "the kernel does not tell how it chooses clocks (as in most virtual machines)"
        return make_check(CheckName.CPU_GOVERNOR, None, threshold="performance", detail=detail)
    return make_check(
        CheckName.CPU_GOVERNOR,
        governors == ("performance",),
        value=", ".join(governors),
        threshold="performance",
        detail=f"the CPU governor is {', '.join(governors)}",
    )


def _exclusive(conditions: Conditions) -> Check:
    listed = [gpu for gpu in conditions.gpus if gpu.pids is not None]
    if not listed:
        return make_check(CheckName.GPU_EXCLUSIVE, None, threshold=0, detail="the GPU's processes are not told")
    own = {pid for arm in conditions.arms for pid in arm.pids}
    pids = {pid for gpu in listed for pid in gpu.pids or ()}
    foreign = sorted(pids - own)
    if foreign and not pids & own:
        detail = f"{len(foreign)} processes use the GPU, numbered as on another host: whose they are is unknown"
        return make_check(CheckName.GPU_EXCLUSIVE, None, value=len(foreign), threshold=0, detail=detail)
    detail = f"other processes on the GPU: {', '.join(map(str, foreign[:6]))}" if foreign else "only the arms' servers"
    return make_check(CheckName.GPU_EXCLUSIVE, not foreign, value=len(foreign), threshold=0, detail=detail)


def _gpu_idle(gpus: Sequence[GpuCondition]) -> Check:
    known = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    if not known:
        return make_check(
            CheckName.GPU_IDLE, None, threshold=BUSY_GPU_LIMIT, detail="the GPU's utilisation is not told"
        )
    return make_check(
        CheckName.GPU_IDLE,
        max(known) <= BUSY_GPU_LIMIT,
        value=max(known),
        threshold=BUSY_GPU_LIMIT,
        detail=f"with nothing sent, the GPU was busy {share(max(known))} of the time",
    )


def _clocks(gpus: Sequence[GpuCondition]) -> Check:
    known = [gpu for gpu in gpus if gpu.clock_event_reasons is not None]
    if not known:
        return make_check(CheckName.GPU_CLOCKS, None, threshold="no slow-down", detail="the GPU's clocks are not told")
    slowed = sorted({reason for gpu in known for reason in gpu.clock_event_reasons or () if reason in SLOWING})
    readings = [
        f"{gpu.name or 'GPU'}: "
        + ", ".join(
            part
            for part in (
                "" if gpu.sm_clock_hertz is None else f"{gpu.sm_clock_hertz / 1e6:,.0f} MHz",
                "" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:g} °C",
            )
            if part
        )
        for gpu in known
    ]
    detail = (
        f"slowed down by {', '.join(slowed).replace('_', ' ')} ({'; '.join(readings)})"
        if slowed
        else "; ".join(readings)
    )
    return make_check(
        CheckName.GPU_CLOCKS, not slowed, value=", ".join(slowed) or None, threshold="no slow-down", detail=detail
    )
