"""What the connections of one protocol share on an event loop: memory for a read, turns, a timer of all limits."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from servers.native.shared.errors import FailureLog
from servers.native.shared.limits import InflatingThread, Turns
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import RequestTimes
from servers.native.shared.traces import tracer_of
from servers.protocol.records import ModelSignature

log = FailureLog("abserve.front")

READ_BYTES = 64 * 1024
"""Room for one read of all but the bytes of large requests. Of these, this much is copied."""
TICK_S = 0.25
"""How often all deadlines are checked: one timer for all, so that a request sets none."""
ROOM_WAIT_S = 5.0
"""How long an incomplete request waits for room in the budget before it is refused."""


class FrontConnections(ABC):
    """All connections of one protocol, with what they share."""

    def __init__(self, settings: NativeSettings, memory: RequestMemory, turns_ns: int) -> None:
        """`turns_ns` is what the connections together may take of one turn of the event loop, beside one read each."""
        self.settings = settings
        self.memory = memory
        self._tracer = tracer_of(settings)
        self.scratch = bytearray(READ_BYTES)
        self.room = memoryview(self.scratch)
        """Of all connections, since each read is used up before the next."""
        # One thread each: reading values holds the interpreter, so that more threads would only take longer each.
        self.reading = ThreadPoolExecutor(1, "reading")
        self.inflating = InflatingThread()
        self.turns = Turns(turns_ns)
        """Of connections that have more to be read or answered than others should wait for."""
        self.on_close: Callable[[], None] = lambda: None
        """Called for each connection that has been closed."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def connections(self) -> Collection[object]:
        """Those that are open."""

    @abstractmethod
    def expirations(self, now: float) -> list[Callable[[], None]]:
        """What ends what has taken too long at a time of `time.monotonic`, by connection."""

    def times(
        self, signature: ModelSignature, start_ns: int, headers: Mapping[str, str] | None, receive_ns: int = 0
    ) -> RequestTimes:
        """Of a request that has come, with its trace, if it has one by its `headers` or by chance."""
        trace = None if self._tracer is None else self._tracer.begin(signature, start_ns, headers)
        return RequestTimes(start_ns, receive_ns, trace=trace)

    def start_timer(self) -> None:
        """A client has connected: apply the limits from now on."""
        if self._timer is None:
            self._tick()

    def _tick(self) -> None:
        for expire in self.expirations(time.monotonic()):
            try:
                expire()
            except Exception:  # the others have their limits, and the timer goes on
                log.exception("the time limits of a connection could not be applied")
        # Without connections nothing ticks but to give memory back; the next one starts the timer again.
        ticks = self.memory.trim_heap() or self.connections
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if ticks else None
