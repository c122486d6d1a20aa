"""Batches form, nobody gets somebody else's rows, and trouble stays where it belongs."""

from __future__ import annotations

import gzip
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PENDING = "abserve_native_pending_requests"


def rows(answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    output = json.loads(answer.body)["outputs"][0]
    return np.array(output["data"]).reshape(output["shape"]).tolist()


def test_concurrent_clients_are_batched_and_each_gets_its_own_rows(controlled):
    server = controlled("--max-batch-size", "16")
    server.open("load", "infer")
    server.wait_ready()

    def client(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(10):
            sent = generator.integers(0, 600, (int(generator.integers(1, 6)), 4)) + 20.0
            assert rows(server.infer(*sent.tolist())) == sent.tolist()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))
    stats = server.model_stats()
    assert stats["inference_stats"]["success"]["count"] == 80
    assert stats["execution_count"] < 80
    assert (
        sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in stats["batch_stats"])
        == stats["inference_count"]
    )


def test_a_waiting_queue_is_merged_up_to_the_limit_without_splitting_requests(controlled):
    server = controlled("--max-batch-size", "8", "--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(server.infer, [1.0] * 4)  # occupies the engine
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine has the first request")
        sizes = [3, 4, 5, 3, 8, 1]  # in this order: 3+4, 5+3, 8, 1
        futures = []
        for count, size in enumerate(sizes, 1):
            futures.append(pool.submit(server.infer, *[[float(size)] * 4] * size))
            server.wait_until(lambda: server.metric(PENDING) == count, f"{count} requests wait")  # noqa: B023
        server.open("infer")
        assert rows(first.result()) == [[1.0] * 4]
        for size, future in zip(sizes, futures, strict=True):
            assert rows(future.result()) == [[float(size)] * 4] * size
    batches = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in server.model_stats()["batch_stats"]}
    assert batches == {1: 2, 7: 1, 8: 2}


def test_a_full_queue_refuses_at_once_and_health_answers(controlled):
    server = controlled("--queue-size", "2", "--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(3) as pool:
        accepted = [pool.submit(server.infer, [1.0] * 4)]
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        accepted += [pool.submit(server.infer, [2.0] * 4) for _ in range(2)]
        server.wait_until(lambda: server.metric(PENDING) == 2, "the queue is full")
        refused = server.infer([3.0] * 4)
        assert refused.status == 503
        assert "Exceeds maximum queue size" in json.loads(refused.body)["error"]
        assert refused.headers["retry-after"]
        assert server.status("/v2/health/ready") == 200
        server.open("infer")
        assert [future.result().status for future in accepted] == [200] * 3
    assert server.metric('abserve_native_requests_failure_total{model="rows",reason="queue_full"') == 1


def test_a_request_whose_time_is_over_is_told_so_while_the_engine_is_busy(controlled):
    server = controlled("--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.infer, [1.0] * 4)
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2, 2, 2, 2]}
        body = json.dumps({"inputs": [tensor], "parameters": {"timeout": 20_000}}).encode()
        late = server.request("POST", "/v2/models/rows/infer", body)  # answered although the gate is closed
        assert late.status == 503
        assert json.loads(late.body)["error"] == "Request timeout expired"
        server.open("infer")
        assert first.result().status == 200
    assert server.model_stats()["inference_count"] == 1


def test_a_client_that_leaves_is_neither_executed_nor_counted_as_a_failure(controlled):
    server = controlled("--max-queue-delay-us", "0")
    server.open("load")
    server.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.infer, [1.0] * 4)
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2, 2, 2, 2]}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = f"POST /v2/models/rows/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as queued:
            queued.sendall(head + body)
            server.wait_until(lambda: server.metric(PENDING) == 1, "its request waits")
        server.wait_until(lambda: server.metric(PENDING) == 0, "it is dropped from the queue")
        with socket.create_connection(("127.0.0.1", server.port)) as unfinished:
            unfinished.sendall(head + body[:10])
        server.wait_until(lambda: server.metric("abserve_native_client_disconnects_total") == 2, "both are counted")
        server.open("infer")
        assert first.result().status == 200
    stats = server.model_stats()
    assert stats["inference_count"] == 1
    assert stats["inference_stats"]["fail"]["count"] == 0


def test_a_failing_batch_fails_alone_and_a_nan_row_spoils_no_other(controlled):
    server = controlled()
    server.open("load", "infer")
    server.wait_ready()
    failed = server.infer([666.0] * 4)
    assert failed.status == 500
    assert "secret" not in failed.body.decode()
    mixed = rows(server.infer([13.0] * 4, [5.0] * 4))
    assert mixed[1] == [5.0] * 4
    assert np.isnan(mixed[0]).all()
    assert rows(server.infer([7.0] * 4)) == [[7.0] * 4]


def test_an_added_delay_delays_each_answer_and_blocks_none(controlled):
    server = controlled("--added-delay-ms", "150")
    server.open("load", "infer")
    server.wait_ready()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda value: rows(server.infer([float(value)] * 4)), range(20, 28)))
    assert answers == [[[float(value)] * 4] for value in range(20, 28)]
    success = server.model_stats()["inference_stats"]["success"]
    assert success["ns"] / success["count"] >= 150e6
    config = json.loads(server.request("GET", "/v2/models/rows/config").body)
    assert config["parameters"]["added_delay_ms"] == {"string_value": "150"}


def test_decompressed_bodies_count_among_those_that_are_held(controlled):
    """A few hundred bytes could hold as many MiB as a body may have, whatever `max_held_bytes` said."""
    server = controlled("--max-queue-delay-us", "0", "--max-held-bytes", "100000")
    server.open("load")
    server.wait_ready()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [2.0] * 4}
    body = gzip.compress(json.dumps({"inputs": [tensor]}).encode() + b" " * 60_000)

    def compressed():
        return server.request("POST", "/v2/models/rows/infer", body, {"Content-Encoding": "gzip"})

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.infer, [1.0] * 4)
        server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
        second = pool.submit(compressed)
        server.wait_until(lambda: server.metric(PENDING) == 1, "one waits, with 60 kB")
        refused = compressed()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "memory for requests" in json.loads(refused.body)["error"]
        server.open("infer")
        assert [rows(first.result()), rows(second.result())] == [[[1.0] * 4], [[2.0] * 4]]
    assert rows(compressed()) == [[2.0] * 4]
