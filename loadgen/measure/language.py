"""What a run must know of a language model before it can send prompts: its ids, its longest answer, its weights.

`abserve language-info` describes the model in a process of its own, so that the load generator needs neither torch nor
a tokenizer. A model of which only a name on running servers is known has no such description: then prompts are made of
ids that every tokenizer has, and no reference can judge the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from secrets import randbits
from typing import Annotated

import msgspec

from loadgen.base.child_process import ABSERVE, ProcessError, printed
from loadgen.client.inputs import InputError
from loadgen.experiment.language import longest_answer
from loadgen.experiment.prompts import MOST_ID, UNKNOWN_IDS, PromptError, PromptPlan, PromptShape
from loadgen.measure.arms import prompt_shape
from loadgen.records.payloads import is_language
from loadgen.records.run import MODEL_WEIGHTS, Experiment, Workload, body_count
from loadgen.records.tokens import MOST_TOKENS

_INFO_SECONDS = 120.0
_NUMBER_BITS = 32

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]


class LanguageModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the print of `abserve language-info`."""

    max_length: Annotated[int, msgspec.Meta(ge=2, le=MOST_TOKENS)]
    """The most tokens of a prompt and its answer together."""
    prompt_ids: tuple[TokenId, TokenId]
    """The smallest and the largest id of a prompt, without the special ones."""


@cache
def describe_model(model: str, weights: str | None, abserve: tuple[str, ...] = tuple(ABSERVE)) -> LanguageModelInfo:
    """Ask `abserve language-info`, once per process. Raises `InputError`."""
    command = [*abserve, "language-info", "--model", model, *(() if weights is None else ("--weights", weights))]
    try:
        return printed(command, LanguageModelInfo, _INFO_SECONDS, f"abserve language-info --model {model}")
    except ProcessError as exc:
        raise InputError(str(exc)) from exc


def model_info(experiment: Experiment, abserve: Sequence[str] = ABSERVE) -> LanguageModelInfo | None:
    """The description of the experiment's model; None if only its name on servers is known. Raises `InputError`, also
    for workloads that are too long for the model."""
    if not is_language(experiment.model):
        return None
    weights = None if experiment.weights == MODEL_WEIGHTS else experiment.weights
    info = describe_model(experiment.model, weights, tuple(abserve))
    longest = longest_answer(experiment.workloads)
    if longest > info.max_length:
        long = max(experiment.workloads, key=lambda load: (load.prompt_tokens or 0) + (load.output_tokens or 0))
        remedy = f"lower --prompt-tokens or --output-tokens, or leave {long.scenario} out of --scenarios"
        if long.trace is not None:
            remedy = "take the longer requests out of the trace, or serve a model that holds them"
        if long.traffic is not None:
            remedy = "leave the longer requests out with abserve.load_traffic(…).save(…)"
        raise InputError(
            f"{long.name} has prompts of {long.prompt_tokens:,} and answers of {long.output_tokens:,} tokens, and "
            f"{experiment.model} holds {info.max_length:,} together; {remedy}"
        )
    return info


def prompt_plan(experiment: Experiment, info: LanguageModelInfo | None) -> PromptPlan:
    """How the prompts of all workloads are made. Raises `InputError` for prompts that cannot differ."""
    low, high = UNKNOWN_IDS if info is None else info.prompt_ids
    shapes = dict.fromkeys(filter(None, map(prompt_shape, experiment.workloads)))
    plan = PromptPlan(low=low, high=high, seed=experiment.seed, shapes=tuple(shapes))
    try:
        for shape in plan.shapes:
            plan.require(shape)
    except PromptError as exc:
        raise InputError(str(exc)) from exc
    return plan


def describe_prompts(plan: PromptPlan, workloads: Sequence[Workload]) -> dict[str, str | int]:
    """A description for the stored record of the machine and its inputs."""
    trace = next((load.trace for load in workloads if load.trace is not None), None)
    shapes = filter(None, (prompt_shape(load) for load in workloads if load.trace is None))
    lengths = sorted({(shape.prompt_tokens, shape.output_tokens) for shape in shapes})
    described: dict[str, str | int] = {
        "kind": "prompts",
        "item": "request",
        "seed": plan.seed,
        "token_lengths": ", ".join(f"{prompt:,} → {output:,}" for prompt, output in lengths),
        "token_ids": f"{plan.low:,} to {plan.high:,}",
    }
    return described if trace is None else described | {"trace": trace}


def probe_prompts(plan: PromptPlan, shape: PromptShape, count: int) -> list[list[int]]:
    """New prompts of a shape. Their numbers are random, as those of the load are: a server that outlives a run may
    remember the prompts of an earlier one with the same seed."""
    first = randbits(_NUMBER_BITS)
    return [plan.prompt(shape, number % body_count(1), first + number).tolist() for number in range(count)]
