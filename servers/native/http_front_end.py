"""What all HTTP connections share, and inference over HTTP: from a request's head and body to its answer.

Two ways through. A request whose JSON header came before (see `request_templates`) goes to the batcher from the
connection's own callback, without a task, and its answer is written in the engine thread when nothing else waits.
Everything else (values in JSON, BYTES, shared memory, timeouts, compressed bodies) is a task, and what takes long in it
is done in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from uvicorn.server import ServerState

from servers.contract.codec import HEADER_LENGTH, decode_request, encode_response, parse_header_length
from servers.contract.errors import ContractError, InvalidRequestError, TooLargeError, UnavailableError
from servers.contract.records import InferRequest
from servers.native.deadlines import Deadlines, Expiring
from servers.native.errors import failure_reason
from servers.native.http_answers import Answer, Application
from servers.native.http_body import SPARE_SHARE, BodyPool
from servers.native.http_parser import HeadReader, RequestHead
from servers.native.inference import InferenceService, in_thread
from servers.native.limits import ByteBudget, HttpError
from servers.native.regions import RegionTable
from servers.native.request_templates import KEPT_HEADER_BYTES, RequestTemplate, TemplateCache
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings
from servers.native.statistics import RequestTimes

READ_BYTES = 64 * 1024
"""Room for one read of heads and small bodies: a small body comes with its head, a large one has that much copied."""

INLINE_JSON_BYTES = 16 * 1024
"""Longer JSON is parsed in a thread: this much holds the event loop for a fraction of a millisecond."""

INFLATED_STEP_BYTES = 64 * 1024
"""Compressed bodies are inflated in such steps: small enough for the heap to have room for one anyway."""

MAX_INFLATING = 8
"""Compressed bodies that are inflated and parsed, or wait for that. A connection has one request at a time."""
INFLATES_ENOUGH = "the server reads as many compressed bodies as it may, send this one again later or uncompressed"

_ENCODINGS = ("gzip", "x-gzip", "deflate")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()

_HTTP_REASONS = {408: "slow_client", 413: "too_large", 503: "unavailable"}


class HttpFrontEnd:
    """Of one event loop. `application` answers everything but inference."""

    def __init__(
        self,
        application: Application,
        models: ServedModels,
        regions: RegionTable,
        settings: NativeSettings,
        budget: ByteBudget,
    ) -> None:
        self.application = application
        self.settings = settings
        self.budget = budget
        self.heads = HeadReader(settings)
        self.bodies = BodyPool(settings.max_held_bytes // SPARE_SHARE)
        self.deadlines = Deadlines()
        self.scratch = bytearray(READ_BYTES)
        self.room = memoryview(self.scratch)
        self._state: ServerState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._models = models
        self._regions = regions
        self._templates = {service: TemplateCache(service.signature) for service in models}
        # One thread: parsing holds the interpreter, so that more of them would only take longer each.
        self._parsing = ThreadPoolExecutor(1, "parsing")
        # Another one for compressed bodies: a few bytes of them are as much work as a megabyte of plain JSON.
        self._inflating = ThreadPoolExecutor(1, "inflating")
        self._compressed = 0

    def open(self, server_state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        """Once the event loop runs; again for each client, since uvicorn tells it no sooner."""
        self._state = server_state
        self._loop = loop

    def add(self, connection: Expiring) -> None:
        """Watch it, and let uvicorn tell it and wait for it when the server stops."""
        assert self._state is not None
        self._state.connections.add(connection)  # type: ignore[arg-type]  # it asks them for `shutdown` alone
        self.deadlines.watch(connection)

    def remove(self, connection: Expiring) -> None:
        """It has ended."""
        assert self._state is not None
        self._state.connections.discard(connection)
        self.deadlines.forget(connection)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """As a task that uvicorn waits for when the server stops."""
        assert self._state is not None
        task = asyncio.get_running_loop().create_task(work)
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def call(self, callback: Callable[..., object], *arguments: object) -> None:
        """From any thread: call back in the event loop, unless that has ended."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def service(self, head: RequestHead) -> InferenceService:
        """Who counts a request: the model that it names, or the default one when it names none of ours."""
        assert head.target is not None
        try:
            return self._models.named(*head.target)
        except ContractError:
            return self._models.default

    def count_disconnect(self, head: RequestHead | None) -> None:
        """Count a client that has left before its request was complete, if it was one for inference."""
        if head is not None and head.infers:
            self.service(head).statistics.record_disconnect()

    def count_failure(self, head: RequestHead | None, error: ContractError | HttpError, start_ns: int) -> None:
        """Count a request that was refused before it was complete, likewise."""
        if head is None or not head.infers:
            return
        if isinstance(error, HttpError):
            reason = _HTTP_REASONS.get(error.status, "invalid_request")
        else:
            reason = failure_reason(error)
        self.service(head).statistics.record_failure(reason, start_ns)

    def check(self, head: RequestHead) -> ContractError | None:
        """Why this request is refused whatever its body is."""
        assert head.target is not None
        try:
            self._models.find(*head.target).check_ready()
            if head.encoding is not None and head.encoding not in _ENCODINGS:
                raise InvalidRequestError("Content-Encoding must be identity, gzip or deflate")
            if head.length is not None and head.encoding is None:
                self._check_json_bytes(_json_bytes(head, head.length), head.length)
        except ContractError as error:
            return error
        return None

    def start(
        self, service: InferenceService, head: RequestHead, body: memoryview, times: RequestTimes
    ) -> RequestTemplate | Coroutine[Any, Any, Answer]:
        """What is left to do for a whole request: queue it by its template, or await its answer.

        Raises `ContractError`.
        """
        received_ns = time.perf_counter_ns()
        times.receive_ns = received_ns - times.start_ns
        service.check_loaded()
        if head.encoding is not None:
            return self._answer_compressed(service, head, body, times)
        json_bytes = _json_bytes(head, body.nbytes)
        self._check_json_bytes(json_bytes, body.nbytes)
        request: InferRequest | None = None
        if json_bytes and json_bytes <= KEPT_HEADER_BYTES and service.direct:
            templates, header = self._templates[service], bytes(body[:json_bytes])
            template = templates.find(header, body.nbytes)
            if template is None:
                request = decode_request(body, json_bytes, service.signature, self._regions)
                template = templates.keep(header, request, body.nbytes)
            times.decode_ns = time.perf_counter_ns() - received_ns
            if template is not None:
                return template
        return self._answer(service, body, json_bytes, request, times)

    async def _answer_compressed(
        self, service: InferenceService, head: RequestHead, compressed: memoryview, times: RequestTimes
    ) -> Answer:
        """The connection holds the compressed bytes, this the others: one request at a time is inflated before that."""
        started_ns = time.perf_counter_ns()
        if self._compressed >= MAX_INFLATING:
            raise UnavailableError(INFLATES_ENOUGH)
        self._compressed += 1
        try:
            body, request = await in_thread(self._inflating, self._inflate, service, head, compressed)
        finally:
            self._compressed -= 1
        with self.budget.holding(body.nbytes):
            times.decode_ns = time.perf_counter_ns() - started_ns
            return await self._answer(service, body, None, request, times)

    def _inflate(
        self, service: InferenceService, head: RequestHead, compressed: memoryview
    ) -> tuple[memoryview, InferRequest]:
        body = decompress(compressed, self.settings.max_body_bytes)
        json_bytes = _json_bytes(head, body.nbytes)
        self._check_json_bytes(json_bytes, body.nbytes)
        return body, decode_request(body, json_bytes, service.signature, self._regions)

    async def _answer(
        self,
        service: InferenceService,
        body: memoryview,
        json_bytes: int | None,
        request: InferRequest | None,
        times: RequestTimes,
    ) -> Answer:
        started_ns = time.perf_counter_ns() - times.decode_ns
        if request is None:
            if (body.nbytes if json_bytes is None else json_bytes) <= INLINE_JSON_BYTES:
                request = decode_request(body, json_bytes, service.signature, self._regions)
            else:
                arguments = body, json_bytes, service.signature, self._regions
                request = await in_thread(self._parsing, decode_request, *arguments)
        times.decode_ns = time.perf_counter_ns() - started_ns
        response = await service.infer(request, times)
        inferred_ns = time.perf_counter_ns()
        content, header_bytes = encode_response(response)
        times.encode_ns += time.perf_counter_ns() - inferred_ns
        headers = [(b"content-length", b"%d" % len(content))]
        if header_bytes is None:
            headers.append((b"content-type", b"application/json"))
        else:
            headers.append((b"content-type", b"application/octet-stream"))
            headers.append((_HEADER_LENGTH, b"%d" % header_bytes))
        return Answer(200, headers, content)

    def _check_json_bytes(self, json_bytes: int | None, body_bytes: int) -> None:
        limit = self.settings.max_json_bytes
        if (body_bytes if json_bytes is None else json_bytes) > limit:
            raise TooLargeError(f"the request's JSON has more than {limit} bytes: send the tensors as binary data")


def _json_bytes(head: RequestHead, body_bytes: int) -> int | None:
    """Raises `InvalidRequestError`."""
    return None if head.json_length is None else parse_header_length(head.json_length.decode("latin-1"), body_bytes)


def decompress(data: memoryview, limit: int) -> memoryview:
    """Raises `TooLargeError` before more than `limit` + 1 bytes exist, `InvalidRequestError` for other formats.

    Into a mapping of its own, whose pages go back to the kernel with it: zlib's own buffers come from the heap, which
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


def duplicate(own: socket.socket) -> socket.socket | None:
    """Another of the same connection, for another thread to send on; None when the process is out of descriptors."""
    try:
        other = socket.socket(fileno=os.dup(own.fileno()))
    except OSError:
        return None
    other.setblocking(False)
    return other
