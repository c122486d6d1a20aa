"""A batcher with real threads, before an engine that stops where a test wants it to, with a pipeline or without."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from servers.contract.tensors import Array
from servers.engines.interface import EngineError
from servers.native.batcher import Batcher
from servers.native.entries import Entry
from servers.native.statistics import Statistics

WIDTH = 2


class Engine:
    """Echoes; waits for `gate` before each batch, and notes the batches and the very arrays that it was given.

    666 raises, 667 returns too few rows.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reached = threading.Semaphore(0)
        self.batches: list[Array] = []
        self.given: list[Array] = []
        self.closed = False
        self.checks = 0
        self.dead = False

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        self.checks += 1
        if self.dead:
            raise RuntimeError("planted: the device is lost")

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.reached.release()
        assert self.gate.wait(10)
        batch = inputs["x"].copy()
        self.given.append(inputs["x"])
        self.batches.append(batch)
        if (batch == 666).any():
            raise RuntimeError("planted")
        return {"y": batch if (batch != 667).all() else batch[1:]}

    def close(self) -> None:
        self.closed = True


class PipelinedEngine(Engine):
    """Two slots and one thread that executes them in order, as a device would. `events` tells what happened when.

    668 makes `submit` raise. A slot's memory is spoilt as soon as its batch is collected.
    """

    slots = 2

    def __init__(self, max_batch_size: int) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.staged = threading.Semaphore(0)
        self.memory = [np.full((max_batch_size, WIDTH), -1, np.float32) for _ in range(self.slots)]
        self.in_flight = [0] * self.slots
        self._jobs: queue.SimpleQueue[tuple[int, Array] | None] = queue.SimpleQueue()
        self._results: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(self.slots)]
        self._device = threading.Thread(target=self._execute)
        self._device.start()
        self.pipeline = self

    def staging(self, slot: int) -> Mapping[str, Array]:
        return {"x": self.memory[slot]}

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        assert self.in_flight == [0, 0]  # it uses slot 0
        self.memory[0][: max(batch_sizes)] = 0
        super().warm_up(batch_sizes)

    def submit(self, slot: int, count: int) -> None:
        assert not self.in_flight[slot], "the slot is still the engine's"
        if (self.memory[slot][:count] == 668).any():
            raise RuntimeError("planted")
        self.in_flight[slot] = count
        self.events.append(("submitted", count))
        self._jobs.put((slot, self.memory[slot][:count]))
        self.staged.release()

    def collect(self, slot: int) -> Mapping[str, Array]:
        result = self._results[slot].get(timeout=10)
        self.memory[slot][:] = -1
        self.events.append(("collected", self.in_flight[slot]))
        self.in_flight[slot] = 0
        if isinstance(result, Exception):
            raise EngineError("planted") from result
        return result

    def close(self) -> None:
        assert self.in_flight == [0, 0]
        self._jobs.put(None)
        self._device.join(10)
        super().close()

    def _execute(self) -> None:
        while (job := self._jobs.get()) is not None:
            slot, batch = job
            try:
                self._results[slot].put(self.infer({"x": batch}))
            except RuntimeError as error:
                self._results[slot].put(error)


class Harness:
    def __init__(
        self,
        *,
        max_batch_size: int = 8,
        delay_us: int = 0,
        queue_size: int = 1000,
        pipelined: bool = False,
        pipeline: bool = True,
    ) -> None:
        self.engine = PipelinedEngine(max_batch_size) if pipelined else Engine()
        self.statistics = Statistics(max_batch_size)
        self.calls: list[int] = []
        self.broken = threading.Semaphore(0)
        self.batcher = Batcher(
            max_batch_size=max_batch_size,
            max_queue_delay_ns=delay_us * 1000,
            queue_size=queue_size,
            statistics=self.statistics,
            on_complete=self._complete,
            on_broken=self.broken.release,
            pipeline=pipeline,
        )
        self.batcher.start(lambda: self.engine)  # type: ignore[arg-type,return-value]

    def _complete(self, entries: Sequence[Entry]) -> None:
        self.calls.append(len(entries))
        for entry in entries:
            assert isinstance(entry.token, threading.Event)
            entry.token.set()

    def submit(
        self,
        values: Sequence[float],
        deadline_ns: int | None = None,
        width: int = WIDTH,
        windows: Sequence[Any] = (),
    ) -> Entry:
        array = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
        entry = Entry({"x": array}, len(values), deadline_ns, threading.Event(), windows)
        self.batcher.submit(entry)
        return entry

    def answer(self, entry: Entry) -> list[float]:
        assert isinstance(entry.token, threading.Event)
        assert entry.token.wait(10)
        if entry.error is not None:
            raise entry.error
        assert entry.outputs is not None
        return entry.outputs["y"][:, 0].tolist()

    def occupy(self) -> Entry:
        """Send one request and wait until the engine has it and waits at the gate."""
        entry = self.submit([0])
        assert self.engine.reached.acquire(timeout=10)
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
