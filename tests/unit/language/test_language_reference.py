"""The reference finds no fault in its own answers, and every fault that is planted in others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servers.language import reference
from servers.language.module import build_module
from servers.language.reference import GivenAnswer, batches, judge, judge_answers, own_noise
from servers.language.specification import language_model
from servers.options.defaults import OptionError

LENGTHS = [(8, 24), (8, 24), (8, 24), (5, 1), (30, 40), (1, 7), (17, 24), (8, 60)]


@pytest.fixture(scope="module")
def module() -> Any:
    return build_module(language_model("language:tiny"))


@pytest.fixture(scope="module")
def answers(module: Any) -> list[GivenAnswer]:
    """What `generate` answers, alone."""
    generator = np.random.default_rng(0)
    answers = []
    for prompt_tokens, output_tokens in LENGTHS:
        prompt = generator.integers(1, 1024, prompt_tokens).tolist()
        output = module.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=output_tokens, eos_token_id=None, pad_token_id=0
        )
        answers.append(GivenAnswer(prompt, output[0, prompt_tokens:].tolist()))
    return answers


def test_its_own_answers_have_no_deficit(module: Any, answers: list[GivenAnswer]) -> None:
    judgements = judge(module, answers)
    for answer, judgement in zip(answers, judgements, strict=True):
        assert judgement.best == answer.output
        assert max(judgement.deficits) < 1e-4
        assert len(judgement.deficits) == len(answer.output)
        assert 1 < judgement.largest < 100
    assert own_noise(module, answers) < 1e-4


def test_small_parts_give_the_same(module: Any, answers: list[GivenAnswer], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judge(module, answers)
    monkeypatch.setattr(reference, "LOGIT_BYTES", 1024 * 4 * 7)
    assert max(map(len, batches(answers, 1024))) == 1
    for answer, part in zip(whole, judge(module, answers), strict=True):
        assert part.best == answer.best
        assert part.largest == pytest.approx(answer.largest, rel=1e-5)


def test_batches_are_bounded_and_complete() -> None:
    answers = [GivenAnswer([1] * length, [2] * 64) for length in (32, 900, 32, 33, 5, 900, 32)]
    groups = batches(answers, 4096)
    assert sorted(index for group in groups for index in group) == list(range(7))
    for group in groups:
        width = max(len(answers[index].read) for index in group)
        first = min(len(answers[index].prompt) for index in group)
        assert len(group) == 1 or len(group) * (width - first + 1) * 4096 * 4 <= reference.LOGIT_BYTES


def test_wrong_tokens_are_found_where_they_are(module: Any, answers: list[GivenAnswer]) -> None:
    right = answers[0]
    output = list(right.output)
    output[10] = (output[10] + 1) % 1024
    judgement = judge(module, [*answers[1:], GivenAnswer(right.prompt, output)])[-1]
    assert judgement.deficits[10] > 0.1
    assert max(judgement.deficits[:10]) < 1e-4
    assert judgement.best[:11] == right.output[:11]


def test_other_weights_and_swapped_answers_are_found(module: Any, answers: list[GivenAnswer]) -> None:
    other = build_module(language_model("language:tiny", "random:1"))
    assert max(max(judgement.deficits) for judgement in judge(other, answers)) > 1
    swapped = judge(module, [GivenAnswer(answers[0].prompt, answers[1].output)])[0]
    assert max(swapped.deficits) > 1


def test_the_command(
    module: Any, answers: list[GivenAnswer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from servers.commands.language import language_info, language_reference

    asked = {
        "model": "language:tiny", "weights": "random:0", "precision": "fp32", "device": "cpu",
        "answers": [{"prompt": answer.prompt, "output": answer.output} for answer in answers],
    }  # fmt: skip
    (tmp_path / "in.json").write_text(json.dumps(asked))
    language_reference(tmp_path / "in.json", tmp_path / "out.json")
    judged = json.loads((tmp_path / "out.json").read_text())
    assert [answer["best"] for answer in judged["answers"]] == [answer.output for answer in answers]
    assert 0 <= judged["noise"] < 1e-4
    assert judged["eos"] == [0]
    language_info("language:tiny")
    info = json.loads(capsys.readouterr().out)
    assert info["weights_sha256"] == judged["weights_sha256"]
    assert (info["name"], info["vocabulary"], info["prompt_ids"], info["max_length"]) == ("tiny", 1024, [1, 1023], 1024)


def test_bf16_has_noise_and_its_own_answers_stay_within_it(answers: list[GivenAnswer]) -> None:
    module = build_module(language_model("language:tiny"), precision="bf16")
    noise = own_noise(module, answers)
    assert 0 <= noise < 0.5
    chosen = [GivenAnswer(answer.prompt, judge(module, [answer])[0].best) for answer in answers[:1]]
    assert judge(module, chosen)[0].largest > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "names its model"),
        ({"answers": None}, "no list of answers"),
        ({"answers": [{"prompt": [1], "output": []}]}, "answer 0"),
        ({"answers": [{"prompt": [1024], "output": [1]}]}, "below 1024"),
        ({"answers": [{"prompt": [1] * 1024, "output": [1, 1]}]}, "more than the model's"),
        ({"precision": "int3"}, "int3"),
    ],
)
def test_what_it_cannot_judge(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        judge_answers({"model": "language:tiny", "answers": [{"prompt": [1], "output": [2]}]} | change)
