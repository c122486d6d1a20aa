"""Checks on the machine: what it was like right before the load, and whether it stayed like that.

Before the load: distance, processors, GPUs. During it: did the machine keep its speed, did the hypervisor or another
process take the processors away from the servers? Both are shares of all the time of the cores that the load generator
may use. What was taken matters by its effect: a server that uses all cores loses about that share of its throughput.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import wraps
from itertools import pairwise
from statistics import fmean, median, stdev

import numpy as np
from scipy import stats

from loadgen.comparison.claims import join
from loadgen.comparison.facts import CellFacts, Facts
from loadgen.experiment.schedule import load_cells
from loadgen.quantities import number, share
from loadgen.records.model_config import kind_of
from loadgen.records.run import Experiment, Label, shown
from loadgen.records.samples import NS_PER_S
from loadgen.result.checks.registry import Find, Outcome, check, fairness
from loadgen.studies.fairness.records import ArmConditions, Conditions

WAN_MS = 2.0
"""A round trip beyond it is no local network's."""
BUSY_CORES_LIMIT = 0.10
BUSY_GPU_LIMIT = 0.05
SLOWING = ("hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake", "software_power_cap")
"""Clock event reasons that slow a GPU down; idling and clocks that somebody set are none."""
DRIFT_SIGNIFICANCE = 0.01
SERVER_CPU_LIMIT = 0.95
STEP_LIMIT_S = 5.0
"""Of the wall clock: labels are whole seconds and are taken a moment before a block begins."""
TAKEN_LIMIT = 0.03
"""Of the cores, by any arm's blocks together: a server that uses all cores loses at most about 3 % by it, which is
well below δ = 5 %."""
MOST_TAKEN = 0.20
"""In the median block: beyond it the blocks measure what is left of the machine and not the servers."""
APART_ERRORS = 4.0
"""Standard errors by which the arms' shares must differ, besides by δ."""


def from_readings(judge: Callable[[Conditions], Outcome]) -> Find:
    """For a check on the readings right before the load, of a run that was to have one; unknown without them."""

    @wraps(judge)
    def find(facts: Facts) -> list[Outcome]:
        if not load_cells(facts.run.experiment.cells):
            return []
        conditions = facts.run.conditions
        return [Outcome(None, "no readings were taken before the load") if conditions is None else judge(conditions)]

    return find


def from_gpu_readings(judge: Callable[[Conditions], Outcome]) -> Find:
    """The same where there is a GPU, or an arm says that it executes on one."""

    @wraps(judge)
    def find(facts: Facts) -> Iterable[Outcome]:
        conditions = facts.run.conditions
        on_gpu = any(
            str(arm.in_effect.get("device", "")).startswith("cuda") or kind_of(arm) == "KIND_GPU"
            for arm in facts.run.arms
        )
        return from_readings(judge)(facts) if conditions is not None and (conditions.gpus or on_gpu) else []

    return find


@fairness(
    title="the arms are equally near",
    severity="warns",
    remedy="Run the load generator on the servers' machine or on their network; all arms equally far away.",
)
@from_readings
def client_distance(conditions: Conditions) -> Outcome:
    threshold = f"alike, and no WAN (> {WAN_MS:g} ms)"
    found = {distance_of(arm) for arm in conditions.arms}
    if not found or None in found:
        return Outcome(None, "no connection could be timed to each arm", None, threshold)
    detail = ", ".join(
        f"{shown(arm.label)} {distance_of(arm)}" + ("" if arm.connect_ms is None else f" ({number(arm.connect_ms)} ms)")
        for arm in conditions.arms
    )
    if "WAN" in found:
        detail += ": the network is a part of what is compared"
    elif len(found) > 1:
        detail += ": the arms are not equally far away"
    longest = max((arm.connect_ms for arm in conditions.arms if arm.connect_ms is not None), default=None)
    return Outcome(len(found) == 1 and "WAN" not in found, detail, longest, threshold)


def distance_of(arm: ArmConditions) -> str | None:
    """loopback, LAN or WAN by the measured round trip; None where it is unknown."""
    if arm.loopback:
        return "loopback"
    return None if arm.connect_ms is None else "WAN" if arm.connect_ms > WAN_MS else "LAN"


@fairness(
    title="the processors were idle before the load",
    severity="warns",
    remedy="End what else runs on this machine; pairing absorbs a steady load, and a changing one widens the "
    "intervals.",
)
@from_readings
def machine_idle(conditions: Conditions) -> Outcome:
    busy = conditions.cpu_busy_share
    if busy is None:
        return Outcome(None, "the processors' load is unknown", None, BUSY_CORES_LIMIT)
    detail = f"with nothing sent, {share(busy)} of the cores that the load generator may use were busy"
    return Outcome(busy <= BUSY_CORES_LIMIT, detail, busy, BUSY_CORES_LIMIT)


@fairness(
    title="the processors keep their clocks",
    severity="informs",
    remedy="Set the governor to performance: cpupower frequency-set -g performance.",
)
@from_readings
def cpu_governor(conditions: Conditions) -> Outcome:
    governors, threshold = conditions.cpu_governors, "performance"
    if governors is None:
        detail = "the kernel does not tell how it chooses clocks (as in most virtual machines)"
        return Outcome(None, detail, None, threshold)
    named = ", ".join(governors)
    return Outcome(governors == (threshold,), f"the CPU governor is {named}", named, threshold)


@fairness(
    title="nobody else uses the GPU",
    severity="warns",
    remedy="End the other processes, or measure on a GPU of your own.",
)
@from_gpu_readings
def gpu_exclusive(conditions: Conditions) -> Outcome:
    listed = [gpu.pids for gpu in conditions.gpus if gpu.pids is not None]
    pids = {pid for found in listed for pid in found}
    if not listed:
        return Outcome(None, "the GPU's processes are not told", None, 0)
    if not pids:
        return Outcome(None, "the driver lists no process on the GPU, not even the arms' servers", None, 0)
    own = {pid for arm in conditions.arms for pid in arm.pids}
    foreign = sorted(pids - own)
    if foreign and not pids & own:
        detail = f"{len(foreign)} processes use the GPU, numbered as on another host: whose they are is unknown"
        return Outcome(None, detail, len(foreign), 0)
    detail = "only the arms' servers"
    if foreign:
        detail = f"other processes on the GPU: {', '.join(map(str, foreign[:6]))}"
    return Outcome(not foreign, detail, len(foreign), 0)


@fairness(
    title="the GPU was idle before the load",
    severity="warns",
    remedy="Find out what keeps the GPU busy: an arm that spins, or another container.",
)
@from_gpu_readings
def gpu_idle(conditions: Conditions) -> Outcome:
    known = [gpu.utilisation for gpu in conditions.gpus if gpu.utilisation is not None]
    if not known:
        return Outcome(None, "the GPU's utilisation is not told", None, BUSY_GPU_LIMIT)
    detail = f"with nothing sent, the GPU was busy {share(max(known))} of the time"
    return Outcome(max(known) <= BUSY_GPU_LIMIT, detail, max(known), BUSY_GPU_LIMIT)


@fairness(
    title="nothing slows the GPU down",
    severity="warns",
    remedy="Cool the machine, raise the power limit, or lock lower clocks that it can hold: nvidia-smi -lgc.",
)
@from_gpu_readings
def gpu_clocks(conditions: Conditions) -> Outcome:
    known = [gpu for gpu in conditions.gpus if gpu.clock_event_reasons is not None]
    threshold = "no slow-down"
    if not known:
        return Outcome(None, "the GPU's clocks are not told", None, threshold)
    slowed = sorted({reason for gpu in known for reason in gpu.clock_event_reasons or () if reason in SLOWING})
    readings = []
    for gpu in known:
        clock = [] if gpu.sm_clock_hertz is None else [f"{gpu.sm_clock_hertz / 1e6:,.0f} MHz"]
        heat = [] if gpu.temperature_celsius is None else [f"{gpu.temperature_celsius:g} °C"]
        readings.append(f"{gpu.name or 'GPU'}: {', '.join(clock + heat)}")
    detail = "; ".join(readings)
    if slowed:
        detail = f"slowed down by {', '.join(slowed).replace('_', ' ')} ({detail})"
    return Outcome(not slowed, detail, ", ".join(slowed) or None, threshold)


@check(
    title="the machine kept its speed",
    severity="warns",
    remedy="Close other programs, watch for thermal throttling, and ask for more pairs; the pairing absorbs slow "
    "drift.",
)
def machine_steady(facts: Facts) -> Iterator[Outcome]:
    """Trend of the arms' own speed: least squares of log throughput on time, each arm and cell about its own mean."""
    if not facts.blocks:
        return
    times: list[float] = []
    speeds: list[float] = []
    groups = 0
    longest_s = 0.0
    for key in sorted({(block.cell, block.label) for block in facts.blocks}):
        own = [b for b in facts.blocks if (b.cell, b.label) == key and b.complete and b.throughput_per_s]
        if len(own) < 2:
            continue
        when = np.array([b.start_s for b in own])
        log_speed = np.array([math.log(b.throughput_per_s or 1.0) for b in own])
        times += list(when - when.mean())
        speeds += list(log_speed - log_speed.mean())
        longest_s = max(longest_s, float(np.ptp(when)))
        groups += 1
    margin = facts.run.experiment.equivalence_margin
    degrees = len(times) - groups - 1
    spread = float(np.dot(times, times)) if times else 0.0
    if degrees < 3 or spread <= 0.0:
        yield Outcome(None, "too few blocks to see a trend of the speed", None, margin)
        return
    slope = float(np.dot(times, speeds)) / spread
    residual = np.asarray(speeds) - slope * np.asarray(times)
    error = math.sqrt(float(np.dot(residual, residual)) / degrees / spread)
    change = math.expm1(slope * longest_s)
    p_value = 2.0 * float(stats.t.sf(abs(slope) / error, degrees)) if error > 0.0 else 0.0
    drifted = abs(change) > margin and p_value < DRIFT_SIGNIFICANCE
    sign = "+" if change >= 0 else "−"
    detail = f"the arms' own speed changed by {sign}{share(abs(change))} over the longest cell"
    if abs(change) > margin and not drifted:
        detail += ", which is within the noise"
    yield Outcome(not drifted, detail, change, margin)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What was taken from the processors in one block."""

    label: Label
    ns: int
    of_ns: int

    @property
    def share(self) -> float:
        return self.ns / self.of_ns


@check(
    title="the hypervisor left the processors to this machine",
    severity="warns",
    remedy="Run on a machine whose processors are not shared: a dedicated host, or an instance without burst credits.",
)
def cpu_steal(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        blocks = [block.record for block in load.stored if block.record.complete]
        taken = [
            _Taken(block.label, block.machine.steal_ns, block.machine.total_ns)
            for block in blocks
            if block.machine is not None and block.machine.steal_ns is not None and block.machine.total_ns > 0
        ]
        if blocks:
            yield _judge_taken(load, taken, facts.run.experiment, "the hypervisor took")


@check(
    title="no other process took the processors during the blocks",
    severity="warns",
    remedy="End the processes named and run again; for a server given by URL give its own address, not that of a "
    "proxy.",
)
def other_processes(facts: Facts) -> Iterator[Outcome]:
    for load in facts.loads:
        blocks = [block.record for block in load.stored if block.record.complete]
        taken, others = [], []
        for block in blocks:
            machine = block.machine
            if machine is not None and machine.known_ns is not None and machine.total_ns > 0:
                taken.append(_Taken(block.label, machine.busy_ns - machine.known_ns, machine.total_ns))
                others.append((machine.busy_ns - machine.known_ns, machine.others))
        if not blocks:
            continue
        found = _judge_taken(load, taken, facts.run.experiment, "other processes took")
        named = max(others, default=(0, ()))[1]
        if found.ok is False and named:
            found = replace(found, detail=f"{found.detail}; the busiest in the worst block: {', '.join(named)}")
        yield found


def _judge_taken(load: CellFacts, taken: Sequence[_Taken], experiment: Experiment, who: str) -> Outcome:
    """A warning by the arms' blocks together, which the kernel's coarse step does not blur; invalid where the arms had
    unequal machines, or all had little of one."""
    by_arm = {label: [one for one in taken if one.label == label] for label in experiment.labels}
    if not all(by_arm.values()):
        return Outcome(None, "it was not recorded", None, TAKEN_LIMIT, load.scope)
    # What is within the kernel's step of 10 ms may come out below 0.
    pooled = {label: max(sum(o.ns for o in own) / sum(o.of_ns for o in own), 0.0) for label, own in by_arm.items()}
    most, shares = max(pooled.values()), [one.share for one in taken]
    detail = f"of the processors' time {who} {join([f'{share(s)} from {shown(label)}' for label, s in pooled.items()])}"
    if most <= TAKEN_LIMIT:
        return Outcome(True, detail, most, TAKEN_LIMIT, load.scope)
    touched = sum(value > TAKEN_LIMIT for value in shares)
    detail += f" ({touched} of {len(shares)} blocks above {share(TAKEN_LIMIT)})"
    much = min(median(shares), most) > MOST_TAKEN
    margin = experiment.equivalence_margin
    apart = any(
        abs(pooled[one] - pooled[other]) > max(margin, APART_ERRORS * _error(by_arm[one], by_arm[other]))
        for one, other in experiment.pairings
    )
    if apart:
        detail += ", so the arms did not have the same machine"
    elif much:
        detail += f", over {share(MOST_TAKEN)} in the median block"
    return Outcome(False, detail, most, TAKEN_LIMIT, load.scope, "invalidates" if much or apart else None)


def _error(a: Sequence[_Taken], b: Sequence[_Taken]) -> float:
    """Standard error of the difference of the arms' mean shares; infinite with a single block of an arm."""
    if min(len(a), len(b)) < 2:
        return float("inf")
    spreads = [stdev([o.share for o in own], fmean([o.share for o in own])) / len(own) ** 0.5 for own in (a, b)]
    return float((spreads[0] ** 2 + spreads[1] ** 2) ** 0.5)


@check(
    title="the wall clock ran evenly",
    severity="informs",
    remedy="The figures stand, they are of the monotonic clock; do not trust the times of day in this run.",
)
def wall_clock(facts: Facts) -> Iterator[Outcome]:
    """Beside the monotonic clock, which every duration is of, so a step of the wall clock is only noted."""
    blocks = [block.record for block in facts.run.blocks]
    if len(blocks) < 2:
        return
    try:
        moments = [(one.index, datetime.fromisoformat(one.started_at), one.window_start_ns) for one in blocks]
        steps = [
            ((after - before).total_seconds() - (after_ns - before_ns) / NS_PER_S, index)
            for (_, before, before_ns), (index, after, after_ns) in pairwise(moments)
        ]
    except (ValueError, TypeError):
        yield Outcome(None, "a block's start has no time", None, STEP_LIMIT_S)
        return
    step, index = max(steps, key=lambda one: abs(one[0]))
    even = abs(step) <= STEP_LIMIT_S
    detail = "both clocks agree to within seconds over the run"
    if not even:
        detail = (
            f"the wall clock moved by {step:+,.0f} s against the monotonic clock before block {index}: it was set, or "
            "the machine slept; no latency is measured with it"
        )
    yield Outcome(even, detail, round(step, 1), STEP_LIMIT_S)


@check(
    title="cores were left for the load generator",
    severity="informs",
    remedy="Give the servers fewer threads, or run the load generator on another machine.",
)
def server_cpu(facts: Facts) -> Iterator[Outcome]:
    if not facts.blocks:
        return
    cores = facts.run.environment.host.get("cpu_count") if facts.run.environment else None
    used = [
        block.server_cpu_cores + block.generator_cpu_share
        for block in facts.blocks
        if block.server_cpu_cores is not None and block.generator_cpu_share is not None
    ]
    if not used or not isinstance(cores, int | float) or cores <= 0:
        yield Outcome(None, "the servers' CPU time is unknown", None, SERVER_CPU_LIMIT)
        return
    busy = max(used)
    detail = f"server and load generator together kept {number(busy)} of {cores:.0f} cores busy at most"
    yield Outcome(busy / cores <= SERVER_CPU_LIMIT, detail, busy / cores, SERVER_CPU_LIMIT)
