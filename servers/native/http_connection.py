"""HTTP connections: bytes in, one request at a time, answers out, all of it within limits.

A body of known size is received by the transport straight into memory of its own; everything else comes through one
buffer that all connections share, since each read is used up before the next. What a client sends while it waits for
its answer stays in the socket, but for one read. Every refusal is an answer of the protocol, parser-level ones too; one
that does not read its request to the end is followed by lingering, because closing at once would destroy it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from uvicorn.server import ServerState

from servers.contract.errors import ContractError, InternalError, UnavailableError
from servers.native.batcher import QueuedRequest
from servers.native.deadlines import NEVER
from servers.native.errors import INTERNAL_ERROR, SHUTTING_DOWN, failure_reason
from servers.native.http_answers import Answer, ask, error_status, refusal
from servers.native.http_front_end import HttpFrontEnd, duplicate
from servers.native.http_parser import Request, RequestHead, RequestParser
from servers.native.inference import InferenceService
from servers.native.limits import HOLDS_ENOUGH, HttpError
from servers.native.request_templates import RequestTemplate
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.http")

LINGER_S = 5.0
"""How long a refused client may go on sending before it is cut off; closing at once could destroy its answer."""

LINGER_BYTES = 256 * 2**20
"""How much of it is read and dropped meanwhile."""

LAST_BODY_S = 5.0
"""How long a body that is arriving when the server is told to stop may take to be complete."""

ROOM_WAIT_S = 5.0
"""How long a body that is half in waits for room in the budget before it is refused; then it has as long to go on."""

PIECES_A_TURN = 16
"""How many requests, or pieces of chunked bodies, one connection may bring before the others have their turn."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


def connection_factory(front_end: HttpFrontEnd) -> Callable[..., Connection]:
    """What goes into `uvicorn.Config(http=…)`, which calls it for each client as it would a protocol class."""

    def connect(
        server_state: ServerState, _loop: asyncio.AbstractEventLoop | None = None, **_configuration: object
    ) -> Connection:
        front_end.open(server_state, _loop or asyncio.get_running_loop())
        return Connection(front_end)

    return connect


class Connection(asyncio.BufferedProtocol):
    """One client. Belongs to the event loop, but for `send_in_place`. Is `Expiring`."""

    def __init__(self, front_end: HttpFrontEnd) -> None:
        self._front_end = front_end
        self._settings = front_end.settings
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._socket: socket.socket | None = None  # ours beside the transport's, for the engine thread
        self._parser = RequestParser(front_end.heads, front_end.bodies, front_end.budget, front_end.check)
        self._unparsed = bytearray()  # read, but not used yet
        self._direct = False  # what is being read goes straight into the body
        self._request: Request | None = None  # the one that waits for its answer, or was answered last
        self._pending: PendingRequest | None = None  # the same, if it is an inference
        self._busy = False  # a request waits for its answer
        self._sending = threading.Lock()  # held by the engine thread between an answer's first byte and `_busy`
        self._advancing = False
        self._choked = False  # the client reads slower than it is answered
        self._paused = False  # nothing is read from the transport
        self._stopping = False  # no request after this one
        self._given_up = False  # answered already, because the server ends
        self._lingered = -1  # bytes dropped since the last answer; -1 before it
        self._body_by = 0.0  # when a body is late of which nothing has arrived
        self._room_by = 0.0  # when a body that waits for room is refused; 0: none does
        self.in_place = False
        """The answer may be sent from the engine thread."""
        self.gone = False
        """The client has left."""
        self.deadline = NEVER

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's are none by class
        self._wait_at_most(self._settings.keep_alive_timeout_s)
        self._front_end.add(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where the next bytes belong; never longer than the body, so that a pipelined request stays behind it."""
        space = None if self._unparsed else self._parser.space()
        self._direct = space is not None
        return self._front_end.room if space is None else space

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived there."""
        if self._direct:
            request = self._parser.received(nbytes)
            if request is not None:
                self._take(request)
        elif self._lingered >= 0:
            self._lingered += nbytes
            if self._lingered > LINGER_BYTES:
                self._transport.abort()
        elif (self._busy and not self._answered()) or self._choked or self._parser.starved:
            self._unparsed += self._front_end.room[:nbytes]
            self._pause()
        elif self._unparsed:
            self._unparsed += self._front_end.room[:nbytes]
            self._advance(self._unparsed, len(self._unparsed))
        else:
            self._advance(self._front_end.scratch, nbytes)

    def _answered(self) -> bool:
        """Whether the engine thread, which a fast client can overtake, is just done with the answer."""
        with self._sending:
            return not self._busy

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The client or the server has closed."""
        self.gone = True
        self._front_end.remove(self)
        with self._sending:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
        if self._busy and self._pending is not None:
            self._pending.abandon()
        elif not self._busy and self._parser.in_body:
            self._front_end.count_disconnect(self._parser.head)
        self._parser.give_up()
        if self._request is not None:
            self._request.release(read=False)
        self._pending = None  # nothing is left to keep the two in memory until the garbage collector comes by

    def pause_writing(self) -> None:
        """The client reads slower than it is answered: its next request has to wait."""
        self._choked = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._choked = False
        if not self._busy and self._lingered < 0:
            self._wait_at_most(self._settings.keep_alive_timeout_s)
            self._go_on()

    # What the server calls

    def shutdown(self) -> None:
        """No further request: close now, or after the one that is arriving or waits for its answer."""
        self._stopping = True
        if self._parser.in_body:
            self.deadline = min(self.deadline, time.monotonic() + LAST_BODY_S)
        elif not self._busy and self._lingered < 0:
            self._transport.close()

    def give_up(self) -> None:
        """The server ends: refuse what waits for its answer, and close."""
        with self._sending:
            self._given_up = self._busy
        if self._given_up:
            if self._pending is not None:
                self._pending.give_up()
            self._pending = None
            self._transport.write(refusal(503, SHUTTING_DOWN).encode(self.common_headers))
        self._transport.close()

    def expire(self) -> None:
        """See `Expiring`."""
        if self.waits_for_room:
            self._find_room()
        elif self._busy or self._lingered >= 0 or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._parser.in_body and not self._stopping and self._body_seconds_left > 0:
            self._wait_at_most(self._body_seconds_left)
        elif self._parser.in_body or self._unparsed:
            self._reject(HttpError(408, "the request did not arrive in time"))
        else:
            self._transport.close()

    # What a pending request calls

    @property
    def common_headers(self) -> bytes:
        """Whole header lines of every answer."""
        return self._front_end.deadlines.date + (_CLOSE if self._stopping else b"")

    def answer(self, answer: Answer) -> None:
        """Send the answer; in the event loop."""
        request = self._request
        assert request is not None
        if answer.status >= 500:  # an engine that failed may still be reading
            request.release(read=False)
        self.send(answer.encode(self.common_headers, with_body=request.head.method != b"HEAD"))

    def send(self, data: bytes) -> None:
        """Send an answer's bytes; in the event loop."""
        if self._given_up:
            return
        transport = self._transport
        if not transport.is_closing():
            transport.write(data)
        settings, unsent = self._settings, transport.get_write_buffer_size()
        self._wait_at_most(settings.read_timeout_s if unsent else settings.keep_alive_timeout_s)
        assert self._request is not None
        self._request.release()
        self._busy = False
        self._go_on()

    def send_in_place(self, data: bytes) -> None:
        """Send them from the engine thread. What the socket does not take at once is the event loop's."""
        with self._sending:
            own = None if self._given_up else self._socket
            try:
                sent = 0 if own is None else own.send(data)
            except OSError:
                sent = 0
            if sent < len(data):
                self._front_end.call(self.send, data[sent:])
                return
            self._wait_at_most(self._settings.keep_alive_timeout_s)
            assert self._request is not None
            self._request.release()
            self._busy = False
        # The event loop sets these before it looks at `_busy`, this thread looks after setting it: one of them sees.
        if self._paused or self._unparsed or self._stopping:
            self._front_end.call(self._go_on)

    # From bytes to requests, and what becomes of them

    def _go_on(self) -> None:
        """Use what has been read, or can be, unless something forbids it; also after an answer."""
        if self._busy or self._advancing or self._choked or self.gone or self._lingered >= 0 or self._parser.starved:
            return
        if self._stopping and not self._parser.in_body:
            self._transport.close()
        elif self._unparsed or self._paused:
            data, self._unparsed = self._unparsed, bytearray()
            self._advance(data, len(data))

    def _advance(self, data: bytearray, end: int) -> None:
        """Use `data[:end]` as far as it goes, or until it is the other connections' turn, and keep the rest."""
        parser = self._parser
        start, blocked, had_some, pieces = 0, False, bool(self._unparsed), PIECES_A_TURN
        self._advancing = True
        try:
            while start < end and not self._transport.is_closing():
                blocked = self._busy or self._choked or parser.starved or not pieces
                if blocked:
                    break
                used, complete = parser.parse(data, start, end)
                if used == start:
                    break
                start, pieces = used, pieces - 1
                if isinstance(complete, Request):
                    self._take(complete)
                elif complete is not None:
                    self._await_body(complete)
        except HttpError as error:
            self._reject(error)
        finally:
            self._advancing = False
        if self._lingered >= 0:
            return
        self._unparsed = data[start:end] if start < end else bytearray()
        if blocked:
            self._pause()
            return
        if self._unparsed and not had_some and not parser.in_body:  # a head has begun
            self._wait_at_most(self._settings.read_timeout_s)
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self._stopping and not parser.in_body:
            self._go_on()

    def _pause(self) -> None:
        """Leave in the socket what comes while a request waits for its answer, or other connections have their turn."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._parser.starved:
            self._room_by = time.monotonic() + ROOM_WAIT_S
            self._wait_at_most(0)  # look at every tick whether there is some
        elif not self._busy:
            self._front_end.call(self._go_on)

    def _await_body(self, head: RequestHead) -> None:
        if head.expects_continue:
            self._transport.write(_CONTINUE)
        self._body_by = time.monotonic() + self._settings.read_timeout_s
        self._wait_at_most(self._body_seconds_left)

    @property
    def _body_seconds_left(self) -> float:
        """How long the body may stay without its next byte; every byte that arrives makes it longer."""
        return self._body_by + self._parser.body_arrived / self._settings.min_body_bytes_per_s - time.monotonic()

    @property
    def waits_for_room(self) -> bool:
        """Whether a body is half in and the budget has no room for more."""
        return self._room_by > 0 and self._parser.in_body

    def _find_room(self) -> None:
        """Go on with a body that waits for room, if there is some; one that has waited too long is dropped."""
        if self._parser.starved:
            if time.monotonic() < self._room_by:
                return
            self._parser.drop_body(UnavailableError(HOLDS_ENOUGH))
        self._room_by = 0.0
        self._body_by += max(0.0, ROOM_WAIT_S - self._body_seconds_left)
        self._wait_at_most(self._body_seconds_left)
        self._go_on()

    def _wait_at_most(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def _take(self, request: Request) -> None:
        """Begin on a whole request."""
        head = request.head
        self._request, self._pending = request, None
        self._busy = True
        self.deadline = NEVER
        self._stopping = self._stopping or not head.keep_alive
        if request.refusal is not None:
            self._front_end.count_failure(head, request.refusal, request.start_ns)
            self.answer(refusal(error_status(request.refusal), str(request.refusal)))
        elif head.infers:
            self.in_place = self._may_answer_in_place()
            self._pending = PendingRequest(self, self._front_end.service(head), request.start_ns)
            self._pending.begin(self._front_end, request)
        elif head.target is not None:
            self.answer(refusal(405, "Method Not Allowed", [(b"allow", b"POST")]))
        else:
            self._front_end.run(self._ask(request))

    async def _ask(self, request: Request) -> None:
        """Runs on when the client leaves: what it has asked for may be half done."""
        client, server = map(self._transport.get_extra_info, ("peername", "sockname"))
        self.answer(await ask(self._front_end.application, request.head.scope(client, server), bytes(request.body)))

    def _may_answer_in_place(self) -> bool:
        """Whether nothing but the answer itself is left to do on this connection."""
        if self._stopping or self._transport.get_write_buffer_size():
            return False
        if self._socket is None:
            self._socket = duplicate(self._transport.get_extra_info("socket"))
        return self._socket is not None

    def _reject(self, error: HttpError) -> None:
        """Answer a request that is not read any further, and end the connection when the client has read that."""
        self._stopping = True
        self._front_end.count_failure(self._parser.head, error, self._parser.start_ns)
        self._transport.write(refusal(error.status, str(error)).encode(self.common_headers))
        self._parser.give_up()
        self._unparsed, self._lingered = bytearray(), 0
        self._wait_at_most(LINGER_S)
        self._transport.write_eof()


class PendingRequest:
    """One inference request between its last byte and its answer; the `Waiter` of its `QueuedRequest`.

    Belongs to the event loop, but for `answer_in_place`. Exactly one of the ways to end it is taken.
    """

    __slots__ = ("_connection", "_queued", "_service", "_task", "_template", "_times")

    def __init__(self, connection: Connection, service: InferenceService, start_ns: int) -> None:
        self._connection = connection
        self._service = service
        self._times = RequestTimes(start_ns)
        self._template: RequestTemplate | None = None
        self._queued: QueuedRequest | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, front_end: HttpFrontEnd, request: Request) -> None:
        """Queue it, or answer it in a task; its connection may have the answer before this returns."""
        body = request.body
        try:
            work = front_end.start(self._service, request.head, body, self._times)
            if isinstance(work, RequestTemplate):
                self._template = work
                self._queued = queued = QueuedRequest(work.arrays(body), work.rows, None, self, (), work.key)
                self._service.enqueue(queued)
                return
        except ContractError as error:
            self._queued = None
            self._refuse(error)
        else:
            self._task = asyncio.get_running_loop().create_task(self._carry_out(work))

    def abandon(self) -> None:
        """The client has left: take the request out of the queue if it still waits there."""
        if self._task is not None:
            self._task.cancel()
        elif self._withdraw():
            self._service.statistics.record_disconnect()

    def give_up(self) -> None:
        """The server's time to finish is over, and the connection refuses it: the engine need not see it any more."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._withdraw()
        self._service.statistics.record_failure("shutting_down", self._times.start_ns)

    def answer_in_place(self, queued: QueuedRequest) -> bool:
        """See `Waiter`."""
        if queued.error is not None or not self._connection.in_place:
            return False
        answer = self._encode(queued)
        if answer is None:
            return False
        self._queued = None  # else the two of them, and the arrays, would have to wait for the garbage collector
        self._count()
        self._connection.send_in_place(answer)
        return True

    def wake(self, queued: QueuedRequest) -> None:
        """See `Waiter`."""
        self._queued = None
        answer = None if queued.error is not None else self._encode(queued)
        if answer is None:
            self._refuse(queued.error or InternalError(INTERNAL_ERROR))
        else:
            self._count()
            self._connection.send(answer)

    def _refuse(self, error: ContractError) -> None:
        self._service.statistics.record_failure(failure_reason(error), self._times.start_ns)
        self._connection.answer(refusal(error_status(error), str(error)))

    def _withdraw(self) -> bool:
        queued, self._queued = self._queued, None  # else the two of them would have to wait for the garbage collector
        if queued is None or not self._service.withdraw(queued):
            return False
        queued.waiter = None  # the connection need not wait until the queue has come to this request
        return True

    def _encode(self, queued: QueuedRequest) -> bytes | None:
        """None where that fails: the error is then the request's, since it must stop neither thread."""
        assert self._template is not None
        start_ns = time.perf_counter_ns()
        try:
            common = self._connection.common_headers
            answer = self._template.answer(queued.outputs or {}, self._service.signature, common)
        except Exception:
            log.exception("an answer could not be encoded")
            queued.error = InternalError(INTERNAL_ERROR)
            return None
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        return answer

    async def _carry_out(self, work: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await work
        except asyncio.CancelledError:
            if not self._connection.gone:
                raise  # the server is being stopped by force
            self._service.statistics.record_disconnect()
        except ContractError as error:
            self._refuse(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            self._refuse(InternalError(INTERNAL_ERROR))
        else:
            self._count()
            self._connection.answer(answer)

    def _count(self) -> None:
        if self._connection.gone:
            self._service.statistics.record_disconnect()
        else:
            self._service.statistics.record_success(self._times)
