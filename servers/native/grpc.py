"""One gRPC inference request, from its whole message to its answer; unary and of a stream.

There are two ways, as over HTTP. A message that came before with other values (see `grpc_templates`) goes to the
batcher without a task. Every other message is a task, whose slow steps run in a thread.

The gRPC front end: `inference.GRPCInferenceService` over the same objects as HTTP, on the same event loop.

Messages are tritonclient's own. ModelInfer and ModelStreamInfer parse their requests themselves (see `grpc_messages`).
The other methods answer with the documents that HTTP sends, so that HTTP and gRPC cannot contradict each other.
"""

from __future__ import annotations

import asyncio
import resource
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any, NoReturn

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from servers.native import documents
from servers.native.batcher import QueuedRequest
from servers.native.errors import (
    HOLDS_ENOUGH,
    INTERNAL_ERROR,
    CallDeadlineError,
    FailureLog,
    RequestExpiredError,
    failure_reason,
)
from servers.native.grpc_connection import (
    Call,
    CallHead,
    CallStatus,
    GrpcServerConnection,
    Method,
    read_call_head,
    refusal_of,
    shortened,
)
from servers.native.grpc_messages import (
    MessageTemplate,
    MessageTemplates,
    RawInput,
    decode_message,
    encode_message,
    encode_streamed,
    is_short,
    parse_message,
)
from servers.native.http import MAX_INFLATING, decompress
from servers.native.http2 import HEAD_BYTES
from servers.native.inference import InferenceService, ServedModels, in_thread
from servers.native.limits import CONTROL_BODY_BYTES, Turns
from servers.native.memory import ALIGNMENT, GrpcMessage, RequestMemory
from servers.native.settings import NativeSettings
from servers.native.shared_memory import DeviceRegion, RegionTable, SystemRegion
from servers.native.statistics import RequestTimes
from servers.protocol.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.protocol.records import InferRequest, Window
from servers.protocol.tensors import Array

log = FailureLog("abserve.grpc")

TIMER_SLACK_NS = 1_000_000
"""The event loop's timers round to whole milliseconds, so one may fire this much too early."""
_PREFIX = struct.Struct(">BI")


def with_prefix(message: Any) -> list[bytes]:
    """The pieces of a message that is not compressed."""
    content = message.SerializeToString()
    return [_PREFIX.pack(0, len(content)), content]


class PendingGrpcRequest:
    """A ModelInferRequest between its last byte and its answer; the `Waiter` of its `QueuedRequest`.

    Belongs to the event loop. It ends in one of `wake`, `stop` and its task; only the first of them is counted.
    """

    __slots__ = (
        *("_call", "_front_end", "_message", "_over", "_queued", "_request_id"),
        *("_service", "_targets", "_task", "_template", "_times"),
    )

    def __init__(self, front_end: Any, call: Call, message: GrpcMessage) -> None:
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
            self._call.failed(CallStatus("RESOURCE_EXHAUSTED", str(error)))
        elif self._call.method.streams and not isinstance(error, CallDeadlineError):
            answer = service_pb2.ModelStreamInferResponse(error_message=shortened(str(error)))
            self._call.answered(with_prefix(answer))
        else:
            self._call.failed(refusal_of(error))


SERVICE = "inference.GRPCInferenceService"
MESSAGE_SLACK_BYTES = 64 * 1024
"""Room for names and parameters beside the tensors, as HTTP's limit leaves room for its headers."""
READ_BYTES = 64 * 1024
"""Room for one read of everything but the messages' own bytes. Of a large message, this much is copied."""
SCARCE_SHARE = 4
"""Room is scarce when less than 1/SCARCE_SHARE of the bytes that may be held are left."""
TURNS_NS = 2_000_000
"""What all connections together may take of one turn of the event loop, beside one read each."""
TICK_S = 0.25
"""How often the deadlines of connections and calls are checked: one timer for all, so that a call sets none."""

Answer = Callable[[Any], documents.Document | Awaitable[documents.Document | None] | None]


class GrpcFrontEnd:
    """All methods of the service, and what the connections share. Belongs to one event loop."""

    def __init__(
        self, models: ServedModels, regions: RegionTable, settings: NativeSettings, memory: RequestMemory
    ) -> None:
        self.models = models
        self.regions = regions
        self.settings = settings
        self.budget = memory.budget
        self.on_close: Callable[[], None] = lambda: None
        """Called for each connection that has been closed."""
        self.templates = MessageTemplates()
        self.memory = memory
        self.scratch = bytearray(READ_BYTES)
        self.room = memoryview(self.scratch)
        self.turns = Turns(TURNS_NS)
        """Of connections that have more to be read or answered than others should wait for."""
        self.compressed = 0
        # One thread each: reading values holds the interpreter, so that more threads would only take longer each.
        self.reading = ThreadPoolExecutor(1, "reading")
        self.inflating = ThreadPoolExecutor(1, "inflating")
        most = min(settings.max_body_bytes + MESSAGE_SLACK_BYTES, 2**31 - 1)
        self._methods = _described_methods(_answers(models, regions), most)
        self._max_connections = max_connections()
        self._connections: set[GrpcServerConnection] = set()
        self._stopping = False
        self._all_closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = 0.0

    def connect(self) -> GrpcServerConnection:
        """A protocol for a new client, as `loop.create_server` and `loop.connect_accepted_socket` take it."""
        return GrpcServerConnection(self)

    @property
    def open_connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def stop(self, seconds: float) -> None:
        """Take no more calls; those under way have `seconds` before they are refused. Returns when all are closed."""
        self._stopping = True
        for connection in list(self._connections):
            connection.shut_down()
        try:
            async with asyncio.timeout(seconds):
                await self._wait_closed()
        except TimeoutError:
            for connection in list(self._connections):
                connection.give_up()

    async def _wait_closed(self) -> None:
        while self._connections:
            self._all_closed.clear()
            await self._all_closed.wait()

    # Called by connections and calls

    def add(self, connection: GrpcServerConnection) -> bool:
        """A client has connected; False if there are too many, or the server stops."""
        if self._stopping or len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        if self._timer is None:
            self._ticked = time.monotonic()
            self._tick()
        return True

    def discard(self, connection: GrpcServerConnection) -> None:
        """A client has left."""
        self._connections.discard(connection)
        self.on_close()
        if not self._connections:
            self._all_closed.set()

    def read_head(self, fields: list[tuple[bytes, bytes]]) -> CallHead:
        """What the headers of a call say."""
        return read_call_head(fields, self._methods)

    def take(self, call: Call, size: int, *, compressed: bool) -> GrpcMessage | None:
        """Memory for a call's message; None if none is free, even after messages that are arriving have been ended."""
        if size > self.budget.left + self._arriving_bytes(size):
            return None
        offset = 0 if compressed else self.templates.tensor_offset(size)
        try:
            return GrpcMessage(
                self.memory, call, size, compressed=compressed, aligned_at=offset % ALIGNMENT, spare=HEAD_BYTES
            )
        except MemoryError:
            return None

    def _arriving_bytes(self, size: int) -> int:
        if size <= self.budget.left:  # nearly always
            return 0
        return sum(connection.arriving_bytes for connection in self._connections)

    def allocate(self, size: int) -> Array:
        """Memory for an input's decoded values, which count as held; any thread. Raises `ContractError`."""
        most = self.settings.max_body_bytes
        if size > most:
            raise TooLargeError(f"an input's values have {size} bytes when they are decoded, the server takes {most}")
        return self.memory.allocate(size)

    def answering(self, call: Call, message: GrpcMessage) -> Any:
        """What answers a message, with methods `begin` and `stop`."""
        return PendingGrpcRequest(self, call, message) if call.method.infers else ControlCall(call, message)

    def count_failure(self, error: ContractError, start_ns: int) -> None:
        """Count an inference without a message: for the default model, since its own is unknown."""
        self.models.default.statistics.record_failure(failure_reason(error), start_ns)

    def count_disconnect(self) -> None:
        """Count a client that left before its message was complete."""
        self.models.default.statistics.record_disconnect()

    def _tick(self) -> None:
        now = time.monotonic()
        seconds, self._ticked = now - self._ticked, now
        pressed = any(connection.waits_for_room for connection in self._connections)
        scarce = pressed or self.budget.left < self.budget.limit // SCARCE_SHARE
        for connection in list(self._connections):
            try:
                connection.expire(now, seconds, pressed=pressed, scarce=scarce)
            except Exception:  # the others have their limits, and the timer goes on
                log.exception("the time limits of a connection could not be applied")
        # Without connections nothing ticks; the next one starts the timer again.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._connections else None


class ControlCall:
    """A message of a method that does not infer, until its answer."""

    __slots__ = ("_call", "_message", "_task")

    def __init__(self, call: Call, message: GrpcMessage) -> None:
        self._call = call
        self._message = message
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Answer it when it is its connection's turn."""
        self._call.take_turns(self._carry_out)

    def _carry_out(self) -> None:
        if self._call.closed:
            return
        content: bytes | memoryview = bytes(self._message.content)
        self._message.release()
        try:
            if self._message.compressed:
                content = decompress(memoryview(content), CONTROL_BODY_BYTES)
            described, answer = self._call.method.answer
            document = answer(_parse(described.input_type, content))
            if isawaitable(document):
                # It goes on when the client leaves, since the work may be half done.
                self._task = asyncio.get_running_loop().create_task(self._finish(described, document))
            else:
                self._answer(described, document)
        except ContractError as error:
            self._call.failed(refusal_of(error))
        except Exception:
            log.exception("a call failed unexpectedly")
            self._call.failed(refusal_of(InternalError(INTERNAL_ERROR)))

    def stop(self, _reason: str) -> None:
        """Nobody waits for the answer any more."""
        self._message.release()

    async def _finish(self, described: Any, document: Awaitable[documents.Document | None]) -> None:
        try:
            self._answer(described, await document)
        except ContractError as error:
            self._call.failed(refusal_of(error))
        except Exception:
            log.exception("a call failed unexpectedly")
            self._call.failed(refusal_of(InternalError(INTERNAL_ERROR)))

    def _answer(self, described: Any, document: documents.Document | None) -> None:
        reply = GetMessageClass(described.output_type)()
        pieces = with_prefix(json_format.ParseDict(document or {}, reply, ignore_unknown_fields=True))
        if not self._call.has_room(pieces):
            raise UnavailableError(HOLDS_ENOUGH)
        self._call.answered(pieces)


def max_connections() -> int:
    """Half of the process's file descriptors: the other half is left to HTTP, and so to health checks."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _parse(kind: Any, serialised: bytes | memoryview) -> Any:
    """A control message. Raises `InvalidRequestError`."""
    try:
        return GetMessageClass(kind).FromString(bytes(serialised))
    except DecodeError as exc:
        raise InvalidRequestError(f"the message is not a {kind.name}") from exc


def _described_methods(answers: dict[str, Answer], max_message_bytes: int) -> dict[bytes, Method]:
    """The methods by path, from the protocol's own description, so that none can be forgotten."""
    methods = {}
    for described in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        name = described.name
        if name in ("ModelInfer", "ModelStreamInfer"):
            method = Method(name, described.client_streaming, max_message_bytes)
        else:
            method = Method(name, False, CONTROL_BODY_BYTES, (described, answers[name]))
        methods[f"/{SERVICE}/{name}".encode()] = method
    return methods


def _answers(models: ServedModels, regions: RegionTable) -> dict[str, Answer]:
    """The answers of all methods except inference: the documents that HTTP sends, of which a reply takes its fields."""

    def find(asked: Any) -> InferenceService:
        return models.find(asked.name, asked.version or None)

    def by_name(rows: Iterable[documents.Document]) -> documents.Document:
        return {"regions": {row["name"]: row for row in rows}}

    def no_traces(_asked: Any) -> NoReturn:
        raise UnsupportedError("this server does not trace requests; its statistics have a latency breakdown")

    def no_log_settings(_asked: Any) -> NoReturn:
        raise UnsupportedError("log settings cannot be changed while the server runs; start it with --log-level")

    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": models.ready},
        "ModelReady": lambda asked: {"ready": models.named(asked.name, asked.version or None).ready},
        "ServerMetadata": lambda _: documents.server_metadata(regions),
        "ModelMetadata": lambda asked: documents.model_metadata(find(asked)),
        "ModelConfig": lambda asked: {"config": documents.model_config(find(asked))},
        "ModelStatistics": lambda asked: documents.statistics([find(asked)] if asked.name else models),
        "RepositoryIndex": lambda asked: {"models": documents.repository_index(models, asked.ready)},
        "RepositoryModelLoad": lambda asked: models.load(asked.model_name, asked.parameters),
        "RepositoryModelUnload": lambda asked: models.unload(asked.model_name),
        "SystemSharedMemoryStatus": lambda asked: by_name(regions.rows(SystemRegion, asked.name)),
        "SystemSharedMemoryRegister": lambda asked: regions.register(
            asked.name, asked.key, asked.offset, asked.byte_size
        ),
        "SystemSharedMemoryUnregister": lambda asked: regions.unregister(SystemRegion, asked.name),
        "CudaSharedMemoryStatus": lambda asked: by_name(regions.rows(DeviceRegion, asked.name)),
        "CudaSharedMemoryRegister": lambda asked: regions.register_cuda(
            asked.name, asked.raw_handle, asked.device_id, asked.byte_size
        ),
        "CudaSharedMemoryUnregister": lambda asked: regions.unregister(DeviceRegion, asked.name),
        "TraceSetting": no_traces,
        "LogSettings": no_log_settings,
    }
