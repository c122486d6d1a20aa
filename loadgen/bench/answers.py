"""Compares answers that were given under load with those to the same inputs sent alone.

The generator keeps a seeded sample of each block's answers (`loadgen.generator.kept_answers`). When the load of a start
of the servers is over, each kept item is sent again, alone, to the baseline; an arm that is sent another payload is its
own reference, since values that vary are not the same picture in two payloads. So nothing is asked between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Of a workload and an arm over the run, where there are so many."""
ANSWERS_OF_A_TRIAL = 4
"""There are dozens of trials in a search."""


@dataclass(frozen=True, slots=True)
class _Kept:
    cell: Cell
    label: Label
    block: str
    answer: KeptAnswer


@dataclass(slots=True)
class AnswersUnderLoad:
    """What is kept so far, and what came of what is compared. `kept` lives as long as a start of the servers."""

    store: RunStore
    seed: int
    tolerance: Tolerance
    kept: list[_Kept] = field(default_factory=list)
    compared: list[AnswersCompared] = field(default_factory=list)

    def begin(self) -> None:
        """From here on answers are missed where they are not compared. Raises `StorageError`."""
        self.store.write_all(AnswersCompared, self.compared)

    def keeping(self, command: Open, cell: Cell, number: int) -> Open:
        """The command, with answers to be kept; `number` is the block's. Pairs beyond those planned keep one each."""
        count = -(-LEAST_ANSWERS // max(1, cell.rounds)) if cell.has_blocks else ANSWERS_OF_A_TRIAL
        if sum(kept.cell.name == cell.name for kept in self.kept) >= 2 * LEAST_ANSWERS:
            count = 1
        return msgspec.structs.replace(command, keep_answers=count, keep_seed=self.seed * 1_000_003 + number)

    def take(self, cell: Cell, label: Label, block: str, outcome: Outcome) -> None:
        """What a block has kept; `block` names it for people."""
        self.kept += [_Kept(cell, label, block, answer) for answer in outcome.answers]

    def compare(
        self, arms: Mapping[Label, Arm], signatures: Mapping[Label, Signature], inputs: Inputs, restart: int
    ) -> None:
        """All that is kept, in one go, while nothing is under load. Raises `StorageError`."""
        first = next(iter(arms))  # the baseline
        for label, arm in arms.items():
            reference = first if arms[first].payload == arm.payload else label
            own = [kept for kept in self.kept if kept.label == label]
            asked = ParityTarget(arms[reference].target, signatures[reference], inputs[arm.payload])
            cells = list(dict.fromkeys(kept.cell.name for kept in own))
            try:
                comparison = _Comparison(asked, self.seed, self.tolerance, own)
            except (AnswerError, ConnectionRefused, InputError) as exc:
                error = f"arm {reference} does not answer the inputs of the load again: {exc}"
                self.compared += [
                    AnswersCompared(
                        cell=name, label=label, restart=restart, answers=0, items=0, wrong=0, relative_max=None,
                        tolerance_relative=self.tolerance.relative, error=error,
                    )
                    for name in cells
                ]  # fmt: skip
                continue
            self.compared += [comparison.outcome(name, label, restart) for name in cells]
        self.kept = []
        self.store.write_all(AnswersCompared, self.compared)


class _Comparison:
    """One arm's kept answers beside the reference's."""

    def __init__(self, reference: ParityTarget, seed: int, tolerance: Tolerance, kept: Sequence[_Kept]) -> None:
        """Asks the reference. Raises `AnswerError`, `ConnectionRefused`, `InputError`."""
        self._tolerance = tolerance
        variation = find_variation(reference.inputs, reference.signature)
        self._expected = [(one, _asked_alone(reference, variation, seed, one)) for one in kept]
        arrays: dict[str, list[Array]] = {}
        for _, answers in self._expected:
            for answer in answers:
                for name, array in answer.items():
                    arrays.setdefault(name, []).append(array.ravel())
        self._typical = {name: root_mean_square(np.concatenate(parts)) for name, parts in arrays.items()}

    def outcome(self, cell: str, label: Label, restart: int) -> AnswersCompared:
        """Of one cell."""
        own = [(kept, expected) for kept, expected in self._expected if kept.cell.name == cell]
        faults: list[str] = []
        worst = 0.0
        for kept, expected in own:
            relative, fault = self._fault(kept.answer, expected)
            worst = max(worst, relative)
            if fault is not None:
                answer = kept.answer
                faults.append(f"{kept.block}, request {answer.request + 1:,} of user {answer.user}: {fault}")
        return AnswersCompared(
            cell=cell,
            label=label,
            restart=restart,
            answers=len(own),
            items=sum(len(kept.answer.rows) for kept, _ in own),
            wrong=len(faults),
            relative_max=worst if isfinite(worst) else None,
            tolerance_relative=self._tolerance.relative,
            fault=faults[0] if faults else None,
        )

    def _fault(self, answer: KeptAnswer, expected: Sequence[Answer]) -> tuple[float, str | None]:
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
                apart = difference(array, found, self._typical[name])
                worst = max(worst, float(apart.relative[0]))
                if fault is None and not self._tolerance.holds(apart)[0]:
                    fault = (
                        f"output {name} of item {row + 1} has a relative error of {apart.relative[0]:.2g} "
                        f"(tolerance {self._tolerance.relative:.2g}), of one element {apart.element[0]:.2g} "
                        f"(tolerance {self._tolerance.element:.2g})"
                    )
        return worst, fault


def _asked_alone(reference: ParityTarget, variation: Variation | None, seed: int, kept: _Kept) -> list[Answer]:
    """The reference's answer to each compared item of a kept answer."""
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
