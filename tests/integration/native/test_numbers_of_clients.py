"""Numbers that a client chooses: those that fit nowhere are bounded or refused, and nobody else notices."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.integration.native.conftest import CONTROLLED, Server, _starter, _stop
from tests.integration.native.raw_grpc import DATA, END_HEADERS, END_STREAM, HEADERS, RawGrpc, block, frame, prefixed
from tests.integration.native.raw_grpc import rows_message as message_of

LONGEST = ["5124096H", "99999999H", "99999999M", "99999999S"]


@pytest.fixture(scope="module", params=["0", "2"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In one process, and with two front ends."""
    servers: list[Server] = []
    folder = tmp_path_factory.mktemp("numbers")
    start = _starter(folder, lambda port: [str(CONTROLLED), str(port), str(folder)], servers)
    options = ("--fronts", request.param, "--max-queue-delay-us", "0", "--allow-shared-memory", "true")
    started = start(*options, grpc=True)
    started.open("load", "infer")
    started.wait_ready()
    yield started
    _stop(servers)


def test_a_deadline_beyond_64_bits_is_a_long_one_and_others_are_answered(server: Server) -> None:
    """Each client's call has the longest deadlines, and a message whose form came before or has not."""

    def client(number: int) -> list[int | None]:
        statuses = []
        with RawGrpc(server.grpc_port) as connection:
            for place in range(12):
                stream, rows = 2 * place + 1, 1 + (number + place) % 5
                more = [("grpc-timeout", LONGEST[place % len(LONGEST)])] if number % 2 else []
                connection.send(frame(HEADERS, END_HEADERS, stream, block(more=more)))
                message = message_of([float(number)] * 4, id=str(rows))
                connection.send(frame(DATA, END_STREAM, stream, prefixed(message)))
                statuses.append(connection.answer(stream).status)
        return statuses

    with ThreadPoolExecutor(12) as clients:
        for statuses in clients.map(client, range(12)):
            assert statuses == [0] * 12
    assert server.infer([1.0] * 4).status == 200
    assert server.process.poll() is None


@pytest.mark.parametrize("field", ["byte_size", "offset"])
@pytest.mark.parametrize("value", [2**63, 2**64, 2**80, -1, -(2**63) - 1, -(2**80), 10**300])
def test_a_region_beyond_any_memory_is_refused(server: Server, field: str, value: int) -> None:
    memory = {"key": "/abserve_no_such", "offset": 0, "byte_size": 16} | {field: value}
    path = "/v2/systemsharedmemory/region/r/register"
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)) as connection:
        connection.request("POST", path, json.dumps(memory))
        assert connection.getresponse().status == 400
    assert server.infer([1.0] * 4).status == 200


@pytest.mark.parametrize("value", [-1, 2**63, 2**64, 10**30])
@pytest.mark.parametrize(
    "field",
    ["timeout", "binary_data_size", "shared_memory_byte_size", "shared_memory_offset", "sequence_id", "priority"],
)
def test_no_number_of_a_request_harms_others(server: Server, field: str, value: int) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    document: dict[str, Any] = {"inputs": [tensor]}
    if field.startswith("shared"):
        sizes = {"shared_memory_region": "r", "shared_memory_byte_size": 16, field: value}
        tensor["parameters"] = sizes
    elif field.startswith("binary"):
        tensor["parameters"] = {field: value}
    else:
        tensor["data"] = [1, 2, 3, 4]
        document["parameters"] = {field: value}
    answer = server.request("POST", "/v2/models/rows/infer", json.dumps(document).encode())
    assert answer.status in ((200, 400) if field in ("sequence_id", "priority") else (400, 404))
    tensor["shape"] = [value, 4]
    assert server.request("POST", "/v2/models/rows/infer", json.dumps(document).encode()).status in (400, 404)
    assert server.infer([1.0] * 4).status == 200
