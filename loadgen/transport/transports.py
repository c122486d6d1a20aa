"""Over what requests travel: the one place that knows which encoding and which client belong to http, grpc and shm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from loadgen.documents import DocumentError
from loadgen.records.run import Transport
from loadgen.transport.bodies import AnswerError, PreparedBody, failure_message, parse_answer, prepare_body
from loadgen.transport.endpoint import Signature
from loadgen.transport.exchange import MOST_ANSWER_BYTES, Connection, Exchange
from loadgen.transport.grpc import GrpcConnection, GrpcRequest
from loadgen.transport.http import HttpConnection
from loadgen.transport.inputs import Array, InputError, SampleInputs
from loadgen.transport.outputs import byte_size, read_message
from loadgen.transport.requests import Address, Request, cut
from loadgen.transport.shared_memory import (
    KeptOutputs,
    OutputRoom,
    RawTensor,
    SharedMemoryConnection,
    SharedMemoryRequest,
)
from loadgen.transport.variation import FreshItems, FreshNumbers, Variation

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Body = PreparedBody | GrpcRequest | SharedMemoryRequest
"""A request that is not yet for one server; of one kind within a transport."""
Sendable = Request | GrpcRequest | SharedMemoryRequest


@dataclass(frozen=True, slots=True)
class Target:
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


def prepare(
    transport: Transport,
    inputs: SampleInputs,
    signature: Signature,
    items: Sequence[int],
    variation: Variation | None = None,
) -> Body:
    """One request for these items, cut where the variation writes. Raises `InputError` when the samples do not fit the
    model."""
    if transport == "http":
        return prepare_body(inputs, signature, items, variation)
    tensors = raw_tensors(inputs, signature, items, variation)
    if transport == "shm":
        rooms = tuple(_room(output.name, output.datatype, output.shape, len(items)) for output in signature.outputs)
        return SharedMemoryRequest(tensors, rooms)
    message = service_pb2.ModelInferRequest(model_name=signature.model)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for output in signature.outputs:
        message.outputs.add(name=output.name)
    serialised = message.SerializeToString()
    pieces = () if variation is None else cut(serialised, _places(serialised, tensors), variation.byte_size)
    return GrpcRequest(serialised, sum(len(tensor.data) for tensor in tensors), pieces)


@dataclass(frozen=True, slots=True)
class Bodies:
    """The requests of one batch size, and what makes their items new each time they are sent."""

    requests: tuple[Body, ...]
    fresh: FreshItems | None
    """None where the inputs leave no room for that: then the same requests are sent again."""


def prepare_bodies(
    transport: Transport,
    inputs: SampleInputs,
    signature: Signature,
    variation: Variation | None,
    chosen: tuple[tuple[int, ...], ...],
    numbers: FreshNumbers,
) -> Bodies:
    """A request for each group of the chosen items. Raises `InputError` as `prepare` does."""
    requests = tuple(prepare(transport, inputs, signature, items, variation) for items in chosen)
    return Bodies(requests, None if variation is None else FreshItems(variation, chosen, numbers))


def _places(message: bytes, tensors: Sequence[RawTensor]) -> list[int]:
    """Where a message varies: the tensors are its last fields, each after its tag and its length."""
    places: list[int] = []
    end = len(message)
    for tensor in reversed(tensors):
        start = end - len(tensor.data)
        places = [*(start + place for place in tensor.places), *places]
        end = start - 1 - max(1, -(-len(tensor.data).bit_length() // 7))
    return places


def raw_tensors(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> tuple[RawTensor, ...]:
    """The inputs as the protocol's binary data. Raises `InputError`."""
    tensors = []
    for expected in signature.inputs:
        chosen = inputs.take(expected.name, items)
        if np_to_triton_dtype(chosen.dtype) != expected.datatype:
            raise InputError(
                f"the samples do not fit input {expected.name}: it is {expected.datatype}, they are {chosen.dtype}"
            )
        data = serialize_byte_tensor(chosen).item() if expected.datatype == "BYTES" else chosen.tobytes()
        places = variation.offsets(chosen, items) if variation and variation.name == expected.name else ()
        tensors.append(RawTensor(expected.name, expected.datatype, chosen.shape, data, places))
    return tuple(tensors)


def keep_answer(connection: Connection, exchange: Exchange) -> Callable[[], Mapping[str, Array]]:
    """Copy the connection's last answer; what is returned reads it later, as `read_answer` does."""
    kept = connection.keep_outputs() if isinstance(connection, SharedMemoryConnection) else None
    copied = exchange.copy()
    return lambda: read_answer(connection, copied, kept)


def read_answer(connection: Connection, exchange: Exchange, kept: KeptOutputs | None = None) -> Mapping[str, Array]:
    """The outputs of the connection's last answer, or of one that was kept, as arrays of their own. Raises
    `AnswerError`."""
    if not exchange.good:
        raise AnswerError(failure_message(exchange))
    try:
        if isinstance(connection, SharedMemoryConnection):
            return connection.read_outputs(exchange, kept)
        if isinstance(connection, GrpcConnection):
            return read_message(service_pb2.ModelInferResponse.FromString(bytes(exchange.body)))
    except (DecodeError, DocumentError) as exc:
        raise AnswerError(f"the answer cannot be read: {exc}") from exc
    return parse_answer(exchange)


def _room(name: str, datatype: str, shape: Sequence[int], batch_size: int) -> OutputRoom:
    size = byte_size(datatype, (batch_size, *shape[1:]))
    if size is None:
        raise InputError(
            f"output {name} has no fixed size ({datatype} {list(shape)}), so no shared memory can be made for it; "
            "use --transport http or grpc"
        )
    if size > MOST_ANSWER_BYTES:
        raise InputError(f"output {name} takes {size:,} bytes, and at most {MOST_ANSWER_BYTES:,} are taken")
    return OutputRoom(name, size)
