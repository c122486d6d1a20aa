"""Batches on a CUDA device: pinned staging, copies beside computation, one CUDA graph a batch bucket and slot.

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

from servers.engines.buckets import bucket_of

Enqueue = Callable[[Tensor, Tensor], None]
"""Enqueue one batch: pixels on the device in, embeddings written to the second tensor; no synchronisation."""

CHUNK_BYTES = 2**20
"""The host copies this much into pinned memory while the device fetches the piece before it."""


class _Slot:
    def __init__(
        self, item: tuple[int, ...], dtype: torch.dtype, width: int, images: int, device: torch.device
    ) -> None:
        self.staged_in = torch.zeros((images, *item), dtype=dtype, pin_memory=True)
        self.staged_out = torch.zeros((images, width), pin_memory=True)
        self.array: npt.NDArray[np.generic] = self.staged_in.numpy()
        self.pixels = torch.zeros((images, *item), dtype=dtype, device=device)
        self.out = torch.zeros((images, width), device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.count = 0


class GraphRunner:
    """Runs batches of 1 to max(buckets) images; one thread at a time.

    `build(n)` returns what enqueues a batch of exactly n; it is called once a bucket, all before the first capture.
    `item` and `dtype` are of one image as it arrives; the output is FP32 [n, `width`]. Without `graphs` every batch is
    enqueued anew at its own size, unpadded, by `build(max(buckets))`.
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
        graphs: bool = True,
    ) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        self.slots = slots
        self._device = device
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        with torch.cuda.device(device), torch.no_grad():
            self._slots = [_Slot(item, dtype, width, self.buckets[-1], device) for _ in range(slots)]
            self._eager = None if graphs else build(self.buckets[-1])
            if graphs:
                enqueue = {n: build(n) for n in self.buckets}
                pool = torch.cuda.graph_pool_handle()
                for n in reversed(self.buckets):  # the largest first: the others fit into its memory
                    for index, slot in enumerate(self._slots):
                        self._graphs[index, n] = _capture(enqueue[n], slot.pixels[:n], slot.out[:n], pool)
            torch.cuda.synchronize(device)
        self._previous = self._slots[-1]

    def staging(self, slot: int = 0) -> npt.NDArray[np.generic]:
        """The pinned input of a slot, to be filled from the front; free until `submit`, and again after `collect`."""
        return self._slots[slot].array

    def bucket(self, count: int) -> int:
        """The batch that really executes for `count` images. Raises `ValueError` beyond the largest."""
        executed = bucket_of(self.buckets, count)
        return executed if self._graphs else count

    def submit(self, count: int, slot: int = 0) -> None:
        """Start the first `count` images of the slot's staging; returns at once."""
        own = self._slots[slot]
        self._start(own, slot, count, lambda: own.pixels[:count].copy_(own.staged_in[:count], non_blocking=True))

    def collect(self, slot: int = 0) -> npt.NDArray[np.float32]:
        """Wait for the slot's batch; FP32 [count, width], the caller's own."""
        own = self._slots[slot]
        own.finished.synchronize()
        result: npt.NDArray[np.float32] = own.staged_out[: own.count].numpy().copy()
        return result

    def infer(self, pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """One batch, start to end, through slot 0. Pixels that lie in its staging already are not copied again."""
        own, count = self._slots[0], pixels.shape[0]
        self.bucket(count)
        if pixels.ctypes.data == own.array.ctypes.data:
            self.submit(count)
        else:
            self._start(own, 0, count, lambda: _copy_in_chunks(pixels, own))
        return self.collect()

    def replay_us(self, count: int, repeats: int = 50) -> list[float]:
        """Device time of `repeats` executions of the bucket of `count`, µs each, queued back to back; for benchmarks.

        They read whatever the slots' device inputs hold, in turn.
        """
        bucket, stream = self.bucket(count), self._slots[0].stream
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            stream.wait_event(self._previous.computed)
            for repeat in range(5):
                self._execute(repeat % self.slots, bucket)
            for repeat, (begin, end) in enumerate(pairs):
                begin.record(stream)
                self._execute(repeat % self.slots, bucket)
                end.record(stream)
            self._slots[0].computed.record(stream)
        self._previous = self._slots[0]
        stream.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def run_only(self, count: int) -> None:
        """One execution of the bucket of `count`, without copies and waited for; on what slot 0's device input holds.

        Only while no slot is in flight.
        """
        stream = self._slots[0].stream
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            self._execute(0, self.bucket(count))
        stream.synchronize()

    def close(self) -> None:
        """Drop graphs and buffers. Idempotent."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._slots.clear()
        self._eager = None

    def _start(self, own: _Slot, slot: int, count: int, copy_in: Callable[[], object]) -> None:
        bucket = self.bucket(count)
        own.count = count
        with torch.cuda.device(self._device), torch.cuda.stream(own.stream), torch.no_grad():
            copy_in()
            if self._previous is not own:
                own.stream.wait_event(self._previous.computed)
            self._execute(slot, bucket)
            own.computed.record(own.stream)
            own.staged_out[:count].copy_(own.out[:count], non_blocking=True)
            own.finished.record(own.stream)
        self._previous = own

    def _execute(self, slot: int, bucket: int) -> None:
        if self._eager is None:
            self._graphs[slot, bucket].replay()
        else:
            own = self._slots[slot]
            self._eager(own.pixels[:bucket], own.out[:bucket])


def _copy_in_chunks(pixels: npt.NDArray[np.generic], slot: _Slot) -> None:
    rows = max(1, CHUNK_BYTES // (slot.array.nbytes // len(slot.array)))
    for start in range(0, len(pixels), rows):
        stop = min(start + rows, len(pixels))
        np.copyto(slot.array[start:stop], pixels[start:stop], casting="no")
        slot.pixels[start:stop].copy_(slot.staged_in[start:stop], non_blocking=True)


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
