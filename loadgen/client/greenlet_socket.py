"""A TCP socket for the users of a process that gevent has patched: it waits with less CPU than gevent's own socket.

gevent's socket reads before it waits, though a response cannot be there right after its request, and makes a new timer
object for every wait. This one waits first after it has sent, and has one timer. gevent is imported only in a process
that it has patched.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from select import POLLIN
from typing import Any

_READ, _WRITE = 1, 2
"""The events of libev's watchers."""


def is_patched() -> bool:
    """Whether gevent has replaced this process's sockets."""
    return "gevent" in sys.modules and socket.socket.__module__.startswith("gevent")


class GreenletSocket:
    """The part of a socket's interface that the clients use. One greenlet at a time; a wait past the timeout raises
    `TimeoutError`, and with a timeout of 0 nothing waits but `BlockingIOError` is raised."""

    def __init__(self, connected: Any) -> None:
        """Takes over a socket of gevent, which cannot be used afterwards."""
        import gevent
        from gevent.monkey import get_original

        self._timeout_s = float(connected.gettimeout())
        self._socket = get_original("socket", "socket")(fileno=connected.detach())
        self._socket.setblocking(False)
        self._sendmsg: Callable[[Sequence[bytes | memoryview]], int] = self._socket.sendmsg
        self._recv_into: Callable[[memoryview], int] = self._socket.recv_into
        poll = get_original("select", "poll")()
        poll.register(self._socket.fileno(), POLLIN)
        self._poll = poll.poll
        self._hub, self._current = gevent.get_hub(), gevent.getcurrent
        loop = self._hub.loop
        self._readable = loop.io(self._socket.fileno(), _READ)
        self._writable = loop.io(self._socket.fileno(), _WRITE)
        self._timer_s = self._timeout_s
        self._timer = loop.timer(self._timer_s)
        self._closed = False
        self._nothing_to_read = False
        """Whether a request was sent since the last read, so that the response has yet to come."""

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds
        if seconds not in (0.0, self._timer_s):
            self._timer.close()
            self._timer, self._timer_s = self._hub.loop.timer(seconds), seconds

    def gettimeout(self) -> float:
        return self._timeout_s

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        self._nothing_to_read = True
        while True:
            try:
                return self._sendmsg(parts)
            except BlockingIOError:
                self._wait(self._writable)

    def sendall(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self.sendmsg([left]) :]

    def recv_into(self, buffer: memoryview) -> int:
        if self._nothing_to_read and self._timeout_s:
            self._wait(self._readable)
        self._nothing_to_read = False
        while True:
            try:
                return self._recv_into(buffer)
            except BlockingIOError:
                self._wait(self._readable)

    def has_input(self) -> bool:
        """Whether there is something to read now, or the end of the stream."""
        return bool(self._poll(0))

    def close(self) -> None:
        """Idempotent; a greenlet that waits gets an `OSError`."""
        if not self._closed:
            self._closed = True
            self._timer.close()
            watchers = self._readable, self._writable
            self._hub.cancel_waits_close_and_then(watchers, ConnectionAbortedError, self._socket.close)

    def _wait(self, watcher: Any) -> None:
        if self._timeout_s == 0.0:
            raise BlockingIOError
        self._timer.start(self._current().throw, TimeoutError)
        try:
            self._hub.wait(watcher)
        finally:
            self._timer.stop()


AnySocket = socket.socket | GreenletSocket
