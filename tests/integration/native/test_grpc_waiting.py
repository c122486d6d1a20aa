"""gRPC calls that wait for an engine: cancellation, deadlines, a full queue, a model that loads, a shutdown."""

from __future__ import annotations

import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.integration.native.conftest import status_of

PENDING = "abserve_native_pending_requests"


def row(value: float) -> list[triton.InferInput]:
    item = triton.InferInput("x", [1, 4], "FP32")
    item.set_data_from_numpy(np.full((1, 4), value, np.float32))
    return [item]


def occupied(controlled, *options):
    """A server whose engine is busy with one request, and the future of that request's answer."""
    server = controlled("--max-queue-delay-us", "0", *options, grpc=True)
    server.open("load")
    server.wait_ready()
    pool = ThreadPoolExecutor(1)
    first = pool.submit(server.infer, [1.0] * 4)
    pool.shutdown(wait=False)
    server.wait_until(lambda: (server.folder / "infer-reached").exists(), "the engine is busy")
    return server, first


def test_a_cancelled_call_leaves_the_queue(controlled):
    server, first = occupied(controlled)
    with triton.InferenceServerClient(server.grpc_address) as client:
        answers: queue.Queue = queue.Queue()
        call = client.async_infer("rows", row(2), lambda result, error: answers.put((result, error)))
        server.wait_until(lambda: server.metric(PENDING) == 1, "it waits")
        call.cancel()
        server.wait_until(lambda: server.metric(PENDING) == 0, "it has left the queue")
        assert "CANCELLED" in str(answers.get(timeout=60)[1]).upper()
        server.open("infer")
        assert first.result().status == 200
    assert server.model_stats()["inference_count"] == 1
    assert server.metric("abserve_native_client_disconnects_total") == 1


def test_a_call_whose_deadline_passes_while_it_waits_is_never_executed(controlled):
    server, first = occupied(controlled)
    with triton.InferenceServerClient(server.grpc_address) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.infer("rows", row(2), client_timeout=0.2)
        assert status_of(caught) == "DEADLINE_EXCEEDED"
        server.wait_until(lambda: server.metric(PENDING) == 0, "it has left the queue")
        began = time.monotonic()
        with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
            client.infer("rows", row(3), timeout=50_000)  # in µs; the engine is still busy
        assert status_of(caught) == "UNAVAILABLE"
        assert time.monotonic() - began < 5
        server.open("infer")
        assert first.result().status == 200
    assert server.model_stats()["inference_count"] == 1


def test_a_full_queue_is_unavailable_and_health_answers(controlled):
    server, first = occupied(controlled, "--queue-size", "1")
    with triton.InferenceServerClient(server.grpc_address) as client:
        answers: queue.Queue = queue.Queue()
        client.async_infer("rows", row(2), lambda result, error: answers.put((result, error)))
        server.wait_until(lambda: server.metric(PENDING) == 1, "the queue is full")
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as caught:
            client.infer("rows", row(3))
        assert status_of(caught) == "UNAVAILABLE"
        assert client.is_server_ready()
        server.open("infer")
        assert answers.get(timeout=60)[1] is None
        assert first.result().status == 200


def test_not_ready_until_the_model_is(controlled):
    server = controlled(grpc=True)
    server.wait_live()
    with triton.InferenceServerClient(server.grpc_address) as client:

        def live() -> bool:
            try:
                return client.is_server_live()
            except InferenceServerException:
                return False

        server.wait_until(live, "the gRPC front end is open")
        assert not client.is_server_ready()
        assert not client.is_model_ready("rows")
        with pytest.raises(InferenceServerException, match="not ready: loading") as caught:
            client.infer("rows", row(1))
        assert status_of(caught) == "UNAVAILABLE"
        server.open("load", "infer")
        server.wait_until(client.is_server_ready, "ready")
        assert client.infer("rows", row(1)).as_numpy("y").tolist() == [[1.0] * 4]


def test_sigterm_finishes_calls_of_both_doors(controlled):
    server, first = occupied(controlled)
    with triton.InferenceServerClient(server.grpc_address) as client:
        answers: queue.Queue = queue.Queue()
        for value in range(20, 25):
            client.async_infer("rows", row(value), lambda result, error: answers.put((result, error)))
        server.wait_until(lambda: server.metric(PENDING) == 5, "five calls wait")
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.status("/v2/health/live") is None, "new connections are refused")
        assert answers.empty()
        server.open("infer")
        results = [answers.get(timeout=60) for _ in range(5)]
        assert [error for _, error in results] == [None] * 5
        assert {result.as_numpy("y")[0, 0] for result, _ in results} == {20, 21, 22, 23, 24}
    assert first.result().status == 200
    assert server.process.wait(60) == 0


def test_messages_count_among_the_bytes_that_are_held(controlled):
    server, first = occupied(controlled, "--max-held-bytes", "100000")
    padding = {"padding": "x" * 60_000}
    with triton.InferenceServerClient(server.grpc_address) as client:
        answers: queue.Queue = queue.Queue()
        client.async_infer("rows", row(2), lambda result, error: answers.put((result, error)), parameters=padding)
        server.wait_until(lambda: server.metric(PENDING) == 1, "one waits, with 60 kB")
        with pytest.raises(InferenceServerException, match="memory for requests") as caught:
            client.infer("rows", row(3), parameters=padding)
        assert status_of(caught) == "UNAVAILABLE"
        server.open("infer")
        assert first.result().status == 200
        result, error = answers.get(timeout=60)
        assert (error, result.as_numpy("y").tolist()) == (None, [[2.0] * 4])
        assert client.infer("rows", row(3), parameters=padding).as_numpy("y").tolist() == [[3.0] * 4]
