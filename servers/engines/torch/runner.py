"""Executes batches on a device over fixed memory: by the CUDA graph of a bucket, or each in its own shape.

`GraphRunner` executes, `RunnerEngine` is the engine around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from servers.engines.batches import Bucket, bucket_of, check_sizes, random_inputs, valid_inputs
from servers.engines.interface import DeviceMemory, Engine, EngineError, Finish, HostMemory, Request
from servers.engines.padding import Padding, divide, fill_rows, pad_to_text
from servers.engines.torch.copies import CudaCopies, cut_copy
from servers.gpu.cuda_library import CudaError
from servers.gpu.kernel_probe import event_pair, probe_kernels
from servers.models.specification import ModelSpecification, reason_of
from servers.options.stages import stage
from servers.protocol.errors import InvalidRequestError
from servers.protocol.tensors import Array, Axis, TensorSpec

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

COPIED_BYTES = 2**18
"""An output up to this size is copied out of memory that stays pinned; a larger one is fetched into its own.

The allocator of pinned memory takes longer than a small copy, and a large copy longer than the allocator.
"""


def new_host_bytes(size: int, *, pinned: bool) -> Array:
    """New memory of the host, page-locked for a GPU."""
    array: Array = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy()
    return array


class Memory:
    """Memory of one tensor on a device, or page-locked on the host, at a fixed address once it is large enough."""

    def __init__(self, tensor: TensorSpec, device: torch.device, *, pinned: bool = False) -> None:
        self.tensor, self._device, self._pinned = tensor, device, pinned
        self.dtype = tensor.dtype
        self.reserve((0,))

    def reserve(self, shape: Sequence[int]) -> None:
        """Replace the memory by zeros for this shape."""
        dtype = TORCH_TYPES[self.tensor.datatype]
        self._size = prod(shape)
        self._elements = torch.zeros(self._size, dtype=dtype, device=self._device, pin_memory=self._pinned)
        self.address = self._elements.data_ptr()

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether the memory is large enough for this shape."""
        return prod(shape) <= self._size

    def view(self, shape: Sequence[int]) -> Tensor:
        """The start of the memory in this shape."""
        return self._elements[: prod(shape)].view(*shape)


class Flight:
    """The memory and events of one started batch."""

    def __init__(self, specification: ModelSpecification, device: torch.device, copies: CudaCopies) -> None:
        pinned, host = device.type == "cuda", torch.device("cpu")
        self.inputs = [Memory(tensor, device) for tensor in specification.inputs]
        self.padded = [Memory(tensor, host, pinned=pinned) for tensor in specification.inputs]
        self.outputs = [Memory(tensor, device) for tensor in specification.outputs]
        self._small = [new_host_bytes(COPIED_BYTES, pinned=pinned) for _ in specification.outputs]
        self._small_addresses = [memory.ctypes.data for memory in self._small]
        self.arrived, self.executed, self.done = (copies.event() for _ in range(3))
        self.references: list[object] = []
        """Keep what the device reads alive until the batch is finished."""

    def small_array(self, index: int, shape: Sequence[int]) -> tuple[int, Array]:
        """Page-locked memory for a small output: its address, and an array of this shape over it."""
        return self._small_addresses[index], np.ndarray(shape, self.outputs[index].dtype, self._small[index])

    def merged(self, index: int, arrays: Sequence[Array], shape: Sequence[int], axis: Axis) -> tuple[int, int]:
        """Merge an input, padded to `shape`, in page-locked memory: its address and bytes. Missing rows repeat the last
        one."""
        memory = self.padded[index]
        if not memory.holds(shape):
            memory.reserve(shape)
        filled = memory.view(shape).numpy()
        rows = fill_rows(filled, arrays, memory.tensor.name, axis)
        filled[rows:] = filled[rows - 1]
        return memory.address, filled.nbytes


FLIGHTS = 2
"""Batches that may be unfinished at once: one arrives while the other one is executed."""


Enqueue = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Enqueue one batch: the inputs on the device in, the outputs written to the second tensors; no synchronisation."""

Build = Callable[[Bucket], Enqueue]
"""Returns the function that enqueues batches of exactly this bucket."""

Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Execute one batch of any shape: the inputs on the device in, new tensors on the device out."""


class _Batch(NamedTuple):
    """The requests of one batch, and what is executed for them."""

    requests: Sequence[Request]
    rows: Sequence[int]
    sizes: Sequence[int]
    """The size of each request along the padded axis; empty for a model without one."""
    padding: Padding | None
    bucket: Bucket
    outputs: Sequence[Mapping[str, DeviceMemory]]

    @property
    def axis(self) -> Axis | None:
        return None if self.padding is None else self.padding.axis


class _CapturedGraph(NamedTuple):
    """The CUDA graph of one bucket."""

    replay: Callable[[], object]
    items: Sequence[tuple[int, ...]]
    """The shape of each input, without its rows."""
    outputs: Sequence[tuple[int, tuple[int, ...]]]
    """Address and shape of each output."""


class _Fetched(NamedTuple):
    """An output in page-locked memory; `small` if that memory belongs to the flight and must be copied from."""

    name: str
    array: Array
    small: bool


class GraphRunner:
    """Runs batches of 1 to max(rows) items on a device; two may be unfinished at once.

    With `build` every batch is padded to its bucket, one of `rows` times one of `sizes` of the model's padded axis, and
    executed in that bucket's CUDA graph over fixed memory; the outputs are cut back. The graphs of `at_load`, default
    all `sizes`, are captured at once, the others with the first batch that needs them, until `prepare_no_more`. With
    `call` every batch is executed in its own shape, without graphs.

    A batch goes from the requests' own memory to its flight's memory on the device, while the batch before it is
    executed, and from there to the memory that the graph reads; or directly, if no batch is executed. Its large outputs
    go to the flight's memory before the next batch is executed, and from there to the host; small ones directly. Only
    requests that are padded are merged on the host first.

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
        copies: CudaCopies | None = None,
    ) -> None:
        """`copies` stand in for the driver's calls on a device that is not a GPU. Raises `CudaError`."""
        self.rows, self.sizes = tuple(sorted(set(rows))), tuple(sorted(set(sizes)))
        self._specification, self._device = specification, device
        self._build, self._call = build, call
        axis = specification.padded_axis if build is not None else None
        self._padding = None if axis is None else Padding(axis, self.sizes)
        self._on_cuda = device.type == "cuda"
        self._graphs: dict[Bucket, _CapturedGraph] = {}
        self._prepared: tuple[int, ...] = ()
        self._prepares = True
        self._executed: dict[int, tuple[Bucket, Flight, list[tuple[int, ...]]]] = {}
        self._incoming: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None
        with torch.cuda.device(device) if self._on_cuda else nullcontext(), torch.no_grad():
            if copies is None:
                streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
                self._incoming, self._stream, self._outgoing = streams
                copies = CudaCopies(device.index or 0, *(stream.cuda_stream for stream in streams))
            self.copies = copies
            self._inputs = [Memory(tensor, device) for tensor in specification.inputs]
            self._outputs = [Memory(tensor, device) for tensor in specification.outputs]
            flights = [Flight(specification, device, self.copies) for _ in range(FLIGHTS)]
            self._free = deque(flights)
            self._unfinished: deque[Flight] = deque()
            self._reserve(flights)
            if build is not None:
                self._prepared = self.sizes if at_load is None else tuple(sorted(at_load))
                first = [Bucket(rows, size) for size in self._prepared or (None,) for rows in self.rows]
                enqueue = {bucket: build(bucket) for bucket in first}
                self._pool = torch.cuda.graph_pool_handle() if self._on_cuda else None
                for bucket in reversed(first):  # the largest first: the others fit into its memory
                    self._capture(bucket, enqueue[bucket])  # in the stream in which `build` prepared it
            if self._on_cuda:
                torch.cuda.current_stream(device).synchronize()  # not the device: another model may capture a graph
                self.copies.synchronise()

    @property
    def takes_addresses(self) -> bool:
        """See `Engine`: False if requests are merged on the host first."""
        return self._padding is None

    def prepare_no_more(self) -> None:
        """See `Engine`. From now on the sizes of the padded axis are those of which every bucket is captured."""
        self._prepares = False
        if self._padding is not None:
            self.sizes = self._prepared
            self._padding = Padding(self._padding.axis, self.sizes)

    @property
    def captured(self) -> int:
        """The number of graphs so far."""
        return len(self._graphs)

    def infer(self, inputs: Request) -> dict[str, Array]:
        """Execute one batch and wait for it; see `start`."""
        (answer,) = self.start([inputs])()
        return answer

    def start(
        self,
        requests: Sequence[Request],
        padding: Padding | None = None,
        outputs: Sequence[Mapping[str, DeviceMemory]] = (),
    ) -> Finish:
        """Enqueue one batch; see `Engine.start`, with `CudaError` and `RuntimeError` for `EngineError`. Raises
        `ValueError` for a batch beyond the largest bucket or the largest size of an axis, for tensors that are not the
        model's, and for memory of another device or too little of it."""
        batch = self._batch(requests, padding, outputs)
        if self._build is not None and batch.bucket not in self._graphs:
            with self._active():
                self._capture(batch.bucket, self._build(batch.bucket))
        if not self._free:
            raise RuntimeError(f"{FLIGHTS} batches are unfinished, and there is no memory for another one")
        flight = self._free.popleft()
        try:
            self.copies.enter()
            direct = self._build is not None and not self._unfinished
            shapes = [self._copy_inputs(flight, index, batch, direct=direct) for index in range(len(flight.inputs))]
            fetched = self._copy_outputs(flight, self._execute(flight, batch.bucket, shapes, direct=direct), batch)
        except BaseException:
            with suppress(CudaError):  # a lost device reads nothing any more, and the next batch will fail too
                self.copies.synchronise()
            self._release(flight)
            raise
        flight.references.append(requests)
        self._unfinished.append(flight)
        return partial(self._finish, flight, batch, shapes, fetched)

    def ready(self) -> bool:
        """See `Engine.ready`; True also for a batch that has failed."""
        return not self._unfinished or self.copies.happened(self._unfinished[0].done)

    def executed_rows(self, rows: int) -> int:
        """The rows of the bucket of a batch of `rows`."""
        return rows if self._build is None else bucket_of(self.rows, rows)

    def has_executed(self, rows: int) -> bool:
        """Whether a batch of `rows` is finished, which `execution_ns` and `run_only` repeat."""
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
        self.copies.synchronise()
        return [round(begin.elapsed_time(end) * 1e6) for begin, end in pairs]

    def run_only(self, rows: int) -> None:
        """Execute the current device inputs in the shapes of the last batch of `rows`, without copies, and wait."""
        with self._active():
            self._repeat(rows)
        self.copies.synchronise()

    def close(self) -> None:
        with suppress(CudaError):  # of a lost device
            self.copies.synchronise()
            self.copies.close()
        self._graphs.clear()
        self._executed.clear()
        self._build = self._call = None
        self._free.clear()
        self._inputs, self._outputs = [], []

    @contextmanager
    def _active(self) -> Iterator[None]:
        """A block in which torch enqueues in the stream `compute`."""
        if self._stream is None:
            with torch.no_grad():
                yield
        else:
            streams = torch.cuda.device(self._device), torch.cuda.stream(self._stream)
            with self.copies.current(), streams[0], streams[1], torch.no_grad():
                yield

    def _reserve(self, flights: Sequence[Flight]) -> None:
        """Make the memory of the largest batch, where its shape is known."""
        largest = Bucket(self.rows[-1], self.sizes[-1] if self.sizes else None)
        fixed = all(-1 not in tensor.item_shape for tensor in self._specification.inputs)
        memories: list[Memory] = []
        if self._build is not None:
            memories += [*self._inputs, *self._outputs, *(memory for flight in flights for memory in flight.outputs)]
        if self._build is not None or fixed:
            memories += [memory for flight in flights for memory in flight.inputs]
        if self._padding is not None:
            memories += [memory for flight in flights for memory in flight.padded]
        for memory in memories:
            memory.reserve(largest.shape_of(self._specification, memory.tensor))

    @stage("capture")
    def _capture(self, bucket: Bucket, enqueue: Enqueue) -> None:
        specification = self._specification
        inputs, outputs = (
            [memory.view(bucket.shape_of(specification, memory.tensor)) for memory in memories]
            for memories in (self._inputs, self._outputs)
        )
        if specification.make_items is not None:
            # As if every item were one shorter than the bucket, because a model may skip a mask that masks nothing.
            sizes = specification.along(None if bucket.size is None else max(1, bucket.size - 1))
            items = random_inputs(specification, bucket.rows, 0, sizes)
            for memory, target in zip(self._inputs, inputs, strict=True):
                padded = np.empty(tuple(target.shape), memory.tensor.dtype)
                fill_rows(padded, [items[memory.tensor.name]], memory.tensor.name, self._axis)
                target.copy_(torch.from_numpy(padded))
        self._graphs[bucket] = _CapturedGraph(
            self.copies.captured(partial(enqueue, inputs, outputs), self._pool),
            [tuple(tensor.shape[1:]) for tensor in inputs],
            [(memory.address, tuple(tensor.shape)) for memory, tensor in zip(self._outputs, outputs, strict=True)],
        )

    @property
    def _axis(self) -> Axis | None:
        return None if self._padding is None else self._padding.axis

    def _batch(
        self, requests: Sequence[Request], padding: Padding | None, outputs: Sequence[Mapping[str, DeviceMemory]]
    ) -> _Batch:
        if self._specification.axes:
            for request in requests:
                check_sizes(self._specification, request)
        first = self._specification.inputs[0].name
        rows = [request[first].shape[0] for request in requests]
        padding = self._padding or padding
        sizes = [] if padding is None else [padding.axis.size_of(request) for request in requests]
        of_bucket = bucket_of(self.rows, sum(rows))
        if self._build is not None:
            if sizes and not self._prepares:
                self._check_prepared(max(sizes))
            bucket = Bucket(of_bucket, bucket_of(self.sizes, max(sizes)) if sizes else None)
        else:
            bucket = Bucket(sum(rows), None if padding is None else padding.padded_size(max(sizes)))
        return _Batch(requests, rows, sizes, padding, bucket, outputs)

    def _check_prepared(self, size: int) -> None:
        if size > self.sizes[-1]:
            assert self._padding is not None
            axis, name = self._padding.axis, self._specification.name
            raise InvalidRequestError(
                f"{name} was prepared for {axis.name} sizes up to {self.sizes[-1]}, the request has {size}, and "
                f"preparing it now would keep other requests waiting: start the server with --pad-to "
                f"{pad_to_text([*self.sizes, size])}"
            )

    def _copy_inputs(self, flight: Flight, index: int, batch: _Batch, *, direct: bool) -> tuple[int, ...]:
        """Enqueue the copies of an input to the flight's memory, or to the graph's; returns the shape there."""
        memory, axis = (self._inputs if direct else flight.inputs)[index], batch.axis
        tensor, stream = memory.tensor, self.copies.compute if direct else self.copies.incoming
        values = [request[tensor.name] for request in batch.requests]
        place = None if axis is None else axis.places.get(tensor.name)
        if self._build is not None:
            item = self._graphs[batch.bucket].items[index]
        else:
            item = values[0].shape[1:]
            if place is not None and batch.bucket.size is not None:
                item = (*item[: place - 1], batch.bucket.size, *item[place:])
        self._check(memory, values, batch.rows, item, place)
        shape = (sum(batch.rows) if axis is None else batch.bucket.rows, *item)
        if not memory.holds(shape):
            with torch.cuda.stream(self._incoming):
                memory.reserve(shape)
        if axis is None:
            self._copy(flight, memory.address, values, prod(item) * memory.dtype.itemsize, stream)
        else:
            arrays: list[Array] = []
            for value in values:
                assert not isinstance(value, HostMemory)  # see takes_addresses
                arrays.append(self._read(flight, value) if isinstance(value, DeviceMemory) else value)
            source, size = flight.merged(index, arrays, shape, axis)
            self.copies.to_device([memory.address], [source], [size], stream, locked=True)
        return shape

    def _copy(
        self,
        flight: Flight,
        target: int,
        values: Sequence[Array | HostMemory | DeviceMemory],
        row_bytes: int,
        stream: int,
    ) -> None:
        """Enqueue the copies of the values, one after the other."""
        if not row_bytes:  # the driver takes no empty copies
            return
        targets, sources, sizes = list[int](), list[int](), list[int]()
        on_device: list[tuple[int, int, int]] = []
        for value in values:
            size = value.shape[0] * row_bytes
            if isinstance(value, HostMemory):
                addresses, piece = value.addresses, value.piece_bytes
                sources += addresses
                targets += range(target, target + size, piece)
                sizes += [piece] * len(addresses)
            elif isinstance(value, DeviceMemory):
                on_device.append((target, value.address, size))
            else:
                if not value.flags.c_contiguous:
                    value = np.ascontiguousarray(value)
                    flight.references.append(value)
                sources.append(value.ctypes.data)
                targets.append(target)
                sizes.append(size)
            target += size
        if sources:
            self.copies.to_device(targets, sources, sizes, stream)
        if on_device:
            places, addresses, lengths = zip(*on_device, strict=True)
            self.copies.copy_many(places, addresses, lengths, stream)

    def _check(
        self,
        memory: Memory,
        values: Sequence[Array | HostMemory | DeviceMemory],
        rows: Sequence[int],
        item: tuple[int, ...],
        place: int | None,
    ) -> None:
        """Raise `ValueError` for values whose bytes are not the model's."""
        tensor, dtype = memory.tensor, memory.dtype
        for value, count in zip(values, rows, strict=True):
            shape = value.shape
            if place is not None:
                shape = (*shape[:place], item[place - 1], *shape[place + 1 :])
            if shape[1:] != item or shape[0] != count or value.dtype != dtype:
                raise ValueError(f"{tensor.name} is {value.dtype} {list(shape)}, not {dtype} {[count, *item]}")
            if isinstance(value, DeviceMemory):
                self._check_device(tensor, value)

    def _check_device(self, tensor: TensorSpec, memory: DeviceMemory) -> None:
        if memory.device != (self._device.index or 0):
            raise ValueError(f"{tensor.name} lies on device {memory.device}, not on {self._device}")

    def _read(self, flight: Flight, memory: DeviceMemory) -> Array:
        """Device memory as an array of the host; waits for it."""
        array = np.empty(memory.shape, memory.dtype)
        self.copies.copy(array.ctypes.data, memory.address, array.nbytes, self.copies.incoming)
        self.copies.record(flight.arrived, self.copies.incoming)
        self.copies.wait(flight.arrived)
        return array

    def _execute(
        self, flight: Flight, bucket: Bucket, shapes: Sequence[tuple[int, ...]], *, direct: bool
    ) -> Sequence[tuple[int, tuple[int, ...]]]:
        """Enqueue the execution of the batch whose inputs arrive; returns address and shape of each output."""
        copies = self.copies
        if not direct:
            copies.order(flight.arrived, copies.incoming, copies.compute)
        if self._call is not None:
            with self._active():
                outputs = self._outputs_of(flight, shapes)
            flight.references += outputs
            return [(output.data_ptr(), tuple(output.shape)) for output in outputs]
        for read, arrived, shape in [] if direct else zip(self._inputs, flight.inputs, shapes, strict=True):
            size = prod(shape) * read.dtype.itemsize
            copies.copy(read.address, arrived.address, size, copies.compute)
        graph = self._graphs[bucket]
        graph.replay()
        return graph.outputs

    def _outputs_of(self, flight: Flight, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Enqueue the call on what has arrived; its outputs have the specification's datatypes, as a graph's have."""
        assert self._call is not None
        outputs = self._call([memory.view(shape) for memory, shape in zip(flight.inputs, shapes, strict=True)])
        types = [TORCH_TYPES[tensor.datatype] for tensor in self._specification.outputs]
        return [output.to(dtype).contiguous() for dtype, output in zip(types, outputs, strict=True)]

    def _copy_outputs(
        self, flight: Flight, outputs: Sequence[tuple[int, tuple[int, ...]]], batch: _Batch
    ) -> list[_Fetched]:
        """Enqueue the copies of the outputs, without padding, to the host or to the requests' device memory."""
        copies, rows = self.copies, sum(batch.rows)
        fetched: list[_Fetched] = []
        large: list[tuple[int, int, int]] = []
        for index, (address, shape) in enumerate(outputs):
            output = flight.outputs[index]
            tensor, itemsize = output.tensor, output.dtype.itemsize
            if batch.outputs and self._to_devices(tensor, address, shape, batch):
                continue
            place, requested = None, shape
            if self._build is not None:
                requested = (rows, *shape[1:])
                if batch.axis is not None and (place := batch.axis.places.get(tensor.name)) is not None:
                    requested = (*requested[:place], max(batch.sizes), *requested[place + 1 :])
            size = prod(requested) * itemsize
            if size <= COPIED_BYTES:
                target, host = flight.small_array(index, requested)
                fetched.append(_Fetched(tensor.name, host, True))
                if place is None:
                    copies.copy(target, address, size, copies.compute)
                    continue
            else:
                host = new_host_bytes(size, pinned=self._on_cuda)
                fetched.append(_Fetched(tensor.name, host.view(output.dtype).reshape(requested), False))
                target = host.ctypes.data
            if self._build is not None:  # the next batch writes to the same memory
                copy = cut_copy(address, shape, itemsize, slice(0, rows), place, max(batch.sizes, default=0))
                address = flight.outputs[index].address
                copies.within_device(address, copy, copies.compute)
            large.append((target, address, size))
        if large:
            copies.order(flight.executed, copies.compute, copies.outgoing)
            for target, source, size in large:
                copies.copy(target, source, size, copies.outgoing)
        copies.record(flight.done, copies.outgoing if large else copies.compute)
        return fetched

    def _to_devices(self, tensor: TensorSpec, address: int, shape: tuple[int, ...], batch: _Batch) -> bool:
        """Enqueue the copies of an output to the requests' device memory; True if every request has such memory."""
        targets = [named.get(tensor.name) for named in batch.outputs]
        place = None if batch.axis is None else batch.axis.places.get(tensor.name)
        copies, contiguous = self.copies, list[tuple[int, int, int]]()
        row = 0
        for number, (target, rows) in enumerate(zip(targets, batch.rows, strict=bool(targets))):
            if target is not None:
                self._check_device(tensor, target)
                size = batch.sizes[number] if place is not None else 0
                copy = cut_copy(address, shape, tensor.dtype.itemsize, slice(row, row + rows), place, size)
                if row + rows > shape[0] or copy.width * copy.rows > target.nbytes:
                    raise ValueError(f"{tensor.name} does not fit into the {target.nbytes} bytes given for it")
                if copy.rows > 1:
                    copies.within_device(target.address, copy, copies.compute)
                elif copy.width:
                    contiguous.append((target.address, copy.source, copy.width))
            row += rows
        if contiguous:
            places, sources, lengths = zip(*contiguous, strict=True)
            copies.copy_many(places, sources, lengths, copies.compute)
        return bool(targets) and None not in targets

    def _finish(
        self, flight: Flight, batch: _Batch, shapes: list[tuple[int, ...]], fetched: Sequence[_Fetched]
    ) -> list[dict[str, Array]]:
        self._unfinished.remove(flight)
        try:
            self.copies.wait(flight.done)
            outputs = {output.name: output.array.copy() if output.small else output.array for output in fetched}
            self._executed[sum(batch.rows)] = batch.bucket, flight, shapes
        finally:
            self._release(flight)
        answers = divide(outputs, batch.rows, batch.sizes, batch.padding)
        for answer, named in zip(answers, batch.outputs, strict=False):
            for name in named:
                answer.pop(name, None)
        return answers

    def _release(self, flight: Flight) -> None:
        flight.references.clear()
        self._free.append(flight)

    def _repeat(self, rows: int) -> None:
        bucket, flight, shapes = self._executed[rows]
        if self._call is not None:
            self._outputs_of(flight, shapes)
        else:
            self._graphs[bucket].replay()


class RunnerEngine(Engine):
    """An engine whose batches go through a `GraphRunner`."""

    _runner: GraphRunner | None = None
    _device: torch.device

    def _start(
        self,
        build: Build | None,
        rows: Sequence[int],
        device: torch.device,
        *,
        call: Call | None = None,
        sizes: Sequence[int] = (),
        at_load: Sequence[int] | None = None,
        copies: CudaCopies | None = None,
    ) -> None:
        self._device = device
        try:
            self._runner = GraphRunner(
                self._specification, device, rows, build=build, call=call, sizes=sizes, at_load=at_load, copies=copies
            )
        except CudaError as exc:
            raise EngineError(f"{device} cannot be used: {exc}") from exc
        self.flights = FLIGHTS
        self.device_index = device.index if device.type == "cuda" else None
        self.takes_addresses = self._runner.takes_addresses

    def start(
        self,
        requests: Sequence[Request],
        padding: Padding | None = None,
        outputs: Sequence[Mapping[str, DeviceMemory]] = (),
    ) -> Finish:
        """See `Engine`; `ValueError` is for a batch beyond the largest bucket, too."""
        if self._runner is None:
            return super().start(requests, padding, outputs)
        try:
            started = self._runner.start(requests, padding, outputs)
        except (RuntimeError, CudaError) as exc:
            raise self._failed(exc) from exc

        def finish() -> list[dict[str, Array]]:
            try:
                return started()
            except (RuntimeError, CudaError) as exc:
                raise self._failed(exc) from exc

        return finish

    def prepare_no_more(self) -> None:
        if self._runner is not None:
            self._runner.prepare_no_more()

    def _failed(self, exc: Exception) -> EngineError:
        return EngineError(f"{self._settings.kind} failed to execute the batch: {reason_of(exc)}")

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Execute one batch; raises `ValueError` for one beyond the largest bucket."""
        if self._runner is None:
            raise self._not_loaded()
        (answer,) = self.start([inputs])()
        return answer

    def executed_rows(self, rows: int) -> int:
        return rows if self._runner is None else self._runner.executed_rows(rows)

    def pin(self, address: int, byte_size: int) -> bool:
        return self._runner is not None and self._runner.copies.pin(address, byte_size)

    def unpin(self, address: int) -> None:
        if self._runner is not None:
            self._runner.copies.unpin(address)

    def ready(self) -> bool:
        return self._runner is None or self._runner.ready()

    def execution_ns(self, rows: int, repeats: int) -> list[int] | None:
        return None if (runner := self._ready_to_repeat(rows)) is None else runner.execution_ns(rows, repeats)

    def run_only(self, rows: int) -> bool:
        if (runner := self._ready_to_repeat(rows)) is not None:
            runner.run_only(rows)
        return runner is not None

    def _ready_to_repeat(self, rows: int) -> GraphRunner | None:
        if self._runner is not None and not self._runner.has_executed(rows):
            self.infer(valid_inputs(self._specification, rows))
        return self._runner

    def probe_kernels(self) -> Mapping[str, object] | None:
        """Profile one inference of one row by torch's profiler, which lists every kernel of the process."""
        if (runner := self._runner) is None:
            return None
        inputs = valid_inputs(self._specification, 1)
        return probe_kernels(lambda: runner.infer(inputs), self._device)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            if self.device_index is not None:
                with torch.cuda.device(self.device_index):  # for the same reason as in `TorchEngine.load`
                    torch.cuda.empty_cache()

    def _not_loaded(self) -> EngineError:
        return EngineError(f"the {self._settings.kind} engine is not loaded")
