"""One HTTP connection: bytes in, one request at a time, answers out, all of it within limits.

A body of known size is received by the transport straight into memory of its own; everything else comes through one
buffer that all connections share, since each read is used up before the next. What a client sends while it waits for
its answer stays in the socket, but for one read. Every refusal is an answer of the protocol, parser-level ones too; one
that does not read its request to the end is followed by lingering, because closing at once would destroy it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from servers.contract.errors import ContractError
from servers.native.answers import Answer, error_status, refusal
from servers.native.asgi import ask
from servers.native.deadlines import NEVER
from servers.native.errors import SHUTTING_DOWN
from servers.native.heads import Head
from servers.native.intake import Intake
from servers.native.limits import LAST_BODY_S, LINGER_BYTES, LINGER_S, HttpError
from servers.native.statistics import RequestTimes

if TYPE_CHECKING:
    from servers.native.exchange import Exchange
    from servers.native.http_door import HttpDoor

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


class Connection(asyncio.BufferedProtocol):
    """Belongs to the event loop, but for `send_in_place`. Is an `ExchangeOwner`, a `Receiver` and `Expiring`."""

    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._socket: socket.socket | None = None  # ours beside the transport's, for the engine thread
        self._intake = Intake(door, self)
        self._pending = bytearray()  # read, but not used yet
        self._exchange: Exchange | None = None
        self._busy = False  # a request waits for its answer
        self._sending = threading.Lock()  # held by the engine thread between an answer's first byte and `_busy`
        self._advancing = False
        self._choked = False  # the client reads slower than it is answered
        self._paused = False  # nothing is read from the transport
        self._stopping = False  # no request after this one
        self._given_up = False  # answered already, because the server ends
        self._lingered = -1  # bytes dropped since the last answer; -1 before it
        self.in_place = False
        self.gone = False
        self.deadline = NEVER

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's are none by class
        self.wait_at_most(self._door.limits.keep_alive_s)
        self._door.add(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where the next bytes belong; never longer than the body, so that a pipelined request stays behind it."""
        body = self._intake.fixed
        return self._door.room if body is None else body.view[body.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived there."""
        if self._intake.fixed is not None:
            self._intake.received(nbytes)
        elif self._lingered >= 0:
            self._lingered += nbytes
            if self._lingered > LINGER_BYTES:
                self._transport.abort()
        elif (self._busy and not self._answered()) or self._choked:
            self._pending += self._door.room[:nbytes]
            self._pause()
        elif self._pending:
            self._pending += self._door.room[:nbytes]
            self._advance(self._pending, len(self._pending))
        else:
            self._advance(self._door.scratch, nbytes)

    def _answered(self) -> bool:
        """Whether the engine thread, which a fast client can overtake, is just done with the answer."""
        with self._sending:
            return not self._busy

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The client or the server has closed."""
        self.gone = True
        self._door.remove(self)
        with self._sending:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
        if self._busy and self._exchange is not None:
            self._exchange.abandon()
            self._exchange = None
        elif not self._busy and self._intake.in_body:
            self._door.infer.count_disconnect(self._intake.head)
        self._intake.end()

    def pause_writing(self) -> None:
        """The client reads slower than it is answered: its next request has to wait."""
        self._choked = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._choked = False
        if not self._busy and self._lingered < 0:
            self.wait_at_most(self._door.limits.keep_alive_s)
            self.go_on()

    # What the server calls

    def shutdown(self) -> None:
        """No further request: close now, or after the one that is arriving or waits for its answer."""
        self._stopping = True
        if self._intake.in_body:
            self.deadline = min(self.deadline, time.monotonic() + LAST_BODY_S)
        elif not self._busy and self._lingered < 0:
            self._transport.close()

    def give_up(self) -> None:
        """The server ends: refuse what waits for its answer, and close."""
        with self._sending:
            self._given_up = self._busy
        if self._given_up:
            if self._exchange is not None:
                self._exchange.give_up()
            self._exchange = None
            self._transport.write(refusal(503, SHUTTING_DOWN).encode(self.common_headers))
        self._transport.close()

    def expire(self) -> None:
        """See `Expiring`."""
        if self._busy or self._lingered >= 0 or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._intake.in_body or self._pending:
            self._reject(HttpError(408, "the request did not arrive in time"))
        else:
            self._transport.close()

    # What an exchange calls

    @property
    def common_headers(self) -> bytes:
        """See `ExchangeOwner`."""
        return self._door.deadlines.date + (_CLOSE if self._stopping else b"")

    def answer(self, answer: Answer) -> None:
        """See `ExchangeOwner`."""
        head = self._intake.head
        if answer.status >= 500:  # an engine that failed may still be reading
            self._intake.release(read=False)
        self.send(answer.encode(self.common_headers, with_body=head is None or head.method != b"HEAD"))

    def send(self, data: bytes) -> None:
        """See `ExchangeOwner`."""
        if self._given_up:
            return
        limits, transport = self._door.limits, self._transport
        if not transport.is_closing():
            transport.write(data)
        self.wait_at_most(limits.read_timeout_s if transport.get_write_buffer_size() else limits.keep_alive_s)
        self._intake.release()
        self._busy = False
        self.go_on()

    def send_in_place(self, data: bytes) -> None:
        """See `ExchangeOwner`; in the engine thread. What the socket does not take at once is the event loop's."""
        with self._sending:
            own = None if self._given_up else self._socket
            try:
                sent = 0 if own is None else own.send(data)
            except OSError:
                sent = 0
            if sent < len(data):
                self._door.call(self.send, data[sent:])
                return
            self.wait_at_most(self._door.limits.keep_alive_s)
            self._intake.release()
            self._busy = False
        # The event loop sets these before it looks at `_busy`, this thread looks after setting it: one of them sees.
        if self._paused or self._pending or self._stopping:
            self._door.call(self.go_on)

    def go_on(self) -> None:
        """After an answer: take the next request if it is here already. Does nothing at any other time."""
        if self._busy or self._advancing or self._choked or self.gone or self._lingered >= 0:
            return
        if self._stopping and not self._intake.in_body:
            self._transport.close()
        elif self._pending or self._paused:
            data, self._pending = self._pending, bytearray()
            self._advance(data, len(data))

    # From bytes to requests, and what becomes of them

    def _advance(self, data: bytearray, end: int) -> None:
        """Use `data[:end]` as far as it goes, and keep the rest."""
        start, blocked, had_some = 0, False, bool(self._pending)
        self._advancing = True
        try:
            while start < end and not self._transport.is_closing():
                blocked = self._busy or self._choked
                used = start if blocked else self._intake.use(data, start, end)
                if used == start:
                    break
                start = used
        except HttpError as error:
            self._reject(error)
        finally:
            self._advancing = False
        if self._lingered >= 0:
            return
        self._pending = data[start:end] if start < end else bytearray()
        if blocked:
            self._pause()
            return
        if self._pending and not had_some and not self._intake.in_body:  # a head has begun
            self.wait_at_most(self._door.limits.read_timeout_s)
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._stopping:
            self.go_on()

    def _pause(self) -> None:
        """Leave in the socket what comes while a request waits for its answer."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if not self._busy:  # the engine thread has answered meanwhile
            self.go_on()

    def wait_at_most(self, seconds: float) -> None:
        """See `Receiver`."""
        self.deadline = time.monotonic() + seconds

    def go_ahead(self) -> None:
        """See `Receiver`."""
        self._transport.write(_CONTINUE)

    def refuse(self, head: Head, error: ContractError, start_ns: int) -> None:
        """See `Receiver`."""
        self._begin(head)
        self._door.infer.count_failure(head, error, start_ns)
        self.answer(refusal(error_status(error), str(error)))

    def take(self, head: Head, body: memoryview, start_ns: int) -> None:
        """See `Receiver`."""
        self._begin(head)
        if head.infers:
            self.in_place = self._may_answer_in_place()
            self._exchange = self._door.infer.begin(self, head, body, RequestTimes(start_ns))
        elif head.target is not None:
            self.answer(refusal(405, "Method Not Allowed", [(b"allow", b"POST")]))
        else:
            self._door.run(self._ask(head, bytes(body)))

    def _begin(self, head: Head) -> None:
        self._exchange = None
        self._busy = True
        self.deadline = NEVER
        self._stopping = self._stopping or not head.keep_alive

    async def _ask(self, head: Head, body: bytes) -> None:
        """Runs on when the client leaves: what it has asked for may be half done."""
        client, server = map(self._transport.get_extra_info, ("peername", "sockname"))
        self.answer(await ask(self._door.application, head, body, client, server))

    def _may_answer_in_place(self) -> bool:
        """Whether nothing but the answer itself is left to do on this connection."""
        if self._stopping or self._transport.get_write_buffer_size():
            return False
        if self._socket is None:
            own = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):  # out of descriptors: the event loop answers
                self._socket = socket.socket(fileno=os.dup(own.fileno()))
                self._socket.setblocking(False)
        return self._socket is not None

    def _reject(self, error: HttpError) -> None:
        """Answer a request that is not read any further, and end the connection when the client has read that."""
        self._stopping = True
        self._door.infer.count_failure(self._intake.head, error, self._intake.start_ns)
        self._transport.write(refusal(error.status, str(error)).encode(self.common_headers))
        self._intake.give_up()
        self._pending, self._lingered = bytearray(), 0
        self.wait_at_most(LINGER_S)
        if self._transport.can_write_eof():
            self._transport.write_eof()
