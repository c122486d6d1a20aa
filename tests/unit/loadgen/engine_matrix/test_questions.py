"""The answers to the questions of earlier studies, from matrices in which the truth is planted."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.engine_matrix import questions
from loadgen.engine_matrix.questions import DIP, FP16_GAIN, HALF, QUADRATIC, STEEP
from loadgen.engine_matrix.records import Answer, Configuration
from tests.unit.loadgen.engine_matrix.simulated_matrix import (
    BERT,
    DISTILBERT,
    RESNET,
    VIT,
    Latency,
    configuration,
    matrix,
    plan,
)

IMAGES = [configuration(model=model, precision=precision) for model in (RESNET, VIT) for precision in ("fp32", "fp16")]
TEXTS = [configuration(model=model) for model in (BERT, DISTILBERT)]


def answer(question: str, configurations: list[Configuration], latency: Latency, **given: Any) -> Answer:
    asked = plan(*configurations, **{key: given.pop(key) for key in ("lengths", "batches", "rounds") if key in given})
    found = [one for one in matrix(asked, latency, **given).answers if one.question == question]
    assert found
    return found[0]


@pytest.mark.parametrize(("gain", "outcome"), [(3.0, "yes"), (1.2, "no"), (2.02, "no"), (2.1, "undetermined")])
def test_fp16_of_the_transformer_and_of_the_cnn(gain: float, outcome: str) -> None:
    gains = {(VIT, "fp16"): gain, (RESNET, "fp16"): 2.0}
    found = answer(
        FP16_GAIN, IMAGES, lambda one, batch, _length: 10.0 * batch / gains.get((one.model, one.precision), 1.0)
    )
    assert found.outcome == outcome
    for part in ("torch/eager on cpu", "vit_b_16", "resnet50", "batch sizes 1, 8"):
        assert part in found.sentence


def test_fp16_with_low_accuracy_is_no_gain() -> None:
    def inaccurate(one: Configuration, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | ({"cosine_min": 0.5} if one.precision == "fp16" else {})

    found = answer(FP16_GAIN, IMAGES, lambda _one, _batch, _length: 10.0, change=inaccurate)
    assert found.outcome == "undetermined"
    assert "right answers" in found.sentence


@pytest.mark.parametrize(
    ("bend", "outcome", "said"),
    [(128, "yes", "from 128 to 256"), (10_000, "no", "not within the lengths measured")],
)
def test_where_length_turns_quadratic(bend: int, outcome: str, said: str) -> None:
    def latency(one: Configuration, batch: int, length: int | None) -> float:
        assert length is not None
        return batch * (length if length <= bend else length**2 / bend)

    found = answer(QUADRATIC, TEXTS[:1], latency, lengths=(64, 128, 256, 512))
    assert (found.outcome, said in found.sentence) == (outcome, True)
    assert "batch 8" in found.sentence
    assert "64–128: 0.97 (0.9" in found.sentence


def test_an_exponent_at_the_limit_is_undetermined() -> None:
    latency: Latency = lambda _one, _batch, length: float(length or 0) ** STEEP  # noqa: E731
    assert answer(QUADRATIC, TEXTS[:1], latency, lengths=(64, 128)).outcome == "undetermined"
    assert answer(QUADRATIC, TEXTS[:1], latency, lengths=(64, 128), rounds=1).outcome == "undetermined"


@pytest.mark.parametrize(("part", "outcome"), [(0.5, "yes"), (0.7, "no"), (0.55, "undetermined")])
def test_distilbert_is_half_of_bert(part: float, outcome: str) -> None:
    found = answer(HALF, TEXTS, lambda one, batch, _length: 10.0 * batch * (part if one.model == DISTILBERT else 1.0))
    assert found.outcome == outcome
    assert "torch/eager fp32" in found.sentence


def test_configurations_with_the_same_answer_share_it() -> None:
    slow = [configuration("onnxruntime", "session", model=model) for model in (BERT, DISTILBERT)]
    half = [configuration(engine, "latency", model=model) for engine in ("x", "y") for model in (BERT, DISTILBERT)]

    def latency(one: Configuration, batch: int, _length: int | None) -> float:
        return batch * (1.0 if one.model == BERT else 0.8 if one.engine == "onnxruntime" else 0.5)

    found = [one for one in matrix(plan(*slow, *half, *TEXTS), latency).answers if one.question == HALF]
    assert [one.outcome for one in found] == ["yes", "no", "yes"]
    assert "torch/eager" in found[0].sentence
    assert "x/latency" not in found[0].sentence
    assert "onnxruntime/session" in found[1].sentence
    assert "x/latency fp32" in found[2].sentence
    assert "y/latency fp32" in found[2].sentence


def test_bert_is_not_roberta() -> None:
    roberta = configuration(model="transformers:roberta-base")
    found = answer(HALF, [roberta, TEXTS[1]], lambda _one, _batch, _length: 10.0)
    assert (found.outcome, found.sentence) == ("undetermined", "This needs BERT and DistilBERT.")


def test_a_dip_at_a_batch_size() -> None:
    speeds = {1: 1.0, 4: 1.5, 8: 1.0, 16: 2.0}
    found = answer(DIP, IMAGES[:1], lambda _one, batch, _length: 10.0 * batch / speeds[batch], batches=(1, 4, 8, 16))
    assert found.outcome == "yes"
    assert "batch 8 has 0.6" in found.sentence
    assert "of batch 4 (torch/eager fp32, threads 1)" in found.sentence


def test_no_dip() -> None:
    found = answer(DIP, IMAGES[:1], lambda _one, batch, _length: 10.0 * batch**0.8, batches=(1, 4, 8))
    assert found.outcome == "no"


def test_one_round_or_one_batch_size_shows_no_dip() -> None:
    latency: Latency = lambda _one, batch, _length: 10.0 * batch  # noqa: E731
    assert answer(DIP, IMAGES[:1], latency, rounds=1).outcome == "undetermined"
    assert answer(DIP, IMAGES[:1], latency, batches=(8,)).outcome == "undetermined"


def test_the_baseline_is_asked_first() -> None:
    others = [configuration("onnxruntime", "session", model=model) for model in (BERT, DISTILBERT)]
    found = answer(HALF, others + TEXTS, lambda _one, _batch, _length: 10.0)
    assert "torch/eager" in found.sentence


def test_every_question_is_answered_without_cells() -> None:
    found = questions.answers(plan(configuration()), [])
    assert [one.question for one in found] == [FP16_GAIN, QUADRATIC, HALF, DIP]
