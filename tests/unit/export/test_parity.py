"""The parity measure must be able to fail: on a wrong answer, swapped rows, NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import row_cosines
from servers.export.errors import ExportError, ParityError
from servers.export.parity import BATCHES, COSINE_THRESHOLD, assert_parity, corpus_pixels, measure_parity
from servers.models.preprocessing import normalise
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

Alter = Callable[[np.ndarray], np.ndarray]


class AlteredEngine:
    """Answers as the module does, changed by `alter`."""

    def __init__(self, module: torch.nn.Module, alter: Alter) -> None:
        self._module, self._alter = module, alter

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with torch.inference_mode():
            return {"embedding": self._alter(self._module(torch.from_numpy(inputs["pixel_values"])).numpy().copy())}


def altered(module: torch.nn.Module, alter: Alter) -> Any:
    return AlteredEngine(module, alter)


@pytest.fixture(scope="module")
def module(specification: ModelSpecification) -> torch.nn.Module:
    return specification.load_module(RandomWeights(0))


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
    ],
    ids=["reversed-rows", "shifted-rows", "nan", "zeros", "offset"],
)
def test_a_wrong_engine_fails(
    alter: Alter, batch: int, module: torch.nn.Module, specification: ModelSpecification
) -> None:
    measured = measure_parity(specification, module, altered(module, alter))
    with pytest.raises(ParityError, match=f"at batch {batch}: cosine .* is below {COSINE_THRESHOLD}"):
        assert_parity(measured)


def test_the_same_answers_pass_and_are_measured_at_each_batch(
    module: torch.nn.Module, specification: ModelSpecification
) -> None:
    measured = measure_parity(specification, module, altered(module, lambda answer: answer))
    assert_parity(measured)
    assert tuple(m.batch for m in measured) == BATCHES
    assert all(m.max_abs == 0 for m in measured)
    assert all(m.cosine_min == pytest.approx(1) for m in measured)


def test_an_answer_of_another_shape_fails(module: torch.nn.Module, specification: ModelSpecification) -> None:
    with pytest.raises(ParityError, match="shape"):
        measure_parity(specification, module, altered(module, lambda answer: answer[:, :256]))


def test_the_photographs_are_told_apart_even_with_random_weights(
    module: torch.nn.Module, specification: ModelSpecification
) -> None:
    images = normalise(corpus_pixels(specification, 18), specification.preprocessing)
    with torch.inference_mode():
        embeddings = module(torch.from_numpy(images)).numpy()
    first, second = np.triu_indices(len(images), 1)
    assert row_cosines(embeddings[first], embeddings[second]).max() < 0.995


def test_a_model_with_two_inputs_is_not_measured_half(
    module: torch.nn.Module, specification: ModelSpecification
) -> None:
    from dataclasses import replace

    double = replace(specification, inputs=(*specification.inputs, TensorSpec("mask", "FP32", (-1, 1))))
    with pytest.raises(ExportError, match="one input"):
        measure_parity(double, module, altered(module, lambda answer: answer))
