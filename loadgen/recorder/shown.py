"""Reads the connections of a server that shows their bytes itself: `abserve serve native --record`.

All processes of the server write whole messages into one socket (`servers/native/shared/recording.py`), which ends
when the last of them has ended.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

import psutil

from loadgen.recorder.grpc import GrpcTap
from loadgen.recorder.http import HttpTap
from loadgen.recorder.recorder import Observer
from loadgen.recorder.relay import Tap

_HEAD = struct.Struct("<BIIQI")
_OPENED_HTTP, _OPENED_GRPC, _SENT, _RECEIVED, _CLOSED, _LOST = range(6)
_MOST_MESSAGE = 2**18


class ShownBytes:
    """The connections at the other end of a socket, each with a tap."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._observer: Observer
        self._taps: dict[tuple[int, int], Tap] = {}
        """By process and number."""
        self._processes: set[int] = set()

    def read(self, observer: Observer) -> None:
        """Read until the server has ended, or `end` is called."""
        self._observer = observer
        message = memoryview(bytearray(_MOST_MESSAGE))
        while size := self._socket.recv_into(message):
            place = 0
            while place < size:
                kind, process, number, at_ns, count = _HEAD.unpack_from(message, place)
                start = place + _HEAD.size
                place = start + count
                self._take(kind, (process, number), bytes(message[start:place]), at_ns)

    def end(self) -> None:
        """Read no more; any thread."""
        with suppress(OSError):  # the server has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, kind: int, connection: tuple[int, int], data: bytes, at_ns: int) -> None:
        if kind in (_OPENED_HTTP, _OPENED_GRPC):
            if connection[0] not in self._processes:
                self._forget_dead(at_ns)
                self._processes.add(connection[0])
            self._taps[connection] = (HttpTap if kind == _OPENED_HTTP else GrpcTap)(self._observer)
            return
        tap = self._taps.get(connection)
        if tap is None:
            return
        try:
            if kind == _SENT:
                tap.sent(data, at_ns)
            elif kind == _RECEIVED:
                tap.received(data, at_ns)
            elif kind == _LOST:
                tap.lose()
        except Exception:  # noqa: BLE001 (this connection is not recorded, and the others are)
            kind = _CLOSED
        if kind in (_CLOSED, _LOST):
            self._close(connection, at_ns)

    def _close(self, connection: tuple[int, int], at_ns: int) -> None:
        with suppress(Exception):
            self._taps.pop(connection).closed(at_ns)

    def _forget_dead(self, at_ns: int) -> None:
        """A process that was killed has not said that its connections are closed."""
        for process in [each for each in self._processes if not psutil.pid_exists(each)]:
            self._processes.discard(process)
            for connection in [each for each in self._taps if each[0] == process]:
                self._close(connection, at_ns)
