"""Inference requests over HTTP: tensors in, tensors out.

A request is answered in one of two ways. If its JSON header came before (see `templates`), the connection's callback
passes it to the batcher, without a task. Every other request (values in JSON, BYTES, timeouts, compressed bodies) is a
task, whose slow steps run in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers.native.front.inference import InferenceService, ServedModels, check_version
from servers.native.front.region_table import RegionTable
from servers.native.front.templates import KEPT_BYTES, Repeated, RequestTemplate
from servers.native.http.connection import CONTINUE, Application, HttpFrontEnd, HttpServerConnection
from servers.native.http.parser import HttpRequest, HttpResponse, RequestHead, refusal
from servers.native.shared.errors import HOLDS_ENOUGH, FailureLog, failure_reason
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.limits import decompress, in_thread
from servers.native.shared.memory import ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.codec import HEADER_LENGTH, decode_request, encode_pieces, is_slow_to_encode, parse_header_length
from servers.protocol.errors import ContractError, InvalidRequestError, TooLargeError, UnavailableError
from servers.protocol.records import InferRequest, InferResponse, RegionWindow

log = FailureLog("abserve.http")

INLINE_JSON_BYTES = 16 * 1024
"""Longer JSON is parsed in a thread: this much holds the event loop for a fraction of a millisecond."""
JOINED_BYTES = 2**20
"""A larger body is sent in the pieces that it is made of: copying all of them at once would hold the event loop."""

_ENCODINGS = ("gzip", "x-gzip", "deflate")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()


class InferenceFrontEnd(HttpFrontEnd[InferenceService]):
    """The front end of models that take and answer tensors."""

    def __init__(
        self,
        application: Application,
        models: ServedModels[InferenceService],
        regions: RegionTable,
        settings: NativeSettings,
        memory: RequestMemory,
    ) -> None:
        super().__init__(application, models, settings, memory)
        self.regions = regions
        self.encoding = ThreadPoolExecutor(1, "encoding")  # as `reading`

    def pending(self, connection: HttpServerConnection, request: HttpRequest) -> PendingHttpRequest:
        return PendingHttpRequest(self, connection, request)

    def check(self, head: RequestHead) -> None:
        assert head.target is not None
        self.models.find(*head.target).check_accepting()
        if head.encoding is not None and head.encoding not in _ENCODINGS:
            raise InvalidRequestError("Content-Encoding must be identity, gzip or deflate")
        if head.length is not None and head.encoding is None:
            self.json_bytes(head, head.length)

    def json_bytes(self, head: RequestHead, body_bytes: int) -> int | None:
        """The size of the body's JSON header, None where all of it is JSON. Raises `ContractError`."""
        value = head.json_length
        json_bytes = None if value is None else parse_header_length(value.decode("latin-1"), body_bytes)
        limit = self.settings.max_json_bytes
        if (body_bytes if json_bytes is None else json_bytes) > limit:
            raise TooLargeError(f"the request's JSON has more than {limit} bytes: send the tensors as binary data")
        return json_bytes


class PendingHttpRequest:
    """A `PendingRequest` of tensors; `wake` is the waiter of its `QueuedRequest`.

    Belongs to the event loop. Exactly one of its ways to end is taken.
    """

    __slots__ = (
        *("_connection", "_front_end", "_head", "_queued", "_request_id", "_service"),
        *("_targets", "_task", "_template", "_times"),
    )

    def __init__(self, front_end: InferenceFrontEnd, connection: HttpServerConnection, request: HttpRequest) -> None:
        self._front_end = front_end
        self._connection = connection
        self._head = request.head
        self._service = front_end.service(request.head)
        self._times = front_end.times(self._service.signature, request.start_ns, request.head.trace_headers)
        self._template: RequestTemplate | None = None
        self._request_id = b""
        self._targets: Mapping[str, RegionWindow] = {}
        self._queued: QueuedRequest | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def interim(self) -> bytes:
        return CONTINUE

    def begin(self, body: memoryview) -> None:
        """Queue the request, or answer it in a task; the connection may have the response before this returns."""
        try:
            work = self._prepare(body)
            if isinstance(work, tuple):
                self._template, self._request_id, offset = work
                find = self._front_end.regions.find
                queued = self._template.queued(body, offset, find, None, self.wake)
                self._targets = self._template.targets(queued, find)
                queued.trace = self._times.trace_context
                self._service.enqueue(queued)
                self._queued = queued
                return
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._refuse(log.for_client(error, "a request failed unexpectedly"))
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer_in_task(work))

    def client_left(self) -> None:
        """The client has left: take the request out of the queue if it still waits there."""
        queued = self._queued
        if self._task is not None:
            self._task.cancel()
        elif queued is not None and self._service.withdraw(queued):  # else it is counted when it comes back
            self._queued = queued.waiter = None  # frees the connection before the queue comes to this request
            self._service.statistics.record_disconnect(self._times)

    def give_up(self) -> None:
        """The connection refuses the request: the engine need not see it."""
        queued, self._queued = self._queued, None
        if self._task is not None:
            self._task.cancel()
        elif queued is not None:
            self._service.withdraw(queued)
            queued.waiter = None
        self._service.statistics.record_failure("shutting_down", self._times)

    def wake(self, queued: QueuedRequest) -> None:
        self._queued = None  # breaks the cycle of the two, which with the arrays would wait for the garbage collector
        if self._connection.gone:
            self._service.statistics.record_disconnect(self._times)
            return
        if queued.error is not None:
            self._refuse(queued.error)
            return
        assert self._template is not None
        start_ns = time.perf_counter_ns()
        try:
            common, outputs, signature = self._connection.common_headers, queued.outputs or {}, self._service.signature
            answer = self._template.answer(outputs, self._targets, signature, common, self._request_id)
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._refuse(log.for_client(error, "a response could not be encoded"))
            return
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        if self._has_room(len(answer)):
            self._connection.send(answer)

    def _prepare(self, body: memoryview) -> Repeated[RequestTemplate] | Coroutine[Any, Any, HttpResponse]:
        """What to queue, or to run as a task. Raises `ContractError`."""
        if self._service.successor is not None:  # since its head came
            assert self._head.target is not None
            self._service = self._front_end.models.find(*self._head.target)
        front_end, service, times = self._front_end, self._service, self._times
        received_ns = time.perf_counter_ns()
        times.receive_ns = received_ns - times.start_ns
        service.check_loaded()
        if self._head.encoding is not None:
            return self._answer_compressed(body)
        json_bytes = front_end.json_bytes(self._head, body.nbytes)
        request: InferRequest | None = None
        header_bytes = body.nbytes if json_bytes is None else json_bytes
        if 0 < header_bytes <= KEPT_BYTES and service.direct:
            header = bytes(body[:header_bytes])
            repeated = service.templates.find(header, body.nbytes)
            if repeated is None:
                request = self._decode(body, json_bytes)
                repeated = service.templates.keep(header, request, body.nbytes)
            times.decode_ns = time.perf_counter_ns() - received_ns
            if repeated is not None:
                return repeated
        return self._answer(body, json_bytes, request)

    def _decode(self, body: memoryview, json_bytes: int | None) -> InferRequest:
        return decode_request(body, json_bytes, self._service.signature, self._front_end.regions.find)

    async def _answer_compressed(self, compressed: memoryview) -> HttpResponse:
        """The connection's bytes count as held already; those that they inflate to are added once they are known."""
        front_end, started_ns = self._front_end, time.perf_counter_ns()
        body, request = await front_end.inflating.run(self._inflate, compressed)
        with front_end.memory.budget.holding(body.nbytes):
            self._times.decode_ns = time.perf_counter_ns() - started_ns
            return await self._answer(body, None, request)

    def _inflate(self, compressed: memoryview) -> tuple[memoryview, InferRequest]:
        body = decompress(compressed, self._front_end.settings.max_body_bytes)
        return body, self._decode(body, self._front_end.json_bytes(self._head, body.nbytes))

    async def _answer(self, body: memoryview, json_bytes: int | None, request: InferRequest | None) -> HttpResponse:
        times = self._times
        started_ns = time.perf_counter_ns() - times.decode_ns
        if request is None:
            if (body.nbytes if json_bytes is None else json_bytes) <= INLINE_JSON_BYTES:
                request = self._decode(body, json_bytes)
            else:
                request = await in_thread(self._front_end.reading, self._decode, body, json_bytes)
        times.decode_ns = time.perf_counter_ns() - started_ns
        response = await self._service.infer(request, times)
        assert self._head.target is not None
        check_version(response, self._head.target[1])
        inferred_ns = time.perf_counter_ns()
        if is_slow_to_encode(response):
            budget = self._front_end.memory.budget
            with budget.holding(sum(tensor.data.nbytes for tensor in response.outputs)):
                pieces, header_bytes = await in_thread(self._front_end.encoding, _encode_within, response, budget)
        else:
            pieces, header_bytes = encode_pieces(response)
        times.encode_ns += time.perf_counter_ns() - inferred_ns
        size = sum(map(len, pieces))
        headers = [(b"content-length", b"%d" % size)]
        if header_bytes is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((b"content-type", b"application/octet-stream"))
            headers.append((_HEADER_LENGTH, b"%d" % header_bytes))
        return (
            HttpResponse(200, headers, b"", pieces)
            if size > JOINED_BYTES
            else HttpResponse(200, headers, b"".join(pieces))
        )

    async def _answer_in_task(self, work: Coroutine[Any, Any, HttpResponse]) -> None:
        try:
            answer = await work
        except asyncio.CancelledError:
            if not self._connection.gone:
                raise  # the server is being stopped by force
            self._service.statistics.record_disconnect(self._times)
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._refuse(log.for_client(error, "a request failed unexpectedly"))
        else:
            if self._connection.gone:
                self._service.statistics.record_disconnect(self._times)
            elif self._has_room(answer.size):
                self._connection.answer(answer)

    def _refuse(self, error: ContractError) -> None:
        reason = failure_reason(error)
        self._service.statistics.record_failure(reason, self._times)
        self._connection.answer(refusal(error))

    def _has_room(self, count: int) -> bool:
        """Whether the response may be sent, which counts it; else the request is refused."""
        if not self._connection.has_room(count):
            self._refuse(UnavailableError(HOLDS_ENOUGH))
            return False
        self._service.statistics.record_success(self._times)
        return True


def _encode_within(response: InferResponse, budget: ByteBudget) -> tuple[list[bytes], int | None]:
    """Encode a response; what exists of it counts as held until it is whole. Raises `ContractError`."""
    held = 0

    def hold(count: int) -> None:
        nonlocal held
        if not budget.hold(count):
            raise UnavailableError(HOLDS_ENOUGH)
        held += count

    try:
        return encode_pieces(response, hold)
    finally:
        budget.release(held)
