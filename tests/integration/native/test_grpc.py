"""NVIDIA's own gRPC clients, unmodified, against the native server: answers, errors, limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.integration.native.conftest import status_of, wait_until

MODEL = "openclip_vit_b32"


@pytest.fixture
def client(open_server):
    with triton.InferenceServerClient(open_server.grpc_address) as client:
        yield client


@pytest.fixture
def stub(open_server):
    with grpc.insecure_channel(open_server.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 224, 224), dtype=np.float32)


def image_input(data: np.ndarray) -> triton.InferInput:
    item = triton.InferInput("pixel_values", list(data.shape), "FP32")
    item.set_data_from_numpy(data)
    return item


def first_values(data: np.ndarray) -> np.ndarray:
    return data.reshape(len(data), -1)[:, :512]


@pytest.mark.parametrize("count", [1, 8, 32])
def test_infers(client, count):
    data = images(count)
    result = client.infer(MODEL, [image_input(data)], request_id="seven", model_version="1")
    assert result.get_response().id == "seven"
    assert result.get_response().model_version == "1"
    np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(data))
    wanted = [triton.InferRequestedOutput("embedding")]
    assert client.infer(MODEL, [image_input(data)], outputs=wanted).as_numpy("embedding").shape == (count, 512)


def test_infers_asynchronously_and_keeps_answers_apart(client):
    answers: queue.Queue = queue.Queue()
    for index in range(12):
        client.async_infer(
            MODEL,
            [image_input(images(1, index))],
            lambda result, error: answers.put((result, error)),
            request_id=str(index),
        )
    seen = set()
    for _ in range(12):
        result, error = answers.get(timeout=60)
        assert error is None
        index = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(images(1, index)))
        seen.add(index)
    assert seen == set(range(12))


def test_streams_in_order_and_survives_a_bad_request(client):
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(MODEL, [image_input(images(1, 1))], request_id="1")
    client.async_stream_infer(MODEL, [image_input(np.zeros((1, 3, 224, 225), np.float32))], request_id="2")
    client.async_stream_infer(MODEL, [image_input(images(1, 3))], request_id="3")
    first, bad, last = (answers.get(timeout=60) for _ in range(3))
    client.stop_stream()
    assert first[1] is None
    assert first[0].get_response().id == "1"
    assert first[0].get_response().parameters["triton_final_response"].bool_param
    assert bad[0] is None
    assert "expected [-1,3,224,224]" in str(bad[1])
    np.testing.assert_array_equal(last[0].as_numpy("embedding"), first_values(images(1, 3)))


def test_aio_client_infers_streams_and_reads_statistics(open_server):
    async def talk() -> None:
        async with triton_aio.InferenceServerClient(open_server.grpc_address) as client:
            assert await client.is_server_ready()
            calls = [client.infer(MODEL, [image_input(images(1, seed))]) for seed in range(6)]
            for seed, result in enumerate(await asyncio.gather(*calls)):
                np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(images(1, seed)))

            async def requests():
                for seed in range(3):
                    yield {"model_name": MODEL, "inputs": [image_input(images(1, seed))]}

            seed = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None
                np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(images(1, seed)))
                seed += 1
            assert seed == 3
            statistics = await client.get_inference_statistics(MODEL, as_json=True)
            assert int(statistics["model_stats"][0]["inference_count"]) >= 9

    asyncio.run(talk())


def test_describes_itself_as_over_http(open_server, client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL, "1")
    for path, document in (
        ("/v2", client.get_server_metadata(as_json=True)),
        (f"/v2/models/{MODEL}", client.get_model_metadata(MODEL, as_json=True)),
    ):
        over_http = json.loads(open_server.request("GET", path).body)
        assert numbers_as_text(document) == numbers_as_text(over_http)
    config = client.get_model_config(MODEL).config
    assert config.max_batch_size == 32
    assert config.dynamic_batching.max_queue_delay_microseconds == 0
    assert config.parameters["engine"].string_value == "null"
    index = client.get_model_repository_index(as_json=True)
    assert index == {"models": [{"name": MODEL, "version": "1", "state": "READY"}]}


def numbers_as_text(value):
    if isinstance(value, dict):
        return {key: numbers_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers_as_text(item) for item in value]
    return str(value)


def test_one_statistics_counts_both_doors(open_server, client):
    def read() -> dict:
        return client.get_inference_statistics(MODEL, as_json=True)["model_stats"][0]

    client.infer(MODEL, [image_input(images(1))])
    before = read()
    for _ in range(3):
        client.infer(MODEL, [image_input(images(2))])
    body = json.dumps(
        {"inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224], "data": [0] * 150528}]}
    ).encode()
    assert open_server.request("POST", f"/v2/models/{MODEL}/infer", body).status == 200
    after = read()
    assert int(after["inference_count"]) - int(before["inference_count"]) == 7
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        old, new = before["inference_stats"][name], after["inference_stats"][name]
        assert int(new["count"]) - int(old["count"]) == 4
        assert int(new["ns"]) > int(old["ns"])
    over_http = open_server.model_stats()
    assert over_http["inference_count"] == int(after["inference_count"])
    assert over_http["inference_stats"]["success"]["count"] == int(after["inference_stats"]["success"]["count"])


@pytest.mark.parametrize(
    ("model", "version", "shape", "status", "message"),
    [
        ("other", "", (1, 3, 224, 224), "NOT_FOUND", "unknown model: 'other'"),
        (MODEL, "9", (1, 3, 224, 224), "NOT_FOUND", "version '9'"),
        (MODEL, "", (1, 3, 224), "INVALID_ARGUMENT", r"expected \[-1,3,224,224\]"),
        (MODEL, "", (33, 3, 224, 224), "INVALID_ARGUMENT", "between 1 and 32"),
    ],
)
def test_errors_arrive_with_their_status(client, model, version, shape, status, message):
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, [image_input(np.zeros(shape, np.float32))], model_version=version)
    assert status_of(caught) == status


def raw_request(**changes) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=MODEL, **changes)
    request.inputs.add(name="pixel_values", datatype="FP32", shape=[1, 3, 224, 224])
    return request


def test_requests_that_contradict_themselves_are_refused(stub):
    image = images(1).tobytes()
    mixed = raw_request(raw_input_contents=[image])
    mixed.inputs[0].contents.fp32_contents.append(1)
    missing = raw_request()
    surplus = raw_request(raw_input_contents=[image, image])
    short = raw_request(raw_input_contents=[image[:-1]])
    negative = raw_request(raw_input_contents=[image])
    negative.inputs[0].shape[0] = -1
    huge = raw_request(raw_input_contents=[image])
    huge.inputs[0].shape[:] = [2**62, 2**62]
    long_id = raw_request(raw_input_contents=[image], id="i" * 2000)
    unknown_output = raw_request(raw_input_contents=[image])
    unknown_output.outputs.add(name="n" * 100_000)
    many = raw_request(raw_input_contents=[image])
    for _ in range(2000):
        many.outputs.add(name="embedding")
    for request, message in (
        (mixed, "'contents' and also"),
        (missing, "needs 150528 elements"),
        (surplus, "got 2"),
        (short, "needs 602112 bytes .* got 602111"),
        (negative, "negative dimension"),
        (huge, "overflows"),
        (long_id, "2000 characters"),
        (unknown_output, "unexpected inference output"),
        (many, "at most 1024"),
    ):
        with pytest.raises(grpc.RpcError, match=message) as caught:
            stub.ModelInfer(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stub.ModelInfer(raw_request(raw_input_contents=[image]), timeout=60).raw_output_contents


@pytest.mark.parametrize(
    "message", [b"\xff" * 40, b"\x3a\xff\xff\xff\xff\x7f", b"\x0a\x05ab", b"\x0b\x0c", b"\x38\x00" * 20000]
)
def test_bytes_that_are_no_message_are_refused(open_server, message):
    with grpc.insecure_channel(open_server.grpc_address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


METHODS = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods


@pytest.mark.parametrize("method", [m.name for m in METHODS if m.input_type.fields and "Infer" not in m.name])
def test_other_methods_refuse_what_is_no_message_without_internals(open_server, method):
    with grpc.insecure_channel(open_server.grpc_address) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        for message, words in ((b"\xff" * 40, f"not a {method}Request"), (b"\x7a\x00" * 40_000, "at most 65536 bytes")):
            with pytest.raises(grpc.RpcError) as caught:
                call(message, timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in caught.value.details()


def test_idle_connections_leave_descriptors_to_health_checks(native):
    server = native(grpc=True, ulimit="-n 256")
    server.wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.grpc_port), timeout=60))
        for _ in range(20):
            assert server.request("GET", "/v2/health/live").status == 200
    with triton.InferenceServerClient(server.grpc_address) as client:  # and those that have left make room
        wait_until(lambda: is_live(client), "gRPC answers again")


def is_live(client: triton.InferenceServerClient) -> bool:
    try:
        return client.is_server_live()
    except InferenceServerException:
        return False


def test_an_idle_connection_is_closed(native):
    server = native("--keep-alive-timeout-s", "1", grpc=True)
    server.wait_ready()
    with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=60) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        while connection.recv(65536):
            pass


def test_what_is_not_offered_says_so(client, stub):
    for call in (client.get_log_settings, client.get_trace_settings):
        with pytest.raises(InferenceServerException, match=r"--log-level|statistics") as caught:
            call()
        assert status_of(caught) == "UNIMPLEMENTED"
    with pytest.raises(InferenceServerException, match="use system shared memory") as caught:
        client.register_cuda_shared_memory("r", b"x" * 64, 0, 64)
    assert status_of(caught) == "UNIMPLEMENTED"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_calls_are_read(client, algorithm):
    result = client.infer(MODEL, [image_input(images(2))], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("embedding"), first_values(images(2)))


def test_a_message_over_the_limit_is_refused(native):
    server = native("--max-body-bytes", "1000000", grpc=True)
    server.wait_ready()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.infer(MODEL, [image_input(images(1))])
        with pytest.raises(InferenceServerException) as caught:
            client.infer(MODEL, [image_input(images(2))])
        assert status_of(caught) == "RESOURCE_EXHAUSTED"
        before = peak_bytes(server)
        with pytest.raises(InferenceServerException) as caught:  # 77 MB of zeros in 75 KB
            client.infer(MODEL, [image_input(np.zeros((128, 3, 224, 224), np.float32))], compression_algorithm="gzip")
        assert status_of(caught) == "RESOURCE_EXHAUSTED"
        assert peak_bytes(server) - before < 16 * 2**20
        client.infer(MODEL, [image_input(images(1))])


def peak_bytes(server) -> int:
    """The most memory that each of the server's processes has had, in all."""
    texts = [Path(f"/proc/{process.pid}/status").read_text() for process in server.processes]
    return 1024 * sum(int(line.split()[1]) for text in texts for line in text.splitlines() if "VmHWM" in line)


def test_a_taken_port_is_told_in_one_sentence(native, open_server):
    server = native("--grpc-port", str(open_server.grpc_port))
    assert server.process.wait(60) == 1
    log = (server.folder / f"log-{server.port}").read_text()
    assert "choose another with --grpc-port" in log
    assert len(log.splitlines()) == 1
