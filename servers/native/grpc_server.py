"""The gRPC door's life: it listens with the HTTP door, on the same event loop, and finishes accepted work with it.

On the same loop by measurement: with a thread and a loop of its own, under two busy gRPC clients, HTTP's median latency
was 1.2 times and the CPU time of a gRPC request 1.2 times as high, and gRPC's throughput 0.8 times (medians of 7
interleaved rounds on two shared cores). Two loops in one interpreter only hand its lock back and forth.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from servers.launch_plan import host_in_url
from servers.native.grpc_service import GrpcService
from servers.native.limits import ByteBudget
from servers.native.listener import ListenerError
from servers.native.model_control import ModelControl
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings

SERVICE = "inference.GRPCInferenceService"
SERIALISED = frozenset({"ModelInfer", "ModelStreamInfer"})
"""Methods that get their requests as bytes."""
MESSAGE_SLACK_BYTES = 64 * 1024
"""Room for names and parameters beside the tensors, as the HTTP door's limit leaves room for its headers."""
MAX_METADATA_BYTES = 16 * 1024


class GrpcDoor:
    """One server of one service. `start` and `stop` belong to one event loop."""

    def __init__(self, service: GrpcService, host: str, port: int, max_message_bytes: int) -> None:
        self._service = service
        self._host = host_in_url(host)
        self._port = port
        self._max_message_bytes = min(max_message_bytes + MESSAGE_SLACK_BYTES, 2**31 - 1)
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises `ListenerError`."""
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", self._max_message_bytes),  # also after decompression
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.so_reuseport", 0),  # two servers on one port would share its clients and nobody would notice
            )
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, _handlers(self._service))
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


def open_door(
    models: ServedModels, regions: RegionTable, control: ModelControl, settings: NativeSettings, budget: ByteBudget
) -> GrpcDoor:
    """The door of a server's settings, not listening yet; this module is imported for it by name, late."""
    service = GrpcService(models, regions, control, budget)
    return GrpcDoor(service, settings.host, settings.grpc_port, settings.max_body_bytes)


def _handlers(service: GrpcService) -> dict[str, Any]:
    """Every method of the protocol's own description, so that none can be forgotten."""
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    return {method.name: _handler(method, getattr(service, method.name)) for method in methods}


def _handler(method: Any, answer: Any) -> Any:
    make = grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
    deserialise = None if method.name in SERIALISED else GetMessageClass(method.input_type).FromString
    return make(answer, deserialise, GetMessageClass(method.output_type).SerializeToString)
