"""Records the server's traffic: every front end shows the bytes of its connections to one process of `abserve record`.

That process reads the requests in them and writes the folder, as it does where it stands before a server. A front end
only copies bytes into a socket, TLS taken off, and never waits: what finds no room in `MOST_WAITING_BYTES` is counted
as not recorded, and a recorder that ends is shown nothing more. Without a recorder a connection is as it always was.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, cast

import structlog

from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.shared.tls import Front
from servers.options.command_line import flag_of, is_chosen
from servers.options.defaults import OptionError

log = structlog.get_logger("abserve.server")

HEAD = struct.Struct("<BIIQI")
"""Of each event that the recorder gets: what it is, the front end's process, its connection, when, as `perf_counter_ns`
counts, and how many bytes of the connection follow. A message has several events."""
OPENED_HTTP, OPENED_GRPC, SENT, RECEIVED, CLOSED, LOST = range(6)
"""What it is: a connection, bytes of its client, bytes for its client, its end, or that bytes of it are missing."""
PIECE_BYTES = 100_000
"""Most bytes of an event; a message with so many is sent at once, and another within `FLUSH_S`."""
MOST_PARTS = 500
FLUSH_S = 0.005
"""Waking the recorder for each event took longer than copying its bytes."""
MESSAGES_PER_TURN = 8
"""Of those that wait for the recorder, sent in one turn of the event loop."""
MOST_WAITING_BYTES = 2**26
"""Most bytes of one front end that wait for the recorder."""
LAST_S = 2.0
"""How long the end of the server waits for the recorder."""


@contextmanager
def recording(settings: NativeSettings) -> Iterator[socket.socket | None]:
    """Run `abserve record` in the block, if the settings say so: the socket to it, on which front ends show what comes.
    At the end it has written what it was shown; a disk that hangs is not waited for."""
    if settings.record is None:
        yield None
        return
    # Whole messages, so that all processes of the server can write to the same socket.
    shown, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shown.setblocking(False)
    shown.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    given = {"minutes": settings.record_minutes, "requests": settings.record_requests,
             "max-bytes": settings.record_max_bytes, "share": settings.record_share}  # fmt: skip
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "abserve", "record", "--out", str(settings.record)),
            *("--shown", str(theirs.fileno())),
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
            "--contents" if settings.record_contents else "--no-contents",
            "--answers" if settings.record_answers else "--no-answers",
        ],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # Ctrl-C is for the server, whose end it waits for
    )
    theirs.close()
    try:
        yield shown
    finally:
        shown.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_S)


def check_recording(settings: NativeSettings) -> None:
    """Raise `OptionError` if the settings record into a folder that holds a recording, or nothing is to be recorded."""
    if settings.record is None:
        for name in filter(partial(is_chosen, settings), RECORD_OPTIONS):
            raise OptionError(f"{flag_of(name)} is for a server that records: add --record FOLDER")
        return
    folder = settings.record
    if any((folder / name).exists() for name in ("traffic.json", "requests", "contents")):
        raise OptionError(f"--record {folder}: it holds recorded traffic already; give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OptionError(f"--record {folder} cannot be written: {exc.strerror}; give another folder") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"--record {folder} cannot be written by this user; give another folder")


RECORD_OPTIONS = (
    *("record_minutes", "record_requests", "record_max_bytes", "record_share"),
    *("record_contents", "record_answers"),
)


class ShownConnections:
    """All connections of one front end, and what waits for the recorder. Belongs to the event loop."""

    def __init__(self, shown: socket.socket, statistics: Statistics) -> None:
        """`statistics` count what is not recorded."""
        self._socket = shown
        self.count_missing = statistics.record_unrecorded
        self._process = os.getpid()
        self._numbers = count()
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        """The next message."""
        self._is_timed = False
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_ended = False

    def connect(self, connect: Callable[[], Any], *, grpc: bool) -> ShownConnection:
        """What receives the bytes of a new client, for its connection."""
        return ShownConnection(self, next(self._numbers), OPENED_GRPC if grpc else OPENED_HTTP, connect())

    @property
    def has_room(self) -> bool:
        """Whether more can be shown."""
        return self._waiting_bytes < MOST_WAITING_BYTES and not self._has_ended

    def show(self, kind: int, number: int, data: bytes | bytearray | memoryview = b"") -> None:
        """Show what has happened to a connection."""
        now_ns, view = time.perf_counter_ns(), memoryview(data).cast("B")
        for place in range(0, len(view) or 1, PIECE_BYTES):
            piece = bytes(view[place : place + PIECE_BYTES])
            self._parts += (HEAD.pack(kind, self._process, number, now_ns, len(piece)), piece)
            self._parts_bytes += len(piece)
            if self._parts_bytes >= PIECE_BYTES or len(self._parts) >= MOST_PARTS:
                self._send()
        if self._parts and not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._is_timed = False
        self._send()

    def _send(self) -> None:
        """Send the message, behind those that wait."""
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        if not parts or self._has_ended:
            return
        if not self._waiting:
            try:
                self._socket.sendmsg(parts)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._send_waiting)
            except OSError:
                self._end(sum(map(len, parts[1::2])))
                return
            else:
                return
        self._waiting.append(b"".join(parts))
        self._waiting_bytes += len(self._waiting[-1])

    def _send_waiting(self) -> None:
        """Send what the recorder takes, until it is the clients' turn."""
        try:
            for _ in range(MESSAGES_PER_TURN):
                if not self._waiting:
                    break
                self._socket.send(self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except BlockingIOError:
            return
        except OSError:
            self._end(self._waiting_bytes)
        if not self._waiting:
            asyncio.get_running_loop().remove_writer(self._socket)

    def _end(self, missing: int) -> None:
        """The recorder has ended, and has said why; so many bytes did not reach it."""
        if not self._has_ended:
            log.warning("requests are not recorded any more: the recorder has ended")
        self._has_ended = True
        self.count_missing(missing)
        self._waiting.clear()
        self._waiting_bytes = 0

    async def finish(self) -> None:
        """Wait until the recorder has everything, at most `LAST_S`."""
        self._send()
        ends = time.monotonic() + LAST_S
        while self._waiting and time.monotonic() < ends:
            await asyncio.sleep(0.005)


class ShownConnection(asyncio.BufferedProtocol):
    """Between a client's transport and its connection: the protocol of the one, the transport of the other."""

    def __init__(self, connections: ShownConnections, number: int, opened: int, connection: Front) -> None:
        self._connections = connections
        self._number = number
        self._opened = opened
        self._connection = connection
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # from connection_made on
        self._room: memoryview | None = None
        self._is_shown = False

    def _open(self) -> None:
        self._is_shown = self._connections.has_room
        if self._is_shown:
            self._connections.show(self._opened, self._number)

    def _show(self, kind: int, data: bytes | bytearray | memoryview) -> None:
        if self._is_shown and self._connections.has_room:
            self._connections.show(kind, self._number, data)
            return
        if self._is_shown:
            self._is_shown = False
            self._connections.show(LOST, self._number)
        self._connections.count_missing(len(data))

    # The protocol of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._open()
        self._connection.connection_made(cast("asyncio.Transport", self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._room = None
        if self._is_shown:
            self._connections.show(CLOSED, self._number)
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._room = self._connection.get_buffer(sizehint)
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        room, self._room = self._room, None  # which the connection may give back
        if room is not None:
            if not self._is_shown and self._connection.is_between:
                self._open()
            self._show(SENT, room[:nbytes])
            del room
        self._connection.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        self._room = None
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    # The transport of the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)
        self._show(RECEIVED, data)

    def writelines(self, pieces: list[bytes | bytearray | memoryview]) -> None:
        self._transport.writelines(pieces)
        for piece in pieces:
            self._show(RECEIVED, piece)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
