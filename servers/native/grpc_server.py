"""The gRPC front end's life: it listens with HTTP, on the same event loop, and finishes accepted work with it.

On the same loop by measurement: with a thread and a loop of its own, under two busy gRPC clients, HTTP's median latency
was 1.2 times and the CPU time of a gRPC request 1.2 times as high, and gRPC's throughput 0.8 times (medians of 7
interleaved rounds on two shared cores). Two loops in one interpreter only hand its lock back and forth.
"""

from __future__ import annotations

import resource
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from servers.launch_plan import host_in_url
from servers.native.grpc_arrivals import Arrivals
from servers.native.grpc_service import GrpcService
from servers.native.limits import CONTROL_BODY_BYTES, ByteBudget
from servers.native.listener import ListenerError
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics

SERVICE = "inference.GRPCInferenceService"
MESSAGE_SLACK_BYTES = 64 * 1024
"""Room for names and parameters beside the tensors, as HTTP's limit leaves room for its headers."""
MAX_METADATA_BYTES = 16 * 1024
MAX_CALLS = 512
"""On one connection: clients queue those beyond it."""


class GrpcFrontEnd:
    """One server of one service. `start` and `stop` belong to one event loop."""

    def __init__(self, service: GrpcService, settings: NativeSettings, statistics: Statistics) -> None:
        self._service = service
        self._idle_ms = int(settings.keep_alive_timeout_s * 1000)
        self._host = host_in_url(settings.host)
        self._port = settings.grpc_port
        self._max_message_bytes = min(settings.max_body_bytes + MESSAGE_SLACK_BYTES, 2**31 - 1)
        self._arrivals = Arrivals(settings, self._max_message_bytes, statistics.record_failure)
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises `ListenerError`."""
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),  # also after decompression
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_connection_idle_ms", self._idle_ms),
                ("grpc.max_allowed_incoming_connections", max_connections()),  # more are closed at once
                ("grpc.max_concurrent_streams", MAX_CALLS),
                ("grpc.http2.bdp_probe", 0),  # else the window of calls that wait grows
                ("grpc.so_reuseport", 0),  # two servers on one port would share its clients and nobody would notice
            )
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, _handlers(self._service, self._arrivals))
        server.add_generic_rpc_handlers((handlers,))
        try:
            server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as exc:
            raise ListenerError(
                f"cannot listen on {self._host} port {self._port} for gRPC; stop what listens there or choose another "
                f"with --grpc-port"
            ) from exc
        await server.start()
        self._server = server

    async def stop(self, seconds: float) -> None:
        """Take no more calls; those that are under way have so long before they are cancelled."""
        if self._server is not None:
            await self._server.stop(seconds)


def open_front_end(
    models: ServedModels, regions: RegionTable, settings: NativeSettings, budget: ByteBudget
) -> GrpcFrontEnd:
    """The front end of a server's settings, not listening yet; this module is imported for it by name, late."""
    # The default model counts a message that does not come, of whatever model it is.
    return GrpcFrontEnd(GrpcService(models, regions, budget), settings, models.default.statistics)


def max_connections() -> int:
    """The other half of the process's file descriptors is left to HTTP, and so to health checks."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _handlers(service: GrpcService, arrivals: Arrivals) -> dict[str, Any]:
    """Every method of the protocol's own description, so that none can be forgotten."""
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    return {method.name: _handler(method, service, arrivals) for method in methods}


def _handler(method: Any, service: GrpcService, arrivals: Arrivals) -> Any:
    """As a stream of requests each: only then the library leaves it to us when a message is received."""
    reply = GetMessageClass(method.output_type)
    if method.client_streaming:

        async def stream(_requests: Any, context: Any) -> Any:
            async for response in service.stream_infer(arrivals.stream(context), context):
                yield response

        return grpc.stream_stream_rpc_method_handler(stream, None, reply.SerializeToString)

    infers = method.name == "ModelInfer"
    answer = service.infer if infers else service.control(method.name, reply)
    called = answer if infers else _parsing(method.input_type, answer)

    async def call(_requests: Any, context: Any) -> Any:
        if not method.input_type.fields:  # health, say: answered even while no message can be received
            return await answer(None, context)
        return await called(await arrivals.receive(context, infers=infers), context)

    return grpc.stream_unary_rpc_method_handler(call, None, reply.SerializeToString)


def _parsing(kind: Any, answer: Any) -> Any:
    """`answer`, called with a message. gRPC itself answers bytes that are none with UNKNOWN and with our internals."""
    parse = GetMessageClass(kind).FromString

    async def parse_and_answer(serialised: bytes, context: Any) -> Any:
        refusal = f"a {kind.name} has at most {CONTROL_BODY_BYTES} bytes, got {len(serialised)}"
        if len(serialised) <= CONTROL_BODY_BYTES:  # parsing holds the event loop
            try:
                return await answer(parse(serialised), context)
            except DecodeError:
                refusal = f"the message is not a {kind.name}"
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)

    return parse_and_answer
