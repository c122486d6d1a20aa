"""Free ports on the loopback interface."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports that nobody listens on now. They are free again when this returns, so use them at once."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for candidate in sockets:
            candidate.bind(("127.0.0.1", 0))
        return tuple(candidate.getsockname()[1] for candidate in sockets)
