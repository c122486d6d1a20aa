"""Models of torchvision and transformers by the torch engine on a real GPU: every mode, buckets of two dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.agreement import disagreement, proof_batch
from servers.engines.batches import random_inputs
from servers.engines.settings import EngineSettings
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.forms import expected_answers
from servers.measuring.measurement import MeasuredEngine, Reference
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

WEIGHTS = RandomWeights(0)
MAX_BATCH = 4
BERT, DISTILBERT = "transformers:bert-base-uncased", "transformers:distilbert-base-uncased"
SETTINGS = [
    ("torchvision:resnet18", "fp32", "graph"),
    ("torchvision:resnet18", "fp16", "traced"),
    ("torchvision:resnet50", "fp16", "graph"),
    ("torchvision:resnet50", "tf32", "eager"),
    ("torchvision:resnet50", "bf16", "graph"),
    ("torchvision:vit_b_16", "fp16", "graph"),
    (BERT, "fp32", "graph"),
    (BERT, "fp16", "graph"),
    (BERT, "fp16", "eager"),
    (BERT, "fp16", "traced"),
    (DISTILBERT, "fp16", "graph"),
    (DISTILBERT, "fp16", "compile"),
]


def engine_of(reference: str, precision: str, mode: str, **options: Any) -> TorchEngine:
    settings = EngineSettings("torch", precision, mode, "cuda:0", 0, MAX_BATCH, **options)
    engine = TorchEngine(get_specification(reference), settings, WEIGHTS)
    engine.load()
    return engine


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[TorchEngine, ModelSpecification]]:
    reference, precision, mode = request.param
    options = {"pad_to": (32, 128)} if reference in (BERT, DISTILBERT) else {}
    engine = engine_of(reference, precision, mode, **options)
    yield engine, get_specification(reference)
    engine.close()


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_every_batch_is_the_models_answer(loaded: tuple[TorchEngine, ModelSpecification], rows: int) -> None:
    engine, specification = loaded
    proof = proof_batch(specification, rows, rows)
    answer = partial(expected_answers, specification, specification.load_module(WEIGHTS))
    found = disagreement(
        specification,
        proof.expected(answer),
        proof.without_padding(engine.infer(proof.inputs)),
        engine.describe().precision,
    )
    assert found.fault is None


def test_answers_stay_the_callers(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    engine, specification = loaded
    inputs = random_inputs(specification, 3, 1)
    first: Any = engine.infer(inputs)
    kept = {name: array.copy() for name, array in first.items()}
    for rows in (1, 4, 2):
        engine.infer(random_inputs(specification, rows, rows))
    for name, array in kept.items():
        np.testing.assert_array_equal(first[name], array)
        assert array.dtype == np.float32


def test_the_description_proves_the_gpu(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    engine, specification = loaded
    seen = engine.describe()
    details: Any = seen.details
    assert set(details["parameters_by_device"]) == {"cuda:0"}
    assert details["relative_error_to_fp32"] <= 0.05
    assert "own module" in details["kernels"]
    probe: Any = engine.probe_kernels()
    assert probe["kernel_count"] >= 20
    if seen.mode in ("graph", "compile") and specification.padded_axis is not None:
        assert details["buckets"] == [1, 2, 4]
        assert details["sequence_buckets"] == [32, 128, 256, 512]
        assert details["captured_graphs"] >= 6


def test_the_engine_is_measured_at_several_sizes(loaded: tuple[TorchEngine, ModelSpecification]) -> None:
    engine, specification = loaded
    sizes = [{"sequence": 32}, {"sequence": 128}] if specification.axes else [{}]
    references = [Reference(random_inputs(specification, 2, 0, along), None, None, along) for along in sizes]
    measured = MeasuredEngine(engine, specification, [1, 4])
    for reference in references:
        for batch in (1, 4):
            times = measured.measure(batch, reference, 0.05)
            # Launches limit both where nothing is captured, so neither is the shorter one for sure.
            assert times.executions_ns
            assert times.best_ns <= 2 * median(times.calls_ns)


@pytest.fixture(scope="module")
def graph() -> Iterator[TorchEngine]:
    engine = engine_of(BERT, "fp32", "graph", pad_to=(16, 64))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def eager() -> Iterator[TorchEngine]:
    engine = engine_of(BERT, "fp32", "eager")
    yield engine
    engine.close()


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 9), (2, 16), (4, 50), (1, 64), (2, 100), (3, 512)])
def test_a_padded_graph_answers_as_eager_unpadded(
    graph: TorchEngine, eager: TorchEngine, rows: int, length: int
) -> None:
    """Lengths above 64 get their graph with their first batch."""
    inputs = random_inputs(get_specification(BERT), rows, length, {"sequence": length})
    for _ in range(2):
        padded: Any = graph.infer(inputs)["last_hidden_state"]
        alone: Any = eager.infer(inputs)["last_hidden_state"]
        assert padded.shape == alone.shape == (rows, length, 768)
        np.testing.assert_allclose(padded, alone, atol=2e-4)


def test_padding_within_the_request_changes_no_answer(graph: TorchEngine) -> None:
    specification = get_specification(BERT)
    assert specification.make_items is not None
    items = specification.make_items(7, [40, 23, 5])
    together: Any = graph.infer(items)["last_hidden_state"]
    for row, length in enumerate((40, 23, 5)):
        own = {name: np.ascontiguousarray(array[row : row + 1, :length]) for name, array in items.items()}
        alone: Any = graph.infer(own)["last_hidden_state"]
        np.testing.assert_allclose(together[row, :length], alone[0], atol=2e-4)


def test_a_sequence_beyond_the_largest_leaves_the_engine_whole(graph: TorchEngine, eager: TorchEngine) -> None:
    specification = get_specification(BERT)
    for engine in (graph, eager):
        with pytest.raises(ValueError, match="more than the largest, 512"):
            engine.infer(random_inputs(specification, 1, 0, {"sequence": 513}))
        assert np.isfinite(engine.infer(random_inputs(specification, 1, 0))["last_hidden_state"]).all()


def test_auto_is_graph() -> None:
    assert torch.cuda.is_available()
    engine = engine_of("torchvision:resnet18", "fp16", "auto")
    assert engine.describe().mode == "graph"
    engine.close()
