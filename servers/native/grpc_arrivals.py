"""Bounds what gRPC messages hold that are not whole: the library keeps them, and says nothing of them before they are.

It reads a small window of a call, and the rest of its message once that is asked for. So only as many calls ask at a
time as `max_held_bytes` has room for messages of the largest size, half of them for streams, which ask for as long as
they are open. The others wait their turn; while they do, a message that takes longer than `PRESSED_S` is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from servers.contract.errors import ContractError, InvalidRequestError, UnavailableError
from servers.native.deadlines import Deadlines
from servers.native.errors import SlowClientError, failure_reason
from servers.native.grpc_messages import details_of, status_of
from servers.native.limits import HOLDS_ENOUGH
from servers.native.settings import NativeSettings

PRESSED_S = 5.0
"""How long a message may take while others wait for its place, if the read timeout allows it."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """A message that is arriving. Is `Expiring`."""

    task: asyncio.Task[Any]
    began: float
    deadline: float
    late: bool = False

    def expire(self) -> None:
        """See `Expiring`."""
        self.late = True
        self.deadline = float("inf")
        self.task.cancel()


class Arrivals:
    """Of one event loop. `count_failure` is told of inferences without a message, and since when."""

    def __init__(
        self, settings: NativeSettings, max_message_bytes: int, count_failure: Callable[[str, int], None]
    ) -> None:
        places = max(1, settings.max_held_bytes // (2 * max_message_bytes))
        self._places = asyncio.Semaphore(places)
        self._streams_left = places
        self._most_waiting = settings.queue_size
        self._longest_s = settings.read_timeout_s + max_message_bytes / settings.min_body_bytes_per_s
        self._pressed_s = min(PRESSED_S, settings.read_timeout_s)
        self._idle_s = settings.keep_alive_timeout_s
        self._count_failure = count_failure
        self._waiting = 0
        self._arriving: set[_Arrival] = set()
        self._deadlines = Deadlines()

    async def receive(self, context: Any, *, infers: bool) -> Any:
        """The message of a call that has one; a call that does not send it in time is ended."""
        start_ns = time.perf_counter_ns()
        try:
            if self._places.locked():
                await self._wait()
            else:
                await self._places.acquire()
            try:
                message = await self._read(context, self._pressed_s if self._waiting else self._longest_s)
            finally:
                self._places.release()
            if message is grpc.aio.EOF:
                raise InvalidRequestError("the call has no message")
        except ContractError as error:
            if infers:
                self._count_failure(failure_reason(error), start_ns)
            await context.abort(status_of(error), details_of(error))
        return message

    async def stream(self, context: Any) -> AsyncIterator[Any]:
        """The messages of a call that has any number; one whose client is idle for too long is ended."""
        if not self._streams_left:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has as many streams open as it may")
        self._streams_left -= 1
        try:
            while (message := await self._read(context, self._idle_s)) is not grpc.aio.EOF:
                yield message
        except SlowClientError as error:
            await context.abort(status_of(error), details_of(error))
        finally:
            self._streams_left += 1

    async def _wait(self) -> None:
        if self._waiting >= self._most_waiting:
            raise UnavailableError(HOLDS_ENOUGH)
        for arrival in self._arriving:
            arrival.deadline = min(arrival.deadline, arrival.began + self._pressed_s)
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1

    async def _read(self, context: Any, seconds: float) -> Any:
        """Raises `SlowClientError`."""
        task = asyncio.current_task()
        assert task is not None
        now = time.monotonic()
        arrival = _Arrival(task, now, now + seconds)
        self._arriving.add(arrival)
        self._deadlines.watch(arrival)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if not arrival.late:
                raise
            task.uncancel()
            raise SlowClientError("the message did not arrive in time") from None
        finally:
            self._arriving.discard(arrival)
            self._deadlines.forget(arrival)
