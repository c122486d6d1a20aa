"""Compares answers: those of the arms before the load, and after it those given under load with those given alone.

**Parity**: all arms answer the same inputs, or their speed is not compared.

**Under load**: the generator keeps a random sample of each block's answers (`KeptAnswers`). After the
load, before the servers are restarted, each kept item is sent alone to the baseline. An arm with another payload is its
own reference, since varied values are not the same picture in two payloads. Nothing is sent between blocks.

In a replay with `check_answers` the recorded answers take the baseline's place, where there are any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from math import isfinite
from time import monotonic
from typing import Literal

import msgspec

from loadgen.client.bodies import Variation, choose_items, find_variation
from loadgen.client.connection import ConnectionRefused
from loadgen.client.endpoint import Signature
from loadgen.client.inputs import InputError, SampleInputs
from loadgen.client.messages import BlockOutcome, KeptAnswer, Open
from loadgen.client.outputs import AnswerError
from loadgen.client.recorded import items_of, recorded_outputs, recorded_request
from loadgen.client.traffic import unpacked
from loadgen.client.transports import InferenceTarget, Request, prepare, read_answer
from loadgen.experiment.plan import FULL
from loadgen.experiment.replay import Replay, has_answer
from loadgen.measure.arms import Arm
from loadgen.measure.preparation import Inputs
from loadgen.records.probes import AnswersCompared
from loadgen.records.run import REQUEST_TIMEOUT_S, Label, ParityCase, ParityRecord, Workload
from loadgen.records.store import RunStore
from loadgen.records.traffic import TrafficError
from loadgen.stats.agreement import (
    NOT_FINITE,
    Agreement,
    Array,
    Tolerance,
    agree,
    all_alike,
    root_mean_square,
    tolerances_for,
    trimmed,
    worst_of,
)

PARITY_SECONDS = 20.0
"""A slow model is sent as many inputs alone as the baseline answers in this time, but at least `LEAST_PARITY_ITEMS`; in
a screening every model gets these few."""
LEAST_PARITY_ITEMS = 8
ANSWERS_OF_A_TRIAL = 4
"""Few, because a search has dozens of trials."""
RECORDED_PER_SHAPE = 3
"""Recorded requests of each shape in the parity check."""
_MIXED_SIZES = (2, 3, 1, 5, 1, 4, 7, 1, 8)
_FEW_MIXED = 4
"""Of these in a screening."""
_LEAST_TIMEOUT_S = 120.0
"""More than a request of the load has by default: the first answers come from a server that has just started."""

Answer = Mapping[str, Array]
"""The outputs for one item, or for several; the first dimension is the item."""
Rules = Mapping[str, Tolerance]
"""How each output is compared."""


class ParityError(AnswerError):
    """An arm does not answer the inputs of the parity check as its metadata says, or at all, or refuses
    `refused_items` of them in one request."""

    def __init__(self, message: str, arm: Label, refused_items: int | None = None, *, answered: bool = True) -> None:
        super().__init__(message, answered=answered)
        self.arm, self.refused_items = arm, refused_items


@dataclass(frozen=True, slots=True)
class ParityTarget:
    """One arm in the parity check: asked over the transport of the load, with the same inputs in its payload."""

    target: InferenceTarget
    signature: Signature
    inputs: SampleInputs
    request_timeout_s: float = REQUEST_TIMEOUT_S
    name: str = ""

    def rules(self, tolerance: Tolerance) -> Rules:
        """How its outputs are compared, by their kinds and datatypes."""
        datatypes = {output.name: output.datatype for output in self.signature.outputs}
        return tolerances_for(datatypes, self.inputs.kinds, tolerance)


def check_parity(
    arms: Mapping[Label, ParityTarget],
    batch_sizes: Collection[int],
    tolerance: Tolerance,
    lengths: Collection[int] = (),
    *,
    few: bool = False,
    replay: Replay | None = None,
    check_answers: bool = False,
) -> ParityRecord:
    """Send every arm, the baseline first, the same inputs: alone, in mixed batches sent at once (so that dynamic
    batching merges them), and in one batch of each size, of each of these lengths if there are any. Each arm's answers
    must equal the baseline's but for rounding, and an arm's answers in a batch must equal its answers alone. Of a
    `replay` they get recorded requests of every shape, too; with `check_answers` their answers must equal the recorded
    ones as well."""
    rules = next(iter(arms.values())).rules(tolerance)
    limits = [rule for rule in rules.values() if rule.kind != "labels"]
    limit = max(limits or [tolerance], key=lambda rule: rule.relative)
    record = ParityRecord(
        cases=(),
        ok=False,
        precision=tolerance.precision,
        tolerance_relative=limit.relative,
        tolerance_element=limit.element,
        kinds={name: rule.kind for name, rule in rules.items()},
    )
    try:
        alone = _alone(arms, lengths, few=few)
        label, first = next(iter(arms.items()))
        sent = batches_to_send(first.inputs, batch_sizes, lengths, alone[label], _FEW_MIXED if few else None)
        cases = _cases(arms, alone, sent, rules)
        cases += _recorded_cases(arms, replay, rules, check_answers=check_answers) if replay is not None else []
    except (AnswerError, ConnectionRefused, InputError, TrafficError) as exc:
        arm, items = (exc.arm, exc.refused_items) if isinstance(exc, ParityError) else (None, None)
        answered = not isinstance(exc, AnswerError) or exc.answered
        return msgspec.structs.replace(record, error=str(exc), failed_arm=arm, refused_items=items, answered=answered)
    alike = {
        label: tuple(name for name in rules if all_alike([answer[name] for answer in answers.values()]))
        for label, answers in alone.items()
        if any(array.size for answer in answers.values() for array in answer.values())  # a detector may find nothing
    }
    several = min(map(len, alone.values())) > 1
    return msgspec.structs.replace(
        record, cases=tuple(cases), ok=all(case.ok for case in cases), alike=alike if several else None
    )


def _alone(
    arms: Mapping[Label, ParityTarget], lengths: Collection[int], *, few: bool
) -> dict[Label, dict[int, Answer]]:
    """Each arm's answer to each input, by the input's number. A slow baseline limits the inputs, but not to fewer than
    one of each length; `few` does."""
    count = min(arm.inputs.count for arm in arms.values())
    (baseline, first), *others = arms.items()
    each: Sequence[int | None] = sorted(lengths) or [None]
    groups = list(chain.from_iterable(map(first.inputs.groups, each)))
    items_to_send = [item for items in zip_longest(*groups) for item in items if item is not None and item < count]
    answers: dict[int, Answer] = {}
    ends_s = monotonic() + PARITY_SECONDS
    for item in items_to_send[: LEAST_PARITY_ITEMS if few else None]:
        if len(answers) >= max(LEAST_PARITY_ITEMS, len(groups)) and monotonic() > ends_s:
            break
        [answers[item]] = _ask_all(baseline, first, [(item,)], at_once=1)
    return {baseline: answers} | {
        label: dict(zip(answers, _ask_all(label, arm, [(item,) for item in answers], at_once=1), strict=True))
        for label, arm in others
    }


def _cases(
    arms: Mapping[Label, ParityTarget],
    alone: Mapping[Label, Mapping[int, Answer]],
    sent: Mapping[str, Sequence[tuple[int, ...]]],
    rules: Rules,
) -> list[ParityCase]:
    batched = {
        label: {name: _ask_all(label, arm, together, at_once=len(together)) for name, together in sent.items()}
        for label, arm in arms.items()
    }
    first, *others = arms
    sent_count, count = len(alone[first]), arms[first].inputs.count
    title_alone = "each input alone" if sent_count == count else f"each of {sent_count} of {count} inputs alone"
    cases = []
    for label in others:
        of = "" if len(others) == 1 else f"{label}: "
        compare = partial(compare_answers, label=label, kind="reference", rules=rules)
        cases.append(compare(of + title_alone, [*alone[first].values()], [*alone[label].values()]))
        cases += [compare(of + name, expected, batched[label][name]) for name, expected in batched[first].items()]
    for label in arms:
        for name, together in sent.items():
            expected = [alone[label][item] for item in chain.from_iterable(together)]
            title = f"{label}: {name} against alone"
            cases.append(compare_answers(title, expected, batched[label][name], label=label, kind="alone", rules=rules))
    return cases


def _recorded_cases(
    arms: Mapping[Label, ParityTarget], replay: Replay, rules: Rules, *, check_answers: bool
) -> list[ParityCase]:
    cases = []
    for shape, numbers in replay.of_every_shape(RECORDED_PER_SHAPE).items():
        answers: dict[Label, list[Answer]] = {}
        for label, arm in arms.items():
            answers[label] = []
            for number in numbers:
                try:
                    answers[label].append(_ask_recorded(arm, replay, number))
                except (AnswerError, ConnectionRefused) as exc:
                    items = items_of(replay.requests()[number], arm.signature) if _is_refusal(exc) else None
                    does = "does not answer" if items is None else "refuses"
                    raise ParityError(
                        f"{arm.name or label} {does} a recorded request ({shape}): {exc}", label, items,
                        answered=_has_answered(exc),
                    ) from exc  # fmt: skip
        first, *others = arms
        for label in others:
            of = "" if len(others) == 1 else f"{label}: "
            cases.append(
                compare_answers(
                    f"{of}recorded requests, {shape}", answers[first], answers[label], label=label, kind="reference",
                    rules=rules,
                )
            )  # fmt: skip
        for label, arm in arms.items() if check_answers else ():
            pairs = [
                (expected, answer)
                for number, answer in zip(numbers, answers[label], strict=True)
                if (expected := _recorded_answer(arm, replay, number)) is not None
            ]
            if pairs:
                name = f"{label}: recorded answers, {shape}"
                cases.append(
                    compare_answers(name, *zip(*pairs, strict=True), label=label, kind="recorded", rules=rules)
                )
    return cases


def batches_to_send(
    inputs: SampleInputs,
    batch_sizes: Collection[int],
    lengths: Collection[int],
    items: Collection[int],
    most_mixed: int | None = None,
) -> dict[str, list[tuple[int, ...]]]:
    """The batches of these items for each case, by its name; those of one case are sent at once."""

    def groups(length: int | None = None) -> list[list[int]]:
        chosen = ([item for item in group if item in items] for group in inputs.groups(length))
        return [group for group in chosen if group]

    sizes = sorted(set(batch_sizes))
    mixed = mixed_batches(groups(), sizes[-1])[:most_mixed]
    sent = {f"mixed batches of {', '.join(str(len(batch)) for batch in mixed)} at once": mixed}
    each: Sequence[int | None] = sorted(lengths) or [None]
    for length in each:
        group = max(groups(length), key=len)
        of_length = "" if length is None else f", length {length}"
        for size in sizes:
            if size > 1:
                sent[f"one batch of {size}{of_length}"] = [tuple(group[item % len(group)] for item in range(size))]
    return sent


def mixed_batches(groups: Sequence[Sequence[int]], max_batch_size: int) -> list[tuple[int, ...]]:
    """Batches of different sizes, each of items that may share one, with different items in each as far as they
    last."""
    batches = []
    following = [0] * len(groups)
    for place, planned_size in enumerate(_MIXED_SIZES):
        chosen = place % len(groups)
        group = groups[chosen]
        size = min(planned_size, max_batch_size, len(group))
        batches.append(tuple(group[(following[chosen] + offset) % len(group)] for offset in range(size)))
        following[chosen] += size
    return batches


def compare_answers(
    name: str,
    expected: Sequence[Answer],
    actual: Sequence[Answer],
    *,
    label: Label,
    kind: Literal["reference", "alone", "recorded"],
    rules: Rules,
) -> ParityCase:
    """One case: the answers to the same items, one by one. Raises `ParityError` when names or shapes differ, or a
    value is not finite."""
    by_output: dict[str, list[Agreement]] = {}
    for output, typical in _typical(expected).items():
        for reference, other in zip(expected, actual, strict=True):
            agreement = _agreement(reference, other, output, rules, typical, cut=kind == "alone")
            if isinstance(agreement, str):
                raise ParityError(f"{name}: {agreement}", label)
            if agreement.fault == NOT_FINITE:
                raise ParityError(f"{name}: {output} {NOT_FINITE}", label)
            by_output.setdefault(output, []).append(agreement)
    outputs = {output: worst_of(agreements) for output, agreements in by_output.items()}
    whole = worst_of(list(outputs.values()))
    wrong = next((output for output, agreement in outputs.items() if agreement.fault), None)
    return ParityCase(
        name=name,
        label=label,
        kind=kind,
        images=len(expected),
        cosine_min=whole.cosine,
        max_abs=whole.absolute,
        relative_max=whole.relative,
        element_max=whole.element,
        top1=whole.top1,
        top5=whole.top5,
        ok=wrong is None,
        output=wrong,
        fault=whole.fault,
    )


def _agreement(
    expected: Answer, actual: Answer, output: str, rules: Rules, typical: float, *, cut: bool
) -> Agreement | str:
    """How far one output of one item agrees, or why it cannot be compared. `cut`: other items of its batch may have
    made it longer."""
    if expected.keys() != actual.keys():
        return f"outputs {sorted(actual)} instead of {sorted(expected)}"
    reference, answer = expected[output], actual[output]
    answer = trimmed(answer, reference) if cut else answer
    if {answer.shape, reference.shape} == {(1,), (1, 1)}:
        answer = answer.reshape(reference.shape)  # Triton answers one value per item as a list of one
    if answer.shape != reference.shape:
        return f"{output} has shape {answer.shape[1:]} instead of {reference.shape[1:]}"
    return agree(reference, answer, rules[output], typical)


def _typical(answers: Sequence[Answer]) -> dict[str, float]:
    """The root mean square of each output."""
    return {name: root_mean_square([answer[name] for answer in answers if name in answer]) for name in answers[0]}


def ask(arm: ParityTarget, items: Sequence[int]) -> Answer:
    """The answer to one request, on its own connection. Raises `AnswerError`, `ConnectionRefused`."""
    answer = ask_prepared(arm, prepare(arm.target.transport, arm.inputs, arm.signature, items))
    expected = sorted(output.name for output in arm.signature.outputs)
    if sorted(answer) != expected:
        raise AnswerError(f"outputs {sorted(answer)} instead of {expected}, those of the model's metadata")
    for name, array in answer.items():
        if array.ndim == 0 or len(array) != len(items):
            raise AnswerError(f"output {name} has shape {array.shape} for a batch of {len(items)}")
    return answer


def ask_prepared(arm: ParityTarget, prepared: Request, *, binary: bool = True) -> Answer:
    """The answer to a prepared request for `binary` outputs or any, on its own connection. Raises `AnswerError`,
    `ConnectionRefused`."""
    request = arm.target.sendable(prepared)
    connection = arm.target.connection((request,), timeout_s=max(arm.request_timeout_s, _LEAST_TIMEOUT_S))
    try:
        return read_answer(connection, connection.send(request), batched=arm.signature.batched, binary=binary)
    finally:
        connection.close()


def _ask_recorded(arm: ParityTarget, replay: Replay, number: int) -> Answer:
    """The answer to one recorded request. Raises as `ask_prepared`, and `TrafficError`."""
    request = replay.requests()[number]
    return ask_prepared(arm, recorded_request(request, replay.content(request), arm.signature), binary=False)


def _recorded_answer(arm: ParityTarget, replay: Replay, number: int) -> Answer | None:
    """What was recorded as the answer to a request, if it is kept. Raises `AnswerError`, `TrafficError`."""
    request = replay.requests()[number]
    answer = replay.answer(request)
    return None if answer is None else recorded_outputs(request, answer, batched=arm.signature.batched)


def _is_refusal(exc: AnswerError | ConnectionRefused) -> bool:
    """Whether the arm was asked and said no, rather than nothing or something else."""
    return isinstance(exc, ConnectionRefused) or exc.status > 0


def _has_answered(exc: AnswerError | ConnectionRefused) -> bool:
    return isinstance(exc, AnswerError) and exc.answered


def _ask_all(label: Label, arm: ParityTarget, batches: Sequence[tuple[int, ...]], *, at_once: int) -> list[Answer]:
    """The answer to each item of each batch. Raises `ParityError`."""
    try:
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            answers = list(pool.map(lambda items: ask(arm, items), batches))
    except (AnswerError, ConnectionRefused) as exc:
        why = f"{arm.name or label} does not answer the inputs of the parity check: {exc}"
        refused_items = max(map(len, batches)) if _is_refusal(exc) else None
        raise ParityError(why, label, refused_items, answered=_has_answered(exc)) from exc
    return [
        {name: array[place : place + 1] for name, array in answer.items()}
        for items, answer in zip(batches, answers, strict=True)
        for place in range(len(items))
    ]


@dataclass(frozen=True, slots=True)
class _AnswerSample:
    """One answer that the generator kept, and the load that it was part of."""

    workload: Workload
    label: Label
    block: str
    replay: Replay | None
    """The recorded requests of which it answers one."""
    answer: KeptAnswer


@dataclass(slots=True)
class AnswersUnderLoad:
    """The kept answers of one start of the servers, and the comparisons of the whole run."""

    store: RunStore
    seed: int
    tolerance: Tolerance
    samples: list[_AnswerSample] = field(default_factory=list)
    compared: list[AnswersCompared] = field(default_factory=list)
    kept: Counter[tuple[str, Label]] = field(default_factory=Counter)
    """How many answers of this start are kept, by workload and arm."""
    least: int = FULL.answers
    """Answers kept per workload and arm."""

    def begin(self) -> None:
        """Store an empty record, so that a run that ends before the comparison shows that it is missing. Raises
        `StorageError`."""
        self.store.write_all(AnswersCompared, self.compared)

    def keeping(self, command: Open, workload: Workload, label: Label, number: int) -> Open:
        """The command with a number of answers to keep; `number` is the block's. Once the arm has `least` in this
        workload, each further block keeps one."""
        planned = workload.has_blocks
        count = -(-self.least // max(1, workload.rounds)) if planned else ANSWERS_OF_A_TRIAL
        if self.kept[workload.name, label] >= self.least:
            count = 1
        return msgspec.structs.replace(command, keep_answers=count, keep_seed=self.seed * 1_000_003 + number)

    def take(self, workload: Workload, label: Label, block: str, command: Open, outcome: BlockOutcome) -> None:
        """Take over the answers that the block of a command has kept; `block` is its name for messages."""
        self.kept[workload.name, label] += len(outcome.answers)
        self.samples += [_AnswerSample(workload, label, block, command.replay, answer) for answer in outcome.answers]

    def compare(
        self, arms: Mapping[Label, Arm], signatures: Mapping[Label, Signature], inputs: Inputs, restart: int
    ) -> None:
        """Compare all kept answers, while nothing is under load. Raises `StorageError`."""
        first = next(iter(arms))  # the baseline
        for label, arm in arms.items():
            reference = first if arms[first].payload == arm.payload else label
            of_arm = [sample for sample in self.samples if sample.label == label]
            target = ParityTarget(
                arms[reference].target, signatures[reference], inputs[arm.payload], arm.request_timeout_s
            )
            error: str | None = None
            expected: list[list[Answer]] = []
            try:
                variation = find_variation(target.inputs, target.signature)
                expected = [_ask_alone(target, variation, self.seed, sample) for sample in of_arm]
            except (AnswerError, ConnectionRefused, InputError, TrafficError) as exc:
                error = f"{arms[reference].name} does not answer the inputs of the load again: {exc}"
            alone = list(chain.from_iterable(expected))
            typical = _typical(alone) if alone else {}
            rules = target.rules(self.tolerance)
            for workload in dict.fromkeys(sample.workload.name for sample in of_arm):
                record = AnswersCompared(
                    workload=workload, label=label, restart=restart, answers=0, items=0, wrong=0, relative_max=None,
                    tolerance_relative=self.tolerance.relative, error=error,
                )  # fmt: skip
                if error is None:
                    pairs = [pair for pair in zip(of_arm, expected, strict=True) if pair[0].workload.name == workload]
                    record = _compared(record, pairs, rules, typical)
                self.compared.append(record)
        self.samples = []
        self.kept.clear()
        self.store.write_all(AnswersCompared, self.compared)


def _compared(
    record: AnswersCompared,
    pairs: Sequence[tuple[_AnswerSample, list[Answer]]],
    rules: Rules,
    typical: Mapping[str, float],
) -> AnswersCompared:
    faults: list[str] = []
    all_agreements: list[Agreement] = []
    for sample, expected in pairs:
        agreements, fault = _judged(sample, expected, rules, typical)
        all_agreements += agreements
        if fault is not None:
            faults.append(
                f"{sample.block}, request {sample.answer.request + 1:,} of user {sample.answer.user}: {fault}"
            )
    whole = worst_of(all_agreements)
    return msgspec.structs.replace(
        record,
        answers=len(pairs),
        recorded=sum(_is_checked(sample) for sample, _ in pairs),
        items=sum(len(sample.answer.rows) for sample, _ in pairs),
        wrong=len(faults),
        relative_max=whole.relative if all_agreements and isfinite(whole.relative) else None,
        top1=whole.top1,
        top5=whole.top5,
        fault=faults[0] if faults else None,
    )


def _judged(
    sample: _AnswerSample, expected: Sequence[Answer], rules: Rules, typical: Mapping[str, float]
) -> tuple[list[Agreement], str | None]:
    """How far each output of each kept item agrees, and what is wrong with the answer."""
    answer = sample.answer
    if answer.error is not None:
        return [], answer.error
    outputs = {tensor.name: unpacked(tensor) for tensor in answer.outputs}
    agreements: list[Agreement] = []
    fault: str | None = None
    for place, (row, alone) in enumerate(zip(answer.rows, expected, strict=True)):
        item = {name: array[place : place + 1] for name, array in outputs.items()}
        for name in alone:
            agreement = _agreement(alone, item, name, rules, typical[name], cut=sample.workload.batch_size > 1)
            if isinstance(agreement, str):
                return agreements, f"item {row + 1}: {agreement}"
            agreements.append(agreement)
            if fault is None and agreement.fault is not None:
                fault = f"output {name} of item {row + 1} {agreement.fault}"
    return agreements, fault


def _is_checked(sample: _AnswerSample) -> bool:
    """Whether an answer is compared with a recorded one."""
    replay = sample.replay if sample.workload.check_answers else None
    return replay is not None and has_answer(replay.requests()[sample.answer.first])


def _ask_alone(reference: ParityTarget, variation: Variation | None, seed: int, sample: _AnswerSample) -> list[Answer]:
    inputs, answer = reference.inputs, sample.answer
    workload = sample.workload
    if sample.replay is not None:
        checked = _is_checked(sample)
        whole = (_recorded_answer if checked else _ask_recorded)(reference, sample.replay, answer.first)
        assert whole is not None
        return [{name: array[row : row + 1] for name, array in whole.items()} for row in answer.rows]
    items = choose_items(inputs, workload.batch_size, seed, length=workload.sequence_length)[answer.body]
    alone = []
    for row in answer.rows:
        if variation is None:
            alone.append(ask(reference, (items[row],)))
        else:
            varied = variation.varied(inputs, items[row], answer.first + row)
            alone.append(ask(replace(reference, inputs=varied), (0,)))
    return alone
