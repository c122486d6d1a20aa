"""What all HTTP connections share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.server import ServerState

from servers.native.asgi import Application
from servers.native.bodies import BodyPool
from servers.native.deadlines import Deadlines, Expiring
from servers.native.heads import Head, HeadReader
from servers.native.infer_door import InferDoor
from servers.native.limits import CONTROL_BODY_BYTES, HttpLimits

READ_BYTES = 64 * 1024
"""Room for one read of heads and small bodies: a small body comes with its head, a large one has that much copied."""


class HttpDoor:
    """Of one event loop. `application` answers everything but inference."""

    def __init__(self, application: Application, infer: InferDoor, limits: HttpLimits) -> None:
        self.application = application
        self.infer = infer
        self.limits = limits
        self.heads = HeadReader(limits)
        self.budget = infer.budget
        self.bodies = BodyPool()
        self.deadlines = Deadlines()
        self.scratch = bytearray(READ_BYTES)
        self.room = memoryview(self.scratch)
        self._state: ServerState | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, server_state: ServerState, loop: asyncio.AbstractEventLoop) -> None:
        """Once the event loop runs; again for each client, since uvicorn tells it no sooner."""
        self._state = server_state
        self._loop = loop

    def add(self, connection: Expiring) -> None:
        """Watch it, and let uvicorn tell it and wait for it when the server stops."""
        assert self._state is not None
        self._state.connections.add(connection)  # type: ignore[arg-type]  # it asks them for `shutdown` alone
        self.deadlines.watch(connection)

    def remove(self, connection: Expiring) -> None:
        """It has ended."""
        assert self._state is not None
        self._state.connections.discard(connection)
        self.deadlines.forget(connection)

    def body_limit(self, head: Head) -> int:
        """The largest body that is taken with this head."""
        return self.limits.body_bytes if head.target is not None else CONTROL_BODY_BYTES

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that uvicorn waits for when the server stops."""
        assert self._state is not None
        task = asyncio.get_running_loop().create_task(work)
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        return task

    def call(self, callback: Callable[..., object], *arguments: object) -> None:
        """From any thread: call back in the event loop, unless that has ended."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)
