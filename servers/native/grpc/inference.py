"""The gRPC front end: all methods of `inference.GRPCInferenceService`, with the same objects behind them as HTTP.

Messages are tritonclient's own. ModelInfer and ModelStreamInfer parse their requests themselves (see `messages`).
As over HTTP, a message that came before with other values goes to the batcher without a task, and every other one is a
task, whose slow steps run in a thread. The other methods answer with the documents that HTTP sends, so that HTTP and
gRPC cannot contradict each other.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import isawaitable
from typing import Any, NoReturn, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from servers.native.front import documents
from servers.native.front.inference import InferenceService, ModelService, ServedModels, check_version
from servers.native.front.region_table import RegionTable
from servers.native.grpc.call import Call, GrpcMessage, MessageAnswer
from servers.native.grpc.connection import GrpcConnections
from servers.native.grpc.http2 import CallStatus, GrpcMethod, shortened, status_of
from servers.native.grpc.messages import (
    FINAL,
    MessageTemplate,
    RawInput,
    decode_message,
    encode_message,
    encode_streamed,
    is_short,
    parse_message,
)
from servers.native.shared.errors import HOLDS_ENOUGH, FailureLog, RefusedError, failure_reason
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.limits import CONTROL_BODY_BYTES, decompress, in_thread
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.protocol.codec import MAX_ID_CHARACTERS
from servers.protocol.errors import (
    ContractError,
    InvalidRequestError,
    TooLargeError,
    UnavailableError,
    UnsupportedError,
)
from servers.protocol.records import InferRequest, RegionWindow

log = FailureLog("abserve.grpc")

TIMER_SLACK_NS = 1_000_000
"""The event loop's timers round to whole milliseconds, so one may fire this much too early."""
_PREFIX = struct.Struct(">BI")


def with_prefix(message: Any) -> list[bytes]:
    """The pieces of a message that is not compressed."""
    content = message.SerializeToString()
    return [_PREFIX.pack(0, len(content)), content]


def shown_id(message: Any) -> bytes:
    """The id of a request as its errors repeat it: one that is too long is left out."""
    return message.id.encode() if len(message.id) <= MAX_ID_CHARACTERS else b""


def streamed_error(error: ContractError, request_id: bytes) -> Any:
    """The last message of a stream about one request, which failed; the stream goes on."""
    answer = service_pb2.ModelStreamInferResponse(error_message=shortened(str(error)))
    answer.infer_response.id = request_id.decode()
    answer.infer_response.parameters[FINAL].bool_param = True
    return answer


class PendingGrpcRequest:
    """A ModelInferRequest between its last byte and its answer; `wake` is the waiter of its `QueuedRequest`.

    Belongs to the event loop. It ends in one of `wake`, `stop` and its task; only the first of them is counted.
    """

    __slots__ = (
        *("_call", "_front_end", "_message", "_over", "_queued", "_request_id"),
        *("_service", "_targets", "_task", "_template", "_times"),
    )

    def __init__(self, front_end: GrpcFrontEnd, call: Call, message: GrpcMessage) -> None:
        self._front_end = front_end
        self._call = call
        self._message = message
        self._service = front_end.models.default  # counts a request for an unknown model
        headers, signature = call.head.trace_headers, self._service.signature
        self._times = front_end.times(signature, message.start_ns, headers, message.receive_ns)
        self._template: MessageTemplate | None = None
        self._request_id = b""
        self._targets: Mapping[str, RegionWindow] = {}
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
            self._task = asyncio.get_running_loop().create_task(self._answer_in_task())
            return
        template, self._request_id, offset = repeated
        self._template = template
        self._service = service = template.service
        try:
            service.check_loaded()
            self._admit()
            find = self._front_end.regions.find
            queued = template.queued(content, offset, find, self._call.deadline_ns, self.wake)
            self._targets = template.targets(queued, find)
            self._times.decode_ns = time.perf_counter_ns() - begun_ns
            queued.trace = self._times.trace_context
            service.enqueue(queued)
            self._queued = queued
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._fail(log.for_client(error, "a call failed unexpectedly"))

    def stop(self, reason: str) -> None:
        """Nobody waits for the answer any more, for this reason; "": because the client has left."""
        self._over = True
        if reason:
            self._service.statistics.record_failure(reason, self._times)
        else:
            self._service.statistics.record_disconnect(self._times)
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
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._fail(log.for_client(error, "a response could not be encoded"))
            return
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        self._succeed(pieces)

    async def _answer_in_task(self) -> None:
        try:
            pieces = await self._answer()
        except asyncio.CancelledError:
            self._message.release()
            if not self._over:
                raise  # the server is being stopped by force
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._fail(log.for_client(error, "a call failed unexpectedly"))
        else:
            self._succeed(pieces)

    async def _answer(self) -> list[bytes]:
        front_end, message, times = self._front_end, self._message, self._times
        start_ns = time.perf_counter_ns()
        if not message.compressed:
            return await self._infer(message.content, start_ns)
        content = await front_end.inflating.run(decompress, message.content, self._call.method.max_message_bytes)
        with front_end.budget.holding(content.nbytes):
            times.decode_ns = time.perf_counter_ns() - start_ns
            return await self._infer(content, start_ns)

    async def _infer(self, content: memoryview, start_ns: int) -> list[bytes]:
        front_end, times = self._front_end, self._times
        if is_short(content):
            request, raw, version = self._read(content)
        else:
            request, raw, version = await in_thread(front_end.reading, self._read, content)
        self._admit()
        service = self._service
        if service.direct and not self._message.compressed:
            front_end.templates.keep(content, raw, request, service)
        times.decode_ns = time.perf_counter_ns() - start_ns
        response = await service.infer(request, times, self._call.deadline_ns)
        check_version(response, version)
        inferred_ns = time.perf_counter_ns()
        answer = encode_message(response)
        pieces = with_prefix(encode_streamed(answer) if self._call.method.streams else answer)
        times.encode_ns += time.perf_counter_ns() - inferred_ns
        return pieces

    def _admit(self) -> None:
        """Raises `OverLimitError` for a message of a stream if its key has too many requests."""
        if self._call.head.limit is not None and self._call.method.streams and not self._over:
            self._call.admit()

    def _read(self, content: memoryview) -> tuple[InferRequest, list[RawInput], str | None]:
        """The request, its raw inputs and the version that it names; any thread. Raises `ContractError`."""
        front_end = self._front_end
        parsed = message, raw, _ = parse_message(content)
        self._request_id = shown_id(message)
        version = message.model_version or None
        self._service = service = front_end.models.find(message.model_name, version)
        service.check_accepting()
        regions = front_end.regions
        request = decode_message(parsed, regions.find, service.signature, regions.allocate)
        return request, raw, version

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
        reason = failure_reason(error)
        self._service.statistics.record_failure(reason, self._times)
        if late and isinstance(error, RefusedError) and error.reason == "expired":
            self._call.failed(CallStatus("DEADLINE_EXCEEDED", "the call's deadline passed while the request waited"))
        elif isinstance(error, TooLargeError) and self._message.compressed:  # as for one that comes uncompressed
            self._call.failed(CallStatus("RESOURCE_EXHAUSTED", str(error)))
        elif self._call.method.streams:
            self._call.answered(with_prefix(streamed_error(error, self._request_id)))
        else:
            self._call.failed(status_of(error))


SERVICE = "inference.GRPCInferenceService"
_SERVICE: Any = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
MESSAGE_SLACK_BYTES = 64 * 1024
"""Room for names and parameters beside the tensors, as HTTP's limit leaves room for its headers."""

S = TypeVar("S", bound=ModelService)
RequestDocument = Callable[[Any], documents.Document | Awaitable[documents.Document | None] | None]
"""Makes the document that answers a control request, which is a protobuf message."""


def max_message_bytes(settings: NativeSettings) -> int:
    """The largest message of an inference."""
    return min(settings.max_body_bytes + MESSAGE_SLACK_BYTES, 2**31 - 1)


class GrpcFrontEnd(GrpcConnections):
    """All methods of the service, for models that take and answer tensors. Belongs to one event loop."""

    def __init__(
        self,
        models: ServedModels[InferenceService],
        regions: RegionTable,
        settings: NativeSettings,
        memory: RequestMemory,
    ) -> None:
        super().__init__(settings, memory, service_methods(max_message_bytes(settings)), models.default.statistics)
        self.models = models
        self.regions = regions
        self._documents = {**model_documents(models), **_region_documents(regions)}

    def answering(self, call: Call, message: GrpcMessage) -> MessageAnswer:
        if call.method.infers:
            return PendingGrpcRequest(self, call, message)
        return ControlCall(self._documents[call.method.name], call, message)


class ControlCall:
    """A message of a method that does not infer, until its answer."""

    __slots__ = ("_call", "_document", "_message", "_task")

    def __init__(self, document: RequestDocument, call: Call, message: GrpcMessage) -> None:
        self._document = document
        self._call = call
        self._message = message
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Answer it when it is its connection's turn."""
        self._call.take_turns(self._answer_now)

    def _answer_now(self) -> None:
        if self._call.closed:
            return
        content: bytes | memoryview = bytes(self._message.content)
        self._message.release()
        try:
            if self._message.compressed:
                content = decompress(memoryview(content), CONTROL_BODY_BYTES)
            request_type = _described(self._call.method).input_type
            document = self._document(_parse(request_type, content))
            if isawaitable(document):
                # It goes on when the client leaves, since the work may be half done.
                self._task = asyncio.get_running_loop().create_task(self._answer_later(document))
            else:
                self._answer(document)
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._call.failed(status_of(log.for_client(error, "a call failed unexpectedly")))

    def stop(self, _reason: str) -> None:
        """Nobody waits for the answer any more."""
        self._message.release()

    async def _answer_later(self, document: Awaitable[documents.Document | None]) -> None:
        try:
            self._answer(await document)
        except Exception as error:  # noqa: BLE001  see `for_client`
            self._call.failed(status_of(log.for_client(error, "a call failed unexpectedly")))

    def _answer(self, document: documents.Document | None) -> None:
        reply = GetMessageClass(_described(self._call.method).output_type)()
        pieces = with_prefix(json_format.ParseDict(document or {}, reply, ignore_unknown_fields=True))
        if not self._call.has_room(pieces):
            raise UnavailableError(HOLDS_ENOUGH)
        self._call.answered(pieces)


def _parse(kind: Any, serialised: bytes | memoryview) -> Any:
    """A control message. Raises `InvalidRequestError`."""
    try:
        return GetMessageClass(kind).FromString(bytes(serialised))
    except DecodeError as exc:
        raise InvalidRequestError(f"the message is not a {kind.name}") from exc


def service_methods(max_message_bytes: int, *, decoupled: bool = False) -> dict[bytes, GrpcMethod]:
    """The methods by path, from the protocol's own description, so that none can be forgotten.

    The answers of `decoupled` models have any number of messages.
    """
    methods = {}
    for name, described in _SERVICE.methods_by_name.items():
        infers = name in ("ModelInfer", "ModelStreamInfer")
        limit = max_message_bytes if infers else CONTROL_BODY_BYTES
        streams = infers and described.client_streaming
        methods[f"/{SERVICE}/{name}".encode()] = GrpcMethod(name, infers, streams, limit, decoupled and streams)
    return methods


def _described(method: GrpcMethod) -> Any:
    """The protobuf description of a method."""
    return _SERVICE.methods_by_name[method.name]


def model_documents(models: ServedModels[S]) -> dict[str, RequestDocument]:
    """The answers about models, and refusals: the documents that HTTP sends, of which a reply takes its fields."""

    def find(request: Any) -> S:
        return models.find(request.name, request.version or None)

    def no_traces(_request: Any) -> NoReturn:
        raise UnsupportedError("this server does not trace requests; its statistics have a latency breakdown")

    def no_log_settings(_request: Any) -> NoReturn:
        raise UnsupportedError("log settings cannot be changed while the server runs; start it with --log-level")

    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": models.ready},
        "ModelReady": lambda request: {"ready": models.named(request.name, request.version or None).ready},
        "ModelMetadata": lambda request: documents.model_metadata(find(request)),
        "ModelConfig": lambda request: {"config": documents.model_config(find(request))},
        "ModelStatistics": lambda request: documents.statistics([find(request)] if request.name else models),
        "RepositoryIndex": lambda request: {"models": documents.repository_index(models, request.ready)},
        "RepositoryModelLoad": lambda request: models.load(request.model_name, request.parameters),
        "RepositoryModelUnload": lambda request: models.unload(request.model_name),
        "TraceSetting": no_traces,
        "LogSettings": no_log_settings,
    }


def _region_documents(regions: RegionTable) -> dict[str, RequestDocument]:
    """The answers about shared memory, and the server's metadata, which say where it is offered."""

    def by_name(rows: Iterable[documents.Document]) -> documents.Document:
        return {"regions": {row["name"]: row for row in rows}}

    return {
        "ServerMetadata": lambda _: documents.server_metadata(regions),
        "SystemSharedMemoryStatus": lambda request: by_name(regions.rows(request.name, on_device=False)),
        "SystemSharedMemoryRegister": lambda request: regions.register(
            request.name, request.key, request.offset, request.byte_size
        ),
        "SystemSharedMemoryUnregister": lambda request: regions.unregister(request.name, on_device=False),
        "CudaSharedMemoryStatus": lambda request: by_name(regions.rows(request.name, on_device=True)),
        "CudaSharedMemoryRegister": lambda request: regions.register_cuda(
            request.name, request.raw_handle, request.device_id, request.byte_size
        ),
        "CudaSharedMemoryUnregister": lambda request: regions.unregister(request.name, on_device=True),
    }
