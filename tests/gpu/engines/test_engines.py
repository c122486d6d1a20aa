"""The engines on a real GPU: parity with FP32, ownership, placement, and the kernel probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError, profiled
from servers.engines.settings import EngineSettings
from servers.export.artefacts import ensure_artefact
from servers.export.manifest import executed_form
from servers.measuring.measurement import matrix_tflops
from servers.models.images import normalise
from servers.models.registry import get_variant
from servers.models.samples import corpus_pixels
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from tests.cosines import row_cosines

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

WEIGHTS = RandomWeights(0)
ARTEFACTS = Path(__file__).resolve().parents[3] / ".artefacts"
MAX_BATCH = 12
MIN_COSINE = {"fp32": 0.999999, "tf32": 0.9999, "fp16": 0.9995, "bf16": 0.999}
SETTINGS = [
    ("torch", "fp32", "eager", "fp32"),
    ("torch", "fp16", "eager", "uint8"),
    ("torch", "fp16", "traced", "uint8"),
    ("torch", "fp32", "traced", "fp32"),
    ("torch", "fp32", "graph", "uint8"),
    ("torch", "tf32", "graph", "fp32"),
    ("torch", "bf16", "graph", "uint8"),
    ("torch", "fp16", "graph", "uint8"),
    ("torch", "fp16", "graph", "fp32"),
    ("onnxruntime", "fp32", "session", "fp32"),
    ("onnxruntime", "fp32", "graph", "uint8"),
    ("onnxruntime", "tf32", "graph", "fp32"),
    ("onnxruntime", "fp16", "graph", "uint8"),
    ("onnxruntime", "fp16", "graph", "fp32"),
]


def engine_of(kind: str, precision: str, mode: str, payload: str) -> tuple[Engine, ModelSpecification]:
    specification = get_variant("openclip_vit_b32", payload)
    path = None
    if kind == "onnxruntime":
        path = ensure_artefact(specification, WEIGHTS, ARTEFACTS, form=executed_form(kind, precision)).path
    settings = EngineSettings(kind, precision, mode, "cuda:0", 0, MAX_BATCH)
    return build_engine(specification, WEIGHTS, settings, path), specification


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, ModelSpecification, str]]:
    if request.param[0] == "onnxruntime":
        ort = pytest.importorskip("onnxruntime")
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            pytest.skip("this onnxruntime has no CUDA provider")
    engine, specification = engine_of(*request.param)
    engine.load()
    yield engine, specification, request.param[1]
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return corpus_pixels(get_variant("openclip_vit_b32", "uint8"), MAX_BATCH)


@pytest.fixture(scope="module")
def expected(pixels: np.ndarray) -> np.ndarray:
    specification = get_variant("openclip_vit_b32", "fp32")
    with torch.inference_mode():
        images = torch.from_numpy(normalise(pixels, specification.preprocessing))
        return specification.load_module(WEIGHTS)(images).numpy()


def given_to(specification: ModelSpecification, pixels: np.ndarray) -> dict[str, np.ndarray]:
    fitting = pixels if specification.payload == "uint8" else normalise(pixels, specification.preprocessing)
    return {"pixel_values": fitting}


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12])
def test_every_batch_is_the_models_answer(
    loaded: tuple[Engine, ModelSpecification, str], pixels: np.ndarray, expected: np.ndarray, rows: int
) -> None:
    engine, specification, precision = loaded
    answer = engine.infer(given_to(specification, pixels[-rows:]))["embedding"]
    assert (answer.dtype, answer.shape) == (np.dtype(np.float32), (rows, 512))
    assert row_cosines(expected[-rows:], answer).min() >= MIN_COSINE[precision]


def test_answers_repeat_and_stay_the_callers(
    loaded: tuple[Engine, ModelSpecification, str], pixels: np.ndarray
) -> None:
    engine, specification, _ = loaded
    first = engine.infer(given_to(specification, pixels[:3]))["embedding"]
    kept: Any = first.copy()
    for rows in (1, 5, 12, 3):
        engine.infer(given_to(specification, pixels[::-1][:rows].copy()))
    np.testing.assert_array_equal(first, kept)
    again: Any = engine.infer(given_to(specification, pixels[:3]))["embedding"]
    np.testing.assert_allclose(again, kept, rtol=1e-5)


def test_the_description_proves_the_gpu(loaded: tuple[Engine, ModelSpecification, str]) -> None:
    engine, _, precision = loaded
    seen = engine.describe()
    assert (seen.precision, seen.device, seen.threads) == (precision, "cuda:0", None)
    if seen.kind == "torch":
        assert set(seen.details["parameters_by_device"]) == {"cuda:0"}  # type: ignore[call-overload]
        assert seen.details["cosine_to_fp32"] >= 0.9995  # type: ignore[operator]
        description = profiled(engine)
        assert description is not None
        probe: Any = description.details["kernel_probe"]
        assert probe["kernel_count"] >= 20
        assert probe["top_kernels"][0]["seconds"] > 0
    else:
        assert seen.details["nodes_by_provider"]["CUDAExecutionProvider"] > 0  # type: ignore[index]
        assert seen.details["cpu_non_shape_ops"] == []
        assert seen.details["cpu_time_ratio"] <= 0.01  # type: ignore[operator]


def test_the_engine_tells_how_long_it_executes(loaded: tuple[Engine, ModelSpecification, str]) -> None:
    engine, specification, precision = loaded
    times_ns = engine.execution_ns(8, 10)
    if times_ns is None:
        assert engine.describe().mode == "session"
        return
    assert len(times_ns) == 10
    ceiling = matrix_tflops("cuda:0", precision)
    assert ceiling is not None
    assert specification.flops_per_item is not None
    assert 0.001 < 8 * specification.flops_per_item / sorted(times_ns)[5] / 1e3 / ceiling < 1


def test_compile_is_one_of_the_modes() -> None:
    specification = get_variant("openclip_vit_b32", "uint8")
    engine = build_engine(specification, WEIGHTS, EngineSettings("torch", "fp16", "compile", "cuda:0", 0, 2))
    engine.load()
    try:
        assert engine.describe().details["compiled"] is True
        assert engine.describe().details["buckets"] == [1, 2]
    finally:
        engine.close()


def test_a_batch_beyond_the_largest_is_refused() -> None:
    specification = get_variant("openclip_vit_b32", "uint8")
    engine = build_engine(specification, WEIGHTS, EngineSettings("torch", "fp16", "graph", "cuda:0", 0, 2))
    engine.load()
    try:
        with pytest.raises((EngineError, ValueError), match="largest bucket, 2"):
            engine.infer({"pixel_values": np.zeros((3, 224, 224, 3), np.uint8)})
    finally:
        engine.close()


def test_two_engines_in_one_process_keep_their_memory() -> None:
    """The first one's kernels write to memory of their own, which the second must not be given."""
    specification = get_variant("openclip_vit_b32", "uint8")
    engines = {}
    for name, executed in (("tower", specification), ("layers", replace(specification, fused_tower=False))):
        engine = build_engine(executed, WEIGHTS, EngineSettings("torch", "fp16", "graph", "cuda:0", 0, MAX_BATCH))
        engine.load()
        engine.warm_up((1, MAX_BATCH))
        engines[name] = engine
    for rows in (1, MAX_BATCH):
        inputs = {"pixel_values": corpus_pixels(specification, rows)}
        answers = [engine.infer(inputs)["embedding"] for _ in range(2) for engine in engines.values()]
        assert all(row_cosines(answer, answers[0]).min() > MIN_COSINE["fp16"] for answer in answers)
    for engine in engines.values():
        engine.close()
