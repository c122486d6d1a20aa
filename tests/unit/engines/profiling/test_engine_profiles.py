"""`abserve engine --profile` on a CPU: the real model by both profilers, the table and the file, and refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.entry import build
from servers.engines.factory import build_engine
from servers.engines.measurement import BatchMeasurement
from servers.engines.profiling.names import CATEGORIES
from servers.engines.profiling.records import EngineProfile
from servers.engines.profiling.run import profile_engine
from servers.engines.profiling.table import show_profile
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights

MEASURED = BatchMeasurement(1, 7, None, 50_000_000, 60_000_000, 20.0, 0.1, None, 1.0)
BLOCKS = 12


def shown(profile: EngineProfile, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_profile(console, profile)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_torchs_operators_on_the_real_model(specification: ModelSpecification) -> None:
    engine = build_engine(specification, RandomWeights(0), EngineSettings("torch", device="cpu"))
    engine.load()
    try:
        profile = profile_engine(engine, specification, [MEASURED])
    finally:
        engine.close()
    assert profile.missing is None
    (batch,) = profile.batches
    assert (batch.batch, batch.measured_us, batch.with_copies) == (1, 50_000.0, False)
    assert [category.name for category in batch.categories] == [*CATEGORIES, "outside operators"]
    assert sum(category.share for category in batch.categories) == pytest.approx(1)
    counts = {kernel.name: kernel.count for kernel in batch.kernels}
    assert counts["aten::native_layer_norm"] == 2 * BLOCKS + 2
    assert counts["aten::gelu"] == BLOCKS
    times = {category.name: category.us for category in batch.categories}
    assert min(times[name] for name in CATEGORIES[:5]) > 0
    table = shown(profile)
    assert "aten::addmm" in table
    assert "50,000.0" in table


def test_the_command_writes_onnx_runtimes_nodes_down(artefact_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    options = ["--engine", "onnxruntime", "--device", "cpu", "--batches", "1", "--seconds", "0", "--profile"]
    done = CliRunner().invoke(build(), ["engine", *options, "--artefacts", str(artefact_dir), "--json", str(out)])
    assert done.exit_code == 0, done.output
    for row in (*CATEGORIES, "outside operators", "measured without it", "batch 1: operator"):
        assert row in done.output
    document = json.loads(out.read_text())
    assert document["schema"] == "abserve.engine/1"
    assert "profile_missing" not in document
    for measured, profile in zip(document["batches"], document["profile"], strict=True):
        assert profile["batch"] == measured["batch"]
        assert profile["measured_us"] == pytest.approx(measured["call_ns"] / 1e3)
        assert profile["executions"] > 0
        assert [set(category) for category in profile["categories"]] == [{"name", "us", "share"}] * 7
        assert sum(category["us"] for category in profile["categories"]) == pytest.approx(profile["span_us"])
        assert sum(category["share"] for category in profile["categories"]) == pytest.approx(1)
        assert profile["categories"][-1]["us"] == profile["idle_us"]
        kernels = {kernel["name"]: kernel for kernel in profile["kernels"]}
        assert set(kernels["MatMul"]) == {"name", "label", "category", "count", "us", "share"}
        assert kernels["MatMul"]["category"] == "matrix products"
        assert kernels["Softmax"]["count"] == BLOCKS
        assert profile["launches"] == sum(kernel["count"] for kernel in kernels.values())


def test_the_null_engine_has_nothing_to_profile(specification: ModelSpecification) -> None:
    engine = build_engine(specification, RandomWeights(0), EngineSettings("null"))
    engine.load()
    profile = profile_engine(engine, specification, [MEASURED])
    assert profile.as_document() == {
        "profile": [],
        "profile_missing": "the null engine executes no model: there is nothing to profile",
    }
    assert shown(profile) == "no profile: the null engine executes no model: there is nothing to profile\n"
