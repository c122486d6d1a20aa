"""Values that the engine cannot take, and strings that are no text: 400 for who sends them, and nothing for others."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.integration.native.conftest import Server, _starter, _stop

PATH = "/v2/models/copying/infer"
HALF = '"\\ud800"'
"""Half a surrogate pair, which JSON can write and UTF-8 cannot."""
BAD = b"\xff\xfe"


@pytest.fixture(scope="module", params=["0", "2"])
def strings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An ONNX file that copies a string, in one process and with two front ends."""
    folder = tmp_path_factory.mktemp("strings")
    first, other = (helper.make_tensor_value_info(name, TensorProto.STRING, ["batch", 1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "copying", [first], [other])
    file = folder / "copying.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), file)
    servers: list[Server] = []
    start = _starter(folder, lambda _: ["-m", "servers.native"], servers)
    server = start(
        "--model", str(file), "--artefact", str(file), "--fronts", request.param, "--device", "cpu", grpc=True
    )
    server.wait_ready()
    yield server
    _stop(servers)


def send(server: Server, element: bytes) -> tuple[int, bytes]:
    data = struct.pack("<I", len(element)) + element
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor]}).encode()
    answer = server.request("POST", PATH, header + data, {"Inference-Header-Content-Length": str(len(header))})
    return answer.status, answer.body


@pytest.fixture(autouse=True)
def no_traceback(strings: Server) -> Iterator[None]:
    log = strings.folder / f"log-{strings.port}"
    before = log.stat().st_size
    yield
    assert "Traceback" not in log.read_text()[before:]


def test_bytes_that_are_no_text_are_the_client_s_fault(strings: Server) -> None:
    before = strings.model_stats()

    def client(number: int) -> None:
        for place in range(60):
            if number % 2:
                status, body = send(strings, BAD)
                assert status == 400
                assert "element 0 of input 'x' is not UTF-8" in json.loads(body)["error"]
            else:
                status, body = send(strings, f"é{place}".encode())
                assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [f"é{place}"])

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(client, range(8)))
    after = strings.model_stats()
    assert after["inference_count"] - before["inference_count"] == 240  # nothing was executed twice
    assert strings.metric('abserve_native_requests_failure_total{model="copying",reason="invalid_request"') >= 240


BODY = '{"id":"i","inputs":[{"name":"x","datatype":"BYTES","shape":[1,1],"data":["a"]}]}'
PLACES = {
    "id": BODY.replace('"i"', HALF),
    "a key": BODY.replace('"id"', HALF),
    "name": BODY.replace('"x"', HALF),
    "key of an input": BODY.replace('"data"', f'{HALF}:1,"data"'),
    "datatype": BODY.replace('"BYTES"', HALF),
    "shape": BODY.replace("[1,1]", HALF),
    "dimension": BODY.replace("[1,1]", f"[1,{HALF}]"),
    "data": BODY.replace('["a"]', HALF),
    "element": BODY.replace('"a"', HALF),
    "a parameter": BODY.replace('"data"', f'"parameters":{{"a":{HALF}}},"data"'),
    "a parameter's name": BODY.replace('"data"', f'"parameters":{{{HALF}:1}},"data"'),
    "outputs": BODY[:-1] + f',"outputs":[{{"name":{HALF}}}]}}',
    "parameters": BODY[:-1] + f',"parameters":{{"a":{HALF}}}}}',
    "parameters' names": BODY[:-1] + f',"parameters":{{{HALF}:1}}}}',
    "anything else": BODY[:-1] + f',"else":[{{"a":{HALF}}}]}}',
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("nan", [False, True], ids=["", "with NaN"])
def test_half_a_character_in_any_string_is_refused(strings: Server, place: str, nan: bool) -> None:
    """JSON with NaN has another parser."""
    body = PLACES[place][:-1] + (',"nan":NaN}' if nan else "}")
    answer = strings.request("POST", PATH, body.encode())
    assert answer.status == 400, answer
    assert list(json.loads(answer.body)) == ["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/index", '{"ready":%s}'),
        ("/v2/repository/models/copying/load", '{"parameters":{"a":%s}}'),
        ("/v2/systemsharedmemory/region/r/register", '{"key":%s,"byte_size":1}'),
        ("/v2/cudasharedmemory/region/r/register", '{"raw_handle":{"b64":%s},"device_id":0,"byte_size":1}'),
    ],
)
def test_half_a_character_in_a_control_request_is_refused(strings: Server, path: str, body: str) -> None:
    answer: Any = strings.request("POST", path, (body % HALF).encode())
    assert answer.status == 400
