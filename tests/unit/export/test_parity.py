"""The parity measure must be able to fail: on a wrong answer, swapped rows, NaN, and only where an answer counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.agreement import Answer
from servers.engines.torch.forms import expected_answers
from servers.export.manifest import ExportError
from servers.export.parity import BATCHES, assert_parity, measure_parity
from servers.models.images import normalise
from servers.models.items import valid_items
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array, Axis, TensorSpec
from tests.cosines import row_cosines

Alter = Callable[[np.ndarray], np.ndarray]


class AlteredEngine:
    """Answer as the reference does, each output changed by `alter`."""

    def __init__(self, answers: Answer, alter: Alter) -> None:
        self._answers, self._alter = answers, alter

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: self._alter(output.copy()) for name, output in self._answers(inputs).items()}


def altered(answers: Answer, alter: Alter) -> Any:
    return AlteredEngine(answers, alter)


@pytest.fixture(scope="module")
def module(specification: ModelSpecification) -> torch.nn.Module:
    return specification.load_module(RandomWeights(0))


@pytest.fixture(scope="module")
def answers(specification: ModelSpecification, module: torch.nn.Module) -> Answer:
    """The module's answers; the batch of a size is always the same photographs, so each is computed once."""
    compute = partial(expected_answers, specification, module)
    known: dict[int, Mapping[str, Array]] = {}

    def answers(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = len(inputs["pixel_values"])
        if rows not in known:
            known[rows] = compute(inputs)
        return known[rows]

    return answers


def nan_row(answer: np.ndarray) -> np.ndarray:
    answer[-1] = np.nan
    return answer


@pytest.mark.parametrize(
    ("alter", "batch"),
    [
        (lambda answer: answer[::-1] if len(answer) == 7 else answer, 7),
        (lambda answer: np.roll(answer, 1, axis=0), 2),
        (nan_row, 1),
        (lambda answer: np.zeros_like(answer), 1),
        (lambda answer: answer + 0.05 * np.sign(answer), 1),
        (lambda answer: 100 * answer, 1),
        (lambda answer: answer[:, :256], 1),
        (lambda answer: answer.astype(np.float64), 1),
    ],
    ids=["reversed-rows", "shifted-rows", "nan", "zeros", "offset", "hundredfold", "shape", "datatype"],
)
def test_a_wrong_engine_fails(alter: Alter, batch: int, answers: Answer, specification: ModelSpecification) -> None:
    measured = measure_parity(specification, answers, altered(answers, alter))
    with pytest.raises(ExportError, match=f"differs from the model at batch {batch}: embedding .*no artefact was kept"):
        assert_parity(measured)


def test_the_same_answers_pass_and_are_measured_at_each_batch(
    answers: Answer, specification: ModelSpecification
) -> None:
    measured = measure_parity(specification, answers, altered(answers, lambda answer: answer))
    assert_parity(measured)
    assert tuple(m.batch for m in measured) == BATCHES
    assert all((m.max_abs, m.relative_error, m.fault) == (0, 0, None) for m in measured)
    assert all(m.cosine_min == pytest.approx(1) for m in measured)


def test_the_photographs_are_told_apart_even_with_random_weights(
    module: torch.nn.Module, specification: ModelSpecification
) -> None:
    images = normalise(corpus_pixels(specification, 18), specification.preprocessing)
    with torch.inference_mode():
        embeddings = module(torch.from_numpy(images)).numpy()
    first, second = np.triu_indices(len(images), 1)
    assert row_cosines(embeddings[first], embeddings[second]).max() < 0.995


LENGTHS = Axis("length", 6, 20, {"values": 1, "weights": 1, "scaled": 1}, {"values": 9, "weights": 0})
TWO_INPUTS = ModelSpecification(
    name="weighted",
    title="weighted",
    version="1",
    inputs=(TensorSpec("values", "INT64", (-1, -1)), TensorSpec("weights", "FP32", (-1, -1))),
    outputs=(TensorSpec("scaled", "FP32", (-1, -1)), TensorSpec("sum", "FP32", (-1,))),
    kinds={"sum": "tensor"},
    axes=(LENGTHS,),
    max_batch_size=8,
    load_module=lambda _: pytest.fail("the answers are computed here"),
)


def weighted(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    scaled = np.add(inputs["values"], 2) * inputs["weights"]
    return {"scaled": scaled.astype(np.float32), "sum": scaled.sum(axis=1).astype(np.float32)}


def test_a_model_with_an_axis_is_compared_at_several_lengths_padded_and_not() -> None:
    seen: list[tuple[int, ...]] = []

    def answers(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        seen.append(inputs["values"].shape)
        return weighted(inputs)

    measured = measure_parity(TWO_INPUTS, answers, altered(weighted, lambda answer: answer))
    assert_parity(measured)
    assert seen == [(1, 6), (2, 20), (7, 3), (7, 6)]
    assert [(m.batch, m.sizes["length"], m.padded) for m in measured] == [
        (1, 6, False), (2, 20, False), (7, 3, False), (7, 6, True),
    ]  # fmt: skip


def test_only_places_in_padding_may_differ() -> None:
    items = valid_items(TWO_INPUTS, 0, (1, 3))
    assert items["values"][0, 1:].tolist() == [9, 9]
    assert items["weights"][0, 1:].tolist() == [0, 0]

    def beyond(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answers = dict(weighted(inputs))
        answers["scaled"] = np.where(inputs["values"] == 9, 1e9, answers["scaled"]).astype(np.float32)
        return answers

    assert_parity(measure_parity(TWO_INPUTS, beyond, altered(weighted, lambda answer: answer)))

    def short(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Wrong in the last place of an item that is not padded."""
        answers = {name: output.copy() for name, output in weighted(inputs).items()}
        answers["scaled"][-1, -1] += 1
        return answers

    with pytest.raises(ExportError, match="batch 1, length 6: scaled"):
        assert_parity(measure_parity(TWO_INPUTS, weighted, altered(short, lambda answer: answer)))
