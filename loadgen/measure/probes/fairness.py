"""Fairness: whether the arms are alike and the machine is idle, read right before the load.

The servers are up and warm, and nothing is sent. The readings take less than a second. Then timed requests show whether
a server answers a repeated request from memory: the load never repeats an input, so a cache cannot win it, but the
reader should know which arm has one. Requests are sent in groups of one new request and five that were sent before, one
from each of the last five groups, in random order. A server that computes every answer takes as long for the new one as
for the others, whatever else the machine does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from statistics import median
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

import psutil
from msgspec.structs import replace

from loadgen.checks.registry import make_checks
from loadgen.checks.run import answers_from_memory
from loadgen.experiment.schedule import sends_load
from loadgen.findings.registry import Probe
from loadgen.measure.machine import utc_now
from loadgen.metrics.facts import Facts
from loadgen.records.machine import own_devices, used_gpus
from loadgen.records.model_config import mapping, real, whole
from loadgen.records.probes import ArmConditions, CacheProbe, Conditions, GpuCondition
from loadgen.records.run import ArmRecord, Label
from loadgen.records.store import read_run

if TYPE_CHECKING:
    from loadgen.client.connection import Address
    from loadgen.measure.arms import Arm
    from loadgen.measure.context import RunContext

CONNECTIONS = 9
CONNECT_SECONDS = 2.0
IDLE_SECONDS = 0.3
"""The kernel counts 100 ticks per second and core, so this shows a tenth of a core."""
CPU_FOLDER = Path("/sys/devices/system/cpu")
GROUPS = 24
REPEATS = 5
PROBES = 2
_MOST_SECONDS, _MOST_SECONDS_OF_SMOKE = 30.0, 5.0
_LEAST_GROUPS = 6


def measure(context: RunContext) -> None:
    """Store the readings, show the checks on them, and look for caches. Raises `StorageError`."""
    if context.restart:
        return
    context.enter("checking fairness")
    context.progress.now("nothing is sent while the machine is checked")
    context.store.write(read_conditions(context.arms, context.records))
    context.progress.fairness_checked(make_checks(Facts(read_run(context.store.directory)), before_load=True))
    if context.care.few_inputs:  # no input comes twice under load, so that a cache cannot win a choice
        return
    context.progress.now("new and repeated requests to every server, to find caches")
    most_s = _MOST_SECONDS_OF_SMOKE if context.experiment.preset == "smoke" else _MOST_SECONDS
    timed = [probe_cache(context, label, arm, most_s) for label, arm in context.arms.items()]
    context.store.write_all(CacheProbe, timed)


def read_conditions(arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> Conditions:
    """Take all readings now; None if a value cannot be read."""
    from loadgen.client.connection import Address

    addresses = {label: Address.parse(arm.deployment.url) for label, arm in arms.items()}
    return Conditions(
        taken_at=utc_now(),
        arms=tuple(
            ArmConditions(
                label=label,
                loopback=addresses[label].is_local,
                connect_ms=connect_ms(addresses[label]),
                pids=tuple(arm.deployment.pids()),
            )
            for label, arm in arms.items()
        ),
        cpu_busy_share=read_busy_share(),
        cpu_governors=read_governors(),
        gpus=_gpus(arms, records),
    )


def connect_ms(address: Address) -> float | None:
    """Median time of a TCP connection, which is one round trip; None if one fails."""
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
    """The different governors of all cores; None if the kernel does not report them."""
    try:
        governors = {path.read_text().strip() for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    except OSError:
        return None
    return tuple(sorted(governors)) or None


def read_busy_share() -> float:
    """Busy share of the cores that this process may use, so comparisons side by side, each on its own cores, do not
    disturb each other."""
    cores = os.sched_getaffinity(0)
    shares = psutil.cpu_percent(IDLE_SECONDS, percpu=True)
    # With cores offline, the places in the list are not core numbers.
    chosen = [shares[core] for core in cores] if len(shares) > max(cores) else shares
    return sum(chosen) / len(chosen) / 100.0


def _gpus(arms: Mapping[Label, Arm], records: Sequence[ArmRecord]) -> tuple[GpuCondition, ...]:
    """The GPUs that the servers use, or all if no server names one: by a server's `/gpu-info`, read again; else from
    the arms' records."""
    from loadgen.client.endpoint import EndpointError

    documents: list[Mapping[str, Any] | None] = []
    for arm in arms.values():
        try:
            documents.append(arm.endpoint.document("/gpu-info"))
        except EndpointError:
            continue
    documents += [record.gpu_info for record in records]
    used = {uuid for document in documents for uuid in used_gpus(document)}
    chosen = (devices for document in documents if (devices := own_devices(document, used)))
    return tuple(map(as_condition, next(chosen, ())))


def as_condition(device: Mapping[str, Any]) -> GpuCondition:
    """Convert one device of a `/gpu-info` document; a server may send anything."""
    reasons, processes = device.get("clock_event_reasons"), device.get("processes")
    pids = None
    if isinstance(processes, list | tuple):
        pids = tuple(pid for process in processes if (pid := whole(mapping(process).get("pid"))) is not None)
    return GpuCondition(
        uuid=_text(device.get("uuid")),
        name=_text(device.get("name")),
        utilisation=real(device.get("utilization_ratio")),
        sm_clock_hertz=real(device.get("sm_clock_hertz")),
        temperature_celsius=real(device.get("temperature_celsius")),
        clock_event_reasons=tuple(map(str, reasons)) if isinstance(reasons, list | tuple) else None,
        pids=pids,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def probe_cache(context: RunContext, label: Label, arm: Arm, most_s: float) -> CacheProbe:
    """Time new and repeated requests, or prompts of a language model. After `most_s` no more than six groups are sent.
    What looks like a cache is probed once more, with other requests, and judged by all of them, since chance looks like
    one now and then. A failure is in the record, not raised."""
    from loadgen.client.connection import AddressError, ConnectionRefused
    from loadgen.client.inputs import InputError
    from loadgen.client.outputs import AnswerError

    probe = empty = CacheProbe(label=label, fresh_ns=(), repeated_ns=())
    try:
        for _ in range(PROBES):
            with context.sent.timed(arm, REPEATS + GROUPS) as ask:
                fresh, repeated = _send_in_groups(ask, most_s)
            probe = replace(probe, fresh_ns=(*probe.fresh_ns, *fresh), repeated_ns=(*probe.repeated_ns, *repeated))
            if not answers_from_memory(probe):
                break
    except (AddressError, AnswerError, ConnectionRefused, InputError) as exc:
        return replace(empty, error=str(exc))
    return probe


def _send_in_groups(ask: Callable[[int], int], most_s: float) -> tuple[list[int], list[int]]:
    """The times in ns of new and of repeated requests; `ask` sends the one of this number and returns its time."""
    fresh: list[int] = []
    repeated: list[int] = []
    random, began = SystemRandom(), perf_counter()
    for group in range(REPEATS + GROUPS):
        numbers = list(range(max(0, group - REPEATS), group + 1))
        random.shuffle(numbers)
        for number in numbers:
            took_ns = ask(number)
            if group >= REPEATS:  # the first groups warm the server up
                (fresh if number == group else repeated).append(took_ns)
        if len(fresh) >= _LEAST_GROUPS and perf_counter() - began > most_s:
            break
    return fresh, repeated


PROBE = Probe(wanted=sends_load, measure=measure)
