"""Batches on a CUDA device: pinned staging, copies in chunks, one CUDA graph per batch bucket.

A pinned input, a device input, a device output and a pinned output have fixed addresses. What `infer` returns is copied
out: no buffer that a graph writes is ever handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from servers.engines.batches import bucket_of

Enqueue = Callable[[Tensor, Tensor], None]
"""Enqueue one batch: pixels on the device in, embeddings written to the second tensor; no synchronisation."""

CHUNK_BYTES = 2**20
"""The host copies this much into pinned memory while the device fetches the piece before it."""


class GraphRunner:
    """Runs batches of 1 to max(buckets) images; one thread at a time.

    `build(n)` returns what enqueues a batch of exactly n; it is called once per bucket, all before the first capture.
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
        graphs: bool = True,
    ) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        images = self.buckets[-1]
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        with torch.cuda.device(device), torch.no_grad():
            self._staged_in = torch.zeros((images, *item), dtype=dtype, pin_memory=True)
            self._staged_out = torch.zeros((images, width), pin_memory=True)
            self._pixels = torch.zeros((images, *item), dtype=dtype, device=device)
            self._out = torch.zeros((images, width), device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._eager = None if graphs else build(images)
            if graphs:
                enqueue = {n: build(n) for n in self.buckets}
                pool = torch.cuda.graph_pool_handle()
                for n in reversed(self.buckets):  # the largest first: the others fit into its memory
                    self._graphs[n] = _capture(enqueue[n], self._pixels[:n], self._out[:n], pool)
            torch.cuda.synchronize(device)
        self.staging: npt.NDArray[np.generic] = self._staged_in.numpy()
        """The pinned input, to be filled from the front; free whenever no batch is executed."""

    def bucket(self, count: int) -> int:
        """The batch that really executes for `count` images. Raises `ValueError` beyond the largest."""
        executed = bucket_of(self.buckets, count)
        return executed if self._graphs else count

    def infer(self, pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """One batch; FP32 [count, width], the caller's own. Pixels that already lie in `staging` are not copied."""
        count = pixels.shape[0]
        bucket = self.bucket(count)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            if pixels.ctypes.data == self.staging.ctypes.data:
                self._pixels[:count].copy_(self._staged_in[:count], non_blocking=True)
            else:
                self._copy_in_chunks(pixels)
            self._execute(bucket)
            self._staged_out[:count].copy_(self._out[:count], non_blocking=True)
        self._stream.synchronize()
        result: npt.NDArray[np.float32] = self._staged_out[:count].numpy().copy()
        return result

    def replay_us(self, count: int, repeats: int = 50) -> list[float]:
        """Device time of `repeats` executions of the bucket of `count`, µs each, queued back to back; for benchmarks.

        They read whatever the device input holds.
        """
        bucket, stream = self.bucket(count), self._stream
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            for _ in range(5):
                self._execute(bucket)
            for begin, end in pairs:
                begin.record(stream)
                self._execute(bucket)
                end.record(stream)
        stream.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def run_only(self, count: int) -> None:
        """One execution of the bucket of `count`, without copies and waited for; on what the device input holds."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            self._execute(self.bucket(count))
        self._stream.synchronize()

    def close(self) -> None:
        """Drop graphs and buffers. Idempotent."""
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._eager = None
        self._staged_in = self._staged_out = self._pixels = self._out = torch.empty(0)
        self.staging = self._staged_in.numpy()

    def _execute(self, bucket: int) -> None:
        if self._eager is None:
            self._graphs[bucket].replay()
        else:
            self._eager(self._pixels[:bucket], self._out[:bucket])

    def _copy_in_chunks(self, pixels: npt.NDArray[np.generic]) -> None:
        rows = max(1, CHUNK_BYTES // (self.staging.nbytes // len(self.staging)))
        for start in range(0, len(pixels), rows):
            stop = min(start + rows, len(pixels))
            np.copyto(self.staging[start:stop], pixels[start:stop], casting="no")
            self._pixels[start:stop].copy_(self._staged_in[start:stop], non_blocking=True)


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
