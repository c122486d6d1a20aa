"""The gRPC door's methods: `inference.GRPCInferenceService` over the same objects that stand behind the HTTP door.

Messages and stubs are tritonclient's own. ModelInfer and ModelStreamInfer get their requests as serialised bytes (see
`grpc_messages`), all other methods as messages. What describes the server and its models is made of the documents that
HTTP sends, so that the two doors cannot tell different stories.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as package_version
from typing import Any

import structlog
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from servers.contract.errors import ContractError, InternalError, UnsupportedError
from servers.contract.records import InferRequest, InferResponse
from servers.native import documents
from servers.native.errors import CallDeadlineError, RequestExpiredError, failure_reason
from servers.native.grpc_messages import INLINE_BYTES, decode_message, encode_message, parse_message
from servers.native.grpc_status import details_of, status_of
from servers.native.inference import InferenceService
from servers.native.limits import ByteBudget
from servers.native.model_control import ModelControl
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.grpc")

TIMER_SLACK_NS = 1_000_000
"""The loop's timers round to whole milliseconds, so that one may fire this much before the moment it was set to."""

Method = Callable[[Any, Any, Any], Awaitable[Any]]


def _answering(method: Method) -> Method:
    """End a call that failed with the status of its error."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except ContractError as error:
            await context.abort(status_of(error), details_of(error))

    return answer


class GrpcService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # the stubs have no types
    """All methods of the protocol; those that this server does not offer say so."""

    def __init__(self, models: ServedModels, regions: RegionTable, control: ModelControl, budget: ByteBudget) -> None:
        self._models = models
        self._budget = budget
        # One thread: reading values holds the interpreter, so that more of them would only take longer each.
        self._reading = ThreadPoolExecutor(1, "reading")
        self._regions = regions
        self._control = control

    async def ServerLive(self, _request: Any, _context: Any) -> Any:  # noqa: N802  the protocol's name
        """Always, while this answers."""
        return service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Whether every model is ready."""
        return service_pb2.ServerReadyResponse(ready=self._models.ready)

    @_answering
    async def ModelReady(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Whether one is; NOT_FOUND only for a name that is not ours."""
        service = self._models.named(request.name, request.version or None)
        return service_pb2.ModelReadyResponse(ready=service.ready)

    async def ServerMetadata(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """As GET /v2."""
        cuda = await self._regions.offers_cuda()
        document = documents.server_metadata(
            package_version("abserve"), system_memory=self._regions.allowed, cuda_memory=cuda
        )
        return json_format.ParseDict(document, service_pb2.ServerMetadataResponse())

    @_answering
    async def ModelMetadata(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """As GET /v2/models/M."""
        service = self._models.find(request.name, request.version or None)
        kind = service.description.kind if service.description is not None else ""
        document = documents.model_metadata(service.signature, kind)
        return json_format.ParseDict(document, service_pb2.ModelMetadataResponse())

    @_answering
    async def ModelConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """As GET /v2/models/M/config."""
        document = documents.model_config(self._models.find(request.name, request.version or None))
        return json_format.ParseDict({"config": document}, service_pb2.ModelConfigResponse())

    @_answering
    async def ModelStatistics(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """As GET /v2/models/stats, without our own stages, which Triton's message has no room for."""
        services = [self._models.find(request.name, request.version or None)] if request.name else self._models
        document = documents.statistics(services)
        return json_format.ParseDict(document, service_pb2.ModelStatisticsResponse(), ignore_unknown_fields=True)

    @_answering
    async def ModelInfer(self, request: bytes, context: Any) -> Any:  # noqa: N802
        """One request."""
        return await self._infer(request, context)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Requests of one stream one after the other; an error ends its request, not the stream."""
        async for request in requests:
            try:
                response = await self._infer(request, context)
            except ContractError as error:
                yield service_pb2.ModelStreamInferResponse(error_message=details_of(error))
                continue
            response.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=response)

    @_answering
    async def RepositoryIndex(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """As POST /v2/repository/index."""
        rows = documents.repository_index(self._models, request.ready)
        return json_format.ParseDict({"models": rows}, service_pb2.RepositoryIndexResponse())

    @_answering
    async def RepositoryModelLoad(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Answered when the model is ready."""
        await self._control.load(request.model_name, request.parameters)
        return service_pb2.RepositoryModelLoadResponse()

    @_answering
    async def RepositoryModelUnload(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Answered when its accepted requests are finished."""
        await self._control.unload(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    @_answering
    async def SystemSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """One region, or all."""
        rows = {row["name"]: row for row in documents.region_rows(self._regions.status(request.name))}
        return json_format.ParseDict({"regions": rows}, service_pb2.SystemSharedMemoryStatusResponse())

    @_answering
    async def SystemSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Map a client's memory."""
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @_answering
    async def SystemSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Forget one region, or all."""
        self._regions.unregister(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @_answering
    async def CudaSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """One region, or all."""
        rows = {row["name"]: row for row in documents.cuda_region_rows(self._regions.cuda_status(request.name))}
        return json_format.ParseDict({"regions": rows}, service_pb2.CudaSharedMemoryStatusResponse())

    @_answering
    async def CudaSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Map a client's device memory."""
        await self._regions.check_cuda()
        await self._regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return service_pb2.CudaSharedMemoryRegisterResponse()

    @_answering
    async def CudaSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        """Forget one region, or all; answered when nothing uses them any more."""
        await self._regions.unregister_cuda(request.name)
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    @_answering
    async def TraceSetting(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Not offered."""
        raise UnsupportedError("this server does not trace requests; its statistics and metrics have the stages' times")

    @_answering
    async def LogSettings(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        """Not offered."""
        raise UnsupportedError("log settings cannot be changed while the server runs; start it with --log-level")

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
            raise InternalError("internal error, the server's log has it") from exc
        service.statistics.record_success(times)
        return answer

    async def _decode(self, message: Any, raw: list[memoryview], serialised_bytes: int) -> InferRequest:
        """Values that are not raw inputs are objects first: many of them are read off the event loop."""
        if serialised_bytes - sum(map(len, raw)) <= INLINE_BYTES:
            return decode_message(message, raw, self._regions)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reading, decode_message, message, raw, self._regions)

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
