"""Every datatype of the protocol comes back unchanged, alone and padded in a batch with others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from servers.protocol.tensors import DATATYPES, Array

NAMES = (*DATATYPES, "BYTES")
WAYS = ("http binary", "http json", "grpc", "http memory", "grpc memory")


@pytest.fixture
def clients(echo: Any) -> Iterator[dict[str, tuple[Any, Any]]]:
    http = http_client.InferenceServerClient(echo.address, concurrency=8)
    grpc = grpc_client.InferenceServerClient(echo.grpc_address)
    yield {"http": (http_client, http), "grpc": (grpc_client, grpc)}
    http.close()
    grpc.close()


def values(datatype: str, rows: int, width: int, seed: int) -> Array:
    """Random ones with the extremes of the datatype."""
    random = np.random.default_rng(seed)
    if datatype == "BYTES":
        words = np.empty((rows, width), object)
        words[...] = [[f"w{seed}·{value}".encode() for value in row] for row in random.integers(0, 99, (rows, width))]
        words[0, 0] = b""
        return words
    dtype: Any = DATATYPES[datatype]
    if dtype.kind == "f":
        array = random.standard_normal((rows, width)).astype(dtype)
        array[0, 0] = np.finfo(dtype).max
    elif dtype.kind == "b":
        array = random.integers(0, 2, (rows, width)).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        array = random.integers(limits.min, limits.max, (rows, width), dtype, endpoint=True)
        array[0, :2] = limits.min, limits.max
    return array


def infer(way: str, clients: dict[str, tuple[Any, Any]], sent: dict[str, Array], echo: Any) -> dict[str, Array]:
    module, client = clients[way.split()[0]]
    inputs, outputs, regions = [], [], []
    prefix = f"echo-{echo.port}-{id(sent)}"
    for name, array in sent.items():
        wanted = {"binary_data": way != "http json"} if way.startswith("http") else {}
        tensor = module.InferInput(f"in_{name}", list(array.shape), name)
        output = module.InferRequestedOutput(f"out_{name}", **wanted)
        if way.endswith("memory"):
            data = serialize_byte_tensor(array) if name == "BYTES" else array
            size = len(data.item()) if name == "BYTES" else array.nbytes
            for end, target in (("in", tensor), ("out", output)):
                key = f"{prefix}-{end}-{name}"
                region = shared_memory.create_shared_memory_region(key, f"/{key}", size)
                client.register_system_shared_memory(key, f"/{key}", size)
                target.set_shared_memory(key, size)
                regions.append((key, region))
            shared_memory.set_shared_memory_region(regions[-2][1], [data])
        else:
            tensor.set_data_from_numpy(array, **wanted)
        inputs.append(tensor)
        outputs.append(output)
    try:
        answer = client.infer("echo", inputs, outputs=outputs)
        if not regions:
            return {name: answer.as_numpy(f"out_{name}") for name in sent}
        return {name: _written(regions[2 * index + 1][1], array) for index, (name, array) in enumerate(sent.items())}
    finally:
        for key, region in regions:
            client.unregister_system_shared_memory(key)
            shared_memory.destroy_shared_memory_region(region)


def _written(region: Any, like: Array) -> Array:
    """A copy, since the region is unmapped."""
    return np.array(shared_memory.get_contents_as_numpy(region, like.dtype, list(like.shape)))


@pytest.mark.parametrize("way", WAYS)
def test_each_datatype_comes_back(way: str, clients: dict[str, tuple[Any, Any]], echo: Any) -> None:
    names = [name for name in NAMES if (way, name) != ("http json", "FP16")]
    sent = {name: values(name, 2, 3, seed=1) for name in NAMES}
    answer = _json(echo, sent) if way == "http json" else infer(way, clients, sent, echo)
    for name in names:
        assert answer[name].dtype == sent[name].dtype
        np.testing.assert_array_equal(answer[name], sent[name], err_msg=name)


def _json(echo: Any, sent: dict[str, Array]) -> dict[str, Array]:
    """FP16 travels as bytes, since JSON has none, and its output is not asked for."""
    half = sent["FP16"].tobytes()
    inputs: list[dict[str, Any]] = []
    for name, array in sent.items():
        entry: dict[str, Any] = {"name": f"in_{name}", "datatype": name, "shape": list(array.shape)}
        if name == "FP16":
            entry["parameters"] = {"binary_data_size": len(half)}
        elif name == "BYTES":
            entry["data"] = [element.decode() for element in array.reshape(-1).tolist()]
        else:
            entry["data"] = array.reshape(-1).tolist()
        inputs.append(entry)
    names = [name for name in NAMES if name != "FP16"]
    text = json.dumps({"inputs": inputs, "outputs": [{"name": f"out_{name}"} for name in names]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = echo.request("POST", "/v2/models/echo/infer", text + half, headers)
    assert answer.status == 200, answer.body
    answers = {}
    for output in json.loads(answer.body)["outputs"]:
        name = output["datatype"]
        if name == "BYTES":
            flat: Array = np.array([element.encode() for element in output["data"]], object)
        else:
            flat = np.array(output["data"], DATATYPES[name])
        answers[name] = flat.reshape(output["shape"])
    return answers


def test_requests_of_different_widths_get_their_own_back(clients: dict[str, tuple[Any, Any]], echo: Any) -> None:
    before = echo.model_stats()
    sent = [{name: values(name, 1, width, seed=width) for name in NAMES} for width in (2, 3, 5, 8, 9)]
    with ThreadPoolExecutor(len(sent)) as threads:
        answers = list(
            threads.map(lambda tensors: infer("grpc", clients, tensors, echo), sent)
        )  # HTTP's has one thread
    for tensors, answer in zip(sent, answers, strict=True):
        for name in NAMES:
            np.testing.assert_array_equal(answer[name], tensors[name], err_msg=name)
    executions = echo.model_stats()["execution_count"] - before["execution_count"]
    assert executions <= len(sent) if _pads(echo) else executions == len(sent)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_what_json_cannot_carry_is_refused_with_a_sentence(datatype: str, echo: Any) -> None:
    tensor = {"name": f"in_{datatype}", "datatype": datatype, "shape": [1, 2], "data": [1, 2]}
    answer = echo.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}).encode())
    assert answer.status == 400
    assert datatype in json.loads(answer.body)["error"] or "one of BOOL" in json.loads(answer.body)["error"]


@pytest.mark.parametrize("way", ["http binary", "grpc"])
@pytest.mark.parametrize(("width", "other"), [(65, 65), (3, 4)])
def test_widths_that_the_model_does_not_have(
    way: str, width: int, other: int, clients: dict[str, tuple[Any, Any]], echo: Any
) -> None:
    sent: dict[str, Array] = {name: np.zeros((1, width), DATATYPES.get(name, np.dtype(object))) for name in NAMES}
    sent["BYTES"].fill(b"a")
    sent["FP32"] = np.zeros((1, other), np.float32)
    with pytest.raises(InferenceServerException, match="width") as caught:
        infer(way, clients, sent, echo)
    assert caught.value.status().removeprefix("StatusCode.") in ("400", "INVALID_ARGUMENT")


@pytest.mark.parametrize("way", ["http binary", "http json", "grpc"])
def test_a_width_of_0_comes_back_unless_all_of_it_would_be_padding(
    way: str, clients: dict[str, tuple[Any, Any]], echo: Any
) -> None:
    sent: dict[str, Array] = {name: np.zeros((2, 0), DATATYPES.get(name, np.dtype(object))) for name in NAMES}
    if _pads(echo):
        with pytest.raises((InferenceServerException, AssertionError), match="no elements"):
            _json(echo, sent) if way == "http json" else infer(way, clients, sent, echo)
        return
    answer = _json(echo, sent) if way == "http json" else infer(way, clients, sent, echo)
    for name, array in answer.items():
        assert (array.shape, array.dtype) == ((2, 0), sent[name].dtype)


def _pads(echo: Any) -> bool:
    """A model without items that can be padded has no such parameter."""
    return "pad_to" in json.loads(echo.request("GET", "/v2/models/echo/config").body)["parameters"]
