"""The gRPC side of the calibration's sink without the gRPC library, which costs several times what our own client does.

It understands one client, ours: requests one after the other on a connection, headers that nobody needs to read. It
skips whatever comes, counts nothing but bytes, and answers the end of each stream with the same message. NVIDIA's and
other clients are answered by the library's server beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from struct import Struct
from time import perf_counter_ns
from typing import Any

from loadgen.transport.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    WINDOW_UPDATE,
    frame_head,
    header_block,
)

_PREFACE_BYTES = 24
_FRAME = Struct(">HBBBI")
_WINDOW = 2**31 - 1
_NUMBER = Struct(">I")
_PREFIX = Struct(">BI")
_SETTING = Struct(">HI")
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_HEAD = header_block([(b":status", b"200"), (b"content-type", b"application/grpc")])
_TRAILER = header_block([(b"grpc-status", b"0")])
_RECEIVE_BYTES = 1 << 20

Send = Callable[[], None]


class Http2Sink(asyncio.BufferedProtocol):
    """One connection. `answer` is a serialised message; `whole` is told of every request that is complete, with the
    moment and with what sends its answer."""

    def __init__(self, answer: bytes, whole: Callable[[int, Send], None]) -> None:
        self._message = _PREFIX.pack(0, len(answer)) + answer
        self._whole = whole
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._head = bytearray()
        self._left = _PREFACE_BYTES
        self._kind, self._flags, self._stream = -1, 0, 0
        self._unacknowledged = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say how much may come: as much as the protocol can."""
        self._transport = transport
        settings = _SETTING.pack(_INITIAL_WINDOW_SIZE, _WINDOW) + _SETTING.pack(_MAX_FRAME_SIZE, 2**24 - 1)
        self._transport.write(
            frame_head(SETTINGS, 0, 0, len(settings)) + settings
            + frame_head(WINDOW_UPDATE, 0, 0, 4) + _NUMBER.pack(_WINDOW - 65_535)
        )  # fmt: skip

    def get_buffer(self, _sizehint: int) -> bytearray:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came: step from frame to frame."""
        place = 0
        while place < nbytes:
            if self._left:
                taken = min(self._left, nbytes - place)
                self._left -= taken
                place += taken
                if self._left:
                    return
                self._ended()
                continue
            taken = min(9 - len(self._head), nbytes - place)
            self._head += self._view[place : place + taken]
            place += taken
            if len(self._head) == 9:
                high, low, self._kind, self._flags, self._stream = _FRAME.unpack(self._head)
                self._head.clear()
                self._left = high << 8 | low
                if self._kind == DATA:
                    self._unacknowledged += self._left
                if not self._left:
                    self._ended()

    def _ended(self) -> None:
        """The frame is whole."""
        if self._kind == SETTINGS and not self._flags & ACK:
            self._transport.write(frame_head(SETTINGS, ACK, 0, 0))
        elif self._kind in (DATA, HEADERS) and self._flags & END_STREAM:
            stream = self._stream
            self._whole(perf_counter_ns(), lambda: self._answer(stream))

    def _answer(self, stream: int) -> None:
        if self._transport.is_closing():
            return
        parts = [
            frame_head(HEADERS, END_HEADERS, stream, len(_HEAD)),
            _HEAD,
            frame_head(DATA, 0, stream, len(self._message)),
            self._message,
            frame_head(HEADERS, END_HEADERS | END_STREAM, stream, len(_TRAILER)),
            _TRAILER,
        ]
        if self._unacknowledged > _WINDOW // 4:
            parts += [frame_head(WINDOW_UPDATE, 0, 0, 4), _NUMBER.pack(self._unacknowledged)]
            self._unacknowledged = 0
        self._transport.write(b"".join(parts))
