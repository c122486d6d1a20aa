"""Requests that repeat a known header, which need no task: nothing else may differ."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

PATH = "/v2/models/rows/infer"
PENDING = "abserve_native_pending_requests"


def request(values: list[float]) -> tuple[bytes, dict[str, str]]:
    """Rows of four equal numbers."""
    data = np.repeat(np.array(values, "<f4")[:, None], 4, axis=1)
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(data.shape)}
    tensor["parameters"] = {"binary_data_size": data.nbytes}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + data.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def raw(values: list[float]) -> bytes:
    body, headers = request(values)
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body


def first_column(body: bytes, headers: dict[str, str]) -> list[float]:
    length = int(headers["inference-header-content-length"])
    return np.frombuffer(body[length:], "<f4").reshape(-1, 4)[:, 0].tolist()


def posted(server, value: float) -> Any:
    return server.request("POST", PATH, *request([value]))


def ready(controlled, *options: str, gates: tuple[str, ...] = ("load", "infer")):
    server = controlled(*options)
    server.open(*gates)
    server.wait_ready()
    return server


def test_many_clients_get_their_own_rows(controlled) -> None:
    """Alone and merged, in memory that is used again and again."""
    server = ready(controlled, "--max-queue-delay-us", "0")

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        random = np.random.default_rng(number)
        for index in range(150):
            values = [1000.0 * number + 1 + index % 17 + row for row in range(int(random.integers(1, 5)))]
            body, headers = request(values)
            connection.request("POST", PATH, body, headers)
            response = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            assert response.status == 200
            assert first_column(response.read(), answer_headers) == values
        connection.close()

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(client, number) for number in range(2, 8)]:
            future.result()
    stats = server.model_stats()
    assert stats["inference_stats"]["success"]["count"] == 900
    assert stats["abserve_stages"]["queue"]["count"] == 900
    assert stats["abserve_stages"]["receive"]["count"] == 900
    assert server.metric("abserve_native_client_disconnects_total") == 0


def test_pipelined_requests_are_answered_in_order(controlled) -> None:
    server = ready(controlled, "--max-queue-delay-us", "0")
    values = [float(value) for value in range(20, 60)]
    stream = b"".join(raw([value]) for value in values)
    for step in (len(stream), 1000, 97):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            for start in range(0, len(stream), step):
                connection.sendall(stream[start : start + step])
            received = b""
            while received.count(b"HTTP/1.1 200") < len(values) or not received.endswith(
                np.full(4, values[-1], "<f4").tobytes()
            ):
                part = connection.recv(65536)
                assert part
                received += part
        places = [received.index(np.full(4, value, "<f4").tobytes()) for value in values]
        assert places == sorted(places)


def test_a_client_that_leaves_the_queue_is_dropped(controlled) -> None:
    server = ready(controlled, "--max-queue-delay-us", "0", gates=("load",))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(posted, server, 1.0)
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        with socket.create_connection(("127.0.0.1", server.port)) as queued:
            queued.sendall(raw([2.0]))
            server.wait_until(lambda: server.metric(PENDING) == 1, "its request waits")
        server.wait_until(lambda: server.metric(PENDING) == 0, "it is dropped")
        server.open("infer")
        assert first.result().status == 200
    assert server.model_stats()["inference_count"] == 1
    assert server.metric("abserve_native_client_disconnects_total") == 1


def test_a_client_that_leaves_while_it_is_executed_is_no_success(controlled) -> None:
    server = ready(controlled, "--max-queue-delay-us", "0", gates=("load",))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw([2.0]))
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy with it")
    server.wait_until(lambda: server.status("/v2/health/live") == 200, "the server goes on")
    server.open("infer")
    server.wait_until(lambda: server.metric("abserve_native_client_disconnects_total") == 1, "it is counted")
    stats = server.model_stats()
    assert stats["inference_count"] == 1
    assert stats["inference_stats"]["success"]["count"] == 0
    assert first_column(*take(server, [5.0])) == [5.0]


def test_a_full_queue_refuses_at_once_and_the_connection_goes_on(controlled) -> None:
    server = ready(controlled, "--queue-size", "1", "--max-queue-delay-us", "0", gates=("load",))
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(posted, server, 1.0)]
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        accepted.append(pool.submit(posted, server, 2.0))
        server.wait_until(lambda: server.metric(PENDING) == 1, "the queue is full")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for _ in range(3):
            connection.request("POST", PATH, *request([3.0]))
            refused = connection.getresponse()
            assert refused.status == 503
            assert refused.getheader("retry-after")
            assert "maximum queue size" in json.loads(refused.read())["error"]
        server.open("infer")
        assert [future.result().status for future in accepted] == [200, 200]
        connection.request("POST", PATH, *request([4.0]))
        assert connection.getresponse().status == 200
        connection.close()


def test_a_failed_batch_is_an_answer_and_the_next_one_works(controlled) -> None:
    server = ready(controlled)
    for _ in range(2):
        failed = server.request("POST", PATH, *request([666.0]))
        assert failed.status == 500
        assert "secret" not in failed.body.decode()
        assert first_column(*take(server, [5.0, 6.0])) == [5.0, 6.0]


def test_sigterm_answers_what_is_executed(controlled) -> None:
    server = ready(controlled, "--max-queue-delay-us", "0", "--max-batch-size", "1", gates=("load",))
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(posted, server, float(value)) for value in range(20, 26)]
        server.wait_until(lambda: server.metric(PENDING) == 5, "six are in flight")
        server.process.terminate()
        server.wait_until(lambda: server.status("/v2/health/live") is None, "new ones are refused")
        server.open("infer")
        for value, future in zip(range(20, 26), running, strict=True):
            answer = future.result()
            assert answer.status == 200
            assert first_column(answer.body, answer.headers) == [float(value)]
    assert server.process.wait(60) == 0


def take(server, values: list[float]) -> tuple[bytes, dict[str, str]]:
    answer = server.request("POST", PATH, *request(values))
    assert answer.status == 200
    return answer.body, answer.headers


@pytest.mark.parametrize("fronts", ["0", "2"])
def test_each_request_gets_its_own_id_back(controlled, fronts) -> None:
    """Ids that differ each time, over HTTP and gRPC, of any length and of any characters."""
    server = controlled("--max-queue-delay-us", "0", "--fronts", fronts, grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    client = grpc_client.InferenceServerClient(server.grpc_address)
    for place in range(120):
        request_id = f"{place}" * (1 + place % 50) + ("é" if place % 7 == 0 else "")
        body, headers = request([float(place + 20)])
        size = int(headers["Inference-Header-Content-Length"])
        header = json.dumps({"id": request_id, **json.loads(body[:size])}).encode()
        answer = server.request(
            "POST", PATH, header + body[size:], {"Inference-Header-Content-Length": str(len(header))}
        )
        assert answer.status == 200
        length = int(answer.headers["inference-header-content-length"])
        assert json.loads(answer.body[:length])["id"] == request_id
        assert first_column(answer.body, answer.headers) == [float(place + 20)]
        tensor = grpc_client.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.full((1, 4), place + 20, np.float32))
        result = client.infer("rows", [tensor], request_id=request_id)
        assert result.get_response().id == request_id
        np.testing.assert_array_equal(result.as_numpy("y"), np.full((1, 4), place + 20))
    client.close()
