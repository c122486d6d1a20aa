"""The server of a front end, in a process of its own or together with the engines.

It listens, or gets connections from the supervisor, answers, and finishes accepted work at the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn

from servers.models.specification import ModelSpecification
from servers.native.front.engine_link import DRAIN_POLL_S, BusyPolling, EngineClient, EnginePool
from servers.native.front.inference import InferenceService, ServedModels
from servers.native.front.region_table import RegionTable
from servers.native.http.app import create_app
from servers.native.http.connection import HttpFrontEnd
from servers.native.http.inference import InferenceFrontEnd
from servers.native.shared.interface import (
    ApplyStatus,
    EngineLink,
    FrontEndOpened,
    FrontEndOperation,
    OpenRegion,
    signature_of,
)
from servers.native.shared.ipc import CLOSED, ENGINE, GRPC, SWITCHED
from servers.native.shared.keys import Keys
from servers.native.shared.limits import start_task
from servers.native.shared.memory import RequestMemory
from servers.native.shared.recording import ShownConnections
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.shared.tls import Certificate, TlsConnections
from servers.native.shared.traces import flush_traces

if TYPE_CHECKING:
    from servers.native.grpc.connection import GrpcConnections

log = structlog.get_logger("abserve.server")


class FrontServer(uvicorn.Server, ABC):
    """uvicorn's server with our HTTP connections, and a gRPC front end on the same loop."""

    models: ServedModels[Any]
    _supervised: Supervised | None = None
    _keys: Keys | None = None
    _tls: TlsConnections | None = None
    _shown: ShownConnections | None = None

    def __init__(
        self,
        settings: NativeSettings,
        http: HttpFrontEnd[Any],
        on_listening: Callable[[], None],
        on_open: Callable[[], None],
        grpc_listener: socket.socket | None = None,
        supervisor: socket.socket | None = None,
    ) -> None:
        """Both callbacks are called in the event loop: when HTTP is answered, and when gRPC is as well.

        A server in a front end's process has the socket to its `supervisor`, which brings the connections of clients.
        Without `grpc_listener` gRPC is for such connections only; see `accept`.
        """
        self._grpc_listener = grpc_listener
        self._grpc_server: asyncio.Server | None = None
        self.grpc: GrpcConnections | None = None
        self._settings = settings
        self._on_listening = on_listening
        self._on_open = on_open
        self.stop_by = float("inf")
        """When accepted work must be finished, in `time.monotonic` seconds; known once the server shuts down."""
        timeout_s = settings.shutdown_timeout_s
        self._reserve_s = min(2.0, timeout_s / 4)  # of the shutdown time, for refusing unfinished work and for ending
        self._finish_s = timeout_s - self._reserve_s
        self.http = http
        if supervisor is not None:
            self._supervised = Supervised(supervisor, self)
            self.http.on_close = self._supervised.on_close
        super().__init__(
            uvicorn.Config(
                http.application,
                http=self._http,  # type: ignore[arg-type]  # called like a protocol class
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

    def admit(self, keys: Keys | None, certificate: Certificate | None, shown: socket.socket | None) -> None:
        """Answer only requests with one of these keys, over TLS with this certificate; both are read again at SIGHUP.
        Show all connections to the recorder at the other end of `shown`. Before `run`."""
        self._keys = self.http.heads.keys = keys
        if keys is not None:
            keys.counts.number = self.http.memory.number
        if certificate is not None:
            self._tls = TlsConnections(certificate)
            self._tls.on_close = self.http.on_close
        if shown is not None:
            self._shown = ShownConnections(shown, self.models.default.statistics)

    def stop(self) -> None:
        """Finish accepted work and end; any thread."""
        self.should_exit = True

    def _reload_access(self) -> None:
        if self._tls is not None:
            self._tls.certificate.reload()
        if self._keys is not None and self._keys.reload():
            self.http.heads.forget()
            if self.grpc is not None:
                self.grpc.forget_heads()

    def _http(self, *arguments: Any, **configuration: Any) -> asyncio.BaseProtocol:
        return self._connect(partial(self.http.connect, *arguments, **configuration), grpc=False)

    def _grpc(self) -> asyncio.BaseProtocol:
        assert self.grpc is not None
        return self._connect(self.grpc.connect, grpc=True)

    def _connect(self, connect: Callable[[], Any], *, grpc: bool) -> asyncio.BaseProtocol:
        """What receives the bytes of a new client: its connection, or TLS and what shows them, which stand before."""
        if self._shown is not None:
            connect = partial(self._shown.connect, connect, grpc=grpc)
        return connect() if self._tls is None else self._tls.connect(connect, grpc=grpc)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engines: then health checks can be answered. Listen, and open the gRPC front end."""
        await self.connect()
        if self._keys is not None or self._tls is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_access)
            self._reload_access()  # a signal may have come between the fork and now
        await super().startup(sockets)
        self._on_listening()
        if self._settings.grpc_port:
            # Its imports take a good part of a second: in a thread, so that the loop goes on answering HTTP.
            self.grpc = await asyncio.to_thread(self.make_grpc)
            self.grpc.on_close = self.http.on_close
            self.grpc.keys = self._keys
            if self._grpc_listener is not None:
                loop = asyncio.get_running_loop()
                self._grpc_server = await loop.create_server(self._grpc, sock=self._grpc_listener, backlog=2048)
        gc.freeze()  # modules live as long as the process; a full collection took 60 ms to find that out again
        self._on_open()
        if self._supervised is not None:
            self._supervised.open()

    async def connect(self) -> None:
        """Connect to the engines, if they are in other processes."""

    @abstractmethod
    def make_grpc(self) -> GrpcConnections:
        """The gRPC front end."""

    async def accept(self, connection: socket.socket, *, grpc: bool) -> None:
        """Serve a client that another process has accepted, once the front end is open."""
        loop = asyncio.get_running_loop()
        if grpc:
            await loop.connect_accepted_socket(self._grpc, connection)
        else:
            await loop.connect_accepted_socket(lambda: self._http(self.server_state), connection)

    def take_engine(self, engine: socket.socket) -> None:
        """A socket to an engine that has loaded another version, of those for all devices in their order."""
        engine.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only the first signal counts: at a second SIGINT uvicorn would drop accepted requests.

        The event loop logs the others: a handler that logs would wait for ever if it interrupts a line of the log.
        Ctrl-C and process managers signal the whole group; a front end's process leaves that to its supervisor.
        """
        if self._supervised is not None:
            return
        if self.should_exit:
            timeout_s = self._settings.shutdown_timeout_s
            message = "already shutting down: accepted work is finished first"
            asyncio.get_running_loop().call_soon_threadsafe(partial(log.warning, message, at_most_s=timeout_s))
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close to new work and finish accepted work."""
        if self._supervised is not None:
            self._supervised.close()
        timeout_s = self._settings.shutdown_timeout_s
        self.stop_by = time.monotonic() + timeout_s - self._reserve_s / 4
        _end_at_the_latest_in(timeout_s)
        giving_up = asyncio.get_running_loop().call_later(self._finish_s, self._give_up)
        if self._grpc_server is not None:
            self._grpc_server.close()
        if self._tls is not None:
            self._tls.stop()
        grpc = [] if self.grpc is None else [self.grpc.stop(self._finish_s)]
        await asyncio.gather(super().shutdown(sockets), *grpc)
        if self._shown is not None:
            await self._shown.finish()
        await asyncio.to_thread(flush_traces, self._settings)
        giving_up.cancel()
        self.models.stop()

    def _give_up(self) -> None:
        connections = list(self.server_state.connections)
        log.error("accepted work is not finished in time and is refused", connections=len(connections))
        for connection in connections:
            connection.give_up()  # type: ignore[union-attr]  # all are `FrontServerConnection`s


class NativeServer(FrontServer):
    """The server of models that take and answer tensors."""

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
        supervisor: socket.socket | None = None,
    ) -> None:
        self._memory = memory
        services = [
            InferenceService(number, specification, settings, link, memory, counters)
            for number, (specification, counters) in enumerate(zip(specifications, statistics, strict=True))
        ]
        self.models = ServedModels(services, link, settings.allow_model_control)
        self.regions = RegionTable(settings, memory, link)
        application = create_app(self.models, self.regions)
        http = InferenceFrontEnd(application, self.models, self.regions, settings, memory)
        super().__init__(settings, http, on_listening, on_open, grpc_listener, supervisor)

    async def execute(self, operation: FrontEndOperation, models: ServedModels[InferenceService] | None = None) -> None:
        """Execute an operation of the engine's side, which has these models. Raises `ContractError`."""
        if isinstance(operation, ApplyStatus):
            await (models or self.models).apply(operation.models)
        elif isinstance(operation, OpenRegion):
            self.regions.open(operation)
        else:
            self.regions.close(operation.names)

    def make_grpc(self) -> GrpcConnections:
        from servers.native.grpc.inference import GrpcFrontEnd

        return GrpcFrontEnd(self.models, self.regions, self._settings, self._memory)


def _end_at_the_latest_in(seconds: float) -> None:
    """End the process even if a thread or a driver hangs."""

    def end() -> None:
        log.error("ended by force: the server could not stop in time", seconds=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


DESCRIPTORS_AT_ONCE = 64


class Supervised:
    """What a server in a front end's process does besides serving: it gets its connections from the supervisor, and
    ends when that says so, or has gone. Belongs to the event loop."""

    def __init__(self, supervisor: socket.socket, server: FrontServer) -> None:
        self._supervisor = supervisor
        self._server = server
        self._opening: set[asyncio.Task[Any]] = set()
        self._unreported = b""  # what the supervisor does not know yet: `CLOSED` and `SWITCHED`

    def open(self) -> None:
        """Accept connections from now on."""
        self._supervisor.setblocking(False)
        asyncio.get_running_loop().add_reader(self._supervisor, self._receive)

    def close(self) -> None:
        """Accept no more."""
        asyncio.get_running_loop().remove_reader(self._supervisor)

    def on_close(self) -> None:
        """A connection has closed: the supervisor knows who has the fewest."""
        self.report(CLOSED)

    def report(self, what: bytes = b"") -> None:
        """Tell the supervisor, as soon as it takes that."""
        loop = asyncio.get_running_loop()
        self._unreported += what
        try:
            self._unreported = self._unreported[self._supervisor.send(self._unreported) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            self._unreported = b""
        if self._unreported:
            loop.add_writer(self._supervisor, self.report)
        else:
            loop.remove_writer(self._supervisor)

    def _receive(self) -> None:
        """Connections from the supervisor, or its end; some of them before others have their turn."""
        with suppress(BlockingIOError):
            for _ in range(DESCRIPTORS_AT_ONCE):
                try:
                    data, descriptors, *_ = socket.recv_fds(self._supervisor, DESCRIPTORS_AT_ONCE, DESCRIPTORS_AT_ONCE)
                except ConnectionResetError:  # it has ended without reading who has closed connections
                    data, descriptors = b"", []
                for kind, descriptor in zip(data, descriptors, strict=False):
                    if kind == ENGINE:
                        self._server.take_engine(socket.socket(fileno=descriptor))
                    else:
                        start_task(self._accept(socket.socket(fileno=descriptor), grpc=kind == GRPC), self._opening)
                for _ in data[len(descriptors) :]:  # no descriptor was left for these: they are closed
                    self.on_close()
                if not data:
                    self._server.stop()
                    self.close()
                    return

    async def _accept(self, connection: socket.socket, *, grpc: bool) -> None:
        connection.setblocking(False)
        try:
            await self._server.accept(connection, grpc=grpc)
        except OSError:  # the client has left already
            connection.close()
            self.on_close()


class FrontProcessServer(NativeServer):
    """The tensors' server in a front end's process."""

    def __init__(
        self,
        settings: NativeSettings,
        specifications: Sequence[ModelSpecification],
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> None:
        self._signatures = [signature_of(specification, settings) for specification in specifications]
        self._polling = BusyPolling(settings.busy_poll_us / 1e6) if settings.busy_poll_us else None
        self._engines = engines
        self._new_engines: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._link = self._link_to(settings, memory, lambda: served.fail())
        super().__init__(
            settings,
            specifications,
            statistics,
            self._link,
            memory,
            lambda: None,
            self._opened,
            supervisor=supervisor,
        )
        self._served = served = ServedModels(list(self.models))

    def _link_to(
        self, settings: NativeSettings, memory: RequestMemory, on_end: Callable[[], None]
    ) -> EngineClient | EnginePool:
        if len(settings.devices) == 1:
            return EngineClient(memory, self._signatures, on_end, polling=self._polling)
        return EnginePool(settings.devices, memory, self._signatures, on_end, self._polling)

    async def connect(self) -> None:
        await self._link.open(self._engines, partial(self.execute, models=self._served))

    def _opened(self) -> None:
        start_task(self._link.control(FrontEndOpened()), self._tasks)

    def take_engine(self, engine: socket.socket) -> None:
        """See `FrontServer`; with the last of them their version is served."""
        self._new_engines.append(engine)
        if len(self._new_engines) == len(self._settings.devices):
            engines, self._new_engines = self._new_engines, []
            start_task(self._switch(engines), self._tasks)

    async def _switch(self, engines: Sequence[socket.socket]) -> None:
        """Queue requests at these engines from now on, and tell the supervisor when those before have answered all.

        A request is queued for one of them, and its answer has the number of that version, since the service that
        queues it is the one that answers.
        """
        old_link, old_services = self._link, list(self._served)
        served: ServedModels[InferenceService]
        link = self._link_to(self._settings, self._memory, lambda: served.fail())
        served = ServedModels([service.on(link) for service in old_services])
        self._link, self._served = link, served
        await link.open(engines, partial(self.execute, models=served))
        while not served.ready:
            await asyncio.sleep(DRAIN_POLL_S)
        for old, new in zip(old_services, served, strict=True):
            old.direct, old.successor = False, new
        self.models.replace(list(served))
        await old_link.drain()
        assert self._supervised is not None
        self._supervised.report(SWITCHED)
