"""One script of unmodified tritonclient streams tokens from the native server and from a real Triton."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from servers.triton.launch import find_installation, prepare_language
from servers.triton.process import TritonProcess
from tests.grpc_streams import Streamed, collect, inputs, stream, stream_with_asyncio
from tests.integration.native.conftest import _starter, _stop, status_of
from tests.integration.plain.test_generate_server import PROMPTS, generated, generated_with_eos
from tests.integration.triton.conftest import READY_SECONDS, settings

OPTIONS: dict[str, Any] = {"model": "language:tiny", "device": "cpu", "threads": 1, "slots": 2, "max_length": 128}


def native(folder: Path) -> Iterator[str]:
    servers: list[Any] = []
    options = [text for name, value in OPTIONS.items() for text in (f"--{name}", str(value))]
    server = _starter(folder, lambda _: ["-m", "servers.native"], servers)(*options, grpc=True)
    try:
        server.wait_ready()
        yield server.grpc_address
    finally:
        _stop(servers)


def real_triton(folder: Path) -> Iterator[str]:
    options = settings(folder, **OPTIONS)
    plan = prepare_language(options, find_installation(options))
    with TritonProcess(plan, folder / "log") as process:
        assert process.wait_ready(READY_SECONDS)
        assert plan.grpc_address is not None
        yield plan.grpc_address


# By default triton/test_language_model.py has a real Triton stream the same tokens, over HTTP and gRPC.
@pytest.fixture(
    scope="module", params=[native, pytest.param(real_triton, marks=[pytest.mark.triton, pytest.mark.slow])]
)
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from request.param(tmp_path_factory.mktemp("grpc"))


def assert_whole(answer: Streamed, prompt: list[int], expected: list[int], finish: str = "length") -> None:
    assert answer.tokens == expected
    assert answer.responses == len(expected)
    assert (answer.prompt_tokens, answer.first_tells_prompt) == ([len(prompt)], True)
    assert (answer.finish, answer.final) == (finish, True)


def test_each_token_is_a_response_and_the_last_one_is_final(address: str) -> None:
    with stream(address) as (client, arrived):
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 12), request_id="a")
        answers, errors, _ = collect(arrived, 1)
    assert not errors
    assert_whole(answers["a"], PROMPTS[0], generated(PROMPTS[0], 12))


@pytest.mark.parametrize("empty_final", [False, True])
def test_no_response_is_empty(address: str, empty_final: bool) -> None:
    """The last token is the final response, so the parameter adds none."""
    with stream(address) as (client, arrived):
        client.async_stream_infer(
            "tiny", inputs(PROMPTS[0], 3), request_id="a", enable_empty_final_response=empty_final
        )
        client.async_stream_infer("tiny", inputs(PROMPTS[1], 1), request_id="b")
        answers, _, _ = collect(arrived, 2)
        assert arrived.empty()
    assert_whole(answers["a"], PROMPTS[0], generated(PROMPTS[0], 3))
    assert_whole(answers["b"], PROMPTS[1], generated(PROMPTS[1], 1))


def test_requests_of_one_stream_are_answered_side_by_side(address: str) -> None:
    with stream(address) as (client, arrived):
        for number, prompt in enumerate(PROMPTS):
            client.async_stream_infer("tiny", inputs(prompt, 40), request_id=str(number))
        answers, errors, order = collect(arrived, len(PROMPTS))
    assert not errors
    for number, prompt in enumerate(PROMPTS):
        assert_whole(answers[str(number)], prompt, generated(prompt, 40))
    assert order.index("1") < 40, "the second answer began when the first had ended"


def test_an_error_of_one_request_leaves_the_stream_and_the_others_alone(address: str) -> None:
    with stream(address) as (client, arrived):
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 40), request_id="a")
        client.async_stream_infer("tiny", inputs([5000], 4), request_id="bad")
        client.async_stream_infer("nope", inputs(PROMPTS[0], 4))
        client.async_stream_infer("tiny", inputs(PROMPTS[0], None, None))
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 0))
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 1000))
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 4), outputs=[triton.InferRequestedOutput("x")])
        client.async_stream_infer("tiny", inputs(PROMPTS[2], 5), request_id="b")
        answers, errors, _ = collect(arrived, 8)
    assert_whole(answers["a"], PROMPTS[0], generated(PROMPTS[0], 40))
    assert_whole(answers["b"], PROMPTS[2], generated(PROMPTS[2], 5))
    for words in (
        "token id 5000 is not in the vocabulary; ids are from 0 to 1023",
        "Request for unknown model: 'nope' is not found",
        "missing",
        "max_tokens is 0; it must be at least 1",
        "together they must not exceed the maximum length of 128",
        "unexpected inference output 'x' for model 'tiny'",
    ):
        assert sum(words in error for error in errors) == 1, (words, errors)


def test_a_client_with_asyncio_streams(address: str) -> None:
    requests = [
        {"model_name": "tiny", "inputs": inputs(PROMPTS[0], 9), "request_id": "a"},
        {"model_name": "tiny", "inputs": inputs([5000], 9), "request_id": "bad"},
        {"model_name": "tiny", "inputs": inputs(PROMPTS[1], 7), "request_id": "b", "model_version": "1"},
    ]
    answers, errors = asyncio.run(stream_with_asyncio(address, requests))
    assert_whole(answers["a"], PROMPTS[0], generated(PROMPTS[0], 9))
    assert_whole(answers["b"], PROMPTS[1], generated(PROMPTS[1], 7))
    (error,) = errors
    assert "token id 5000" in error


def test_an_answer_stops_at_eos_only_where_it_is_not_ignored(address: str) -> None:
    prompt, expected, until_eos = generated_with_eos(24)
    with stream(address) as (client, arrived):
        client.async_stream_infer("tiny", inputs(prompt, 24, ignore_eos=False), request_id="stops")
        client.async_stream_infer("tiny", inputs(prompt, 24, ignore_eos=None), request_id="goes on")
        answered, _, _ = collect(arrived, 2)
    assert_whole(answered["stops"], prompt, until_eos, "stop")
    assert_whole(answered["goes on"], prompt, expected)


def test_only_the_outputs_that_are_asked_for_are_sent(address: str) -> None:
    with stream(address) as (client, arrived):
        for name in ("token_ids", "finish_reason"):
            outputs = [triton.InferRequestedOutput(name)]
            client.async_stream_infer("tiny", inputs(PROMPTS[0], 4), request_id=name, outputs=outputs)
        answers, _, _ = collect(arrived, 2)
    tokens, finish = answers["token_ids"], answers["finish_reason"]
    assert (tokens.tokens, tokens.prompt_tokens, tokens.finish) == (generated(PROMPTS[0], 4), [], None)
    assert (finish.tokens, finish.responses, finish.finish) == ([], 4, "length")


def test_typed_contents_are_as_good_as_raw_ones(address: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="tiny", id="typed")
    tensors = (("input_ids", "INT32", PROMPTS[0]), ("max_tokens", "INT32", [4]), ("ignore_eos", "BOOL", [True]))
    for name, datatype, values in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        (tensor.contents.bool_contents if datatype == "BOOL" else tensor.contents.int_contents).extend(values)
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(iter([message]), timeout=30))
    answer = Streamed()
    for response in responses:
        assert response.infer_response.id == "typed"
        answer.add(triton.InferResult(response.infer_response))
    assert_whole(answer, PROMPTS[0], generated(PROMPTS[0], 4))


def test_an_error_names_its_request(address: str) -> None:
    """tritonclient drops the id; the message has it, with Triton as well."""
    message = service_pb2.ModelInferRequest(model_name="tiny", id="bad")
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stub.ModelStreamInfer(iter([message]), timeout=30)
    assert response.error_message
    assert response.infer_response.id == "bad"


def test_a_parameter_of_another_type_is_an_error(address: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="tiny")
    message.parameters["triton_enable_empty_final_response"].string_param = "x"
    for tensor in inputs(PROMPTS[0], 4):
        message.inputs.append(tensor._get_tensor())
        message.raw_input_contents.append(tensor._get_content())
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (response,) = stub.ModelStreamInfer(iter([message]), timeout=30)
    assert response.error_message == (
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param."
    )


def test_infer_without_a_stream_is_refused(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as caught:
            client.infer("tiny", inputs(PROMPTS[0], 4))
        assert status_of(caught) == "UNIMPLEMENTED"
        with pytest.raises(InferenceServerException, match="unknown model") as caught:
            client.infer("nope", inputs(PROMPTS[0], 4))
        assert status_of(caught) == "NOT_FOUND"


def test_a_compressed_request_is_read(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        arrived: Any = []
        client.start_stream(lambda result, error: arrived.append(error or result), compression_algorithm="gzip")
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 4), request_id="a")
        client.stop_stream()
    assert [token for result in arrived for token in result.as_numpy("token_ids").tolist()] == generated(PROMPTS[0], 4)


def test_a_client_finds_what_it_asks_for(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        metadata = client.get_model_metadata("tiny")
        shapes = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs}
        assert shapes == {"input_ids": ("INT32", [-1]), "max_tokens": ("INT32", [1]), "ignore_eos": ("BOOL", [1])}
        assert [tensor.name for tensor in metadata.outputs] == ["token_ids", "prompt_tokens", "finish_reason"]
        config = client.get_model_config("tiny").config
        assert config.model_transaction_policy.decoupled
        assert {tensor.name for tensor in config.input if tensor.optional} == {"ignore_eos"}
        assert (config.parameters["engine"].string_value, config.max_batch_size) == ("slots", 0)
        (statistics,) = client.get_inference_statistics("tiny").model_stats
        assert statistics.inference_stats.success.count > 0
        assert [(row.name, row.state) for row in client.get_model_repository_index().models] == [("tiny", "READY")]
        assert client.get_server_metadata().name


def test_a_client_that_cancels_leaves_room_for_others(address: str) -> None:
    for _ in range(5):
        with triton.InferenceServerClient(address) as client:
            arrived: Any = []
            client.start_stream(lambda result, error, seen=arrived: seen.append(error or result))
            for number in range(3):
                client.async_stream_infer("tiny", inputs(PROMPTS[0], 120), request_id=str(number))
            client.stop_stream(cancel_requests=True)
    with stream(address) as (client, results):
        client.async_stream_infer("tiny", inputs(PROMPTS[0], 3), request_id="a")
        answers, errors, _ = collect(results, 1)
    assert not errors
    assert_whole(answers["a"], PROMPTS[0], generated(PROMPTS[0], 3))
