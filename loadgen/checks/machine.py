"""Checks of the machine: its state right before the load, and whether it stayed the same during the load.

CPU time taken by the hypervisor or other processes is a share of all the time of the cores that the load generator may
use. A server that uses all cores loses about that share of its throughput.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from itertools import chain, pairwise
from operator import itemgetter

import numpy as np

from loadgen.base.quantities import join, number, share
from loadgen.checks.registry import Find, Judgement, check, fairness, per_load
from loadgen.experiment.schedule import load_workloads
from loadgen.metrics.facts import TAKEN_LIMIT, Facts, WorkloadFacts
from loadgen.records.model_config import kind_of
from loadgen.records.probes import ArmConditions, Conditions
from loadgen.records.run import Label, MachineLoad, body_count, programs_in_words
from loadgen.records.samples import NS_PER_S
from loadgen.stats.distributions import f_tail

WAN_MS = 2.0
"""A longer round trip is not on a local network."""
BUSY_CORES_LIMIT = 0.10
BUSY_GPU_LIMIT = 0.05
SLOWING = ("hardware_slowdown", "software_thermal", "hardware_thermal", "power_brake", "software_power_cap")
"""Clock event reasons that slow a GPU down; idling and configured clocks do not count."""
DRIFT_SIGNIFICANCE = 0.01
STRETCHES = {2: "half", 3: "third", 4: "quarter", 5: "fifth"}
LEAST_BLOCKS = 8
"""Fewest blocks per stretch of the run."""
SPREAD_LIMIT = 0.25
"""From the 10th to the 90th percentile of the blocks' speeds: a standard deviation of about 9 %."""
SERVER_CPU_LIMIT = 0.95
STEP_LIMIT_S = 5.0
"""Largest step of the wall clock: labels are whole seconds, taken shortly before a block begins."""
OTHERS_LIMIT = 0.1
"""Requests of other clients, as a share of those that were sent: their part of the server is not measured."""
MOST_TAKEN = 0.20
"""Share taken in the median block above which the blocks do not measure the whole machine."""
MOST_NAMED = 8
"""Shares that the detail names; of more, as engines may be, the highest and the lowest."""
Readings = Mapping[Label, Sequence[MachineLoad]]
"""The use of the cores in each block, by arm."""
APART_ERRORS = 4.0
"""Standard errors, in addition to δ, by which the arms' shares must differ."""


def from_readings(judge: Callable[[Conditions, Facts], Judgement], *, of_gpu: bool = False) -> Find:
    """Declare a check of the readings right before the load; unknown without them. With `of_gpu` only if there is a GPU
    or an arm reports that it uses one."""

    @wraps(judge)
    def find(facts: Facts) -> list[Judgement]:
        conditions = facts.run.record_of(Conditions)
        on_gpu = conditions is not None and (
            bool(conditions.gpus)
            or any(str(arm.in_effect.get("device", "")).startswith("cuda") for arm in facts.run.arms)
            or any(kind_of(arm) == "KIND_GPU" for arm in facts.run.arms)
        )
        if not load_workloads(facts.run.experiment.workloads) or (of_gpu and not on_gpu):
            return []
        return [
            Judgement(None, "no readings were taken before the load")
            if conditions is None
            else judge(conditions, facts)
        ]

    return find


from_gpu_readings = partial(from_readings, of_gpu=True)


@fairness(
    "the network distance to every arm is the same",
    "The network distances differ or are long",
    "warns",
    "Run the load generator on the servers' machine or network, at the same distance from every arm.",
    threshold=f"equal, and not a WAN (> {WAN_MS:g} ms)",
)
@from_readings
def client_distance(conditions: Conditions, facts: Facts) -> Judgement:
    distances = {distance_of(arm) for arm in conditions.arms}
    if not distances or None in distances:
        return Judgement(None, "not every arm accepted a connection to time")
    detail = ", ".join(
        f"{facts.names[arm.label]} {distance_of(arm)}"
        + ("" if arm.connect_ms is None else f" ({number(arm.connect_ms)} ms)")
        for arm in conditions.arms
    )
    if "WAN" in distances:
        detail += ": the network is part of the comparison"
    elif len(distances) > 1:
        detail += ": the arms are not equally far away"
    longest = max((arm.connect_ms for arm in conditions.arms if arm.connect_ms is not None), default=None)
    return Judgement(len(distances) == 1 and "WAN" not in distances, detail, longest)


def distance_of(arm: ArmConditions) -> str | None:
    """loopback, LAN or WAN by the measured round trip; None if it is unknown."""
    if arm.loopback:
        return "loopback"
    return None if arm.connect_ms is None else "WAN" if arm.connect_ms > WAN_MS else "LAN"


@fairness(
    "the CPU was idle before the load",
    "The CPU was busy before the load",
    "warns",
    "Stop other programs.",
    threshold=BUSY_CORES_LIMIT,
    not_known="The CPU's load before the run is not known",
)
@from_readings
def machine_idle(conditions: Conditions, _: Facts) -> Judgement:
    busy = conditions.cpu_busy_share
    if busy is None:
        return Judgement(None, "the CPU load is unknown")
    detail = f"{share(busy)} of the cores that the load generator may use were busy before any request was sent"
    return Judgement(busy <= BUSY_CORES_LIMIT, detail, busy)


@fairness(
    "the CPU governor is performance",
    "The CPU governor is not performance",
    "informs",
    "Set it: cpupower frequency-set -g performance.",
    threshold="performance",
)
@from_readings
def cpu_governor(conditions: Conditions, _: Facts) -> Judgement:
    governors = conditions.cpu_governors
    if governors is None:
        return Judgement(None, "the kernel does not report the CPU governor (as in most virtual machines)")
    named = ", ".join(governors)
    return Judgement(governors == ("performance",), f"the CPU governor is {named}", named)


@fairness(
    "no other process uses the GPU",
    "Other processes use the GPU",
    "warns",
    "Stop the other processes, or use another GPU.",
    threshold=0,
)
@from_gpu_readings
def gpu_exclusive(conditions: Conditions, facts: Facts) -> Judgement:
    listed = [gpu.pids for gpu in conditions.gpus if gpu.pids is not None]
    pids = {pid for of_gpu in listed for pid in of_gpu}
    if not listed:
        return Judgement(None, "the driver does not report the GPU's processes")
    if not pids:
        return Judgement(None, "the driver lists no process on the GPU, not even the arms' servers")
    of_arms = {pid for arm in conditions.arms for pid in arm.pids}
    foreign = sorted(pids - of_arms)
    if foreign and not pids & of_arms:
        detail = f"the GPU's processes ({len(foreign)}) have PIDs of another host, so their owners are unknown"
        return Judgement(None, detail, len(foreign))
    if foreign and (unseen := [facts.names[arm.label] for arm in conditions.arms if not arm.pids]):
        detail = (
            f"other processes use the GPU ({', '.join(map(str, foreign[:6]))}), and they may be the servers of "
            f"{join(unseen)}, whose processes are unknown"
        )
        return Judgement(None, detail, len(foreign))
    detail = "only the arms' servers use the GPU"
    if foreign:
        detail = f"other processes use the GPU: {', '.join(map(str, foreign[:6]))}"
    return Judgement(not foreign, detail, len(foreign))


@fairness(
    "the GPU was idle before the load",
    "The GPU was busy before the load",
    "warns",
    "Find out what keeps the GPU busy: an arm that spins, or another container.",
    threshold=BUSY_GPU_LIMIT,
)
@from_gpu_readings
def gpu_idle(conditions: Conditions, _: Facts) -> Judgement:
    busy = max((gpu.utilisation for gpu in conditions.gpus if gpu.utilisation is not None), default=None)
    if busy is None:
        return Judgement(None, "the driver does not report the GPU's utilisation")
    return Judgement(
        busy <= BUSY_GPU_LIMIT, f"the GPU was busy {share(busy)} of the time before any request was sent", busy
    )


@fairness(
    "the GPU is not throttled",
    "The GPU is throttled",
    "warns",
    "Cool the machine, raise the power limit, or lock lower clocks that it can hold: nvidia-smi -lgc.",
    threshold="not throttled",
)
@from_gpu_readings
def gpu_clocks(conditions: Conditions, _: Facts) -> Judgement:
    reporting = [gpu for gpu in conditions.gpus if gpu.clock_event_reasons is not None]
    if not reporting:
        return Judgement(None, "the driver does not report the GPU's clocks")
    slowed = ", ".join(sorted({r for gpu in reporting for r in gpu.clock_event_reasons or () if r in SLOWING}))
    readings = []
    for gpu in reporting:
        clock = [] if gpu.sm_clock_hertz is None else [f"{gpu.sm_clock_hertz / 1e6:,.0f} MHz"]
        heat = [] if gpu.temperature_celsius is None else [f"{gpu.temperature_celsius:g} °C"]
        readings.append(f"{gpu.name or 'GPU'}: {', '.join(clock + heat)}")
    detail = "; ".join(readings)
    if slowed:
        detail = f"the GPU is throttled by {slowed.replace('_', ' ')} ({detail})"
    return Judgement(not slowed, detail, slowed or None)


def _blocks_differ(load: WorkloadFacts, facts: Facts) -> bool:
    """Whether a block may send other lengths than the next: too few requests for all bodies, and these of mixed
    lengths."""
    environment, bodies = facts.run.environment, body_count(load.workload.batch_size)
    is_mixed = environment is not None and environment.is_mixed(load.workload)
    return is_mixed and any(block.requests < bodies for block in load.blocks)


@check(
    "the machine kept its speed",
    "The machine changed its speed",
    "warns",
    "Stop other programs, check for thermal throttling, and run again with more rounds.",
    caveat=("failed",),
)
def machine_steady(facts: Facts) -> Iterator[Judgement]:
    """Analyse the log throughput of closed-loop blocks by arm and workload and by the stretch of the run (analysis of
    variance), and the spread of the blocks about the mean of their arm and workload."""
    if not facts.blocks:
        return
    margin = facts.run.experiment.equivalence_margin
    loads = [load for load in facts.loads if not load.workload.is_open]
    alike = [load for load in loads if not _blocks_differ(load, facts)]
    if loads and not alike:
        yield Judgement(
            None, "a block sends fewer requests than there are inputs, and their lengths differ", None, margin
        )
        return
    blocks = sorted(
        (block for load in alike for block in load.blocks if block.complete), key=lambda block: block.start_s
    )
    speeds = np.log([block.throughput_per_s for block in blocks if block.throughput_per_s])
    names = [(block.workload, block.label) for block in blocks if block.throughput_per_s]
    groups = np.array([names.index(name) for name in names])
    count, stretches = len(speeds), min(max(len(speeds) // LEAST_BLOCKS, 2), max(STRETCHES))
    degrees = count - len(set(names)) - (stretches - 1)
    if degrees < 3:
        yield Judgement(None, "too few blocks to see whether the speed changed", None, margin)
        return
    by_group = (groups[:, None] == np.unique(groups)).astype(float)
    by_stretch = (np.arange(count)[:, None] * stretches // count == np.arange(1, stretches)).astype(float)
    residuals, later = (
        values - by_group @ np.linalg.lstsq(by_group, values, rcond=None)[0] for values in (speeds, by_stretch)
    )
    effects = np.linalg.lstsq(later, residuals, rcond=None)[0]
    rest, whole = float(np.sum((residuals - later @ effects) ** 2)), float(np.sum(residuals**2))
    f_value = (whole - rest) / (stretches - 1) / max(rest / degrees, 1e-18)
    change, spread = (
        float(np.expm1(np.ptp([0.0, *effects]))),
        float(np.expm1(np.ptp(np.quantile(residuals, (0.1, 0.9))))),
    )
    drifted = change > margin and f_tail(f_value, stretches - 1, degrees) < DRIFT_SIGNIFICANCE
    detail = f"the speed moved by {share(change)} between the fastest and the slowest {STRETCHES[stretches]} of the run"
    if not drifted and spread > SPREAD_LIMIT:
        detail = f"the speed of an arm's blocks varies by {share(spread)} (10th to 90th percentile)"
    elif change > margin and not drifted:
        detail += ", which is within the noise"
    ok = not drifted and spread <= SPREAD_LIMIT
    if not ok:
        detail += ", so throughput and latency depend on when they were measured"
    yield Judgement(ok, detail, change, margin)


@check(
    "the hypervisor took no CPU time from this machine",
    "The hypervisor took CPU time from this machine",
    "warns",
    "Use a machine whose processors are not shared: a dedicated host, or an instance without burst credits.",
    threshold=TAKEN_LIMIT,
    not_known="The hypervisor's share of the CPU is not known",
    fault="busy machine",
)
@per_load
def cpu_steal(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    return judge_taken(*found, facts.names, by_programs=False) if (found := _readings(load, facts)) else None


@check(
    "no other process took CPU time during the blocks",
    "Other programs used the CPU",
    "warns",
    "Stop the programs named and run again; for a server given by URL use its own address, not a proxy's.",
    threshold=TAKEN_LIMIT,
    not_known="The CPU use of other programs is not known",
    fault="busy machine",
)
@per_load
def other_processes(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    return judge_taken(*found, facts.names, by_programs=True) if (found := _readings(load, facts)) else None


@check(
    "nobody else used the servers",
    "Other clients used a server",
    "roughens",
    "Compare while nobody else sends requests to that server, or start one for the comparison alone.",
    threshold=OTHERS_LIMIT,
    not_known="Whether others used the servers is not known",
    fault="busy machine",
)
@per_load
def other_clients(load: WorkloadFacts, facts: Facts) -> Judgement | None:
    """Judge servers at URLs that count their requests; one that abserve starts has no other clients."""
    names = facts.names
    if not facts.by_url:
        return None
    shares = {label: more for label, more in load.further_requests.items() if label in facts.by_url}
    if not shares:
        return Judgement(None, "no server by URL counts its requests")
    worst = max(shares.values())
    used = tuple(label for label, more in shares.items() if more > OTHERS_LIMIT)
    texts = [f"{names[label]} counted {share(shares[label])} more requests than were sent to it" for label in used]
    return Judgement(not used, join(texts) or "no server counted more requests than were sent", worst, arms=used)


def _readings(load: WorkloadFacts, facts: Facts) -> tuple[Readings, Sequence[tuple[Label, Label]], float] | None:
    """The use of the cores in the complete blocks of each arm; None without such a block."""
    records, experiment = [block.record for block in load.stored if block.record.complete], facts.run.experiment
    readings: dict[Label, list[MachineLoad]] = {label: [] for label in experiment.loaded(load.workload)}
    for record in records:
        if record.machine is not None and record.machine.total_ns > 0:
            readings[record.label].append(record.machine)
    return (readings, experiment.pairings_in(load.workload), experiment.equivalence_margin) if records else None


def judge_taken(
    readings: Readings,
    pairings: Sequence[tuple[Label, Label]],
    margin: float,
    names: Mapping[Label, str],
    *,
    by_programs: bool,
) -> Judgement:
    """Judge the CPU time taken from the cores by the hypervisor or `by_programs`, which are named. It may be of engines
    without a server, too, by `pairings` that must have had the same machine. An arm's blocks are judged together, since
    the kernel counts in coarse steps. It warns, and makes the run rough if the arms had unequal shares of the machine
    or all had little of it."""
    taken = {
        label: [
            (ns, machine.total_ns)
            for machine in of_arm
            if (ns := machine.others_ns if by_programs else machine.steal_ns) is not None
        ]
        for label, of_arm in readings.items()
    }
    if not all(taken.values()):
        return Judgement(None, "CPU time was not recorded")
    blocks = {label: np.array([ns / of_ns for ns, of_ns in of_arm]) for label, of_arm in taken.items()}
    # Values within the kernel's step of 10 ms may come out below 0.
    pooled = {
        label: max(sum(o for o, _ in of_arm) / sum(of for _, of in of_arm), 0.0) for label, of_arm in taken.items()
    }
    most, shares = max(pooled.values()), np.concatenate(list(blocks.values()))
    ordered = sorted(pooled.items(), key=itemgetter(1), reverse=True)
    (first, of_first), *rest = pooled.items() if len(pooled) <= MOST_NAMED else (ordered[0], ordered[-1])
    of_arms = [f"{share(of_first)} of the CPU's time in the blocks of {names[first]}"]
    of_arms += [f"{share(of_arm)} in those of {names[label]}" for label, of_arm in rest]
    detail = f"{join(of_arms)} went to {'other programs' if by_programs else 'the hypervisor'}"
    if most <= TAKEN_LIMIT:
        return Judgement(True, detail, most)
    detail += f" ({sum(shares > TAKEN_LIMIT)} of {len(shares)} blocks above {share(TAKEN_LIMIT)})"
    much = min(float(np.median(shares)), most) > MOST_TAKEN
    errors = {
        k: float(np.std(of_arm, ddof=1)) / len(of_arm) ** 0.5 if len(of_arm) > 1 else math.inf
        for k, of_arm in blocks.items()
    }
    apart = any(
        abs(pooled[a] - pooled[b]) > max(margin, APART_ERRORS * math.hypot(errors[a], errors[b])) for a, b in pairings
    )
    if apart:
        detail += ", so the arms did not have the same machine"
    elif much:
        detail += f", over {share(MOST_TAKEN)} in the median block"
    if by_programs:
        worst = max(chain.from_iterable(readings.values()), key=lambda machine: machine.others_ns or 0)
        detail += f"; in the worst block: {programs_in_words(worst.others)}"
    return Judgement(False, detail, most, severity="roughens" if much or apart else None)


@check(
    "the wall clock ran steadily",
    "The wall clock jumped",
    "informs",
    "Do not trust the times of day in this run; latencies use the monotonic clock and are not affected.",
    threshold=STEP_LIMIT_S,
)
def wall_clock(facts: Facts) -> Iterator[Judgement]:
    blocks = [block.record for block in facts.run.blocks]
    if len(blocks) < 2:
        return
    try:
        moments = [(block.index, datetime.fromisoformat(block.started_at), block.window_start_ns) for block in blocks]
        steps = [
            ((after - before).total_seconds() - (after_ns - before_ns) / NS_PER_S, index)
            for (_, before, before_ns), (index, after, after_ns) in pairwise(moments)
        ]
    except (ValueError, TypeError):
        yield Judgement(None, "a block has no start time")
        return
    step, index = max(steps, key=lambda step: abs(step[0]))
    detail = "the wall clock and the monotonic clock agree"
    if abs(step) > STEP_LIMIT_S:
        detail = f"the wall clock moved by {step:+,.0f} s before block {index}: it was set, or the machine slept"
    yield Judgement(abs(step) <= STEP_LIMIT_S, detail, round(step, 1))


@check(
    "CPU cores were left for the load generator",
    "No CPU core was left for the load generator",
    "informs",
    "Give the servers fewer threads, or run the load generator on another machine.",
    threshold=SERVER_CPU_LIMIT,
)
def server_cpu(facts: Facts) -> Iterator[Judgement]:
    records = [block.record for block in facts.run.blocks]
    if not records:
        return
    used = [
        (record.server_cpu_ns + record.generator_cpu_ns) / (record.window_end_ns - record.window_start_ns)
        for record in records
        if record.server_cpu_ns is not None and record.window_end_ns > record.window_start_ns
    ]
    if not used or not facts.cores or facts.cores < 0:
        yield Judgement(None, "the servers' CPU time is unknown")
        return
    busy = max(used)
    detail = f"server and load generator used up to {number(busy)} of {facts.cores} cores"
    yield Judgement(busy / facts.cores <= SERVER_CPU_LIMIT, detail, busy / facts.cores)
