"""Language models over gRPC: ModelStreamInfer as Triton has it for a decoupled model.

Each token of an answer is one message, and the last one says that it is final. The requests of one call are answered
side by side, and an error of one is a message, after which the call goes on. A message is put together from bytes that
were prepared with its request and from its token id: no protobuf works between a token and its client.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from tritonclient.grpc import service_pb2

from servers.language.engine import check_request
from servers.native.front import documents
from servers.native.front.generation import GenerationService, too_large
from servers.native.front.inference import ServedModels
from servers.native.front.token_requests import TokenRequest
from servers.native.grpc.call import WAITING_BYTES, Call, GrpcMessage, MessageAnswer
from servers.native.grpc.connection import GrpcConnections
from servers.native.grpc.http2 import status_of
from servers.native.grpc.inference import (
    ControlCall,
    RequestDocument,
    max_message_bytes,
    model_documents,
    service_methods,
    shown_id,
    streamed_error,
    with_prefix,
)
from servers.native.grpc.messages import FINAL, decode_message, is_short, parse_message
from servers.native.shared.errors import HOLDS_ENOUGH, FailureLog, failure_reason
from servers.native.shared.limits import decompress, in_thread
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, UnavailableError, UnsupportedError
from servers.protocol.records import InferRequest
from servers.protocol.tensors import Array

log = FailureLog("abserve.grpc")

DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
EMPTY_FINAL = "triton_enable_empty_final_response"
"""Without effect: the last token is the final message, so that none is empty. With Triton it is the same."""
_ID = struct.Struct("<i")
_LENGTH = struct.Struct("<I")


class TokenMessages:
    """The messages of one answer, each with its prefix; `outputs` are those that the client wants, empty: all."""

    def __init__(
        self, model: str, version: str, request_id: bytes, prompt_tokens: int, outputs: Collection[str]
    ) -> None:
        self._start = service_pb2.ModelInferResponse(model_name=model, model_version=version, id=request_id.decode())
        self._prompt_tokens = prompt_tokens
        self._outputs = outputs
        self._next: bytes | None = None  # a message of one token up to its id; None before the first

    def tokens(self, tokens: Sequence[int]) -> bytes:
        """The message of some more tokens."""
        if self._next is not None and len(tokens) == 1:
            return self._next + _ID.pack(tokens[0])
        message = self._message(tokens, None)
        if self._next is None:
            self._prompt_tokens = 0
            if not self._outputs or "token_ids" in self._outputs:
                self._next = self._message((0,), None)[: -_ID.size]
        return message

    def last(self, tokens: Sequence[int], finish: str) -> bytes:
        """The message of the last tokens, which says how the answer finished."""
        return self._message(tokens, finish)

    def _message(self, tokens: Sequence[int], finish: str | None) -> bytes:
        answer = service_pb2.ModelStreamInferResponse(infer_response=self._start)
        response = answer.infer_response
        response.parameters[FINAL].bool_param = finish is not None
        ids = np.array(tokens, "<i4")
        self._add(response, "token_ids", "INT32", len(ids), ids.tobytes())
        if self._prompt_tokens:
            self._add(response, "prompt_tokens", "INT32", 1, _ID.pack(self._prompt_tokens))
        if finish is not None:
            self._add(response, "finish_reason", "BYTES", 1, _LENGTH.pack(len(finish)) + finish.encode())
        return b"".join(with_prefix(answer))

    def _add(self, response: Any, name: str, datatype: str, count: int, content: bytes) -> None:
        if not self._outputs or name in self._outputs:
            response.outputs.add(name=name, datatype=datatype, shape=[count])
            response.raw_output_contents.append(content)


def parse_tensors(request: InferRequest, arrays: Mapping[str, Array]) -> TokenRequest:
    """The request for tokens in the tensors of a request that the signature accepts. Raises `InvalidRequestError`."""
    if not isinstance(request.parameters.get(EMPTY_FINAL, True), bool):
        raise InvalidRequestError(f"invalid value type for '{EMPTY_FINAL}' parameter, expected bool_param.")
    ignore_eos = arrays.get("ignore_eos")
    return TokenRequest(
        prompt=arrays["input_ids"].tolist(),
        max_tokens=int(arrays["max_tokens"][0]),
        ignore_eos=ignore_eos is None or bool(ignore_eos[0]),
        stream=True,
    )


class PendingStreamedTokens:
    """A message of a call between its last byte and the end of its answer: a `MessageAnswer`, and an `AnswerSink`.

    The message's memory counts as held until the first token comes.
    """

    __slots__ = (
        *("_answer", "_begun", "_call", "_counted", "_done", "_front_end", "_message", "_number", "_request_id"),
        *("_service", "_task", "_times"),
    )

    def __init__(self, front_end: GenerationGrpcFrontEnd, call: Call, message: GrpcMessage) -> None:
        self._front_end = front_end
        self._call = call
        self._message = message
        self._service = front_end.models.default
        headers, signature = call.head.trace_headers, self._service.signature
        self._times = front_end.times(signature, message.start_ns, headers, message.receive_ns)
        self._request_id = b""
        self._answer: TokenMessages | None = None
        self._task: asyncio.Task[None] | None = None
        self._number = -1
        self._begun = False
        self._counted = False  # for its key
        self._done = False

    # MessageAnswer

    def begin(self) -> None:
        """Check the request and pass it to the engine; a long or compressed one is read in a thread."""
        message, largest = self._message, self._service.largest_body_bytes
        try:
            if message.size > largest:
                self.failed(too_large(message.size, largest))
            elif message.compressed or not is_short(message.content):
                self._task = asyncio.get_running_loop().create_task(self._begin_in_task(largest))
            else:
                self._submit(self._read(message.content))
        except Exception as error:  # noqa: BLE001  see `for_client`
            self.failed(log.for_client(error, "a call failed unexpectedly"))

    def stop(self, reason: str) -> None:
        """Free the slot."""
        self._done = True
        if self._task is not None:
            self._task.cancel()
        self._message.release()
        self._service.link.cancel(self._number)
        if reason:
            self._service.statistics.record_failure(reason, self._times)
        else:
            self._service.statistics.record_disconnect(self._times)

    async def _begin_in_task(self, largest: int) -> None:
        front_end, message = self._front_end, self._message
        try:
            content = message.content
            if message.compressed:
                content = await front_end.inflating.run(decompress, content, largest)
            with front_end.budget.holding(len(content) if message.compressed else 0):
                request = await in_thread(front_end.reading, self._read, content)
            if not self._done:
                self._submit(request)
        except asyncio.CancelledError:
            if not self._done:
                raise  # the server is being stopped by force
        except Exception as error:  # noqa: BLE001  see `for_client`
            self.failed(log.for_client(error, "a call failed unexpectedly"))

    def _read(self, content: memoryview) -> TokenRequest:
        """The checked request; any thread. Raises `ContractError`."""
        start_ns = time.perf_counter_ns()
        parsed = message, _, _ = parse_message(content)
        self._request_id = shown_id(message)
        self._service = service = self._front_end.models.find(message.model_name, message.model_version or None)
        if not self._call.method.streams:
            raise UnsupportedError(DECOUPLED)
        service.check_accepting()
        signature = service.signature
        request = decode_message(parsed, _no_shared_memory, signature)
        tokens = parse_tensors(request, signature.validate(request)[1])
        check_request(tokens.prompt, tokens.max_tokens, service.max_length, service.vocabulary)
        wanted = [output.name for output in request.outputs or ()]
        count = len(tokens.prompt)
        self._answer = TokenMessages(signature.name, signature.version, self._request_id, count, wanted)
        self._times.decode_ns = time.perf_counter_ns() - start_ns
        return tokens

    def _submit(self, request: TokenRequest) -> None:
        if not self._message.hold(WAITING_BYTES):
            raise UnavailableError(HOLDS_ENOUGH)
        self._call.admit()
        self._counted = True
        self._number = self._service.submit(self, request, self._times.start_ns, self._call.transport)

    # AnswerSink

    def tokens(self, tokens: Sequence[int]) -> None:
        assert self._answer is not None
        if not self._begun:
            self._begin_answer()
        self._call.send(self._answer.tokens(tokens))

    def finished(self, tokens: Sequence[int], finish: str) -> None:
        assert self._answer is not None
        if not self._begun:
            self._begin_answer()
        self._service.statistics.record_success(self._times)
        self._uncount()
        self._call.end_answer(self, self._answer.last(tokens, finish))

    def failed(self, error: ContractError) -> None:
        if self._done:
            return
        self._done = True
        self._message.release()
        self._service.statistics.record_failure(failure_reason(error), self._times)
        self._uncount()
        if self._call.method.streams:
            self._call.end_answer(self, b"".join(with_prefix(streamed_error(error, self._request_id))))
        else:
            self._call.failed(status_of(error))

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._call.leave()

    def _begin_answer(self) -> None:
        self._begun = True
        self._message.release()
        self._service.statistics.record_first_token(self._times)


class GenerationGrpcFrontEnd(GrpcConnections):
    """All methods of the service, for a language model. Belongs to one event loop."""

    streams_tokens = True

    def __init__(
        self, models: ServedModels[GenerationService], settings: NativeSettings, memory: RequestMemory
    ) -> None:
        methods = service_methods(max_message_bytes(settings), decoupled=True)
        super().__init__(settings, memory, methods, models.default.statistics)
        self.models = models
        self._documents: dict[str, RequestDocument] = {
            "ServerMetadata": lambda _: documents.server_metadata(None),
            **model_documents(models),
        }

    def answering(self, call: Call, message: GrpcMessage) -> MessageAnswer:
        if call.method.infers:
            return PendingStreamedTokens(self, call, message)
        return ControlCall(self._documents.get(call.method.name, _no_shared_memory), call, message)


def _no_shared_memory(_: object) -> NoReturn:
    raise UnsupportedError("a language model takes no tensors in shared memory")
