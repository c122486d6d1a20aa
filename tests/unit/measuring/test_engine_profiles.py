"""`abserve engine` on the real model, profiles by both profilers on a CPU, the table and the file, and refusals."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from loadgen.entry import build
from servers.engines.agreement import Disagreement
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineDescription, EngineError
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.measuring import profile as profile_module
from servers.measuring.measurement import EngineTimes, Reference
from servers.measuring.profile import (
    CATEGORIES,
    KernelLaunch,
    ProfileTotals,
    profile_engine,
    show_profile,
    summarised,
)
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import TensorSpec

MEASURED = EngineTimes(1, Reference({}, None), Disagreement({}), 60_000_000, [50_000_000], None)
BLOCKS = 12
"""Of the real model."""


def shown(profiles: list[dict[str, Any]] | str, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_profile(console, profiles)
    return console.file.getvalue()  # type: ignore[attr-defined]


def profiled(engine: Engine, specification: ModelSpecification, measured: list[EngineTimes]) -> list[dict[str, Any]]:
    profiles = profile_engine(engine, specification, measured)
    assert not isinstance(profiles, str), profiles
    return profiles


class Transformer(torch.nn.Module):
    """Two blocks of a transformer, in torch's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(32) for _ in range(2))
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(2))
        self.mlps = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, qkv, mlp in zip(self.norms, self.qkv, self.mlps, strict=True):
            parts = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, dim=-1))
            mixed = torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            x = x + torch.nn.functional.gelu(mlp(mixed))
        return x


def test_torchs_operators() -> None:
    specification = ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, 16, 32)),),
        outputs=(TensorSpec("y", "FP32", (-1, 16, 32)),),
        max_batch_size=4,
        load_module=lambda _: Transformer().eval().requires_grad_(False),
    )
    engine = build_engine(specification, RandomWeights(0), EngineSettings("torch", device="cpu"))
    engine.load()
    try:
        profiles = profiled(engine, specification, [MEASURED])
    finally:
        engine.close()
    (batch,) = profiles
    assert (batch["batch"], batch["measured_us"], batch["with_copies"]) == (1, 50_000.0, False)
    assert [category["name"] for category in batch["categories"]] == [*CATEGORIES, "outside operators"]
    assert sum(category["share"] for category in batch["categories"]) == pytest.approx(1)
    counts = {kernel["name"]: kernel["count"] for kernel in batch["kernels"]}
    assert (counts["aten::native_layer_norm"], counts["aten::gelu"]) == (2, 2)
    times = {category["name"]: category["us"] for category in batch["categories"]}
    assert min(times[name] for name in CATEGORIES[:5]) > 0
    table = shown(profiles)
    assert "aten::addmm" in table
    assert "50,000.0" in table


@pytest.mark.slow  # by default smaller models below and above
def test_the_command_measures_the_real_model_and_writes_everything_down(artefact_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    options = ["--engine", "onnxruntime", "--device", "cpu", "--batches", "1,2", "--seconds", "0.01", "--profile"]
    options += ["--max-batch-size", "9", "--artefacts", str(artefact_dir), "--json", str(out)]
    done = CliRunner().invoke(build(), ["engine", *options])
    assert done.exit_code == 0, done.output
    for row in (*CATEGORIES, "outside operators", "measured without it", "batch 1: operator"):
        assert row in done.output
    document = json.loads(out.read_text())
    assert document["schema"] == "abserve.engine/2"
    assert (document["engine"]["device"], document["engine"]["max_batch_size"]) == ("cpu", 9)
    assert [row["batch"] for row in document["batches"]] == [1, 2]
    assert all(row["cosine_to_fp32"] > 0.9999 and row["execution_ns"] is None for row in document["batches"])
    assert all(row["fault"] is None and row["relative_error_to_fp32"] < 1e-4 for row in document["batches"])
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
        assert kernels["Attention"]["count"] == BLOCKS
        assert profile["launches"] == sum(kernel["count"] for kernel in kernels.values())


def test_the_null_engine_has_nothing_to_profile(tmp_path: Path) -> None:
    module, out = tmp_path / "mine.py", tmp_path / "engine.json"
    module.write_text(
        "import torch\nfrom servers.models import Input, Output, UserModel\n\n"
        "def build():\n    return UserModel(torch.nn.Linear(4, 3), [Input('x', 'FP32', ('batch', 4))], "
        "[Output('y', 'FP32', ('batch', 3))])\n"
    )
    options = ["--engine", "null", "--device", "cpu", "--batches", "1", "--seconds", "0.01", "--profile"]
    done = CliRunner().invoke(build(), ["engine", "--model", f"{module}:build", *options, "--json", str(out)])
    assert done.exit_code == 0, done.output
    reason = "there is no profiler for the null engine on a CPU"
    assert f"no profile: {reason}\n" in done.output
    document = json.loads(out.read_text())
    assert (document["profile"], document["profile_missing"]) == ([], reason)


class GraphEngine(NullEngine):
    """Says that it is on a GPU, executes batches up to 4 without copies, and remembers what it last executed."""

    executed: tuple[str, int]

    def describe(self) -> EngineDescription:
        return replace(super().describe(), kind="onnxruntime", device="cuda:1")

    def execution_ns(self, rows: int, repeats: int) -> None:
        raise NotImplementedError

    def run_only(self, rows: int) -> bool:
        self.executed = ("run_only", rows)
        return rows <= 4

    def infer(self, inputs):
        answer = super().infer(inputs)
        self.executed = ("infer", len(answer["embedding"]))
        return answer


def test_each_batch_gets_the_launches_of_its_own_executions(
    specification: ModelSpecification, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GraphEngine(specification, EngineSettings("null"))

    def launched(executions: Sequence[Callable[[], object]], on: str) -> list[list[KernelLaunch]]:
        """Stands for CUPTI: a batch of n is a product of n µs, 1 µs of nothing and, by `infer`, a copy of 1 µs."""
        assert on == "cuda:1"
        groups = []
        for execute in executions:
            execute()
            by, rows = engine.executed
            end_ns = rows * 1000
            copies = [KernelLaunch("Memcpy DtoH (Device -> Pinned)", end_ns + 1000, end_ns + 2000)] * (by == "infer")
            fill = [KernelLaunch("Memset (Device)", end_ns + 1000, end_ns + 1000)]
            groups.append([KernelLaunch("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", 0, end_ns), *fill, *copies])
        return groups

    monkeypatch.setattr(profile_module, "device_launches", launched)
    measured = [replace(MEASURED, batch=batch, executions_ns=None if batch == 8 else [3000]) for batch in (2, 8)]
    small, large = profiled(engine, specification, measured)
    assert (small["batch"], small["with_copies"], small["measured_us"], small["span_us"], small["idle_us"]) == (
        2,
        False,
        3.0,
        3.0,
        1.0,
    )
    assert (large["batch"], large["with_copies"], large["measured_us"], large["span_us"]) == (8, True, 50_000.0, 10.0)
    assert [kernel["count"] for kernel in large["kernels"]] == [1, 1, 1]
    assert small["categories"][-1]["name"] == "idle between kernels"
    table = shown([small, large], width=60)
    assert "copies from and to the host included" in " ".join(table.split())
    assert "2.0 (67%)" in table
    assert "8.0 (80%)" in table

    def nothing(executions: Sequence[Callable[[], object]], on: str) -> list[list[KernelLaunch]]:
        raise EngineError("torch's profiler reports no kernel")

    monkeypatch.setattr(profile_module, "device_launches", nothing)
    assert profile_engine(engine, specification, measured) == "torch's profiler reports no kernel"


def test_no_figure_is_cut_on_a_narrow_terminal() -> None:
    kernel = "cutlass_80_tensorop_f16_s16816gemm_relu_f16_64x64_64x6_tn_align8"
    totals = ProfileTotals(Counter({kernel: 20}), {kernel: 4e7}, 5e7)
    batches = [summarised(totals, batch, measured_us=2222.2, on_device=True) for batch in (1, 2, 4, 8, 16, 32, 64, 128)]
    table = shown(batches, width=80)
    assert table.count("2,000.0 (80%)") == len(batches)
    assert table.count("2,222.2") == len(batches)
    assert "…" not in table


@pytest.mark.slow
def test_torchs_profiler_reports_no_error_on_a_machine_without_a_gpu() -> None:
    options = ["--engine", "torch", "--device", "cpu", "--batches", "1", "--seconds", "0.01", "--profile"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-m", "loadgen.entry", "engine", *options],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "error" not in done.stderr.lower()
