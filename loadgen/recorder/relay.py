"""Passes the bytes of each client's connection to a server and back as they come, and shows them to a tap.

Every connection of a client has one to the server, so that the server's limits, its order of answers, slow clients and
broken connections are those without the relay. No byte is changed, also none of other protocols. A tap that raises gets
no more of its connection; the bytes go on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Protocol, cast

from loadgen.client.connection import Address


class Tap(Protocol):
    """Looks at the bytes of one connection, with the time at which they were read."""

    def sent(self, data: bytes, now_ns: int) -> None: ...

    def received(self, data: bytes, now_ns: int) -> None: ...

    def closed(self, now_ns: int) -> None: ...


class _End(asyncio.Protocol):
    """One end of a relayed connection."""

    def __init__(self, relay: _Connection) -> None:
        self.relay = relay
        self.transport: asyncio.Transport | None = None
        self.other: _End = self
        self._ended = False
        """Whether nothing more comes from it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.relay.made(self)

    def data_received(self, data: bytes) -> None:
        now_ns = perf_counter_ns()
        if self.other.transport is not None:
            self.other.transport.write(data)
        self.relay.show(self, data, now_ns)

    def eof_received(self) -> bool:
        self._ended = True
        other = self.other.transport
        if other is None or self.other._ended or not other.can_write_eof():
            return False
        with suppress(OSError, RuntimeError):  # it is closed already
            other.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        other = self.other.transport
        if other is not None:
            if exc is None:
                other.close()  # after what is still to be sent
            else:
                _reset(other)
        self.relay.lost()


def _reset(transport: asyncio.Transport) -> None:
    """Close with a reset: an end in order would make half an answer look whole."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Connection:
    """A client's connection and the one to the server."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._tap: Tap | None = relay.make_tap()
        self.client, self.server = _End(self), _End(self)
        self.client.other, self.server.other = self.server, self.client

    def made(self, end: _End) -> None:
        if end is self.client and end.transport is not None:
            end.transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._connect())
            self._relay.tasks.add(task)
            task.add_done_callback(self._relay.tasks.discard)

    async def _connect(self) -> None:
        try:
            await self._relay.connect(lambda: self.server)
        except OSError:
            if self.client.transport is not None:
                _reset(self.client.transport)  # the client sees a server that refuses
            return
        if self.client.transport is not None:
            self.client.transport.resume_reading()
        elif self.server.transport is not None:
            _reset(self.server.transport)

    def show(self, end: _End, data: bytes, now_ns: int) -> None:
        if self._tap is None:
            return
        try:
            (self._tap.sent if end is self.client else self._tap.received)(data, now_ns)
        except Exception:  # noqa: BLE001 (the recorder may fail, and the traffic goes on)
            self.lost(now_ns)

    def lost(self, now_ns: int | None = None) -> None:
        """Show the tap no more: an end is closed, or the tap failed."""
        tap, self._tap = self._tap, None
        if tap is not None:
            with suppress(Exception):
                tap.closed(now_ns or perf_counter_ns())


class Relay:
    """Listens for clients of one server."""

    def __init__(self, address: Address, make_tap: Callable[[], Tap], context: ssl.SSLContext | None = None) -> None:
        """`context` is that of connections to a server with TLS; clients connect without it."""
        self.make_tap = make_tap
        self.tasks: set[asyncio.Task[None]] = set()
        """The connections that are being made; asyncio itself would forget them."""
        self.address = address
        self._context = context
        self._server: asyncio.Server | None = None

    async def connect(self, end: Callable[[], _End]) -> None:
        """Connect one end to the server. Raises `OSError`."""
        loop, address = asyncio.get_running_loop(), self.address
        await loop.create_connection(end, address.host, address.port, ssl=self._context)

    async def listen(self, host: str, port: int) -> int:
        """Accept clients; returns the port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self).client, host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])
