"""Requests to language models over HTTP, answered from the messages of the engine's steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from uuid import uuid4

from servers.language.engine import check_request
from servers.native.front.generation import GenerationService, too_large
from servers.native.front.inference import ServedModels
from servers.native.front.token_requests import TokenRequest, parse_completion, parse_generate
from servers.native.http.connection import CONTINUE, Application, HttpFrontEnd, HttpServerConnection
from servers.native.http.parser import STATUS_LINES, HttpRequest, HttpResponse, RequestHead, json_response
from servers.native.http.token_events import (
    CHUNKED,
    STREAM_HEADERS,
    CompletionEvents,
    EventStream,
    GenerateEvents,
    WholeAnswer,
    completion_document,
    completion_error,
    generate_document,
)
from servers.native.shared.errors import HOLDS_ENOUGH, FailureLog, HttpError, failure_reason, http_status, shutting_down
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, UnavailableError

log = FailureLog("abserve.front")

COMPLETIONS = "/v1/completions"


class GenerationFrontEnd(HttpFrontEnd[GenerationService]):
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

    def check(self, head: RequestHead) -> None:
        assert head.target is not None
        largest = self.language.largest_body_bytes
        self.models.find(*head.target).check_accepting()
        if head.encoding is not None:
            raise InvalidRequestError("the body must not be compressed; send it without Content-Encoding")
        if head.length is not None and head.length > largest:
            raise too_large(head.length, largest)

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
        self._times = front_end.times(self._service.signature, request.start_ns, request.head.trace_headers)
        self._answer: EventStream | WholeAnswer | None = None
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
            check_request(request.prompt, request.max_tokens, self._service.max_length, self._service.vocabulary)
            self._times.decode_ns = time.perf_counter_ns() - self._times.start_ns - self._times.receive_ns
            self._answer = self._answer_to(request)
            self._number = self._service.submit(self, request, self._times.start_ns, self._connection.transport)
        except Exception as error:  # noqa: BLE001  see `for_client`
            self.failed(log.for_client(error, "a request failed unexpectedly"))
        self._request.release()  # its memory need not wait for the answer

    def client_left(self) -> None:
        """Free the slot."""
        if self._done:
            return
        self._done = True
        self._service.link.cancel(self._number)
        if self._connection.choked:
            self._service.statistics.record_failure("slow_client", self._times)
        else:
            self._service.statistics.record_disconnect(self._times)

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
            self._service.statistics.record_disconnect(self._times)
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
        self._service.statistics.record_failure(failure_reason(error), self._times)
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

    def _answer_to(self, request: TokenRequest) -> EventStream | WholeAnswer:
        name, version = self._service.signature.name, self._service.signature.version
        chunked = self._head.version != "1.0"
        if self._head.path == COMPLETIONS:
            identity, created = f"cmpl-{uuid4().hex}", int(time.time())
            if request.stream:
                return CompletionEvents(request, identity, created, name, chunked=chunked)
            return WholeAnswer(partial(completion_document, request, identity, created, name))
        if request.stream:
            return GenerateEvents(request, name, version, chunked=chunked)
        return WholeAnswer(partial(generate_document, request, name, version))
