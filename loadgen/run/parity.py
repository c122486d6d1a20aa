"""Whether both arms compute the same function, asked through the same door as the load: served answers compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from loadgen.clients.bodies import AnswerError
from loadgen.clients.endpoint import Signature
from loadgen.clients.exchange import ConnectionRefused
from loadgen.clients.inputs import Array, InputError, SampleInputs
from loadgen.clients.transports import Door, prepare, read_answer
from loadgen.records.run import Label, ParityCase, ParityRecord

THRESHOLD_COSINE = 0.999
_MIXED_SIZES = (2, 3, 1, 5, 1, 4, 7, 1, 8)
_TIMEOUT_S = 120.0

Answer = Mapping[str, Array]


class ParityError(Exception):
    """The arms' answers cannot be compared at all; the message says why."""


@dataclass(frozen=True, slots=True)
class Questioned:
    """One arm as parity asks it: through the door that the load takes, with the same pictures in its own payload."""

    door: Door
    signature: Signature
    inputs: SampleInputs


def check_parity(arms: Mapping[Label, Questioned], max_batch_size: int) -> ParityRecord:
    """Ask both arms the same images: alone, in mixed batches sent at once (so that dynamic batching merges them), and
    in one batch of `max_batch_size`. Every item must point the same way as its reference (cosine ≥ 0.999): b's as a's,
    and an arm's in a batch as the same arm's alone."""
    try:
        cases = _cases(arms, max_batch_size)
    except (ParityError, AnswerError, ConnectionRefused, InputError) as exc:
        return ParityRecord(threshold_cosine=THRESHOLD_COSINE, cases=(), ok=False, error=str(exc))
    return ParityRecord(
        threshold_cosine=THRESHOLD_COSINE, cases=tuple(cases), ok=all(case.ok for case in cases), error=None
    )


def _cases(arms: Mapping[Label, Questioned], max_batch_size: int) -> list[ParityCase]:
    count = min(arm.inputs.count for arm in arms.values())
    batches = mixed_batches(count, max_batch_size)
    largest = [tuple(item % count for item in range(max_batch_size))]
    alone: dict[Label, Answer] = {}
    merged: dict[Label, Answer] = {}
    full: dict[Label, Answer] = {}
    for label, arm in arms.items():
        try:
            singles = [(item,) for item in range(count)]
            alone[label] = _ask(arm, singles, at_once=1)
            merged[label] = _ask(arm, batches, at_once=len(batches))
            full[label] = _ask(arm, largest, at_once=1)
        except (AnswerError, ConnectionRefused) as exc:
            raise ParityError(f"arm {label} does not answer the parity images: {exc}") from exc
    mixed_items = [item for batch in batches for item in batch]
    sizes = "+".join(str(len(batch)) for batch in batches)
    cases = [compare_answers("each image alone", "reference", alone["a"], alone["b"])]
    cases.append(compare_answers(f"mixed batches {sizes} at once", "reference", merged["a"], merged["b"]))
    cases.append(compare_answers(f"one batch of {max_batch_size}", "reference", full["a"], full["b"]))
    for label in arms:
        expected = {name: array[mixed_items] for name, array in alone[label].items()}
        cases.append(compare_answers(f"{label}: mixed batches {sizes} against alone", "alone", expected, merged[label]))
        expected = {name: array[list(largest[0])] for name, array in alone[label].items()}
        name = f"{label}: batch of {max_batch_size} against alone"
        cases.append(compare_answers(name, "alone", expected, full[label]))
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


def compare_answers(name: str, kind: str, expected: Answer, actual: Answer) -> ParityCase:
    """One case over all items of all outputs. Raises `ParityError` for other names, shapes or no finite numbers."""
    if expected.keys() != actual.keys():
        raise ParityError(f"{name}: outputs {sorted(actual)} instead of {sorted(expected)}")
    cosine_min, max_abs, images = 1.0, 0.0, 0
    for output, reference in expected.items():
        answer = actual[output]
        if answer.shape != reference.shape:
            raise ParityError(f"{name}: {output} has shape {answer.shape} instead of {reference.shape}")
        if reference.size == 0:
            raise ParityError(f"{name}: {output} is empty (shape {reference.shape})")
        left = reference.reshape(len(reference), -1).astype(np.float64)
        right = answer.reshape(len(answer), -1).astype(np.float64)
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            raise ParityError(f"{name}: {output} holds NaN or infinite values")
        norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        both_zero = (np.abs(left).max(axis=1) == 0) & (np.abs(right).max(axis=1) == 0)
        cosines = np.where(both_zero, 1.0, (left * right).sum(axis=1) / np.where(norms > 0, norms, 1.0))
        cosine_min = min(cosine_min, float(cosines.min()))
        max_abs = max(max_abs, float(np.abs(left - right).max()))
        images = len(reference)
    return ParityCase(
        name=name,
        kind="reference" if kind == "reference" else "alone",
        images=images,
        cosine_min=cosine_min,
        max_abs=max_abs,
        ok=cosine_min >= THRESHOLD_COSINE,
    )


def _ask(arm: Questioned, batches: Sequence[tuple[int, ...]], *, at_once: int) -> Answer:
    """Every batch's answer, joined in order."""

    def ask(items: tuple[int, ...]) -> Answer:
        request = arm.door.sendable(prepare(arm.door.transport, arm.inputs, arm.signature, items))
        connection = arm.door.connection((request,), timeout_s=_TIMEOUT_S)
        try:
            answer = read_answer(connection, connection.send(request))
        finally:
            connection.close()
        for name, array in answer.items():
            if array.ndim == 0 or len(array) != len(items):
                raise AnswerError(f"output {name} has shape {array.shape} for {len(items)} images")
        return answer

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        answers = list(pool.map(ask, batches))
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
