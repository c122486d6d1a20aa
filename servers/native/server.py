"""From settings to a running server: listen, load, serve, and finish accepted work at the end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import structlog
import uvicorn

from servers.engines.interface import Engine
from servers.engines.settings import KINDS
from servers.launch_plan import host_in_url
from servers.listener import ListenerError
from servers.models.registry import SOURCES
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsSource
from servers.native.app import create_app
from servers.native.http_connection import connection_factory
from servers.native.http_front_end import HttpFrontEnd
from servers.native.inference import InferenceService
from servers.native.limits import ByteBudget
from servers.native.regions import RegionTable
from servers.native.served_models import ServedModels
from servers.native.settings import NativeSettings, artefact_field

if TYPE_CHECKING:
    from servers.native.grpc_server import GrpcFrontEnd

log = structlog.get_logger("abserve.server")


class NativeServer(uvicorn.Server):
    """uvicorn's server. It loads the models as soon as it listens, and has the gRPC front end on its loop."""

    def __init__(self, settings: NativeSettings, models: ServedModels) -> None:
        self._settings = settings
        self._models = models
        self._budget = ByteBudget(settings.max_held_bytes)
        self._regions = RegionTable(settings, self._budget)
        self._grpc: GrpcFrontEnd | None = None
        self.failed = False
        self.stop_by = float("inf")
        """When accepted work must be finished, in `time.monotonic` seconds; known once the server shuts down."""
        timeout_s = settings.shutdown_timeout_s
        self._reserve_s = min(2.0, timeout_s / 4)  # of the shutdown time, for refusing unfinished work and for ending
        self._finish_s = timeout_s - self._reserve_s
        application = create_app(models, self._regions)
        front_end = HttpFrontEnd(application, models, self._regions, settings, self._budget)
        super().__init__(
            uvicorn.Config(
                application,
                http=connection_factory(front_end),  # type: ignore[arg-type]  # called like a protocol class
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
        """Listen, begin to load, and open the gRPC front end, whose imports take a good part of a second."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        names = ",".join(service.signature.name for service in self._models)
        log.info("listening", url=f"http://{host_in_url(host)}:{port}", model=names)
        front_ends_open = threading.Event()
        self._models.start(self._stop, front_ends_open)
        if self._settings.grpc_port:
            # Imported in a thread: the loop goes on answering HTTP, and a cold start does not wait for the import.
            module = await asyncio.to_thread(importlib.import_module, "servers.native.grpc_server")
            self._grpc = module.GrpcFrontEnd(self._models, self._regions, self._settings, self._budget)
            try:
                await self._grpc.start()
            except ListenerError as error:
                log.error("gRPC cannot be opened", reason=str(error))  # noqa: TRY400  the sentence says it all
                self.failed = self.should_exit = True
                return
        front_ends_open.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only the first signal counts: at a second SIGINT uvicorn would drop accepted requests."""
        if self.should_exit:
            timeout_s = self._settings.shutdown_timeout_s
            log.warning("already shutting down: accepted work is finished first", at_most_s=timeout_s)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close both front ends to new work and finish accepted work."""
        timeout_s = self._settings.shutdown_timeout_s
        self.stop_by = time.monotonic() + timeout_s - self._reserve_s / 4
        _end_at_the_latest_in(timeout_s)
        closing = [super().shutdown(sockets)]
        if self._grpc is not None:
            closing.append(self._grpc.stop(self._finish_s))
        giving_up = asyncio.get_running_loop().call_later(self._finish_s, self._give_up)
        await asyncio.gather(*closing)
        giving_up.cancel()

    def _give_up(self) -> None:
        connections = list(self.server_state.connections)
        log.error("accepted work is not finished in time and is refused", connections=len(connections))
        for connection in connections:
            connection.give_up()  # type: ignore[union-attr]  # all are `Connection`s

    def _stop(self) -> None:
        self.should_exit = True


def configure_logs(level: str) -> None:
    """Log to stderr for people: structlog, and the standard library's warnings, such as uvicorn's."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(stream=sys.stderr, level=max(number, logging.WARNING), format="%(levelname)s %(message)s")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f"),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def run(
    settings: NativeSettings,
    specifications: Sequence[ModelSpecification],
    weights: WeightsSource,
    listener: socket.socket,
) -> int:
    """Make the models from the settings and serve them; see `serve`."""
    services = [_service(settings, specification, weights) for specification in specifications]
    if settings.added_delay_ms:
        log.warning("every answer is delayed, as asked for a test", added_delay_ms=settings.added_delay_ms)
    return serve(settings, ServedModels(services, settings.allow_model_control), listener)


def imported_first(engine: str, specification: ModelSpecification) -> tuple[str, ...]:
    """Libraries of an engine and of a model's module, so that a cold start's log separates imports from weights."""
    source = specification.reference.partition(":")[0]
    return (*KINDS[engine].libraries, *([source] if engine == "torch" and source in SOURCES else []))


def _service(settings: NativeSettings, specification: ModelSpecification, weights: WeightsSource) -> InferenceService:
    executed = specification.executed
    engine = settings.engine_settings()

    def build() -> Engine:
        from servers.engines.factory import build_engine  # in the engine thread, after the port answers

        for library in imported_first(settings.engine, executed):
            with suppress(ImportError):  # loading the engine says what to install
                importlib.import_module(library)
        return build_engine(executed, weights, engine, getattr(settings, artefact_field(executed)))

    return InferenceService(specification, build, settings)


def serve(settings: NativeSettings, models: ServedModels, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT, and return the process's exit status. Blocks; for the main thread.

    The engine thread may still be loading when this returns: the caller must not wait for it.
    """
    server = NativeServer(settings, models)
    received: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        """Keep a signal that comes before uvicorn handles them: uvicorn then stops as soon as it has begun.

        After its shutdown uvicorn raises its signals again, and dying of one would skip the rest of this function.
        """
        received.append(signal_number)
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    server.run(sockets=[listener])
    failed = server.failed or models.failed
    finished = models.stop(max(0.0, min(settings.shutdown_timeout_s, server.stop_by - time.monotonic())))
    log.info("stopped", accepted_work_finished=finished)
    if failed:
        return 1
    return 130 if signal.SIGINT in received else 0


def _end_at_the_latest_in(seconds: float) -> None:
    """End the process even if a thread or a driver hangs."""

    def end() -> None:
        log.error("ended by force: the server could not stop in time", seconds=seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
