"""Recorded requests as they are sent again: the same contents, addressed to another model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError

from loadgen.base.documents import DocumentError, one_line
from loadgen.client.connection import PreparedRequest, uncompressed
from loadgen.client.endpoint import Signature
from loadgen.client.grpc import grpc_request
from loadgen.client.grpc_messages import ModelInferRequest, ModelInferResponse
from loadgen.client.inputs import Array, InputError
from loadgen.client.outputs import HEADER_LENGTH, AnswerError, read_body, read_message
from loadgen.experiment.replay import Replay
from loadgen.records.traffic import MOST_CONTENT_BYTES, RecordedRequest


@dataclass(frozen=True, slots=True)
class RecordedBodies:
    """Requests of one replay, beginning with number `first`."""

    requests: tuple[PreparedRequest, ...]
    sizes: tuple[int, ...]
    """The items in each of them."""
    first: int = 0

    def window(self, first: int, count: int) -> RecordedBodies:
        """The requests of one block."""
        block = slice(first, first + count)
        return replace(self, requests=self.requests[block], sizes=self.sizes[block], first=first)

    def patches(self, body: int) -> tuple[int, tuple[()]]:
        """The number of the recorded request; nothing of it varies."""
        return self.first + body, ()


def prepare_recorded(replay: Replay, signature: Signature) -> RecordedBodies:
    """Every request of a replay for the model of a signature; requests with the same content are one object. Raises
    `InputError`, and `TrafficError` if the folder cannot be read."""
    made = dict[object, PreparedRequest]()
    requests, sizes = [], []
    for request in replay.requests():
        key = request.content, tuple(request.headers.items())
        if key not in made:
            made[key] = recorded_request(request, replay.content(request), signature)
        requests.append(made[key])
        sizes.append(items_of(request, signature))
    return RecordedBodies(tuple(requests), tuple(sizes))


def items_of(request: RecordedRequest, signature: Signature) -> int:
    """The items of a recorded request, by its first input."""
    shape = request.tensors[0].shape if request.tensors else ()
    return shape[0] if signature.batched and shape and shape[0] > 0 else 1


def recorded_outputs(request: RecordedRequest, answer: bytes, *, batched: bool) -> dict[str, Array]:
    """The outputs of a recorded answer, with a batch dimension also where it has none. Raises `AnswerError`."""
    try:
        if request.transport == "grpc":
            outputs = read_message(ModelInferResponse.FromString(answer))
        else:
            coding = request.answer_headers.get("content-encoding", "identity")
            body = uncompressed(answer, coding, MOST_CONTENT_BYTES)
            if body is None:
                raise AnswerError(f"the recorded answer is in the coding {one_line(coding)}, which cannot be read")
            outputs = read_body(memoryview(body), request.answer_headers.get(HEADER_LENGTH), binary=False)
    except (DecodeError, DocumentError) as exc:
        raise AnswerError(f"the recorded answer cannot be read: {exc}") from exc
    return outputs if batched else {name: array[np.newaxis] for name, array in outputs.items()}


def recorded_request(request: RecordedRequest, content: bytes, signature: Signature) -> PreparedRequest:
    """One recorded request. Only the names of the model and its version change. Raises `InputError`."""
    if request.transport == "http":
        length = request.headers.get("inference-header-content-length", "")
        tensors = len(content) - int(length) if length.isdecimal() else len(content)
        return PreparedRequest(b"", content, max(0, tensors), headers=request.headers)
    try:
        message = ModelInferRequest.FromString(content)
    except DecodeError as exc:
        raise InputError(f"a recorded request is not a ModelInferRequest: {exc}") from exc
    message.model_name, message.model_version = signature.model, signature.version or ""
    return grpc_request(message.SerializeToString(), sum(map(len, message.raw_input_contents)))
