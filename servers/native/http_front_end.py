"""Inference over HTTP, from a request's head and body to its response, and what all HTTP connections share.

There are two ways. A request whose JSON header came before (see `templates`) goes to the batcher from the connection's
callback, without a task. Every other request (values in JSON, BYTES, timeouts, compressed bodies) is a task, whose slow
steps run in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from uvicorn.server import ServerState

from servers.native.arena import RequestMemory
from servers.native.errors import HOLDS_ENOUGH, INTERNAL_ERROR, HttpError, failure_reason, http_status
from servers.native.failure_log import FailureLog
from servers.native.http_parser import HeadReader, Request, RequestHead
from servers.native.inference import InferenceService, in_thread
from servers.native.limits import ByteBudget, Turns
from servers.native.queued_request import QueuedRequest
from servers.native.regions import RegionTable
from servers.native.request_templates import RequestTemplate, TemplateCache
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings
from servers.native.statistics import RequestTimes
from servers.native.templates import KEPT_BYTES, Repeated
from servers.protocol.codec import HEADER_LENGTH, decode_request, encode_pieces, is_slow_to_encode, parse_header_length
from servers.protocol.errors import ContractError, InternalError, InvalidRequestError, TooLargeError, UnavailableError
from servers.protocol.records import InferRequest, InferResponse, Window

log = FailureLog("abserve.http")

READ_BYTES = 64 * 1024
"""Room for one read of heads and small bodies. Of a large body, this much is copied."""
INLINE_JSON_BYTES = 16 * 1024
"""Longer JSON is parsed in a thread: this much holds the event loop for a fraction of a millisecond."""
JOINED_BYTES = 2**20
"""A larger body is sent in the pieces that it is made of: copying all of them at once would hold the event loop."""
INFLATED_STEP_BYTES = 64 * 1024
"""Compressed bodies are inflated in steps of this size, which fit into memory that the heap has anyway."""
MAX_INFLATING = 8
"""Most compressed bodies that are inflated and parsed, or wait for that, in each front end over HTTP and over gRPC.

A connection has one request at a time.
"""
TICK_S = 0.25
"""How often all deadlines of connections are checked: one timer for all, so that a request sets none."""

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
Headers = list[tuple[bytes, bytes]]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_FORBIDDEN = b"\r\n\x00"
_ENCODINGS = ("gzip", "x-gzip", "deflate")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """One response; `headers` include its Content-Length. The rest of a large body comes in `more` pieces."""

    status: int
    headers: Headers
    body: bytes
    more: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        """The bytes of the whole body."""
        return len(self.body) + sum(map(len, self.more))

    def encode(self, common: bytes, *, with_body: bool = True) -> bytes:
        """The bytes to send before `more`, with the header lines `common`. Line ends inside a header are left out."""
        parts = [STATUS_LINES.get(self.status, b"HTTP/1.1 %d \r\n" % self.status), common]
        for name, value in self.headers:
            # Starlette's redirects and errors may quote the client; a line end in the quote would begin a header.
            parts += [name.translate(None, _FORBIDDEN), b": ", value.translate(None, _FORBIDDEN), b"\r\n"]
        parts.append(b"\r\n")
        if with_body:
            parts.append(self.body)
        return b"".join(parts)


def refusal(error: ContractError | HttpError) -> Answer:
    """The response to a failed request: `{"error": …}` in ASCII, since a message may quote any text of a client."""
    status = http_status(error)
    body = json.dumps({"error": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return Answer(status, headers, body)


async def ask(application: Application, scope: Message, body: bytes) -> Answer:
    """The application's whole response to a request; one with status 500 when it fails."""
    received = False
    status = 500
    headers: Headers = []
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await application(scope, receive, send)
    except Exception:
        log.exception("a request failed unexpectedly", path=scope["path"][:200])
        return refusal(InternalError(INTERNAL_ERROR))
    content = b"".join(parts)
    if not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(content)))
    return Answer(status, headers, content)


class HttpFrontEnd:
    """The shared part of one event loop's connections. `application` answers everything but inference."""

    def __init__(
        self,
        application: Application,
        models: ServedModels,
        regions: RegionTable,
        settings: NativeSettings,
        memory: RequestMemory,
    ) -> None:
        self.application = application
        self.settings = settings
        self.memory = memory
        self.regions = regions
        self.heads = HeadReader(settings)
        self.scratch = bytearray(READ_BYTES)
        self.room = memoryview(self.scratch)
        self.templates = {service: TemplateCache(service.signature, service.padding) for service in models}
        self.date = b""
        """The Date header of every response; it changes once per second."""
        self.turns = Turns(0)
        """Of clients that send the next request before they have their answer: one of them per turn of the loop."""
        self.compressed = 0
        # One thread each: JSON holds the interpreter, so that more threads would only take longer each. Compressed
        # bodies have another one, because a few bytes of them are as much work as a megabyte of plain JSON.
        self.parsing = ThreadPoolExecutor(1, "parsing")
        self.encoding = ThreadPoolExecutor(1, "encoding")
        self.inflating = ThreadPoolExecutor(1, "inflating")
        self.on_close: Callable[[], None] = lambda: None
        """Called for each connection that has been closed."""
        self._models = models
        self._state = ServerState()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self, server_state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        """Called for each client: only then does uvicorn pass its state and its loop."""
        self._state = server_state
        self._loop = loop

    @property
    def connections(self) -> set[Any]:
        """The open connections, in uvicorn's set: it shuts them down and waits for them when the server stops."""
        return self._state.connections

    def add(self, connection: Any) -> None:
        """A client has connected; `connection` is a `Connection`, whose module imports this one."""
        self.connections.add(connection)
        if self._timer is None:
            self._tick()

    def remove(self, connection: Any) -> None:
        """A connection has been closed."""
        self.connections.discard(connection)
        self.on_close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that uvicorn waits for when the server stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call back in the event loop, unless it has ended; any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _tick(self) -> None:
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        now = time.monotonic()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            try:
                connection.expire()
            except Exception:  # the others have their limits, and the timer goes on
                log.exception("the time limits of a connection could not be applied")
        # Without connections nothing ticks; the next one starts the timer again.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self.connections else None

    def service(self, head: RequestHead) -> InferenceService:
        """The model that counts a request: the one it names, or the default one when it names none of the server's."""
        assert head.target is not None
        try:
            return self._models.named(*head.target)
        except ContractError:
            return self._models.default

    def count_disconnect(self, head: RequestHead | None) -> None:
        """Count a client that left before its inference request was complete."""
        if head is not None and head.infers:
            self.service(head).statistics.record_disconnect()

    def count_failure(self, head: RequestHead | None, error: ContractError | HttpError, start_ns: int) -> None:
        """Count an inference request that was refused before it was complete."""
        if head is not None and head.infers:
            self.service(head).statistics.record_failure(failure_reason(error), start_ns)

    def check(self, head: RequestHead) -> ContractError | None:
        """Why this inference request is refused whatever its body is."""
        assert head.target is not None
        try:
            self._models.find(*head.target).check_accepting()
            if head.encoding is not None and head.encoding not in _ENCODINGS:
                raise InvalidRequestError("Content-Encoding must be identity, gzip or deflate")
            if head.length is not None and head.encoding is None:
                self.json_bytes(head, head.length)
        except ContractError as error:
            return error
        return None

    def json_bytes(self, head: RequestHead, body_bytes: int) -> int | None:
        """The size of the body's JSON header, None where all of it is JSON. Raises `ContractError`."""
        value = head.json_length
        json_bytes = None if value is None else parse_header_length(value.decode("latin-1"), body_bytes)
        limit = self.settings.max_json_bytes
        if (body_bytes if json_bytes is None else json_bytes) > limit:
            raise TooLargeError(f"the request's JSON has more than {limit} bytes: send the tensors as binary data")
        return json_bytes


class PendingRequest:
    """One inference request between its last byte and its response; the `Waiter` of its `QueuedRequest`.

    Belongs to the event loop. Exactly one of its ways to end is taken.
    """

    __slots__ = (
        *("_connection", "_front_end", "_head", "_queued", "_request_id", "_service"),
        *("_targets", "_task", "_template", "_times"),
    )

    def __init__(self, front_end: HttpFrontEnd, connection: Any, request: Request) -> None:
        self._front_end = front_end
        self._connection = connection
        self._head = request.head
        self._service = front_end.service(request.head)
        self._times = RequestTimes(request.start_ns)
        self._template: RequestTemplate | None = None
        self._request_id = b""
        self._targets: Mapping[str, Window] = {}
        self._queued: QueuedRequest | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, body: memoryview) -> None:
        """Queue the request, or answer it in a task; the connection may have the response before this returns."""
        try:
            work = self._plan(body)
            if isinstance(work, tuple):
                self._template, self._request_id, offset = work
                find = self._front_end.regions.find
                queued = self._template.queued(body, offset, find, None, self)
                self._targets = self._template.targets(queued, find)
                self._queued = queued
                self._service.enqueue(queued)
                return
        except ContractError as error:
            self._queued = None
            self._refuse(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            if self._queued is not None:
                self._queued.waiter = None
                self._queued = None
            self._refuse(InternalError(INTERNAL_ERROR))
        else:
            self._task = asyncio.get_running_loop().create_task(self._carry_out(work))

    def abandon(self) -> None:
        """The client has left: take the request out of the queue if it still waits there."""
        queued = self._queued
        if self._task is not None:
            self._task.cancel()
        elif queued is not None and self._service.withdraw(queued):  # else it is counted when it comes back
            self._queued = queued.waiter = None  # frees the connection before the queue comes to this request
            self._service.statistics.record_disconnect()

    def give_up(self) -> None:
        """The server's time to finish is over and the connection refuses the request: the engine need not see it."""
        queued, self._queued = self._queued, None
        if self._task is not None:
            self._task.cancel()
        elif queued is not None:
            self._service.withdraw(queued)
            queued.waiter = None
        self._service.statistics.record_failure("shutting_down", self._times.start_ns)

    def wake(self, queued: QueuedRequest) -> None:
        self._queued = None  # breaks the cycle of the two, which with the arrays would wait for the garbage collector
        answer = None if queued.error is not None else self._encode(queued)
        if self._connection.gone:
            self._service.statistics.record_disconnect()
        elif answer is None:
            self._refuse(queued.error or InternalError(INTERNAL_ERROR))
        elif not self._connection.has_room(len(answer)):
            self._refuse(UnavailableError(HOLDS_ENOUGH))
        else:
            self._service.statistics.record_success(self._times)
            self._connection.send(answer)

    def _plan(self, body: memoryview) -> Repeated[RequestTemplate] | Coroutine[Any, Any, Answer]:
        """What to queue, or to run as a task. Raises `ContractError`."""
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
            templates, header = front_end.templates[service], bytes(body[:header_bytes])
            repeated = templates.find(header, body.nbytes)
            if repeated is None:
                request = self._decode(body, json_bytes)
                repeated = templates.keep(header, request, body.nbytes)
            times.decode_ns = time.perf_counter_ns() - received_ns
            if repeated is not None:
                return repeated
        return self._answer(body, json_bytes, request)

    def _decode(self, body: memoryview, json_bytes: int | None) -> InferRequest:
        return decode_request(body, json_bytes, self._service.signature, self._front_end.regions.find)

    async def _answer_compressed(self, compressed: memoryview) -> Answer:
        """The connection's bytes count as held already; those that they inflate to are added once they are known."""
        front_end, started_ns = self._front_end, time.perf_counter_ns()
        if front_end.compressed >= MAX_INFLATING:
            raise UnavailableError(f"the server inflates {MAX_INFLATING} bodies now; send this later or uncompressed")
        front_end.compressed += 1
        try:
            body, request = await in_thread(front_end.inflating, self._inflate, compressed)
        finally:
            front_end.compressed -= 1
        with front_end.memory.budget.holding(body.nbytes):
            self._times.decode_ns = time.perf_counter_ns() - started_ns
            return await self._answer(body, None, request)

    def _inflate(self, compressed: memoryview) -> tuple[memoryview, InferRequest]:
        body = decompress(compressed, self._front_end.settings.max_body_bytes)
        return body, self._decode(body, self._front_end.json_bytes(self._head, body.nbytes))

    async def _answer(self, body: memoryview, json_bytes: int | None, request: InferRequest | None) -> Answer:
        times = self._times
        started_ns = time.perf_counter_ns() - times.decode_ns
        if request is None:
            if (body.nbytes if json_bytes is None else json_bytes) <= INLINE_JSON_BYTES:
                request = self._decode(body, json_bytes)
            else:
                request = await in_thread(self._front_end.parsing, self._decode, body, json_bytes)
        times.decode_ns = time.perf_counter_ns() - started_ns
        response = await self._service.infer(request, times)
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
        return Answer(200, headers, b"", pieces) if size > JOINED_BYTES else Answer(200, headers, b"".join(pieces))

    async def _carry_out(self, work: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await work
        except asyncio.CancelledError:
            if not self._connection.gone:
                raise  # the server is being stopped by force
            self._service.statistics.record_disconnect()
        except ContractError as error:
            self._refuse(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            self._refuse(InternalError(INTERNAL_ERROR))
        else:
            if self._connection.gone or self._connection.has_room(answer.size):
                self._count()
                self._connection.answer(answer)
            else:
                self._refuse(UnavailableError(HOLDS_ENOUGH))

    def _refuse(self, error: ContractError) -> None:
        self._service.statistics.record_failure(failure_reason(error), self._times.start_ns)
        self._connection.answer(refusal(error))

    def _encode(self, queued: QueuedRequest) -> bytes | None:
        """The response's bytes; None if encoding fails, which becomes the request's error and stops no thread."""
        assert self._template is not None
        start_ns = time.perf_counter_ns()
        try:
            common = self._connection.common_headers
            outputs, signature = queued.outputs or {}, self._service.signature
            answer = self._template.answer(outputs, self._targets, signature, common, self._request_id)
        except ContractError as error:
            queued.error = error
            return None
        except Exception:
            log.exception("a response could not be encoded")
            queued.error = InternalError(INTERNAL_ERROR)
            return None
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        return answer

    def _count(self) -> None:
        if self._connection.gone:
            self._service.statistics.record_disconnect()
        else:
            self._service.statistics.record_success(self._times)


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


def decompress(data: memoryview, limit: int) -> memoryview:
    """Raises `TooLargeError` before more than `limit` + 1 bytes exist, `InvalidRequestError` for other formats.

    The result is in a mapping, whose pages go back to the kernel with it: zlib's own buffers come from the heap, which
    grew by their sum and kept 44 MiB after one bomb of 512 MiB.
    """
    decoder = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its own header
    content = mmap.mmap(-1, 4 * INFLATED_STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared cannot grow
    used = 0
    while used < len(data) and not decoder.eof:
        rest: bytes | memoryview = data[used : used + INFLATED_STEP_BYTES]
        used += len(rest)
        full = True
        while full and not decoder.eof:
            room = min(INFLATED_STEP_BYTES, limit + 1 - content.tell())
            try:
                piece = decoder.decompress(rest, room)
            except zlib.error as exc:
                raise InvalidRequestError("the body is not what its Content-Encoding says") from exc
            if content.tell() + len(piece) > len(content):
                content.resize(2 * len(content))
            content.write(piece)
            if content.tell() > limit:
                raise TooLargeError(f"the body has more than {limit} bytes after decompression, the server's limit")
            rest, full = decoder.unconsumed_tail, len(piece) == room
    if not decoder.eof:
        raise InvalidRequestError("the compressed body ends too early")
    if decoder.unused_data or used < len(data):
        raise InvalidRequestError("bytes follow the end of the compressed body")
    return memoryview(content)[: content.tell()]
