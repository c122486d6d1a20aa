"""Compares answers: those of the arms before the load, and after it those given under load with those given alone.

**Parity**: all arms answer the same inputs, or their speed is not compared.

**Under load**: the generator keeps a random sample of each block's answers (`generator/kept_answers.py`). After the
load, before the servers are restarted, each kept item is sent alone to the baseline. An arm with another payload is its
own reference, since varied values are not the same picture in two payloads. Nothing is sent between blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isfinite
from typing import Literal

import msgspec
import numpy as np

from loadgen.bench.arms import Arm
from loadgen.bench.preparation import Inputs
from loadgen.generator.kept_answers import unpacked
from loadgen.generator.messages import KeptAnswer, Open, Outcome
from loadgen.records.run import Label, ParityCase, ParityRecord, Workload
from loadgen.statistics.agreement import Tolerance, difference, root_mean_square
from loadgen.storage.store import RunStore
from loadgen.studies.answers.records import AnswersCompared
from loadgen.transport.bodies import AnswerError, choose_items
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import Array, InputError, SampleInputs
from loadgen.transport.transports import Target, prepare, read_answer
from loadgen.transport.variation import Variation, find_variation

LEAST_ANSWERS = 64
"""Answers compared per workload and arm over the run, if there are that many."""
ANSWERS_OF_A_TRIAL = 4
"""Few, because a search has dozens of trials."""
_MIXED_SIZES = (2, 3, 1, 5, 1, 4, 7, 1, 8)
_TIMEOUT_S = 120.0

Answer = Mapping[str, Array]


class ParityError(Exception):
    """The arms' answers cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class ParityTarget:
    """One arm in the parity check: asked over the transport of the load, with the same inputs in its payload."""

    target: Target
    signature: Signature
    inputs: SampleInputs


def check_parity(
    arms: Mapping[Label, ParityTarget], batch_sizes: Collection[int], tolerance: Tolerance
) -> ParityRecord:
    """Send every arm, the baseline first, the same inputs: alone, in mixed batches sent at once (so that dynamic
    batching merges them), and in one batch of each size. Each arm's answers must equal the baseline's but for rounding,
    and an arm's answers in a batch must equal its answers alone."""
    record = ParityRecord(
        cases=(),
        ok=False,
        precision=tolerance.precision,
        tolerance_relative=tolerance.relative,
        tolerance_element=tolerance.element,
    )
    try:
        cases = _cases(arms, sorted(set(batch_sizes)), tolerance)
    except (ParityError, AnswerError, ConnectionRefused, InputError) as exc:
        return msgspec.structs.replace(record, error=str(exc))
    return msgspec.structs.replace(record, cases=tuple(cases), ok=all(case.ok for case in cases))


def _cases(arms: Mapping[Label, ParityTarget], batch_sizes: Sequence[int], tolerance: Tolerance) -> list[ParityCase]:
    count = min(arm.inputs.count for arm in arms.values())
    batches = mixed_batches(count, max(batch_sizes))
    mixed = f"mixed batches of {', '.join(str(len(batch)) for batch in batches)} at once"
    items_of = {mixed: [item for batch in batches for item in batch]}
    items_of |= {f"one batch of {size}": [item % count for item in range(size)] for size in batch_sizes if size > 1}
    alone: dict[Label, Answer] = {}
    batched: dict[Label, dict[str, Answer]] = {}
    for label, arm in arms.items():
        try:
            alone[label] = _ask_all(arm, [(item,) for item in range(count)], at_once=1)
            batched[label] = {
                name: _ask_all(arm, batches, at_once=len(batches)) if name == mixed else ask(arm, items)
                for name, items in items_of.items()
            }
        except (AnswerError, ConnectionRefused) as exc:
            raise ParityError(f"arm {label} does not answer the inputs of the parity check: {exc}") from exc
    first, *others = arms
    cases = []
    for label in others:
        of = "" if len(others) == 1 else f"{label}: "
        name = f"{of}each input alone"
        cases.append(compare_answers(name, label, "reference", alone[first], alone[label], tolerance))
        for name, expected in batched[first].items():
            actual = batched[label][name]
            cases.append(compare_answers(of + name, label, "reference", expected, actual, tolerance))
    for label in arms:
        for name, items in items_of.items():
            expected = {output: array[items] for output, array in alone[label].items()}
            title = f"{label}: {name} against alone"
            cases.append(compare_answers(title, label, "alone", expected, batched[label][name], tolerance))
    return cases


def mixed_batches(items: int, max_batch_size: int) -> list[tuple[int, ...]]:
    """Batches of different sizes with different items in each, as far as the items last."""
    batches = []
    following = 0
    for size in _MIXED_SIZES:
        size = min(size, max_batch_size, items)
        batches.append(tuple((following + offset) % items for offset in range(size)))
        following += size
    return batches


def compare_answers(
    name: str, label: Label, kind: Literal["reference", "alone"], expected: Answer, actual: Answer, tolerance: Tolerance
) -> ParityCase:
    """One case over all items of all outputs. Raises `ParityError` when names or shapes differ or a value is not
    finite."""
    if expected.keys() != actual.keys():
        raise ParityError(f"{name}: outputs {sorted(actual)} instead of {sorted(expected)}")
    differences = {}
    for output, reference in expected.items():
        answer = actual[output]
        if answer.shape != reference.shape:
            raise ParityError(f"{name}: {output} has shape {answer.shape} instead of {reference.shape}")
        if reference.size == 0:
            raise ParityError(f"{name}: {output} is empty (shape {reference.shape})")
        if not (_finite(reference) and _finite(answer)):
            raise ParityError(f"{name}: {output} holds NaN or infinite values")
        differences[output] = difference(reference, answer)
    apart = differences.values()
    wrong = [output for output, found in differences.items() if not tolerance.holds(found).all()]
    return ParityCase(
        name=name,
        label=label,
        kind=kind,
        images=len(next(iter(expected.values()))) if expected else 0,
        cosine_min=min((float(found.cosine.min()) for found in apart), default=1.0),
        max_abs=max((float(found.absolute.max()) for found in apart), default=0.0),
        relative_max=max((float(found.relative.max()) for found in apart), default=0.0),
        element_max=max((float(found.element.max()) for found in apart), default=0.0),
        ok=not wrong,
        output=wrong[0] if wrong else None,
    )


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def ask(arm: ParityTarget, items: Sequence[int]) -> Answer:
    """The answer to one request, on its own connection. Raises `AnswerError`, `ConnectionRefused`."""
    request = arm.target.sendable(prepare(arm.target.transport, arm.inputs, arm.signature, items))
    connection = arm.target.connection((request,), timeout_s=_TIMEOUT_S)
    try:
        answer = read_answer(connection, connection.send(request), batched=arm.signature.batched)
    finally:
        connection.close()
    for name, array in answer.items():
        if array.ndim == 0 or len(array) != len(items):
            raise AnswerError(f"output {name} has shape {array.shape} for a batch of {len(items)}")
        if array.dtype.hasobject:
            raise AnswerError(f"output {name} holds texts, which cannot be compared as numbers")
    return answer


def _ask_all(arm: ParityTarget, batches: Sequence[tuple[int, ...]], *, at_once: int) -> Answer:
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        answers = list(pool.map(lambda items: ask(arm, items), batches))
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


@dataclass(frozen=True, slots=True)
class _Kept:
    workload: Workload
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

    def keeping(self, command: Open, workload: Workload, number: int) -> Open:
        """The command with a number of answers to keep; `number` is the block's. Rounds beyond the plan keep one per
        block."""
        count = -(-LEAST_ANSWERS // max(1, workload.rounds)) if workload.has_blocks else ANSWERS_OF_A_TRIAL
        if sum(kept.workload.name == workload.name for kept in self.kept) >= 2 * LEAST_ANSWERS:
            count = 1
        return msgspec.structs.replace(command, keep_answers=count, keep_seed=self.seed * 1_000_003 + number)

    def take(self, workload: Workload, label: Label, block: str, outcome: Outcome) -> None:
        """Take over the answers that a block has kept; `block` is its name for messages."""
        self.kept += [_Kept(workload, label, block, answer) for answer in outcome.answers]

    def compare(
        self, arms: Mapping[Label, Arm], signatures: Mapping[Label, Signature], inputs: Inputs, restart: int
    ) -> None:
        """Compare all kept answers, while nothing is under load. Raises `StorageError`."""
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
            for workload in dict.fromkeys(kept.workload.name for kept in own):
                record = AnswersCompared(
                    workload=workload, label=label, restart=restart, answers=0, items=0, wrong=0, relative_max=None,
                    tolerance_relative=self.tolerance.relative, error=error,
                )  # fmt: skip
                if error is None:
                    pairs = [pair for pair in zip(own, expected, strict=True) if pair[0].workload.name == workload]
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
    items = choose_items(inputs.count, kept.workload.batch_size, seed)[answer.body]
    alone = []
    for row in answer.rows:
        if variation is None:
            alone.append(ask(reference, (items[row],)))
        else:
            varied = variation.varied(inputs, items[row], answer.first + row)
            alone.append(ask(replace(reference, inputs=varied), (0,)))
    return alone
