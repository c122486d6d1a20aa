"""The jax engine and the way back to ONNX, in the environment that has JAX: `make test-engines`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from servers.engines.batches import random_inputs
from servers.engines.factory import build_engine
from servers.engines.interface import Engine, EngineError
from servers.engines.settings import EngineSettings
from servers.engines.torch.forms import expected_answers
from servers.export.artefacts import ensure_artefact, executed_file, find_artefact
from servers.export.manifest import JAX, ExportError, FileForm, executed_form
from servers.models.registry import get_variant
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array
from tests.scripted_trtexec import ScriptedTrtexec

pytest.importorskip("jax", reason="JAX is not installed in this environment; run: make test-engines")

WEIGHTS = RandomWeights(0)
THREADS = 2
MODELS = """
import torch
from servers.models import Input, Output, UserModel


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.score = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3)

    def forward(self, ids, mask):
        weights = mask.unsqueeze(2).to(self.score.weight.dtype)
        return self.score((self.embed(ids) * weights).sum(1) / weights.sum(1))


class Tokens(Scorer):
    def forward(self, ids, mask):
        return self.score(self.embed(ids)) * mask.unsqueeze(2), mask


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3)

    def forward(self, pixels):
        return torch.nn.functional.max_pool2d(self.convolution(pixels), 3, 2, 1).mean((2, 3))


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(4, 2)

    def forward(self, values, counts):
        return self.score(values), counts + 1


class NotTraceable(Counted):
    def forward(self, values, counts):
        return self.score(values) if values.sum() > 0 else -self.score(values), counts


def _sequences(module, outputs):
    shape, sizes = ("batch", "sequence"), {"sequence": (12, 40)}
    ids = Input("ids", "INT64", shape, values=(1, 50), padding=0)
    mask = Input("mask", "INT64", shape, values=(1, 2), padding=0)
    return UserModel(module, [ids, mask], outputs, sizes)


def scorer():
    return _sequences(Scorer(), [Output("scores", "FP32", ("batch", 3), "logits")])


def tokens():
    outputs = [Output("values", "FP32", ("batch", "sequence", 3)), Output("kept", "INT64", ("batch", "sequence"))]
    return _sequences(Tokens(), outputs)


def pooled():
    pixels = Input("pixels", "FP32", ("batch", 3, 12, 12))
    return UserModel(Pooled(), [pixels], [Output("features", "FP32", ("batch", 4))])


def _counted(module):
    inputs = [Input("values", "FP32", ("batch", 4)), Input("counts", "INT64", ("batch", 1), values=(0, 9))]
    outputs = [Output("scores", "FP32", ("batch", 2)), Output("more", "INT64", ("batch", 1))]
    return UserModel(module, inputs, outputs)


def counted():
    return _counted(Counted())


def not_traceable():
    return _counted(NotTraceable())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


def variant(models: Path, name: str) -> ModelSpecification:
    return get_variant(f"{models}:{name}", "")


def loaded(specification: ModelSpecification, **settings: object) -> Engine:
    given = EngineSettings(kind="jax", device="cpu", threads=THREADS, max_batch_size=8, **settings)  # type: ignore[arg-type]
    engine = build_engine(specification, WEIGHTS, given)
    engine.load()
    return engine


def own_answers(specification: ModelSpecification, inputs: Mapping[str, Array]) -> dict[str, Array]:
    return partial(expected_answers, specification, specification.load_module(WEIGHTS))(inputs)


def close(answer: Array, expected: Array) -> None:
    np.testing.assert_allclose(answer.astype(np.float64), expected.astype(np.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["scorer", "tokens", "pooled", "counted"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_answers_are_the_models_own_in_every_shape(models: Path, name: str, rows: int) -> None:
    specification = variant(models, name)
    engine = loaded(specification)
    for length in (1, 12, 40) if specification.axes else (None,):
        inputs = random_inputs(specification, rows, rows, specification.along(length))
        kept = {one: array.copy() for one, array in inputs.items()}
        expected, answers = own_answers(specification, inputs), engine.infer(inputs)
        for tensor in specification.outputs:
            answer = answers[tensor.name]
            assert answer.dtype == tensor.dtype
            close(answer, expected[tensor.name])
            assert answer.flags.owndata
            assert answer.flags.writeable
            answer[...] = 7  # the caller's own: neither the inputs nor a later answer change with it
        again = engine.infer(inputs)
        for tensor in specification.outputs:
            close(again[tensor.name], expected[tensor.name])
        for one, array in inputs.items():
            np.testing.assert_array_equal(array, kept[one])


def test_warm_up_leaves_nothing_to_compile(models: Path) -> None:
    engine = loaded(variant(models, "scorer"), pad_to=(16, 32), buckets=(2, 6))
    engine.warm_up([1, 2, 6])
    compiled = engine.describe().details["compile_seconds"]
    assert isinstance(compiled, dict)
    assert {"2×16 2×16", "2×32 2×32", "6×16 6×16", "6×32 6×32"} <= compiled.keys()
    for rows, length in ((1, 5), (2, 16), (5, 32)):
        specification = variant(models, "scorer")
        engine.infer(random_inputs(specification, rows, 0, specification.along(length)))
    assert engine.describe().details["compile_seconds"] == compiled
    assert [engine.executed_rows(rows) for rows in (1, 2, 3, 7)] == [2, 2, 6, 8]


def test_the_description_is_read_back(models: Path) -> None:
    engine = loaded(variant(models, "pooled"))
    described = engine.describe()
    assert (described.kind, described.precision, described.mode, described.device) == ("jax", "fp32", "jit", "cpu")
    assert described.threads == THREADS
    assert described.details["products"] == ["HIGHEST"]
    assert described.details["parameters"] == 4 * 3 * 9 + 4
    assert described.details["buckets"] == [1, 2, 4, 8]


def test_executions_are_timed_without_copies(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = variant(models, "tokens")
    engine = loaded(specification)
    assert engine.execution_ns(5, 2) is None
    engine.infer(random_inputs(specification, 5, 0))
    times = engine.execution_ns(5, 3)
    assert times is not None
    assert len(times) == 3
    assert min(times) > 0

    def drawn(*_: object) -> None:
        raise AssertionError("inputs are drawn and copied again")

    monkeypatch.setattr("servers.engines.jax_engine.random_inputs", drawn)
    assert engine.run_only(5)  # the energy of such runs is measured


def test_another_number_of_threads_is_refused_once_jax_runs(models: Path) -> None:
    loaded(variant(models, "counted"))
    given = EngineSettings(kind="jax", device="cpu", threads=THREADS + 1)
    with pytest.raises(EngineError, match=rf"threads {THREADS + 1}: JAX has already started with {THREADS}"):
        build_engine(variant(models, "counted"), WEIGHTS, given).load()


def test_threads_are_those_of_a_fresh_process(models: Path) -> None:
    program = (
        "from servers.engines.jax_engine import cpu_threads, start_jax\nassert cpu_threads() == 0\n"
        "start_jax('cpu', 1)\nprint(cpu_threads())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_what_jax_cannot_do_is_one_sentence(models: Path) -> None:
    with pytest.raises(EngineError, match=r"JAX cannot execute .*; use --engine torch$") as caught:
        loaded(variant(models, "not_traceable"))
    assert "\n" not in str(caught.value)
    specification = variant(models, "counted")
    engine = loaded(specification)
    inputs = {**random_inputs(specification, 1, 0), "counts": np.array([[2**40]])}
    with pytest.raises(EngineError, match="counts has values beyond 32 bits"):
        engine.infer(inputs)
    assert engine.checks_values
    with pytest.raises(InvalidRequestError, match="counts has values beyond 32 bits"):
        engine.check_values(inputs)
    engine.check_values({**inputs, "counts": np.array([[2**31 - 1], [-(2**31)]])})


@pytest.mark.parametrize("name", ["pooled", "counted"])
def test_the_way_back_to_onnx_keeps_the_answers(models: Path, name: str, tmp_path: Path) -> None:
    specification = variant(models, name)
    form = executed_form("onnxruntime-jax", "fp32")
    assert form == FileForm("fp32", JAX)
    made = ensure_artefact(specification, WEIGHTS, tmp_path, form=form)
    assert (made.manifest.operators, made.manifest.opset) == ("jax", 18)
    assert {"jax", "torchax", "jax2onnx"} <= made.manifest.versions.keys()
    assert made.path.parent.name.endswith("-jax")
    found = find_artefact(tmp_path, specification, WEIGHTS, form)
    assert found is not None
    assert found.manifest == made.manifest
    settings = EngineSettings(kind="onnxruntime-jax", device="cpu", threads=1)
    engine = build_engine(specification, WEIGHTS, settings, made.path)
    engine.load()
    inputs = random_inputs(specification, 5, 3)
    expected = own_answers(specification, inputs)
    for output, answer in engine.infer(inputs).items():
        close(answer, expected[output])
    assert engine.describe().kind == "onnxruntime-jax"


def test_tensorrt_gets_a_plan_of_the_jax_file(models: Path, tmp_path: Path, trtexec: ScriptedTrtexec) -> None:
    def plan(engine: str) -> Path:
        return executed_file(engine, "fp32", variant(models, "pooled"), WEIGHTS, tmp_path, release="10.13.3")[0]

    of_jax = plan("tensorrt-jax")
    assert "-jax/model.onnx" in of_jax.read_text()
    assert plan("tensorrt") != of_jax
    assert trtexec.built == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("scorer", "only its batch could have any size, and ids"), ("not_traceable", "jax2onnx cannot export")],
)
def test_a_model_without_a_way_back_is_refused(models: Path, name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"{words}.*; use --operators standard$"):
        ensure_artefact(variant(models, name), WEIGHTS, tmp_path, form=FileForm("fp32", JAX))
