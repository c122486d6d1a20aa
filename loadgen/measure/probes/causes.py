"""Causes: why the arms differ. Runs the planned ablations after the load.

An ablation loads an arm with one cause beside the same arm without it, in interleaved rounds, when the arms' own blocks
are done and their servers are still up. A changed setting takes a second server, which runs beside the arm's; only one
of the two is under load at any time. An ablation that cannot be run is stored as untested with its reason, and the run
goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from statistics import fmean
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from loadgen.base.quantities import counted
from loadgen.experiment.schedule import has_load
from loadgen.findings.causes import AS_IS, WITHOUT, Ablation, CausesFound, Explanation, Untested, analyse, conclude
from loadgen.findings.registry import Probe
from loadgen.measure.probes.causes_plan import fit_into, plan_ablations, seconds_needed, workloads_worth_explaining
from loadgen.metrics.summaries import summarise_blocks
from loadgen.records.run import Experiment
from loadgen.records.store import RunStore, read_run

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext


def wanted(experiment: Experiment) -> bool:
    """Whether ablations are requested, and there is load to explain."""
    return experiment.explain and has_load(experiment)


def measure(context: RunContext) -> None:
    """Run every ablation for which the time lasts, once all blocks are done; each is stored. Raises `StorageError`."""
    if not context.last:
        return
    context.enter("explaining the differences")
    experiment = context.experiment
    run = read_run(context.store.directory)
    worth = workloads_worth_explaining(experiment, summarise_blocks(run.blocks))
    arms = {record.label: record for record in context.records}
    blocks = [block.record for block in run.blocks]
    payload_bytes = _means((block.label, size) for block in blocks for size in block.body_payload_bytes)
    seconds = _means((block.workload, (block.window_end_ns - block.window_start_ns) / 1e9) for block in blocks)
    plan, untested = plan_ablations(experiment, arms, payload_bytes)
    workloads, left_out = fit_into(experiment.explain_seconds, plan, worth, seconds)
    explanation = Explanation(
        workloads=tuple(workload.name for workload in workloads),
        left_out=tuple(workload.name for workload in left_out),
        done=(),
        untested=tuple(untested),
    )
    context.store.write(explanation)
    if not workloads:
        what = experiment.kind.value
        context.progress.now(f"the arms' {what} times do not differ, so there is nothing to explain")
        return
    deadline = monotonic() + experiment.explain_seconds
    needed_s = seconds_needed(plan, workloads, seconds)
    prepared = {arm.body_key for arm in context.arms.values()}
    for done, planned in enumerate(plan):
        ablation = msgspec.structs.replace(planned, workloads=tuple(workloads))
        context.progress.plan(context.forecast.remaining_s() + needed_s * (1 - done / len(plan)))
        context.progress.now(
            f"ablation {done + 1} of {len(plan)}: {context.arms[ablation.label].name} with {ablation.changed}"
        )
        limit = counted(experiment.explain_seconds / 60, "minute")
        failure: str | None = f"the limit of {limit} is reached; raise --explain-minutes"
        if monotonic() + (needed_s / len(plan) if done else 0.0) <= deadline:
            failure = context.attempt(partial(_run_ablation, context, ablation, prepared))
        if failure is None:
            explanation = msgspec.structs.replace(explanation, done=(*explanation.done, ablation))
        else:
            context.progress.now(f"not tested: {failure}")
            failed = Untested(cause=ablation.cause, label=ablation.label, reason=failure)
            explanation = msgspec.structs.replace(explanation, untested=(*explanation.untested, failed))
        context.store.write(explanation)


def _run_ablation(context: RunContext, ablation: Ablation, prepared: set[str]) -> None:
    """Run one ablation. `prepared`: keys of the bodies that the generator has; new ones are added."""
    store = RunStore(context.store.directory / ablation.folder)
    with (
        context.varied(ablation.label, ablation.as_is, store, "as-is") as as_is,
        context.varied(ablation.label, ablation.without, store, "without") as without,
    ):
        for arm in (as_is, without):
            if arm.body_key in prepared:
                continue
            prepared.add(arm.body_key)
            context.sent.prepare_bodies(arm, {workload.batch_size for workload in ablation.workloads})
        arms = {WITHOUT: replace(without, called="the arm without it"), AS_IS: replace(as_is, called="the arm with it")}
        runner, blocks = context.beside(arms, store, ablation.workloads, ablation.number + 1)
        for place, block in enumerate(blocks, start=1):
            context.progress.now(
                f"{context.arms[ablation.label].name} with {ablation.changed}: block {place} of {len(blocks)}, "
                f"{block.workload.name} {'before' if block.label == AS_IS else 'after'} the change"
            )
            runner.measure(block)


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values with each name."""
    grouped: dict[str, list[float]] = {}
    for name, value in values:
        grouped.setdefault(name, []).append(value)
    return {name: fmean(several) for name, several in grouped.items()}


PROBE = Probe(
    wanted=wanted,
    measure=measure,
    finding=CausesFound,
    analyse=analyse,
    conclude=conclude,
    sections="loadgen.report.sections.causes",
)
