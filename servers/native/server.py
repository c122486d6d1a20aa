"""From settings to a running server, in one process or in several."""

from __future__ import annotations

import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from servers.engines.interface import Engine
from servers.engines.processors import begin_gpu
from servers.engines.settings import EngineError, EngineSettings, engine_kind
from servers.models.registry import SOURCES, UnknownModelError, forget_models, get_variants
from servers.models.specification import ModelSpecification
from servers.models.weights import WeightsError, WeightsSource
from servers.native.shared.errors import NOT_RELOADED
from servers.native.shared.keys import Keys
from servers.native.shared.memory import Arena, RequestMemory
from servers.native.shared.recording import recording
from servers.native.shared.settings import NativeSettings, artefact_field, watched_files
from servers.native.shared.statistics import Statistics
from servers.native.shared.tls import Certificate
from servers.native.supervisor import Children, Supervisor, exit_status, keep_early_signals
from servers.options.defaults import OptionError
from servers.options.launch import host_in_url
from servers.options.libraries import import_library
from servers.options.stages import stage

if TYPE_CHECKING:
    from servers.native.engine.generation_loop import BuildGeneratingEngine, GenerationLoop
    from servers.native.engine.model_host import Offer
    from servers.native.engine.process import EngineSide
    from servers.native.front_server import FrontServer

log = structlog.get_logger("abserve.server")


def run(
    settings: NativeSettings,
    specifications: Sequence[ModelSpecification],
    weights: WeightsSource,
    listener: socket.socket,
    grpc_listener: socket.socket | None,
) -> int:
    """Make the models from the settings and serve them; see `serve`."""
    if settings.added_delay_ms:
        log.warning("every answer is delayed, as asked for a test", added_delay_ms=settings.added_delay_ms)
    return serve(
        settings,
        [_offer(settings, specification, weights) for specification in specifications],
        listener,
        grpc_listener,
        watched_files(settings, specifications, weights),
        partial(_offers_again, settings, specifications),
    )


def serve(
    settings: NativeSettings,
    offers: Sequence[Offer],
    listener: socket.socket,
    grpc_listener: socket.socket | None = None,
    files: Sequence[Path] = (),
    offers_again: Callable[[int], Sequence[Offer]] = lambda _: (),
) -> int:
    """Serve until SIGTERM or SIGINT, and return the process's exit status; without `grpc_listener`, only over HTTP. The
    models are made of `files`; `offers_again` makes them anew, for the reload of this number."""
    specifications = [specification for specification, _ in offers]

    # These import when they are called: a server of several processes forks before.
    def run_engine(
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        arena: Arena,
        supervisor: socket.socket,
        reloads: int,
    ) -> int:
        from servers.native.engine.process import EngineServer

        try:
            now = offers_again(reloads) if reloads else offers
        except (UnknownModelError, WeightsError, EngineError, OptionError) as error:
            log.error(NOT_RELOADED, reason=str(error))  # noqa: TRY400  the sentence says it all
            return 1
        return EngineServer(settings, now, statistics, arena, supervisor, reloaded=reloads > 0).run()

    def front_end(
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> FrontServer:
        from servers.native.front_server import FrontProcessServer

        return FrontProcessServer(settings, specifications, statistics, memory, supervisor, engines)

    def alone(on_listening: Callable[[], None]) -> tuple[FrontServer, EngineSide]:
        from servers.native.engine.process import EngineSide
        from servers.native.front_server import NativeServer
        from servers.native.local_link import LocalLink

        statistics = [Statistics(settings.max_batch_size) for _ in offers]
        memory = RequestMemory.alone(settings)
        side = EngineSide(settings, offers, statistics, memory.arena)
        link = LocalLink(side)
        front_ends_open = threading.Event()

        def begin() -> None:
            on_listening()
            link.open(server.execute)
            side.start(server.stop, front_ends_open)

        on_open = front_ends_open.set
        server = NativeServer(settings, specifications, statistics, link, memory, begin, on_open, grpc_listener)
        return server, side

    names = [specification.name for specification in specifications]
    return serve_by(settings, Children(names, run_engine, front_end, files), listener, grpc_listener, alone)


def serve_language(
    settings: NativeSettings,
    name: str,
    label: str,
    build: BuildGeneratingEngine,
    listener: socket.socket,
    grpc_listener: socket.socket | None = None,
) -> int:
    """As `serve`, of a language model; its `label` is for people. With `fronts` 0 the engine has a thread, the event
    loop the main thread, and between them is the same socket as between two processes."""

    # These import when they are called, as those of `serve`.
    def run_engine(
        settings: NativeSettings, statistics: Sequence[Statistics], arena: Arena, supervisor: socket.socket, _: int
    ) -> int:
        from servers.native.engine.generation_loop import run_generation

        return run_generation(build, settings, statistics[0], arena, supervisor)

    def front_end(
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> FrontServer:
        from servers.native.generation_server import GenerationServer

        return GenerationServer(name, label, settings, statistics[0], memory, engines[0], supervisor=supervisor)

    def alone(on_listening: Callable[[], None]) -> tuple[FrontServer, GenerationLoop]:
        from servers.native.engine.generation_loop import GenerationLoop
        from servers.native.generation_server import GenerationServer

        statistics, memory = Statistics(settings.max_batch_size), RequestMemory.alone(settings)
        to_engine, to_front_end = socket.socketpair()
        loop = GenerationLoop(build, settings, statistics, memory.arena, lambda: server.stop())
        loop.add(to_front_end)
        server = GenerationServer(name, label, settings, statistics, memory, to_engine, on_listening, grpc_listener)
        loop.start()
        return server, loop

    return serve_by(settings, Children([name], run_engine, front_end), listener, grpc_listener, alone)


def serve_by(
    settings: NativeSettings,
    children: Children,
    listener: socket.socket,
    grpc_listener: socket.socket | None,
    alone: Callable[[Callable[[], None]], tuple[FrontServer, EngineSide | GenerationLoop]],
) -> int:
    """Serve in the processes of `children`, or in this one with the server and the engine that `alone` makes, which
    gets what to call once the server listens. Raises the process's soft limit of file descriptors to the hard one.
    Blocks; for the main thread. An engine's thread may still be loading when this returns: the caller must not wait for
    it."""
    # Each client takes a descriptor, and the usual soft limit of 1,024 is for programs that call select().
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def on_listening() -> None:
        host, port = listener.getsockname()[:2]
        secure = "s" if settings.tls_certificate else ""
        url = f"http{secure}://{host_in_url(host)}:{port}"
        log.info("listening", url=url, model=",".join(children.models))

    with recording(settings) as shown:
        if settings.fronts:
            return Supervisor(settings, children, listener, grpc_listener, on_listening, shown).run()
        server, engine = alone(on_listening)
        server.admit(Keys.of(settings), Certificate.of(settings), shown)
        received = keep_early_signals(server.stop)
        server.run(sockets=[listener])
        failed = engine.failed
        finished = engine.stop(max(0.0, min(settings.shutdown_timeout_s, server.stop_by - time.monotonic())))
        log.info("stopped", accepted_work_finished=finished)
        return 1 if failed else exit_status(received)


def imported_first(engine: str, specification: ModelSpecification) -> tuple[str, ...]:
    """Libraries of an engine and of a model's module, so that a cold start's log separates imports from weights."""
    source = specification.reference.partition(":")[0]
    return (*engine_kind(engine).libraries, *([source] if engine == "torch" and source in SOURCES else []))


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


def _offers_again(settings: NativeSettings, served: Sequence[ModelSpecification], reloads: int) -> list[Offer]:
    """The models as their files are now; in a process of its own. Raises what describing a model raises, and
    `EngineError` for one that takes or answers other tensors."""
    forget_models()
    specifications = get_variants(settings.model, settings.payloads)
    for now, before in zip(specifications, served, strict=True):
        for name in ("name", "inputs", "outputs", "axes", "id_counts"):
            if getattr(now, name) != getattr(before, name):
                raise EngineError(
                    f"the new file has other {name} than the model that is served: start the server again"
                )
    first = specifications[0]
    text = settings.weights and settings.weights.partition("@sha256:")[0]
    weights = first.pinned(text)
    versions = [replace(now, version=str(int(now.version) + reloads)) for now in specifications]
    return [_offer(settings, specification, weights) for specification in versions]


def _offer(settings: NativeSettings, specification: ModelSpecification, weights: WeightsSource) -> Offer:
    executed = specification.executed

    def build(engine: EngineSettings) -> Engine:
        from servers.engines.factory import build_engine  # in the engine thread, after the port answers

        if "torch" in engine_kind(engine.kind).libraries:
            begin_gpu(engine.device_here())
        for library in imported_first(settings.engine, executed):
            with stage("import"), suppress(ImportError):  # loading the engine says what to install
                import_library(library)
        return build_engine(executed, weights, engine, getattr(settings, artefact_field(executed)))

    return specification, build
