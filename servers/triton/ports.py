"""Whether the server's ports are free, asked before it starts: its own message names neither option nor remedy."""

from __future__ import annotations

import errno
import socket

from servers.triton.errors import PortTakenError, TritonUnavailableError


def assert_free(host: str, ports: dict[str, int]) -> None:
    """`ports`: option name, as in `--http-port`, to port. Raises `PortTakenError`, `TritonUnavailableError`."""
    options: dict[int, str] = {}
    for option, port in ports.items():
        if port in options:
            raise PortTakenError(f"{options[port]} and {option} are both {port}; give each its own port")
        options[port] = option
        _assert_free(host, port, option)


def _assert_free(host: str, port: int, option: str) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            probe.bind((host, port))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken; stop what listens there or choose another with {option}"
            ) from exc
        raise TritonUnavailableError(
            f"cannot listen on {host} port {port}: {exc.strerror or exc}; check --host"
        ) from exc
