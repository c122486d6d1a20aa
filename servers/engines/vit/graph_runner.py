"""Batches through CUDA graphs: one graph a batch bucket and slot, pinned staging, copies beside computation.

A slot owns a pinned input, a device input, a device output and a pinned output, all of fixed address. With two slots
one batch's copies run while the other computes; the computations themselves never overlap, because they share the
module's workspace. What `collect` returns is copied out: no buffer that a graph writes is ever handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Enqueue = Callable[[Tensor, Tensor], None]
"""Enqueue one batch: pixels on the device in, embeddings written to the second tensor; no synchronisation."""


class _Slot:
    def __init__(
        self, item: tuple[int, ...], dtype: torch.dtype, width: int, images: int, device: torch.device
    ) -> None:
        self.staged_in = torch.zeros((images, *item), dtype=dtype, pin_memory=True)
        self.staged_out = torch.zeros((images, width), pin_memory=True)
        self.pixels = torch.zeros((images, *item), dtype=dtype, device=device)
        self.out = torch.zeros((images, width), device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.count = 0


class GraphRunner:
    """Runs batches of 1 to max(buckets) images; one thread at a time.

    `build(n)` returns what enqueues a batch of exactly n; it is called once a bucket, all before the first capture.
    `item` and `dtype` are of one image as it arrives; the output is FP32 [n, `width`].
    """

    def __init__(
        self,
        build: Callable[[int], Enqueue],
        *,
        item: tuple[int, ...],
        dtype: torch.dtype,
        width: int,
        buckets: Sequence[int],
        device: torch.device,
        slots: int = 2,
    ) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        self._device = device
        with torch.cuda.device(device):
            self._slots = [_Slot(item, dtype, width, self.buckets[-1], device) for _ in range(slots)]
            enqueue = {n: build(n) for n in self.buckets}
            self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
            pool = torch.cuda.graph_pool_handle()
            for n in reversed(self.buckets):  # the largest first: the others fit into its memory
                for index, slot in enumerate(self._slots):
                    self._graphs[index, n] = _capture(enqueue[n], slot.pixels[:n], slot.out[:n], pool)
            torch.cuda.synchronize(device)
        self._previous = self._slots[-1]

    def staging(self, slot: int = 0) -> npt.NDArray[np.generic]:
        """The pinned input of a slot, to be filled from the front; free until `submit`, and again after `collect`."""
        array: npt.NDArray[np.generic] = self._slots[slot].staged_in.numpy()
        return array

    def bucket(self, count: int) -> int:
        """The batch that really executes for `count` images. Raises `ValueError` beyond the largest."""
        for n in self.buckets:
            if count <= n:
                return n
        raise ValueError(f"a batch of {count} exceeds the largest bucket, {self.buckets[-1]}")

    def submit(self, count: int, slot: int = 0) -> None:
        """Start the first `count` images of the slot's staging; returns at once."""
        graph = self._graphs[slot, self.bucket(count)]
        own = self._slots[slot]
        own.count = count
        with torch.cuda.stream(own.stream):
            own.pixels[:count].copy_(own.staged_in[:count], non_blocking=True)
            if self._previous is not own:
                own.stream.wait_event(self._previous.computed)
            graph.replay()
            own.computed.record(own.stream)
            own.staged_out[:count].copy_(own.out[:count], non_blocking=True)
            own.finished.record(own.stream)
        self._previous = own

    def collect(self, slot: int = 0) -> npt.NDArray[np.float32]:
        """Wait for the slot's batch; FP32 [count, width], the caller's own."""
        own = self._slots[slot]
        own.finished.synchronize()
        result: npt.NDArray[np.float32] = own.staged_out[: own.count].numpy().copy()
        return result

    def infer(self, pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """One batch, start to end, through slot 0."""
        count = pixels.shape[0]
        self.bucket(count)
        np.copyto(self.staging()[:count], pixels, casting="no")
        self.submit(count)
        return self.collect()

    def replay_us(self, count: int, repeats: int = 50) -> list[float]:
        """Device time of `repeats` replays of the bucket of `count`, µs each, queued back to back; for benchmarks."""
        graph = self._graphs[0, self.bucket(count)]
        stream = self._slots[0].stream
        stream.wait_event(self._previous.computed)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(5):
                graph.replay()
            for begin, end in pairs:
                begin.record(stream)
                graph.replay()
                end.record(stream)
            self._slots[0].computed.record(stream)
        self._previous = self._slots[0]
        stream.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def close(self) -> None:
        """Drop graphs and buffers. Idempotent."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._slots.clear()


def _capture(enqueue: Enqueue, pixels: Tensor, out: Tensor, pool: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream(pixels.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(pixels.device))
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels and creates library handles, neither of which may happen in a capture
            enqueue(pixels, out)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        enqueue(pixels, out)
    return graph
