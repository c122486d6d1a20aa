"""ModelStreamInfer of the native server's language models, with the scripted engine: bytes, limits and clients that
leave or do not read."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from servers.native.shared.errors import HOLDS_ENOUGH
from tests.grpc_streams import collect, inputs, stream
from tests.integration.language.conftest import StartGated
from tests.integration.language.test_native_life import FRONTS, hold, number, release
from tests.integration.native.conftest import Server, wait_until
from tests.integration.native.raw_grpc import DATA, END_STREAM, RST_STREAM, RawGrpc, frame, prefixed
from tests.scripted_generation import scripted_answer

SECONDS = 20
CANCEL = 8
DISCONNECTS = "abserve_native_client_disconnects_total{"
SLOTS = "abserve_native_slots_in_use{"
UNAVAILABLE = 'abserve_native_requests_failure_total{model="scripted",reason="unavailable"'
SLOW = 'abserve_native_requests_failure_total{model="scripted",reason="slow_client"'


def message(prompt: list[int], most: int, request_id: str = "") -> Any:
    made = service_pb2.ModelInferRequest(model_name="scripted", id=request_id)
    for tensor in inputs(prompt, most):
        made.inputs.append(tensor._get_tensor())
        made.raw_input_contents.append(tensor._get_content())
    return made


def data(made: Any, flags: int = 0) -> bytes:
    """The frame with a message of the first call."""
    return frame(DATA, flags, 1, prefixed(made.SerializeToString()))


def responses(received: bytes) -> list[Any]:
    """The complete messages."""
    messages = []
    while len(received) >= 5 and len(received) >= 5 + (size := int.from_bytes(received[1:5], "big")):
        messages.append(service_pb2.ModelStreamInferResponse.FromString(received[5 : 5 + size]))
        received = received[5 + size :]
    return messages


def tokens(answers: list[Any], request_id: str = "") -> list[int]:
    return [
        int(np.frombuffer(answer.infer_response.raw_output_contents[0], "<i4")[0])
        for answer in answers
        if answer.infer_response.id == request_id
    ]


@contextmanager
def opened(server: Server, **settings: Any) -> Iterator[RawGrpc]:
    """A connection whose first call is a stream."""
    with RawGrpc(server.grpc_port, **settings) as client:
        client.open(1, "ModelStreamInfer")
        yield client


def read_messages(client: RawGrpc, count: int) -> list[Any]:
    while len(messages := responses(client.answers[1].data if 1 in client.answers else b"")) < count:
        assert not client.closed
        client.read()
    return messages


def ready(start: StartGated, *options: str) -> Server:
    server = start(*options, grpc=True)
    (server.folder / "load").touch()
    server.wait_ready()
    return server


def test_windows_of_a_few_bytes_cut_no_token(scripted: Server) -> None:
    with opened(scripted, window=50) as client:
        client.send(data(message([5, 17], 30, "a"), END_STREAM))
        while not client.answers.get(1) or not client.answers[1].ended:
            client.read()
            client.widen(1, 77)
        messages = responses(client.answers[1].data)
    assert tokens(messages, "a") == scripted_answer([5, 17], 30)
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in messages]
    assert finals == [False] * 29 + [True]
    assert client.answers[1].status == 0


def test_a_client_that_has_sent_its_last_request_gets_all_answers(scripted: Server) -> None:
    with opened(scripted) as client:
        client.send(data(message([5, 17], 20, "a")), data(message([6], 30, "b"), END_STREAM))
        answer = client.answer(1)
    assert answer.status == 0
    assert tokens(responses(answer.data), "a") == scripted_answer([5, 17], 20)
    assert tokens(responses(answer.data), "b") == scripted_answer([6], 30)


def test_requests_with_one_id_are_two_requests(scripted: Server) -> None:
    with opened(scripted) as client:
        client.send(data(message([5], 3, "a")), data(message([5], 3, "a"), END_STREAM))
        answer = client.answer(1)
    assert sorted(tokens(responses(answer.data), "a")) == sorted(scripted_answer([5], 3) * 2)


def test_more_requests_than_are_answered_at_once_wait_their_turn(scripted: Server) -> None:
    """The client reads nothing before it has sent them all."""
    with opened(scripted, window=2**31 - 1) as client:
        client.widen(0, 2**31 - 1 - 65535)
        for index in range(300):
            client.send(data(message([5, index], 2, str(index)), END_STREAM if index == 299 else 0))
        answer = client.answer(1)
    assert answer.status == 0
    messages = responses(answer.data)
    for index in range(300):
        refused = [reply for reply in messages if reply.infer_response.id == str(index) and reply.error_message]
        assert refused or tokens(messages, str(index)) == scripted_answer([5, index], 2)


def test_a_long_typed_prompt_is_read_in_a_thread(scripted: Server) -> None:
    made = service_pb2.ModelInferRequest(model_name="scripted", id="a")
    prompt = [900] * 200
    for name, datatype, values in (("input_ids", "INT32", prompt), ("max_tokens", "INT32", [3])):
        made.inputs.add(name=name, datatype=datatype, shape=[len(values)]).contents.int_contents.extend(values)
    made.parameters["padding"].string_param = "x" * 5000
    with opened(scripted) as client:
        client.send(data(made, END_STREAM))
        assert tokens(responses(client.answer(1).data), "a") == scripted_answer(prompt, 3)


def test_a_message_that_holds_more_than_a_prompt_is_one_error(scripted: Server) -> None:
    made = message([5], 3)
    made.parameters["padding"].string_param = "x" * 100_000
    with opened(scripted) as client:
        client.send(data(made), frame(DATA, END_STREAM, 1, prefixed(b"\xff\xff")))
        too_large, malformed = responses(client.answer(1).data)
    assert "a prompt that the model takes has at most" in too_large.error_message
    assert malformed.error_message == "the message ends inside a field"


def test_tensors_in_shared_memory_and_unknown_outputs_are_errors(scripted: Server) -> None:
    made = message([5], 3)
    made.inputs[0].parameters["shared_memory_region"].string_param = "x"
    made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    del made.raw_input_contents[0]
    with opened(scripted) as client:
        client.send(data(made, END_STREAM))
        (answer,) = responses(client.answer(1).data)
    assert answer.error_message == "a language model takes no tensors in shared memory"
    with grpc.insecure_channel(scripted.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="no tensors in shared memory"):
            stub.SystemSharedMemoryStatus(service_pb2.SystemSharedMemoryStatusRequest(), timeout=SECONDS)


def test_streams_are_counted(scripted: Server) -> None:
    def counts() -> list[float]:
        names = (
            *("prompt_tokens_total", "output_tokens_total", "requests_success_total"),
            "first_token_duration_seconds_count",
        )
        return [scripted.metric(f"abserve_native_{name}{{") for name in names]

    before = counts()
    with stream(scripted.grpc_address) as (client, arrived):
        client.async_stream_infer("scripted", inputs([5, 17, 3], 6), request_id="a")
        client.async_stream_infer("scripted", inputs([5], 1), request_id="b")
        collect(arrived, 2)
    assert [after - was for after, was in zip(counts(), before, strict=True)] == [4, 7, 2, 2]


# Clients that leave


@pytest.mark.slow
@FRONTS
@pytest.mark.parametrize("leave", ["cancels", "closes"])
def test_a_client_that_leaves_frees_its_slots_within_one_step(gated: StartGated, fronts: str, leave: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "2")
    hold(server, 3)
    with opened(server) as client:
        client.send(data(message([5], 200, "a")), data(message([6], 200, "b")))
        read_messages(client, 2)  # of one request or of both
        wait_until(lambda: number(server, "steps") == 3, "the engine is in the third step")
        if leave == "cancels":
            client.send(frame(RST_STREAM, 0, 1, CANCEL.to_bytes(4, "big")))
        else:
            client.socket.close()
        wait_until(lambda: server.metric(DISCONNECTS) == 2, "the server has noticed")
        release(server)
        wait_until(lambda: server.metric(SLOTS) == 0, "the slots are free")
        assert number(server, "steps") == 3  # the step that was running, and no other
        if leave == "cancels":
            client.open(3, "ModelStreamInfer")
            client.send(frame(DATA, END_STREAM, 3, prefixed(message([5], 3).SerializeToString())))
            assert tokens(responses(client.answer(3).data)) == scripted_answer([5], 3)


@pytest.mark.slow
@FRONTS
def test_a_deadline_frees_the_slot(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server, 3)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([message([5], 200)]), timeout=3)
        next(answers)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    expired = 'abserve_native_requests_failure_total{model="scripted",reason="expired"'
    wait_until(lambda: server.metric(DISCONNECTS) + server.metric(expired) == 1, "the server has noticed")
    release(server)
    wait_until(lambda: server.metric(SLOTS) == 0, "the slot is free")
    assert number(server, "steps") == 3


@pytest.mark.slow
@FRONTS
def test_more_requests_than_may_wait_are_errors_of_their_own(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1", "--queue-size", "2")
    hold(server)
    with opened(server) as client:
        client.send(data(message([5], 3, "0")))
        wait_until(lambda: number(server, "steps") == 1, "the first has the slot")
        client.send(*(data(message([5], 3, str(index)), END_STREAM if index == 4 else 0) for index in range(1, 5)))
        client.call(3, b"", "ServerLive")  # comes after them, so they are with the engine when it is answered
        release(server)
        answer = client.answer(1)
    messages = responses(answer.data)
    errors = {reply.infer_response.id: reply.error_message for reply in messages if reply.error_message}
    assert errors == dict.fromkeys("34", "Exceeds maximum queue size of 2 requests")
    answered = [reply for reply in messages if not reply.error_message]
    assert [tokens(answered, name) for name in "012"] == [scripted_answer([5], 3)] * 3
    full = 'abserve_native_requests_failure_total{model="scripted",reason="queue_full"'
    assert server.metric(full) == 2


@pytest.mark.slow
@FRONTS
def test_a_request_for_which_there_is_no_memory_is_an_error_of_its_own(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1", "--max-held-bytes", "20000")
    hold(server, 3)
    with opened(server) as client:
        client.send(data(message([5], 20, "runs")))
        read_messages(client, 2)
        client.send(*(data(message([5], 3, str(index)), END_STREAM if index == 7 else 0) for index in range(8)))
        wait_until(lambda: server.metric(UNAVAILABLE) == 4, "half of them are refused")
        release(server)
        answer = client.answer(1)
    assert answer.status == 0
    messages = responses(answer.data)
    errors = {reply.infer_response.id: reply.error_message for reply in messages if reply.error_message}
    assert errors == dict.fromkeys("4567", HOLDS_ENOUGH)
    answered = [reply for reply in messages if not reply.error_message]
    assert tokens(answered, "runs") == scripted_answer([5], 20)
    assert [tokens(answered, name) for name in "0123"] == [scripted_answer([5], 3)] * 4


# Clients that do not read


@pytest.mark.slow
@FRONTS
@pytest.mark.parametrize("how", ["window", "socket"])
def test_a_client_that_does_not_read_is_cut_off_after_a_bound(gated: StartGated, fronts: str, how: str) -> None:
    """Either its window stays shut, or it reads nothing from its socket at all."""
    server = ready(gated, "--fronts", fronts, "--slots", "2", "--max-length", "100000", "--read-timeout-s", "60")
    window = 1000 if how == "window" else 2**31 - 1
    with opened(server, window=window) as client:
        client.widen(0, 2**31 - 1 - 65535)
        client.send(data(message([5], 90_000)))
        wait_until(lambda: server.metric(SLOW) == 1, "it is cut off")
        wait_until(lambda: server.metric(SLOTS) == 0, "the slot is free")
        assert 0 < server.metric("abserve_native_output_tokens_total{") < 80_000
        if how == "window":  # only the call has ended
            assert client.answer(1).reset == CANCEL
            client.open(3, "ModelStreamInfer")
            client.widen(3, 2**20)
            client.send(frame(DATA, END_STREAM, 3, prefixed(message([5], 3).SerializeToString())))
            assert tokens(responses(client.answer(3).data)) == scripted_answer([5], 3)


@pytest.mark.slow
@FRONTS
def test_a_client_that_stops_reading_for_too_long_is_cut_off(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--max-length", "100000", "--read-timeout-s", "0.3")
    with opened(server, window=1000) as client:
        client.send(data(message([5], 5000)))  # less than the bound
        assert client.answer(1).reset == CANCEL
    wait_until(lambda: server.metric(SLOTS) == 0, "the slot is free")


@pytest.mark.slow
@FRONTS
def test_what_the_systems_buffers_hold_is_unread_too(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--max-length", "10000", "--read-timeout-s", "0.3")
    hold(server, 3000)
    with opened(server, window=2**31 - 1) as client, opened(server) as reader:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.widen(0, 2**31 - 1 - 65535)
        client.send(data(message([5], 5000)))
        reader.send(data(message([5], 9)))
        assert len(read_messages(reader, 9)) == 9
        wait_until(lambda: server.metric(SLOW) == 1, "it is cut off")
        reader.send(data(message([6], 3)))
        release(server)
        assert len(read_messages(reader, 12)) == 12


# The end


@pytest.mark.slow
@FRONTS
def test_accepted_work_is_finished_at_the_end(gated: StartGated, fronts: str) -> None:
    """The client leaves its call open: the server ends it behind the last answer."""
    server = ready(gated, "--fronts", fronts, "--slots", "1")
    hold(server, 3)
    with opened(server) as client:
        client.send(data(message([5], 20)))
        wait_until(lambda: number(server, "steps") == 3, "it has the slot")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.status("/v2/health/live") is None, "nothing new is accepted")
        while client.goaway is None:
            client.read()
        release(server)
        answer = client.answer(1)
    assert tokens(responses(answer.data)) == scripted_answer([5], 20)
    assert answer.status == 14
    assert server.process.wait(60) == 0


@pytest.mark.slow
@FRONTS
def test_work_that_takes_too_long_ends_with_unavailable(gated: StartGated, fronts: str) -> None:
    server = ready(gated, "--fronts", fronts, "--slots", "1", "--shutdown-timeout-s", "1")
    hold(server, 3)
    with opened(server) as client:
        client.send(data(message([5], 200)))
        wait_until(lambda: number(server, "steps") == 3, "it has the slot")
        server.process.send_signal(signal.SIGTERM)
        answer = client.answer(1)
    assert answer.status == 14
    assert "shutting down" in answer.headers["grpc-message"]
    assert server.process.wait(60) in (0, 1)


@pytest.mark.slow
def test_the_death_of_the_engines_process_is_an_error_of_each_request(gated: StartGated) -> None:
    server = ready(gated, "--fronts", "1", "--slots", "1")
    hold(server, 3)
    with opened(server) as client:
        client.send(data(message([5], 200, "a")), data(message([5], 200, "b")))
        wait_until(lambda: number(server, "steps") == 3, "the engine is in the third step")
        os.kill(number(server, "pid"), signal.SIGKILL)
        messages = responses(client.answer(1).data)
    errors = {answer.infer_response.id: answer.error_message for answer in messages if answer.error_message}
    assert errors == dict.fromkeys("ab", "the engine has ended, send the request again later")
    assert server.process.wait(60) == 1


@pytest.mark.slow
@FRONTS
def test_requests_before_the_engine_is_warm_are_errors(gated: StartGated, fronts: str) -> None:
    server = gated("--fronts", fronts, grpc=True)
    with grpc.insecure_channel(server.grpc_address) as channel:
        grpc.channel_ready_future(channel).result(timeout=SECONDS)
    with stream(server.grpc_address) as (client, arrived):
        client.async_stream_infer("scripted", inputs([5], 3))
        _, (error,), _ = collect(arrived, 1)
        assert "not ready" in error
        (server.folder / "load").touch()
        server.wait_ready()
        client.async_stream_infer("scripted", inputs([5], 3), request_id="a")
        answers, _, _ = collect(arrived, 1)
    assert answers["a"].tokens == scripted_answer([5], 3)
