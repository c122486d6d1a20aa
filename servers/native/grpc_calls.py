"""gRPC calls over HTTP/2: what a call's headers say, its messages one after the other, and its status at the end."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from servers.native.errors import HOLDS_ENOUGH, SHUTTING_DOWN, ShuttingDownError, SlowClientError, grpc_status
from servers.native.http2_frames import NUMBER, header_block
from servers.native.message_memory import Message
from servers.native.settings import NativeSettings
from servers.protocol.errors import ContractError, InvalidRequestError, TooLargeError, UnavailableError

PREFIX_BYTES = 5
STREAM_WINDOW = 8 * 2**20
"""Bytes that a client may send on a call before it is told that it may send more: a batch of 32 small images fits."""
MAX_METADATA_BYTES = 16 * 1024
MAX_DETAILS = 1000
"""Characters of an error message: a client takes 8 KiB of trailers, where a character may need twelve bytes."""
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
MANY_ARRIVING = 64
"""Messages of one connection that arrive at once; more do not displace others when memory is short."""
NEVER = float("inf")

STATUS_CODES = {
    "OK": 0, "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8, "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14,
}  # fmt: skip
ENCODINGS = ("identity", "gzip", "deflate")

_FIELDS = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
RESPONSE_HEADERS = header_block(_FIELDS)
TRAILERS_OK = header_block([(b"grpc-status", b"0")])
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
LONGEST_NS = 24 * 3_600_000_000_000
"""A call's deadline is at most a day from now: eight digits of hours are beyond 64 bits of nanoseconds."""
_UNIT_NS = {b"H": 3_600_000_000_000, b"M": 60_000_000_000, b"S": 1_000_000_000, b"m": 1_000_000, b"u": 1000, b"n": 1}
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ends without having been carried out. With an HTTP status the client does not speak gRPC."""

    status: str
    details: str
    http_status: int = 200

    def block(self, *, alone: bool) -> bytes:
        """Its trailers; `alone`, they are the headers, too."""
        fields = [
            (b"grpc-status", b"%d" % STATUS_CODES[self.status]),
            (b"grpc-message", quote(shortened(self.details), safe=_PRINTABLE).encode()),
        ]
        if self.http_status != 200:
            return header_block([(b":status", b"%d" % self.http_status)])
        return header_block([*_FIELDS, *fields] if alone else fields)


def refusal_of(error: ContractError) -> Refusal:
    """The refusal that a client gets for an error."""
    return Refusal(grpc_status(error), str(error))


def shortened(details: str) -> str:
    """A message that is never too long to arrive."""
    return details if len(details) <= MAX_DETAILS else details[: MAX_DETAILS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the service; `answer` is None for the two that infer."""

    name: str
    streams: bool
    max_message_bytes: int
    answer: Any = None

    @property
    def infers(self) -> bool:
        return self.answer is None


@dataclass(frozen=True, slots=True)
class CallHead:
    """What the headers of a call say."""

    method: Method | None = None
    timeout_ns: int | None = None
    encoding: str = "identity"
    refusal: Refusal | None = None


def read_call_head(fields: list[tuple[bytes, bytes]], methods: dict[bytes, Method]) -> CallHead:
    """Read a call's headers, which are not trusted."""
    given = dict(fields)
    if sum(len(name) + len(value) + 32 for name, value in fields) > MAX_METADATA_BYTES:
        most = f"the call's metadata has more than {MAX_METADATA_BYTES} bytes"
        return CallHead(refusal=Refusal("RESOURCE_EXHAUSTED", most))
    if given.get(b":method") != b"POST":
        return CallHead(refusal=Refusal("UNIMPLEMENTED", "gRPC calls are POST requests", 405))
    if not given.get(b"content-type", b"").startswith(b"application/grpc"):
        return CallHead(refusal=Refusal("UNIMPLEMENTED", "the content type must be application/grpc", 415))
    method = methods.get(given.get(b":path", b""))
    if method is None:
        return CallHead(refusal=Refusal("UNIMPLEMENTED", "the service has no such method"))
    encoding = given.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS:
        return CallHead(refusal=Refusal("UNIMPLEMENTED", "messages may be compressed with gzip or deflate"))
    timeout = given.get(b"grpc-timeout")
    match = None if timeout is None else _TIMEOUT.fullmatch(timeout)
    if timeout is not None and match is None:
        return CallHead(refusal=Refusal("INTERNAL", "grpc-timeout must be up to eight digits and a unit"))
    timeout_ns = None if match is None else min(int(match[1]) * _UNIT_NS[match[2]], LONGEST_NS)
    return CallHead(method, timeout_ns, encoding)


class Call:
    """One call of a connection: it takes the bytes of its messages and has them answered, one at a time."""

    __slots__ = (
        "_begun", "_connection", "_deadline", "_front_end", "_going_on", "_idle", "_inbox", "_last_arrival", "_prefix",
        "answering", "blocked_since", "closed", "deadline_ns", "ending", "head", "headers_sent", "message", "method",
        "receive_window", "remote_closed", "send_window", "sent_blocked", "start_ns", "stream", "stream_bytes",
        "trailers", "unsent", "unsent_bytes",
    )  # fmt: skip

    def __init__(self, connection: Any, front_end: Any, stream: int, head: CallHead, send_window: int) -> None:
        """`connection` is a `Connection` and `front_end` a `GrpcFrontEnd`, whose modules import this one."""
        assert head.method is not None
        self._connection = connection
        self._front_end = front_end
        self.stream = stream
        self.stream_bytes = NUMBER.pack(stream)
        self.head = head
        self.method = head.method
        self.start_ns = time.perf_counter_ns()
        self.deadline_ns = None if head.timeout_ns is None else self.start_ns + head.timeout_ns
        self._deadline = NEVER if head.timeout_ns is None else time.monotonic() + head.timeout_ns / 1e9
        self._last_arrival = NEVER
        self._begun = self._idle = time.monotonic()
        self._prefix = b""
        self.message: Message | None = None
        """The message that is arriving."""
        self._inbox: deque[Message] = deque()
        self.answering: Any = None
        """What answers the present message, with a method `stop`; None while there is no message."""
        self._going_on = False
        self.ending = False
        """The present frame is the client's last on this call."""
        self.remote_closed = False
        """The client's last frame has been used."""
        self.closed = False
        self.headers_sent = False
        self.receive_window = STREAM_WINDOW
        self.send_window = send_window
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        """Messages, or their rest, that wait for the client's windows; behind them come the trailers."""
        self.trailers: bytes | None = None
        self.blocked_since = 0.0
        self.sent_blocked = 0

    # The client's bytes

    def feed(self, data: bytes | bytearray, place: int, end: int) -> int:
        """Take bytes of `data[place:end]` and return where they end; if no byte is taken, there is no room for them."""
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
        taken = min(message.space, end - place)
        if taken > 0:
            view = memoryview(data)
            message.room[message.filled : message.filled + taken] = view[place : place + taken]
            view.release()
            self.received(taken)
        return place + taken

    def received(self, count: int) -> None:
        """`count` bytes have been written into the message."""
        message = self.message
        assert message is not None
        message.received(count)
        if message.filled == message.size:
            self._complete(message)

    @property
    def overfull(self) -> bool:
        """Whether so many messages wait that no more should be read, although the client reads its answers."""
        count = len(self._inbox)
        if not count or self.unsent:
            return False
        return count >= MANY_WAITING or bool(self._connection.waiting_messages >= MOST_TOGETHER)

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
        self._prefix = b""
        most = self.method.max_message_bytes
        if flag > 1 or (flag and self.head.encoding == "identity"):
            self.finish(Refusal("INTERNAL", "the message is compressed in a way that the call does not name"))
        elif size > most and self.method.infers:
            error = TooLargeError(f"the message has {size} bytes, the server takes at most {most}")
            self._front_end.count_failure(error, self.start_ns)
            self.finish(Refusal("RESOURCE_EXHAUSTED", str(error)))
        elif size > most:
            self.refuse(InvalidRequestError(f"a {self.method.name}Request has at most {most} bytes, got {size}"))
        else:
            message = self._front_end.take(self, size, compressed=bool(flag))
            if message is None:
                self.refuse(UnavailableError(HOLDS_ENOUGH))
                return
            message.start_ns = self.start_ns
            self.message = message
            missing = size - self.receive_window
            if missing > 0:
                self._connection.grant(self, missing)
            if not size:
                self._complete(message)

    def _complete(self, message: Message) -> None:
        self.message = None
        message.receive_ns = time.perf_counter_ns() - message.start_ns
        if not self._free and not message.hold(WAITING_BYTES):
            message.release()
            self.refuse(UnavailableError(HOLDS_ENOUGH))
            return
        self._inbox.append(message)
        self._connection.waiting_messages += 1
        if len(self._inbox) > MOST_WAITING or (self.unsent and self._connection.waiting_messages > MOST_TOGETHER):
            self._connection.reset(self)
        self.go_on()

    def _answer(self, message: Message) -> None:
        if self.method.streams and self.receive_window < STREAM_WINDOW // 2:
            self._connection.grant(self, STREAM_WINDOW - self.receive_window)
        self.answering = answering = self._front_end.answering(self, message)
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
        self._connection.send(self, pieces, last=not self.method.streams)
        if not self.method.streams:
            return
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
        if self.method.streams and self.remote_closed and self._free and self.trailers is None:
            self._connection.finish(self, TRAILERS_OK)

    @property
    def _free(self) -> bool:
        """Whether nothing stands before the next message's answer."""
        return self.answering is None and not self.unsent and not self.closed

    def failed(self, refusal: Refusal) -> None:
        """The present message has no answer but an error."""
        self.answering = None
        self._connection.credit_answer()
        self.finish(refusal)

    def refuse(self, error: ContractError) -> None:
        """End the call before a whole message has come, and count that."""
        if self.method.infers and self.arriving:
            self._front_end.count_failure(error, self.start_ns)
        self.finish(refusal_of(error))

    def finish(self, refusal: Refusal) -> None:
        """End the call with an error. Idempotent."""
        if not self.closed:
            self._connection.finish(self, refusal.block(alone=not self.headers_sent))

    def close(self, reason: str = "") -> None:
        """Give back what the call holds, and stop what answers it; `reason` is why, if not that the client has left."""
        self.closed = True
        answering, self.answering = self.answering, None
        if answering is not None:
            answering.stop(reason)
        self.drop_messages()
        self.unsent.clear()

    def drop_messages(self) -> None:
        """Give back the memory of messages that will not be answered."""
        message, self.message = self.message, None
        for held in (*self._inbox, *([] if message is None else [message])):
            held.release()
        self._connection.waiting_messages -= len(self._inbox)
        self._inbox.clear()

    def cancel(self) -> None:
        """The client has left the call."""
        if self.method.infers and self.message is not None and self.answering is None:
            self._front_end.count_disconnect()
        self.close()

    # Memory, as a `Receiver`

    @property
    def greedy(self) -> bool:
        """Whether many messages of its connection arrive."""
        return bool(self._connection.arriving_messages > MANY_ARRIVING)

    def late(self, now: float) -> bool:
        """Whether the message arrives more slowly than it must."""
        settings: NativeSettings = self._front_end.settings
        arrived = 0 if self.message is None else self.message.filled
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
        settings = self._front_end.settings
        self._begun += unread_s
        if self.blocked_since:
            longest_s = settings.read_timeout_s + self.sent_blocked / settings.min_body_bytes_per_s
            if scarce and self._inbox:
                longest_s = min(longest_s, PRESSED_S)
            if now > self.blocked_since + longest_s:
                self._connection.reset(self)
        elif now >= self._deadline:
            self._stop_answering("expired")
            self.finish(Refusal("DEADLINE_EXCEEDED", "the call's deadline passed"))
        elif self.arriving:
            arrived = 0 if self.message is None else self.message.filled
            longest_s = settings.read_timeout_s + arrived / settings.min_body_bytes_per_s
            if pressed:
                longest_s = min(longest_s, PRESSED_S, settings.read_timeout_s)
            if now > self._begun + longest_s or now > self._last_arrival:
                self.refuse(SlowClientError("the message did not arrive in time"))
        elif self.answering is None and now > self._idle + settings.keep_alive_timeout_s:
            self.refuse(SlowClientError("the next message did not arrive in time"))

    def shut_down(self) -> None:
        """The server is told to stop: end a stream that waits for its client, let everything else go on for a while."""
        if self.arriving:
            self._last_arrival = time.monotonic() + PRESSED_S
        elif self.answering is None:
            self.refuse(ShuttingDownError(SHUTTING_DOWN))

    def give_up(self) -> None:
        """The server's time to finish is over."""
        self._stop_answering("shutting_down")
        self.refuse(ShuttingDownError(SHUTTING_DOWN))

    def _stop_answering(self, reason: str) -> None:
        answering, self.answering = self.answering, None
        if answering is not None:
            answering.stop(reason)
