"""A batcher before an engine that stops where a test wants it to, and a front end with its engine in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from servers.engines.interface import Engine, EngineDescription
from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.engine.batcher import Batcher
from servers.native.engine.model_host import BuildEngine
from servers.native.engine.process import EngineSide
from servers.native.front_server import NativeServer
from servers.native.local_link import LocalLink
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.tensors import Array, TensorSpec

WIDTH = 2


def specification_of(datatype: str, width: int, output_width: int) -> ModelSpecification:
    """Rows of `width` values in, rows of `output_width` values out."""
    return ModelSpecification(
        name="m",
        title="m",
        version="1",
        inputs=(TensorSpec("x", datatype, (-1, width)),),
        outputs=(TensorSpec("y", datatype, (-1, output_width)),),
        max_batch_size=8,
        load_module=lambda _weights: None,  # type: ignore[arg-type,return-value]
    )


ROWS = specification_of("FP32", WIDTH, WIDTH)


@dataclass
class Served:
    """A front end and its engine in one process; HTTP is answered on `port`."""

    server: NativeServer
    memory: RequestMemory
    port: int


@asynccontextmanager
async def served(
    specification: ModelSpecification,
    settings: NativeSettings,
    build: BuildEngine | None = None,
    memory: RequestMemory | None = None,
) -> AsyncIterator[Served]:
    """As `serve_in_one_process` joins them, in the event loop of a test; without `build` with the null engine."""
    build = build or (lambda _: NullEngine(specification.executed, EngineSettings("null")))
    memory = memory or RequestMemory.alone(settings)
    statistics = [Statistics(settings.max_batch_size)]
    side = EngineSide(settings, [(specification, build)], statistics, memory.arena)
    link = LocalLink(side)
    server = NativeServer(settings, [specification], statistics, link, memory, lambda: None, lambda: None)
    opened = threading.Event()
    opened.set()
    link.open(server.execute)
    side.start(lambda: None, opened)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: server.http.connect(server.server_state), "127.0.0.1", 0)
    async with asyncio.timeout(20):
        while not server.models.ready:
            await asyncio.sleep(0.001)
    try:
        yield Served(server, memory, listener.sockets[0].getsockname()[1])
    finally:
        listener.close()
        server.models.stop()
        assert await asyncio.to_thread(side.stop, 10)


class GatedEngine(Engine):
    """Echoes; waits for `gate` before each batch, and notes the batches and the very arrays that it was given.

    666 raises, 667 returns too few rows.
    """

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(ROWS, EngineSettings("null", max_batch_size=max_batch_size))
        self.gate = threading.Event()
        self.reached = threading.Semaphore(0)
        self.batches: list[Array] = []
        self.given: list[Array] = []
        self.closed = False
        self.checks = 0
        self.dead = False

    def load(self) -> None:
        """Nothing to load."""

    def describe(self) -> EngineDescription:
        return self._description(version="1", precision="fp32", mode="eager", device="cpu", threads=1, details={})

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        self.checks += 1
        if self.dead:
            raise RuntimeError("planted: the device is lost")

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.reached.release()
        assert self.gate.wait(60)
        batch = inputs["x"].copy()
        self.given.append(inputs["x"])
        self.batches.append(batch)
        if (batch == 666).any():
            raise RuntimeError("planted")
        return {"y": batch if (batch != 667).all() else batch[1:]}

    def close(self) -> None:
        self.closed = True


class EngineWithMemory(GatedEngine):
    """One that has memory of its own for merged batches, as a GPU engine has."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__(max_batch_size)
        self.memory = np.full((max_batch_size, WIDTH), -1, np.float32)
        self.staging = {"x": self.memory}


class Harness:
    def __init__(
        self,
        *,
        max_batch_size: int = 8,
        delay_us: int = 0,
        queue_size: int = 1000,
        own_memory: bool = False,
        flights: int = 1,
    ) -> None:
        self.engine = EngineWithMemory(max_batch_size) if own_memory else GatedEngine(max_batch_size)
        self.engine.flights = flights
        self.statistics = Statistics(max_batch_size)
        self.calls: list[int] = []
        self.broken = threading.Semaphore(0)
        settings = NativeSettings(max_batch_size=max_batch_size, max_queue_delay_us=delay_us, queue_size=queue_size)
        self.batcher = Batcher(self.engine, settings, self.statistics, self._complete, self.broken.release)
        threading.Thread(target=self.batcher.run, daemon=True).start()

    def _complete(self, entries: Sequence[QueuedRequest]) -> None:
        self.calls.append(len(entries))
        for entry in entries:
            waiter: Any = entry.waiter
            waiter.set()

    def submit(
        self,
        values: Sequence[float],
        deadline_ns: int | None = None,
        width: int = WIDTH,
        window: Any = None,
    ) -> QueuedRequest:
        array = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
        waiter: Any = threading.Event()
        entry = QueuedRequest({"x": array}, len(values), [("x", (width,))], deadline_ns, waiter)
        entry.input_windows = {} if window is None else {"x": window}
        self.batcher.submit(entry)
        return entry

    def answer(self, entry: QueuedRequest) -> list[float]:
        waiter: Any = entry.waiter
        assert waiter.wait(60)
        if entry.error is not None:
            raise entry.error
        assert entry.outputs is not None
        return entry.outputs["y"][:, 0].tolist()

    def occupy(self) -> QueuedRequest:
        """Send one request and wait until the engine has it and waits at the gate."""
        entry = self.submit([0])
        assert self.engine.reached.acquire(timeout=60)
        return entry

    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.engine.batches]

    def stop(self) -> None:
        self.engine.gate.set()
        assert self.batcher.stop(10)
        assert self.engine.closed


@pytest.fixture(scope="session")
def harness_type() -> type[Harness]:
    return Harness


@pytest.fixture
def start_harness() -> Iterator[Callable[..., Harness]]:
    """As many as a test wants; all must come to a proper end."""
    started: list[Harness] = []

    def start(**options: Any) -> Harness:
        started.append(Harness(**options))
        return started[-1]

    yield start
    for harness in started:
        harness.stop()
