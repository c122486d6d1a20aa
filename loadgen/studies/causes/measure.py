"""Runs the counterfactual cells, when the arms' own blocks are done and their servers still up.

Each counterfactual is an arm as it is beside the same arm without one cause, in interleaved rounds. A changed
setting takes a server of its own, which runs beside the arm's; only one of the two is under load at any time. What
cannot be run is stored as untested with its reason, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import msgspec
import numpy as np

from loadgen.bench.arms import Arm
from loadgen.bench.bench import Bench
from loadgen.bench.load_runner import LoadError, LoadRunner
from loadgen.bench.preparation import READY_SECONDS, make_deployment
from loadgen.bench.progress import Progress
from loadgen.comparison.summaries import summarise_blocks
from loadgen.experiment.schedule import has_load, interleave
from loadgen.generator.process import GeneratorError
from loadgen.records.run import ArmRequest, Cell, Experiment, Label, shown
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import StoredBlock, read_run
from loadgen.studies.causes.plan import (
    cells_worth_explaining,
    changed_settings,
    fit_into,
    plan_counterfactuals,
    seconds_needed,
)
from loadgen.studies.causes.records import AS_IS, BESIDE, WITHOUT, Counterfactual, Explanation, Untested, Variant
from loadgen.targets.interface import DeploymentError
from loadgen.targets.process import ProcessError
from loadgen.transport.endpoint import EndpointError
from loadgen.transport.inputs import InputError
from loadgen.transport.requests import AddressError

OBSTACLES = (
    AddressError, DeploymentError, EndpointError, GeneratorError, InputError, LoadError, ProcessError,
)  # fmt: skip
"""What leaves a cause untested; a full disk ends the run as it does anywhere."""


def wanted(experiment: Experiment) -> bool:
    """Whether it is asked for, and there is a load to explain."""
    return experiment.explain and has_load(experiment)


def measure(bench: Bench) -> None:
    """Everything that the budget holds, once all blocks are there; stored as it goes on. Raises `StorageError`."""
    if not bench.last:
        return
    bench.enter("explaining the differences")
    experiment = bench.experiment
    run = read_run(bench.store.directory)
    blocks = summarise_blocks(run.blocks)
    arms = {record.label: record for record in bench.records}
    plan, untested = plan_counterfactuals(experiment, arms, _payload_bytes(run.blocks))
    seconds = _block_seconds(run.blocks)
    cells, left_out = fit_into(experiment.explain_seconds, plan, cells_worth_explaining(experiment, blocks), seconds)
    _Explanation(bench, cells, left_out, untested, seconds).run(plan)


class _Explanation:
    """What is done so far."""

    def __init__(
        self,
        bench: Bench,
        cells: Sequence[Cell],
        left_out: Sequence[Cell],
        untested: list[Untested],
        block_seconds: Mapping[str, float],
    ) -> None:
        self._bench = bench
        self._cells = tuple(cells)
        self._left_out = tuple(cell.name for cell in left_out)
        self._done: list[Counterfactual] = []
        self._untested = untested
        self._block_seconds = block_seconds
        self._prepared = {arm.body_key for arm in bench.arms.values()}

    def run(self, plan: Sequence[Counterfactual]) -> None:
        """One after the other until the budget is used up."""
        self._store()
        if not self._cells:
            self._bench.progress.now("no difference of the arms' request times to explain")
            return
        deadline = monotonic() + self._bench.experiment.explain_seconds
        needed = seconds_needed(plan, self._cells, self._block_seconds)
        for number, wanted in enumerate(plan, start=1):
            counterfactual = msgspec.structs.replace(wanted, cells=self._cells)
            if monotonic() > deadline:
                minutes = f"{self._bench.experiment.explain_seconds / 60:g} minutes"
                self._leave(counterfactual, f"the {minutes} for it were used up; raise --explain-minutes")
                continue
            self._bench.progress.plan(self._bench.forecast.remaining_s() + needed * (1 - (number - 1) / len(plan)))
            self._bench.progress.now(
                f"cause {number} of {len(plan)}: {shown(counterfactual.label)} with {counterfactual.changed}"
            )
            try:
                self._measure(counterfactual)
            except OBSTACLES as exc:
                self._leave(counterfactual, reason_of(exc))
                continue
            self._done.append(counterfactual)
            self._store()

    def _leave(self, counterfactual: Counterfactual, reason: str) -> None:
        self._bench.progress.now(f"not tested: {reason}")
        self._untested.append(Untested(cause=counterfactual.cause, label=counterfactual.label, reason=reason))
        self._store()

    def _store(self) -> None:
        self._bench.store.write(
            Explanation(
                cells=tuple(cell.name for cell in self._cells),
                left_out=self._left_out,
                done=tuple(self._done),
                untested=tuple(self._untested),
            )
        )

    def _measure(self, counterfactual: Counterfactual) -> None:
        bench, cells = self._bench, counterfactual.cells
        store = RunStore(bench.store.directory / counterfactual.folder)
        with (
            self._arm(counterfactual.label, counterfactual.as_is, store, "as-is") as as_is,
            self._arm(counterfactual.label, counterfactual.without, store, "without") as without,
        ):
            arms: dict[Label, Arm] = {AS_IS: as_is, WITHOUT: without}
            for arm in arms.values():
                self._prepare_bodies(arm)
            runner = LoadRunner(arms, bench.generator, store, Progress(), seed=bench.experiment.seed)
            runner.warm_up(cells)
            blocks = interleave(cells, BESIDE, bench.experiment.seed + counterfactual.number + 1)
            for number, block in enumerate(blocks, start=1):
                bench.progress.now(
                    f"{shown(counterfactual.label)} with {counterfactual.changed}: block {number} of {len(blocks)}, "
                    f"{block.cell.name} {'as it is' if block.label == AS_IS else 'without'}"
                )
                runner.measure(block)

    @contextmanager
    def _arm(self, label: Label, variant: Variant, store: RunStore, name: str) -> Iterator[Arm]:
        """The arm as the variant says: the running server where that will do, else one of its own."""
        own = self._bench.arms[label]
        experiment = self._bench.experiment
        same = variant.payload == own.payload and variant.transport == own.transport and not variant.settings
        if same:
            yield own
            return
        request = varied_request(own.request, variant)
        varied = varied_experiment(experiment, request, variant)
        arm = replace(
            own,
            request=request,
            model=own.model if variant.payload == own.payload else varied.model_of(request),
            transport=variant.transport,
            payload=variant.payload,
        )
        if not request.embedded or experiment.deployment == "compose":
            arm.deployment.wait_ready(arm.model, 5.0)
            yield arm
            return
        work = self._bench.work / store.directory.name / name
        deployment = make_deployment(request, varied, store, work, self._bench.abserve)
        try:
            deployment.start()
            deployment.wait_ready(arm.model, READY_SECONDS)
            yield replace(arm, deployment=deployment)
        finally:
            deployment.stop()

    def _prepare_bodies(self, arm: Arm) -> None:
        if arm.body_key in self._prepared:
            return
        signature = arm.endpoint.signature(arm.model)
        sizes = [cell.batch_size for cell in self._cells]
        bench = self._bench
        bench.generator.prepare(arm.bodies(bench.samples_folder, signature, sizes, bench.experiment.seed))
        self._prepared.add(arm.body_key)


def reason_of(obstacle: Exception) -> str:
    """Its message; where that speaks of the labels in a counterfactual's folder, of what they mean there."""
    return str(obstacle).replace(f"arm {AS_IS}", "the arm as it is").replace(f"arm {WITHOUT}", "the arm without it")


def varied_request(request: ArmRequest, variant: Variant) -> ArmRequest:
    """The arm as the variant asks for it."""
    return msgspec.structs.replace(
        request, payload=variant.payload, settings=changed_settings(request.settings, variant)
    )


def varied_experiment(experiment: Experiment, request: ArmRequest, variant: Variant) -> Experiment:
    """The experiment with that arm in its place."""
    arms = tuple(request if arm.label == request.label else arm for arm in experiment.arms)
    return msgspec.structs.replace(experiment, arms=arms, transport=variant.transport)


def _payload_bytes(blocks: Sequence[StoredBlock]) -> Mapping[Label, float]:
    sizes: dict[Label, list[int]] = {}
    for block in blocks:
        sizes.setdefault(block.record.label, []).extend(block.record.body_payload_bytes)
    return {label: float(np.mean(values)) for label, values in sizes.items() if values}


def _block_seconds(blocks: Sequence[StoredBlock]) -> Mapping[str, float]:
    lengths: dict[str, list[float]] = {}
    for block in blocks:
        record = block.record
        lengths.setdefault(record.cell, []).append((record.window_end_ns - record.window_start_ns) / 1e9)
    return {cell: float(np.mean(values)) for cell, values in lengths.items()}
