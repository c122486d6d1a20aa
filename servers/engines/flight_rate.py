"""An engine fed as a server feeds it: requests of one item in page-locked slots, as many batches in flight as it takes.

One thread starts batches and another one finishes them, as in the native server. No server is faster with this engine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import mmap
from statistics import median
from typing import NamedTuple

import numpy as np

from servers.engines.batches import random_inputs
from servers.engines.interface import Engine, Finish
from servers.models.specification import ModelSpecification
from servers.protocol.tensors import Array

SLOT_BYTES = 2**18
"""Slots are as far apart as the smallest multiple of this that holds an item."""

MIN_BATCHES = 20


class FlightRate(NamedTuple):
    """`start_ns` and `alone_ns` are the median times of `start` and until the answers, with one batch in flight."""

    start_ns: int
    alone_ns: int
    items_per_second: float


def flight_rate(
    engine: Engine, specification: ModelSpecification, batch: int, sizes: Mapping[str, int], seconds: float
) -> FlightRate | None:
    """Measure batches of that many requests; None for an engine that takes one batch at a time."""
    if engine.flights == 1:
        return None
    with _requests_in_slots(engine, specification, batch * (engine.flights + 1), sizes) as slots:
        batches = [slots[first : first + batch] for first in range(0, len(slots), batch)]
        for requests in batches:
            engine.start(requests)()
        deadline_ns, starts, times = time.perf_counter_ns() + int(seconds * 5e8), list[int](), list[int]()
        while len(times) < MIN_BATCHES or time.perf_counter_ns() < deadline_ns:
            started_ns = time.perf_counter_ns()
            end = engine.start(batches[len(times) % len(batches)])
            starts.append(time.perf_counter_ns() - started_ns)
            end()
            times.append(time.perf_counter_ns() - started_ns)
        return FlightRate(round(median(starts)), round(median(times)), _items_per_second(engine, batches, seconds / 2))


@contextmanager
def _requests_in_slots(
    engine: Engine, specification: ModelSpecification, count: int, sizes: Mapping[str, int]
) -> Iterator[list[dict[str, Array]]]:
    """Requests of one random item each, every tensor in a slot of page-locked memory."""
    requests: list[dict[str, Array]] = [{} for _ in range(count)]
    pinned = []
    for name, array in random_inputs(specification, count, 0, sizes).items():
        stride = -(-array[0].nbytes // SLOT_BYTES) * SLOT_BYTES
        memory = np.frombuffer(mmap(-1, stride * count), np.uint8)
        for number, request in enumerate(requests):
            slot = memory[number * stride :][: array[0].nbytes].view(array.dtype).reshape(1, *array.shape[1:])
            slot[...] = array[number]
            request[name] = slot
        if engine.pin(memory.ctypes.data, memory.nbytes):
            pinned.append(memory.ctypes.data)
    try:
        yield requests
    finally:
        for address in pinned:
            engine.unpin(address)


def _items_per_second(engine: Engine, batches: Sequence[Sequence[dict[str, Array]]], seconds: float) -> float:
    free, unfinished = threading.Semaphore(engine.flights), queue.SimpleQueue[Finish | None]()
    failures: list[BaseException] = []

    def finish() -> None:
        while (end := unfinished.get()) is not None:
            try:
                end()
            except Exception as exc:  # noqa: BLE001  raised again below
                failures.append(exc)
            free.release()

    thread = threading.Thread(target=finish, name="finish")
    thread.start()
    started, started_ns = 0, time.perf_counter_ns()
    try:
        while not failures and (started < MIN_BATCHES or time.perf_counter_ns() - started_ns < seconds * 1e9):
            free.acquire()
            unfinished.put(engine.start(batches[started % len(batches)]))
            started += 1
    finally:
        unfinished.put(None)
        thread.join()
    if failures:
        raise failures[0]
    return started * len(batches[0]) / (time.perf_counter_ns() - started_ns) * 1e9
