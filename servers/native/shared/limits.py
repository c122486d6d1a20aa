"""What the requests of clients may cost an event loop: its time, the threads beside it, and inflated bodies."""

from __future__ import annotations

import asyncio
import mmap
import struct
import termios
import time
import zlib
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fcntl import ioctl
from typing import Any, TypeVar

from servers.protocol.errors import InvalidRequestError, TooLargeError, UnavailableError

CONTROL_BODY_BYTES = 64 * 1024
"""Largest body of a request that is not an inference: no such request needs more."""
INFLATED_STEP_BYTES = 64 * 1024
"""Compressed bodies are inflated in steps of this size, which fit into memory that the heap has anyway."""
STREAM_UNREAD_BYTES = 2**20
"""A client that leaves more of a streamed response unread is cut off; it may also leave less only for so long."""
UNREAD_S = 5.0
LEAST_TAKEN_PER_S = 2048
"""A client that in `UNREAD_S`, or `read_timeout_s` if that is less, has not taken what was sent before, must have taken
so many bytes per second."""
KEYLESS_LINGER_BYTES = 2**20
"""Bytes that are dropped of a client without a key before its connection ends."""
MAX_INFLATING = 8
"""Most compressed bodies that are inflated and parsed, or wait for that, in each front end over HTTP and over gRPC.

A connection has one request at a time.
"""

R = TypeVar("R")


class Uptake:
    """What a client takes of what it is sent, by what its system has acknowledged: this one's takes megabytes for a
    client that reads nothing."""

    __slots__ = ("_before", "_taken", "_until", "sent")

    def __init__(self) -> None:
        self.sent = 0
        """Bytes that were given to the transport."""
        self._before = 0  # of these, when the present period began
        self._taken = 0  # by then
        self._until = 0.0

    def is_late(self, transport: asyncio.Transport, now: float, read_timeout_s: float) -> bool:
        """Whether the client leaves too much unread, or takes too little of it."""
        unread = transport.get_write_buffer_size() + _unacknowledged(transport)
        if unread > STREAM_UNREAD_BYTES:
            return True
        if now < self._until:
            return False
        seconds, taken = min(UNREAD_S, read_timeout_s), self.sent - unread
        late = taken < self._before and taken - self._taken < LEAST_TAKEN_PER_S * seconds
        self._before, self._taken, self._until = self.sent, taken, now + seconds
        return late


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes in the system's send buffer, those on their way included."""
    connected = transport.get_extra_info("socket")
    with suppress(OSError, ValueError, AttributeError):
        return int(struct.unpack("i", ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    return 0


class Turns:
    """Work that waits while others have their turn: one piece after the other, for `most_ns` in each turn of the loop.
    At least one piece is done in each. Belongs to the event loop."""

    def __init__(self, most_ns: int) -> None:
        self._most_ns = most_ns
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False

    def add(self, work: Callable[[], object]) -> None:
        """Do this in a later turn, behind what waits already."""
        self._waiting.append(work)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._do)

    def _do(self) -> None:
        self._scheduled = False
        ends_ns = time.perf_counter_ns() + self._most_ns
        for _ in range(len(self._waiting)):  # what these add is for the next turn
            self._waiting.popleft()()
            if time.perf_counter_ns() >= ends_ns:
                break
        if self._waiting:
            self._schedule()


def start_task(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[Any]]) -> None:
    """Run a task, which is one of `tasks` until it has ended: a loop alone would not keep it."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., R], *arguments: object) -> R:
    """Run `work` in one of `threads`, whose queue does not keep the arguments of a cancelled caller."""
    waiting = [arguments]
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: work(*waiting.pop()))
    finally:
        waiting.clear()


class InflatingThread:
    """Inflates compressed bodies one at a time, and refuses more than `MAX_INFLATING` at once; for one event loop. One
    thread, apart from those that parse: a few compressed bytes are as much work as a megabyte of plain JSON."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "inflating")
        self._count = 0

    async def run(self, inflate: Callable[..., R], *arguments: object) -> R:
        """Call `inflate` in the thread. Raises `UnavailableError` when too many wait already."""
        if self._count >= MAX_INFLATING:
            raise UnavailableError(f"the server inflates {MAX_INFLATING} requests now; send this later or uncompressed")
        self._count += 1
        try:
            return await in_thread(self._thread, inflate, *arguments)
        finally:
            self._count -= 1


def decompress(data: memoryview, limit: int) -> memoryview:
    """Raises `TooLargeError` before more than `limit` + 1 bytes exist, `InvalidRequestError` for other formats. The
    result is in a mapping, whose pages go back to the kernel with it: zlib's own buffers come from the heap, which grew
    by their sum and kept 44 MiB after one bomb of 512 MiB."""
    decoder = zlib.decompressobj(wbits=47)  # 32 + 15: gzip or zlib, by its own header
    content = mmap.mmap(-1, 4 * INFLATED_STEP_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared cannot grow
    used = 0
    while used < len(data) and not decoder.eof:
        rest: bytes | memoryview = data[used : used + INFLATED_STEP_BYTES]
        used += len(rest)
        full = True
        while full and not decoder.eof:
            room = min(INFLATED_STEP_BYTES, limit + 1 - content.tell())
            try:
                piece = decoder.decompress(rest, room)
            except zlib.error as exc:
                raise InvalidRequestError("the body is not what its Content-Encoding says") from exc
            if content.tell() + len(piece) > len(content):
                content.resize(2 * len(content))
            content.write(piece)
            if content.tell() > limit:
                raise TooLargeError(f"the body has more than {limit} bytes after decompression, the server's limit")
            rest, full = decoder.unconsumed_tail, len(piece) == room
    if not decoder.eof:
        raise InvalidRequestError("the compressed body ends too early")
    if decoder.unused_data or used < len(data):
        raise InvalidRequestError("bytes follow the end of the compressed body")
    return memoryview(content)[: content.tell()]
