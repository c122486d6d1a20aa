"""Fused layers on a real GPU: the chosen plan is the faster one, and its answers are right in every bucket."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from servers.engines.agreement import disagreement, proof_batch
from servers.engines.settings import EngineSettings
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.forms import expected_answers
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROWS = (1, 2, 8, 32)
MODELS = ("transformers:distilbert-base-uncased", "transformers:bert-base-uncased")


@pytest.fixture(params=MODELS)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[TorchEngine, ModelSpecification]]:
    pytest.importorskip("transformers")
    specification = get_specification(request.param)
    settings = EngineSettings("torch", "fp16", "auto", "cuda:0", 0, ROWS[-1], pad_to=(128,))
    engine = TorchEngine(specification, settings, RandomWeights(0))
    engine.load()
    yield engine, specification
    engine.close()


def test_the_faster_plan_executes(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    details = loaded[0].describe().details
    times = details["plan_times_ms"]
    assert isinstance(times, dict)
    assert times.keys() == {"1", "32"}
    assert not details.get("plans_left_out")
    ratio = 1.0
    for of_rows in times.values():
        ratio *= of_rows["fused layers"] / of_rows["own layers"]
    assert ("fused" in str(details["kernels"])) == (ratio < 0.98**2), times


def test_answers_agree_at_every_batch_size(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    engine, specification = loaded
    module = specification.load_module(RandomWeights(0))
    for rows in ROWS:
        proof = proof_batch(specification, rows, rows)
        expected = proof.expected(partial(expected_answers, specification, module))
        actual = proof.without_padding(engine.infer(proof.inputs))
        assert disagreement(specification, expected, actual, "fp16").fault is None
