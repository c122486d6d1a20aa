"""A server that is one process: the front end on the event loop, the engines in threads beside it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any

import structlog

from servers.native.batcher import QueuedRequest
from servers.native.engine_process import EngineSide, Offer
from servers.native.front_server import NativeServer
from servers.native.inference import wake_all
from servers.native.memory import RequestMemory
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.native.supervisor import exit_status

log = structlog.get_logger("abserve.server")


class LocalLink:
    """The front end's way to the engine's side, and back."""

    def __init__(self, side: EngineSide) -> None:
        self._side = side
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: Mapping[str, Callable[..., Coroutine[Any, Any, None]]] = {}

    def open(self, told: Mapping[str, Callable[..., Coroutine[Any, Any, None]]]) -> None:
        """Called in the event loop, with what the front end may be told."""
        self._loop = asyncio.get_running_loop()
        self._told = told
        self._side.add(self)

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """See `EngineLink`."""
        queued.owner = self
        self._side.submit(model, queued)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        """See `EngineLink`."""
        return self._side.hosts[model].withdraw(queued)

    async def ask(self, method: str, *arguments: object) -> None:
        """See `EngineLink`; goes on when the caller is cancelled."""
        threads = self._side.threads(method, arguments)
        await asyncio.shield(asyncio.wrap_future(threads.submit(self._side.carry_out, method, arguments)))

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        """See `FrontEnd`."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(wake_all, requests)

    def tell(self, method: str, *arguments: object) -> Future[Any]:
        """See `FrontEnd`."""
        assert self._loop is not None
        telling = self._told[method](*arguments)
        try:
            return asyncio.run_coroutine_threadsafe(telling, self._loop)
        except RuntimeError:  # the loop has ended
            telling.close()
            done: Future[Any] = Future()
            done.set_result(None)
            return done


def serve_in_one_process(
    settings: NativeSettings,
    offers: Sequence[Offer],
    listener: socket.socket,
    grpc_listener: socket.socket | None,
    on_listening: Callable[[], None],
) -> int:
    """Serve until SIGTERM or SIGINT, and return the process's exit status. Blocks; for the main thread.

    An engine thread may still be loading when this returns: the caller must not wait for it.
    """
    statistics = [Statistics(settings.max_batch_size) for _ in offers]
    memory = RequestMemory.alone(settings)
    side = EngineSide(settings, offers, statistics, memory.arena)
    link = LocalLink(side)
    front_ends_open = threading.Event()
    specifications = [specification for specification, _ in offers]

    def begin() -> None:
        on_listening()
        link.open(server.told)
        side.start(stop, front_ends_open)

    def stop() -> None:
        server.should_exit = True

    server = NativeServer(settings, specifications, statistics, link, memory, begin, front_ends_open.set, grpc_listener)
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
    failed = side.failed
    server.models.stop()
    finished = side.stop(max(0.0, min(settings.shutdown_timeout_s, server.stop_by - time.monotonic())))
    log.info("stopped", accepted_work_finished=finished)
    if failed:
        return 1
    return exit_status(received)
