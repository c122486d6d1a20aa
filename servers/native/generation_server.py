"""The server of a language model, from settings to the end: front ends and a generating engine, each in its process.

With `fronts` 0 it is one process: the engine has a thread, and the event loop the main thread. Both have the same
socket between them as two processes have.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from servers.native.engine.generation_loop import BuildGeneratingEngine, GenerationLoop, run_generation
from servers.native.front.generation import GenerationService
from servers.native.front.inference import ServedModels
from servers.native.front_server import FrontServer
from servers.native.http.app import create_language_app
from servers.native.http.generation import GenerationFrontEnd
from servers.native.server import serve_by
from servers.native.shared.memory import Arena, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.supervisor import Children

if TYPE_CHECKING:
    from servers.native.grpc.connection import GrpcConnections


class GenerationServer(FrontServer):
    """The server of a language model on one event loop."""

    def __init__(
        self,
        service: GenerationService,
        memory: RequestMemory,
        engine: socket.socket,
        on_listening: Callable[[], None] = lambda: None,
        grpc_listener: socket.socket | None = None,
        supervisor: socket.socket | None = None,
    ) -> None:
        """`engine` is the socket to the engine."""
        self._link, self._engine = service.link, engine
        self._memory = memory
        self.models = ServedModels([service])
        http = GenerationFrontEnd(create_language_app(self.models), self.models, service.settings, memory)
        super().__init__(service.settings, http, on_listening, service.link.opened, grpc_listener, supervisor)

    async def connect(self) -> None:
        await self._link.open(self._engine)

    def make_grpc(self) -> GrpcConnections:
        from servers.native.grpc.generation import GenerationGrpcFrontEnd

        return GenerationGrpcFrontEnd(self.models, self._settings, self._memory)


def serve_language(
    settings: NativeSettings,
    name: str,
    label: str,
    build: BuildGeneratingEngine,
    listener: socket.socket,
    grpc_listener: socket.socket | None = None,
) -> int:
    """As `server.serve`, of a language model; its `label` is for people."""

    def run_engine(
        settings: NativeSettings, statistics: Sequence[Statistics], arena: Arena, supervisor: socket.socket, _: int
    ) -> int:
        return run_generation(build, settings, statistics[0], arena, supervisor)

    def front_end(
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> FrontServer:
        service = GenerationService(name, label, settings, statistics[0], memory.number)
        return GenerationServer(service, memory, engines[0], supervisor=supervisor)

    def alone(on_listening: Callable[[], None]) -> tuple[FrontServer, GenerationLoop]:
        statistics, memory = Statistics(settings.max_batch_size), RequestMemory.alone(settings)
        to_engine, to_front_end = socket.socketpair()
        loop = GenerationLoop(build, settings, statistics, memory.arena, lambda: server.stop())
        loop.add(to_front_end)
        service = GenerationService(name, label, settings, statistics, memory.number)
        server = GenerationServer(service, memory, to_engine, on_listening, grpc_listener)
        loop.start()
        return server, loop

    return serve_by(settings, Children([name], run_engine, front_end), listener, grpc_listener, alone)
