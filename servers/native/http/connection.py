"""HTTP: connections, the requests that they bring, and what all connections share.

The transport receives a body of known size straight into the body's own memory. Everything else comes through one
buffer that all connections share, since each read is used up before the next. While a request waits for its response,
what the client sends stays in the socket, except one read. If it sends its end, it has left or only closed its half: an
interim response tells, since the system of a client that has left answers it with a reset. Every refusal is a response
of the protocol. A refusal that does not read its request to the end is followed by lingering: closing at once could
destroy the response.

What becomes of an inference request is the business of its `PendingRequest`: `inference` has those for tensors,
`generation` those for language models, whose responses are streamed.
"""

from __future__ import annotations

import asyncio
import select
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from email.utils import formatdate
from typing import Any, Generic, Protocol, TypeVar, cast

from uvicorn.server import ServerState

from servers.native.front.connections import ROOM_WAIT_S, FrontConnections
from servers.native.front.inference import ModelService, ServedModels
from servers.native.http.parser import (
    Headers,
    HeadReader,
    HttpRequest,
    HttpResponse,
    InferTarget,
    RequestHead,
    RequestParser,
    infer_target,
    refusal,
)
from servers.native.shared.errors import (
    HOLDS_ENOUGH,
    INTERNAL_ERROR,
    FailureLog,
    HttpError,
    failure_reason,
    shutting_down,
)
from servers.native.shared.limits import KEYLESS_LINGER_BYTES, STREAM_UNREAD_BYTES, Uptake, start_task
from servers.native.shared.memory import UNCOUNTED_BYTES, RequestMemory, UnreadAnswers
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import RequestTimes
from servers.protocol.errors import ContractError, InternalError, UnavailableError

log = FailureLog("abserve.http")

NEVER = float("inf")

LINGER_S = 5.0
"""How long a refused client may go on sending before it is cut off."""
LINGER_BYTES = 256 * 2**20
"""Bytes that a refused client may still send before it is cut off; they are read and dropped."""
LAST_BODY_S = 5.0
"""How long an arriving body may take to complete once the server is told to stop."""
LEFT_S = 0.005
"""How soon a client that has sent its end is asked whether it has left; afterwards at every tick."""
PIECES_PER_TURN = 16
"""Requests, or pieces of chunked bodies, that one connection may bring before the others have their turn."""

AsgiMessage = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]],
    Awaitable[None],
]

S = TypeVar("S", bound=ModelService)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


async def call_application(application: Application, scope: AsgiMessage, body: bytes) -> HttpResponse:
    """The application's whole response to a request; one with status 500 when it fails."""
    received = False
    status = 500
    headers: Headers = []
    parts: list[bytes] = []

    async def receive() -> AsgiMessage:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: AsgiMessage) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await application(scope, receive, send)
    except Exception:
        log.exception("a request failed unexpectedly", path=scope["path"][:200])
        return refusal(InternalError(INTERNAL_ERROR))
    content = b"".join(parts)
    if not any(name.lower() == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(content)))
    return HttpResponse(status, headers, content)


class PendingRequest(Protocol):
    """A request between its last byte and its response. Belongs to the event loop; exactly one of its ends is taken."""

    @property
    def interim(self) -> bytes:
        """Bytes without a meaning at this place of the response: the system of a client that has left answers them with
        a reset."""

    def begin(self, body: memoryview) -> None:
        """Start on it; the connection may have the response before this returns."""

    def client_left(self) -> None:
        """The client has left, or was cut off because it does not read."""

    def give_up(self) -> bytes | None:
        """The server's time to finish is over: forget the request. Returns how its response ends; None: a refusal."""


class HttpFrontEnd(FrontConnections, Generic[S]):
    """The shared part of one event loop's connections. `application` answers everything but inference."""

    def __init__(
        self,
        application: Application,
        models: ServedModels[S],
        settings: NativeSettings,
        memory: RequestMemory,
        target: InferTarget = infer_target,
    ) -> None:
        """`target` says which paths are inference."""
        super().__init__(settings, memory, 0)  # one client that sends before it has its answer has its turn at a time
        self.application = application
        self.models = models
        self.heads = HeadReader(settings, target)
        self.date = b""
        """The Date header of every response; it changes once per second."""
        self._state = ServerState()

    @abstractmethod
    def pending(self, connection: HttpServerConnection, request: HttpRequest) -> PendingRequest:
        """An inference request that has arrived, to be begun."""

    @abstractmethod
    def check(self, head: RequestHead) -> None:
        """Raises `ContractError` for an inference request that is refused whatever its body is."""

    def refusal(self, head: RequestHead | None, error: ContractError | HttpError) -> HttpResponse:
        """The response to a request that is refused before it is pending; `head` is None if it cannot be read."""
        del head
        return refusal(error)

    def connect(self, server_state: ServerState, **_configuration: object) -> HttpServerConnection:
        """A protocol for a new client: uvicorn calls this as it would a protocol class, and passes its state only
        then."""
        self._state = server_state
        return HttpServerConnection(self)

    @property
    def connections(self) -> set[HttpServerConnection]:
        """The open connections, in uvicorn's set: it shuts them down and waits for them when the server stops."""
        return cast("set[HttpServerConnection]", self._state.connections)

    def add(self, connection: HttpServerConnection) -> None:
        """A client has connected."""
        self.connections.add(connection)
        self.start_timer()

    def remove(self, connection: HttpServerConnection) -> None:
        """A connection has been closed."""
        self.connections.discard(connection)
        self.on_close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that uvicorn waits for when the server stops."""
        start_task(work, self._state.tasks)

    def expirations(self, now: float) -> list[Callable[[], None]]:
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        return [connection.expire for connection in self.connections if connection.deadline < now]

    def service(self, head: RequestHead) -> S:
        """The model that counts a request: the one it names, or the default one when it names none of the server's."""
        assert head.target is not None
        try:
            return self.models.named(*head.target)
        except ContractError:
            return self.models.default

    def count_disconnect(self, head: RequestHead | None) -> None:
        """Count a client that left before its inference request was complete."""
        if head is not None and head.infers:
            self.service(head).statistics.record_disconnect()

    def count_failure(self, head: RequestHead | None, error: ContractError | HttpError, start_ns: int) -> None:
        """Count an inference request that was refused before it was complete."""
        if head is not None and head.infers:
            self.service(head).statistics.record_failure(failure_reason(error), RequestTimes(start_ns))


class HttpServerConnection(asyncio.BufferedProtocol):
    """One client. Belongs to the event loop."""

    def __init__(self, front_end: HttpFrontEnd[Any]) -> None:
        self._front_end = front_end
        self._settings = front_end.settings
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._parser = RequestParser(front_end.heads, front_end.memory, front_end.check)
        self._unparsed = bytearray()  # read but not used yet
        self._direct = False  # the present read goes straight into the body
        self._request: HttpRequest | None = None  # it waits for its response, or was answered last
        self._pending: PendingRequest | None = None  # `_request`, if it is an inference
        self._busy = False  # a request waits for its response
        self._pipelined = False  # the request came before the last one's response
        self._advancing = False
        self._choked = False  # the client reads slower than it is answered
        self._uptake: Uptake | None = None  # while a response is streamed
        self._cut_off = False  # because it does not read
        self._paused = False  # nothing is read from the transport
        self._stopping = False  # this request is the last
        self._ended = False  # the client sends nothing more
        self._given_up = False  # already refused, because the server ends
        self._lingered = -1  # bytes dropped since a refusal; -1 before it
        self._body_since = 0.0  # when a body began, later by what it had to wait for room
        self._room_by = 0.0  # when a body that waits for room is refused; 0: it does not wait
        self._unsent = 0  # bytes of the last response, when it was written
        self._sent_at = 0.0  # when that was
        self._unread = UnreadAnswers(front_end.memory.budget)
        self._gone = False
        self.deadline = NEVER
        """When `expire` is due, in `time.monotonic` seconds."""

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not subclasses
        self._transport.set_write_buffer_limits(UNCOUNTED_BYTES)  # `resume_writing` follows whatever counts as held
        self._wait_at_most(self._settings.keep_alive_timeout_s)
        self._front_end.add(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """The memory for the next bytes; never longer than the body, so that a pipelined request stays behind it."""
        space = None if self._unparsed else self._parser.space()
        self._direct = space is not None
        return self._front_end.room if space is None else space

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived in that memory."""
        if self._direct:
            request = self._parser.received(nbytes)
            if request is not None:
                self._take(request)
        elif self._lingered >= 0:
            self._lingered += nbytes
            if self._lingered > LINGER_BYTES:
                self._transport.abort()
        elif self._busy or self._choked or self._parser.starved:
            self._unparsed += self._front_end.room[:nbytes]
            self._pause()
        elif self._unparsed:
            self._unparsed += self._front_end.room[:nbytes]
            self._advance(self._unparsed, len(self._unparsed))
        else:
            self._advance(self._front_end.scratch, nbytes)

    def eof_received(self) -> bool:
        """The client sends nothing more. True if it may still wait for a response, for which the connection stays."""
        if not self._busy or self._transport.is_closing():
            return False
        assert self._request is not None
        self._ended = self._stopping = True
        interim = CONTINUE if self._pending is None else self._pending.interim
        if self._request.head.version != "1.0" or interim != CONTINUE:  # which has no interim responses
            self._transport.write(interim)
        asyncio.get_running_loop().call_later(LEFT_S, self._check_left)
        self._wait_at_most(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The client or the server has closed."""
        self._gone = True
        self._front_end.remove(self)
        if self._busy and self._pending is not None:
            self._pending.client_left()
        elif not self._busy and self._parser.in_body:
            self._front_end.count_disconnect(self._parser.head)
        self._parser.give_up()
        self._parser.leave()
        self._unread.count(0)
        if self._request is not None:
            self._request.release()
        self._pending = None  # breaks the cycle of the two

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: its next request has to wait."""
        self._choked = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._choked = False
        self._unread.count(self._transport.get_write_buffer_size())
        if not self._busy and self._lingered < 0:
            self._parser.leave()
            self._wait_at_most(self._settings.keep_alive_timeout_s)
            self._go_on()

    # Called by the server

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a request, and every request before has its whole response."""
        return not (self._busy or self._unparsed or self._parser.in_body) and self._lingered < 0

    def shutdown(self) -> None:
        """Close now, or after the request that is arriving or waits for its response."""
        self._stopping = True
        if self._parser.in_body:
            self.deadline = min(self.deadline, time.monotonic() + LAST_BODY_S)
        elif not self._busy and self._lingered < 0:
            self._transport.close()

    def give_up(self) -> None:
        """The server ends: refuse the request that waits for its response, and close."""
        self._given_up = self._busy
        if self._given_up:
            last = None if self._pending is None else self._pending.give_up()
            self._pending = None
            self._transport.write(refusal(shutting_down()).encode(self.common_headers) if last is None else last)
        self._transport.close()

    def expire(self) -> None:
        """The deadline has passed."""
        if self.waits_for_room:
            self._find_room()
        elif self._uptake is not None and self._uptake.is_late(
            self._transport, time.monotonic(), self._settings.read_timeout_s
        ):
            self._abort()
        elif self._uptake is not None or (self._ended and self._busy):
            self._check_left()
        elif not self._busy and not self._parser.in_body and self._lingered < 0 and self._response_seconds_left > 0:
            self._wait_at_most(self._response_seconds_left)
        elif self._busy or self._lingered >= 0 or self._transport.get_write_buffer_size():
            self._transport.abort()
        elif self._parser.in_body and not self._stopping and self._body_seconds_left > 0:
            self._wait_at_most(self._body_seconds_left)
        elif self._parser.in_body or self._unparsed:
            self._reject(HttpError(408, "the request did not arrive in time"))
        elif (idle_by := self._sent_at + self._settings.keep_alive_timeout_s) > time.monotonic():
            self.deadline = idle_by  # it was the one for reading the response
        else:
            self._transport.close()

    # Called by the pending request

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    @property
    def gone(self) -> bool:
        """The client has left."""
        if self._gone or not self._ended:
            return self._gone
        if self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), 0)  # only errors
        return bool(poll.poll(0))

    @property
    def common_headers(self) -> bytes:
        """The header lines of every response."""
        return self._front_end.date + (_CLOSE if self._stopping else b"")

    @property
    def choked(self) -> bool:
        """Whether the client reads more slowly than it is answered."""
        return self._choked or self._cut_off

    def has_room(self, count: int) -> bool:
        """Whether a response of `count` bytes may wait for the client to read it; they count as held until it has.

        It exists, so the request's own memory is given back first.
        """
        if self._request is not None:
            self._request.release()
        return self._unread.count(self._transport.get_write_buffer_size() + count)

    def answer(self, answer: HttpResponse) -> None:
        """Send a response; in the event loop."""
        request = self._request
        assert request is not None
        self.send(answer.encode(self.common_headers, with_body=request.head.method != b"HEAD"), answer.more)

    def stream(self, data: bytes) -> None:
        """Send a piece of a response that is not complete. Cuts off a client that leaves too much of it unread."""
        if self._given_up or self._transport.is_closing():
            return
        if self._uptake is None:
            self._uptake = Uptake()
            self._wait_at_most(0)  # look at it at every tick
        self._transport.write(data)
        self._uptake.sent += len(data)
        if self._choked:
            unsent = self._transport.get_write_buffer_size()
            if unsent > STREAM_UNREAD_BYTES or not self._unread.count(unsent):
                self._abort()

    def close_after_response(self) -> None:
        """The end of the response is the end of the connection."""
        self._stopping = True

    def send(self, data: bytes, more: Sequence[bytes] = ()) -> None:
        """Send a response's bytes, or the last piece of them, in pieces if they are many; in the event loop."""
        self._uptake = None
        if self._given_up:
            return
        transport, limit = self._transport, self._parser.taken
        if limit is not None and not self._choked:
            self._parser.leave()
        if not transport.is_closing():
            transport.write(data)
            if more:
                transport.writelines(more)
        settings, unsent = self._settings, transport.get_write_buffer_size()
        if not self._choked:
            self._unread.count(unsent)
        elif limit is not None and self._parser.taken is None:  # until the client has read more of its answer
            limit.stay()
            self._parser.taken = limit
        self._unsent, self._sent_at = unsent, time.monotonic()
        self._wait_at_most(settings.read_timeout_s if unsent else settings.keep_alive_timeout_s)
        assert self._request is not None
        self._request.release()
        self._busy = False
        self._go_on()

    # From bytes to requests

    def _go_on(self) -> None:
        """Use the bytes that have been read, or can be, unless something forbids it; also after a response."""
        if self._busy or self._advancing or self._choked or self._gone or self._lingered >= 0 or self._parser.starved:
            return
        if self._stopping and not self._parser.in_body:
            self._transport.close()
        elif self._unparsed or self._paused:
            data, self._unparsed = self._unparsed, bytearray()
            self._pipelined = bool(data)
            self._advance(data, len(data))
            self._pipelined = False

    def _advance(self, data: bytearray, end: int) -> None:
        """Use `data[:end]` as far as possible, or until it is the other connections' turn, and keep the rest."""
        parser = self._parser
        start, blocked, had_some, pieces = 0, False, bool(self._unparsed), PIECES_PER_TURN
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
                if isinstance(complete, HttpRequest):
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
        """Stop reading while a request waits for its response, or other connections have their turn."""
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()
        if self._parser.starved:
            self._room_by = time.monotonic() + ROOM_WAIT_S
            self._wait_at_most(0)  # check for room at every tick
        elif not self._busy:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _await_body(self, head: RequestHead) -> None:
        if head.expects_continue:
            self._transport.write(CONTINUE)
        self._body_since = time.monotonic()
        self._wait_at_most(self._body_seconds_left)

    @property
    def _body_seconds_left(self) -> float:
        """How long the next byte of the body may take; every byte that arrives makes it longer."""
        return self._body_since + self._settings.longest_s(self._parser.body_arrived) - time.monotonic()

    @property
    def _response_seconds_left(self) -> float:
        """How long the client may take for the next byte of its response; every byte that it takes makes it longer. 0:
        it has all of them."""
        unsent = self._transport.get_write_buffer_size()
        return self._sent_at + self._settings.longest_s(self._unsent - unsent) - time.monotonic() if unsent else 0.0

    @property
    def waits_for_room(self) -> bool:
        """Whether an incomplete body waits because the budget has no room."""
        return self._room_by > 0 and self._parser.in_body

    def _find_room(self) -> None:
        """Go on with a body that waits for room, if there is room; drop one that has waited too long."""
        if self._parser.starved:
            if time.monotonic() < self._room_by:
                return
            self._parser.drop_body(UnavailableError(HOLDS_ENOUGH))
        self._room_by = 0.0
        self._body_since += max(0.0, ROOM_WAIT_S - self._body_seconds_left)
        self._wait_at_most(self._body_seconds_left)
        self._go_on()

    def _abort(self) -> None:
        """Cut off a client that does not read."""
        self._cut_off = True
        self._transport.abort()

    def _check_left(self) -> None:
        """End the connection of a client that has sent its end, if it does not read either."""
        if self._busy and not self._gone and self.gone:
            self._transport.abort()

    def _wait_at_most(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def _take(self, request: HttpRequest) -> None:
        """Begin on a whole request."""
        head = request.head
        self._request, self._pending = request, None
        self._busy = True
        self.deadline = NEVER
        self._stopping = self._stopping or not head.keep_alive
        if request.refusal is not None:
            self._front_end.count_failure(head, request.refusal, request.start_ns)
            self.answer(self._front_end.refusal(head, request.refusal))
        elif head.infers:
            self._pending = self._front_end.pending(self, request)
            self._pending.begin(request.body)
        elif head.target is not None:
            wrong_verb = self._front_end.refusal(head, HttpError(405, "Method Not Allowed"))
            wrong_verb.headers.append((b"allow", b"POST"))
            self.answer(wrong_verb)
        elif self._pipelined:
            self._front_end.turns.add(lambda: self._front_end.run(self._answer_by_application(request)))
        else:
            self._front_end.run(self._answer_by_application(request))

    async def _answer_by_application(self, request: HttpRequest) -> None:
        """Answer with the application's response; goes on when the client leaves, since the work may be half done."""
        client, server = map(self._transport.get_extra_info, ("peername", "sockname"))
        scheme = "http" if self._settings.tls_certificate is None else "https"
        answer = await call_application(
            self._front_end.application, request.head.scope(client, server, scheme), bytes(request.body)
        )
        if not self.gone and not self.has_room(answer.size):
            answer = refusal(UnavailableError(HOLDS_ENOUGH))
        self.answer(answer)

    def _reject(self, error: HttpError) -> None:
        """Refuse a request that is not read any further; the connection ends when the client has read the refusal."""
        self._stopping = True
        self._front_end.count_failure(self._parser.head, error, self._parser.start_ns)
        self._transport.write(self._front_end.refusal(self._parser.head, error).encode(self.common_headers))
        self._parser.give_up()
        self._parser.leave()
        self._unparsed = bytearray()
        self._lingered = LINGER_BYTES - KEYLESS_LINGER_BYTES if error.status == 401 else 0
        self._wait_at_most(LINGER_S)
        self._transport.write_eof()
