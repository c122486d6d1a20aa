"""Loads every arm that abserve starts beside the same server with its own defaults, before the rounds begin.

Only settings that affect nothing but speed differ (`abserve serve … --tuning none`), so an arm without any needs no
probe. One user is probed first, then the largest load; the rounds of a load end once it is decided. Where the plain
server is faster, each setting is put back alone, to find the one that costs. A failed probe is stored with its reason,
and the run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import monotonic

import msgspec

from loadgen.bench.arms import Arm
from loadgen.bench.bench import Bench
from loadgen.bench.load_runner import LoadError, LoadRunner, closed_loop
from loadgen.bench.progress import Progress
from loadgen.child_process import ProcessError
from loadgen.client.endpoint import EndpointError
from loadgen.client.generator import GeneratorError
from loadgen.comparison.summaries import summarise_blocks
from loadgen.experiment.schedule import has_load, interleave, load_workloads
from loadgen.launch.deployment import DeploymentError
from loadgen.probes.handicap.analyse import MIN_ROUNDS, estimate, ratios_of
from loadgen.probes.handicap.records import BESIDE, PLAIN, TUNED, ArmTuning, HandicapProbes, Probe
from loadgen.records.run import Experiment, Label, Workload, shown
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import StoredBlock, read_block

ROUNDS = 12
SECONDS, MAX_SECONDS = 1.5, 8.0
REQUESTS = 10
"""Fewest requests per block and user of the lone load; the largest load gets at least two per user."""
LOAD_SECONDS = 24.0
"""No round of a load begins later than this after its first; for a single setting half of it."""
MOST_SETTINGS = 8
"""At most so many settings are put back, the first ones."""
OPEN_USERS = 16
OBSTACLES = (DeploymentError, EndpointError, GeneratorError, LoadError, ProcessError)
"""Errors that leave an arm unprobed; a full disk ends the run, as everywhere."""


def wanted(experiment: Experiment) -> bool:
    """Whether there is load, and an arm that abserve starts, and nobody said no."""
    return experiment.handicap_check and has_load(experiment)


def measure(bench: Bench) -> None:
    """Probe every arm at the first start of the servers; each probe is stored. Raises `StorageError`."""
    if bench.restart:
        return
    bench.enter("comparing each arm with its server's defaults")
    found = HandicapProbes(arms=tuple(_tuning(bench, label) for label in bench.arms))
    bench.store.write(found)
    loads = probe_loads(load_workloads(bench.experiment.workloads))
    for arm in found.arms:
        if arm.settings and arm.reason is None:
            found = _probe_arm(bench, arm, loads, found)


def _tuning(bench: Bench, label: Label) -> ArmTuning:
    arm = bench.arms[label]
    if not arm.request.embedded:
        return ArmTuning(label=label, settings={}, reason="is configured by you")
    if bench.experiment.deployment == "compose":
        return ArmTuning(label=label, settings={}, reason="runs in the compose stack, which is configured by you")
    return ArmTuning(label=label, settings=dict(arm.deployment.tuning))


def probe_loads(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """One user with the smallest batch, and the workload with the most users, shortened to the blocks of a probe."""
    smallest = min(workload.batch_size for workload in workloads)
    lone = closed_loop(1, REQUESTS, batch_size=smallest, seconds=SECONDS, max_seconds=MAX_SECONDS)
    most = max(workloads, key=lambda workload: (workload.concurrency, workload.batch_size))
    users = min(most.concurrency, OPEN_USERS) if most.is_open else most.concurrency
    largest = closed_loop(
        users, 2 * users, batch_size=most.batch_size, seconds=SECONDS, max_seconds=MAX_SECONDS,
        length=most.sequence_length,
    )  # fmt: skip
    loads = (lone, largest) if users > 1 else (lone,)
    return tuple(msgspec.structs.replace(load, rounds=ROUNDS) for load in loads)


def _probe_arm(bench: Bench, tuning: ArmTuning, loads: Sequence[Workload], found: HandicapProbes) -> HandicapProbes:
    """The records with the probes of one arm: all of its settings, then single ones if those cost."""
    label, what = tuning.label, ", ".join(tuning.settings)
    try:
        with _server(bench, label, "none", "plain") as plain:
            probe = Probe(number=len(found.probes), label=label, setting=None, loads=tuple(loads))
            bench.progress.now(f"{shown(label)} beside the same server without {what}")
            slow = _run(bench, probe, bench.arms[label], plain, LOAD_SECONDS)
            found = msgspec.structs.replace(found, probes=(*found.probes, probe))
            bench.store.write(found)
            if not slow or len(tuning.settings) < 2:
                return found
            for setting in list(tuning.settings)[:MOST_SETTINGS]:
                bench.progress.now(f"{shown(label)} with {setting} alone beside the plain server")
                probe = Probe(number=len(found.probes), label=label, setting=setting, loads=tuple(slow))
                with _server(bench, label, setting, "single") as single:
                    _run(bench, probe, single, plain, LOAD_SECONDS / 2)
                found = msgspec.structs.replace(found, probes=(*found.probes, probe))
                bench.store.write(found)
    except OBSTACLES as exc:
        bench.progress.now(f"{shown(label)} could not be compared with its plain server: {exc}")
        if not any(probe.label == label for probe in found.probes):
            failed = msgspec.structs.replace(tuning, reason=f"could not be compared with its plain server: {exc}")
            arms = tuple(failed if arm.label == label else arm for arm in found.arms)
            found = msgspec.structs.replace(found, arms=arms)
            bench.store.write(found)
    return found


def _run(bench: Bench, probe: Probe, tuned: Arm, plain: Arm, seconds: float) -> list[Workload]:
    """Run rounds of each load until it is decided or its time is up; returns those under which `tuned` is slower."""
    store, margin = RunStore(bench.store.directory / probe.folder), bench.experiment.equivalence_margin
    runner = LoadRunner({TUNED: tuned, PLAIN: plain}, bench.generator, store, Progress(), seed=bench.experiment.seed)
    runner.warm_up(probe.loads)
    blocks = interleave(probe.loads, BESIDE, bench.experiment.seed + probe.number)
    named = {load.name: load for load in probe.loads}
    stored: list[StoredBlock] = []
    slow: list[Workload] = []
    for load in probe.loads:
        deadline = monotonic() + seconds
        for block in (one for one in blocks if one.workload is load):
            if block.position == 0 and block.round >= MIN_ROUNDS and monotonic() > deadline:
                break
            stored.append(read_block(store.directory, runner.measure(block), named))
            ratio = estimate(ratios_of(summarise_blocks(stored), load.name)) if block.position else None
            slower = None if ratio is None else ratio.slower(margin)
            if slower:
                slow.append(load)
            if slower is not None:
                break
    return slow


def _server(bench: Bench, label: Label, tuning: str, name: str) -> AbstractContextManager[Arm]:
    """A second server of an arm with this tuning, while the arm's own stays up without load."""
    own = bench.arms[label]
    request = msgspec.structs.replace(own.request, settings=own.request.settings | {"tuning": tuning})
    work = bench.work / f"handicap-{label}-{name}"
    return bench.second_server(replace(own, request=request), bench.experiment, bench.store, work)
