"""Models of the user's in a real Triton: a text model with mixed lengths at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from servers.contract.tensors import Array
from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.triton.launch import prepare
from servers.triton.repository import PlacedModel
from servers.triton.watch import TritonProcess
from tests.integration.triton.conftest import settings

pytestmark = pytest.mark.triton
READY_SECONDS = 120
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


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a Triton with a model and returns its address."""
    with ExitStack() as servers:

        def start(specification: ModelSpecification, **options: Any) -> str:
            folder = tmp_path_factory.mktemp("triton")
            plan = prepare(settings(folder, device="cpu", **options), [PlacedModel(specification)], RandomWeights(0))
            process = servers.enter_context(TritonProcess(plan, folder / "log"))
            assert process.wait_ready(READY_SECONDS)
            return plan.http_url.removeprefix("http://")

        yield start


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ModelSpecification:
    folder = tmp_path_factory.mktemp("secret") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return get_specification(str(folder))


@pytest.fixture(scope="module", params=["32,64", ""])
def address(request: pytest.FixtureRequest, bert: ModelSpecification, start: Callable[..., str]) -> str:
    return start(bert, engine="torch", threads=1, pad_to=request.param, max_queue_delay_us=20_000)


def infer(address: str, model: str, inputs: dict[str, Array], datatype: str, *outputs: str) -> dict[str, Array]:
    client = http_client.InferenceServerClient(address)
    try:
        tensors = []
        for name, array in inputs.items():
            tensor = http_client.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        answer = client.infer(model, tensors, outputs=[http_client.InferRequestedOutput(name) for name in outputs])
        assert [output["name"] for output in answer.get_response()["outputs"]] == list(outputs)
        return {name: answer.as_numpy(name) for name in outputs}
    finally:
        client.close()


def test_mixed_lengths_at_once_get_their_own_answers(address: str, bert: ModelSpecification) -> None:
    engine = build_engine(bert, RandomWeights(0), EngineSettings("torch", device="cpu", threads=1))
    engine.load()
    assert bert.make_items is not None
    inputs = {length: dict(bert.make_items(length, [length])) for length in LENGTHS}
    lengths = LENGTHS * 3

    def ask(length: int) -> Array:
        return infer(address, "tiny", inputs[length], "INT64", "last_hidden_state")["last_hidden_state"]

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
    address: str, length: int, first_id: int, problem: str
) -> None:
    ids = np.full((1, length), first_id, np.int64)
    with pytest.raises(InferenceServerException, match=problem) as caught:
        infer(address, "tiny", {"input_ids": ids, "attention_mask": np.ones_like(ids)}, "INT64", "last_hidden_state")
    assert caught.value.status() == "400"


def test_nothing_that_clients_read_shows_the_models_folder(address: str) -> None:
    client = http_client.InferenceServerClient(address)
    config = client.get_model_config("tiny")
    client.close()
    assert config["parameters"]["model"]["string_value"] == "tiny"
    assert "secret" not in json.dumps(config)
