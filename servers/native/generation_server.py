"""The server of a language model's front end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from servers.native.front.generation import GenerationService
from servers.native.front.inference import ServedModels
from servers.native.front_server import FrontServer
from servers.native.http.app import create_language_app
from servers.native.http.generation import GenerationFrontEnd
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics

if TYPE_CHECKING:
    from servers.native.grpc.connection import GrpcConnections


class GenerationServer(FrontServer):
    """The server of a language model on one event loop."""

    def __init__(
        self,
        name: str,
        label: str,
        settings: NativeSettings,
        statistics: Statistics,
        memory: RequestMemory,
        engine: socket.socket,
        on_listening: Callable[[], None] = lambda: None,
        grpc_listener: socket.socket | None = None,
        supervisor: socket.socket | None = None,
    ) -> None:
        """`engine` is the socket to the engine; `label` is for people."""
        service = GenerationService(name, label, settings, statistics, memory.number)
        self._link, self._engine = service.link, engine
        self._memory = memory
        self.models = ServedModels([service])
        http = GenerationFrontEnd(create_language_app(self.models), self.models, settings, memory)
        super().__init__(settings, http, on_listening, service.link.opened, grpc_listener, supervisor)

    async def connect(self) -> None:
        await self._link.open(self._engine)

    def make_grpc(self) -> GrpcConnections:
        from servers.native.grpc.generation import GenerationGrpcFrontEnd

        return GenerationGrpcFrontEnd(self.models, self._settings, self._memory)
