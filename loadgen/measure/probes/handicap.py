"""Handicap: loads every arm that abserve starts beside the same server with its own defaults, before the rounds begin.

Only settings that affect nothing but speed differ (`abserve serve … --tuning none`), so an arm without any is not
loaded. One user comes first, then the largest load; the rounds of a load end once it is decided. Where the plain server
is faster, each setting is put back alone, to find the one that costs. A failed pair of servers is stored with its
reason, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from loadgen.experiment.schedule import closed_loop, has_load, load_workloads
from loadgen.findings.handicap import (
    MIN_ROUNDS,
    PLAIN,
    TUNED,
    ArmTuning,
    HandicapPair,
    HandicapRecord,
    HandicapsFound,
    analyse,
    estimate,
    ratios_of,
)
from loadgen.findings.registry import Probe
from loadgen.metrics.summaries import summarise_blocks
from loadgen.records.probes import Variant
from loadgen.records.run import Experiment, Label, Workload
from loadgen.records.store import RunStore, StoredBlock, read_block

if TYPE_CHECKING:
    from loadgen.measure.arms import Arm
    from loadgen.measure.context import RunContext

ROUNDS = 12
SECONDS, MAX_SECONDS = 1.5, 8.0
REQUESTS = 10
"""Fewest requests per block and user of the load of one user; the largest load gets at least two per user."""
LOAD_SECONDS = 24.0
"""No round of a load begins later than this after its first; for a single setting half of it."""
MOST_SETTINGS = 8
"""At most so many settings are put back, the first ones."""
OPEN_USERS = 16


def wanted(experiment: Experiment) -> bool:
    """Whether there is load, and the user did not switch the check off."""
    return experiment.handicap_check and has_load(experiment)


def measure(context: RunContext) -> None:
    """Load every arm beside its plain server at the first start of the servers. Raises `StorageError`."""
    if context.restart:
        return
    context.enter("comparing each arm with its server's defaults")
    arms = {label: _tuning(context, label) for label in context.arms}
    pairs: list[HandicapPair] = []

    def store(*more: HandicapPair) -> None:
        pairs.extend(more)
        context.store.write(HandicapRecord(arms=tuple(arms.values()), probes=tuple(pairs)))

    store()
    loads = probe_loads(load_workloads(context.experiment.workloads))
    for label, tuning in tuple(arms.items()):
        if not tuning.settings or tuning.reason is not None:
            continue
        failure = context.attempt(partial(_measure_arm, context, tuning, loads, pairs, store))
        if failure is not None:
            reason = f"could not be compared with its plain server: {failure}"
            context.progress.now(f"{context.arms[label].name} {reason}")
            if not any(pair.label == label for pair in pairs):
                arms[label] = msgspec.structs.replace(tuning, reason=reason)
                store()


def _tuning(context: RunContext, label: Label) -> ArmTuning:
    arm = context.arms[label]
    if not arm.request.embedded:
        return ArmTuning(label=label, settings={}, reason="is configured by you")
    if context.experiment.deployment == "compose":
        return ArmTuning(label=label, settings={}, reason="runs in the compose stack, which is configured by you")
    left = {name: value for name, value in arm.deployment.tuning.items() if name not in arm.request.tried}
    if arm.request.tried and not left:
        return ArmTuning(label=label, settings={}, reason="was chosen beside its server's defaults, see choices/")
    return ArmTuning(label=label, settings=left)


def probe_loads(workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """One user with the smallest batch, and the workload with the most users, shortened to the blocks of a pair."""
    smallest = min(workload.batch_size for workload in workloads)
    single = closed_loop(1, REQUESTS, batch_size=smallest, seconds=SECONDS, max_seconds=MAX_SECONDS)
    most = max(workloads, key=lambda workload: (workload.concurrency, workload.batch_size))
    users = min(most.concurrency, OPEN_USERS) if most.is_open else most.concurrency
    largest = closed_loop(
        users, 2 * users, batch_size=most.batch_size, seconds=SECONDS, max_seconds=MAX_SECONDS,
        length=most.sequence_length,
    )  # fmt: skip
    loads = (single, largest) if users > 1 else (single,)
    return tuple(msgspec.structs.replace(load, rounds=ROUNDS) for load in loads)


def _measure_arm(
    context: RunContext,
    tuning: ArmTuning,
    loads: Sequence[Workload],
    pairs: Sequence[HandicapPair],
    store: Callable[[HandicapPair], None],
) -> None:
    """Load an arm with all of its settings, then with single ones if those cost. `pairs` are those so far."""
    arm = context.arms[tuning.label]
    with _server(context, arm, "none", "plain") as plain:
        pair = HandicapPair(number=len(pairs), label=tuning.label, setting=None, loads=tuple(loads))
        context.progress.now(f"{arm.name} beside the same server without {', '.join(tuning.settings)}")
        slow = _load_pair(context, pair, arm, plain, LOAD_SECONDS)
        store(pair)
        for setting in list(tuning.settings)[:MOST_SETTINGS] if slow and len(tuning.settings) > 1 else ():
            context.progress.now(f"{arm.name} with {setting} alone beside the plain server")
            pair = HandicapPair(number=len(pairs), label=tuning.label, setting=setting, loads=tuple(slow))
            failure = context.attempt(partial(_load_single, context, pair, arm, plain))
            if failure is not None:
                context.progress.now(f"{arm.name} with {setting} alone could not be measured: {failure}")
            store(msgspec.structs.replace(pair, reason=failure))


def _load_single(context: RunContext, pair: HandicapPair, arm: Arm, plain: Arm) -> None:
    with _server(context, arm, str(pair.setting), "single") as single:
        _load_pair(context, pair, single, plain, LOAD_SECONDS / 2)


def _load_pair(context: RunContext, pair: HandicapPair, tuned: Arm, plain: Arm, seconds: float) -> list[Workload]:
    """Run rounds of each load until it is decided or its time is up; returns those under which `tuned` is slower."""
    store, margin = RunStore(context.store.directory / pair.folder), context.experiment.equivalence_margin
    runner, blocks = context.beside({TUNED: tuned, PLAIN: plain}, store, pair.loads, pair.number)
    by_name = {load.name: load for load in pair.loads}
    stored: list[StoredBlock] = []
    slow: list[Workload] = []
    for load in pair.loads:
        deadline = monotonic() + seconds
        for block in blocks:
            if block.workload is not load:
                continue
            if block.position == 0 and block.round >= MIN_ROUNDS and monotonic() > deadline:
                break
            stored.append(read_block(store.directory, runner.measure(block), by_name))
            ratio = estimate(ratios_of(summarise_blocks(stored), load.name)) if block.position else None
            slower = None if ratio is None else ratio.slower(margin)
            if slower:
                slow.append(load)
            if slower is not None:
                break
    return slow


def _server(context: RunContext, arm: Arm, tuning: str, name: str) -> AbstractContextManager[Arm]:
    """A second server of an arm with this tuning, while the arm's own stays up without load."""
    label, store = arm.request.label, RunStore(context.store.directory / "handicap" / name)
    variant = Variant(payload=arm.payload, transport=arm.transport, settings={"tuning": tuning})
    return context.varied(label, variant, store, f"handicap-{label}")  # with a log apart from the arm's own


PROBE = Probe(wanted=wanted, measure=measure, finding=HandicapsFound, analyse=analyse)
