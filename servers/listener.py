"""Listening sockets, bound or tried before anything slow happens, so that a port in use is reported at once."""

from __future__ import annotations

import errno
import socket


class ListenerError(Exception):
    """A server cannot listen on the address; the message says what to do."""


def bind(host: str, port: int, option: str = "--http-port") -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises `ListenerError`, which names `option`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also a port in TIME_WAIT is free
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ListenerError(
                f"port {port} on {host} is taken; stop what listens there or choose another with {option}"
            ) from exc
        raise ListenerError(f"cannot listen on {host} port {port}: {exc.strerror or exc}; check --host") from exc
    return listener


def check_free(host: str, port: int, option: str) -> None:
    """Check a port that the server binds later; 0 means none. Raises `ListenerError`, which names `option`."""
    if port:
        bind(host, port, option).close()
