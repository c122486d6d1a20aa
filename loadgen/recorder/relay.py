"""Passes the bytes of each client's connection to a server and back as they come, and shows them to a tap.

Every connection of a client has one to the server, so that the server's limits, its order of answers, slow clients and
broken connections are those without the relay. No byte is changed, also none of other protocols. A tap that raises gets
no more of its connection; the bytes go on.

Where servers take turns, a connection of a client goes over to the next one between two requests. One over HTTP/2
cannot, so its client is told to make another (GOAWAY), as a server does that limits the age of connections; what is
under way ends on the old one.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol, cast

from loadgen.client.connection import Address
from loadgen.client.tls import failure_reason


class Tap(Protocol):
    """Looks at the bytes of one connection, with the time at which they were read."""

    def sent(self, data: bytes, now_ns: int) -> None: ...

    def received(self, data: bytes, now_ns: int) -> None: ...

    def closed(self, now_ns: int, *, by_server: bool = False) -> None: ...

    def lose(self) -> None: ...

    @property
    def is_between(self) -> bool:
        """Whether what the client sends next may go to another server."""

    def farewell(self) -> bytes:
        """What tells the client to make another connection; empty if it cannot be said now."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server that gets requests, and who looks at them."""

    address: Address
    make_tap: Callable[[], Tap]
    context: ssl.SSLContext | None = None
    """For connections with TLS; clients connect without it."""


class _End(asyncio.Protocol):
    """One end of a relayed connection."""

    def __init__(self, relay: _Connection) -> None:
        self.relay = relay
        self.transport: asyncio.Transport | None = None
        self.other: _End = self
        self.has_ended = False
        """Whether nothing more comes from it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.relay.made(self)

    def data_received(self, data: bytes) -> None:
        if not self.relay.goes_over(self, data):
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        """Give the other end what has come from this one."""
        now_ns = perf_counter_ns()
        if self.other.transport is not None:
            self.other.transport.write(data)
        self.relay.show(self, data, now_ns)

    def eof_received(self) -> bool:
        self.has_ended = True
        other = self.other.transport
        if other is None or self.other.has_ended or not other.can_write_eof():
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
        if self.other is self:  # a server whose turn is over
            return
        other = self.other.transport
        if other is not None:
            if exc is None:
                other.close()  # after what is still to be sent
            else:
                _reset(other)
        self.relay.lost(self)


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
        self._number = relay.chosen
        self._tap: Tap | None = relay.servers[self._number].make_tap()
        self._has_said_farewell = False
        self.client, self.server = _End(self), _End(self)
        self.client.other, self.server.other = self.server, self.client

    def made(self, end: _End) -> None:
        if end is self.client and end.transport is not None:
            end.transport.pause_reading()
            self._relay.connections.add(self)
            self._connect(b"")

    def _connect(self, data: bytes) -> None:
        """Connect to the server, and begin with what has come from the client."""
        task = asyncio.get_running_loop().create_task(self._connected(data))
        self._relay.tasks.add(task)
        task.add_done_callback(self._relay.tasks.discard)

    async def _connected(self, data: bytes) -> None:
        try:
            server = self._relay.servers[self._number]
            address, loop = server.address, asyncio.get_running_loop()
            await loop.create_connection(lambda: self.server, address.host, address.port, ssl=server.context)
        except OSError as exc:
            self._relay.refused(self._number, exc)
            if data:
                self.show(self.client, data, perf_counter_ns())  # a request that this server does not answer
            self.lost(self.server)
            if self.client.transport is not None:
                _reset(self.client.transport)  # the client sees a server that refuses
            return
        if self.client.transport is not None:
            if data:
                self.client.pass_on(data)
            self.client.transport.resume_reading()
        elif self.server.transport is not None:
            _reset(self.server.transport)

    def goes_over(self, end: _End, data: bytes) -> bool:
        """Whether these bytes begin a request for another server, which gets them as soon as it is connected."""
        if self._number == self._relay.chosen or end is not self.client or self._tap is None:
            return False
        if not self._tap.is_between or end.transport is None:
            return False
        end.transport.pause_reading()
        old, self.server = self.server, _End(self)
        old.other = old
        if old.transport is not None:
            old.transport.close()
        self.client.other, self.server.other = self.server, self.client
        self._number = self._relay.chosen
        self._tap = self._relay.servers[self._number].make_tap()
        self._connect(data)
        return True

    def turn(self) -> None:
        """Tell the client to make another connection, if the server's turn is over and this cannot go over."""
        if self._number == self._relay.chosen or self._has_said_farewell or self._tap is None:
            return
        if (words := self._tap.farewell()) and self.client.transport is not None:
            self.client.transport.write(words)
            self._has_said_farewell = True

    def show(self, end: _End, data: bytes, now_ns: int) -> None:
        if self._tap is None:
            return
        try:
            (self._tap.sent if end is self.client else self._tap.received)(data, now_ns)
        except Exception:  # noqa: BLE001 (the recorder may fail, and the traffic goes on)
            self.lost(self.client, now_ns)
        if self._number != self._relay.chosen:
            self.turn()

    def lost(self, end: _End, now_ns: int | None = None) -> None:
        """Show the tap no more: an end is closed, or the tap failed."""
        self._relay.connections.discard(self)
        tap, self._tap = self._tap, None
        if tap is not None:
            with suppress(Exception):
                tap.closed(now_ns or perf_counter_ns(), by_server=end is self.server or self.server.has_ended)


class Relay:
    """Listens for clients of one server, or of several that take turns."""

    def __init__(self, *servers: Upstream) -> None:
        self.servers = servers
        self.chosen = 0
        """Whose turn it is."""
        self.connections: set[_Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """The connections that are being made; asyncio itself would forget them."""
        self.on_refused: Callable[[str], None] = lambda _: None
        """Called with each reason for which TLS with a server fails, once."""
        self._reasons: set[str] = set()
        self._server: asyncio.Server | None = None

    def refused(self, number: int, exc: OSError) -> None:
        """A server could not be reached."""
        if isinstance(exc, ssl.SSLError):
            address = self.servers[number].address
            reason = f"{address.authority}: {failure_reason(exc, address.host)}"
            if reason not in self._reasons:
                self._reasons.add(reason)
                self.on_refused(reason)

    def choose(self, number: int) -> None:
        """It is another server's turn."""
        self.chosen = number
        for connection in [*self.connections]:
            connection.turn()

    async def listen(self, host: str, port: int) -> int:
        """Accept clients; returns the port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self).client, host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])
