"""The profile on a real GPU: the kernels of both runtimes, replayed from CUDA graphs that were captured before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.export.artefacts import ensure_artefact
from servers.export.manifest import executed_form
from servers.measuring.measurement import MeasuredEngine, Reference
from servers.measuring.profile import ATTENTION, CATEGORIES, PRODUCTS, profile_engine
from servers.models.registry import get_variant
from servers.models.samples import corpus_pixels
from servers.models.weights import RandomWeights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

WEIGHTS = RandomWeights(0)
ARTEFACTS = Path(__file__).resolve().parents[3] / ".artefacts"
BATCHES = (1, 8)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("torch", "graph"), ("torch", "eager"), ("onnxruntime", "graph"), ("onnxruntime", "session")],
    ids="-".join,
)
def test_the_kernels_of_an_execution_are_all_there(kind: str, mode: str) -> None:
    specification = get_variant("openclip_vit_b32", "uint8")
    path = None
    if kind == "onnxruntime":
        ort = pytest.importorskip("onnxruntime")
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            pytest.skip("this onnxruntime has no CUDA provider")
        path = ensure_artefact(specification, WEIGHTS, ARTEFACTS, form=executed_form(kind, "fp16")).path
    pictures = corpus_pixels(specification, 8)
    engine = build_engine(specification, WEIGHTS, EngineSettings(kind, "fp16", mode, "cuda:0", 0, max(BATCHES)), path)
    engine.load()
    try:
        reference: Any = engine.infer({"pixel_values": pictures})
        given = Reference({"pixel_values": pictures}, reference)
        driver = MeasuredEngine(engine, specification, BATCHES)
        measured = [driver.measure(batch, given, 0.1) for batch in BATCHES]
        profiles = profile_engine(engine, specification, measured)
    finally:
        engine.close()
    assert not isinstance(profiles, str), profiles
    assert [batch["batch"] for batch in profiles] == list(BATCHES)
    for batch in profiles:
        assert batch["with_copies"] is (mode == "session")
        assert batch["launches"] > 20
        assert not any("spin_kernel" in kernel["name"] for kernel in batch["kernels"])
        times = {category["name"]: category["us"] for category in batch["categories"]}
        assert times[PRODUCTS] > 0
        assert times[ATTENTION] > 0
        assert sum(category["share"] for category in batch["categories"]) == pytest.approx(1)
        assert sum(kernel["us"] for kernel in batch["kernels"]) + batch["idle_us"] == pytest.approx(batch["span_us"])
        assert {kernel["category"] for kernel in batch["kernels"]} <= set(CATEGORIES)
        if mode == "graph":  # a replay launches the same kernels each time
            assert all(kernel["count"] == round(kernel["count"]) for kernel in batch["kernels"])
        if kind == "torch":  # ONNX Runtime's own kernels fetch some addresses from the host
            assert not any(word in kernel["name"] for kernel in batch["kernels"] for word in ("HtoD", "DtoH"))
