"""A front end's server: it listens or gets connections, answers, and finishes accepted work at the end."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn

from servers.models.specification import ModelSpecification
from servers.native.app import create_app
from servers.native.arena import RequestMemory
from servers.native.http_connection import connection_factory
from servers.native.http_front_end import HttpFrontEnd
from servers.native.inference import EngineLink, InferenceService
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics

if TYPE_CHECKING:
    from servers.native.grpc_front_end import GrpcFrontEnd

log = structlog.get_logger("abserve.server")


class NativeServer(uvicorn.Server):
    """uvicorn's server, with the models, and with the gRPC front end on its loop."""

    def __init__(
        self,
        settings: NativeSettings,
        specifications: Sequence[ModelSpecification],
        statistics: Sequence[Statistics],
        link: EngineLink,
        memory: RequestMemory,
        on_listening: Callable[[], None],
        on_open: Callable[[], None],
        grpc_listener: socket.socket | None = None,
    ) -> None:
        """Both callbacks are called in the event loop: when HTTP is answered, and when gRPC is as well.

        Without `grpc_listener` gRPC is for accepted connections only; see `accept`.
        """
        self._grpc_listener = grpc_listener
        self._grpc_server: asyncio.Server | None = None
        self._settings = settings
        self._memory = memory
        self._on_listening = on_listening
        self._on_open = on_open
        services = [
            InferenceService(number, specification, settings, link, memory, own)
            for number, (specification, own) in enumerate(zip(specifications, statistics, strict=True))
        ]
        self.models = ServedModels(services, link, settings.allow_model_control)
        self.regions = RegionTable(settings, memory, link)
        self.told: Mapping[str, Callable[..., Any]] = {
            "states": self.models.apply,
            "open": self.regions.open,
            "forget": self.regions.forget,
        }
        """What the engine's side may tell this front end: coroutine functions."""
        self.grpc: GrpcFrontEnd | None = None
        self.stop_by = float("inf")
        """When accepted work must be finished, in `time.monotonic` seconds; known once the server shuts down."""
        timeout_s = settings.shutdown_timeout_s
        self._reserve_s = min(2.0, timeout_s / 4)  # of the shutdown time, for refusing unfinished work and for ending
        self._finish_s = timeout_s - self._reserve_s
        application = create_app(self.models, self.regions)
        self.http = HttpFrontEnd(application, self.models, self.regions, settings, memory)
        self.http.on_close = self.on_close
        self._connect = connection_factory(self.http)
        super().__init__(
            uvicorn.Config(
                application,
                http=self._connect,  # type: ignore[arg-type]  # called like a protocol class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Later than `_give_up`, which leaves uvicorn nothing to wait for; it accepts a float as well.
                timeout_graceful_shutdown=timeout_s - self._reserve_s / 2,  # type: ignore[arg-type]
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and open the gRPC front end, whose imports take a good part of a second."""
        await super().startup(sockets)
        self._on_listening()
        if self._settings.grpc_port:
            # Imported in a thread: the loop goes on answering HTTP, and a cold start does not wait for the import.
            module = await asyncio.to_thread(importlib.import_module, "servers.native.grpc_front_end")
            self.grpc = grpc = module.GrpcFrontEnd(self.models, self.regions, self._settings, self._memory)
            grpc.on_close = self.on_close
        if self.grpc is not None and self._grpc_listener is not None:
            loop = asyncio.get_running_loop()
            self._grpc_server = await loop.create_server(self.grpc.connect, sock=self._grpc_listener, backlog=2048)
        gc.freeze()  # modules live as long as the process; a full collection took 60 ms to find that out again
        self._on_open()

    def on_close(self) -> None:
        """A connection has been closed."""

    async def accept(self, connection: socket.socket, *, grpc: bool) -> None:
        """Serve a client that another process has accepted, once the front end is open."""
        loop = asyncio.get_running_loop()
        if grpc:
            assert self.grpc is not None
            await loop.connect_accepted_socket(self.grpc.connect, connection)
        else:
            await loop.connect_accepted_socket(lambda: self._connect(self.server_state), connection)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only the first signal counts: at a second SIGINT uvicorn would drop accepted requests.

        The event loop logs the others: a handler that logs would wait for ever if it interrupts a line of the log.
        """
        if self.should_exit:
            timeout_s = self._settings.shutdown_timeout_s
            message = "already shutting down: accepted work is finished first"
            asyncio.get_running_loop().call_soon_threadsafe(partial(log.warning, message, at_most_s=timeout_s))
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close both front ends to new work and finish accepted work."""
        timeout_s = self._settings.shutdown_timeout_s
        self.stop_by = time.monotonic() + timeout_s - self._reserve_s / 4
        _end_at_the_latest_in(timeout_s)
        closing = [super().shutdown(sockets)]
        if self._grpc_server is not None:
            self._grpc_server.close()
        if self.grpc is not None:
            closing.append(self.grpc.stop(self._finish_s))
        giving_up = asyncio.get_running_loop().call_later(self._finish_s, self._give_up)
        await asyncio.gather(*closing)
        giving_up.cancel()

    def _give_up(self) -> None:
        connections = list(self.server_state.connections)
        log.error("accepted work is not finished in time and is refused", connections=len(connections))
        for connection in connections:
            connection.give_up()  # type: ignore[union-attr]  # all are `Connection`s


def _end_at_the_latest_in(seconds: float) -> None:
    """End the process even if a thread or a driver hangs."""

    def end() -> None:
        log.error("ended by force: the server could not stop in time", seconds=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
