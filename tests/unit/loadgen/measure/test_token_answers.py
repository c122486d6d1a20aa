"""What a run knows of a language model, and what becomes of its answers."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from loadgen.client.inputs import InputError
from loadgen.experiment.prompts import UNKNOWN_IDS, PromptShape
from loadgen.measure.errors import RunError
from loadgen.measure.language import describe_model, describe_prompts, model_info, probe_prompts, prompt_plan
from loadgen.measure.token_answers import (
    AnswerBeginning,
    PromptedAnswer,
    agreement,
    ask_reference,
    equal_answers,
    within_limit,
)
from loadgen.records.payloads import inputs_in_brief
from loadgen.records.run import ArmRequest, Experiment, Workload
from loadgen.records.targets import TokenTransport
from tests.integration.loadgen.conftest import make_experiment

INFO = {
    "name": "demo", "vocabulary": 4096, "eos": [0], "max_length": 4096, "architecture": "Qwen2ForCausalLM",
    "parameters": 7_000_000, "weights": "random weights (seed 0)", "prompt_ids": [1, 4095], "more": True,
}  # fmt: skip


def command(tmp_path: Path, script: str) -> tuple[str, ...]:
    """What stands in for `abserve`."""
    path = tmp_path / "abserve.py"
    path.write_text(script)
    return sys.executable, str(path)


def language_experiment(*lengths: tuple[int, int], model: str = "language:demo") -> Experiment:
    workloads = tuple(
        Workload(
            scenario="concurrent", batch_size=1, concurrency=users, requests=1, seconds=1.0, max_seconds=2.0, rounds=2,
            prompt_tokens=prompt, output_tokens=output,
        )
        for users, (prompt, output) in enumerate(lengths, start=1)
    )  # fmt: skip
    return make_experiment(workloads=workloads, model=model, transport="completions", payload="tokens")


def answer(label: str, request: int, output: list[int], prompt: int = 2) -> PromptedAnswer:
    return PromptedAnswer("single", label, 0, "block 1", request, 0, list(range(prompt)), output)


def test_a_model_is_described_by_a_process(tmp_path: Path) -> None:
    abserve = command(tmp_path, f"print('loading'); print('''{json.dumps(INFO)}''')")
    info = describe_model("language:demo", None, abserve)
    assert (info.max_length, info.prompt_ids) == (4096, (1, 4095))


def test_what_cannot_be_described_is_refused_in_the_words_of_the_command(tmp_path: Path) -> None:
    abserve = command(tmp_path, "import sys; sys.exit('error: no model nothing')")
    with pytest.raises(InputError, match=r"^no model nothing$"):
        describe_model("language:nothing", None, abserve)
    with pytest.raises(InputError, match="printed no valid line"):
        describe_model("language:other", None, command(tmp_path, "print('{}')"))


def test_workloads_that_are_too_long_are_refused(tmp_path: Path) -> None:
    abserve = command(tmp_path, f"print('''{json.dumps(INFO)}''')")
    with pytest.raises(InputError, match=r"4,000 and answers of 97 tokens, and language:demo holds 4,096"):
        model_info(language_experiment((32, 64), (4000, 97)), abserve)
    assert model_info(language_experiment((32, 64), (4000, 96)), abserve) is not None
    assert model_info(language_experiment((32, 64), model="only-a-name"), abserve) is None


def test_prompts_of_an_unknown_model_have_ids_that_every_tokenizer_has() -> None:
    experiment = language_experiment((8, 4), (8, 4), (16, 4))
    plan = prompt_plan(experiment, None)
    assert plan.shapes == (PromptShape(8, 4), PromptShape(16, 4))
    prompts = probe_prompts(plan, PromptShape(16, 4), 5)
    assert len({tuple(prompt) for prompt in prompts}) == 5
    assert {len(prompt) for prompt in prompts} == {16}
    assert all(UNKNOWN_IDS[0] <= number <= UNKNOWN_IDS[1] for prompt in prompts for number in prompt)
    assert describe_prompts(plan, experiment.workloads)["token_lengths"] == "8 → 4, 16 → 4"


def test_a_trace_is_named_beside_the_lengths_of_the_other_prompts(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 60, "output_length": 6}\n' * 2)
    both = language_experiment((8, 4), (60, 6))
    replayed = msgspec.structs.replace(both.workloads[1], trace=str(path), arrivals="trace", rate_per_s=1.0)
    for workloads, words in (((both.workloads[0], replayed), "8 → 4 tokens and "), ((replayed,), "")):
        plan = prompt_plan(msgspec.structs.replace(both, workloads=workloads), None)
        assert inputs_in_brief(describe_prompts(plan, workloads)) == f"prompts of {words}the trace {path}"


def test_every_arm_and_workload_has_its_share_of_what_is_judged() -> None:
    """Each answer has 4 tokens with its prompt, so 20 tokens are five answers; every group gets at least one."""
    many = [answer("a", number, [1, 2]) for number in range(10)] + [answer("b", 0, [1, 2]), answer("b", 1, [1, 2])]
    chosen = within_limit(many, most_tokens=20)
    assert [(one.label, one.request) for one in chosen] == [("a", 0), ("b", 0), ("a", 8), ("b", 1), ("a", 4)]
    assert [one.label for one in within_limit(many, most_tokens=1)] == ["a", "b"]
    assert within_limit([]) == []


def test_answers_that_are_judged_are_spread_over_the_whole_load() -> None:
    """Only those of the first blocks were, where the limit does not allow all."""
    many = [answer("a", number, [1] * 10, prompt=0) for number in range(100)]
    chosen = sorted(one.request for one in within_limit(many, most_tokens=80))
    assert len(chosen) == 8
    assert all(later - earlier <= 16 for earlier, later in pairwise([0, *chosen, 99]))


def test_equal_answers_are_counted_by_prompt() -> None:
    answers = [answer("a", 0, [1]), answer("b", 0, [1]), answer("a", 1, [1]), answer("b", 1, [2])]
    assert (
        equal_answers(answers, {"a": "FastAPI", "b": "vLLM"}) == "1 of 2 probe answers have the same ids on every arm"
    )
    assert equal_answers(answers[::2], {"a": "FastAPI", "b": "vLLM"}).endswith("; vLLM sent no ids")


def begins(label: str, number: int, first: int | None, text: str = "") -> AnswerBeginning:
    return AnswerBeginning(label, 0, number, first, text)


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ((5, " a"), (5, " b"), True),
        ((5, " a"), (6, " a"), False),
        ((None, " the"), (5, "the cat"), True),
        ((None, "the cat"), (None, "the "), True),
        ((None, "the"), (None, "cat"), False),
        ((None, " "), (5, "cat"), None),
        ((5, ""), (None, "cat"), None),
    ],
)
def test_beginnings_are_compared_by_ids_or_else_by_text(
    one: tuple[int | None, str], other: tuple[int | None, str], agree: bool | None
) -> None:
    pair = begins("a", 0, *one), begins("b", 0, *other)
    assert pair[0].agrees(pair[1]) is pair[1].agrees(pair[0]) is agree


def test_first_tokens_are_counted_against_the_baseline_of_the_same_form() -> None:
    forms: tuple[tuple[str, TokenTransport | None], ...] = (
        ("a", "completions"), ("b", "generate_stream"), ("c", "text"), ("d", None),
    )  # fmt: skip
    arms = tuple(ArmRequest(label=label, target="http://h:1", transport=form) for label, form in forms)
    experiment = msgspec.structs.replace(language_experiment((8, 4)), arms=arms)
    told = [begins("a", 0, 1), begins("a", 1, 2), begins("b", 0, 1), begins("b", 1, 3), begins("c", 0, 1)]
    assert agreement(told, experiment) == {
        ("probe", "b", 0): (2, 1), ("probe", "c", 0): (0, 0), ("probe", "d", 0): (0, 0),
    }  # fmt: skip


JUDGE = """
import json, sys
asked = json.load(open(sys.argv[3]))
assert asked["model"] == "language:demo" and asked["weights"] == "random:0" and asked["precision"] == "fp32"
answers = [{"deficits": [0.0, None][:len(a["output"])], "best": a["output"], "largest": 3.0} for a in asked["answers"]]
json.dump({"answers": answers, "noise": 0.5, "eos": [0], "weights_sha256": "ab"}, open(sys.argv[5], "w"))
"""


def test_the_reference_is_asked_by_files(tmp_path: Path) -> None:
    asked = "language:demo", "random:0", "fp32", tmp_path, command(tmp_path, JUDGE)
    judged = ask_reference([([1, 2], [5, 6]), ([1, 2], [7])], *asked)
    assert [judgement.deficits for judgement in judged.answers] == [(0.0, None), (0.0,)]
    with pytest.raises(RunError, match="judged other answers"):
        ask_reference([([1, 2], [5, 6, 7])], *asked)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('error: no memory')", "the reference failed: no memory"),
        ("import sys; open(sys.argv[5], 'w').write('{}')", "cannot be read: Object missing required field"),
        ("", "cannot be read"),
    ],
)
def test_a_reference_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        ask_reference([([1, 2], [5])], "language:demo", None, "fp32", tmp_path, command(tmp_path, script))
