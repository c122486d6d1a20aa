"""Fused layers on a real GPU: the chosen plan is the faster one, and its answers are right in every bucket."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from servers.engines.agreement import disagreement, proof_batch
from servers.engines.interface import PLANS_FOLDER
from servers.engines.settings import EngineSettings
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.forms import expected_answers
from servers.engines.torch.plans import MARGIN
from servers.models.registry import get_specification, get_variant
from servers.models.specification import ModelSpecification
from servers.models.uint8_module import executed_module
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROWS = (1, 2, 8, 32)
MODELS = (
    "transformers:distilbert-base-uncased",
    "transformers:bert-base-uncased",
    "torchvision:vit_b_16",
    "open_clip:ViT-B-16",
)

IMAGES = ("torchvision", "open_clip")


@pytest.fixture(params=MODELS)
def loaded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[TorchEngine, ModelSpecification]]:
    monkeypatch.setenv(PLANS_FOLDER, str(tmp_path))
    source, _, _ = request.param.partition(":")
    pytest.importorskip(source)
    specification = get_variant(request.param, "uint8") if source in IMAGES else get_specification(request.param)
    pad_to = () if source in IMAGES else (128,)
    settings = EngineSettings("torch", "fp16", "auto", "cuda:0", 0, ROWS[-1], pad_to=pad_to)
    engine = TorchEngine(specification, settings, RandomWeights(0))
    engine.load()
    yield engine, specification
    engine.close()


def test_the_faster_plan_executes(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    details: Any = loaded[0].describe().details
    times, plans = details["plan_times_ms"], details["plans"]
    assert {"1", "32"} <= times.keys() <= plans.keys()
    assert not details.get("plans_left_out")
    for rows, of_rows in times.items():
        assert of_rows[plans[rows]] <= min(of_rows.values()) / MARGIN, of_rows


def test_answers_agree_at_every_batch_size(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    engine, specification = loaded
    module = specification.load_module(RandomWeights(0))
    for rows in ROWS:
        proof = proof_batch(specification, rows, rows)
        expected = proof.expected(partial(expected_answers, specification, executed_module(specification, module)))
        actual = proof.without_padding(engine.infer(proof.inputs))
        assert disagreement(specification, expected, actual, "fp16").fault is None
