"""The way from a front end to an engine in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from servers.native.engine.process import EngineSide
from servers.native.front.engine_link import Execute
from servers.native.front.inference import wake_all
from servers.native.shared.interface import EngineOperation, FrontEndOperation, QueuedRequest


class LocalLink:
    """An `EngineLink` within one process, and the `FrontEnd` at the other end of it."""

    def __init__(self, side: EngineSide) -> None:
        self._side = side
        self._loop: asyncio.AbstractEventLoop | None = None
        self._execute: Execute | None = None

    def open(self, execute: Execute) -> None:
        """Called in the event loop, which executes the operations of the engine's side."""
        self._loop = asyncio.get_running_loop()
        self._execute = execute
        self._side.add(self)

    # EngineLink

    def submit(self, model: int, queued: QueuedRequest) -> None:
        queued.front_end = self
        self._side.submit(model, queued)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        return self._side.withdraw(model, queued)

    async def control(self, operation: EngineOperation) -> None:
        """See `EngineLink`; goes on when the caller is cancelled."""
        executing = self._side.threads(operation).submit(self._side.execute, operation)
        await asyncio.shield(asyncio.wrap_future(executing))

    # FrontEnd

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(wake_all, requests)

    def notify(self, operation: FrontEndOperation) -> Future[None]:
        assert self._loop is not None
        assert self._execute is not None
        executing = self._execute(operation)
        try:
            return asyncio.run_coroutine_threadsafe(executing, self._loop)
        except RuntimeError:  # the loop has ended
            executing.close()
            done: Future[None] = Future()
            done.set_result(None)
            return done
