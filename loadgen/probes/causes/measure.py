"""Runs the ablations when the arms' own blocks are done and their servers are still up.

An ablation loads an arm with one cause beside the same arm without it, in interleaved rounds. A changed setting takes
a second server, which runs beside the arm's; only one of the two is under load at any time. An ablation that cannot
be run is stored as untested with its reason, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from time import monotonic

import msgspec

from loadgen.bench.arms import Arm
from loadgen.bench.bench import Bench
from loadgen.bench.load_runner import LoadError, LoadRunner
from loadgen.bench.progress import Progress
from loadgen.child_process import ProcessError
from loadgen.client.connection import AddressError
from loadgen.client.endpoint import EndpointError
from loadgen.client.generator import GeneratorError
from loadgen.client.inputs import InputError
from loadgen.comparison.summaries import summarise_blocks
from loadgen.experiment.schedule import has_load, interleave
from loadgen.launch.deployment import DeploymentError
from loadgen.probes.causes.plan import (
    changed_settings,
    fit_into,
    plan_ablations,
    seconds_needed,
    workloads_worth_explaining,
)
from loadgen.probes.causes.records import AS_IS, BESIDE, WITHOUT, Ablation, Explanation, Untested, Variant
from loadgen.records.run import ArmRequest, Experiment, Label, shown
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import read_run

OBSTACLES = (
    AddressError, DeploymentError, EndpointError, GeneratorError, InputError, LoadError, ProcessError,
)  # fmt: skip
"""Errors that leave a cause untested; a full disk ends the run, as everywhere."""


def wanted(experiment: Experiment) -> bool:
    """Whether ablations are requested, and there is load to explain."""
    return experiment.explain and has_load(experiment)


def measure(bench: Bench) -> None:
    """Run every ablation for which the time lasts, once all blocks are done; each is stored. Raises `StorageError`."""
    if not bench.last:
        return
    bench.enter("explaining the differences")
    experiment = bench.experiment
    run = read_run(bench.store.directory)
    worth = workloads_worth_explaining(experiment, summarise_blocks(run.blocks))
    arms = {record.label: record for record in bench.records}
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
    bench.store.write(explanation)
    if not workloads:
        bench.progress.now("the arms' request times do not differ, so there is nothing to explain")
        return
    deadline = monotonic() + experiment.explain_seconds
    needed_s = seconds_needed(plan, workloads, seconds)
    prepared = {arm.body_key for arm in bench.arms.values()}
    for number, planned in enumerate(plan):
        ablation = msgspec.structs.replace(planned, workloads=tuple(workloads))
        bench.progress.plan(bench.forecast.remaining_s() + needed_s * (1 - number / len(plan)))
        bench.progress.now(f"ablation {number + 1} of {len(plan)}: {shown(ablation.label)} with {ablation.changed}")
        try:
            if monotonic() > deadline:
                raise LoadError(f"the {experiment.explain_seconds / 60:g} minutes are used up; raise --explain-minutes")
            _run_ablation(bench, ablation, prepared)
            explanation = msgspec.structs.replace(explanation, done=(*explanation.done, ablation))
        except OBSTACLES as exc:
            reason = str(exc).replace(f"arm {AS_IS}", "the arm with it").replace(f"arm {WITHOUT}", "the arm without it")
            bench.progress.now(f"not tested: {reason}")
            failed = Untested(cause=ablation.cause, label=ablation.label, reason=reason)
            explanation = msgspec.structs.replace(explanation, untested=(*explanation.untested, failed))
        bench.store.write(explanation)


def _run_ablation(bench: Bench, ablation: Ablation, prepared: set[str]) -> None:
    """Run one ablation. `prepared`: keys of the bodies that the generator has; new ones are added."""
    seed, workloads = bench.experiment.seed, ablation.workloads
    store = RunStore(bench.store.directory / ablation.folder)
    with (
        _arm(bench, ablation.label, ablation.as_is, store, "as-is") as as_is,
        _arm(bench, ablation.label, ablation.without, store, "without") as without,
    ):
        for arm in (as_is, without):
            if arm.body_key not in prepared:
                signature, sizes = arm.endpoint.signature(arm.model), {one.batch_size for one in workloads}
                bench.generator.prepare(arm.bodies(bench.samples_folder, signature, sizes, bench.experiment))
                prepared.add(arm.body_key)
        runner = LoadRunner({AS_IS: as_is, WITHOUT: without}, bench.generator, store, Progress(), seed=seed)
        runner.warm_up(workloads)
        blocks = interleave(workloads, BESIDE, seed + ablation.number + 1)
        for number, block in enumerate(blocks, start=1):
            bench.progress.now(
                f"{shown(ablation.label)} with {ablation.changed}: block {number} of {len(blocks)}, "
                f"{block.workload.name} {'before' if block.label == AS_IS else 'after'} the change"
            )
            runner.measure(block)


@contextmanager
def _arm(bench: Bench, label: Label, variant: Variant, store: RunStore, name: str) -> Iterator[Arm]:
    """Set up the arm as the variant says: on the running server if its settings fit, else on a new server."""
    own, experiment = bench.arms[label], bench.experiment
    if (variant.payload, variant.transport) == (own.payload, own.transport) and not variant.settings:
        yield own
        return
    request = varied_request(own.request, variant)
    varied = varied_experiment(experiment, request, variant)
    arm = replace(
        own,
        request=request,
        model=own.model if variant.payload == own.payload else varied.model_of(request) or own.model,
        transport=variant.transport,
        payload=variant.payload,
    )
    if not request.embedded or experiment.deployment == "compose":
        arm.deployment.wait_ready(arm.model, 5.0)
        yield arm
        return
    with bench.second_server(arm, varied, store, bench.work / store.directory.name / name) as started:
        yield started


def varied_request(request: ArmRequest, variant: Variant) -> ArmRequest:
    """The arm's request, changed as the variant says."""
    return msgspec.structs.replace(
        request, payload=variant.payload, settings=changed_settings(request.settings, variant)
    )


def varied_experiment(experiment: Experiment, request: ArmRequest, variant: Variant) -> Experiment:
    """The experiment with that arm in place of the original."""
    arms = tuple(request if arm.label == request.label else arm for arm in experiment.arms)
    return msgspec.structs.replace(experiment, arms=arms, transport=variant.transport)


def _means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of the values with each name."""
    grouped: dict[str, list[float]] = {}
    for name, value in values:
        grouped.setdefault(name, []).append(value)
    return {name: fmean(several) for name, several in grouped.items()}
