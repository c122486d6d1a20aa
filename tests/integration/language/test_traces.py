"""Spans of requests to a language model reach an OTLP receiver, over HTTP and gRPC."""

from __future__ import annotations

from tests.grpc_streams import inputs, stream
from tests.integration.language.conftest import StartGated
from tests.span_receiver import CALLER, PARENT, TRACE, receiving


def test_an_answer_begins_with_the_first_token(gated: StartGated) -> None:
    with receiving() as receiver:
        server = gated("--traces", receiver.url, "--trace-share", "0", grpc=True)
        server.open("load")
        server.wait_ready()
        body = b'{"model": "scripted", "prompt": [1, 2], "max_tokens": 3}'
        assert server.request("POST", "/v1/completions", body, {"traceparent": CALLER}).status == 200
        assert server.request("POST", "/v1/completions", body).status == 200
        with stream(server.grpc_address, {"traceparent": CALLER}) as (client, arrived):
            client.async_stream_infer("scripted", inputs([1, 2], 3))
            while not arrived.get(timeout=60).get_response().parameters["triton_final_response"].bool_param:
                pass
        server.wait_until(lambda: len(receiver.named("answer")) == len(receiver.named("infer")) == 2, "all have come")
    for request in receiver.named("infer"):
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        (answer,) = [span for span in receiver.named("answer") if span.parent_span_id == request.span_id]
        assert request.start_time_unix_nano < answer.start_time_unix_nano < answer.end_time_unix_nano
