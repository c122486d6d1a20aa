"""Inference over HTTP: from a request's head and body to its answer.

Two ways through. A request whose JSON header came before (see `plans`) goes to the batcher from the connection's own
callback, without a task, and its answer is written in the engine thread when nothing else waits. Everything else
(values in JSON, BYTES, shared memory, timeouts, compressed bodies) is a task, and what takes long in it is done in a
thread.
"""

from __future__ import annotations

import asyncio
import mmap
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from servers.contract.codec import HEADER_LENGTH, decode_request, encode_response, parse_header_length
from servers.contract.errors import ContractError, InvalidRequestError, TooLargeError
from servers.contract.records import InferRequest
from servers.native.answers import Answer
from servers.native.errors import failure_reason
from servers.native.exchange import Exchange, ExchangeOwner
from servers.native.heads import Head
from servers.native.inference import InferenceService
from servers.native.limits import ByteBudget, HttpError, HttpLimits
from servers.native.plans import KEPT_HEADER_BYTES, PlanCache
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.statistics import RequestTimes

INLINE_JSON_BYTES = 16 * 1024
"""Longer JSON is parsed in a thread: this much holds the event loop for a fraction of a millisecond."""

INFLATED_STEP_BYTES = 64 * 1024
"""Compressed bodies are inflated in such steps: small enough for the heap to have room for one anyway."""

_ENCODINGS = ("gzip", "x-gzip", "deflate")
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()

_HTTP_REASONS = {408: "slow_client", 413: "too_large", 503: "unavailable"}

R = TypeVar("R")


class InferDoor:
    """Everything that the connections share to answer inference requests. Belongs to one event loop."""

    def __init__(self, models: ServedModels, regions: RegionTable, limits: HttpLimits, budget: ByteBudget) -> None:
        self.budget = budget
        self._models = models
        self._regions = regions
        self._limits = limits
        self._plans = {service: PlanCache(service.signature) for service in models}
        # One thread: parsing holds the interpreter, so that more of them would only take longer each.
        self._parsing = ThreadPoolExecutor(1, "parsing")

    def service(self, head: Head) -> InferenceService:
        """Who counts a request: the model that it names, or the default one when it names none of ours."""
        assert head.target is not None
        try:
            return self._models.named(*head.target)
        except ContractError:
            return self._models.default

    def count_disconnect(self, head: Head | None) -> None:
        """Count a client that has left before its request was complete, if it was one for inference."""
        if head is not None and head.infers:
            self.service(head).statistics.record_disconnect()

    def count_failure(self, head: Head | None, error: ContractError | HttpError, start_ns: int) -> None:
        """Count a request that was refused before it was complete, likewise."""
        if head is None or not head.infers:
            return
        if isinstance(error, HttpError):
            reason = _HTTP_REASONS.get(error.status, "invalid_request")
        else:
            reason = failure_reason(error)
        self.service(head).statistics.record_failure(reason, start_ns)

    def check(self, head: Head) -> ContractError | None:
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

    def begin(self, owner: ExchangeOwner, head: Head, body: memoryview, times: RequestTimes) -> Exchange:
        """Start on a complete request; `owner` is given its answer, perhaps before this returns."""
        service = self.service(head)
        exchange = Exchange(owner, service, times)
        received_ns = time.perf_counter_ns()
        times.receive_ns = received_ns - times.start_ns
        json_bytes = None
        request: InferRequest | None = None
        try:
            service.check_loaded()
            if head.encoding is None:
                json_bytes = _json_bytes(head, body.nbytes)
                self._check_json_bytes(json_bytes, body.nbytes)
                if json_bytes and json_bytes <= KEPT_HEADER_BYTES and service.direct:
                    plans, header = self._plans[service], bytes(body[:json_bytes])
                    plan = plans.find(header, body.nbytes)
                    if plan is None:
                        request = decode_request(body, json_bytes, service.signature, self._regions)
                        plan = plans.keep(header, request, body.nbytes)
                    times.decode_ns = time.perf_counter_ns() - received_ns
                    if plan is not None:
                        exchange.queue(plan, body)
                        return exchange
        except ContractError as error:
            exchange.refuse(error)
            return exchange
        if head.encoding is None:
            exchange.run(self._answer(service, body, json_bytes, request, times))
        else:
            exchange.run(self._answer_compressed(service, head, body, times))
        return exchange

    async def _answer_compressed(
        self, service: InferenceService, head: Head, compressed: memoryview, times: RequestTimes
    ) -> Answer:
        """The connection holds the compressed bytes, this the others: one request at a time is inflated before that."""
        started_ns = time.perf_counter_ns()
        body = await self._in_thread(decompress, compressed, self._limits.body_bytes)
        with self.budget.holding(body.nbytes):
            json_bytes = _json_bytes(head, body.nbytes)
            self._check_json_bytes(json_bytes, body.nbytes)
            times.decode_ns = time.perf_counter_ns() - started_ns
            return await self._answer(service, body, json_bytes, None, times)

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
                request = await self._in_thread(decode_request, body, json_bytes, service.signature, self._regions)
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
        limit = self._limits.json_bytes
        if (body_bytes if json_bytes is None else json_bytes) > limit:
            raise TooLargeError(f"the request's JSON has more than {limit} bytes: send the tensors as binary data")

    async def _in_thread(self, work: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work, *arguments)


def _json_bytes(head: Head, body_bytes: int) -> int | None:
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
