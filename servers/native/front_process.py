"""A front-end process: it gets connections from the supervisor and passes requests to the engines' processes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from servers.models.specification import ModelSpecification
from servers.native.arena import RequestMemory
from servers.native.engine_client import EngineClient
from servers.native.engine_pool import EnginePool
from servers.native.front_server import NativeServer
from servers.native.inference import signature_of
from servers.native.messages import CLOSED, GRPC
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics

DESCRIPTORS_AT_ONCE = 64


class FrontProcessServer(NativeServer):
    """It ends when the supervisor says so, or has gone; signals are for the supervisor."""

    def __init__(
        self,
        settings: NativeSettings,
        specifications: Sequence[ModelSpecification],
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> None:
        signatures = [signature_of(specification, settings) for specification in specifications]
        self._link: EngineClient | EnginePool
        if len(engines) == 1:
            self._link = client = EngineClient(memory, signatures, self._engine_ended)
            self._connect_engines = partial(client.open, engines[0])
        else:
            self._link = pool = EnginePool(settings.devices, memory, signatures, self._engine_ended)
            self._connect_engines = partial(pool.open, engines)
        self._supervisor = supervisor
        self._opening: set[asyncio.Task[None]] = set()
        self._unsaid = 0  # connections that have closed, of which the supervisor does not know yet
        super().__init__(settings, specifications, statistics, self._link, memory, lambda: None, self._opened)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the engines' processes first: then health checks can be answered."""
        await self._connect_engines(self.told)
        await super().startup(sockets)
        self._supervisor.setblocking(False)
        asyncio.get_running_loop().add_reader(self._supervisor, self._take)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C and process managers signal the whole group, and accepted work is finished in order."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `NativeServer`."""
        asyncio.get_running_loop().remove_reader(self._supervisor)
        await super().shutdown(sockets)
        self.models.stop()

    def _opened(self) -> None:
        task = asyncio.get_running_loop().create_task(self._link.ask("opened"))
        self._opening.add(task)

    def _engine_ended(self) -> None:
        self.models.fail()

    def on_close(self) -> None:
        """See `NativeServer`: the supervisor knows who has the fewest."""
        self._unsaid += 1
        if self._unsaid == 1:
            self._say_closed()

    def _say_closed(self) -> None:
        """Tell the supervisor of all connections that have closed, as soon as it takes that."""
        loop = asyncio.get_running_loop()
        try:
            self._unsaid -= self._supervisor.send(CLOSED * self._unsaid)
        except BlockingIOError:
            pass
        except OSError:  # it has ended
            self._unsaid = 0
        if self._unsaid:
            loop.add_writer(self._supervisor, self._say_closed)
        else:
            loop.remove_writer(self._supervisor)

    def _take(self) -> None:
        """Connections from the supervisor, or its end; some of them before others have their turn."""
        with suppress(BlockingIOError):
            for _ in range(DESCRIPTORS_AT_ONCE):
                try:
                    data, descriptors, *_ = socket.recv_fds(self._supervisor, DESCRIPTORS_AT_ONCE, DESCRIPTORS_AT_ONCE)
                except ConnectionResetError:  # it has ended without reading who has closed connections
                    data, descriptors = b"", []
                for kind, descriptor in zip(data, descriptors, strict=False):
                    self._open(socket.socket(fileno=descriptor), grpc=kind == GRPC)
                for _ in data[len(descriptors) :]:  # no descriptor was left for these: they are closed
                    self.on_close()
                if not data:
                    self.should_exit = True
                    asyncio.get_running_loop().remove_reader(self._supervisor)
                    return

    def _open(self, connection: socket.socket, *, grpc: bool) -> None:
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._accept(connection, grpc=grpc))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _accept(self, connection: socket.socket, *, grpc: bool) -> None:
        try:
            await self.accept(connection, grpc=grpc)
        except OSError:  # the client has left already
            connection.close()
            self.on_close()


def run_front_end(server: FrontProcessServer) -> int:
    """Serve until the supervisor ends it; returns the process's exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    server.run(sockets=[])
    return 0
