"""Takes the readings of `loadgen.studies.fairness.records`; less than a second, in which nothing is sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import psutil

from loadgen.bench.arms import Arm
from loadgen.machine.environment import utc_now
from loadgen.records.machine import own_devices, used_gpu
from loadgen.records.model_config import mapping, whole
from loadgen.records.run import ArmRecord, Label
from loadgen.studies.fairness.records import ArmConditions, Conditions, GpuCondition
from loadgen.transport.endpoint import EndpointError
from loadgen.transport.requests import Address

CONNECTIONS = 9
CONNECT_SECONDS = 2.0
IDLE_SECONDS = 0.3
"""A hundred ticks a second and core: enough to see a tenth of a core."""
CPU_FOLDER = Path("/sys/devices/system/cpu")


def read_conditions(arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> Conditions:
    """Everything now. What cannot be read is None."""
    return Conditions(
        taken_at=utc_now(),
        arms=tuple(_arm(label, arm) for label, arm in arms.items()),
        cpu_busy_share=read_busy_share(),
        cpu_governors=read_governors(),
        gpus=_gpus(arms, records),
    )


def _arm(label: Label, arm: Arm) -> ArmConditions:
    address = Address.parse(arm.deployment.url)
    return ArmConditions(
        label=label, loopback=address.is_local, connect_ms=connect_ms(address), pids=tuple(arm.deployment.pids())
    )


def connect_ms(address: Address) -> float | None:
    """Median time of a TCP connection, which is one round trip; None where one fails."""
    times = []
    for _ in range(CONNECTIONS):
        started = perf_counter_ns()
        try:
            with socket.create_connection((address.host, address.port), CONNECT_SECONDS):
                times.append((perf_counter_ns() - started) / 1e6)
        except OSError:
            return None
    return median(times)


def read_governors(folder: Path = CPU_FOLDER) -> tuple[str, ...] | None:
    """Of all cores, each named once; None where the kernel does not tell."""
    try:
        found = {path.read_text().strip() for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    except OSError:
        return None
    return tuple(sorted(found)) or None


def read_busy_share() -> float:
    """Of the cores that this process may use: on a machine that several comparisons share with a set of cores each,
    the others' load is no disturbance of this one."""
    own = os.sched_getaffinity(0)
    shares = psutil.cpu_percent(IDLE_SECONDS, percpu=True)
    # Where cores are offline the list's places are not their numbers.
    chosen = [shares[core] for core in own] if len(shares) > max(own) else shares
    return sum(chosen) / len(chosen) / 100.0


def _gpus(arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> tuple[GpuCondition, ...]:
    """The GPUs that the servers name as theirs, all where none does: from a server's own `/gpu-info`, read again; else
    from what the arms' records hold."""
    documents: list[Mapping[str, Any] | None] = []
    for arm in arms.values():
        try:
            documents.append(arm.endpoint.document("/gpu-info"))
        except EndpointError:
            continue
    documents += [record.gpu_info for record in records]
    used = {uuid for document in documents if (uuid := used_gpu(document)) is not None}
    return next((tuple(map(as_condition, own)) for one in documents if (own := own_devices(one, used))), ())


def as_condition(device: Mapping[str, Any]) -> GpuCondition:
    """One device of a `/gpu-info` document."""
    reasons, processes = device.get("clock_event_reasons"), device.get("processes")
    reasons = reasons if isinstance(reasons, list | tuple) else None
    pids = (
        [whole(mapping(process).get("pid")) for process in processes] if isinstance(processes, list | tuple) else None
    )
    return GpuCondition(
        uuid=_text(device.get("uuid")),
        name=_text(device.get("name")),
        utilisation=_number(device.get("utilization_ratio")),
        sm_clock_hertz=_number(device.get("sm_clock_hertz")),
        temperature_celsius=_number(device.get("temperature_celsius")),
        clock_event_reasons=None if reasons is None else tuple(map(str, reasons)),
        pids=None if pids is None else tuple(pid for pid in pids if pid is not None),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    """A server may tell anything."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
