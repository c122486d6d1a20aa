"""Checks before the load that the arms compute the same function, by comparing their answers to the same inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from loadgen.records.run import Label, ParityCase, ParityRecord
from loadgen.statistics.agreement import Tolerance, difference
from loadgen.transport.bodies import AnswerError
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import ConnectionRefused
from loadgen.transport.inputs import Array, InputError, SampleInputs
from loadgen.transport.transports import Target, prepare, read_answer

_MIXED_SIZES = (2, 3, 1, 5, 1, 4, 7, 1, 8)
_TIMEOUT_S = 120.0

Answer = Mapping[str, Array]


class ParityError(Exception):
    """The arms' answers cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class ParityTarget:
    """One arm as parity asks it: over the transport of the load, with the same inputs in its own payload."""

    target: Target
    signature: Signature
    inputs: SampleInputs


def check_parity(
    arms: Mapping[Label, ParityTarget], batch_sizes: Collection[int], tolerance: Tolerance
) -> ParityRecord:
    """Send every arm, the baseline first, the same inputs: alone, in mixed batches sent at once (so that dynamic
    batching merges them), and in one batch of each size. Each arm's answers must equal the baseline's but for rounding,
    and an arm's answers in a batch its own answers alone."""
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
        answer = read_answer(connection, connection.send(request))
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
