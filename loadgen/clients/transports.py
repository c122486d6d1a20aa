"""Over what requests travel: the one place that knows which encoding and which client belong to http, grpc and shm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import tritonclient.grpc as triton_grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from loadgen.clients.bodies import AnswerError, PreparedBody, choose_items, failure_message, parse_answer, prepare_body
from loadgen.clients.endpoint import Signature
from loadgen.clients.exchange import Connection, Exchange
from loadgen.clients.grpc import GrpcConnection, GrpcRequest
from loadgen.clients.http import HttpConnection
from loadgen.clients.inputs import Array, InputError, SampleInputs
from loadgen.clients.requests import Address, Request
from loadgen.clients.shared_memory import OutputRoom, RawTensor, SharedMemoryConnection, SharedMemoryRequest
from loadgen.records.run import Transport

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Body = PreparedBody | GrpcRequest | SharedMemoryRequest
"""A request that is not yet for one server; of one kind within a transport."""
Sendable = Request | GrpcRequest | SharedMemoryRequest


@dataclass(frozen=True, slots=True)
class Door:
    """How one server is asked for inference. `grpc_address` is needed by the transport grpc alone."""

    transport: Transport
    url: str
    model: str
    grpc_address: str | None = None

    def sendable(self, body: Body) -> Sendable:
        """Ready for this server; the bytes are shared."""
        return body.request(Address.parse(self.url), self.model) if isinstance(body, PreparedBody) else body

    def connection(self, requests: Sequence[Sendable], *, timeout_s: float) -> Connection:
        """Not yet connected. Through shared memory it sends no other requests than these. Raises `AddressError`."""
        if self.transport == "grpc":
            return GrpcConnection(self.grpc_address or "", timeout_s=timeout_s)
        address = Address.parse(self.url)
        if self.transport == "shm":
            own = tuple(request for request in requests if isinstance(request, SharedMemoryRequest))
            return SharedMemoryConnection(address, self.model, own, timeout_s=timeout_s)
        return HttpConnection(address, timeout_s=timeout_s)


def prepare(transport: Transport, inputs: SampleInputs, signature: Signature, items: Sequence[int]) -> Body:
    """One request for these items. Raises `InputError` when the samples do not fit the model."""
    if transport == "http":
        return prepare_body(inputs, signature, items)
    tensors = raw_tensors(inputs, signature, items)
    if transport == "shm":
        rooms = tuple(_room(output.name, output.datatype, output.shape, len(items)) for output in signature.outputs)
        return SharedMemoryRequest(tensors, rooms, len(items))
    message = service_pb2.ModelInferRequest(model_name=signature.model)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for output in signature.outputs:
        message.outputs.add(name=output.name)
    return GrpcRequest(message.SerializeToString(), sum(len(tensor.data) for tensor in tensors), len(items))


def prepare_all(
    transport: Transport,
    inputs: SampleInputs,
    signature: Signature,
    batch_size: int,
    seed: int,
    *,
    count: int | None = None,
) -> tuple[Body, ...]:
    """Different requests of one batch size, of the same items whatever the transport."""
    chosen = choose_items(inputs.count, batch_size, seed, count=count)
    return tuple(prepare(transport, inputs, signature, items) for items in chosen)


def raw_tensors(inputs: SampleInputs, signature: Signature, items: Sequence[int]) -> tuple[RawTensor, ...]:
    """The inputs as the protocol's binary data. Raises `InputError`."""
    tensors = []
    for expected in signature.inputs:
        chosen = inputs.take(expected.name, items)
        if np_to_triton_dtype(chosen.dtype) != expected.datatype:
            raise InputError(
                f"the samples do not fit input {expected.name}: it is {expected.datatype}, they are {chosen.dtype}"
            )
        data = serialize_byte_tensor(chosen).item() if expected.datatype == "BYTES" else chosen.tobytes()
        tensors.append(RawTensor(expected.name, expected.datatype, chosen.shape, data))
    return tuple(tensors)


def read_answer(connection: Connection, exchange: Exchange) -> Mapping[str, Array]:
    """The outputs of the connection's last answer, as arrays of their own. Raises `AnswerError`."""
    if not exchange.good:
        raise AnswerError(failure_message(exchange))
    try:
        if isinstance(connection, SharedMemoryConnection):
            return connection.read_outputs(exchange)
        if isinstance(connection, GrpcConnection):
            message = service_pb2.ModelInferResponse.FromString(bytes(exchange.body))
            result = triton_grpc.InferResult(message)
            return {output.name: np.array(result.as_numpy(output.name)) for output in message.outputs}
    except (DecodeError, ValueError, KeyError, TypeError) as exc:
        raise AnswerError(f"the answer cannot be read: {exc}") from exc
    return parse_answer(exchange)


def _room(name: str, datatype: str, shape: Sequence[int], batch_size: int) -> OutputRoom:
    dtype: Any = triton_to_np_dtype(datatype)
    if datatype == "BYTES" or dtype is None or any(size < 0 for size in shape[1:]):
        raise InputError(
            f"output {name} has no fixed size ({datatype} {list(shape)}), so no shared memory can be made for it; "
            "use --transport http or grpc"
        )
    return OutputRoom(name, batch_size * math.prod(shape[1:]) * np.dtype(dtype).itemsize)
