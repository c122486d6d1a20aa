"""gRPC calls: a call's messages one after the other and its status at the end, and how the answers are sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from servers.native.grpc import http2
from servers.native.grpc.http2 import TRAILERS_OK, CallHead, CallStatus, status_of
from servers.native.shared.errors import HOLDS_ENOUGH, RefusedError, expired, failure_reason, shutting_down
from servers.native.shared.memory import ArrivingBytes
from servers.native.shared.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, TooLargeError, UnavailableError

PREFIX_BYTES = 5
STREAM_WINDOW = 8 * 2**20
"""Bytes that a client may send on a call before it is told that it may send more: a batch of 32 small images fits."""
PRESSED_S = 5.0
"""How long a message may take while others wait for room, if the read timeout allows it."""
MANY_WAITING = 256
"""Messages of one stream that wait before its connection stops reading."""
MOST_WAITING = 1024
"""Messages of one stream that wait for their turn while the client does not read its answers."""
MOST_TOGETHER = 2048
"""Messages of all streams of one connection that wait."""
WAITING_BYTES = 4096
"""What a waiting message counts beside its bytes: a page of memory and its objects."""
MOST_ANSWERED = 1024
"""Messages of one decoupled call that are answered at once; the next ones wait for their turn."""
MANY_ARRIVING = 64
"""Messages of one connection that arrive at once; more do not displace others when memory is short."""
NEVER = float("inf")


class MessageAnswer(Protocol):
    """What answers one message of a call."""

    def begin(self) -> None:
        """Begin to answer; the call may have its answer before this returns."""

    def stop(self, reason: str) -> None:
        """Nobody waits for the answer any more, for this reason; "": because the client has left."""


class CallConnection(Protocol):
    """The part of a connection that its calls need."""

    waiting_messages: int
    """Complete messages of its calls that wait for the answers before them."""
    stopping: bool
    """The server ends, and takes no more calls."""

    @property
    def transport(self) -> asyncio.Transport:
        """The client's."""

    @property
    def arriving_messages(self) -> int:
        """How many messages are not complete."""

    def grant(self, call: Call, increment: int) -> None:
        """Let the client send `increment` bytes more on this call."""

    def has_room(self, count: int) -> bool:
        """Whether an answer of `count` bytes may wait for the client to read it; it counts as held until it has."""

    def send(self, call: Call, pieces: Sequence[bytes], *, last: bool) -> None:
        """Send a message with its prefix, as soon as the client's windows allow it; the `last` one ends the call."""

    def stream(self, call: Call, message: bytes) -> None:
        """Send one of many messages, with its prefix. Cuts off a client that leaves too much of them unread."""

    def take_turns(self, answer: Callable[[], None]) -> None:
        """Call this in a later turn, behind those that wait already."""

    def credit_answer(self) -> None:
        """A message has been answered, if only by an error."""

    def finish(self, call: Call, trailers: bytes) -> None:
        """End the call with these trailers, behind what still waits to be sent."""

    def reset(self, call: Call) -> None:
        """End the call at once: its client does not take its answer."""


class CallServer(Protocol):
    """The part of the front end that calls need."""

    settings: NativeSettings

    def allocate_message(self, call: Call, size: int, *, compressed: bool) -> GrpcMessage:
        """Memory for a call's message. Raises `UnavailableError` if none is free."""

    def answering(self, call: Call, message: GrpcMessage) -> MessageAnswer:
        """Make what answers a message."""

    def count_failure(self, error: ContractError, start_ns: int) -> None:
        """Count an inference without a message."""

    def count_disconnect(self) -> None:
        """Count a client that left before its message was complete."""


class Call:
    """One call of a connection: receives the bytes of its messages and has them answered, one at a time.

    The messages of a decoupled call are answered side by side.
    """

    __slots__ = (
        "_begun", "_connection", "_deadline", "_going_on", "_idle", "_inbox", "_last_arrival", "_prefix", "_server",
        "answering", "blocked_since", "closed", "deadline_ns", "ending", "head", "headers_sent", "message", "method",
        "open_answers", "receive_window", "remote_closed", "send_window", "sent_blocked", "start_ns", "stream",
        "stream_bytes", "taken", "trailers", "unsent", "unsent_bytes",
    )  # fmt: skip

    def __init__(
        self,
        connection: CallConnection,
        server: CallServer,
        stream: int,
        head: CallHead,
        send_window: int,
    ) -> None:
        assert head.method is not None
        self._connection = connection
        self._server = server
        self.stream = stream
        self.stream_bytes = http2.NUMBER.pack(stream)
        self.headers_sent = False
        self.send_window = send_window
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        """Messages, or their rest, that wait for the client's windows; behind them come the trailers."""
        self.trailers: bytes | None = None
        self.blocked_since = 0.0
        self.sent_blocked = 0
        self.head = head
        self.method = head.method
        self.start_ns = time.perf_counter_ns()
        self.deadline_ns = None if head.timeout_ns is None else self.start_ns + head.timeout_ns
        self._deadline = NEVER if head.timeout_ns is None else time.monotonic() + head.timeout_ns / 1e9
        self._last_arrival = NEVER
        self._begun = self._idle = time.monotonic()
        self._prefix = b""
        self.message: GrpcMessage | None = None
        """The message that is arriving."""
        self._inbox: deque[GrpcMessage] = deque()
        self.answering: MessageAnswer | None = None
        """What answers the present message. None without a message, and for a decoupled call."""
        self.open_answers: set[MessageAnswer] = set()
        """What answers the messages of a decoupled call."""
        self._going_on = False
        self.taken = 0
        """How many requests of the call count for its key."""
        self.ending = False
        """The present frame is the client's last on this call."""
        self.remote_closed = False
        """The client's last frame has been used."""
        self.closed = False
        self.receive_window = STREAM_WINDOW

    @property
    def transport(self) -> asyncio.Transport:
        """The client's."""
        return self._connection.transport

    # The client's bytes

    def feed(self, data: bytes | bytearray, place: int, end: int) -> int:
        """Use as much of `data[place:end]` as there is room for. Returns the index of the first unused byte."""
        message = self.message
        if message is None:
            if self.answering is not None and not self.method.streams:
                self.refuse(InvalidRequestError("a call of this method has one message"))
                return end
            taken = min(PREFIX_BYTES - len(self._prefix), end - place)
            if not self._prefix:
                self._begun = time.monotonic()
                if self.method.streams:
                    self.start_ns = time.perf_counter_ns()
            self._prefix += data[place : place + taken]
            if len(self._prefix) == PREFIX_BYTES:
                self._begin()
            return place + taken
        used = message.feed(data, place, end)
        if message.arrived == message.size:
            self._complete(message)
        return used

    def received(self, count: int) -> None:
        """`count` bytes have been written into the message."""
        message = self.message
        assert message is not None
        message.received(count)
        if message.arrived == message.size:
            self._complete(message)

    @property
    def overfull(self) -> bool:
        """Whether so many messages wait that no more should be read, although the client reads its answers."""
        count = len(self._inbox)
        if not count or self.unsent:
            return False
        return count >= MANY_WAITING or self._connection.waiting_messages >= MOST_TOGETHER

    @property
    def arriving(self) -> bool:
        """Whether the call waits for a message, or for the rest of one."""
        return self.message is not None or bool(self._prefix) or (self.answering is None and not self.method.streams)

    def remote_end(self) -> None:
        """The client sends nothing more on this call."""
        self.ending = self.remote_closed = True
        if self.closed or self.trailers is not None:
            return
        if self.message is not None or self._prefix:
            self.refuse(InvalidRequestError("the call ends inside a message"))
        elif self.method.streams:
            self.go_on()
        elif self.answering is None:
            self.refuse(InvalidRequestError("the call has no message"))

    def _begin(self) -> None:
        flag, size = self._prefix[0], int.from_bytes(self._prefix[1:], "big")
        most = self.method.max_message_bytes
        if flag > 1 or (flag and self.head.encoding == "identity"):
            wrong = InvalidRequestError("the message is compressed in a way that the call does not name")
            self.refuse(wrong, CallStatus("INTERNAL", str(wrong)))
        elif size > most and self.method.infers:
            error = TooLargeError(f"the message has {size} bytes, the server takes at most {most}")
            self.refuse(error, CallStatus("RESOURCE_EXHAUSTED", str(error)))
        elif size > most:
            self.refuse(InvalidRequestError(f"a {self.method.name}Request has at most {most} bytes, got {size}"))
        else:
            try:
                if not self.method.streams:
                    self.admit()
                self._allocate(size, compressed=bool(flag))
            except ContractError as error:
                self.refuse(error)
        self._prefix = b""  # with which a refusal counted as that of a message

    def _allocate(self, size: int, *, compressed: bool) -> None:
        """Begin to receive a message of this size. Raises `UnavailableError`."""
        self.message = message = self._server.allocate_message(self, size, compressed=compressed)
        message.start_ns = self.start_ns
        self._prefix = b""
        missing = size - self.receive_window
        if missing > 0:
            self._connection.grant(self, missing)
        if not size:
            self._complete(message)

    def admit(self) -> None:
        """Count one request more for the call's key, until the call ends, or `leave`. Raises `OverLimitError`.

        That of a call with one message is counted before its memory is taken, one of a stream when it is read, so that
        its refusal names it and the stream goes on.
        """
        if self.head.limit is not None:
            self.head.limit.take()
            self.taken += 1

    def leave(self) -> None:
        """A request of a stream has its answer."""
        if self.taken and self.head.limit is not None:
            self.taken -= 1
            self.head.limit.leave()

    def _complete(self, message: GrpcMessage) -> None:
        message.receive_ns = time.perf_counter_ns() - message.start_ns
        if not self._free and not message.hold(WAITING_BYTES):
            self.refuse(UnavailableError(HOLDS_ENOUGH))
            return
        self.message = None
        self._inbox.append(message)
        self._connection.waiting_messages += 1
        if len(self._inbox) > MOST_WAITING or (self.unsent and self._connection.waiting_messages > MOST_TOGETHER):
            self._connection.reset(self)
        self.go_on()

    def _answer(self, message: GrpcMessage) -> None:
        if self.method.streams and self.receive_window < STREAM_WINDOW // 2:
            self._connection.grant(self, STREAM_WINDOW - self.receive_window)
        answering = self._server.answering(self, message)
        if self.method.decoupled:
            self.open_answers.add(answering)
        else:
            self.answering = answering
        answering.begin()

    # The answers

    def take_turns(self, answer: Callable[[], None]) -> None:
        """Let the present message be answered when it is its connection's turn."""
        self._connection.take_turns(answer)

    def has_room(self, pieces: list[bytes]) -> bool:
        """Whether this answer may wait for the client to read it: without room the call has to fail."""
        return self.closed or self._connection.has_room(sum(map(len, pieces)))

    def answered(self, pieces: list[bytes]) -> None:
        """The present message has its answer: a message in pieces, with its prefix."""
        self.answering = None
        if self.closed:
            return
        self.leave()
        self._connection.send(self, pieces, last=not self.method.streams)
        if not self.method.streams:
            if not self.closed and self.head.limit is not None:  # its answer waits for the client
                self.head.limit.stay()
                self.taken += 1
            return
        self._idle = time.monotonic()
        self.go_on()

    def send(self, message: bytes) -> None:
        """Send a message of an open answer, with its prefix; its client may be cut off, which stops the answer."""
        if not self.closed:
            self._connection.stream(self, message)

    def end_answer(self, answer: MessageAnswer, message: bytes) -> None:
        """An open answer ends with this message."""
        self.open_answers.discard(answer)
        if not self.closed:
            self._connection.stream(self, message)
            self._idle = time.monotonic()
            self.go_on()

    def go_on(self) -> None:
        """Answer the next message, once the client has taken the last answer; end a stream behind its last message."""
        if self._going_on:  # an answer that needs no waiting calls this inside the loop
            return
        self._going_on = True
        while self._inbox and self._free:
            self._connection.waiting_messages -= 1
            self._answer(self._inbox.popleft())
        self._going_on = False
        if self.method.streams and self._free and not self.open_answers and self.trailers is None:
            if self.remote_closed:
                self._connection.finish(self, TRAILERS_OK)
            elif self._connection.stopping and not self.arriving:
                self.refuse(shutting_down())

    @property
    def _free(self) -> bool:
        """Whether nothing stands before the next message's answer."""
        if self.answering is not None or len(self.open_answers) >= MOST_ANSWERED:
            return False
        return not self.unsent and not self.closed

    @property
    def _busy(self) -> bool:
        """Whether a message is being answered."""
        return self.answering is not None or bool(self.open_answers)

    def failed(self, refusal: CallStatus) -> None:
        """The present message has no answer but an error."""
        self.answering = None
        self._connection.credit_answer()
        self.finish(refusal)

    def refuse(self, error: ContractError, status: CallStatus | None = None) -> None:
        """End the call before a whole message has come, and count that; with the error's own status unless given."""
        if self.method.infers and self.arriving:
            self._server.count_failure(error, self.start_ns)
        self.finish(status or status_of(error), failure_reason(error))

    def finish(self, refusal: CallStatus, reason: str = "invalid_request") -> None:
        """End the call with an error, which stops answers that have begun. Idempotent."""
        if not self.closed:
            self._stop_answering(reason)
            self._connection.finish(self, refusal.block(alone=not self.headers_sent))

    def close(self, reason: str = "") -> None:
        """Give back what the call holds, and stop what answers it; `reason` is why, if not that the client has left."""
        self.closed = True
        self._stop_answering(reason)
        self.drop_messages()
        self.unsent.clear()
        while self.taken:
            self.leave()

    def drop_messages(self) -> None:
        """Give back the memory of messages that will not be answered."""
        message, self.message = self.message, None
        for held in (*self._inbox, *([] if message is None else [message])):
            held.release()
        self._connection.waiting_messages -= len(self._inbox)
        self._inbox.clear()

    def cancel(self, reason: str = "") -> None:
        """The client has left the call, or does not take its answers: then `reason` says so."""
        if self.method.infers and self.message is not None and not self._busy:
            self._server.count_disconnect()
        self.close(reason)

    # Memory, as a `Receiver`

    @property
    def greedy(self) -> bool:
        """Whether many messages of its connection arrive."""
        return self._connection.arriving_messages > MANY_ARRIVING

    def late(self, now: float) -> bool:
        """Whether the message arrives more slowly than it must."""
        settings = self._server.settings
        arrived = 0 if self.message is None else self.message.arrived
        return arrived < (now - self._begun) * settings.min_body_bytes_per_s

    def make_way(self) -> None:
        """Others need the memory of the message that is arriving."""
        self.refuse(UnavailableError(HOLDS_ENOUGH))

    # Time

    def expire(self, now: float, unread_s: float, *, pressed: bool, scarce: bool) -> None:
        """End the call if its time is over; `pressed`: others wait for the room of arriving messages.

        If room is `scarce`, a client must take its answers sooner if messages wait behind them. For the last `unread_s`
        seconds the server has not read what the client sent.
        """
        settings = self._server.settings
        self._begun += unread_s
        if self.blocked_since:
            longest_s = settings.longest_s(self.sent_blocked)
            if scarce and self._inbox:
                longest_s = min(longest_s, PRESSED_S)
            if now > self.blocked_since + longest_s:
                self._connection.reset(self)
        elif now >= self._deadline:
            self.refuse(expired(), CallStatus("DEADLINE_EXCEEDED", "the call's deadline passed"))
        elif self.arriving:
            longest_s = settings.longest_s(0 if self.message is None else self.message.arrived)
            if pressed:
                longest_s = min(longest_s, PRESSED_S, settings.read_timeout_s)
            if now > self._begun + longest_s or now > self._last_arrival:
                self.refuse(RefusedError("slow_client", "the message did not arrive in time"))
        elif not self._busy and now > self._idle + settings.keep_alive_timeout_s:
            self.refuse(RefusedError("slow_client", "the next message did not arrive in time"))

    def shut_down(self) -> None:
        """The server is told to stop: end a stream that waits for its client, let everything else go on for a while."""
        if self.arriving:
            self._last_arrival = time.monotonic() + PRESSED_S
        elif not self._busy:
            self.refuse(shutting_down())

    def give_up(self) -> None:
        """The server's time to finish is over."""
        self.refuse(shutting_down())

    def _stop_answering(self, reason: str) -> None:
        answering, self.answering = self.answering, None
        answers, self.open_answers = self.open_answers, set()
        for answer in answers if answering is None else (answering,):
            answer.stop(reason)


_HEADERS_START = http2.frame_head(http2.HEADERS, http2.END_HEADERS, 0, len(http2.RESPONSE_HEADERS))[:5]
_ENDING_START = http2.frame_head(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 0, len(TRAILERS_OK))[:5]


class OutgoingMessages:
    """Sends messages and ends of calls in their order; what the client's windows do not allow yet waits."""

    def __init__(self, write: Callable[[bytes], None], end: Callable[[Call], None]) -> None:
        """`end` is called for each call whose last http2.frame is sent."""
        self._write = write
        self._end = end
        self._window = http2.DEFAULT_WINDOW
        self._max_frame = http2.DEFAULT_FRAME
        self._waiting: dict[int, Call] = {}  # only the connection's window lets them wait
        self.initial_window = http2.DEFAULT_WINDOW
        """Of a new call."""
        self.waiting_bytes = 0
        """Of messages that the client's windows do not allow yet."""

    def send(self, call: Call, pieces: Sequence[bytes | memoryview], *, last: bool) -> None:
        """Send a message with its prefix; the `last` one ends the call."""
        size = sum(map(len, pieces))
        if call.unsent or size > min(self._window, call.send_window, self._max_frame):
            if call.unsent and len(call.unsent[-1]) + size <= http2.DEFAULT_FRAME:  # many tokens take one piece
                pieces = (call.unsent.pop(), *pieces)
            if size > _JOINED_BYTES:  # a copy would double what a large answer takes
                call.unsent.extend(memoryview(piece) for piece in pieces if piece)
            else:
                call.unsent.append(memoryview(b"".join(pieces)))
            call.unsent_bytes += size
            self.waiting_bytes += size
            call.trailers = TRAILERS_OK if last else None
            self._flush(call)
            return
        self._window -= size
        call.send_window -= size
        stream = call.stream_bytes
        parts: list[bytes | memoryview] = [] if call.headers_sent else [_HEADERS_START, stream, http2.RESPONSE_HEADERS]
        parts += [http2.frame_head(http2.DATA, 0, call.stream, size), *pieces]
        if last:
            parts += [_ENDING_START, stream, TRAILERS_OK]
        call.headers_sent = True
        self._write(b"".join(parts))
        if last:
            self._end(call)

    def stream(self, call: Call, message: bytes) -> None:
        """As `send` does, for one of many short messages."""
        size = len(message)
        blocked = size > self._window or size > call.send_window or size > self._max_frame
        if blocked or call.unsent or not call.headers_sent:
            self.send(call, (message,), last=False)
            return
        self._window -= size
        call.send_window -= size
        self._write(http2.frame_head(http2.DATA, 0, call.stream, size) + message)

    def finish(self, call: Call, trailers: bytes) -> None:
        """End the call, behind the messages that still wait."""
        if call.unsent:
            call.trailers = trailers
            return
        if not call.headers_sent and trailers is TRAILERS_OK:
            self._write(http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream, http2.RESPONSE_HEADERS))
        self._write(http2.ending_frame(call.stream, trailers))
        self._end(call)

    def forget(self, call: Call) -> None:
        """The call has ended."""
        self._waiting.pop(call.stream, None)
        self.waiting_bytes -= call.unsent_bytes
        call.unsent_bytes = 0

    def set_up(self, settings: Iterable[tuple[int, int]], calls: Iterable[Call]) -> None:
        """Use the client's settings. Raises `Http2Error`."""
        before = self.initial_window
        for name, value in settings:
            if name == http2.INITIAL_WINDOW_SIZE:
                self.initial_window = value
            elif name == http2.MAX_FRAME_SIZE:
                self._max_frame = value
        more = self.initial_window - before
        if more:
            for call in calls:
                call.send_window = _widened(call.send_window, more)
                if call.unsent and call.send_window > 0:
                    self._waiting[call.stream] = call
        self._flush_all()

    def widen(self, increment: int) -> None:
        """The connection's window grows. Raises `Http2Error`."""
        self._window = _widened(self._window, increment)
        self._flush_all()

    def widen_call(self, call: Call, increment: int) -> None:
        """The call's window grows. Raises `Http2Error`."""
        call.send_window = _widened(call.send_window, increment)
        if call.unsent:
            self._flush(call)

    def _flush_all(self) -> None:
        for call in list(self._waiting.values()):
            if self._window <= 0:
                break
            self._flush(call)

    def _flush(self, call: Call) -> None:
        parts: list[bytes | memoryview] = []
        written = 0
        if not call.headers_sent:
            call.headers_sent = True
            parts.append(http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream, http2.RESPONSE_HEADERS))
        while call.unsent:
            piece = call.unsent[0]
            size = min(len(piece), self._window, call.send_window, self._max_frame)
            if size <= 0:
                break
            self._window -= size
            call.send_window -= size
            call.sent_blocked += size
            call.unsent_bytes -= size
            self.waiting_bytes -= size
            parts += [http2.frame_head(http2.DATA, 0, call.stream, size), piece[:size]]
            written += size
            if written > _JOINED_BYTES:
                self._write(b"".join(parts))
                parts, written = [], 0
            if size == len(piece):
                call.unsent.popleft()
            else:
                call.unsent[0] = piece[size:]
        if parts:
            self._write(b"".join(parts))
        if call.unsent:
            if call.send_window > 0:
                self._waiting[call.stream] = call
            else:
                self._waiting.pop(call.stream, None)
            call.blocked_since = call.blocked_since or time.monotonic()
            return
        self._waiting.pop(call.stream, None)
        call.blocked_since, call.sent_blocked = 0.0, 0
        if call.trailers is None:
            call.go_on()
        else:
            self._write(http2.ending_frame(call.stream, call.trailers))
            self._end(call)


def _widened(window: int, increment: int) -> int:
    window += increment
    if window > http2.LARGEST_WINDOW:
        raise http2.Http2Error(http2.FLOW_CONTROL_ERROR, "the window is larger than HTTP/2 allows")
    return window


_JOINED_BYTES = 2**20
"""A message with more leaves in its pieces."""


class GrpcMessage(ArrivingBytes):
    """One gRPC message, while it arrives and until its answer is sent; what receives it sets these."""

    __slots__ = ("compressed", "receive_ns", "start_ns")

    compressed: bool
    start_ns: int
    """When it began to arrive."""
    receive_ns: int
    """How long that took."""
