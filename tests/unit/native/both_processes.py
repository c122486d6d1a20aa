"""The two sides of a server with a front end of its own process, over the sockets that connect them, in one process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from servers.engines.batches import bucket_sizes
from servers.engines.interface import Engine, EngineDescription
from servers.engines.settings import EngineSettings
from servers.engines.torch.runner import RunnerEngine
from servers.models.specification import ModelSpecification
from servers.native.engine.process import EngineServer
from servers.native.front.engine_link import EngineClient
from servers.native.shared.interface import (
    ApplyStatus,
    CloseRegions,
    FrontEndOpened,
    FrontEndOperation,
    ModelState,
    QueuedRequest,
    signature_of,
)
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.errors import ContractError, UnavailableError
from servers.protocol.tensors import TensorSpec
from tests.host_copies import HostCopies

HELD = 2**20
ROWS = ModelSpecification(
    name="rows",
    title="rows",
    version="1",
    inputs=(TensorSpec("x", "FP32", (-1, 4)),),
    outputs=(TensorSpec("y", "FP32", (-1, 4)),),
    max_batch_size=8,
    load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
)


class Copying(RunnerEngine):
    """Takes addresses and has two batches in flight, as an engine on a GPU."""

    def load(self) -> None:
        def execute(given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
            out[0].copy_(given[0])

        rows = bucket_sizes(self._settings.max_batch_size)
        self._start(lambda _bucket: execute, rows, torch.device("cpu"), copies=HostCopies())

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="graph", device="cpu", threads=1, details={})


class BothProcesses:
    """The engine's side in a thread and a front end's in this one, over the sockets that connect their processes."""

    def __init__(self, engine: type[Engine]) -> None:
        settings = NativeSettings(fronts=1, max_batch_size=8, max_queue_delay_us=0)
        arena = Arena(1, HELD, HELD)
        self.memory = RequestMemory(arena, ByteBudget(HELD))
        self._loop = asyncio.new_event_loop()
        supervisor, at_engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        front, back = socket.socketpair()
        self.supervisor = supervisor
        offers = [(ROWS, lambda _: engine(ROWS, EngineSettings(kind="null", max_batch_size=8)))]
        self.server = EngineServer(settings, offers, [Statistics(8)], arena, at_engine)
        self.client = EngineClient(self.memory, [signature_of(ROWS, settings)], lambda: None)
        self.ready = asyncio.Event()
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        socket.send_fds(supervisor, [b"f"], [back.fileno()])
        back.close()
        front.setblocking(False)
        self.run(self._open(front))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(work, 20))

    async def _open(self, front: socket.socket) -> None:
        async def execute(operation: FrontEndOperation) -> None:
            if isinstance(operation, ApplyStatus) and operation.models[0].state is ModelState.READY:
                self.ready.set()

        await self.client.open([front], execute)
        await self.client.control(FrontEndOpened())
        await self.ready.wait()

    @property
    def channel(self) -> Any:
        (channel,) = self.server._front_ends.channels
        return channel

    async def infer(self, value: float) -> QueuedRequest:
        array = self.memory.placed(np.full((1, 4), value, np.float32))
        complete = asyncio.Event()
        queued = QueuedRequest({"x": array}, 1, [("x", (4,))], None, lambda _queued: complete.set())
        self.client.submit(0, queued)
        await complete.wait()
        return queued

    async def check(self) -> None:
        """Several clients are answered, at most after having been asked to send it again."""

        async def honest(value: float) -> None:
            queued = await self.infer(value)
            if isinstance(queued.error, UnavailableError):
                queued = await self.infer(value)
            assert queued.error is None, queued.error
            assert queued.outputs is not None
            np.testing.assert_array_equal(queued.outputs["y"], np.full((1, 4), value))

        await asyncio.gather(*(honest(value) for value in (1.0, 2.0, 3.0)))
        with suppress(ContractError):
            await self.client.control(CloseRegions(False, ("r",)))
        assert self.thread.is_alive()

    def stop(self) -> None:
        self.supervisor.close()
        self.thread.join(60)
        self.server._supervisor.close()
        assert self.client._transport is not None
        self.client._transport.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
