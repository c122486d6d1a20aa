"""Every datatype and shape of the protocol in requests and responses, over each transport."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from loadgen.base.documents import DocumentError
from loadgen.client.bodies import RawTensor, for_server, raw_tensors, request_json
from loadgen.client.connection import GRPC_STATUS, Address, Exchange, PreparedRequest
from loadgen.client.endpoint import Endpoint, Signature, TensorSignature
from loadgen.client.http import HttpConnection
from loadgen.client.inputs import NUMPY_TYPES, InputError, SampleInputs, read_given
from loadgen.client.outputs import ExpectedOutputs, read_message
from loadgen.client.shared_memory import SharedMemoryConnection, SharedMemoryRequest, SlotPool, place_in
from loadgen.client.transports import prepare, read_answer
from loadgen.launch.deployment import DeploymentError, RemoteDeployment
from loadgen.measure.arms import Arm
from loadgen.records.run import ArmRequest
from loadgen.records.targets import TRANSPORTS, Transport
from tests.hostile_server import hostile_server

FIELDS = {
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64", "UINT8": "uint", "UINT16": "uint",
    "UINT32": "uint", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64", "BYTES": "bytes",
}  # fmt: skip


def values_of(datatype: str) -> Any:
    return [b"one", b""] if datatype == "BYTES" else np.array([1, 0], NUMPY_TYPES[datatype]).tolist()


def message_of(datatype: str, values: Any, shape: tuple[int, ...] = (1, 2)) -> Any:
    """A gRPC response with typed contents."""
    message = service_pb2.ModelInferResponse(model_name="m")
    output = message.outputs.add(name="y", datatype=datatype, shape=shape)
    getattr(output.contents, f"{FIELDS[datatype]}_contents").extend(values)
    return message


@pytest.mark.parametrize("datatype", FIELDS)
def test_typed_contents_are_read_and_expected(datatype: str) -> None:
    message = message_of(datatype, values_of(datatype))
    output = read_message(message)["y"]
    assert (output.shape, output.ravel().tolist()) == ((1, 2), values_of(datatype))
    assert datatype == "BYTES" or output.dtype == NUMPY_TYPES[datatype]
    signature = Signature("m", (), (TensorSignature("y", datatype, (-1, 2)),))
    exchange = Exchange()
    exchange.status, exchange.body = GRPC_STATUS, memoryview(message.SerializeToString())
    assert ExpectedOutputs("grpc", signature, 1).fault(exchange) is None


def test_typed_contents_of_another_size_or_type_are_refused() -> None:
    with pytest.raises(DocumentError, match="2 elements, but its shape needs 3"):
        read_message(message_of("FP32", [1, 2], (1, 3)))
    with pytest.raises(DocumentError, match="cannot hold"):
        read_message(message_of("INT8", [1, 1000]))
    half = message_of("FP32", [1, 2])
    half.outputs[0].datatype = "FP16"
    with pytest.raises(DocumentError, match="has to be binary"):
        read_message(half)
    signature = Signature("m", (), (TensorSignature("y", "FP32", (-1, 3)),))
    exchange = Exchange()
    exchange.status, exchange.body = GRPC_STATUS, memoryview(message_of("FP32", [1, 2], (1, 3)).SerializeToString())
    assert "2 elements" in (ExpectedOutputs("grpc", signature, 1).fault(exchange) or "")


TEXTS = np.array([[b"a label", b""], [b"x" * 2000, b"y"]], dtype=object)


def test_texts_and_variable_sizes_come_back_through_shared_memory() -> None:
    """The memory is reserved before the sizes are known; a response of one item fills part of it."""
    signature = Signature(
        "m", (TensorSignature("x", "INT64", (-1, -1)),),
        (TensorSignature("y", "BYTES", (-1, 2)), TensorSignature("z", "FP32", (-1, -1, 3))),
    )  # fmt: skip
    inputs = SampleInputs({"x": np.zeros((2, 7), "<i8")}, "synthetic")
    request = prepare("shm", inputs, signature, (0, 1))
    assert isinstance(request, SharedMemoryRequest)
    assert request.output_bytes == {"y": 2 * 2 * 1024, "z": 2 * 7 * 3 * 4}
    connection = SharedMemoryConnection(SlotPool(Address("127.0.0.1", 1), "m", (request,)))
    start_y, start_z, end = request.output_starts()
    memory = bytearray(end)
    data = serialize_byte_tensor(TEXTS).item()
    memory[start_y : start_y + len(data)] = data
    hidden = np.arange(2 * 5 * 3, dtype="<f4")
    memory[start_z : start_z + hidden.nbytes] = hidden.tobytes()
    described = [
        {"name": "y", "datatype": "BYTES", "shape": [2, 2]}, {"name": "z", "datatype": "FP32", "shape": [2, 5, 3]},
    ]  # fmt: skip
    exchange = Exchange()
    exchange.status, exchange.body = 200, memoryview(json.dumps({"outputs": described}).encode())
    outputs = connection.read_outputs(exchange, (request, bytes(memory)))
    assert outputs["y"].tolist() == TEXTS.tolist()
    np.testing.assert_array_equal(outputs["z"], hidden.reshape(2, 5, 3))
    memory[start_y : start_y + 4] = b"\xff\xff\xff\x7f"
    with pytest.raises(DocumentError, match="output y is not in the shared memory"):
        connection.read_outputs(exchange, (request, bytes(memory)))


def unbatched(config: dict[str, object] | None, shape: list[int]) -> dict[str, tuple[int, dict[str, str], bytes]]:
    tensor = {"datatype": "FP32", "shape": shape}
    metadata = {"name": "m", "inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {"/v2/models/m": (200, {}, json.dumps(metadata).encode())}
    if config is not None:
        answers["/v2/models/m/config"] = (200, {}, json.dumps(config).encode())
    return answers


@pytest.mark.parametrize(
    ("config", "shape", "batched"),
    [
        (None, [3, 4], False),
        ({"max_batch_size": 0}, [3, 4], False),
        ({"max_batch_size": 0}, [-1], False),
        ({"max_batch_size": 8}, [-1], True),
        (None, [-1, 4], True),
        ({"max_batch_size": 0}, [-1, 4], False),
        ({"max_batch_size": False}, [-1, 4], True),
    ],
)
def test_whether_the_first_dimension_is_a_batch(
    config: dict[str, object] | None, shape: list[int], batched: bool
) -> None:
    """Triton adds the batch to the shapes of models with a max_batch_size; with 0 they have none. Without a
    configuration a variable first dimension is the batch."""
    with hostile_server() as server:
        server.answers.update(unbatched(config, shape))
        signature = Endpoint(server.url).signature("m")
        assert (signature.batched, signature.inputs[0].shape) == (batched, tuple(shape) if batched else (-1, *shape))


def test_a_model_without_a_batch_dimension_gets_one_item_without_one() -> None:
    items = np.arange(24, dtype="<f4").reshape(2, 3, 4)
    inputs = SampleInputs({"x": items}, "synthetic")
    with hostile_server() as server:
        server.answers.update(unbatched(None, [3, 4]))
        signature = Endpoint(server.url).signature("m")
        body, message = (prepare(transport, inputs, signature, (1,)) for transport in ("http", "grpc"))
        assert isinstance(body, PreparedRequest)
        assert isinstance(message, PreparedRequest)
        head, tensors = json.loads(body.body[: -body.payload_bytes]), body.body[-body.payload_bytes :]
        assert (head["inputs"][0]["shape"], tensors) == ([3, 4], items[1].tobytes())
        assert list(service_pb2.ModelInferRequest.FromString(message.body).inputs[0].shape) == [3, 4]
        with pytest.raises(InputError, match="no batch dimension"):
            prepare("http", inputs, signature, (0, 1))
        output = {"name": "y", "datatype": "FP32", "shape": [3, 4], "parameters": {"binary_data_size": 48}}
        text = json.dumps({"outputs": [output]}).encode()
        server.answers["/v2/models/m/infer"] = (
            200, {"Inference-Header-Content-Length": str(len(text))}, text + items[1].tobytes()
        )  # fmt: skip
        address = Address.parse(server.url)
        connection = HttpConnection(address)
        exchange = connection.send(for_server(body, address, "m"))
        assert ExpectedOutputs("http", signature, 1).fault(exchange) is None
        np.testing.assert_array_equal(read_answer(connection, exchange, batched=signature.batched)["y"], items[1:])
        connection.close()
        server.answers.update({path: (200, {}, b"") for path in ("/v2/health/live", "/v2/models/m/ready")})
        deployment = RemoteDeployment(server.url)
        deployment.check("m")
        deployment.largest_batch = 8
        with pytest.raises(DeploymentError, match="batches of 8, but model m has no batch dimension"):
            deployment.check("m")


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_variable_dimension_is_no_batch_if_the_configuration_has_none(tmp_path: Path, transport: Transport) -> None:
    items = [{"x": {"content": list(range(8)), "shape": [2, 4]}}, {"x": [1, 2, 3, 4]}]
    (tmp_path / "x.json").write_text(json.dumps({"data": items}))
    with hostile_server() as server:
        server.answers.update(unbatched({"max_batch_size": 0}, [-1, 4]))
        signature = Endpoint(server.url).signature("m")
    inputs = read_given(str(tmp_path / "x.json"), signature, tmp_path / "samples", "tensors", 0)
    for item, shape in enumerate(([2, 4], [1, 4])):
        assert [list(tensor.shape) for tensor in raw_tensors(inputs, signature, (item,))] == [shape]
        prepare(transport, inputs, signature, (item,))
    rows = SampleInputs({"x": np.ones((3, 4), "<f4")}, "samples of a model that has batches")
    assert [tensor.shape for tensor in raw_tensors(rows, signature, (1,))] == [(1, 4)]
    with pytest.raises(InputError, match="no batch dimension"):
        prepare(transport, inputs, signature, (0, 1))


def with_optional(config: object) -> dict[str, tuple[int, dict[str, str], bytes]]:
    tensors = [{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in ("x", "bias")]
    metadata = {"name": "m", "inputs": tensors, "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}]}
    return {
        "/v2/models/m": (200, {}, json.dumps(metadata).encode()),
        "/v2/models/m/config": (200, {}, json.dumps(config).encode()),
    }


OPTIONAL = {"max_batch_size": 8, "input": [{"name": "x"}, {"name": "bias", "optional": True}]}


@pytest.mark.parametrize("source", ["json", "jsonl", "npz", "folder"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_optional_input_may_be_left_out(tmp_path: Path, source: str, transport: Transport) -> None:
    with hostile_server() as server:
        server.answers.update(with_optional(OPTIONAL))
        signature = Endpoint(server.url).signature("m")
    assert signature.optional == {"bias"}
    for names in (("x",), ("x", "bias")):
        path = tmp_path / f"{len(names)}.{source}"
        if source == "folder":
            path.mkdir()
            for name in names:
                (path / name).write_bytes(np.ones(2, "<f4").tobytes())
        elif source == "npz":
            arrays: dict[str, Any] = {name: np.ones((1, 2), "<f4") for name in names}
            np.savez(path, **arrays)
        else:
            item = json.dumps({name: [1, 1] for name in names})
            path.write_text(item if source == "jsonl" else f'{{"data": [{item}]}}')
        inputs = read_given(str(path), signature, tmp_path / f"samples {len(names)}", "tensors", 0)
        assert [tensor.name for tensor in raw_tensors(inputs, signature, (0,))] == list(names)
        prepare(transport, inputs, signature, (0,))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"x": [1, 2]}, {"x": [1, 2], "bias": [1, 2]}], "item 1 has no input bias, and others have it"),
        ([{"bias": [1, 2]}], "item 1 has no input x; the model takes x, bias"),
        ([{"x": [1, 2], "other": [1]}], "item 1 has other, which the model does not take"),
    ],
)
def test_what_an_optional_input_does_not_allow(tmp_path: Path, items: list[object], message: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"data": items}))
    with hostile_server() as server:
        server.answers.update(with_optional(OPTIONAL))
        signature = Endpoint(server.url).signature("m")
    with pytest.raises(InputError, match=message):
        read_given(str(tmp_path / "x.json"), signature, tmp_path / "samples", "tensors", 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_transaction_policy": {"decoupled": True}}, "m is decoupled .* one answer per request"),
        ({"sequence_batching": {"direct": {}}}, r"m is stateful \(sequence_batching .* sends no correlation ids"),
        ({"sequence_batching": {}}, "m is stateful"),
        ({"model_transaction_policy": {"decoupled": False}}, None),
        ({"model_transaction_policy": 3, "sequence_batching": None, "input": [3, {"optional": 1}]}, None),
    ],
)
def test_models_with_several_answers_or_states_are_refused_before_the_load(
    config: dict[str, object], message: str | None
) -> None:
    with hostile_server() as server:
        server.answers.update(with_optional(config))
        server.answers.update({path: (200, {}, b"") for path in ("/v2/health/live", "/v2/models/m/ready")})
        deployment = RemoteDeployment(server.url)
        if message is None:
            deployment.check("m")
            return
        with pytest.raises(DeploymentError, match=message):
            deployment.check("m")


def test_one_value_per_item_becomes_a_list_of_one_where_the_server_takes_lists() -> None:
    """Triton's metadata have it so for a model whose input is one value."""
    inputs = SampleInputs({"x": np.arange(3, dtype="<f4")}, "synthetic")
    for shape in ((-1, 1), (-1,)):
        body = prepare("http", inputs, Signature("m", (TensorSignature("x", "FP32", shape),), ()), (0, 2))
        assert isinstance(body, PreparedRequest)
        assert json.loads(body.body[: -body.payload_bytes])["inputs"][0]["shape"] == [2, *shape[1:]]
        assert np.frombuffer(body.body[-body.payload_bytes :], "<f4").tolist() == [0.0, 2.0]


def test_arms_share_requests_only_if_their_metadata_agree() -> None:
    """The bodies hold the shapes of their arm, and the expected answers are those of its metadata."""
    arm = Arm(ArmRequest(label="a", target="http://one"), RemoteDeployment("http://one"), "m")
    signatures = [Signature("m", (TensorSignature("x", "FP32", shape),), ()) for shape in ((-1,), (-1, 1), (-1, 1))]
    keys = [replace(arm, signature=signature).body_key for signature in signatures]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("datatype", FIELDS)
def test_requests_have_the_bytes_of_nvidias_client(datatype: str) -> None:
    values = np.array(values_of(datatype), object if datatype == "BYTES" else NUMPY_TYPES[datatype]).reshape(1, 2)
    signature = Signature("m", (TensorSignature("é x", datatype, (-1, 2)),), (TensorSignature("y", "FP32", (-1, 8)),))
    inputs = SampleInputs({"é x": values}, "given")
    sent, asked = triton_http.InferInput("é x", [1, 2], datatype), triton_http.InferRequestedOutput("y")
    expected, json_bytes = triton_http.InferenceServerClient.generate_request_body(
        [sent.set_data_from_numpy(values)], outputs=[asked]
    )
    request = prepare("http", inputs, signature, [0])
    assert isinstance(request, PreparedRequest)
    assert (request.body.lower(), len(request.body) - request.payload_bytes) == (expected.lower(), json_bytes)

    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="é x", datatype=datatype, shape=(1, 2))
    message.raw_input_contents.append(expected[json_bytes:])
    message.outputs.add(name="y")
    request = prepare("grpc", inputs, signature, [0])
    assert isinstance(request, PreparedRequest)
    assert bytes(request.body).endswith(message.SerializeToString())


def test_places_in_shared_memory_are_named_as_nvidias_client_names_them() -> None:
    raw = RawTensor("x", "FP32", (1, 2), bytes(8), ())
    for start in (0, 64):
        sent, asked = triton_http.InferInput("x", [1, 2], "FP32"), triton_http.InferRequestedOutput("y")
        sent.set_shared_memory("r", 8, offset=start)
        asked.set_shared_memory("r", 32, offset=start)
        expected, _ = triton_http.InferenceServerClient.generate_request_body([sent], outputs=[asked])
        output = {"binary_data": False, **place_in("r", 32, start)}
        assert request_json([(raw, place_in("r", 8, start))], {"y": output}) == expected
