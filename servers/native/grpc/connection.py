"""gRPC connections: bytes to HTTP/2 frames and calls, and answers back, within limits.

The transport receives the bytes of a message straight into the memory that the engine reads. Such a read runs nine
bytes past the frame: they are the head of the next one, and the next bytes of the message replace them there. All other
bytes come through one buffer that the connections share.

A connection stops reading while there is no room for a message's bytes, while its client does not read its answers, and
when it has had its turn. Frames cost credit, more of it where they make more work, and answers, bytes and time give it
back: a client without credit (rapid resets, floods of empty frames, pings, settings or headers) is sent away.
"""

from __future__ import annotations

import asyncio
import resource
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from servers.native.front.connections import ROOM_WAIT_S, FrontConnections
from servers.native.grpc import http2
from servers.native.grpc.call import STREAM_WINDOW, Call, GrpcMessage, MessageAnswer, OutgoingMessages
from servers.native.grpc.http2 import (
    MAX_METADATA_BYTES,
    CallHead,
    CallStatus,
    GrpcMethod,
    Http2Error,
    ending_frame,
    read_call_head,
)
from servers.native.grpc.messages import MessageTemplates
from servers.native.shared.errors import HOLDS_ENOUGH, failure_reason
from servers.native.shared.keys import NO_KEY, OPEN_METHODS, Keys
from servers.native.shared.limits import KEYLESS_LINGER_BYTES, STREAM_UNREAD_BYTES, Uptake
from servers.native.shared.memory import RequestMemory, UnreadAnswers
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import RequestTimes, Statistics
from servers.protocol.errors import ContractError, UnavailableError

SCARCE_SHARE = 4
"""Room is scarce when less than 1/SCARCE_SHARE of the bytes that may be held are left."""
TURNS_NS = 2_000_000
"""What all connections together may take of one turn of the event loop, beside one read each."""

MAX_CALLS = 512
"""Calls per connection; clients queue those beyond it."""
TURN_NS = 1_000_000
"""The longest turn of one connection before the others have theirs, but for its last frame."""
FIELDS_PER_CREDIT = 16
BLOCK_BYTES_PER_CREDIT = 256
"""Fields and bytes of a header block that take as much work as another frame."""
CALLS_PER_CREDIT = 16
"""Open calls for which new settings take as much work as another frame."""
MAX_CREDIT = 4000
CREDIT_PER_ANSWER = 16
CREDIT_PER_S = 1000
CREDIT_BYTES = 64
"""Bytes of a message that give as much credit as a frame costs."""

_GREETING = http2.settings_frame(
    (
        (http2.HEADER_TABLE_SIZE, 0),  # equal header blocks then mean the same, so that each is decoded once
        (http2.MAX_CONCURRENT_STREAMS, MAX_CALLS),
        (http2.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
        (http2.MAX_FRAME_SIZE, http2.LARGEST_FRAME),
        (http2.MAX_HEADER_LIST_SIZE, MAX_METADATA_BYTES),
    )
) + http2.window_update(0, http2.LARGEST_WINDOW - http2.DEFAULT_WINDOW)
_SETTINGS_ACK = http2.frame(http2.SETTINGS, http2.ACK, 0)


class GrpcServerConnection(asyncio.BufferedProtocol):
    """One client. Belongs to the event loop."""

    def __init__(self, connections: GrpcConnections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._blocks: http2.HeaderBlocks[CallHead] = http2.HeaderBlocks(connections.read_head)
        self._unparsed = bytearray()  # read but not used yet
        self._greeted = False  # the client's preface has come
        self._settled = False  # and its settings
        self._calls: dict[int, Call] = {}
        self._last_stream = 0
        self._keyed_stream = 0  # the last call with a key, or of a server without keys
        self._keyless_bytes = 0  # dropped since then
        self._idle_since = time.monotonic()  # when the last call ended
        # The DATA frame whose content is arriving
        self._left = 0  # of its content
        self._padding = 0
        self._call: Call | None = None  # that it belongs to; None: dropped
        self._ends: Call | None = None  # that it ends
        self._direct = 0  # bytes of the present read that go straight into the message
        # The header block that is arriving
        self._block = b""
        self._block_stream = 0
        self._block_ends = False
        self._credit = MAX_CREDIT
        self._controls: deque[Callable[[], None]] = deque()  # calls that do not infer, which take turns
        self._resuming = False  # `_go_on` is going to be called
        self._unacknowledged = 0  # bytes received since the connection's window was updated
        self._answers = OutgoingMessages(self._write, self._end)
        self._unread = UnreadAnswers(connections.budget)
        self._uptake = Uptake()
        self._choked_since = 0.0  # when the client stopped reading; 0: it reads
        self._taken_before = 0  # bytes that it had taken by then
        self._cut_off = False  # because it does not read
        self._paused = False  # nothing is read from the transport
        self._room_by = 0.0  # when a message that waits for room is refused; 0: none waits
        self.stopping = False
        self.waiting_messages = 0
        """Complete messages of its calls that wait for the answers before them."""

    is_between = False
    """A connection has a state, without which its next bytes cannot be read."""

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not subclasses
        if self._connections.add(self):
            self._transport.write(_GREETING)
        else:
            self._transport.abort()

    def get_buffer(self, _sizehint: int) -> memoryview:
        """The memory for the next bytes: a message's and nine bytes more, or the shared buffer."""
        call = self._call
        if call is not None and not self._unparsed and (message := call.message) is not None:
            count = min(self._left, message.space)
            if count > 0:
                self._direct = count
                return message.room[message.arrived : message.arrived + count + http2.HEAD_BYTES]
        self._direct = 0
        return self._connections.room

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` have arrived in that memory."""
        count = self._direct
        if count:
            self._received(min(count, nbytes), nbytes)
        elif self._unparsed or self._held_up:
            self._unparsed += self._connections.room[:nbytes]
            if not self._paused:
                self._advance(self._unparsed, len(self._unparsed))
        else:
            self._advance(self._connections.scratch, nbytes)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The client or the server has closed."""
        self._connections.discard(self)
        self._unread.count(0)
        calls, self._calls = self._calls, {}
        self._call = self._ends = None
        self._blocks.forget()
        self._unparsed, self._block = bytearray(), b""
        self._controls.clear()
        for call in calls.values():
            call.cancel("slow_client" if self._cut_off else "")

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        if not self._choked_since:
            self._choked_since, self._taken_before = time.monotonic(), self._taken

    def resume_writing(self) -> None:
        """The client has caught up."""
        if not self._transport.is_closing():
            self._choked_since = 0.0
            self.has_room(0)
            self._go_on()

    # Called by the front end

    def forget_heads(self) -> None:
        """What equal headers meant is not what they mean now."""
        self._blocks.forget()

    @property
    def transport(self) -> asyncio.Transport:
        return self._transport

    def shut_down(self) -> None:
        """Take no more calls; close when those under way are answered."""
        self.stopping = True
        self._goaway(http2.NO_ERROR)
        for call in list(self._calls.values()):
            call.shut_down()
        self._close_if_done()

    def give_up(self) -> None:
        """The server ends: refuse the calls that are not answered, and close."""
        for call in list(self._calls.values()):
            call.give_up()
        self._close()

    @property
    def waits_for_room(self) -> bool:
        """Whether it has stopped reading because the budget has no room."""
        return self._room_by > 0

    @property
    def arriving_bytes(self) -> int:
        """Bytes held by messages that are not complete."""
        return sum(call.message.held for call in self._calls.values() if call.message is not None)

    @property
    def arriving_messages(self) -> int:
        """How many messages are not complete."""
        return sum(call.message is not None for call in self._calls.values())

    @property
    def starved(self) -> bool:
        """Whether the budget has no room for the next byte of a message."""
        return self._call is not None and self._call.message is not None and self._call.message.space <= 0

    def expire(self, now: float, seconds: float, *, pressed: bool, scarce: bool) -> None:
        """End what has taken too long (see `Call.expire`); `seconds` have passed since the last time."""
        settings = self._connections.settings
        self._credit = min(MAX_CREDIT, self._credit + int(CREDIT_PER_S * seconds))
        late = self._connections.streams_tokens and self._uptake.is_late(self._transport, now, settings.read_timeout_s)
        if self._choked_since and not late:
            late = now > self._choked_since + settings.longest_s(self._taken - self._taken_before)
        if late:
            self._abort()
            return
        self.has_room(0)
        for call in list(self._calls.values()):
            call.expire(now, seconds if self._paused and not pressed else 0.0, pressed=pressed, scarce=scarce)
        if self._room_by and self.starved and now > self._room_by and self._call is not None:
            self._call.refuse(UnavailableError(HOLDS_ENOUGH))
        if not self._calls and now > self._idle_since + settings.keep_alive_timeout_s:
            self._close(http2.NO_ERROR)
        elif self._paused:
            self._go_on()

    # From bytes to frames

    @property
    def _held_up(self) -> bool:
        """Whether something forbids to use more bytes; asked for every frame, so it is spelt out."""
        call = self._call
        if call is None or self._choked_since:
            return bool(self._choked_since)
        message = call.message
        return call.overfull or (message is not None and message.space <= 0)

    def _received(self, count: int, nbytes: int) -> None:
        """`count` bytes of a message and perhaps the next frame's head have arrived in the message's memory."""
        call = self._call
        assert call is not None
        message = call.message
        assert message is not None
        # Copied before the message is complete: nobody may look into its memory afterwards.
        head = bytes(message.room[message.arrived + count : message.arrived + nbytes]) if nbytes > count else b""
        self._left -= count
        call.received(count)
        if not self._left and not self._padding:
            self._end_data()
        if head:
            self._advance(head, len(head))
        elif self._held_up:
            self._pause()

    def _go_on_soon(self) -> None:
        """Go on when the other connections have had their turn."""
        if not self._resuming:
            self._resuming = True
            self._connections.turns.add(self._go_on)

    def _go_on(self) -> None:
        """Use the bytes that have been read, and read more, unless something still forbids it."""
        self._resuming = False
        if (self._unparsed or self._paused) and not self._held_up and not self._transport.is_closing():
            data, self._unparsed = self._unparsed, bytearray()
            self._advance(data, len(data))

    def _advance(self, data: bytes | bytearray, end: int) -> None:
        """Use `data[:end]` as far as possible, or until it is the other connections' turn, and keep the rest."""
        place, used, is_over = 0, -1, False
        ends_ns = time.perf_counter_ns() + TURN_NS
        try:
            if not self._greeted:
                place = self._greet(data, end)
            while self._greeted and place < end and place != used and not is_over and not self._transport.is_closing():
                if self._held_up:
                    break
                used = place
                if self._left or self._padding:
                    place = self._feed(data, place, end)
                else:
                    place = self._take_frame(data, place, end)
                is_over = time.perf_counter_ns() > ends_ns
        except Http2Error as error:
            self._close(error.code)
            return
        self._unparsed = bytearray(data[place:end]) if place < end else bytearray()
        if self._held_up or (place < end and is_over):
            self._pause()
        elif self._paused and not self._transport.is_closing():
            self._paused = False
            self._room_by = 0.0
            self._transport.resume_reading()

    def _pause(self) -> None:
        """Stop reading, until there is room or the client reads, or while other connections have their turn."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()
        if self.starved:
            self._room_by = self._room_by or time.monotonic() + ROOM_WAIT_S
        elif not self._held_up:
            self._go_on_soon()

    def _greet(self, data: bytes | bytearray, end: int) -> int:
        if not http2.PREFACE.startswith(data[: min(end, len(http2.PREFACE))]):
            raise Http2Error(http2.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        self._greeted = end >= len(http2.PREFACE)
        return len(http2.PREFACE) if self._greeted else 0

    def _take_frame(self, data: bytes | bytearray, place: int, end: int) -> int:
        """Use the frame at `place`, of a DATA frame only the head, and return where it ends; `place`: more is needed.

        Raises `Http2Error`.
        """
        start = place + http2.HEAD_BYTES
        if end < start:
            return place
        kind, flags, stream, length = http2.read_head(data, place)
        if not self._settled and (kind != http2.SETTINGS or flags & http2.ACK):
            raise Http2Error(http2.PROTOCOL_ERROR, "the client does not begin with its settings")
        if self._block_stream and (kind != http2.CONTINUATION or stream != self._block_stream):
            raise Http2Error(http2.PROTOCOL_ERROR, "a header block is not continued")
        if kind == http2.DATA:
            padding = 0
            if flags & http2.PADDED:
                if end == start:
                    return place
                padding, start = 1 + data[start], start + 1
            self._spend()
            self._begin_data(flags, stream, length, padding)
            return start
        if length > http2.MAX_BLOCK_BYTES:
            raise Http2Error(http2.FRAME_SIZE_ERROR, "the frame is too large for its type")
        if end < start + length:
            return place
        self._spend()
        self._take(kind, flags, stream, bytes(data[start : start + length]))
        return start + length

    def _spend(self, cost: int = 1) -> None:
        self._credit -= cost
        if self._credit < 0:
            raise Http2Error(http2.ENHANCE_YOUR_CALM, "the client sends too many frames that bring nothing")

    # Frames with a message's bytes

    def _begin_data(self, flags: int, stream: int, length: int, padding: int) -> None:
        if padding > length:
            raise Http2Error(http2.PROTOCOL_ERROR, "the padding is longer than the frame")
        if stream == 0 or stream > self._last_stream:
            raise Http2Error(http2.PROTOCOL_ERROR, "DATA comes without a call")
        self._credit = min(MAX_CREDIT, self._credit + length // CREDIT_BYTES)
        self._unacknowledged += length
        if self._unacknowledged > http2.LARGEST_WINDOW // 2:
            self._write(http2.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        self._left = length - padding
        self._padding = max(0, padding - 1)
        call = self._calls.get(stream)
        if call is not None:
            call.receive_window -= length
            if call.ending or call.receive_window < 0:
                raise Http2Error(http2.FLOW_CONTROL_ERROR, "DATA comes after the call's end, or beyond its window")
            call.ending = bool(flags & http2.END_STREAM)
            self._ends = call if call.ending else None
            if call.trailers is not None:  # its answer waits for the client
                call = None
        elif stream > self._keyed_stream:
            self._drop_keyless(length)
        self._call = call
        if not self._left and not self._padding:
            self._end_data()

    def _drop_keyless(self, length: int) -> None:
        """Count bytes behind the refusal of a call without a key: the connection takes no more calls, and is closed.

        Closed with bytes unread, the system takes the refusal back before the client reads it. So the client, told to
        go, may send what one call's window allows before it reads that. Raises `Http2Error`.
        """
        self._keyless_bytes += length
        if self._keyless_bytes > KEYLESS_LINGER_BYTES and not self.stopping:
            self.stopping = True
            self._goaway(http2.NO_ERROR)
        if self._keyless_bytes > KEYLESS_LINGER_BYTES + STREAM_WINDOW:
            raise Http2Error(http2.ENHANCE_YOUR_CALM, "a client without a key sends on")

    def _feed(self, data: bytes | bytearray, place: int, end: int) -> int:
        """Use content of the present DATA frame; returns where it ends."""
        if not self._left:  # only padding is left
            skipped = min(self._padding, end - place)
            self._padding -= skipped
            used = place + skipped
        else:
            used = min(place + self._left, end)
            if self._call is not None:
                used = self._call.feed(data, place, used)
            self._left -= used - place
        if not self._left and not self._padding:
            self._end_data()
        return used

    def _end_data(self) -> None:
        ends, self._ends, self._call = self._ends, None, None
        if ends is not None:
            ends.remote_end()

    # Other frames

    def _take(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        if kind == http2.HEADERS:
            self._block, self._block_stream, self._block_ends = b"", stream, bool(flags & http2.END_STREAM)
            self._take_block(flags, http2.unpadded(flags, content))
        elif kind == http2.CONTINUATION:
            if not self._block_stream or not content:
                raise Http2Error(http2.PROTOCOL_ERROR, "a header block is continued that has not begun, or by nothing")
            self._take_block(flags, content)
        elif kind == http2.SETTINGS:
            self._take_settings(flags, stream, content)
        elif kind == http2.WINDOW_UPDATE:
            self._take_window(stream, _number(content) & http2.LARGEST_WINDOW)
        elif kind == http2.PING:
            if len(content) != 8 or stream:
                raise Http2Error(http2.FRAME_SIZE_ERROR, "a ping has eight bytes and no call")
            if not flags & http2.ACK:
                self._write(http2.frame(http2.PING, http2.ACK, 0, content))
        elif kind == http2.RST_STREAM:
            _number(content)
            self._check_opened(stream)
            call = self._calls.pop(stream, None)
            if call is not None:
                call.cancel()
                self._forget(call)
        elif kind == http2.PUSH_PROMISE or (kind == http2.PRIORITY and not stream):
            raise Http2Error(http2.PROTOCOL_ERROR, "a client cannot send this")

    def _take_block(self, flags: int, content: bytes) -> None:
        self._block += content
        if len(self._block) > http2.MAX_BLOCK_BYTES:
            raise Http2Error(http2.ENHANCE_YOUR_CALM, "the headers are too many")
        if not flags & http2.END_HEADERS:
            return
        stream, self._block_stream = self._block_stream, 0
        block, self._block = self._block, b""
        head = self._blocks.read(block)  # in any case: it may change the table for the next one
        if fields := self._blocks.decoded_fields:
            self._spend(fields // FIELDS_PER_CREDIT + len(block) // BLOCK_BYTES_PER_CREDIT)
        call = self._calls.get(stream)
        if call is not None:
            if not self._block_ends:
                raise Http2Error(http2.PROTOCOL_ERROR, "a call has two headers")
            call.remote_end()
        elif stream > self._last_stream:
            self._open(stream, head)
        elif stream == 0:
            raise Http2Error(http2.PROTOCOL_ERROR, "headers come without a call")

    def _open(self, stream: int, head: CallHead) -> None:
        if not stream & 1:
            raise Http2Error(http2.PROTOCOL_ERROR, "clients open calls with odd numbers")
        self._last_stream = stream
        if not head.keyless:
            self._keyed_stream, self._keyless_bytes = stream, 0
        if self.stopping or len(self._calls) >= MAX_CALLS:
            self._write(http2.reset_frame(stream, http2.REFUSED_STREAM))
        elif head.refusal is not None:
            self._write(ending_frame(stream, head.refusal.block(alone=True)))
            if not self._block_ends:
                self._write(http2.reset_frame(stream, http2.NO_ERROR))
        else:
            self._calls[stream] = call = Call(self, self._connections, stream, head, self._answers.initial_window)
            if self._block_ends:
                call.remote_end()

    def _take_settings(self, flags: int, stream: int, content: bytes) -> None:
        if stream or (flags & http2.ACK and content):
            raise Http2Error(http2.FRAME_SIZE_ERROR, "settings belong to no call, and their acknowledgement is empty")
        if flags & http2.ACK:
            return
        self._settled = True
        self._spend(len(self._calls) // CALLS_PER_CREDIT)
        self._answers.set_up(http2.read_settings(content), self._calls.values())
        self._write(_SETTINGS_ACK)

    def _take_window(self, stream: int, increment: int) -> None:
        if not increment:
            raise Http2Error(http2.PROTOCOL_ERROR, "a window grows by nothing")
        if stream == 0:
            self._answers.widen(increment)
            return
        self._check_opened(stream)
        call = self._calls.get(stream)
        if call is not None:
            self._answers.widen_call(call, increment)

    def _check_opened(self, stream: int) -> None:
        if stream == 0 or stream > self._last_stream:
            raise Http2Error(http2.PROTOCOL_ERROR, "the call has not been opened")

    # Called by calls

    def grant(self, call: Call, increment: int) -> None:
        if not call.ending:
            call.receive_window += increment
            self._write(http2.window_update(call.stream, increment))

    def has_room(self, count: int) -> bool:
        return self._unread.count(self._transport.get_write_buffer_size() + self._answers.waiting_bytes + count)

    def send(self, call: Call, pieces: Sequence[bytes], *, last: bool) -> None:
        self.credit_answer()
        self._answers.send(call, pieces, last=last)
        if self._paused:
            self._go_on_soon()

    def stream(self, call: Call, message: bytes) -> None:
        self._credit += CREDIT_PER_ANSWER
        self._answers.stream(call, message)
        if self._choked_since:
            unread = self._transport.get_write_buffer_size()
            if unread > STREAM_UNREAD_BYTES or not self.has_room(0):
                self._abort()
        elif call.unsent and (call.unsent_bytes > STREAM_UNREAD_BYTES or not self.has_room(0)):
            self.reset(call)
        if self._paused:
            self._go_on_soon()

    def take_turns(self, answer: Callable[[], None]) -> None:
        """Answer a call that does not infer, one per turn: it may take a millisecond, and its request has no bytes."""
        self._controls.append(answer)
        if len(self._controls) == 1:
            self._connections.turns.add(self._answer_control)

    def _answer_control(self) -> None:
        if self._controls:
            self._controls.popleft()()
        if self._controls:
            self._connections.turns.add(self._answer_control)

    def credit_answer(self) -> None:
        """A message has been answered, if only by an error: it was worth its frames."""
        self._credit += CREDIT_PER_ANSWER

    def finish(self, call: Call, trailers: bytes) -> None:
        self._answers.finish(call, trailers)
        if not call.closed:  # its answers wait for the client
            call.drop_messages()
            self._drop_content(call)

    def reset(self, call: Call) -> None:
        self._write(http2.reset_frame(call.stream, http2.CANCEL))
        call.ending = True
        call.cancel("slow_client")
        self._end(call)

    def _end(self, call: Call) -> None:
        if not call.ending:
            self._write(http2.reset_frame(call.stream, http2.NO_ERROR))
        self._calls.pop(call.stream, None)
        call.close()
        self._forget(call)

    def _forget(self, call: Call) -> None:
        self._answers.forget(call)
        self._drop_content(call)
        if not self._calls:
            self._idle_since = time.monotonic()
        self._close_if_done()
        if self._paused:
            self._go_on_soon()

    def _drop_content(self, call: Call) -> None:
        """Drop what still comes of the present frame, if that is the call's."""
        if self._call is call:
            self._call = None
        if self._ends is call:
            self._ends = None

    def _abort(self) -> None:
        """Cut off a client that does not read."""
        self._cut_off = True
        self._transport.abort()

    def _close_if_done(self) -> None:
        if self.stopping and not self._calls:
            self._close()

    def _close(self, code: int | None = None) -> None:
        """Close when the client has taken everything; one that does not is cut off as if it were choked."""
        if code is not None:
            self._goaway(code)
        self.pause_writing()
        self._transport.close()

    def _goaway(self, code: int) -> None:
        self._write(http2.frame(http2.GOAWAY, 0, 0, http2.NUMBER.pack(self._last_stream) + http2.NUMBER.pack(code)))

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._uptake.sent += len(data)  # before `pause_writing` may ask
            self._transport.write(data)

    @property
    def _taken(self) -> int:
        """Bytes that the client's system and this one have taken."""
        return self._uptake.sent - self._transport.get_write_buffer_size()


def _number(content: bytes) -> int:
    if len(content) != http2.NUMBER.size:
        raise Http2Error(http2.FRAME_SIZE_ERROR, "the frame has four bytes")
    return int(http2.NUMBER.unpack(content)[0])


class GrpcConnections(FrontConnections):
    """All gRPC connections of one event loop, with the memory, the turns and the time limits that they share."""

    streams_tokens = False
    """Whether what a client does not take holds up an engine, and is never much."""

    def __init__(
        self,
        settings: NativeSettings,
        memory: RequestMemory,
        methods: Mapping[bytes, GrpcMethod],
        statistics: Statistics,
    ) -> None:
        """`methods` by path; `statistics` count what fails before a message names its model."""
        super().__init__(settings, memory, TURNS_NS)
        self.keys: Keys | None = None
        """One of which a call needs; None: it needs none."""
        self.budget = memory.budget
        self.templates = MessageTemplates()
        self._methods = methods
        self._statistics = statistics
        # Half of the process's file descriptors: the other half is left to HTTP, and so to health checks.
        self._max_connections = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._connections: set[GrpcServerConnection] = set()
        self._stopping = False
        self._all_closed = asyncio.Event()
        self._ticked = time.monotonic()

    @abstractmethod
    def answering(self, call: Call, message: GrpcMessage) -> MessageAnswer:
        """See `CallServer`."""

    def connect(self) -> GrpcServerConnection:
        """A protocol for a new client, as `loop.create_server` and `loop.connect_accepted_socket` take it."""
        return GrpcServerConnection(self)

    @property
    def connections(self) -> set[GrpcServerConnection]:
        return self._connections

    async def stop(self, seconds: float) -> None:
        """Accept no more calls; those under way have `seconds` before they are refused. Returns when all are closed."""
        self._stopping = True
        for connection in list(self._connections):
            connection.shut_down()
        try:
            async with asyncio.timeout(seconds):
                while self._connections:
                    self._all_closed.clear()
                    await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.give_up()

    # Called by connections and calls

    def add(self, connection: GrpcServerConnection) -> bool:
        """A client has connected; False if there are too many, or the server stops."""
        if self._stopping or len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        self.start_timer()
        return True

    def discard(self, connection: GrpcServerConnection) -> None:
        """A client has left."""
        self._connections.discard(connection)
        self.on_close()
        if not self._connections:
            self._all_closed.set()

    def read_head(self, fields: list[tuple[bytes, bytes]]) -> CallHead:
        """What the headers of a call say."""
        head = read_call_head(fields, self._methods)
        if self.keys is None:
            return head
        if head.method is not None and head.method.name in OPEN_METHODS:
            return replace(head, keyless=True)
        known, limit = self.keys.find([value for name, value in fields if name == b"authorization"])
        if not known:
            return CallHead(refusal=CallStatus("UNAUTHENTICATED", NO_KEY), keyless=True)
        return replace(head, limit=limit) if head.method is not None and head.method.infers else head

    def forget_heads(self) -> None:
        """Read the headers of calls anew: the keys have changed."""
        for connection in self._connections:
            connection.forget_heads()

    def allocate_message(self, call: Call, size: int, *, compressed: bool) -> GrpcMessage:
        """Memory for a call's message. Raises `UnavailableError` if none is free, even after messages that are arriving
        have been ended."""
        if size > self.budget.left:  # hardly ever
            arriving_bytes = sum(connection.arriving_bytes for connection in self._connections)
            if size > self.budget.left + arriving_bytes:
                raise UnavailableError(HOLDS_ENOUGH)
        offset = 0 if compressed else self.templates.tensor_offset(size)
        try:
            message = GrpcMessage(self.memory, call, size, aligned_at=offset, spare=http2.HEAD_BYTES)
        except MemoryError as exc:
            raise UnavailableError(HOLDS_ENOUGH) from exc
        message.compressed = compressed
        return message

    def count_failure(self, error: ContractError, start_ns: int) -> None:
        """Count an inference without a message."""
        self._statistics.record_failure(failure_reason(error), RequestTimes(start_ns))

    def count_disconnect(self) -> None:
        """Count a client that left before its message was complete."""
        self._statistics.record_disconnect()

    def expirations(self, now: float) -> list[Callable[[], None]]:
        seconds, self._ticked = now - self._ticked, now
        pressed = any(connection.waits_for_room for connection in self._connections)
        scarce = pressed or self.budget.left < self.budget.limit // SCARCE_SHARE
        return [
            partial(connection.expire, now, seconds, pressed=pressed, scarce=scarce) for connection in self._connections
        ]
