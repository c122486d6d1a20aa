"""The gRPC methods: `inference.GRPCInferenceService` over the same objects that stand behind HTTP.

Messages and stubs are tritonclient's own. ModelInfer and ModelStreamInfer get their requests as serialised bytes (see
`grpc_messages`), all other methods as messages. What describes the server and its models is made of the documents that
HTTP sends, so that HTTP and gRPC cannot tell different stories.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any, NoReturn

import structlog
from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from servers.contract.errors import ContractError, InternalError, UnsupportedError
from servers.contract.records import InferRequest, InferResponse
from servers.native import documents
from servers.native.errors import INTERNAL_ERROR, CallDeadlineError, RequestExpiredError, failure_reason
from servers.native.grpc_messages import (
    INLINE_BYTES,
    decode_message,
    details_of,
    encode_message,
    parse_message,
    status_of,
)
from servers.native.inference import InferenceService, in_thread
from servers.native.limits import ByteBudget
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.grpc")

TIMER_SLACK_NS = 1_000_000
"""The loop's timers round to whole milliseconds, so that one may fire this much before the moment it was set to."""

Called = Callable[[Any, Any], Awaitable[Any]]
Answer = documents.Document | None | Awaitable[documents.Document | None]


async def _server_metadata(_models: ServedModels, regions: RegionTable, _request: Any) -> documents.Document:
    return documents.server_metadata(system_memory=regions.allowed, cuda_memory=await regions.offers_cuda())


async def _register_cuda(_models: ServedModels, regions: RegionTable, asked: Any) -> None:
    await regions.check_cuda()
    await regions.register_cuda(asked.name, asked.raw_handle, asked.device_id, asked.byte_size)


def _statistics(models: ServedModels, _regions: RegionTable, asked: Any) -> documents.Document:
    return documents.statistics([_find(models, asked)] if asked.name else models)


def _find(models: ServedModels, asked: Any) -> InferenceService:
    return models.find(asked.name, asked.version or None)


def _by_name(rows: list[documents.Document]) -> documents.Document:
    return {"regions": {row["name"]: row for row in rows}}


def _not_offered(reason: str) -> NoReturn:
    raise UnsupportedError(reason)


NO_TRACES = "this server does not trace requests; its statistics and metrics have the stages' times"
NO_LOG_SETTINGS = "log settings cannot be changed while the server runs; start it with --log-level"

METHODS: Mapping[str, Callable[[ServedModels, RegionTable, Any], Answer]] = {
    "ServerLive": lambda _models, _regions, _asked: {"live": True},
    "ServerReady": lambda models, _regions, _asked: {"ready": models.ready},
    # NOT_FOUND only for a name that is not ours.
    "ModelReady": lambda models, _, asked: {"ready": models.named(asked.name, asked.version or None).ready},
    "ServerMetadata": _server_metadata,
    "ModelMetadata": lambda models, _, asked: documents.model_metadata(_find(models, asked)),
    "ModelConfig": lambda models, _, asked: {"config": documents.model_config(_find(models, asked))},
    "ModelStatistics": _statistics,
    "RepositoryIndex": lambda models, _, asked: {"models": documents.repository_index(models, asked.ready)},
    "RepositoryModelLoad": lambda models, _, asked: models.load(asked.model_name, asked.parameters),
    "RepositoryModelUnload": lambda models, _, asked: models.unload(asked.model_name),
    "SystemSharedMemoryStatus": lambda _, regions, asked: _by_name(documents.region_rows(regions.status(asked.name))),
    "SystemSharedMemoryRegister": lambda _, regions, asked: regions.register(
        asked.name, asked.key, asked.offset, asked.byte_size
    ),
    "SystemSharedMemoryUnregister": lambda _, regions, asked: regions.unregister(asked.name),
    "CudaSharedMemoryStatus": lambda _, regions, asked: _by_name(
        documents.cuda_region_rows(regions.cuda_status(asked.name))
    ),
    "CudaSharedMemoryRegister": _register_cuda,
    "CudaSharedMemoryUnregister": lambda _, regions, asked: regions.unregister_cuda(asked.name),
    "TraceSetting": lambda _models, _regions, _asked: _not_offered(NO_TRACES),
    "LogSettings": lambda _models, _regions, _asked: _not_offered(NO_LOG_SETTINGS),
}
"""All methods but inference: the answer is the document that HTTP sends, where Triton's message has room for it."""


class GrpcService:
    """All methods of the protocol, each called with its request and gRPC's context; some say they are not offered."""

    def __init__(self, models: ServedModels, regions: RegionTable, budget: ByteBudget) -> None:
        self._models = models
        self._budget = budget
        # One thread: reading values holds the interpreter, so that more of them would only take longer each.
        self._reading = ThreadPoolExecutor(1, "reading")
        self._regions = regions
        self.infer = _answering(self._infer)
        """ModelInfer."""

    def control(self, name: str, reply: Any) -> Called:
        """A method of `METHODS` that answers with messages of the class `reply`."""

        method = METHODS[name]

        async def call(request: Any, _context: Any) -> Any:
            answer = method(self._models, self._regions, request)
            document = await answer if isawaitable(answer) else answer
            return json_format.ParseDict(document or {}, reply(), ignore_unknown_fields=True)

        return _answering(call)

    async def stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """ModelStreamInfer: requests of one stream one after the other; an error ends its request, not the stream."""
        async for request in requests:
            try:
                response = await self._infer(request, context)
            except ContractError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=details_of(error))
                continue
            response.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=response)

    async def _infer(self, serialised: bytes, context: Any) -> Any:
        """The answer's message. Raises `ContractError`; every outcome is counted."""
        times = RequestTimes(time.perf_counter_ns(), receive_ns=None)
        service = self._models.default  # who counts a request that names no model of ours
        try:
            with self._budget.holding(len(serialised)):
                remaining_s = context.time_remaining()
                message, raw = parse_message(serialised)
                service = self._models.find(message.model_name, message.model_version or None)
                service.check_ready()
                request = await self._decode(message, raw, len(serialised))
                times.decode_ns = time.perf_counter_ns() - times.start_ns
                deadline_ns = None if remaining_s is None else times.start_ns + int(remaining_s * 1e9)
                response = await self._infer_until(deadline_ns, service, request, times)
                inferred_ns = time.perf_counter_ns()
                answer = encode_message(response)
                times.encode_ns += time.perf_counter_ns() - inferred_ns
        except asyncio.CancelledError:  # by the client, or because its deadline has passed
            service.statistics.record_disconnect()
            raise
        except ContractError as error:
            service.statistics.record_failure(failure_reason(error), times.start_ns)
            raise
        except Exception as exc:
            log.exception("a call failed unexpectedly")
            service.statistics.record_failure("internal", times.start_ns)
            raise InternalError(INTERNAL_ERROR) from exc
        service.statistics.record_success(times)
        return answer

    async def _decode(self, message: Any, raw: list[memoryview], serialised_bytes: int) -> InferRequest:
        """Values that are not raw inputs are objects first: many of them are read off the event loop."""
        if serialised_bytes - sum(map(len, raw)) <= INLINE_BYTES:
            return decode_message(message, raw, self._regions)
        return await in_thread(self._reading, decode_message, message, raw, self._regions)

    @staticmethod
    async def _infer_until(
        deadline_ns: int | None, service: InferenceService, request: InferRequest, times: RequestTimes
    ) -> InferResponse:
        """A request that waited until its caller's own deadline is told that, not that a timeout passed."""
        try:
            return await service.infer(request, times, deadline_ns)
        except RequestExpiredError as exc:
            if deadline_ns is None or time.perf_counter_ns() + TIMER_SLACK_NS < deadline_ns:
                raise
            raise CallDeadlineError("the call's deadline passed while the request waited") from exc


def _answering(method: Called) -> Called:
    """End a call that failed with the status of its error."""

    async def answer(request: Any, context: Any) -> Any:
        failure: ContractError
        try:
            return await method(request, context)
        except ContractError as error:
            failure = error
        except Exception:
            log.exception("a call failed unexpectedly")
            failure = InternalError(INTERNAL_ERROR)
        return await context.abort(status_of(failure), details_of(failure))

    return answer
