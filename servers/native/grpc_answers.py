"""The answers of one connection on their way to the client, as far as its windows allow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from servers.native import http2_frames as http2
from servers.native.grpc_calls import RESPONSE_HEADERS, TRAILERS_OK, Call

_HEADERS_START = http2.frame_head(http2.HEADERS, http2.END_HEADERS, 0, len(RESPONSE_HEADERS))[:5]
_ENDING_START = http2.frame_head(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 0, len(TRAILERS_OK))[:5]


class Answers:
    """Sends messages and ends of calls in their order; what the client's windows do not allow yet waits."""

    def __init__(self, write: Callable[[bytes], None], end: Callable[[Call], None]) -> None:
        """`end` is called for each call whose last frame is sent."""
        self._write = write
        self._end = end
        self._window = http2.DEFAULT_WINDOW
        self._max_frame = http2.DEFAULT_FRAME
        self._waiting: dict[int, Call] = {}  # only the connection's window lets them wait
        self.initial_window = http2.DEFAULT_WINDOW
        """Of a new call."""
        self.waiting_bytes = 0
        """Of messages that the client's windows do not allow yet."""

    def send(self, call: Call, pieces: Sequence[bytes], *, last: bool) -> None:
        """Send a message with its prefix; the `last` one ends the call."""
        size = sum(map(len, pieces))
        if call.unsent or size > min(self._window, call.send_window, self._max_frame):
            call.unsent.append(memoryview(b"".join(pieces)))
            call.unsent_bytes += size
            self.waiting_bytes += size
            call.trailers = TRAILERS_OK if last else None
            self._flush(call)
            return
        self._window -= size
        call.send_window -= size
        stream = call.stream_bytes
        parts = [] if call.headers_sent else [_HEADERS_START, stream, RESPONSE_HEADERS]
        parts += [http2.frame_head(http2.DATA, 0, call.stream, size), *pieces]
        if last:
            parts += [_ENDING_START, stream, TRAILERS_OK]
        call.headers_sent = True
        self._write(b"".join(parts))
        if last:
            self._end(call)

    def finish(self, call: Call, trailers: bytes) -> None:
        """End the call, behind the messages that still wait."""
        if call.unsent:
            call.trailers = trailers
            return
        if not call.headers_sent and trailers is TRAILERS_OK:
            self._write(http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream, RESPONSE_HEADERS))
        self._write(ending_frame(call.stream, trailers))
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
        if not call.headers_sent:
            call.headers_sent = True
            parts.append(http2.frame(http2.HEADERS, http2.END_HEADERS, call.stream, RESPONSE_HEADERS))
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
            self._write(ending_frame(call.stream, call.trailers))
            self._end(call)


def ending_frame(stream: int, block: bytes) -> bytes:
    """The frame that ends a response."""
    return http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)


def _widened(window: int, increment: int) -> int:
    window += increment
    if window > http2.LARGEST_WINDOW:
        raise http2.Http2Error(http2.FLOW_CONTROL_ERROR, "the window is larger than HTTP/2 allows")
    return window
