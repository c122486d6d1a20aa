"""The embedded Triton as a client sees it, through NVIDIA's own clients. `triton` is conftest's `Running`."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from servers.engines.factory import build_engine
from servers.engines.interface import Engine
from servers.engines.settings import EngineSettings
from servers.export.artefacts import Artefact
from servers.models.specification import ModelSpecification
from servers.models.weights import RandomWeights
from servers.protocol.tensors import Array
from tests.again import again
from tests.integration.triton.conftest import Running, embedding

pytestmark = pytest.mark.triton
MODEL = "openclip_vit_b32"
BIT_EQUAL_BUT_FOR_THREADS = 1e-5


@pytest.fixture
def client(triton: Any) -> Iterator[Any]:
    client = http_client.InferenceServerClient(triton.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def engine(specification: ModelSpecification, artefact: Artefact) -> Iterator[Engine]:
    """ONNX Runtime in this process, with the file that the server executes."""
    settings = EngineSettings(kind="onnxruntime", device="cpu", threads=2)
    engine = build_engine(specification, RandomWeights(0), settings, artefact.path)
    engine.load()
    yield engine
    engine.close()


def pixels(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 3, 224, 224), np.float32)


def embed_at_once(triton: Running, arrays: list[Array]) -> list[Any]:
    with ThreadPoolExecutor(len(arrays)) as pool:
        return list(pool.map(lambda array: embedding(triton.plan, array), arrays))


def statistics(client: Any) -> Any:
    return client.get_inference_statistics(MODEL)["model_stats"][0]


def test_ready_and_metadata(client: Any, specification: ModelSpecification) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.get_server_metadata()["version"] == "2.51.0"
    metadata = client.get_model_metadata(MODEL)
    for found, wanted in ((metadata["inputs"], specification.inputs), (metadata["outputs"], specification.outputs)):
        assert found == [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in wanted]


def test_the_config_tells_what_is_in_effect(triton: Any, client: Any, artefact: Artefact) -> None:
    config = client.get_model_config(MODEL)
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    assert parameters == {
        "model": "open_clip:ViT-B-32",
        "engine": "onnxruntime",
        "precision": "fp32",
        "mode": "session",
        "device": "cpu",
        "threads": "2",
        "spinning": "on",
        "weights": "random weights (seed 0)",
        "artefact": artefact.path.name,
        "artefact_sha256": artefact.manifest.sha256,
        "payload": "fp32",
    }
    assert config["max_batch_size"] == 32
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert [group["kind"] for group in config["instance_group"]] == ["KIND_CPU"]
    assert str(artefact.path.parent) not in json.dumps(config), "a config is published: no path of this machine"
    match = re.search(r'"engine ready: (.+)"$', triton.log_file.read_text(), re.MULTILINE)
    assert match is not None
    in_effect = json.loads(match[1].replace('\\"', '"'))["in_effect"]
    assert {key: in_effect[key] for key in ("kind", "precision", "mode", "device", "threads")} == {
        "kind": "onnxruntime",
        "precision": "fp32",
        "mode": "session",
        "device": "cpu",
        "threads": 2,
    }


@pytest.mark.parametrize("rows", [1, 5, pytest.param(32, marks=pytest.mark.slow)])
def test_answers_equal_onnxruntime_in_process(triton: Any, engine: Engine, rows: int) -> None:
    array = pixels(rows, seed=rows)
    answer = embedding(triton.plan, array)
    assert answer.shape == (rows, 512)
    expected: Any = engine.infer({"pixel_values": array})["embedding"]
    np.testing.assert_allclose(answer, expected, rtol=0, atol=BIT_EQUAL_BUT_FOR_THREADS)


def test_grpc_answers_the_same(triton: Any) -> None:
    array = pixels(2, seed=5)
    over_grpc = embedding(triton.plan, array, module=grpc_client)
    np.testing.assert_array_equal(over_grpc, embedding(triton.plan, array))


def test_batches_form_and_every_request_gets_its_own_answer(triton: Any, client: Any, engine: Engine) -> None:
    arrays = [pixels(1, seed) for seed in range(12)]
    arrays[3] = np.full_like(arrays[3], np.nan)
    before = statistics(client)
    answers = embed_at_once(triton, arrays)
    after, deadline = statistics(client), time.monotonic() + 60
    while after["inference_count"] - before["inference_count"] < len(arrays):  # Triton counts once it has answered
        assert time.monotonic() < deadline
        after = statistics(client)
    inferences = after["inference_count"] - before["inference_count"]
    executions = after["execution_count"] - before["execution_count"]
    assert inferences == len(arrays)
    assert executions < inferences, "no two requests shared an execution"
    assert any(entry["batch_size"] > 1 for entry in after["batch_stats"])
    assert np.isnan(answers[3]).all()
    for seed in set(range(12)) - {3}:
        alone: Any = engine.infer({"pixel_values": arrays[seed]})["embedding"]
        np.testing.assert_allclose(answers[seed], alone, rtol=0, atol=BIT_EQUAL_BUT_FOR_THREADS)


@pytest.mark.slow  # hundreds of megabytes
def test_the_largest_batches_do_not_grow_the_shared_memory(triton: Any) -> None:
    before = [(path.name, path.stat().st_size) for path in triton.regions()]
    assert len(before) == 1
    embed_at_once(triton, [pixels(32, seed) for seed in range(2)])
    assert [(path.name, path.stat().st_size) for path in triton.regions()] == before


@pytest.mark.slow  # by default the refusals of a full queue
def test_without_a_queue_limit_nothing_is_refused(triton: Any) -> None:
    """Triton honours a request's own timeout only with a queue policy, which makes its batcher slow."""
    with ThreadPoolExecutor(1) as pool:
        occupied = pool.submit(embed_at_once, triton, [pixels(16)] * 4)
        deadline = time.monotonic() + 60
        while pending(triton) < 2:
            assert time.monotonic() < deadline
        assert embedding(triton.plan, pixels(1), timeout=50_000).shape == (1, 512)  # in µs
        assert len(occupied.result()) == 4


def pending(triton: Any) -> float:
    with urllib.request.urlopen(triton.plan.metrics_url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("nv_inference_pending_request_count")).split()[-1])


def test_too_large_a_batch_is_refused(triton: Any) -> None:
    with pytest.raises(http_client.InferenceServerException, match="batch") as error:
        embedding(triton.plan, pixels(33))
    assert error.value.status() == "400"


def test_it_listens_on_loopback_only(triton: Any) -> None:
    listening = [
        connection.laddr
        for process in triton.processes()
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    assert len(listening) == 3
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@again
def test_it_is_idle_when_nobody_asks(triton: Any) -> None:
    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in triton.processes())

    before, started = cpu_seconds(), time.monotonic()
    time.sleep(1)  # the length of the measurement, not a wait for anything
    assert cpu_seconds() - before < 0.2 * (time.monotonic() - started), "a spinning thread would take a whole core"


def test_python_frees_the_tensors_without_a_message(triton: Any) -> None:
    embedding(triton.plan, pixels(2))
    assert "PyCapsule" not in triton.log_file.read_text()
