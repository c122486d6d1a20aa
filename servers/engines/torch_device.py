"""Engines on a CUDA device through torch: device, precision, fixed buffers with CUDA graphs, and the kernel probe."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from servers.contract.tensors import Array
from servers.engines.batches import bucket_of, random_array
from servers.engines.interface import Engine, EngineError, first_line
from servers.engines.processors import cuda_index
from servers.gpu.cuda_library import device_uuid

Enqueue = Callable[[Tensor, Tensor], None]
"""Enqueue one batch: pixels on the device in, embeddings written to the second tensor; no synchronisation."""

CHUNK_BYTES = 2**20
"""The host copies this much into pinned memory while the device fetches the previous piece."""

TOP_KERNELS = 8
"""How many kernels a kernel probe lists by name."""


def resolve_device(requested: str) -> torch.device:
    """The device for `auto`, `cpu` or `cuda:N`. Raises `EngineError` where it does not exist."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    index = cuda_index(requested)
    assert index is not None  # see EngineSettings.check
    if not torch.cuda.is_available():
        raise EngineError(f"device {requested}: torch {torch.__version__} finds no CUDA device; use device cpu")
    if index >= torch.cuda.device_count():
        raise EngineError(f"device {requested}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", index)


def set_fp32_products(*, tf32: bool) -> None:
    """Use TF32 in every product and convolution of this process, or in none: torch's default lets cuDNN use it."""
    precision = "tf32" if tf32 else "ieee"
    # torch keeps its older switches beside the newer ones, and torch.export raises where they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined,unused-ignore]


def fp32_products() -> dict[str, str]:
    """The precision of FP32 products and convolutions, read back from torch."""
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "convolution": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined,unused-ignore]
    }


def device_details(device: torch.device) -> dict[str, object]:
    """The card as the description of an engine shows it."""
    details: dict[str, object] = {"cuda_build": torch.version.cuda, "cuda_available": torch.cuda.is_available()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        details |= {
            "device_name": properties.name,
            # torch's UUID has no prefix, which distinguishes a MIG instance from its GPU.
            "device_uuid": device_uuid(device.index or 0) or str(properties.uuid),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
        }
    return details


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that measure the device time between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class GraphRunner:
    """Runs batches of 1 to max(buckets) images on a CUDA device; one thread at a time.

    A pinned input, a device input, a device output and a pinned output have fixed addresses; `infer` returns a copy,
    since a later replay overwrites these buffers. `build(n)` returns the function that enqueues a batch of exactly n;
    it is called once per bucket, before the first capture. `item` and `dtype` are those of one image in a request; the
    output is FP32 [n, `width`]. Without `graphs` `build(max(buckets))` enqueues every batch at its own size, unpadded.
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
                    self._graphs[n] = capture(enqueue[n], self._pixels[:n], self._out[:n], pool)
            torch.cuda.synchronize(device)
        self.staging: npt.NDArray[np.generic] = self._staged_in.numpy()
        """The pinned input, to be filled from the front; free whenever no batch is executed."""

    def infer(self, pixels: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """Execute one batch: FP32 [n, width], the caller's own. A batch at the start of `staging` is not copied.

        Raises `ValueError` for a batch beyond the largest bucket.
        """
        count = pixels.shape[0]
        executed = self._executed(count)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            if pixels.ctypes.data == self.staging.ctypes.data:
                self._pixels[:count].copy_(self._staged_in[:count], non_blocking=True)
            else:
                self._copy_in_chunks(pixels)
            self._execute(executed)
            self._staged_out[:count].copy_(self._out[:count], non_blocking=True)
        self._stream.synchronize()
        result: npt.NDArray[np.float32] = self._staged_out[:count].numpy().copy()
        return result

    def execution_ns(self, count: int, repeats: int) -> list[int]:
        """Device times of `repeats` executions of `count` random images, without copies, queued back to back."""
        self.infer(random_array(np.random.default_rng(0), self.staging[:count].shape, self.staging.dtype))
        executed, stream = self._executed(count), self._stream
        pairs = [event_pair() for _ in range(repeats)]
        with torch.cuda.device(self._device), torch.cuda.stream(stream), torch.no_grad():
            for _ in range(5):
                self._execute(executed)
            for begin, end in pairs:
                begin.record(stream)
                self._execute(executed)
                end.record(stream)
        stream.synchronize()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in pairs]

    def run_only(self, count: int) -> None:
        """Execute the current device input once, without copies, and wait."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            self._execute(self._executed(count))
        self._stream.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._eager = None
        self._staged_in = self._staged_out = self._pixels = self._out = torch.empty(0)
        self.staging = self._staged_in.numpy()

    def _executed(self, count: int) -> int:
        """The batch size that really executes for `count` images."""
        bucket = bucket_of(self.buckets, count)
        return bucket if self._graphs else count

    def _execute(self, size: int) -> None:
        if self._eager is None:
            self._graphs[size].replay()
        else:
            self._eager(self._pixels[:size], self._out[:size])

    def _copy_in_chunks(self, pixels: npt.NDArray[np.generic]) -> None:
        rows = max(1, CHUNK_BYTES // (self.staging.nbytes // len(self.staging)))
        for start in range(0, len(pixels), rows):
            stop = min(start + rows, len(pixels))
            np.copyto(self.staging[start:stop], pixels[start:stop], casting="no")
            self._pixels[start:stop].copy_(self._staged_in[start:stop], non_blocking=True)


def capture(enqueue: Enqueue, pixels: Tensor, out: Tensor, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one `enqueue(pixels, out)`, in the memory `pool` where one is given."""
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


class RunnerEngine(Engine):
    """An engine of one image input and one vector output whose batches go through a `GraphRunner`."""

    _runner: GraphRunner | None = None
    _device: torch.device

    def _start(
        self, build: Callable[[int], Enqueue], buckets: Sequence[int], device: torch.device, *, graphs: bool = True
    ) -> GraphRunner:
        source, target = self._specification.inputs[0], self._specification.outputs[0]
        self._device = device
        self._runner = GraphRunner(
            build,
            item=source.item_shape,
            dtype=torch.uint8 if source.datatype == "UINT8" else torch.float32,
            width=target.item_shape[0],
            buckets=buckets,
            device=device,
            graphs=graphs,
        )
        return self._runner

    @property
    def staging(self) -> Mapping[str, Array]:
        return {} if self._runner is None else {self._specification.inputs[0].name: self._runner.staging}

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch; raises `ValueError` for one beyond the largest bucket."""
        if self._runner is None:
            raise self._not_loaded()
        try:
            answer = self._runner.infer(inputs[self._specification.inputs[0].name])
        except RuntimeError as exc:
            raise EngineError(f"{self._settings.kind} failed to execute the batch: {first_line(exc)}") from exc
        return {self._specification.outputs[0].name: answer}

    def execution_ns(self, rows: int, repeats: int) -> list[int] | None:
        return None if self._runner is None else self._runner.execution_ns(rows, repeats)

    def run_only(self, rows: int) -> bool:
        if self._runner is not None:
            self._runner.run_only(rows)
        return self._runner is not None

    def probe_kernels(self) -> bool:
        """Profile one inference of one row by torch's profiler, which lists every kernel of the process."""
        if (runner := self._runner) is not None:
            pixels = np.array(runner.staging[:1])
            self.kernel_probe = probe_kernels(lambda: runner.infer(pixels), self._device)
        return runner is not None

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            torch.cuda.empty_cache()

    def _not_loaded(self) -> EngineError:
        return EngineError(f"the {self._settings.kind} engine is not loaded")


def probe_kernels(infer: Callable[[], object], device: torch.device) -> dict[str, object]:
    """Profile one call of `infer`, which returns when its answer is on the host.

    `kernel_count` leaves out copies and fills; `cuda_event_seconds` is between two events around the inference. Never
    call it in a measured window: the first call loads CUPTI, which takes a second, and profiling slows launches.
    """
    begin, end = event_pair()
    with torch.cuda.device(device), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started_ns = time.perf_counter_ns()
        begin.record()
        infer()
        end.record()
        torch.cuda.synchronize(device)
        wall_ns = time.perf_counter_ns() - started_ns
    launches: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset")):
            launches[event.name].append(event.time_range.elapsed_us() / 1e6)
    kernels = [{"name": name, "count": len(times), "seconds": sum(times)} for name, times in launches.items()]
    return {
        "wall_seconds": wall_ns / 1e9,
        "cuda_event_seconds": begin.elapsed_time(end) / 1e3,
        "kernel_count": sum(map(len, launches.values())),
        "top_kernels": sorted(kernels, key=lambda kernel: -sum(launches[str(kernel["name"])]))[:TOP_KERNELS],
    }
