"""What a run sends to its arms: the tensors of samples, or the prompts of a language model. A run asks it for all that
depends on which of them it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from secrets import token_hex
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

import msgspec

from loadgen.base.child_process import ProcessError
from loadgen.base.quantities import counted, join
from loadgen.client.bodies import DIGITS, find_variation
from loadgen.client.connection import failure_message
from loadgen.client.endpoint import EndpointError, Signature
from loadgen.client.inputs import InputError
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.transports import Request, prepare
from loadgen.experiment.language import fitted, protocol_in_words, with_rates
from loadgen.experiment.plan import SCREENING, expects_gpu, sized
from loadgen.experiment.prompts import PromptPlan, PromptShape
from loadgen.launch.deployment import Deployment, DeploymentError, RemoteDeployment
from loadgen.measure.answers import AnswersUnderLoad, ParityTarget, check_parity
from loadgen.measure.arms import Arm, replay_of
from loadgen.measure.errors import RunError
from loadgen.measure.language import describe_prompts, model_info, probe_prompts, prompt_plan
from loadgen.measure.preparation import (
    READY_SECONDS,
    describe_inputs,
    export_artefacts,
    make_inputs,
    prepare_inputs,
    with_generated_inputs,
)
from loadgen.measure.token_answers import ProbePrompts, TokenAnswers, agreement, equal_answers
from loadgen.records.names import names_of
from loadgen.records.run import ArmRecord, Experiment, Label, ParityRecord
from loadgen.records.targets import Kind
from loadgen.stats.agreement import Tolerance

if TYPE_CHECKING:
    from loadgen.measure.context import RunContext

T = TypeVar("T")
PROMPT_TOKENS = 512
"""The longest prompt that is sent again: long enough to show a cache, and not so long that sixty of them take minutes
on a CPU."""
CACHES_SECONDS = 5.0
"""Of looking for a cache of prompts on one arm, for planning."""
REFERENCE_START_S, REFERENCE_SHARE = 16.0, 0.2
"""Of the reference, for planning: its start, and its time per answer as a share of the server's."""


class SentTensors:
    """A run of tensors. `context` gets the inputs and the signatures."""

    speaks_all = False
    """Whether a server speaks all of its protocols at once."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    @staticmethod
    def checked(experiment: Experiment, baseline: Deployment, place: Path) -> Experiment:
        """Make what would be sent, before a run. Returns the experiment with the inputs that must be generated for the
        baseline's model. Raises `EndpointError`, `InputError`."""
        started = any(arm.embedded and not arm.own_repository for arm in experiment.arms)
        name = experiment.model_of(experiment.baseline) or experiment.model
        if not started and isinstance(baseline, RemoteDeployment):
            experiment = with_generated_inputs(experiment, place, baseline.signature(name))
        # Otherwise the inputs come from `abserve samples` with its defaults, which fit a model that is served.
        if not started or experiment.inputs or experiment.sequence_length or experiment.pad_to:
            _, inputs = prepare_inputs(experiment, place)
            if inputs is None and experiment.inputs and isinstance(baseline, RemoteDeployment):
                make_inputs(experiment, place.with_name("made"), baseline.signature(name))
        return experiment

    def prepare(self) -> None:
        """Make what is sent, as far as no server must be asked for it. Raises `InputError`."""
        context = self.context
        context.experiment, inputs = prepare_inputs(context.experiment, context.samples_folder, context.abserve)
        context.inputs = inputs or {}

    def announce(self) -> None:
        """Make what the servers need."""
        context, experiment = self.context, self.context.experiment
        if experiment.deployment == "embedded" and any(arm.embedded for arm in experiment.arms):
            context.enter("exporting the model")
            exported = set() if context.prepared is None else context.prepared.exported
            export_artefacts(experiment, context.store, context.progress.now, context.abserve, exported)

    def connect(self) -> None:
        """Ask the servers, which have been started, what they take. Raises `RunError`."""
        self.context.signatures = _signatures(self.context)

    def describe(self) -> dict[str, str | int]:
        """A description of what is sent; empty while it is not known. Raises `InputError`."""
        context, experiment = self.context, self.context.experiment
        if context.signatures and not context.inputs:
            signature = context.signatures[experiment.baseline.label]
            context.inputs = make_inputs(experiment, context.samples_folder, signature)
        return describe_inputs(context.inputs, experiment.seed) if context.inputs else {}

    def compare_answers(self, tolerance: Tolerance) -> None:
        """Compare the arms' answers at this start of theirs. Raises `RunError`."""
        context = self.context
        require_parity(context, tolerance)
        if context.restart == 0:
            least = context.care.answers
            context.answers = AnswersUnderLoad(context.store, context.experiment.seed, tolerance, least=least)

    def prepare_bodies(self, arm: Arm, batch_sizes: Collection[int]) -> None:
        """Have the load generator make what is sent to an arm. Raises `GeneratorError`."""
        context, label = self.context, arm.request.label
        is_varied = arm is not context.arms[label]
        signature = arm.endpoint.signature(arm.model) if is_varied else context.signatures[label]
        context.generator.prepare(arm.bodies(context.samples_folder, signature, batch_sizes, context.experiment))

    def checks_s(self, answers_s: float) -> float:
        """Seconds of the checks after the load, by those that the servers need for their answers."""
        return answers_s

    def sized(
        self,
        took: Mapping[str, float],
        by_arm: Mapping[str, Mapping[Label, float]],  # noqa: ARG002 (of prompts the workloads must fit the time)
        warm_up_s: float,  # noqa: ARG002
    ) -> Experiment:
        """The experiment with blocks as long as its arms need, by the seconds that a request `took`; of a language
        model with as many rounds as the time that was asked for allows."""
        workloads = sized(self.context.experiment.workloads, took, self.context.care.span)
        return msgspec.structs.replace(self.context.experiment, workloads=workloads)

    def first_request(self, label: Label) -> Callable[[Arm], int]:
        """Sends one request to an arm that has just started, and returns when its answer began to be of use. Raises
        `AnswerError`, `ConnectionRefused`."""
        context, arm = self.context, self.context.arms[label]
        request = prepare(arm.transport, context.inputs[arm.payload], context.signatures[label], [0])
        return partial(_first_answer, first=request)

    @contextmanager
    def timed(self, arm: Arm, count: int) -> Iterator[Callable[[int], int]]:
        """Sends one of `count` different requests, by its number, and returns how many ns its answer took. They have
        one item and go over HTTP, whatever the transport of the load: a cache serves all of them. Raises `AnswerError`,
        `ConnectionRefused`, `InputError`."""
        inputs, signature = self.context.inputs[arm.payload], self.context.signatures[arm.request.label]
        variation = find_variation(inputs, signature)
        if variation is None or variation.capacity < count:
            raise InputError(f"the inputs of {signature.model} are too small to make new ones")
        target, items = replace(arm.target, transport="http"), min(inputs.count, count)
        requests = [target.sendable(prepare("http", inputs, signature, (item,), variation)) for item in range(items)]
        first = SystemRandom().getrandbits(8 * DIGITS)
        connection = target.connection((), timeout_s=arm.request_timeout_s)

        def ask(number: int) -> int:
            item = number % items
            patch = variation.patch(item, first + number)
            start_ns = perf_counter_ns()
            exchange = connection.send(requests[item], (patch,))
            took_ns = perf_counter_ns() - start_ns
            if not exchange.good:
                raise InputError(failure_message(exchange))
            return took_ns

        try:
            connection.connect()
            yield ask
        finally:
            connection.close()


class SentPrompts(SentTensors):
    """A run of a language model: answers are judged by a reference, and no server says what prompts it takes."""

    speaks_all = True
    plan: PromptPlan

    @staticmethod
    def checked(experiment: Experiment, baseline: Deployment, place: Path) -> Experiment:  # noqa: ARG004 (of tensors)
        prompt_plan(experiment, model_info(experiment))
        return experiment

    def prepare(self) -> None:
        self.plan = prompt_plan(self.context.experiment, model_info(self.context.experiment, self.context.abserve))

    def announce(self) -> None:
        self.context.progress.rule_decided(protocol_in_words(self.context.experiment))

    def connect(self) -> None:
        pass

    def describe(self) -> dict[str, str | int]:
        return describe_prompts(self.plan, self.context.experiment.workloads)

    def compare_answers(self, tolerance: Tolerance) -> None:
        """Ask every arm a few prompts, and keep the answers for the reference. Raises `RunError`."""
        context = self.context
        context.progress.now("sending a few prompts to every server")
        if context.restart == 0:
            least = SCREENING.answers if context.experiment.preset == "smoke" else context.care.answers
            context.answers = TokenAnswers(context.store, context.experiment.seed, tolerance, least=least)
        answers = context.answers
        assert isinstance(answers, TokenAnswers)
        answers.restart = context.restart
        prompts, probed = ProbePrompts.of(self.plan, is_short=context.care.few_inputs), []
        for label, arm in tuple(context.arms.items()):
            told = unless_left_out(context, label, partial(prompts.ask, label, arm, context.restart))
            if told is not None:
                probed += told[0]
                answers.beginnings += told[1]
        answers.prompted += probed
        context.progress.now(equal_answers(probed, {label: arm.name for label, arm in context.arms.items()}))
        for (_, label, _), (firsts, equal) in agreement(answers.beginnings, context.experiment).items():
            if firsts and not equal:
                context.progress.now(
                    f"none of {firsts} answers of {context.arms[label].name} begins as the baseline's: another model?"
                )

    def prepare_bodies(self, arm: Arm, batch_sizes: Collection[int]) -> None:  # noqa: ARG002 (prompts have no batch)
        self.context.generator.prepare(arm.prompts(self.plan, self.context.experiment))

    def checks_s(self, answers_s: float) -> float:
        """The reference starts, and reads an answer much faster than a server writes it."""
        return REFERENCE_START_S + REFERENCE_SHARE * answers_s

    def sized(
        self, took: Mapping[str, float], by_arm: Mapping[str, Mapping[Label, float]], warm_up_s: float
    ) -> Experiment:
        context, experiment = self.context, self.context.experiment
        workloads, seconds = with_rates(experiment.workloads, took), None
        if experiment.minutes is not None:
            again_s = (experiment.restarts - 1) * (context.forecast.start_s + warm_up_s)
            caches_s = CACHES_SECONDS * len(experiment.arms)
            seconds = experiment.restarts * (context.load_deadline() - monotonic()) - again_s - caches_s
        workloads, left_out = fitted(
            workloads, by_arm, seconds, restarts=experiment.restarts, gpu=expects_gpu(*experiment.arms)
        )
        if left_out:
            minutes = counted(round(experiment.minutes or 0.0, 1), "minute")
            context.progress.rule_decided(f"{minutes} would not last for everything; left out: {join(left_out)}")
        return msgspec.structs.replace(experiment, workloads=workloads, left_out=left_out)

    def first_request(self, label: Label) -> Callable[[Arm], int]:  # noqa: ARG002 (any arm takes the same prompts)
        return partial(_first_token, plan=self.plan)

    @contextmanager
    def timed(self, arm: Arm, count: int) -> Iterator[Callable[[int], int]]:
        """Sends one of `count` different prompts, by its number, and returns the time until its first token."""
        longest = min(PROMPT_TOKENS, max(shape.prompt_tokens for shape in self.plan.shapes))
        prompts, limit_s = probe_prompts(self.plan, PromptShape(longest, 2), count), arm.request_timeout_s

        def ask(number: int) -> int:
            answer = ask_tokens(arm.target, self.plan, prompts[number], 2, timeout_s=limit_s, salt=token_hex(8))
            return answer.chunks[0].at_ns - answer.sent_ns

        yield ask


SENT: Mapping[Kind, type[SentTensors]] = {Kind.TENSORS: SentTensors, Kind.TOKENS: SentPrompts}


def unless_left_out(context: RunContext, label: Label, step: Callable[[], T]) -> T | None:
    """What a step before the load returns for an arm. In a screening an arm that fails is left out, and the result is
    None; without one that is left beside the baseline, and elsewhere, the failure is raised."""
    try:
        return step()
    except (DeploymentError, EndpointError, ProcessError, RunError) as exc:
        if not context.care.leaves_out or label == context.experiment.baseline.label:
            raise
        _leave_out(context, label, str(exc))
        return None


def _leave_out(context: RunContext, label: Label, why: str) -> None:
    """Go on without an arm. Raises `RunError` if it was the last one beside the baseline."""
    context.arms.pop(label).deployment.stop()
    context.records = [record for record in context.records if record.label != label]
    context.signatures = {name: signature for name, signature in context.signatures.items() if name != label}
    why = context.store.without_secrets(why)
    experiment = context.experiment
    context.experiment = msgspec.structs.replace(
        experiment,
        arms=tuple(arm for arm in experiment.arms if arm.label != label),
        failed_arms={**experiment.failed_arms, label: why},
    )
    if len(context.arms) < 2:
        context.store.write(msgspec.structs.replace(experiment, failed_arms=context.experiment.failed_arms))
        names = names_of(experiment.arms, context.records)
        raise RunError(f"no arm is left to compare with {names[experiment.baseline.label]}: {names[label]}: {why}")
    context.store.write(context.experiment)
    if context.records:
        context.store.write_all(ArmRecord, context.records)
    context.progress.arm_left_out(label, why)


def _signatures(context: RunContext) -> dict[Label, Signature]:
    """The inputs and outputs of each arm. Raises `RunError` when they differ; the inputs may, where the arms
    get different payloads."""
    inputs_alike = len(context.experiment.payloads) == 1
    signatures = {label: arm.endpoint.signature(arm.model) for label, arm in context.arms.items()}
    interfaces = {}
    for label, signature in signatures.items():
        inputs = ", ".join(sorted(f"{tensor.name} ({tensor.datatype})" for tensor in signature.inputs))
        outputs = ", ".join(sorted(tensor.name for tensor in signature.outputs))
        interfaces[label] = f"{inputs if inputs_alike else '…'} → {outputs}"
    (first, expected), *others = interfaces.items()
    if context.care.leaves_out:
        for label, interface in others:
            if interface != expected:
                _leave_out(context, label, f"it has {interface}, and {first} has {expected}")
        others = [(label, interface) for label, interface in others if label in context.arms]
    different = [f"{label} has {interface}" for label, interface in others if interface != expected]
    if different:
        message = (
            f"the arms do not serve the same model: {first} has {expected}, {', '.join(different)}; "
            "name the same model on all arms"
        )
        context.store.write(ParityRecord(cases=(), ok=False, error=message))
        raise RunError(message)
    for label, arm in context.arms.items():
        context.arms[label] = replace(arm, signature=signatures[label])
    return {label: signatures[label] for label in context.arms}


def _wrong_arms(record: ParityRecord) -> dict[Label, str]:
    """The arms to which a parity check objects, and why."""
    if record.error is not None:
        return {} if record.failed_arm is None else {record.failed_arm: record.error}
    wrong: dict[Label, str] = {}
    for case in record.cases:
        if not case.ok and case.label is not None:
            wrong.setdefault(case.label, f"it gives other answers: {case.name} (output {case.output} {case.fault})")
    return wrong


def _without_cases(record: ParityRecord, labels: Collection[Label]) -> ParityRecord:
    """The record without the cases of these arms."""
    cases = tuple(case for case in record.cases if case.label not in labels)
    alike = record.alike and {label: outputs for label, outputs in record.alike.items() if label not in labels}
    return msgspec.structs.replace(record, cases=cases, ok=all(case.ok for case in cases), alike=alike)


def require_parity(context: RunContext, tolerance: Tolerance) -> None:
    """Compare the arms' answers to the same inputs, at each batch size of the load. Raises `RunError` after
    storing the comparison."""
    count = next(iter(context.inputs.values())).count
    context.progress.now(f"sending {count} inputs to every server, alone and in mixed batches")
    limits = [size for record in context.records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
    limits += [1 for signature in context.signatures.values() if not signature.batched]
    used = {workload.batch_size for workload in context.experiment.workloads}
    largest = max(1, min([*limits, max({8, *used})]))
    experiment, arm = context.experiment, next(iter(context.arms.values()))
    arms = {
        label: ParityTarget(
            arm.target, context.signatures[label], context.inputs[arm.payload], arm.request_timeout_s, arm.name
        )
        for label, arm in context.arms.items()
    }
    sizes = {largest, *(size for size in used if size < largest)}
    replayed = next((load for load in experiment.workloads if load.traffic is not None), None)
    compare_arms = partial(
        check_parity,
        arms,
        sizes,
        tolerance,
        context.experiment.lengths,
        few=context.care.few_inputs,
        replay=None if replayed is None else replay_of(replayed, arm.transport),
        check_answers=replayed is not None and replayed.check_answers,
    )
    record = compare_arms()
    while context.care.leaves_out and (wrong := _wrong_arms(record)) and context.experiment.baseline.label not in wrong:
        for label, why in wrong.items():
            _leave_out(context, label, why)
            del arms[label]
        record = _without_cases(record, wrong) if record.error is None else compare_arms()
    context.store.write(record)
    context.progress.parity_done(record)
    if record.error is not None:
        raise RunError(f"the arms' answers cannot be checked, so their speed is not compared: {record.error}")
    if not record.ok:
        first, *more = [case for case in record.cases if not case.ok]
        others = f", and {len(more)} more of {len(record.cases)} cases" if more else ""
        do_what = "give the recorded answers" if first.kind == "recorded" else "give the same answers"
        raise RunError(
            f"the arms do not {do_what}, so their speed is not compared: "
            f"{first.name} (output {first.output} {first.fault}){others}"
        )


def _first_answer(arm: Arm, first: Request) -> int:
    """Send one request; returns when its answer was there. Raises `AnswerError`, `ConnectionRefused`."""
    target = arm.target
    request = target.sendable(first)
    connection = target.connection((request,), timeout_s=READY_SECONDS)
    try:
        exchange = connection.send(request)
    finally:
        connection.close()
    if not exchange.good:
        raise AnswerError(failure_message(exchange))
    return exchange.end_ns


def _first_token(arm: Arm, plan: PromptPlan) -> int:
    """Send one prompt; returns when the first token was there. Raises `AnswerError`, `ConnectionRefused`."""
    shape = plan.shapes[0]
    [prompt] = probe_prompts(plan, shape, 1)
    answer = ask_tokens(arm.target, plan, prompt, shape.output_tokens, timeout_s=READY_SECONDS)
    return answer.chunks[0].at_ns
