"""Compares answers under load with the answers to the same inputs sent alone.

The generator keeps a random sample of each block's answers (`loadgen.generator.kept_answers`). After the load, before
the servers are restarted, each kept item is sent alone to the baseline. An arm with another payload is its own
reference, since varied values are not the same picture in two payloads. Nothing is sent between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isfinite

import msgspec
import numpy as np

from loadgen.bench.arms import Arm
from loadgen.bench.parity import Answer, ParityTarget, ask
from loadgen.bench.preparation import Inputs
from loadgen.generator.kept_answers import unpacked
from loadgen.generator.messages import KeptAnswer, Open, Outcome
from loadgen.records.run import Cell, Label
from loadgen.statistics.agreement import Tolerance, difference, root_mean_square
from loadgen.storage.store import RunStore
from loadgen.studies.answers.records import AnswersCompared
from loadgen.transport.bodies import AnswerError, choose_items
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import Array, InputError
from loadgen.transport.variation import Variation, find_variation

LEAST_ANSWERS = 64
"""Per workload and arm over the run, if there are so many."""
ANSWERS_OF_A_TRIAL = 4
"""A search has dozens of trials."""


@dataclass(frozen=True, slots=True)
class _Kept:
    cell: Cell
    label: Label
    block: str
    answer: KeptAnswer


@dataclass(slots=True)
class AnswersUnderLoad:
    """The kept answers of one start of the servers, and the comparisons of the whole run."""

    store: RunStore
    seed: int
    tolerance: Tolerance
    kept: list[_Kept] = field(default_factory=list)
    compared: list[AnswersCompared] = field(default_factory=list)

    def begin(self) -> None:
        """Store an empty record, so that a run that ends before the comparison shows that it is missing. Raises
        `StorageError`."""
        self.store.write_all(AnswersCompared, self.compared)

    def keeping(self, command: Open, cell: Cell, number: int) -> Open:
        """The command with a number of answers to keep; `number` is the block's. Rounds beyond the plan keep one per
        block."""
        count = -(-LEAST_ANSWERS // max(1, cell.rounds)) if cell.has_blocks else ANSWERS_OF_A_TRIAL
        if sum(kept.cell.name == cell.name for kept in self.kept) >= 2 * LEAST_ANSWERS:
            count = 1
        return msgspec.structs.replace(command, keep_answers=count, keep_seed=self.seed * 1_000_003 + number)

    def take(self, cell: Cell, label: Label, block: str, outcome: Outcome) -> None:
        """Take over what a block has kept; `block` is its name for messages."""
        self.kept += [_Kept(cell, label, block, answer) for answer in outcome.answers]

    def compare(
        self, arms: Mapping[Label, Arm], signatures: Mapping[Label, Signature], inputs: Inputs, restart: int
    ) -> None:
        """Compare everything that is kept, while nothing is under load. Raises `StorageError`."""
        first = next(iter(arms))  # the baseline
        for label, arm in arms.items():
            reference = first if arms[first].payload == arm.payload else label
            own = [kept for kept in self.kept if kept.label == label]
            asked = ParityTarget(arms[reference].target, signatures[reference], inputs[arm.payload])
            error: str | None = None
            expected: list[list[Answer]] = []
            try:
                variation = find_variation(asked.inputs, asked.signature)
                expected = [_ask_alone(asked, variation, self.seed, kept) for kept in own]
            except (AnswerError, ConnectionRefused, InputError) as exc:
                error = f"arm {reference} does not answer the inputs of the load again: {exc}"
            typical = _typical(expected)
            for cell in dict.fromkeys(kept.cell.name for kept in own):
                record = AnswersCompared(
                    cell=cell, label=label, restart=restart, answers=0, items=0, wrong=0, relative_max=None,
                    tolerance_relative=self.tolerance.relative, error=error,
                )  # fmt: skip
                if error is None:
                    pairs = [pair for pair in zip(own, expected, strict=True) if pair[0].cell.name == cell]
                    record = self._compared(record, pairs, typical)
                self.compared.append(record)
        self.kept = []
        self.store.write_all(AnswersCompared, self.compared)

    def _compared(
        self, record: AnswersCompared, pairs: Sequence[tuple[_Kept, list[Answer]]], typical: Mapping[str, float]
    ) -> AnswersCompared:
        faults: list[str] = []
        worst = 0.0
        for kept, expected in pairs:
            relative, fault = _fault(kept.answer, expected, typical, self.tolerance)
            worst = max(worst, relative)
            if fault is not None:
                faults.append(f"{kept.block}, request {kept.answer.request + 1:,} of user {kept.answer.user}: {fault}")
        return msgspec.structs.replace(
            record,
            answers=len(pairs),
            items=sum(len(kept.answer.rows) for kept, _ in pairs),
            wrong=len(faults),
            relative_max=worst if isfinite(worst) else None,
            fault=faults[0] if faults else None,
        )


def _typical(answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    arrays: dict[str, list[Array]] = {}
    for answer in chain.from_iterable(answers):
        for name, array in answer.items():
            arrays.setdefault(name, []).append(array.ravel())
    return {name: root_mean_square(np.concatenate(parts)) for name, parts in arrays.items()}


def _fault(
    answer: KeptAnswer, expected: Sequence[Answer], typical: Mapping[str, float], tolerance: Tolerance
) -> tuple[float, str | None]:
    """The largest relative error of an item, and what is wrong with the answer."""
    if answer.error is not None:
        return inf, answer.error
    worst, fault = 0.0, None
    actual = {tensor.name: unpacked(tensor) for tensor in answer.outputs}
    for place, (row, alone) in enumerate(zip(answer.rows, expected, strict=True)):
        if alone.keys() != actual.keys():
            return inf, f"outputs {sorted(actual)} instead of {sorted(alone)}"
        for name, array in alone.items():
            found = actual[name][place : place + 1]
            if found.shape != array.shape:
                return inf, f"output {name} of item {row + 1} has shape {found.shape[1:]}, alone {array.shape[1:]}"
            apart = difference(array, found, typical[name])
            worst = max(worst, float(apart.relative[0]))
            if fault is None and not tolerance.holds(apart)[0]:
                fault = (
                    f"output {name} of item {row + 1} has a relative error of {apart.relative[0]:.2g} "
                    f"(tolerance {tolerance.relative:.2g}), of one element {apart.element[0]:.2g} "
                    f"(tolerance {tolerance.element:.2g})"
                )
    return worst, fault


def _ask_alone(reference: ParityTarget, variation: Variation | None, seed: int, kept: _Kept) -> list[Answer]:
    inputs, answer = reference.inputs, kept.answer
    items = choose_items(inputs.count, kept.cell.batch_size, seed)[answer.body]
    alone = []
    for row in answer.rows:
        if variation is None:
            alone.append(ask(reference, (items[row],)))
        else:
            varied = variation.varied(inputs, items[row], answer.first + row)
            alone.append(ask(replace(reference, inputs=varied), (0,)))
    return alone
