"""An engine that executes beside Python belongs to the loop of its process, and requests that come together are one."""

from __future__ import annotations

import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import psutil
import pytest


@pytest.fixture(params=["0", pytest.param("2", marks=pytest.mark.slow)])
def driven(runner: Any, request: pytest.FixtureRequest) -> Any:
    """In one process, and with two front ends; its gate is closed."""
    server = runner("--fronts", request.param)
    server.wait_ready()
    return server


def ask(connection: http.client.HTTPConnection, *rows: float) -> Any:
    """The first values of the answers; the status of a refusal."""
    send(connection, *rows)
    return read(connection)


def send(connection: http.client.HTTPConnection, *rows: float) -> None:
    data = [value for row in rows for value in [row] * 4]
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), 4], "data": data}
    connection.request("POST", "/v2/models/rows/infer", json.dumps({"inputs": [tensor]}))


def read(connection: http.client.HTTPConnection) -> Any:
    response = connection.getresponse()
    body = response.read()
    return json.loads(body)["outputs"][0]["data"][::4] if response.status == 200 else response.status


def ask_once(server: Any, *rows: float) -> Any:
    with closing(connected(server)) as connection:
        return ask(connection, *rows)


def connected(server: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)


def test_every_request_gets_its_own_rows(driven: Any) -> None:
    driven.open("infer")

    def client(seed: int) -> int:
        chance, connection = random.Random(seed), connected(driven)
        for _ in range(60):
            rows = [float(chance.randrange(1000, 9000)) for _ in range(chance.choice((1, 1, 1, 2, 5)))]
            assert ask(connection, *rows) == [2 * row for row in rows]
        connection.close()
        return 60

    with ThreadPoolExecutor(16) as clients:
        assert sum(clients.map(client, range(16))) == 960
    counted = driven.model_stats()
    assert counted["inference_stats"]["success"]["count"] == counted["inference_stats"]["queue"]["count"] == 960
    assert driven.metric("abserve_native_pending_requests") == 0


def test_requests_that_come_together_are_divided_where_a_batch_is_full(runner: Any) -> None:
    """All come in one turn of the front end, since it is stopped while they are sent."""
    server = runner("--fronts", "1", "--max-batch-size", "3")
    server.open("infer")
    server.wait_ready()
    front_end = max(psutil.Process(server.process.pid).children(), key=lambda child: child.pid)
    connections = [connected(server) for _ in range(22)]
    for connection in connections:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    front_end.suspend()
    for value, connection in enumerate(connections):
        send(connection, float(value))
    front_end.resume()
    for value, connection in enumerate(connections):
        assert read(connection) == [2 * float(value)]
        connection.close()
    counted = server.model_stats()["batch_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in counted}
    assert max(sizes) == 3
    assert sum(size * count for size, count in sizes.items()) == 22
    assert sizes[3] >= 5


def waiting(server: Any, count: int) -> None:
    server.wait_until(lambda: server.metric("abserve_native_pending_requests") == count, f"{count} wait")


def occupy(server: Any, clients: ThreadPoolExecutor) -> list[Any]:
    """Requests that fill both flights."""
    flying: list[Any] = []
    for value in (1.0, 2.0):
        flying.append(clients.submit(ask_once, server, *[value] * 16))
        server.wait_until(partial(taken, server, len(flying)), "it is in flight")
    return flying


def taken(server: Any, batches: int) -> bool:
    return in_flight(server) == batches


def in_flight(server: Any) -> int:
    """Batches that have been taken out of the queue: nothing is answered while the gate is closed."""
    return len(list(server.folder.glob("started-*")))


def test_only_the_request_that_makes_its_batch_fail_fails(driven: Any) -> None:
    with ThreadPoolExecutor(12) as clients:
        first = occupy(driven, clients)
        values = [3.0, 666.0, 4.0, 5.0, 6.0, 7.0]
        queued = [clients.submit(ask_once, driven, value) for value in values]
        waiting(driven, len(values))
        driven.open("infer")
        assert [asked.result() for asked in first] == [[2.0] * 16, [4.0] * 16]
        assert [asked.result() for asked in queued] == [500 if value == 666 else [2 * value] for value in values]


def test_a_client_that_leaves_takes_only_its_own_request_back(driven: Any) -> None:
    with ThreadPoolExecutor(12) as clients:
        first = occupy(driven, clients)
        leaving = connected(driven)
        leaving.request("POST", "/v2/models/rows/infer", json.dumps({"inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [9] * 4}]}))  # fmt: skip
        waiting(driven, 1)
        queued = [clients.submit(ask_once, driven, value) for value in (3.0, 4.0, 5.0)]
        waiting(driven, 4)
        leaving.close()
        waiting(driven, 3)
        driven.open("infer")
        assert [asked.result() for asked in queued] == [[6.0], [8.0], [10.0]]
        assert [asked.result() for asked in first] == [[2.0] * 16, [4.0] * 16]
    assert driven.model_stats()["inference_count"] == 35
    assert driven.metric("abserve_native_client_disconnects_total") == 1


def test_a_full_queue_refuses_and_the_rest_is_served(runner: Any) -> None:
    server = runner("--fronts", "2", "--queue-size", "3")
    server.wait_ready()
    with ThreadPoolExecutor(12) as clients:
        first = occupy(server, clients)
        queued = [clients.submit(ask_once, server, 3.0) for _ in range(3)]
        waiting(server, 3)
        assert ask_once(server, 4.0) == 503
        server.open("infer")
        assert [asked.result() for asked in queued] == [[6.0]] * 3
        assert [asked.result() for asked in first] == [[2.0] * 16, [4.0] * 16]
