"""A real server with a small text model: requests of mixed lengths get what torch answers each of them alone."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from servers.engines.factory import build_engine
from servers.engines.settings import EngineSettings
from servers.models.registry import get_specification
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array
from tests.tiny_bert import write_tiny_bert

LENGTHS = (1, 5, 32, 40, 64, 100, 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("secret"))


@pytest.fixture(scope="module")
def bert(model: Path) -> ModelSpecification:
    return get_specification(str(model))


@pytest.fixture(scope="module", params=["32,64", "none"])
def server(request: pytest.FixtureRequest, model: Path, native_starter: Any) -> Any:
    options = ("--device", "cpu", "--threads", "1", "--pad-to", request.param, "--max-queue-delay-us", "20000")
    return native_starter(model.parent, "--model", str(model), *options)


@pytest.fixture(scope="module")
def expected(bert: ModelSpecification) -> dict[int, tuple[dict[str, Array], Array]]:
    """By length: the inputs and the answer of the engine in this process."""
    engine = build_engine(bert, RandomWeights(0), EngineSettings("torch", device="cpu", threads=1))
    engine.load()
    assert bert.make_items is not None
    inputs = {length: dict(bert.make_items(length, [length])) for length in LENGTHS}
    answers = {length: (given, engine.infer(given)["last_hidden_state"]) for length, given in inputs.items()}
    engine.close()
    return answers


def infer(module: Any, client: Any, inputs: dict[str, Array]) -> Array:
    tensors = []
    for name, array in inputs.items():
        tensor = module.InferInput(name, list(array.shape), "INT64")
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    answer: Array = client.infer("tiny", tensors).as_numpy("last_hidden_state")
    return answer


def pad_to(server: Any) -> str:
    config = json.loads(server.request("GET", "/v2/models/tiny/config").body)
    shown: str = config["parameters"]["pad_to"]["string_value"]
    return shown


LINEAR = """
import torch
from servers.models import Input, Output, UserModel

def linear():
    return UserModel(torch.nn.Linear(4, 4), [Input("x", "FP32", ("batch", 4))], [Output("y", "FP32", ("batch", 4))])
"""
"""Needs torch and no other library."""


@pytest.mark.usefixtures("real_exec")  # torch reads how to wait when it is loaded
@pytest.mark.parametrize(
    ("spinning", "fronts"), [("auto", 0), ("off", 0), pytest.param("off", 1, marks=pytest.mark.slow)]
)
def test_torchs_threads_wait_as_asked(
    spinning: str, fronts: int, tmp_path: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(LINEAR)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")  # libgomp says what it read, when torch loads it
    options = ("--model", f"{tmp_path / 'mine.py'}:linear", "--engine", "torch", "--device", "cpu", "--threads", "2")
    server = native(*options, "--spinning", spinning, "--fronts", str(fronts))
    server.wait_ready()
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", (server.folder / f"log-{server.port}").read_text())
    assert spins
    assert (int(spins[0]) == 0) == (spinning == "off")
    config = json.loads(server.request("GET", "/v2/models/mine_linear/config").body)
    assert config["parameters"]["spinning"]["string_value"] == ("on" if spinning == "auto" else "off")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_mixed_lengths_at_once_get_their_own_answers(protocol: str, server: Any, expected: Any) -> None:
    module: Any = http_client if protocol == "http" else grpc_client
    address = server.address if protocol == "http" else server.grpc_address
    before = server.model_stats()["execution_count"]

    def ask(length: int) -> Array:
        client = module.InferenceServerClient(address)
        try:
            return infer(module, client, expected[length][0])
        finally:
            client.close()

    lengths = LENGTHS * 4
    with ThreadPoolExecutor(len(lengths)) as threads:
        for length, answer in zip(lengths, threads.map(ask, lengths), strict=True):
            np.testing.assert_allclose(np.asarray(answer, np.float32), expected[length][1], atol=1e-5)
    executions = server.model_stats()["execution_count"] - before
    # Without sizes to pad to, neighbours in the queue have different lengths and share no batch.
    assert executions < len(lengths) or pad_to(server) == "none"


def test_a_bad_request_of_a_batch_harms_no_other(server: Any, expected: Any) -> None:
    def ask(index: int) -> Array | str:
        client = http_client.InferenceServerClient(server.address)
        ids = dict(expected[5][0])
        if index % 4 == 0:
            ids["input_ids"] = ids["input_ids"] + 200
        try:
            return infer(http_client, client, ids)
        except InferenceServerException as exc:
            return str(exc)
        finally:
            client.close()

    with ThreadPoolExecutor(12) as threads:
        for index, answer in enumerate(threads.map(ask, range(12))):
            if index % 4 == 0:
                assert isinstance(answer, str)
                assert "its ids are 0 to 199" in answer
            else:
                np.testing.assert_allclose(np.asarray(answer, np.float32), expected[5][1], atol=1e-5)
    assert server.status("/v2/health/ready") == 200


def test_nothing_that_clients_read_shows_the_models_folder(server: Any) -> None:
    config = json.loads(server.request("GET", "/v2/models/tiny/config").body)
    assert config["parameters"]["model"]["string_value"] == "tiny"
    assert pad_to(server) in ("32,64", "none")
    for path in ("/v2", "/v2/models/tiny", "/v2/models/tiny/config", "/v2/models/tiny/stats", "/metrics"):
        assert b"secret" not in server.request("GET", path).body
