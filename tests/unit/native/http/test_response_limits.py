"""How long a client may take to read its response, and then to send the next request."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from servers.native.http.connection import HttpServerConnection
from servers.native.http.inference import InferenceFrontEnd
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings

SETTINGS = NativeSettings(fronts=0, read_timeout_s=10, keep_alive_timeout_s=60, min_body_bytes_per_s=100)


class Transport:
    """Has what the client has not taken, and keeps how the connection ends."""

    def __init__(self) -> None:
        self.unsent = 0
        self.ended = ""

    def set_write_buffer_limits(self, _high: int) -> None: ...

    def write(self, data: bytes) -> None:
        self.unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


async def answered(size: int) -> tuple[HttpServerConnection, Transport]:
    """A connection whose only response has so many bytes, of which the client has taken none."""
    front_end: Any = InferenceFrontEnd(None, [], None, SETTINGS, RequestMemory.alone(SETTINGS))  # type: ignore[arg-type]
    front_end._state = SimpleNamespace(connections=set(), tasks=set())
    connection, transport = HttpServerConnection(front_end), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection._busy, connection._request = True, SimpleNamespace(release=lambda: None)  # type: ignore[assignment]
    connection.send(bytes(size))
    front_end._timer.cancel()
    return connection, transport


@pytest.mark.parametrize(("taken", "ended"), [(0, "aborted"), (1000, ""), (10_000, "")])
def test_who_goes_on_reading_has_longer(taken: int, ended: str) -> None:
    """By a second for each 100 bytes; 15 s have passed."""

    async def test() -> None:
        connection, transport = await answered(10_000)
        assert connection.deadline == pytest.approx(time.monotonic() + 10, abs=1)
        transport.unsent -= taken
        connection._sent_at -= 15
        connection.expire()
        assert transport.ended == ended
        if not ended:
            left_s = 60 if not transport.unsent else 10 + taken / 100
            assert connection.deadline == pytest.approx(time.monotonic() - 15 + left_s, abs=1)

    asyncio.run(test())


def test_an_idle_connection_is_closed_when_its_time_is_over() -> None:
    """Also one whose client did not take its last response at once."""

    async def test() -> None:
        connection, transport = await answered(10_000)
        transport.unsent = 0
        connection._sent_at -= 61
        connection.expire()
        assert transport.ended == "closed"

    asyncio.run(test())
