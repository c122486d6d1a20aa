"""Models of the user's in a real Triton: a text model with mixed lengths at once, and tensors of every datatype."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.options.launch import LaunchPlan
from servers.protocol.tensors import DATATYPES, Array
from servers.triton.launch import prepare
from servers.triton.process import TritonProcess
from servers.triton.repository import PlacedModel
from tests.integration.triton.conftest import READY_SECONDS, config_of, infer, settings

pytestmark = pytest.mark.triton
LENGTHS = (1, 5, 32, 40, 64, 100, 128)
CONFIG = {
    "model_type": "distilbert",
    "vocab_size": 200,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 64,
    "max_position_embeddings": 128,
}
ELEMENTS = {
    "BYTES": TensorProto.STRING,
    **{name: helper.np_dtype_to_tensor_dtype(dtype) for name, dtype in DATATYPES.items()},
}
"""By datatype of the protocol, ONNX's."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LaunchPlan]]:
    """Starts a Triton with a model."""
    with ExitStack() as servers:

        def start(specification: ModelSpecification, **options: Any) -> LaunchPlan:
            folder = tmp_path_factory.mktemp("triton")
            placed = PlacedModel(specification, specification.file)
            plan = prepare(settings(folder, device="cpu", **options), [placed], RandomWeights(0))
            process = servers.enter_context(TritonProcess(plan, folder / "log"))
            assert process.wait_ready(READY_SECONDS)
            return plan

        yield start


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ModelSpecification:
    folder = tmp_path_factory.mktemp("secret") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return get_specification(str(folder))


@pytest.fixture(scope="module", params=["32,64", pytest.param("", marks=pytest.mark.slow)])
def texts(request: pytest.FixtureRequest, bert: ModelSpecification, start: Callable[..., LaunchPlan]) -> LaunchPlan:
    return start(bert, engine="torch", threads=1, pad_to=request.param, max_queue_delay_us=20_000)


def test_mixed_lengths_at_once_get_their_own_answers(texts: LaunchPlan, bert: ModelSpecification) -> None:
    engine = build_engine(bert, RandomWeights(0), EngineSettings("torch", device="cpu", threads=1))
    engine.load()
    assert bert.make_items is not None
    inputs = {length: dict(bert.make_items(length, [length])) for length in LENGTHS}
    lengths = LENGTHS * 3

    def ask(length: int) -> Array:
        answer: Array = infer(texts, inputs[length], ["last_hidden_state"]).as_numpy("last_hidden_state")
        return answer

    with ThreadPoolExecutor(len(lengths)) as threads:
        for length, answer in zip(lengths, threads.map(ask, lengths), strict=True):
            alone = engine.infer(inputs[length])["last_hidden_state"]
            np.testing.assert_allclose(answer.astype(np.float32), alone.astype(np.float32), atol=1e-5)
    engine.close()


@pytest.mark.parametrize(
    ("length", "first_id", "problem"),
    [(129, 1, "sequence size of model 'tiny' is at most 128, got 129"), (5, 200, "its ids are 0 to 199")],
)
def test_what_the_model_does_not_take_is_the_clients_error(
    texts: LaunchPlan, length: int, first_id: int, problem: str
) -> None:
    ids = np.full((1, length), first_id, np.int64)
    with pytest.raises(InferenceServerException, match=problem) as caught:
        infer(texts, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, ["last_hidden_state"])
    assert caught.value.status() == "400"


def test_nothing_that_clients_read_shows_the_models_folder(texts: LaunchPlan) -> None:
    config = config_of(texts)
    assert config["parameters"]["model"]["string_value"] == "tiny"
    assert "secret" not in json.dumps(config)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., LaunchPlan]) -> LaunchPlan:
    """ONNX Runtime with a file that answers an input of every datatype with itself."""
    path = tmp_path_factory.mktemp("onnx") / "echo.onnx"
    inputs, outputs = (
        [helper.make_tensor_value_info(f"{end}_{name}", element, ["batch", 3]) for name, element in ELEMENTS.items()]
        for end in ("in", "out")
    )
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in ELEMENTS]
    graph = helper.make_graph(nodes, "echo", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return start(get_specification(str(path)), engine="onnxruntime", threads=1, max_queue_delay_us=20_000)


def values(datatype: str, rows: int) -> Array:
    """The extremes of the datatype, and by row another value."""
    dtype: Any = DATATYPES.get(datatype, np.dtype(object))
    array = np.empty((rows, 3), dtype)
    if datatype == "BYTES":
        array[:, :2] = b"", "zwölf, 十二 \0".encode()
        array[:, 2] = [b"." * row for row in range(rows)]
        return array
    if dtype.kind == "b":
        array[:, :2] = False, True
    else:
        limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        array[:, :2] = limits.min, limits.max
    array[:, 2] = np.arange(rows).astype(dtype)
    return array


@pytest.mark.parametrize("module", [http_client, grpc_client], ids=["http", "grpc"])
def test_every_datatype_comes_back_from_a_merged_batch(module: Any, echo: LaunchPlan) -> None:
    wanted = [name for name in ELEMENTS if name != "INT8"]  # only the outputs that are asked for are answered

    def ask(rows: int) -> Any:
        sent = {f"in_{name}": values(name, rows) for name in ELEMENTS}
        return infer(echo, sent, [f"out_{name}" for name in wanted], module)

    with ThreadPoolExecutor(4) as threads:
        for rows, answer in zip((1, 2, 3, 4), threads.map(ask, (1, 2, 3, 4)), strict=True):
            assert answer.get_output("out_INT8") is None
            for name in wanted:
                expected, found = values(name, rows), answer.as_numpy(f"out_{name}")
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected, err_msg=name)
