"""The HTTP door as uvicorn wants it: a factory of protocols, one for each client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.server import ServerState

from servers.native.connection import Connection
from servers.native.http_door import HttpDoor


def protocol_factory(door: HttpDoor) -> Callable[..., Connection]:
    """What goes into `uvicorn.Config(http=…)`: it is called as a protocol class would be."""

    def connect(
        server_state: ServerState, _loop: asyncio.AbstractEventLoop | None = None, **_configuration: object
    ) -> Connection:
        door.open(server_state, _loop or asyncio.get_running_loop())
        return Connection(door)

    return connect
