"""Language models: the served model of a front end, the link to its engine, and the requests that it answers over HTTP.

A request is checked here, passed to the engine, and answered from the messages of its steps: for each token of a
streamed answer one event, written to the connection in the callback that has received the message.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Protocol
from uuid import uuid4

from servers.engines.interface import EngineDescription
from servers.language.engine import GENERATE_INPUTS, GENERATE_OUTPUTS, check_request
from servers.native.errors import (
    HOLDS_ENOUGH,
    INTERNAL_ERROR,
    FailureLog,
    HttpError,
    failure_reason,
    http_status,
    shutting_down,
)
from servers.native.http import CONTINUE, Application, HttpFrontEnd, HttpServerConnection
from servers.native.http_parser import STATUS_LINES, HttpRequest, HttpResponse, RequestHead, json_response
from servers.native.inference import ModelService, ServedModels
from servers.native.interface import ApplyStatus, FrontEndOpened, ModelStatus
from servers.native.ipc import Cancel, Control, ControlDone, Generate, Generated, Message, encode, error_of, read_frames
from servers.native.memory import RequestMemory
from servers.native.settings import NativeSettings
from servers.native.statistics import RequestTimes, Statistics
from servers.native.token_events import (
    CHUNKED,
    STREAM_HEADERS,
    CompletionDocument,
    CompletionEvents,
    EventStream,
    GenerateDocument,
    GenerateEvents,
    TokenAnswer,
    completion_error,
)
from servers.native.token_requests import TokenRequest, parse_completion, parse_generate
from servers.protocol.errors import ContractError, InternalError, InvalidRequestError, TooLargeError, UnavailableError
from servers.protocol.records import ModelSignature

log = FailureLog("abserve.front")

ENGINE_ENDED = "the engine has ended, send the request again later"
COMPLETIONS = "/v1/completions"
BODY_BYTES = 64 * 1024
BODY_BYTES_PER_TOKEN = 24
"""A longer body cannot be a prompt that the model takes: an id has at most ten digits, and some blanks around it."""
NUMBERS_PER_FRONT_END = 2**40
"""Requests are numbered over all front ends: each has so many numbers of its own."""


class AnswerSink(Protocol):
    """What takes the tokens of one answer; belongs to the event loop."""

    def tokens(self, tokens: Sequence[int]) -> None:
        """Some more of them."""

    def finished(self, tokens: Sequence[int], finish: str) -> None:
        """The last ones."""

    def failed(self, error: ContractError) -> None:
        """There will be no more."""


class GenerationLink(asyncio.Protocol):
    """The socket to the engine's process, or to its thread; belongs to the front end's event loop."""

    def __init__(self, number: int, apply: Callable[[ModelStatus], None], on_end: Callable[[], None]) -> None:
        """`number` is the front end's; `apply` learns the engine's state, `on_end` is called once it has ended."""
        self._numbers = count(number * NUMBERS_PER_FRONT_END)
        self._apply = apply
        self._on_end = on_end
        self._sinks: dict[int, AnswerSink] = {}
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None
        self._ended = False

    async def open(self, connected: socket.socket) -> None:
        """Begin to use a connected socket."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connected)

    def opened(self) -> None:
        """Tell the engine that clients are answered now."""
        self._send(Control(next(self._numbers), FrontEndOpened()))

    def submit(self, sink: AnswerSink, request: TokenRequest, received_ns: int, client: str = "") -> int:
        """Queue a checked request; returns its number. `client` is its address where its requests are limited, else
        empty. Raises `UnavailableError`."""
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        self._sinks[number] = sink
        self._send(Generate(number, request.prompt, request.max_tokens, request.ignore_eos, received_ns, client))
        return number

    def cancel(self, number: int) -> None:
        """The engine forgets a request before its next step; the sink hears nothing more."""
        if self._sinks.pop(number, None) is not None:
            self._send(Cancel(number))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not subclasses

    def data_received(self, data: bytes) -> None:
        """Messages of the engine's side."""
        for message in read_frames(self._unread, data):
            if isinstance(message, Generated):
                self._pass_on(message)
            elif isinstance(message, Control) and isinstance(message.operation, ApplyStatus):
                self._apply(message.operation.models[0])
                self._send(ControlDone(message.number))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The engine has ended: nothing that waits will be answered by it."""
        self._ended = True
        self._on_end()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            self._fail(sink, InternalError(ENGINE_ENDED))

    def _pass_on(self, message: Generated) -> None:
        sinks = self._sinks
        single = zip(message.numbers, zip(message.tokens), strict=True)
        for number, tokens in chain(single, message.several):
            if (sink := sinks.get(number)) is not None:  # else it has been cancelled
                try:
                    sink.tokens(tokens)
                except Exception:
                    log.exception("an answer could not be sent")
                    self._lose(number, sink)
        for done in message.finished:
            if (sink := sinks.pop(done.number, None)) is None:
                continue
            try:
                if done.failure is None:
                    sink.finished(done.tokens, done.finish)
                else:
                    sink.failed(error_of(done.failure))
            except Exception:
                log.exception("an answer could not be sent")
                self._lose(done.number, sink)

    def _lose(self, number: int, sink: AnswerSink) -> None:
        """An answer without some of its tokens is wrong, so it fails; it must not stop the others."""
        self.cancel(number)
        self._fail(sink, InternalError(INTERNAL_ERROR))

    def _fail(self, sink: AnswerSink, error: ContractError) -> None:
        try:
            sink.failed(error)
        except Exception:
            log.exception("the end of an answer could not be sent")

    def _send(self, message: Message) -> None:
        if self._transport is not None and not self._ended:
            self._transport.write(encode([message]))


class GenerationService(ModelService):
    """One language model, whose engine is at the other end of `link`."""

    def __init__(
        self, name: str, label: str, settings: NativeSettings, statistics: Statistics, link_number: int
    ) -> None:
        signature = ModelSignature(name, "1", GENERATE_INPUTS, GENERATE_OUTPUTS, max_batch_size=0)
        super().__init__(signature, settings, statistics)
        self.label = label
        self.vocabulary = 0
        self.max_length = 0
        """Both as the engine says once it is loaded."""
        self.link = GenerationLink(link_number, self._apply, self.fail)

    def submit(
        self, sink: AnswerSink, request: TokenRequest, received_ns: int, transport: asyncio.BaseTransport
    ) -> int:
        """See `GenerationLink.submit`; `transport` is the client's."""
        peer = transport.get_extra_info("peername") if self.settings.max_client_requests else None
        client = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        return self.link.submit(sink, request, received_ns, client)

    @property
    def largest_body_bytes(self) -> int:
        """A body with more bytes holds more than a prompt."""
        return min(self.settings.max_body_bytes, BODY_BYTES + BODY_BYTES_PER_TOKEN * self.max_length)

    def parameters(self, description: EngineDescription) -> dict[str, str]:
        """The settings in effect as text: the engine's, and the server's own."""
        details = {name: value for name, value in description.details.items() if not isinstance(value, dict)}
        own = {"spinning": description.spinning, "model": self.label, "fronts": self.settings.fronts}
        return {name: text for name, value in (details | own).items() if (text := _as_text(value))}

    def _apply(self, status: ModelStatus) -> None:
        if status.description is not None:
            details = status.description.details
            self.vocabulary, self.max_length = int(str(details["vocabulary"])), int(str(details["max_length"]))
        self.set_status(status)


class GenerationFrontEnd(HttpFrontEnd):
    """The front end of a language model."""

    def __init__(
        self,
        application: Application,
        models: ServedModels[GenerationService],
        settings: NativeSettings,
        memory: RequestMemory,
    ) -> None:
        self.language = models.default
        name = self.language.signature.name
        super().__init__(application, models, settings, memory, lambda path: generation_target(path, name))

    def pending(self, connection: HttpServerConnection, request: HttpRequest) -> PendingGeneration:
        return PendingGeneration(self, connection, request)

    def check(self, head: RequestHead) -> ContractError | None:
        assert head.target is not None
        largest = self.language.largest_body_bytes
        try:
            self._models.find(*head.target).check_accepting()
            if head.encoding is not None:
                raise InvalidRequestError("the body must not be compressed; send it without Content-Encoding")
            if head.length is not None and head.length > largest:
                raise too_large(head.length, largest)
        except ContractError as error:
            return error
        return None

    def refusal(self, head: RequestHead | None, error: ContractError | HttpError) -> HttpResponse:
        if head is not None and head.path.startswith("/v1/"):
            return json_response(http_status(error), completion_error(error))
        return super().refusal(head, error)


def generation_target(path: str, model: str) -> tuple[str, str | None] | None:
    """Model and version of a route that generates, None for every other path; `model` is the served one."""
    match path.split("/"):
        case ["", "v1", "completions"]:
            return model, None
        case ["", "v2", "models", named, "generate" | "generate_stream"]:
            return named, None
        case ["", "v2", "models", named, "versions", version, "generate" | "generate_stream"]:
            return named, version
        case _:
            return None


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def too_large(size: int, largest: int) -> TooLargeError:
    """The refusal of a body, or of a message, that holds more than a prompt."""
    return TooLargeError(f"the body has {size} bytes; a prompt that the model takes has at most {largest}")


class PendingGeneration:
    """A `PendingRequest` for tokens, and the `AnswerSink` of its answer."""

    __slots__ = (
        *("_answer", "_begun", "_connection", "_done", "_front_end", "_head", "_number", "_request", "_service"),
        "_times",
    )

    def __init__(self, front_end: GenerationFrontEnd, connection: HttpServerConnection, request: HttpRequest) -> None:
        self._front_end = front_end
        self._service = front_end.language
        self._connection = connection
        self._request = request
        self._head = request.head
        self._times = RequestTimes(request.start_ns)
        self._answer: TokenAnswer | None = None
        self._number = -1
        self._begun = False  # the first tokens have come; those of a stream have been sent
        self._done = False

    @property
    def streams(self) -> bool:
        """Whether the response comes in pieces."""
        return isinstance(self._answer, EventStream)

    @property
    def interim(self) -> bytes:
        """Inside a stream, a comment."""
        return self._answer.comment if self._begun and isinstance(self._answer, EventStream) else CONTINUE

    def begin(self, body: memoryview) -> None:
        """Check the request and pass it to the engine."""
        self._times.receive_ns = time.perf_counter_ns() - self._times.start_ns
        try:
            request = self._parsed(bytes(body))
            check_request(request.prompt, request.max_tokens, self._service)
            self._times.decode_ns = time.perf_counter_ns() - self._times.start_ns - self._times.receive_ns
            self._answer = self._answer_to(request)
            self._number = self._service.submit(self, request, self._times.start_ns, self._connection.transport)
        except ContractError as error:
            self.failed(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            self.failed(InternalError(INTERNAL_ERROR))
        self._request.release()  # its memory need not wait for the answer

    def client_left(self) -> None:
        """Free the slot."""
        if self._done:
            return
        self._done = True
        self._service.link.cancel(self._number)
        if self._connection.choked:
            self._service.statistics.record_failure("slow_client", self._times.start_ns)
        else:
            self._service.statistics.record_disconnect()

    def give_up(self) -> bytes:
        """Free the slot."""
        self._service.link.cancel(self._number)
        return self._failure(shutting_down())

    # AnswerSink

    def tokens(self, tokens: Sequence[int]) -> None:
        assert self._answer is not None
        data = self._answer.tokens(tokens)
        if not self._begun:
            self._send_first(data)
        elif data:
            self._connection.stream(data)

    def finished(self, tokens: Sequence[int], finish: str) -> None:
        assert self._answer is not None
        data = self._answer.last(tokens, finish)
        self._done = True
        if self._connection.gone:
            self._service.statistics.record_disconnect()
            return
        if not self.streams and not self._connection.has_room(len(data)):
            self.failed(UnavailableError(HOLDS_ENOUGH))
            return
        if not self._begun:
            self._service.statistics.record_first_token(self._times)
        self._service.statistics.record_success(self._times)
        if not self.streams:
            self._connection.answer(json_response(200, data))
        else:
            self._connection.send(data if self._begun else self._stream_head() + data)

    def failed(self, error: ContractError) -> None:
        self._connection.send(self._failure(error))

    def _failure(self, error: ContractError) -> bytes:
        """The end of an answer that fails: an error event in a stream that has begun, else a response."""
        self._done = True
        self._service.statistics.record_failure(failure_reason(error), self._times.start_ns)
        if self._begun and isinstance(self._answer, EventStream):
            return self._answer.failure(error)
        return self._front_end.refusal(self._head, error).encode(self._connection.common_headers)

    def _send_first(self, data: bytes) -> None:
        """The first tokens of the answer: those of a stream bring the head of the response."""
        self._begun = True
        self._service.statistics.record_first_token(self._times)
        if self.streams:
            self._connection.stream(self._stream_head() + data)

    def _stream_head(self) -> bytes:
        framing = CHUNKED
        if self._head.version == "1.0":  # which has no chunks: the end of the connection is that of the answer
            framing = b""
            self._connection.close_after_response()
        return b"%b%b%b%b\r\n" % (STATUS_LINES[200], self._connection.common_headers, STREAM_HEADERS, framing)

    def _parsed(self, body: bytes) -> TokenRequest:
        service = self._service
        if len(body) > service.largest_body_bytes:  # in chunks, so that its size was not known before
            raise too_large(len(body), service.largest_body_bytes)
        if self._head.path == COMPLETIONS:
            return parse_completion(body, service.signature.name, service.vocabulary)
        return parse_generate(body, service.vocabulary, stream=self._head.path.endswith("_stream"))

    def _answer_to(self, request: TokenRequest) -> TokenAnswer:
        name, version = self._service.signature.name, self._service.signature.version
        chunked = self._head.version != "1.0"
        if self._head.path == COMPLETIONS:
            identity, created = f"cmpl-{uuid4().hex}", int(time.time())
            if request.stream:
                return CompletionEvents(request, identity, created, name, chunked=chunked)
            return CompletionDocument(request, identity, created, name)
        if request.stream:
            return GenerateEvents(request, name, version, chunked=chunked)
        return GenerateDocument(request, name, version)
