"""The measurement on an engine whose times are known, and the command on a real one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from loadgen.entry import build
from servers.engines.batches import random_inputs
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.engines.torch.engine import TorchEngine
from servers.measuring.measurement import (
    MAX_REPEATS,
    P99_REPEATS,
    MeasuredEngine,
    Reference,
    batch_row,
    flight_rate,
    matrix_tflops,
    p99_ns,
    references_of,
)
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array, Axis, TensorSpec

Arrays = Mapping[str, Array]


class SlowEngine(NullEngine):
    """Takes 3 ms a call, of which it says that 1 ms is execution."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        end = time.perf_counter() + 0.003
        answer = super().infer(inputs)
        while time.perf_counter() < end:
            pass
        return answer

    def execution_ns(self, rows: int, repeats: int) -> list[int]:
        return [500_000, *[1_000_000] * (repeats - 2), 50_000_000]

    def run_only(self, rows: int) -> bool:
        return True


def measured(
    engine: NullEngine,
    specification: ModelSpecification,
    batches: list[int],
    references: list[Reference],
    seconds: float,
    matrix: float | None,
) -> list[SimpleNamespace]:
    driver = MeasuredEngine(engine, specification, batches)
    times = [driver.measure(batch, reference, seconds) for reference in references for batch in batches]
    return [SimpleNamespace(**batch_row(batch_times, specification, matrix)) for batch_times in times]


def test_rates_come_from_the_execution_and_the_call_is_told_too(specification: ModelSpecification) -> None:
    engine = SlowEngine(specification, EngineSettings(kind="null"))
    flops = specification.flops_per_item
    assert flops is not None
    pictures = np.random.default_rng(0).standard_normal((3, 3, 224, 224), np.float32)
    answers = {"embedding": pictures.reshape(3, -1)[:, :512]}
    reference = Reference({"pixel_values": pictures}, answers, flops)
    (result,) = measured(engine, specification, [4], [reference], 0.05, 100.0)
    assert result.batch == 4
    assert result.execution_ns == 1_000_000
    assert result.call_ns >= 3_000_000
    assert result.call_p99_ns is None  # 0.05 s are too few calls
    assert result.items_per_second == pytest.approx(4000)
    assert result.tokens_per_second is None
    assert result.tflops == pytest.approx(4 * flops / 1e-3 / 1e12)
    assert result.share_of_matrix_product == pytest.approx(4 * flops / 1e-3 / 1e12 / 100)
    assert result.cosine_to_fp32 == pytest.approx(1)
    assert (result.fault, result.relative_error_to_fp32) == (None, 0)
    swapped = Reference({"pixel_values": pictures}, {"embedding": answers["embedding"][::-1].copy()})
    (wrong,) = measured(engine, specification, [4], [swapped], 0.0, None)
    assert wrong.cosine_to_fp32 is not None
    assert wrong.cosine_to_fp32 < 0.9
    assert "embedding has a relative error" in str(wrong.fault)
    assert (wrong.tflops, wrong.share_of_matrix_product) == (None, None)
    assert wrong.repeats >= 7


def test_every_length_has_rates_of_sequences_and_of_tokens() -> None:
    specification = get_specification("transformers:distilbert-base-uncased")
    sizes = [{"sequence": 8}, {"sequence": 24}]
    references = [Reference(random_inputs(specification, 2, 0, along), None, None, along) for along in sizes]
    engine = SlowEngine(specification, EngineSettings(kind="null"))
    results = measured(engine, specification, [1, 2], references, 0.0, None)
    assert [(result.batch, result.sizes) for result in results] == [(b, s) for s in sizes for b in (1, 2)]
    for result in results:
        assert result.items_per_second == pytest.approx(1000 * result.batch)
        assert result.tokens_per_second == pytest.approx(result.items_per_second * result.sizes["sequence"])
        assert (result.fault, result.cosine_to_fp32) == (None, None)


def test_the_operations_of_a_transformer_count_although_torch_fuses_its_layers() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    specification = ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, 4, 8)),),
        outputs=(TensorSpec("y", "FP32", (-1, 4, 8)),),
        max_batch_size=4,
        load_module=lambda _source: module,
    )
    (reference,) = references_of(specification, RandomWeights(0), [{}])
    assert reference.flops_per_item == 2 * (2 * 4 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 2 * 4 * 4 * 8)


class _Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_the_reference_is_the_models_own_answer_with_its_operations_counted() -> None:
    module = _Product().eval().requires_grad_(False)
    specification = ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("x", "FP32", (-1, -1, 16)),),
        outputs=(TensorSpec("y", "FP32", (-1, -1, 4)),),
        axes=(Axis("frames", 3, 9, {"x": 1, "y": 1}),),
        max_batch_size=4,
        load_module=lambda _source: module,
    )
    short, long = references_of(specification, RandomWeights(0), [{"frames": 3}, {"frames": 9}])
    assert (short.flops_per_item, long.flops_per_item) == (3 * 16 * 4 * 2, 9 * 16 * 4 * 2)
    assert long.answers is not None
    np.testing.assert_array_equal(long.answers["y"], module(torch.from_numpy(long.inputs["x"])).numpy())
    without = replace(specification, file=Path("model.onnx"))
    (unknown,) = references_of(without, RandomWeights(0), [{"frames": 3}])
    assert (unknown.answers, unknown.flops_per_item) == (None, None)


def test_the_tail_is_told_from_as_many_calls_on_as_it_takes() -> None:
    assert p99_ns(range(1, P99_REPEATS)) is None
    assert p99_ns(range(1, P99_REPEATS + 1)) == 656
    assert MAX_REPEATS >= P99_REPEATS


def test_a_matrix_product_has_a_rate() -> None:
    rate = matrix_tflops("cpu", "fp32")
    assert rate is not None
    assert 1e-4 < rate < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "0"], "give whole numbers from 1 up"),
        (["--batches", "two"], "give whole numbers from 1 up"),
        (["--batches", "1,8", "--max-batch-size", "4"], "--max-batch-size 4 is below 8 of --batches"),
        (["--sequence-length", "8"], "openclip_vit_b32 has no axis of variable size"),
        (["--model", "transformers:bert-base-uncased", "--sequence-length", "600"], "takes at most 512"),
        (["--model", "transformers:bert-base-uncased", "--sequence-length", "long"], "whole numbers from 1 up"),
        (
            ["--model", "transformers:bert-base-uncased", "--sequence-length", "8,9", "--profile"],
            "--profile takes one --sequence-length",
        ),
        (["--payload", "bmp"], "unknown payload 'bmp'"),
        (["--weights", "random:x"], "the seed must be a whole number"),
        (["--weights", "laion2b_s34b_b97k"], "did you mean laion2b_s34b_b79k?"),
        (["--model", "openclip_vit_b23"], "did you mean openclip_vit_b32 or "),
        (["--payload", "jpeg"], "use openclip_vit_b32_uint8 instead"),
        (["--engine", "onnx"], "did you mean onnxruntime?"),
        (["--engine", "onnxruntime", "--precision", "tf32"], "does not offer precision tf32 on cpu"),
        (["--engine", "tensorrt", "--precision", "fp16"], "does not run on cpu; use --device cuda"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_written(options: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(build(), ["engine", "--device", "cpu", "--artefacts", str(tmp_path), *options])
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "1,x"], "--batches 1,x: give whole numbers from 1 up"),
        (["--engine", "onnxruntime"], "no engine 'onnxruntime' generates tokens"),
        (["--precision", "int8"], "precision 'int8' is not offered for language models"),
        (["--seconds", "2"], "--seconds has no effect on a language model"),
        (["--max-batch-size", "8"], "--max-batch-size has no effect on a language model"),
        (["--profile"], "--profile has no effect on a language model"),
    ],
)
def test_a_mistake_about_a_language_model_is_one_sentence(options: list[str], message: str) -> None:
    done = CliRunner().invoke(build(), ["engine", "--model", "language:tiny", "--device", "cpu", *options])
    assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
    assert message in done.output


def test_requests_without_elements_fly_too(specification: ModelSpecification) -> None:
    class TwoFlights(NullEngine):
        flights = 2

    inputs = (TensorSpec("empty", "INT64", (-1, 0)), TensorSpec("full", "FP32", (-1, 2)))
    outputs = (TensorSpec("y", "FP32", (-1, 1)),)
    model = replace(specification, inputs=inputs, outputs=outputs, kinds={}, image=None)
    engine = TwoFlights(model, EngineSettings("null", device="cpu"))
    rate = flight_rate(engine, model, 2, {}, 0.0)
    assert rate is not None
    assert rate.items_per_second > 0


def test_wrong_answers_end_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = TorchEngine.infer

    def doubled(engine: TorchEngine, inputs: Arrays) -> Arrays:
        """The engine's answers with a fault planted at batch 2."""
        return {name: np.multiply(array, len(array)) for name, array in right(engine, inputs).items()}

    monkeypatch.setattr(TorchEngine, "infer", doubled)
    module = tmp_path / "mine.py"
    module.write_text(
        "import torch\nfrom servers.models import Input, Output, UserModel\n\n"
        "def build():\n    return UserModel(torch.nn.Linear(4, 3), [Input('x', 'FP32', ('batch', 4))], "
        "[Output('y', 'FP32', ('batch', 3))])\n"
    )
    options = ["--model", f"{module}:build", "--device", "cpu", "--batches", "1,2", "--seconds", "0.01"]
    out = tmp_path / "engine.json"
    done = CliRunner().invoke(build(), ["engine", *options, "--json", str(out)])
    assert done.exit_code == 1
    assert "profile" not in json.loads(out.read_text())
    assert "WRONG ANSWERS at batch 2" in done.output
    assert "WRONG ANSWERS at batch 1" not in done.output


@pytest.mark.slow
def test_a_full_disk_costs_the_file_and_not_the_table() -> None:
    options = ["--engine", "null", "--device", "cpu", "--batches", "1", "--seconds", "0.01", "--json", "/dev/full"]
    done = CliRunner().invoke(build(), ["engine", *options])
    assert done.exit_code == 1
    assert "images/s" in done.output
    assert "cannot write /dev/full: No space left" in done.output
