"""A batcher with real threads, before an engine that stops where a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from servers.contract.tensors import Array
from servers.native.batcher import Batcher, QueuedRequest
from servers.native.settings import NativeSettings
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


class EngineWithMemory(Engine):
    """One that has memory of its own for merged batches, as a GPU engine has."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__()
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
    ) -> None:
        self.engine = EngineWithMemory(max_batch_size) if own_memory else Engine()
        self.statistics = Statistics(max_batch_size)
        self.calls: list[int] = []
        self.broken = threading.Semaphore(0)
        settings = NativeSettings(max_batch_size=max_batch_size, max_queue_delay_us=delay_us, queue_size=queue_size)
        self.batcher = Batcher(settings, self.statistics, self._complete, self.broken.release)
        self.batcher.start(lambda: self.engine)  # type: ignore[arg-type,return-value]

    def _complete(self, entries: Sequence[QueuedRequest]) -> None:
        self.calls.append(len(entries))
        for entry in entries:
            assert isinstance(entry.waiter, threading.Event)
            entry.waiter.set()

    def submit(
        self,
        values: Sequence[float],
        deadline_ns: int | None = None,
        width: int = WIDTH,
        windows: Sequence[Any] = (),
    ) -> QueuedRequest:
        array = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
        entry = QueuedRequest({"x": array}, len(values), [("x", (width,))], deadline_ns, threading.Event(), windows)
        self.batcher.submit(entry)
        return entry

    def answer(self, entry: QueuedRequest) -> list[float]:
        assert isinstance(entry.waiter, threading.Event)
        assert entry.waiter.wait(10)
        if entry.error is not None:
            raise entry.error
        assert entry.outputs is not None
        return entry.outputs["y"][:, 0].tolist()

    def occupy(self) -> QueuedRequest:
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
