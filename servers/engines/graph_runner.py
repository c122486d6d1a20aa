"""Batches on a device over fixed memory: padded to a bucket and replayed from its CUDA graph, or in their own shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from servers.contract.tensors import Array, TensorSpec
from servers.engines.batches import Bucket, bucket_of, check_sizes, random_inputs
from servers.models.specification import ModelSpecification

TORCH_TYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""Protocol datatype → torch's; torch has none for BYTES."""

CHUNK_BYTES = 2**20
"""The host copies this much into pinned memory while the device fetches the previous piece."""

COPIED_BYTES = 2**18
"""An output up to this size is copied out of memory that stays pinned; a larger one is fetched into its own."""


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that measure the device time between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Enqueue = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Enqueue one batch: the inputs on the device in, the outputs written to the second tensors; no synchronisation."""

Build = Callable[[Bucket], Enqueue]
"""Returns the function that enqueues batches of exactly this bucket."""

Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Execute one batch of any shape: the inputs on the device in, new tensors on the device out."""


class _Memory:
    """The host and device memory of one tensor, at fixed addresses once it is large enough."""

    def __init__(self, tensor: TensorSpec, device: torch.device) -> None:
        self.tensor, self._device = tensor, device
        self._pinned = device.type == "cuda"
        self.reserve(0)

    def reserve(self, elements: int) -> None:
        dtype = TORCH_TYPES[self.tensor.datatype]
        self._host = torch.zeros(elements, dtype=dtype, pin_memory=self._pinned)
        self._on_device = torch.zeros(elements, dtype=dtype, device=self._device)

    def host(self, shape: Sequence[int]) -> Tensor:
        """The start of the host memory in this shape."""
        return self._host[: prod(shape)].view(*shape)

    def on_device(self, shape: Sequence[int]) -> Tensor:
        """The start of the device memory in this shape."""
        return self._on_device[: prod(shape)].view(*shape)

    def grow(self, shape: Sequence[int]) -> None:
        """Make room for this shape; the addresses change if there was too little."""
        if prod(shape) > len(self._host):
            self.reserve(prod(shape))


class GraphRunner:
    """Runs batches of 1 to max(rows) items on a device; one thread at a time.

    With `build` every batch is padded to its bucket, one of `rows` times one of `sizes` of the model's padded axis, and
    executed in that bucket's CUDA graph over fixed memory; the outputs are cut back. The graphs of `at_load`, default
    all `sizes`, are captured at once, the others with the first batch that needs them. With `call` every batch is
    executed in its own shape, without graphs. On the CPU, for tests, `build`'s function takes the place of a graph.

    Rows that pad a batch repeat its last row; those of a model without a padded axis hold earlier rows. Rows do not
    influence each other, and the answers of padding rows are cut off. Answers are the caller's.
    """

    def __init__(
        self,
        specification: ModelSpecification,
        device: torch.device,
        rows: Sequence[int],
        *,
        build: Build | None = None,
        call: Call | None = None,
        sizes: Sequence[int] = (),
        at_load: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.sizes = tuple(sorted(set(rows))), tuple(sorted(set(sizes)))
        self._specification, self._device = specification, device
        self._build, self._call = build, call
        self._axis = specification.padded_axis if build is not None else None
        self._on_cuda = device.type == "cuda"
        self._replays: dict[Bucket, Callable[[], object]] = {}
        self._executed: dict[int, tuple[Bucket, list[tuple[int, ...]]]] = {}
        with torch.cuda.device(device) if self._on_cuda else nullcontext(), torch.no_grad():
            self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
            self._inputs = [_Memory(tensor, device) for tensor in specification.inputs]
            self._outputs = [_Memory(tensor, device) for tensor in specification.outputs]
            self._small = [
                torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=self._on_cuda) for _ in specification.outputs
            ]
            largest = Bucket(self.rows[-1], self.sizes[-1] if self.sizes else None)
            fixed = all(-1 not in tensor.item_shape for tensor in specification.inputs)
            if build is not None or fixed:
                for memory in self._inputs:
                    memory.reserve(prod(largest.shape_of(specification, memory.tensor)))
            if build is not None:
                for memory in self._outputs:
                    memory.reserve(prod(largest.shape_of(specification, memory.tensor)))
                prepared = self.sizes if at_load is None else tuple(sorted(at_load))
                first = [Bucket(rows, size) for size in prepared or (None,) for rows in self.rows]
                enqueue = {bucket: build(bucket) for bucket in first}
                self._pool = torch.cuda.graph_pool_handle() if self._on_cuda else None
                for bucket in reversed(first):  # the largest first: the others fit into its memory
                    self._capture(bucket, enqueue[bucket])
            self._synchronise()
        self.staging: Mapping[str, Array] = (
            {
                memory.tensor.name: memory.host((self.rows[-1], *memory.tensor.item_shape)).numpy()
                for memory in self._inputs
            }
            if fixed
            else {}
        )
        """The pinned inputs, to be filled from the front; free whenever no batch is executed."""

    @property
    def captured(self) -> int:
        """The number of graphs so far."""
        return len(self._replays)

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Execute one batch. One at the start of `staging` is not copied on the host.

        Raises `ValueError` for a batch beyond the largest bucket or the largest size of an axis.
        """
        check_sizes(self._specification, inputs)
        rows = len(inputs[self._inputs[0].tensor.name])
        size = None if self._axis is None else self._axis.size_of(inputs)
        bucket = Bucket(bucket_of(self.rows, rows), None if size is None else bucket_of(self.sizes, size))
        with self._active():
            if self._build is not None and bucket not in self._replays:
                self._capture(bucket, self._build(bucket))
            given = self._copy_in(inputs, bucket)
            outputs = self._execute(bucket, given)
            fetched = [
                self._fetch(index, self._cut(memory.tensor.name, output, rows, size))
                for index, (memory, output) in enumerate(zip(self._outputs, outputs, strict=True))
            ]
        self._synchronise()
        self._executed[rows] = bucket, [tuple(tensor.shape) for tensor in given]
        return {
            memory.tensor.name: host.numpy().copy() if host.nbytes <= COPIED_BYTES else host.numpy()
            for memory, host in zip(self._outputs, fetched, strict=True)
        }

    def has_executed(self, rows: int) -> bool:
        """Whether `infer` has had a batch of `rows`, which `execution_ns` and `run_only` repeat."""
        return rows in self._executed

    def execution_ns(self, rows: int, repeats: int) -> list[int]:
        """Device times of `repeats` executions, without copies, queued back to back; on CUDA only."""
        stream, pairs = self._stream, [event_pair() for _ in range(repeats)]
        assert stream is not None
        with self._active():
            for _ in range(5):
                self._repeat(rows)
            for begin, end in pairs:
                begin.record(stream)
                self._repeat(rows)
                end.record(stream)
        self._synchronise()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in pairs]

    def run_only(self, rows: int) -> None:
        """Execute the current device inputs in the shapes of the last batch of `rows`, without copies, and wait."""
        with self._active():
            self._repeat(rows)
        self._synchronise()

    def close(self) -> None:
        self._synchronise()
        self._replays.clear()
        self._executed.clear()
        self._build = self._call = None
        self.staging = {}
        self._inputs, self._outputs, self._small = [], [], []

    @contextmanager
    def _active(self) -> Iterator[None]:
        if self._stream is None:
            with torch.no_grad():
                yield
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
                yield

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _capture(self, bucket: Bucket, enqueue: Enqueue) -> None:
        specification = self._specification
        if specification.make_items is not None:
            # As if every item were one shorter than the bucket, because a model may skip a mask that masks nothing.
            sizes = specification.along(None if bucket.size is None else max(1, bucket.size - 1))
            self._copy_in(random_inputs(specification, bucket.rows, 0, sizes), bucket)
        given, out = (
            [memory.on_device(bucket.shape_of(specification, memory.tensor)) for memory in memories]
            for memories in (self._inputs, self._outputs)
        )
        run = partial(enqueue, given, out)
        self._replays[bucket] = capture(run, self._device, self._pool).replay if self._on_cuda else run

    def _copy_in(self, inputs: Mapping[str, Array], bucket: Bucket) -> list[Tensor]:
        """The inputs on the device, in the shapes in which they execute."""
        if self._build is None:
            for memory in self._inputs:
                memory.grow(inputs[memory.tensor.name].shape)
        given = []
        for memory in self._inputs:
            array = inputs[memory.tensor.name]
            if self._axis is not None:
                target = memory.on_device(bucket.shape_of(self._specification, memory.tensor))
                target.copy_(self._padded(memory, array, bucket), non_blocking=True)
            else:
                rows = bucket.rows if self._build is not None else len(array)
                target = memory.on_device((rows, *array.shape[1:]))
                self._copy_in_chunks(array, memory.host(array.shape), target[: len(array)])
            given.append(target)
        return given

    def _padded(self, memory: _Memory, array: Array, bucket: Bucket) -> Tensor:
        """A batch padded to its bucket in host memory."""
        assert self._axis is not None
        host = memory.host(bucket.shape_of(self._specification, memory.tensor))
        filled, rows = host.numpy(), len(array)
        own = [slice(0, length) for length in array.shape]
        filled[:rows] = self._axis.padding.get(memory.tensor.name, 0)
        filled[tuple(own)] = array
        filled[rows:] = filled[rows - 1]
        return host

    def _copy_in_chunks(self, array: Array, host: Tensor, target: Tensor) -> None:
        if array.ctypes.data == host.data_ptr():
            target.copy_(host, non_blocking=True)
            return
        staged, rows = host.numpy(), max(1, CHUNK_BYTES // max(1, array.nbytes // len(array)))
        for start in range(0, len(array), rows):
            stop = min(start + rows, len(array))
            np.copyto(staged[start:stop], array[start:stop], casting="no")
            target[start:stop].copy_(host[start:stop], non_blocking=True)

    def _execute(self, bucket: Bucket, given: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._call is not None:
            return self._call(given)
        self._replays[bucket]()
        return [memory.on_device(bucket.shape_of(self._specification, memory.tensor)) for memory in self._outputs]

    def _repeat(self, rows: int) -> None:
        bucket, shapes = self._executed[rows]
        self._execute(bucket, [memory.on_device(shape) for memory, shape in zip(self._inputs, shapes, strict=True)])

    def _cut(self, name: str, output: Tensor, rows: int, size: int | None) -> Tensor:
        """An output without padding."""
        if self._build is None:
            return output
        return output[:rows] if self._axis is None or size is None else self._axis.cut(name, output[:rows], size)

    def _fetch(self, index: int, output: Tensor) -> Tensor:
        """Enqueue the copy of an output to host memory: to the runner's own if it is small, else to a new one.

        The allocator of pinned memory takes longer than a small copy, and a large copy longer than the allocator.
        """
        output = output.to(TORCH_TYPES[self._outputs[index].tensor.datatype]).contiguous()
        if output.nbytes <= COPIED_BYTES:
            host = self._small[index][: output.nbytes].view(output.dtype).view(output.shape)
        else:
            host = torch.empty(output.shape, dtype=output.dtype, pin_memory=self._on_cuda)
        return host.copy_(output, non_blocking=True)


def capture(run: Callable[[], object], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one `run()`, in the memory `pool` where one is given."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels and creates library handles, neither of which may happen in a capture
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of a server may free pinned memory during the capture, which must not break it.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph
