"""Models of any signature on the CPU: datatypes, several inputs and outputs, dynamic axes, padded buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from servers.engines.agreement import proof_batch
from servers.engines.batches import Bucket, axis_buckets, executed_mode, has_buckets, random_inputs
from servers.engines.interface import Engine, EngineError
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.engines.torch.engine import TorchEngine
from servers.engines.torch.forms import ModelForm, expected_answers, plain_form
from servers.engines.torch.runner import Enqueue, GraphRunner
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import DATATYPES, Axis, TensorSpec
from tests.host_copies import HostCopies, graph_mode_on_cpu

CPU = torch.device("cpu")
WIDTH = 8


class Encoder(torch.nn.Module):
    """A mean over the tokens that the mask keeps, added to each token; the labels are integers."""

    def __init__(self, *, heeds_mask: bool = True) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, WIDTH)
        self.heeds_mask = heeds_mask

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.table(ids)
        kept = mask.unsqueeze(-1).to(tokens.dtype) if self.heeds_mask else torch.ones_like(tokens[..., :1])
        mean = (tokens * kept).sum(1) / kept.sum(1)
        return tokens + mean.unsqueeze(1), mean.argmax(1)


def specification_of(module: Callable[[], torch.nn.Module], **fields: Any) -> ModelSpecification:
    def load(_source: object) -> torch.nn.Module:
        torch.manual_seed(0)
        return module().eval().requires_grad_(False)

    return ModelSpecification(name="m", title="m", version="1", max_batch_size=4, load_module=load, **fields)


def encoder(*, padding: Mapping[str, int] | None = None, **options: bool) -> ModelSpecification:
    return specification_of(
        partial(Encoder, **options),
        inputs=(TensorSpec("ids", "INT64", (-1, -1)), TensorSpec("mask", "INT32", (-1, -1))),
        outputs=(TensorSpec("hidden", "FP32", (-1, -1, WIDTH)), TensorSpec("label", "INT64", (-1,))),
        kinds={"label": "labels"},
        axes=(
            Axis("sequence", 20, 48, {"ids": 1, "mask": 1, "hidden": 1}, {"ids": 0, "mask": 0})
            if padding is None
            else Axis("sequence", 20, 48, {"ids": 1, "mask": 1, "hidden": 1}, padding),
        ),
        make_items=token_items,
    )


def token_items(seed: int, lengths: Any) -> dict[str, np.ndarray]:
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int32)
    return {"ids": np.random.default_rng(seed).integers(1, 50, mask.shape) * mask, "mask": mask}


def loaded(specification: ModelSpecification, mode: str = "eager", **options: Any) -> TorchEngine:
    options = {"mode": mode, "device": "cpu", "max_batch_size": 4, **options}
    engine = TorchEngine(specification, EngineSettings("torch", **options), RandomWeights(0))
    engine.load()
    return engine


@pytest.fixture
def graph_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TorchEngine]]:
    """Torch engines in mode graph on the CPU, where a bucket's function takes the place of its graph."""
    graph_mode_on_cpu(monkeypatch)
    engines: list[Engine] = []

    def load(specification: ModelSpecification, **options: Any) -> TorchEngine:
        engine = loaded(specification, "graph", **options)
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


def alone(specification: ModelSpecification, inputs: Any) -> dict[str, Any]:
    return expected_answers(specification, specification.load_module(RandomWeights(0)), inputs)


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_several_inputs_and_outputs_of_any_length(mode: str) -> None:
    specification = encoder()
    engine = loaded(specification, mode)
    for rows, size in ((1, 1), (4, 48), (3, 7)):
        inputs = token_items(rows, [size, *[max(1, size // 2)] * (rows - 1)])
        answers: Any = engine.infer(inputs)
        expected = alone(specification, inputs)
        np.testing.assert_allclose(answers["hidden"], expected["hidden"], atol=1e-6)
        np.testing.assert_array_equal(answers["label"], expected["label"])
        assert (answers["hidden"].dtype, answers["label"].dtype) == (np.float32, np.int64)
    with pytest.raises(ValueError, match="ids has sequence 49, more than the largest, 48"):
        engine.infer(token_items(0, [49]))
    engine.close()


class _Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_goes_in_and_comes_out(datatype: str) -> None:
    specification = specification_of(
        _Same, inputs=(TensorSpec("x", datatype, (-1, 5)),), outputs=(TensorSpec("y", datatype, (-1, 5)),)
    )
    engine = loaded(specification)
    given = random_inputs(specification, 3, 4)["x"]
    answer = engine.infer({"x": given})["y"]
    assert answer.dtype == DATATYPES[datatype]
    np.testing.assert_array_equal(answer, given)
    answer[...] = 0
    assert given.any(), "the answer shares the caller's memory"
    engine.close()


def test_bytes_are_refused_in_a_sentence() -> None:
    text = (TensorSpec("text", "BYTES", (-1, 1)),)
    with pytest.raises(EngineError, match="m: torch has no datatype for text, BYTES"):
        loaded(specification_of(_Same, inputs=text, outputs=text))


class _Constant(torch.nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        doubled = x * 2
        return self.table.expand(len(x), 2), doubled, doubled


def test_answers_never_share_memory_with_the_model_or_each_other() -> None:
    outputs = tuple(TensorSpec(name, "FP32", (-1, 2)) for name in "abc")
    engine = loaded(specification_of(_Constant, inputs=(TensorSpec("x", "FP32", (-1, 2)),), outputs=outputs))
    given = {"x": np.ones((1, 2), np.float32)}
    first: Any = engine.infer(given)
    for array in first.values():
        assert not any(np.shares_memory(array, other) for other in (given["x"], *first.values()) if other is not array)
        array[...] = 9
    assert [float(array[0, 0]) for array in engine.infer(given).values()] == [1, 2, 2]
    engine.close()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((TensorSpec("a", "FP32", (-1, 2)),), "returns 3 outputs, expected 1"),
        (tuple(TensorSpec(n, "FP32", (-1, 3)) for n in "abc"), r"returns a as float32 \[1, 2\], .* FP32 \[-1, 3\]"),
        (tuple(TensorSpec(n, "INT64", (-1, 2)) for n in "abc"), "returns a as float32 .* the specification says INT64"),
    ],
)
def test_a_module_that_is_not_its_specification_is_refused(outputs: Any, message: str) -> None:
    specification = specification_of(_Constant, inputs=(TensorSpec("x", "FP32", (-1, 2)),), outputs=outputs)
    with pytest.raises(EngineError, match=message):
        loaded(specification, max_batch_size=1)


def test_padding_that_changes_answers_is_found_at_load() -> None:
    with pytest.raises(EngineError, match=r"does not compute the model: .*; check the padding values of its axis"):
        loaded(encoder(heeds_mask=False))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the first input that the model has executed."""
    call, shapes = ModelForm.call, list[tuple[int, ...]]()

    def recorded(tower: ModelForm, inputs: Any) -> Any:
        shapes.append(tuple(inputs[0].shape))
        return call(tower, inputs)

    monkeypatch.setattr(ModelForm, "call", recorded)
    return shapes


def test_every_length_is_answered_from_a_padded_bucket(
    graph_engine: Callable[..., TorchEngine], executed: list[tuple[int, int]]
) -> None:
    specification = encoder()
    engine = graph_engine(specification)
    for rows, size in ((1, 1), (3, 17), (4, 48), (3, 32), (2, 5)):
        inputs = token_items(size, [size, *[max(1, size // 2)] * (rows - 1)])
        answers: Any = engine.infer(inputs)
        expected = alone(specification, inputs)
        np.testing.assert_allclose(answers["hidden"], expected["hidden"], atol=1e-6)
        np.testing.assert_array_equal(answers["label"], expected["label"])
        kept = {name: array.copy() for name, array in answers.items()}
        engine.infer(token_items(99, [48] * 4))
        for name, array in kept.items():
            np.testing.assert_array_equal(answers[name], array)
    assert {size for _, size in executed} == {16, 32, 48}
    assert {rows for rows, _ in executed} == {1, 2, 4}
    details = engine.describe().details
    assert (details["buckets"], details["sequence_buckets"]) == ([1, 2, 4], [16, 32, 48])
    assert details["captured_graphs"] == 9
    for inputs in (token_items(0, [49]), token_items(0, [3] * 5)):
        with pytest.raises(ValueError, match=r"more than the largest, 48|largest bucket, 4"):
            engine.infer(inputs)


def test_the_given_sizes_are_prepared_and_longer_ones_on_demand(
    graph_engine: Callable[..., TorchEngine], executed: list[tuple[int, int]]
) -> None:
    engine = graph_engine(encoder(), pad_to=(10, 24))
    assert engine.describe().details["sequence_buckets"] == [10, 24, 32, 48]
    assert engine.describe().details["captured_graphs"] == 6
    engine.warm_up([1, 2, 4])
    assert engine.describe().details["captured_graphs"] == 6
    executed.clear()
    engine.infer(token_items(0, [30]))
    assert engine.describe().details["captured_graphs"] == 7
    assert set(executed) == {(1, 32)}


def test_a_server_s_engine_prepares_nothing_while_others_wait(
    graph_engine: Callable[..., TorchEngine], executed: list[tuple[int, int]]
) -> None:
    """Shorter requests take the smallest prepared length that holds them, longer ones are refused."""
    specification = encoder()
    engine = graph_engine(specification, pad_to=(10, 24))
    engine.infer(token_items(0, [30]))  # one bucket of a length whose others are not prepared
    engine.prepare_no_more()
    captured = engine.describe().details["captured_graphs"]
    executed.clear()
    for length, bucket in ((3, 10), (10, 10), (11, 24), (24, 24)):
        inputs = token_items(length, [length])
        answers: Any = engine.infer(inputs)
        np.testing.assert_allclose(answers["hidden"], alone(specification, inputs)["hidden"], atol=1e-6)
        assert executed.pop() == (1, bucket)
    for length in (25, 30, 48):
        with pytest.raises(InvalidRequestError, match=rf"up to 24, the request has {length}.*--pad-to 10,24,{length}$"):
            engine.infer(token_items(0, [length]))
    assert engine.describe().details["captured_graphs"] == captured


def test_a_cpu_is_warm_after_one_and_two_items_and_each_length_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(encoder(), pad_to=(10, 24))
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(engine, "infer", lambda inputs: shapes.append(inputs["ids"].shape))
    engine.warm_up([1, 2, 4])
    assert sorted(shapes) == [(1, 10), (1, 24), (2, 10)]


def test_wrong_graphs_are_refused_at_load(
    graph_engine: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = ModelForm.build

    def scaled(tower: Any, bucket: Bucket) -> Enqueue:
        enqueue = build(tower, bucket)

        def run(inputs: Any, outputs: Any) -> None:
            enqueue(inputs, outputs)
            outputs[0].mul_(100)

        return run

    monkeypatch.setattr(ModelForm, "build", scaled)
    with pytest.raises(EngineError, match="does not compute the model: hidden has a relative error of 99"):
        graph_engine(encoder())


def test_an_axis_that_cannot_be_padded_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    specification = encoder(padding={})
    assert has_buckets(encoder())
    assert not has_buckets(specification)
    with pytest.raises(EngineError, match=r"mode graph: m has dimensions .* cannot be padded.*; use mode eager"):
        executed_mode(specification, EngineSettings("torch", mode="graph"), "cuda")
    graph_mode_on_cpu(monkeypatch)
    automatic = TorchEngine(specification, EngineSettings("torch", "fp32", device="cpu"), RandomWeights(0))
    automatic.load()
    assert automatic.describe().mode == "eager"
    assert "cannot be padded" in str(automatic.describe().details["mode_reason"])


def test_a_runner_executes_with_and_without_graphs() -> None:
    specification = specification_of(
        lambda: torch.nn.Linear(3, 2),
        inputs=(TensorSpec("x", "FP32", (-1, 3)),),
        outputs=(TensorSpec("y", "FP32", (-1, 2)),),
    )
    tower = plain_form(specification.load_module(RandomWeights(0)), specification, CPU, torch.float32)
    for runner in (
        GraphRunner(specification, CPU, (1, 2, 4), build=tower.build, copies=HostCopies()),
        GraphRunner(specification, CPU, (1, 2, 4), call=tower.call, copies=HostCopies()),
    ):
        infer: Any = runner.infer
        given: Any = random_inputs(specification, 3, 0)
        expected = alone(specification, given)["y"]
        np.testing.assert_allclose(infer(given)["y"], expected)
        assert runner.has_executed(3)
        assert not runner.has_executed(2)


def test_axis_buckets() -> None:
    axis = Axis("sequence", 128, 512, {})
    assert axis_buckets(axis) == (16, 32, 64, 128, 256, 512)
    assert axis_buckets(axis, (100, 200)) == (100, 200, 256, 512)
    assert axis_buckets(axis, (64, 512, 1024)) == (64, 512)
    assert axis_buckets(axis, (32, 100, 384), only=True) == (32, 100, 384)
    assert axis_buckets(axis, (32,), only=True) == (32, 64, 128)  # the default's is compared with the module
    assert axis_buckets(Axis("sequence", 5, 9, {})) == (9,)


def test_a_proof_answers_each_item_alone() -> None:
    specification = encoder()
    proof = proof_batch(specification, 3, 1)
    seen: list[int] = []

    def answer(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        seen.append(inputs["ids"].shape[1])
        assert inputs["mask"].all()
        return alone(specification, inputs)

    expected: Any = proof.expected(answer)
    assert seen == list(proof.lengths) == [20, 13, 6]
    cleared: Any = proof.without_padding(alone(specification, proof.inputs))
    np.testing.assert_allclose(cleared["hidden"], expected["hidden"], atol=1e-6)
    assert not cleared["hidden"][2, 6:].any()


def test_the_null_engine_answers_any_signature() -> None:
    engine = NullEngine(encoder(), EngineSettings("null"))
    given = token_items(0, [7, 7])
    answers: Any = engine.infer(given)
    assert (answers["hidden"].shape, answers["label"].shape) == ((2, 7, WIDTH), (2,))
    np.testing.assert_array_equal(answers["label"], given["ids"][:, 0])
    np.testing.assert_array_equal(answers["hidden"].reshape(2, -1)[:, :7], given["ids"])
    text = specification_of(
        _Same,
        inputs=(TensorSpec("text", "BYTES", (-1, 1)),),
        outputs=(TensorSpec("score", "FP32", (-1, 2)), TensorSpec("echo", "BYTES", (-1, 1))),
    )
    first, second = (
        NullEngine(text, EngineSettings("null")).infer({"text": np.array([[one], [b"b"]], object)})
        for one in (b"a", b"c")
    )
    assert first["score"].shape == (2, 2)
    assert first["score"][0, 0] != second["score"][0, 0]
    assert first["score"][1, 0] == second["score"][1, 0]
    assert isinstance(first["echo"][0, 0], bytes)


def test_a_dimension_that_is_no_axis_counts_as_one_in_a_row_s_bytes() -> None:
    inputs = (TensorSpec("x", "FP32", (-1, -1, 3)), TensorSpec("ids", "INT64", (-1, -1)))
    fields: dict[str, Any] = {"inputs": inputs, "outputs": (TensorSpec("y", "FP32", (-1, 3)),)}
    axis = Axis("n", default=7, largest=9, places={"ids": 1})
    one = specification_of(torch.nn.Identity, axes=(axis,), **fields)
    assert NullEngine(one, EngineSettings("null")).row_bytes == 3 * 4 + 7 * 8
