"""Whether the arms compute the same function: the same images sent to each as the load is, and answers compared."""

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
    """The arms' answers cannot be compared at all; the message says why."""


@dataclass(frozen=True, slots=True)
class ParityTarget:
    """One arm as parity asks it: over the transport of the load, with the same pictures in its own payload."""

    target: Target
    signature: Signature
    inputs: SampleInputs


def check_parity(
    arms: Mapping[Label, ParityTarget], batch_sizes: Collection[int], tolerance: Tolerance
) -> ParityRecord:
    """Ask every arm, the baseline first, the same images: alone, in mixed batches sent at once (so that dynamic
    batching merges them), and in one batch of each size. Every item must equal its reference but for rounding: an arm's
    the baseline's, and an arm's in a batch the same arm's alone."""
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
    whole = {size: tuple(item % count for item in range(size)) for size in batch_sizes if size > 1}
    alone: dict[Label, Answer] = {}
    merged: dict[Label, Answer] = {}
    full: dict[Label, dict[int, Answer]] = {}
    for label, arm in arms.items():
        try:
            singles = [(item,) for item in range(count)]
            alone[label] = _ask(arm, singles, at_once=1)
            merged[label] = _ask(arm, batches, at_once=len(batches))
            full[label] = {size: ask(arm, items) for size, items in whole.items()}
        except (AnswerError, ConnectionRefused) as exc:
            raise ParityError(f"arm {label} does not answer the parity images: {exc}") from exc
    mixed_items = [item for batch in batches for item in batch]
    sizes = "+".join(str(len(batch)) for batch in batches)
    first, *others = arms
    compared: list[tuple[str, Label, Literal["reference", "alone"], Answer, Answer]] = []
    for label in others:
        of = "" if len(others) == 1 else f"{label}: "
        compared.append((f"{of}each image alone", label, "reference", alone[first], alone[label]))
        compared.append((f"{of}mixed batches {sizes} at once", label, "reference", merged[first], merged[label]))
        for size in whole:
            compared.append((f"{of}one batch of {size}", label, "reference", full[first][size], full[label][size]))
    for label in arms:
        mixed = _rows(alone[label], mixed_items)
        compared.append((f"{label}: mixed batches {sizes} against alone", label, "alone", mixed, merged[label]))
        for size, items in whole.items():
            one = _rows(alone[label], items)
            compared.append((f"{label}: batch of {size} against alone", label, "alone", one, full[label][size]))
    return [compare_answers(*case, tolerance) for case in compared]


def _rows(answer: Answer, items: Sequence[int]) -> Answer:
    return {name: array[list(items)] for name, array in answer.items()}


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
    name: str,
    label: Label,
    kind: Literal["reference", "alone"],
    expected: Answer,
    actual: Answer,
    tolerance: Tolerance,
) -> ParityCase:
    """One case over all items of all outputs. Raises `ParityError` for other names, shapes or no finite numbers."""
    if expected.keys() != actual.keys():
        raise ParityError(f"{name}: outputs {sorted(actual)} instead of {sorted(expected)}")
    found = ParityCase(
        name=name,
        label=label,
        kind=kind,
        images=0,
        cosine_min=1.0,
        max_abs=0.0,
        ok=True,
        relative_max=0.0,
        element_max=0.0,
    )
    for output, reference in expected.items():
        answer = actual[output]
        if answer.shape != reference.shape:
            raise ParityError(f"{name}: {output} has shape {answer.shape} instead of {reference.shape}")
        if reference.size == 0:
            raise ParityError(f"{name}: {output} is empty (shape {reference.shape})")
        if not (_finite(reference) and _finite(answer)):
            raise ParityError(f"{name}: {output} holds NaN or infinite values")
        apart = difference(reference, answer)
        ok = bool(tolerance.holds(apart).all())
        found = msgspec.structs.replace(
            found,
            images=len(reference),
            cosine_min=min(found.cosine_min, float(apart.cosine.min())),
            max_abs=max(found.max_abs, float(apart.absolute.max())),
            relative_max=max(found.relative_max or 0.0, float(apart.relative.max())),
            element_max=max(found.element_max or 0.0, float(apart.element.max())),
            ok=found.ok and ok,
            output=found.output if ok or found.output else output,
        )
    return found


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def ask(arm: ParityTarget, items: Sequence[int]) -> Answer:
    """The answer to one request, on a connection of its own. Raises `AnswerError`, `ConnectionRefused`."""
    request = arm.target.sendable(prepare(arm.target.transport, arm.inputs, arm.signature, items))
    connection = arm.target.connection((request,), timeout_s=_TIMEOUT_S)
    try:
        answer = read_answer(connection, connection.send(request))
    finally:
        connection.close()
    for name, array in answer.items():
        if array.ndim == 0 or len(array) != len(items):
            raise AnswerError(f"output {name} has shape {array.shape} for {len(items)} images")
        if array.dtype.hasobject:
            raise AnswerError(f"output {name} holds texts, which cannot be compared as numbers")
    return answer


def _ask(arm: ParityTarget, batches: Sequence[tuple[int, ...]], *, at_once: int) -> Answer:
    """Every batch's answer, joined in order."""
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        answers = list(pool.map(lambda items: ask(arm, items), batches))
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
