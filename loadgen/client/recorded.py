"""Recorded requests as they are sent again: the same contents, addressed to another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Self

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from loadgen.base.documents import DocumentError, one_line, uncompressed
from loadgen.client.bodies import prepare_body
from loadgen.client.connection import PreparedRequest
from loadgen.client.endpoint import Signature
from loadgen.client.generation import PreparedPrompts, RequestBody, encoded, in_form_of, request_fields, takes_salt
from loadgen.client.grpc import grpc_request
from loadgen.client.grpc_messages import ModelInferRequest, ModelInferResponse
from loadgen.client.inputs import Array, InputError, one_item
from loadgen.client.outputs import HEADER_LENGTH, AnswerError, read_body, read_message
from loadgen.experiment.prompts import Ids, PromptPlan
from loadgen.experiment.replay import Replay
from loadgen.records.imported import UNTYPED
from loadgen.records.targets import TokenTransport
from loadgen.records.traffic import MOST_CONTENT_BYTES, RecordedRequest

_SALT_DIGITS = 16
_REGION = b'"shared_memory_region"'
_LEFT_OUT = ("max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "n", "best_of", "cache_salt", "user")
"""Fields that would make an answer longer or shorter than the recorded one, or several of it; and who asked."""


@dataclass(frozen=True, slots=True)
class RecordedBodies:
    """Requests of one replay, beginning with number `first`."""

    requests: tuple[PreparedRequest, ...]
    sizes: tuple[int, ...]
    """The items in each of them."""
    first: int = 0

    def window(self, first: int, count: int, _number: int = 0) -> RecordedBodies:
        """The requests of one block."""
        block = slice(first, first + count)
        return replace(self, requests=self.requests[block], sizes=self.sizes[block], first=first)

    def patches(self, body: int) -> tuple[int, tuple[()]]:
        """The number of the recorded request; nothing of it varies."""
        return self.first + body, ()


@dataclass(frozen=True, slots=True)
class RecordedPrompts(PreparedPrompts):
    """Recorded requests to a language model, beginning with number `first`."""

    first: int = 0
    salt: bytes = b""
    """What a request has beside its content where the protocol takes a salt, so that no window finds the prompts of an
    earlier one in a cache."""

    def patches(self, body: int) -> tuple[int, Sequence[bytes]]:
        """The number of the recorded request, and the salt."""
        return self.first + body, [self.salt] if self.salted else ()

    def prompt(self, body: int, number: int) -> Ids:  # noqa: ARG002 (a recorded prompt has no number in it)
        """The ids of the prompt; none where it was sent as text."""
        return self.prepared[body]

    def window(self, first: int, count: int, number: int) -> Self:
        """The requests of one replay, whose salt has this number."""
        salt = f"{number:0{_SALT_DIGITS}x}".encode()
        return replace(PreparedPrompts.window(self, first, count, number), first=first, salt=salt)


def prepare_recorded_prompts(
    transport: TokenTransport, model: str, plan: PromptPlan, replay: Replay, body: RequestBody
) -> RecordedPrompts:
    """Every prompt of a replay as it was recorded, for a model. What is needed to measure an answer, and to compare it,
    is asked for as of other prompts: a stream, greedy, as long as the recorded answer. Raises `TrafficError`."""
    salted = takes_salt(transport, body)
    requests, prepared, shapes = [], [], []
    for request in replay.requests():
        recorded, ids = replay.prompt(request)
        shape = replay.shape(request)
        asked = request_fields(transport, model, body)
        kept = {
            name: value for name, value in recorded.items() if name not in _LEFT_OUT and body.get(name, 0) is not None
        }
        text = msgspec.json.encode(kept | asked | {"max_tokens": shape.output_tokens})
        pieces = (text[:-1] + b',"cache_salt":"', b"0" * _SALT_DIGITS, b'"}') if salted else ()
        requests.append(
            PreparedRequest(b"", b"".join(pieces) or text, len(text), pieces, output_tokens=shape.output_tokens)
        )
        prepared.append(np.array(ids, dtype=np.int32))
        shapes.append(shape)
    return RecordedPrompts(tuple(requests), tuple(prepared), tuple(shapes), plan, salted, repeat(0))


def prepare_trace(
    transport: TokenTransport, model: str, plan: PromptPlan, replay: Replay, body: RequestBody
) -> PreparedPrompts:
    """A prompt of the length of each request of a trace. They have no salt, so that servers may share what has the same
    hashes. Raises `PromptError`, and `TrafficError` if the trace cannot be read."""
    plan = in_form_of(transport, plan)
    requests, prepared, shapes = [], [], replay.shapes()
    for place, (request, shape) in enumerate(zip(replay.requests(), shapes, strict=True)):
        plan.require(shape)
        ids = plan.traced(place, shape.prompt_tokens, replay.prompt(request)[0]["hash_ids"])
        requests.append(encoded(transport, model, plan, shape, ids, body, salted=False))
        prepared.append(ids)
    return PreparedPrompts(tuple(requests), tuple(prepared), tuple(shapes), plan, False, repeat(0))


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
    shape = request.tensors[0].shape if request.tensors else ()  # none of perf_analyzer's, which is one item
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
    if request.tensors and request.tensors[0].datatype == UNTYPED:
        return prepare_body(one_item(msgspec.json.decode(content), signature), signature, (0,))
    if request.transport == "http":
        length = request.headers.get("inference-header-content-length", "")
        tensors = len(content) - int(length) if length.isdecimal() else len(content)
        if content.find(_REGION, 0, int(length) if length.isdecimal() else None) >= 0:
            raise _in_shared_memory(request)
        return PreparedRequest(b"", content, max(0, tensors), headers=request.headers)
    try:
        message = ModelInferRequest.FromString(content)
    except DecodeError as exc:
        raise InputError(f"a recorded request is not a ModelInferRequest: {exc}") from exc
    if message.inputs and not (message.raw_input_contents or any(each.HasField("contents") for each in message.inputs)):
        raise _in_shared_memory(request)
    message.model_name, message.model_version = signature.model, signature.version or ""
    return grpc_request(message.SerializeToString(), sum(map(len, message.raw_input_contents)))


def _in_shared_memory(request: RecordedRequest) -> InputError:
    return InputError(
        f"the recorded request after {request.at_ns / 1e9:.3f} s has tensors in shared memory, which a recording does "
        "not hold; save the others with abserve.load_traffic(…).save(…)"
    )
