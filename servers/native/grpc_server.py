"""The gRPC front end: `inference.GRPCInferenceService` over the same objects as HTTP, on the same event loop.

Messages are tritonclient's own. ModelInfer and ModelStreamInfer parse their requests themselves (see `grpc_messages`).
The other methods answer with the documents that HTTP sends, so that HTTP and gRPC cannot contradict each other.

One event loop by measurement: with a separate thread and loop for gRPC and two busy gRPC clients, HTTP's median latency
was 1.2× as high, the CPU time per gRPC request 1.2×, and gRPC's throughput 0.8× (medians of 7 interleaved rounds on two
shared cores). Two loops in one interpreter only pass its lock back and forth.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from servers.contract.errors import (
    ContractError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
    UnsupportedError,
)
from servers.launch_plan import host_in_url
from servers.listener import ListenerError
from servers.native import documents
from servers.native.cuda_regions import CudaRegion
from servers.native.errors import (
    HOLDS_ENOUGH,
    INTERNAL_ERROR,
    CallDeadlineError,
    RequestExpiredError,
    SlowClientError,
    failure_reason,
    grpc_status,
)
from servers.native.grpc_messages import INLINE_BYTES, decode_message, encode_message, parse_message
from servers.native.inference import InferenceService, in_thread
from servers.native.limits import CONTROL_BODY_BYTES, ByteBudget
from servers.native.regions import RegionTable, SystemRegion
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.grpc")

SERVICE = "inference.GRPCInferenceService"
MESSAGE_SLACK_BYTES = 64 * 1024
"""Room for names and parameters beside the tensors, as HTTP's limit leaves room for its headers."""
MAX_METADATA_BYTES = 16 * 1024
MAX_CALLS = 512
"""Calls per connection; clients queue those beyond it."""
PRESSED_S = 5.0
"""How long a message may take while others wait for its place, if the read timeout allows it."""
MAX_DETAILS = 1000
"""Characters of an error message: a client takes 8 KiB of trailers, where a character may need twelve bytes."""
TICK_S = 0.25
"""How often the deadlines of arriving messages are checked."""
TIMER_SLACK_NS = 1_000_000
"""The event loop's timers round to whole milliseconds, so one may fire this much too early."""

Method = Callable[[Any], documents.Document | Awaitable[documents.Document | None] | None]


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message that is arriving; it ends at `deadline`, and at `pressed` if others wait for its place."""

    task: asyncio.Task[Any]
    deadline: float
    pressed: float
    late: bool = False


class Arrivals:
    """Bounds the incomplete messages, which gRPC's library keeps without reporting them.

    The library reads one small window of a call, and the rest of its message once that is asked for. So only so many
    calls ask at a time that the largest messages fit into half of `max_held_bytes`, and so many streams are open that
    theirs fit into the other half. Other calls wait; while they do, a message that takes longer than `PRESSED_S` ends.
    """

    def __init__(
        self, settings: NativeSettings, max_message_bytes: int, count_failure: Callable[[str, int], None]
    ) -> None:
        """`count_failure` is called for each inference without a message, with the reason and its start."""
        places = max(1, settings.max_held_bytes // (2 * max_message_bytes))
        self._places = asyncio.Semaphore(places)
        self._streams_left = places
        self._most_waiting = settings.queue_size
        self._longest_s = settings.read_timeout_s + max_message_bytes / settings.min_body_bytes_per_s
        self._pressed_s = min(PRESSED_S, settings.read_timeout_s)
        self._idle_s = settings.keep_alive_timeout_s
        self._count_failure = count_failure
        self._waiting = 0
        self._arriving: set[_Arrival] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, context: Any, *, infers: bool) -> Any:
        """The message of a call that has one. Raises `ContractError`, also when the message does not come in time."""
        start_ns = time.perf_counter_ns()
        try:
            if self._places.locked():
                await self._wait()
            else:
                await self._places.acquire()
            try:
                message = await self._read(
                    context, self._pressed_s if self._waiting else self._longest_s, self._pressed_s
                )
            finally:
                self._places.release()
            if message is grpc.aio.EOF:
                raise InvalidRequestError("the call has no message")
        except ContractError as error:
            if infers:
                self._count_failure(failure_reason(error), start_ns)
            raise
        return message

    async def stream(self, context: Any) -> AsyncIterator[bytes]:
        """The messages of a call that has any number. Raises `ContractError`, also when the client is idle too long."""
        if not self._streams_left:
            raise UnavailableError("the server has its maximum of streams open, close one or try again later")
        self._streams_left -= 1
        try:
            while (message := await self._read(context, self._idle_s, self._idle_s)) is not grpc.aio.EOF:
                yield message
        finally:
            self._streams_left += 1

    async def _wait(self) -> None:
        if self._waiting >= self._most_waiting:
            raise UnavailableError(HOLDS_ENOUGH)
        for arrival in self._arriving:
            arrival.deadline = min(arrival.deadline, arrival.pressed)
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1

    async def _read(self, context: Any, seconds: float, pressed_s: float) -> Any:
        """The next message, within `seconds`, or `pressed_s` if others wait. Raises `SlowClientError`."""
        task = asyncio.current_task()
        assert task is not None
        now = time.monotonic()
        arrival = _Arrival(task, now + seconds, now + pressed_s)
        self._arriving.add(arrival)
        if self._timer is None:
            self._tick()
        try:
            return await context.read()
        except asyncio.CancelledError:
            if not arrival.late:
                raise
            task.uncancel()
            raise SlowClientError("the message did not arrive in time") from None
        finally:
            self._arriving.discard(arrival)

    def _tick(self) -> None:
        """One timer for all messages: a timer for each one cost a tenth of a small request's CPU time."""
        now = time.monotonic()
        for arrival in self._arriving:
            if arrival.deadline < now and not arrival.late:
                arrival.late = True
                arrival.task.cancel()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._arriving else None


class GrpcFrontEnd:
    """All methods of the service; the constructor, `start` and `stop` belong to one event loop."""

    def __init__(
        self, models: ServedModels, regions: RegionTable, settings: NativeSettings, budget: ByteBudget
    ) -> None:
        self._models = models
        self._regions = regions
        self._settings = settings
        self._budget = budget
        # One thread: reading values holds the interpreter, so that more threads would only take longer each.
        self._reading = ThreadPoolExecutor(1, "reading")
        self._max_message_bytes = min(settings.max_body_bytes + MESSAGE_SLACK_BYTES, 2**31 - 1)
        # The default model counts a message that does not come, since its model is unknown.
        self._arrivals = Arrivals(settings, self._max_message_bytes, models.default.statistics.record_failure)
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises `ListenerError`."""
        host, port = self._settings.host, self._settings.grpc_port
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),  # also after decompression
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_connection_idle_ms", int(self._settings.keep_alive_timeout_s * 1000)),
                ("grpc.max_allowed_incoming_connections", max_connections()),  # more are closed at once
                ("grpc.max_concurrent_streams", MAX_CALLS),
                ("grpc.http2.bdp_probe", 0),  # else the window of calls that wait grows
                ("grpc.so_reuseport", 0),  # else two servers on one port share its clients unnoticed
            )
        )
        methods = _methods(self._models, self._regions)
        # From the protocol's own description, so that none can be forgotten.
        described = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
        handlers = {one.name: self._handler(one, methods) for one in described}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            server.add_insecure_port(f"{host_in_url(host)}:{port}")
        except RuntimeError as exc:
            raise ListenerError(f"port {port} on {host} cannot be used; choose another with --grpc-port") from exc
        await server.start()
        self._server = server

    async def stop(self, seconds: float) -> None:
        """Take no more calls; those under way have `seconds` before they are cancelled."""
        if self._server is not None:
            await self._server.stop(seconds)

    def _handler(self, described: Any, methods: dict[str, Method]) -> Any:
        """A handler of streams for every method: only then does the library let the server decide when it receives."""
        reply = GetMessageClass(described.output_type)
        if described.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._stream_infer, None, reply.SerializeToString)
        infers = described.name == "ModelInfer"
        method = None if infers else methods[described.name]
        has_message = bool(described.input_type.fields)  # without one, such as health, it is answered without waiting

        async def call(_requests: Any, context: Any) -> Any:
            try:
                message = await self._arrivals.receive(context, infers=infers) if has_message else b""
                if method is None:
                    return await self._infer(message, context)
                answer = method(_parse(described.input_type, message))
                document = await answer if isawaitable(answer) else answer
                return json_format.ParseDict(document or {}, reply(), ignore_unknown_fields=True)
            except ContractError as error:  # which must not outlive this clause: it leads to this frame and its message
                status, details = status_of(error), details_of(error)
            except Exception:
                log.exception("a call failed unexpectedly")
                status, details = grpc.StatusCode.INTERNAL, INTERNAL_ERROR
            return await context.abort(status, details)

        return grpc.stream_unary_rpc_method_handler(call, None, reply.SerializeToString)

    async def _stream_infer(self, _requests: Any, context: Any) -> AsyncIterator[Any]:
        """ModelStreamInfer: one request after the other; an error ends its request, not the stream."""
        try:
            async for request in self._arrivals.stream(context):
                try:
                    response = await self._infer(request, context)
                except ContractError as error:
                    yield service_pb2.ModelStreamInferResponse(error_message=details_of(error))
                    continue
                response.parameters["triton_final_response"].bool_param = True
                yield service_pb2.ModelStreamInferResponse(infer_response=response)
        except ContractError as error:
            await context.abort(status_of(error), details_of(error))

    async def _infer(self, serialised: bytes, context: Any) -> Any:
        """The response's message. Raises `ContractError`; every outcome is counted."""
        times = RequestTimes(time.perf_counter_ns(), receive_ns=None)
        service = self._models.default  # counts a request for an unknown model
        remaining_s = context.time_remaining()
        deadline_ns = None if remaining_s is None else times.start_ns + int(remaining_s * 1e9)
        try:
            with self._budget.holding(len(serialised)):
                message, raw = parse_message(serialised)
                service = self._models.find(message.model_name, message.model_version or None)
                service.check_ready()
                if len(serialised) - sum(map(len, raw)) <= INLINE_BYTES:
                    request = decode_message(message, raw, self._regions.find)
                else:  # many values become Python objects
                    request = await in_thread(self._reading, decode_message, message, raw, self._regions.find)
                times.decode_ns = time.perf_counter_ns() - times.start_ns
                response = await service.infer(request, times, deadline_ns)
                inferred_ns = time.perf_counter_ns()
                answer = encode_message(response)
                times.encode_ns += time.perf_counter_ns() - inferred_ns
        except asyncio.CancelledError:  # by the client, or because its deadline has passed
            service.statistics.record_disconnect()
            raise
        except ContractError as error:
            service.statistics.record_failure(failure_reason(error), times.start_ns)
            late = deadline_ns is not None and time.perf_counter_ns() + TIMER_SLACK_NS >= deadline_ns
            if late and isinstance(error, RequestExpiredError):
                raise CallDeadlineError("the call's deadline passed while the request waited") from error
            raise
        except Exception as exc:
            log.exception("a call failed unexpectedly")
            service.statistics.record_failure("internal", times.start_ns)
            raise InternalError(INTERNAL_ERROR) from exc
        service.statistics.record_success(times)
        return answer


def max_connections() -> int:
    """Half of the process's file descriptors: the other half is left to HTTP, and so to health checks."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def details_of(error: ContractError) -> str:
    """The message that a client gets, never too long to arrive."""
    message = str(error)
    return message if len(message) <= MAX_DETAILS else message[: MAX_DETAILS - 1] + "…"


def status_of(error: ContractError) -> grpc.StatusCode:
    """The status that a client gets."""
    return grpc.StatusCode[grpc_status(error)]


def _parse(kind: Any, serialised: bytes) -> Any:
    """A control message. The library would answer unreadable bytes with UNKNOWN and internals of this server."""
    if len(serialised) > CONTROL_BODY_BYTES:  # parsing holds the event loop
        raise InvalidRequestError(f"a {kind.name} has at most {CONTROL_BODY_BYTES} bytes, got {len(serialised)}")
    try:
        return GetMessageClass(kind).FromString(serialised)
    except DecodeError as exc:
        raise InvalidRequestError(f"the message is not a {kind.name}") from exc


def _methods(models: ServedModels, regions: RegionTable) -> dict[str, Method]:
    """All methods except inference. Each returns the document that HTTP sends; the reply takes the fields it knows."""

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
        "CudaSharedMemoryStatus": lambda asked: by_name(regions.rows(CudaRegion, asked.name)),
        "CudaSharedMemoryRegister": lambda asked: regions.register_cuda(
            asked.name, asked.raw_handle, asked.device_id, asked.byte_size
        ),
        "CudaSharedMemoryUnregister": lambda asked: regions.unregister(CudaRegion, asked.name),
        "TraceSetting": no_traces,
        "LogSettings": no_log_settings,
    }
