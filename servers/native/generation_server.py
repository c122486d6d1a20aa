"""The server of a language model, from settings to the end: front ends and a generating engine, each in its process.

With `fronts` 0 it is one process: the engine has a thread, and the event loop the main thread. Both have the same
socket between them as two processes have.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from servers.language.engine import make_engine
from servers.language.specification import LanguageModel
from servers.native.engine.generation_loop import BuildGeneratingEngine, GenerationLoop, GenerationProcess
from servers.native.front.generation import GenerationService
from servers.native.front.inference import ServedModels
from servers.native.front_server import FrontServer, run_front_end
from servers.native.http.app import create_language_app
from servers.native.http.generation import GenerationFrontEnd
from servers.native.server import serve_by
from servers.native.shared.keys import Keys
from servers.native.shared.memory import Arena, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.shared.tls import Certificate
from servers.native.supervisor import exit_status, keep_early_signals

if TYPE_CHECKING:
    from servers.native.grpc.connection import GrpcConnections

log = structlog.get_logger("abserve.server")


class GenerationServer(FrontServer):
    """The server of a language model on one event loop."""

    def __init__(
        self,
        settings: NativeSettings,
        model: ServedLanguageModel,
        statistics: Statistics,
        memory: RequestMemory,
        engine: socket.socket,
        on_listening: Callable[[], None] = lambda: None,
        grpc_listener: socket.socket | None = None,
        supervisor: socket.socket | None = None,
    ) -> None:
        """`engine` is the socket to the engine."""
        self._engine = engine
        self._memory = memory
        self.service = GenerationService(model.name, model.label, settings, statistics, memory.number)
        self.models = ServedModels([self.service])
        application = create_language_app(self.models)
        http = GenerationFrontEnd(application, self.models, settings, memory)
        super().__init__(settings, http, on_listening, self.service.link.opened, grpc_listener, supervisor)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engine first: then health checks can be answered."""
        await self.service.link.open(self._engine)
        await super().startup(sockets)

    async def make_grpc(self) -> GrpcConnections:
        # Imported in a thread: the loop goes on answering HTTP.
        module = await asyncio.to_thread(importlib.import_module, "servers.native.grpc.generation")
        front_end: GrpcConnections = module.GenerationGrpcFrontEnd(self.models, self._settings, self._memory)
        return front_end


class ServedLanguageModel:
    """What is served: the name, a label for people, and how its engine is built."""

    def __init__(self, name: str, label: str, build: BuildGeneratingEngine) -> None:
        self.name = name
        self.label = label
        self.build = build

    @classmethod
    def of(cls, model: LanguageModel, settings: NativeSettings) -> ServedLanguageModel:
        """A model with the engine that the settings choose."""
        return cls(model.name, model.label, lambda: make_engine(model, settings.language_engine()))

    # The `Children` of a supervisor

    files: Sequence[Path] = ()

    @property
    def models(self) -> int:
        return 1

    def run_engine(
        self,
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        arena: Arena,
        supervisor: socket.socket,
        reloads: int,  # noqa: ARG002  see `Children`: a language model is not loaded again
    ) -> int:
        return GenerationProcess(self.build, settings, statistics[0], arena, supervisor).run()

    def run_front_end(
        self,
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
        keys: Keys | None,
        certificate: Certificate | None,
        shown: socket.socket | None,
    ) -> int:
        server = GenerationServer(settings, self, statistics[0], memory, engines[0], supervisor=supervisor)
        return run_front_end(server, keys, certificate, shown)


def serve_language(
    settings: NativeSettings,
    model: ServedLanguageModel,
    listener: socket.socket,
    grpc_listener: socket.socket | None = None,
) -> int:
    """As `server.serve`, of a language model."""
    alone = partial(_serve_in_one_process, settings, model, listener, grpc_listener)
    return serve_by(settings, model, model.name, listener, grpc_listener, alone)


def _serve_in_one_process(
    settings: NativeSettings,
    model: ServedLanguageModel,
    listener: socket.socket,
    grpc_listener: socket.socket | None,
    on_listening: Callable[[], None],
    shown: socket.socket | None,
) -> int:
    statistics, memory = Statistics(settings.max_batch_size), RequestMemory.alone(settings)
    to_engine, to_front_end = socket.socketpair()

    def stop() -> None:
        server.should_exit = True

    loop = GenerationLoop(model.build, settings, statistics, memory.arena, stop)
    loop.add(to_front_end)
    server = GenerationServer(settings, model, statistics, memory, to_engine, on_listening, grpc_listener)
    server.protect(Keys.of(settings), Certificate.of(settings))
    server.record(shown)
    received = keep_early_signals(stop)
    loop.start()
    server.run(sockets=[listener])
    failed = loop.failed
    finished = loop.stop(min(time.monotonic() + settings.shutdown_timeout_s, server.stop_by))
    log.info("stopped", accepted_work_finished=finished)
    return 1 if failed else exit_status(received)
