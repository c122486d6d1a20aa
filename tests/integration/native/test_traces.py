"""Spans of requests reach an OTLP receiver, as parts of their callers' traces."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
import tritonclient.grpc

from tests.integration.native.conftest import Server
from tests.span_receiver import CALLER, PARENT, TRACE, Receiver, receiving

OF_ONE = {"infer", "queue", "execution", "answer", "batch"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@pytest.fixture
def traced(controlled, receiver: Receiver) -> Callable[..., Server]:
    """Starts a ready server that sends its spans to the receiver."""

    def start(*options: str) -> Server:
        server: Server = controlled(*("--traces", receiver.url, "--max-queue-delay-us", "0", *options), grpc=True)
        server.open("load", "infer")
        server.wait_ready()
        return server

    return start


def ask(server: Server, traceparent: str | None, value: float = 1.0) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    if traceparent is not None:
        headers["traceparent"] = traceparent
    content = header + np.full(4, value, "<f4").tobytes()
    return server.request("POST", "/v2/models/rows/infer", content, headers).status


def check_trace(receiver: Receiver) -> None:
    """The spans of one request whose caller is `CALLER`."""
    (request,), (batch,), (execution,) = map(receiver.named, ("infer", "batch", "execution"))
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    for name in ("queue", "execution", "answer"):
        (child,) = receiver.named(name)
        assert (child.trace_id, child.parent_span_id) == (request.trace_id, request.span_id)
        assert request.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= request.end_time_unix_nano
    assert [link.span_id for link in batch.links] == [request.span_id]
    assert [link.span_id for link in execution.links] == [batch.span_id]


@pytest.mark.parametrize("fronts", ["0", "1"])
def test_a_request_over_http_is_a_part_of_its_callers_trace(traced, receiver: Receiver, fronts: str) -> None:
    server = traced("--trace-share", "0", "--fronts", fronts)
    assert ask(server, None) == 200
    assert ask(server, CALLER[:-1] + "0") == 200
    assert ask(server, CALLER) == 200
    server.wait_until(lambda: {span.name for span in receiver.spans} == OF_ONE, "all spans have come")
    check_trace(receiver)


def test_a_request_over_grpc_is_a_part_of_its_callers_trace(traced, receiver: Receiver) -> None:
    server = traced("--trace-share", "0", "--fronts", "1")
    tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    with closing(tritonclient.grpc.InferenceServerClient(server.grpc_address)) as client:
        client.infer("rows", [tensor])
        client.infer("rows", [tensor], headers={"traceparent": CALLER})
    server.wait_until(lambda: {span.name for span in receiver.spans} == OF_ONE, "all spans have come")
    check_trace(receiver)


def test_the_end_of_a_server_sends_what_it_has(traced, receiver: Receiver) -> None:
    """Requests without a caller's trace begin one, in the share that is traced; one that fails says so."""
    server = traced("--trace-share", "1", "--fronts", "1")
    assert [ask(server, None), server.infer([1.0] * 4).status, ask(server, None, 666)] == [200, 200, 500]
    server.process.terminate()
    assert server.process.wait(60) == 0
    requests = receiver.named("infer")
    assert len({span.trace_id for span in requests}) == 3
    assert [span.parent_span_id for span in requests] == [b""] * 3
    assert sorted(span.status.code for span in requests) == [0, 0, 2]
    assert len(receiver.named("answer")) == len(receiver.named("execution")) == 2


def test_a_client_that_leaves_ends_its_trace(traced, receiver: Receiver) -> None:
    server = traced("--trace-share", "1", "--max-batch-size", "1")
    (server.folder / "infer").unlink()
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]})
    request = f"POST /v2/models/rows/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with ExitStack() as stack:
        for _ in range(2):  # the second one waits while the first is executed
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)).sendall(request)
        server.wait_until(lambda: server.metric("abserve_native_pending_requests") == 1, "one waits")
    server.open("infer")
    server.wait_until(lambda: len(receiver.named("infer")) == 2, "their spans have come")
    assert [span.status.message for span in receiver.named("infer")] == ["disconnected"] * 2
