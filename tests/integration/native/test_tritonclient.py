"""NVIDIA's own client, unmodified, against the native server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from tests.again import again

MODEL = "openclip_vit_b32"


@pytest.fixture
def client(null_server):
    client = InferenceServerClient(null_server.address)
    yield client
    client.close()


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 224, 224), dtype=np.float32)


@pytest.mark.parametrize(
    ("count", "binary_in", "binary_out"),
    [
        *[(1, True, True), (1, True, False), (1, True, None), (1, False, False), (1, False, True)],
        *[(8, True, True), (8, True, False), (8, True, None), (8, False, False)],
    ],
)
def test_infers(client, count, binary_in, binary_out):
    data = images(count)
    item = InferInput("pixel_values", list(data.shape), "FP32")
    item.set_data_from_numpy(data, binary_data=binary_in)
    outputs = None if binary_out is None else [InferRequestedOutput("embedding", binary_data=binary_out)]
    result = client.infer(MODEL, [item], outputs=outputs, request_id="seven", model_version="1")
    assert result.get_response()["id"] == "seven"
    np.testing.assert_array_equal(result.as_numpy("embedding"), data.reshape(count, -1)[:, :512])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_read_and_answers_never_compressed(client, algorithm):
    data = images(2)
    item = InferInput("pixel_values", [2, 3, 224, 224], "FP32")
    item.set_data_from_numpy(data)
    result = client.infer(
        MODEL, [item], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    np.testing.assert_array_equal(result.as_numpy("embedding"), data.reshape(2, -1)[:, :512])


def test_describes_itself(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "abserve-native"
    assert client.get_model_metadata(MODEL) == {
        "name": MODEL,
        "versions": ["1"],
        "platform": "null",
        "inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 224, 224]}],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 512]}],
    }
    assert client.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY"}]
    config = client.get_model_config(MODEL)
    assert config["max_batch_size"] == 32
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    in_effect = {key: value["string_value"] for key, value in config["parameters"].items()}
    assert in_effect == {
        "engine": "null",
        "engine_version": "1",
        "precision": "fp32",
        "mode": "eager",
        "device": "cpu",
        "threads": "1",
        "weights": "none",
        "model": "open_clip:ViT-B-32",
        "payload": "fp32",
        "lone_requests_wait": "false",
        "fronts": "0",
    }


def test_config_and_statistics_are_those_of_tritons_own_protobuf(null_server, client):
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2, service_pb2

    config = null_server.request("GET", f"/v2/models/{MODEL}/config").body
    json_format.Parse(config, model_config_pb2.ModelConfig())
    statistics = json.loads(null_server.request("GET", f"/v2/models/{MODEL}/stats").body)
    for model in statistics["model_stats"]:
        assert set(model.pop("abserve_stages")) == {"receive", "decode", "queue", "compute", "encode"}
        assert {"build", "load", "warm_up"} <= set(model.pop("abserve_start"))
    json_format.ParseDict(statistics, service_pb2.ModelStatisticsResponse())


@again  # another program may take the cores between two stages
def test_statistics_count_each_request_and_stage_once(client):
    def read() -> Any:
        return client.get_inference_statistics(MODEL)["model_stats"][0]

    before = read()
    item = InferInput("pixel_values", [3, 3, 224, 224], "FP32")
    item.set_data_from_numpy(images(3))
    for _ in range(4):
        client.infer(MODEL, [item])
    after = read()
    assert after["inference_count"] - before["inference_count"] == 12
    assert after["execution_count"] - before["execution_count"] == 4
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        old, new = before["inference_stats"][name], after["inference_stats"][name]
        assert new["count"] - old["count"] == 4
        assert new["ns"] > old["ns"]
    stages_ns = 0
    for stage, new in after["abserve_stages"].items():
        old = before["abserve_stages"][stage]
        assert new["count"] - old["count"] == 4
        assert new["ns"] > old["ns"]
        stages_ns += new["ns"] - old["ns"]
    total_ns = after["inference_stats"]["success"]["ns"] - before["inference_stats"]["success"]["ns"]
    assert 0.5 * total_ns < stages_ns <= total_ns
    assert [batch["batch_size"] for batch in after["batch_stats"] if batch["batch_size"] == 3] == [3]
    assert client.get_inference_statistics()["model_stats"] == client.get_inference_statistics(MODEL)["model_stats"]


def test_errors_arrive_as_tritonclients_exception(client):
    item = InferInput("pixel_values", [1, 3, 224, 225], "FP32")
    item.set_data_from_numpy(np.zeros((1, 3, 224, 225), np.float32))
    with pytest.raises(InferenceServerException, match=r"expected \[-1,3,224,224\], got \[1,3,224,225\]") as caught:
        client.infer(MODEL, [item])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="unknown model: 'other'") as caught:
        client.infer("other", [item])
    assert caught.value.status() == "404"
