"""The transports: how each encodes a request, which connection sends it, how its answer is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from google.protobuf.message import DecodeError

from loadgen.base.documents import DocumentError
from loadgen.client.bodies import RawTensor, Variation, for_server, prepare_body, raw_tensors
from loadgen.client.connection import (
    MOST_ANSWER_BYTES,
    Address,
    ClientConnection,
    Exchange,
    PreparedRequest,
    failure_message,
    split_at,
    unasked_coding,
)
from loadgen.client.endpoint import Signature, TensorSignature
from loadgen.client.event_stream import StreamConnection
from loadgen.client.generation import PROMPT_FORMS, RequestBody, for_stream
from loadgen.client.grpc import GrpcConnection, grpc_request
from loadgen.client.grpc_messages import ModelInferRequest, ModelInferResponse
from loadgen.client.http import HttpConnection
from loadgen.client.inputs import Array, InputError, SampleInputs
from loadgen.client.outputs import HEADER_LENGTH, AnswerError, byte_size, read_body, read_message
from loadgen.client.shared_memory import CopiedOutputs, SharedMemoryConnection, SharedMemoryRequest, SlotPool
from loadgen.records.run import DEFAULT_ACCESS, Access
from loadgen.records.targets import ROUTES, Transport, is_token_transport

_ELEMENT_BYTES = 1024
_VARIABLE_SIZE = 1024

Request = PreparedRequest | SharedMemoryRequest
Answer = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class InferenceTarget:
    """Where and how inference requests are sent. Only the transport grpc needs `grpc_address`."""

    transport: Transport
    url: str
    model: str
    grpc_address: str | None = None
    access: Access = DEFAULT_ACCESS
    batched: bool = True
    """Whether its answers have a batch dimension; see `Signature`."""
    body: RequestBody = field(default_factory=dict)
    """What differs from the usual fields of a request to a language model."""

    def sendable(self, request: Request) -> Request:
        """A prepared request for this server; the bytes are shared."""
        return WIRES[self.transport].addressed(self, request) if isinstance(request, PreparedRequest) else request

    def memory(self, requests: Sequence[Request]) -> SlotPool | None:
        """Shared memory for these requests, if the transport has it. Raises `AddressError`."""
        if not ROUTES[self.transport].shares_memory:
            return None
        through_memory = (request for request in requests if isinstance(request, SharedMemoryRequest))
        return SlotPool(Address.parse(self.url, self.access), self.model, through_memory)

    def connection(
        self, requests: Sequence[Request], *, timeout_s: float, memory: SlotPool | None = None
    ) -> ClientConnection:
        """A connection, not yet open. Over shared memory it can send only these requests, through `memory` if several
        users share it. Raises `AddressError`."""
        if (pool := memory or self.memory(requests)) is not None:
            return SharedMemoryConnection(pool, timeout_s=timeout_s)
        return WIRES[self.transport].connection(self, timeout_s)


def prepare(
    transport: Transport,
    inputs: SampleInputs,
    signature: Signature,
    items: Sequence[int],
    variation: Variation | None = None,
) -> Request:
    """One request for these items, cut at the places that vary. Raises `InputError` when the samples do not fit the
    model."""
    return WIRES[transport].prepare(inputs, signature, items, variation)


def _prepare_grpc(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> Request:
    tensors = raw_tensors(inputs, signature, items, variation)
    message = ModelInferRequest(model_name=signature.model, model_version=signature.version or "")
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.data)
    for output in signature.outputs:
        message.outputs.add(name=output.name)
    serialised = message.SerializeToString()
    pieces = () if variation is None else split_at(serialised, _places(serialised, tensors), variation.byte_size)
    return grpc_request(serialised, sum(len(tensor.data) for tensor in tensors), pieces)


def _prepare_in_memory(
    inputs: SampleInputs, signature: Signature, items: Sequence[int], variation: Variation | None = None
) -> Request:
    tensors = raw_tensors(inputs, signature, items, variation)
    sizes = {output.name: _output_bytes(output, tensors, signature, len(items)) for output in signature.outputs}
    return SharedMemoryRequest(tensors, sizes)


def _http_connection(target: InferenceTarget, timeout_s: float) -> ClientConnection:
    return HttpConnection(Address.parse(target.url, target.access), timeout_s=timeout_s)


def _grpc_connection(target: InferenceTarget, timeout_s: float) -> ClientConnection:
    return GrpcConnection(target.grpc_address or "", timeout_s=timeout_s, access=target.access)


def _stream_connection(target: InferenceTarget, timeout_s: float) -> ClientConnection:
    return StreamConnection(Address.parse(target.url, target.access), timeout_s=timeout_s)


def _for_server(target: InferenceTarget, request: PreparedRequest) -> PreparedRequest:
    return for_server(request, Address.parse(target.url, target.access), target.model)


def _for_stream(target: InferenceTarget, request: PreparedRequest) -> PreparedRequest:
    assert is_token_transport(target.transport)
    return for_stream(request, target.transport, Address.parse(target.url, target.access), target.model)


@dataclass(frozen=True, slots=True)
class Wire:
    """How one transport encodes a request and which connection sends it; `read_answer` reads what comes back."""

    prepare: Callable[[SampleInputs, Signature, Sequence[int], Variation | None], Request]
    """Encodes tensors; prompts are those of `loadgen.client.generation`."""
    connection: Callable[[InferenceTarget, float], ClientConnection]
    """To a server, with the time limit of a request in seconds."""
    addressed: Callable[[InferenceTarget, PreparedRequest], PreparedRequest] = lambda _, request: request
    """The request with what it says of the server."""


WIRES: Mapping[Transport, Wire] = {
    "http": Wire(prepare_body, _http_connection, _for_server),
    "grpc": Wire(_prepare_grpc, _grpc_connection),
    "shm": Wire(_prepare_in_memory, _http_connection),
    **dict.fromkeys(PROMPT_FORMS, Wire(prepare_body, _stream_connection, _for_stream)),
}


def _places(message: bytes, tensors: Sequence[RawTensor]) -> list[int]:
    """Where a serialised message varies: the tensors are its last fields, each after its tag and its length."""
    places: list[int] = []
    end = len(message)
    for tensor in reversed(tensors):
        start = end - len(tensor.data)
        places = [*(start + place for place in tensor.places), *places]
        end = start - 1 - max(1, -(-len(tensor.data).bit_length() // 7))
    return places


def _output_bytes(output: TensorSignature, inputs: Sequence[RawTensor], signature: Signature, batch_size: int) -> int:
    """Bytes of shared memory for an output. Where its size is not fixed, a variable dimension counts as the largest
    variable dimension of the inputs, and an element of BYTES as `_ELEMENT_BYTES`."""
    shapes = {tensor.name: tensor.shape for tensor in inputs}
    variable = [
        size
        for expected in signature.inputs
        if expected.name in shapes
        for fixed, size in zip(expected.shape[1:], shapes[expected.name][1 - len(expected.shape) :], strict=False)
        if fixed < 0
    ]
    longest = max(variable, default=_VARIABLE_SIZE)
    shape = (batch_size, *(longest if size < 0 else size for size in output.shape[1:]))
    size = math.prod(shape) * _ELEMENT_BYTES if output.datatype == "BYTES" else byte_size(output.datatype, shape)
    if size is None:
        raise InputError(f"output {output.name} has a datatype that the protocol does not define ({output.datatype})")
    if size > MOST_ANSWER_BYTES:
        raise InputError(f"output {output.name} has {size:,} bytes, more than the limit of {MOST_ANSWER_BYTES:,}")
    return size


@dataclass(frozen=True, slots=True)
class PreparedBodies:
    """The requests of one batch size, and the numbers that make their items new each time they are sent."""

    requests: tuple[Request, ...]
    items: tuple[tuple[int, ...], ...]
    """The items of each request."""
    variation: Variation | None
    """None if the inputs cannot vary: then the same bytes are sent again."""
    numbers: Iterator[int]
    """Consecutive numbers of items, for all requests of a process."""

    def patches(self, body: int) -> tuple[int, Sequence[bytes]]:
        """The number of the body's first item, and the bytes for each of its items, which are numbered from there."""
        if self.variation is None:
            return 0, ()
        items = self.items[body]
        numbers = list(islice(self.numbers, len(items)))
        return numbers[0], list(map(self.variation.patch, items, numbers))


def prepare_bodies(
    transport: Transport,
    inputs: SampleInputs,
    signature: Signature,
    variation: Variation | None,
    chosen: tuple[tuple[int, ...], ...],
    numbers: Iterator[int],
) -> PreparedBodies:
    """One request for each group of items. Raises `InputError` as `prepare` does."""
    requests = tuple(prepare(transport, inputs, signature, items, variation) for items in chosen)
    return PreparedBodies(requests, chosen, variation, numbers)


def keep_answer(
    connection: ClientConnection, exchange: Exchange, *, batched: bool = True, binary: bool = True
) -> Callable[[], Answer]:
    """Copy the connection's last response; the returned function reads the copy later, as `read_answer` does."""
    memory = connection.copy_outputs() if isinstance(connection, SharedMemoryConnection) else None
    copied = exchange.copy()
    return lambda: read_answer(connection, copied, memory, batched=batched, binary=binary)


def read_answer(
    connection: ClientConnection, exchange: Exchange, memory: CopiedOutputs | None = None, *, batched: bool = True,
    binary: bool = True,
) -> Answer:  # fmt: skip
    """Copies of the outputs of the connection's last response, or of a copied one with its outputs' `memory`, with a
    batch dimension also where the response has none. Unless `binary` outputs were requested, as of recorded requests
    they need not be, they may be in JSON. Raises `AnswerError`."""
    if not exchange.good:
        raise AnswerError(failure_message(exchange), exchange.status, answered=False)
    if not isinstance(connection, GrpcConnection) and (fault := unasked_coding(exchange)) is not None:
        raise AnswerError(f"the response cannot be read: {fault}")
    try:
        if isinstance(connection, SharedMemoryConnection):
            outputs = connection.read_outputs(exchange, memory)
        elif isinstance(connection, GrpcConnection):
            outputs = read_message(ModelInferResponse.FromString(bytes(exchange.body)))
        else:
            outputs = read_body(exchange.body, exchange.header(HEADER_LENGTH), binary=binary)
    except (DecodeError, DocumentError) as exc:
        raise AnswerError(f"the response cannot be read: {exc}") from exc
    return outputs if batched else {name: array[np.newaxis] for name, array in outputs.items()}
