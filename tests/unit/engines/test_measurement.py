"""The measurement on an engine whose times are known, and the command on a real one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from loadgen.entry import build
from servers.contract.tensors import Array
from servers.engines.measurement import MAX_REPEATS, P99_REPEATS, matrix_tflops, measure_engine, p99_ns
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification


class SlowEngine(NullEngine):
    """Takes 3 ms a call, of which it says that 1 ms is execution."""

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        end = time.perf_counter() + 0.003
        answer = super().infer(inputs)
        while time.perf_counter() < end:
            pass
        return answer

    def execution_ns(self, count: int, repeats: int) -> list[int]:
        return [500_000, *[1_000_000] * (repeats - 2), 50_000_000]


def test_rates_come_from_the_execution_and_the_call_is_told_too(specification: ModelSpecification) -> None:
    engine = SlowEngine(specification, EngineSettings(kind="null"))
    pictures = np.random.default_rng(0).standard_normal((3, 3, 224, 224), np.float32)
    reference = pictures.reshape(3, -1)[:, :512]
    (result,) = measure_engine(engine, specification, [4], reference, pictures, 0.05, 100.0)
    assert result.batch == 4
    assert specification.flops_per_item is not None
    assert result.execution_ns == 1_000_000
    assert result.call_ns >= 3_000_000
    assert result.call_p99_ns is None  # 0.05 s are too few calls
    assert result.images_per_second == pytest.approx(4000)
    assert result.tflops == pytest.approx(4 * specification.flops_per_item / 1e-3 / 1e12)
    assert result.share_of_matrix_product == pytest.approx(result.tflops / 100)
    assert result.cosine_to_fp32 == pytest.approx(1)
    swapped = reference[::-1].copy()
    (wrong,) = measure_engine(engine, specification, [4], swapped, pictures, 0.0, None)
    assert wrong.cosine_to_fp32 < 0.9
    assert wrong.share_of_matrix_product is None
    assert wrong.repeats >= 7


def test_the_tail_is_told_from_as_many_calls_on_as_it_takes() -> None:
    assert p99_ns(range(1, P99_REPEATS)) is None
    assert p99_ns(range(1, P99_REPEATS + 1)) == 656
    assert MAX_REPEATS >= P99_REPEATS


def test_a_matrix_product_has_a_rate() -> None:
    rate = matrix_tflops("cpu", "fp32")
    assert rate is not None
    assert 1e-4 < rate < 100


def test_the_command_measures_and_writes_everything_down(artefact_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    options = [
        "--engine",
        "onnxruntime",
        "--device",
        "cpu",
        "--batches",
        "1,2",
        "--seconds",
        "0.01",
        "--max-batch-size",
        "9",
    ]
    done = CliRunner().invoke(build(), ["engine", *options, "--artefacts", str(artefact_dir), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "onnxruntime" in done.output
    document = json.loads(out.read_text())
    assert document["schema"] == "abserve.engine/1"
    assert [row["batch"] for row in document["batches"]] == [1, 2]
    assert all(row["cosine_to_fp32"] > 0.9999 and row["execution_ns"] is None for row in document["batches"])
    assert document["engine"]["device"] == "cpu"
    assert document["engine"]["max_batch_size"] == 9
    assert "profile" not in document


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "0"], "give whole numbers from 1 up"),
        (["--batches", "two"], "give whole numbers from 1 up"),
        (["--batches", "1,8", "--max-batch-size", "4"], "--max-batch-size 4 is below 8 of --batches"),
        (["--payload", "bmp"], "unknown payload 'bmp'"),
        (["--weights", "random:x"], "the seed must be a whole number"),
        (["--weights", "laion2b_s34b_b97k"], "did you mean laion2b_s34b_b79k?"),
        (["--model", "openclip_vit_b23"], "did you mean openclip_vit_b32?"),
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


@pytest.mark.slow
def test_a_full_disk_costs_the_file_and_not_the_table() -> None:
    options = ["--engine", "null", "--device", "cpu", "--batches", "1", "--seconds", "0.01", "--json", "/dev/full"]
    done = CliRunner().invoke(build(), ["engine", *options])
    assert done.exit_code == 1
    assert "images/s" in done.output
    assert "cannot write /dev/full: No space left" in done.output
