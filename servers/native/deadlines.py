"""Deadlines of connections, kept by one timer for all of them, so that a request sets none of its own."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Protocol

TICK_S = 0.25
NEVER = float("inf")


class Expiring(Protocol):
    """Something with a deadline, in `time.monotonic` seconds."""

    deadline: float

    def expire(self) -> None:
        """The deadline has passed; in the event loop."""


class Deadlines:
    """Looks at all connections a few times a second; also keeps the Date header, which changes once a second."""

    def __init__(self) -> None:
        self._watched: set[Expiring] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.date = b""
        self._date_s = 0

    def watch(self, item: Expiring) -> None:
        """From now on."""
        self._watched.add(item)
        if self._timer is None:
            self._tick()

    def forget(self, item: Expiring) -> None:
        """No longer."""
        self._watched.discard(item)

    def _tick(self) -> None:
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s = now_s
            self.date = f"date: {formatdate(now_s, usegmt=True)}\r\n".encode()
        now = time.monotonic()
        for item in [item for item in self._watched if item.deadline < now]:
            item.expire()
        # Without connections nothing ticks; the next one starts it again, with a fresh date.
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._watched else None
