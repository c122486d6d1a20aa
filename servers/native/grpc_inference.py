"""One gRPC inference request, from its whole message to its answer; unary and of a stream.

There are two ways, as over HTTP. A message that came before with other values (see `grpc_templates`) goes to the
batcher without a task. Every other message is a task, whose slow steps run in a thread.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from servers.native.errors import HOLDS_ENOUGH, INTERNAL_ERROR, CallDeadlineError, RequestExpiredError, failure_reason
from servers.native.failure_log import FailureLog
from servers.native.grpc_calls import Call, Refusal, refusal_of, shortened
from servers.native.grpc_messages import (
    RawInput,
    decode_message,
    encode_message,
    encode_streamed,
    is_short,
    parse_message,
)
from servers.native.grpc_templates import MessageTemplate
from servers.native.http_front_end import MAX_INFLATING, decompress
from servers.native.inference import in_thread
from servers.native.message_memory import Message
from servers.native.queued_request import QueuedRequest
from servers.native.statistics import RequestTimes
from servers.protocol.errors import ContractError, InternalError, TooLargeError, UnavailableError
from servers.protocol.records import InferRequest, Window

log = FailureLog("abserve.grpc")

TIMER_SLACK_NS = 1_000_000
"""The event loop's timers round to whole milliseconds, so one may fire this much too early."""
_PREFIX = struct.Struct(">BI")


def with_prefix(message: Any) -> list[bytes]:
    """The pieces of a message that is not compressed."""
    content = message.SerializeToString()
    return [_PREFIX.pack(0, len(content)), content]


class PendingMessage:
    """A ModelInferRequest between its last byte and its answer; the `Waiter` of its `QueuedRequest`.

    Belongs to the event loop. It ends in one of `wake`, `stop` and its task; only the first of them is counted.
    """

    __slots__ = (
        *("_call", "_front_end", "_message", "_over", "_queued", "_request_id"),
        *("_service", "_targets", "_task", "_template", "_times"),
    )

    def __init__(self, front_end: Any, call: Call, message: Message) -> None:
        """`front_end` is a `GrpcFrontEnd`, whose module imports this one."""
        self._front_end = front_end
        self._call = call
        self._message = message
        self._service = front_end.models.default  # counts a request for an unknown model
        self._times = RequestTimes(message.start_ns, message.receive_ns)
        self._template: MessageTemplate | None = None
        self._request_id = b""
        self._targets: Mapping[str, Window] = {}
        self._queued: QueuedRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False

    def begin(self) -> None:
        """Queue the request, or answer it in a task."""
        message = self._message
        begun_ns = time.perf_counter_ns()
        content = message.content
        repeated = None if message.compressed else self._front_end.templates.find(content)
        if repeated is None or not repeated[0].service.direct:
            self._task = asyncio.get_running_loop().create_task(self._carry_out())
            return
        template, self._request_id, offset = repeated
        self._template = template
        self._service = service = template.service
        try:
            service.check_loaded()
            find = self._front_end.regions.find
            queued = template.queued(content, offset, find, self._call.deadline_ns, self)
            self._targets = template.targets(queued, find)
            self._times.decode_ns = time.perf_counter_ns() - begun_ns
            self._queued = queued
            service.enqueue(queued)
        except ContractError as error:
            self._queued = None
            self._fail(error)
        except Exception:
            log.exception("a call failed unexpectedly")
            if self._queued is not None:
                self._queued.waiter = None
                self._queued = None
            self._fail(InternalError(INTERNAL_ERROR))

    def stop(self, reason: str) -> None:
        """Nobody waits for the answer any more, for this reason; "": because the client has left."""
        self._over = True
        if reason:
            self._service.statistics.record_failure(reason, self._times.start_ns)
        else:
            self._service.statistics.record_disconnect()
        if self._task is not None:
            self._task.cancel()
        elif self._queued is not None and self._service.withdraw(self._queued):
            self._queued.waiter = None  # frees the message before the queue comes to this request
            self._queued = None
            self._message.release()

    def wake(self, queued: QueuedRequest) -> None:
        self._queued = None
        if self._over:
            self._message.release()
            return
        if queued.error is not None:
            self._fail(queued.error)
            return
        assert self._template is not None
        start_ns = time.perf_counter_ns()
        try:
            outputs, streamed = queued.outputs or {}, self._call.method.streams
            pieces = self._template.answer(outputs, self._targets, self._request_id, streamed=streamed)
        except ContractError as error:
            self._fail(error)
            return
        except Exception:
            log.exception("a response could not be encoded")
            self._fail(InternalError(INTERNAL_ERROR))
            return
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        self._succeed(pieces)

    async def _carry_out(self) -> None:
        try:
            pieces = await self._answer()
        except asyncio.CancelledError:
            self._message.release()
            if not self._over:
                raise  # the server is being stopped by force
        except ContractError as error:
            self._fail(error)
        except Exception:
            log.exception("a call failed unexpectedly")
            self._fail(InternalError(INTERNAL_ERROR))
        else:
            self._succeed(pieces)

    async def _answer(self) -> list[bytes]:
        front_end, message, times = self._front_end, self._message, self._times
        start_ns = time.perf_counter_ns()
        if not message.compressed:
            return await self._infer(message.content, start_ns)
        if front_end.compressed >= MAX_INFLATING:
            raise UnavailableError(f"the server inflates {MAX_INFLATING} messages now; send it later or uncompressed")
        front_end.compressed += 1
        try:
            content = await in_thread(
                front_end.inflating, decompress, message.content, self._call.method.max_message_bytes
            )
        finally:
            front_end.compressed -= 1
        with front_end.budget.holding(content.nbytes):
            times.decode_ns = time.perf_counter_ns() - start_ns
            return await self._infer(content, start_ns)

    async def _infer(self, content: memoryview, start_ns: int) -> list[bytes]:
        front_end, times = self._front_end, self._times
        if is_short(content):
            request, raw = self._read(content)
        else:
            request, raw = await in_thread(front_end.reading, self._read, content)
        service = self._service
        if service.direct and not self._message.compressed:
            front_end.templates.keep(content, raw, request, service)
        times.decode_ns = time.perf_counter_ns() - start_ns
        response = await service.infer(request, times, self._call.deadline_ns)
        inferred_ns = time.perf_counter_ns()
        answer = encode_message(response)
        pieces = with_prefix(encode_streamed(answer) if self._call.method.streams else answer)
        times.encode_ns += time.perf_counter_ns() - inferred_ns
        return pieces

    def _read(self, content: memoryview) -> tuple[InferRequest, list[RawInput]]:
        """The request and its raw inputs; any thread. Raises `ContractError`."""
        front_end = self._front_end
        parsed = parse_message(content)
        message = parsed.message
        self._service = service = front_end.models.find(message.model_name, message.model_version or None)
        service.check_accepting()
        request = decode_message(parsed, front_end.regions.find, service.signature, front_end.allocate)
        return request, parsed.raw

    def _succeed(self, pieces: list[bytes]) -> None:
        self._message.release()
        if not self._over and not self._call.has_room(pieces):
            self._fail(UnavailableError(HOLDS_ENOUGH))
        elif not self._over:
            self._over = True
            self._service.statistics.record_success(self._times)
            self._call.answered(pieces)

    def _fail(self, error: ContractError) -> None:
        self._message.release()
        if self._over:
            return
        self._over = True
        deadline_ns = self._call.deadline_ns
        late = deadline_ns is not None and time.perf_counter_ns() + TIMER_SLACK_NS >= deadline_ns
        if late and isinstance(error, RequestExpiredError):
            error = CallDeadlineError("the call's deadline passed while the request waited")
        self._service.statistics.record_failure(failure_reason(error), self._times.start_ns)
        if isinstance(error, TooLargeError) and self._message.compressed:  # as for one that comes uncompressed
            self._call.failed(Refusal("RESOURCE_EXHAUSTED", str(error)))
        elif self._call.method.streams and not isinstance(error, CallDeadlineError):
            answer = service_pb2.ModelStreamInferResponse(error_message=shortened(str(error)))
            self._call.answered(with_prefix(answer))
        else:
            self._call.failed(refusal_of(error))
