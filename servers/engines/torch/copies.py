"""The copies, events and graph launches of a `GraphRunner`, enqueued on a GPU by the driver.

On a GPU there are three streams: `incoming` copies inputs to the device, `compute` executes, `outgoing` copies large
outputs to the host. So a batch's inputs arrive while the one before it is executed. Calls that only enqueue keep the
interpreter lock, since a thread that releases it under load waits up to 5 ms to get it again; calls that wait, and
copies of memory that is not page-locked, which the driver reads before it returns, release it.

The driver's functions are called without a wrapper: a call takes about 1 µs, and a wrapper would double that.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from servers.gpu.cuda_library import CudaError, CudaLibrary


class Copy(NamedTuple):
    """A 2-D copy: `rows` of `width` bytes, which lie `pitch` bytes apart at `source`, are packed at the target. The
    pitch of a single row is its width."""

    source: int
    width: int
    rows: int
    pitch: int


Ranges = Sequence[tuple[int, int]]
"""Page-locked memory: the first address of each range and the one after its last, ascending, without overlaps."""


def page_locked(pinned: Ranges, source: int, size: int) -> bool:
    """Whether one range holds these bytes: the driver refuses a copy that leaves the range in which it begins."""
    index = bisect_right(pinned, source, key=lambda pages: pages[0]) - 1
    return index >= 0 and source + size <= pinned[index][1]


def cut_copy(
    address: int, shape: Sequence[int], item_bytes: int, rows: slice, place: int | None = None, size: int = 0
) -> Copy:
    """The copy of some rows of a C-contiguous array of `shape`, cut to `size` along dimension `place` if it is given.
    `item_bytes` are those of an element."""
    count, start = rows.stop - rows.start, rows.start
    row_bytes = prod(shape[1:]) * item_bytes
    source = address + start * row_bytes
    if place is None or size == shape[place]:
        return Copy(source, count * row_bytes, 1, count * row_bytes)
    inner = prod(shape[place + 1 :]) * item_bytes
    return Copy(source, size * inner, count * prod(shape[1:place]), shape[place] * inner)


_EVENT_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *(("source_x", c_size_t), ("source_y", c_size_t), ("source_type", c_int), ("source_host", c_void_p)),
        *(("source_device", c_uint64), ("source_array", c_void_p), ("source_pitch", c_size_t)),
        *(("target_x", c_size_t), ("target_y", c_size_t), ("target_type", c_int), ("target_host", c_void_p)),
        *(("target_device", c_uint64), ("target_array", c_void_p), ("target_pitch", c_size_t)),
        *(("width", c_size_t), ("height", c_size_t)),
    )


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of source accesses, two places, and flags. Only the order matters here."""

    _fields_ = (("order", c_int), ("places", c_int * 4), ("flags", c_uint))


_IN_STREAM_ORDER = _Attributes(1)  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_FIRST = c_size_t(0)

_BRIEF: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(_Copy2D), c_void_p),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuGraphLaunch": (c_void_p, c_void_p),
}
_BATCH: dict[str, tuple[Any, ...]] = {  # since CUDA 12.8
    "cuMemcpyBatchAsync": (
        *(c_void_p, c_void_p, c_void_p, c_size_t),
        *(POINTER(_Attributes), POINTER(c_size_t), c_size_t, POINTER(c_size_t), c_void_p),
    )
}
_BLOCKING: dict[str, tuple[Any, ...]] = {
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuEventSynchronize": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}

MAX_REMEMBERED = 4096
"""Capacity of the memory of page-locked copies: a server's requests lie in the same slots again and again."""

_thread = threading.local()
"""`_thread.context` is the context that `enter` has made current in a thread."""


class LockedPages:
    """What is page-locked in this process, and by how many engines; any thread. Models share the memory of requests,
    and the driver locks memory only once: the first engine locks it, the last one to end unlocks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[tuple[int, int], int] = {}  # by address and size

    def add(self, place: tuple[int, int], register: Callable[[int, int], bool]) -> bool:
        """Note that another engine uses this memory, and lock it for the first; False if it cannot be locked."""
        with self._lock:
            users = self._users.get(place, 0)
            if not users and not register(*place):
                return False
            self._users[place] = users + 1
        return True

    def remove(self, place: tuple[int, int], unregister: Callable[[int], None]) -> None:
        """Note that an engine does not use the memory any more, and unlock it after the last."""
        with self._lock:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                unregister(place[0])


class CudaCopies:
    """The driver's calls in a device's primary context, which torch uses too. Streams are given as their handles."""

    _locked_pages = LockedPages()

    def __init__(self, device: int, incoming: int, compute: int, outgoing: int) -> None:
        """Raises `CudaError`."""
        self.incoming, self.compute, self.outgoing = incoming, compute, outgoing
        self.pinned: Ranges = ()
        self._lock = threading.Lock()
        library = CudaLibrary(_BLOCKING)
        self._blocking, self._error = library.call, library.error
        brief = CudaLibrary(_BRIEF, brief=True)
        self._brief, self._copy = brief.call, brief.function("cuMemcpyAsync")
        self._record_event, self._query_event = brief.function("cuEventRecord"), brief.function("cuEventQuery")
        self._wait_in_stream, self._launch_graph = brief.function("cuStreamWaitEvent"), brief.function("cuGraphLaunch")
        self._copy_batch: Callable[..., int] | None = None
        with suppress(CudaError):  # an older driver
            self._copy_batch = CudaLibrary(_BATCH, brief=True).function("cuMemcpyBatchAsync")
        self._device, context = torch.device("cuda", device), c_void_p()
        self._blocking("cuDevicePrimaryCtxRetain", byref(context), library.device(device))
        self._context = context.value
        self._events: list[int] = []
        self._remembered: set[tuple[int, int]] = set()

    def enter(self) -> None:
        """Make the context current in this thread, before other calls; repeat it after other code uses a device."""
        if getattr(_thread, "context", None) != self._context:
            self._brief("cuCtxSetCurrent", self._context)
            _thread.context = self._context

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current for a block, and undo it."""
        self._brief("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._brief("cuCtxPopCurrent_v2", byref(c_void_p()))

    def to_device(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int, *, locked: bool = False
    ) -> None:
        """Copy host memory in `stream`: so many bytes from each source, of which there is at least one, to its target.
        `locked`: all of it is page-locked, even if not by `pin`."""
        if locked or self._page_locked(zip(sources, sizes, strict=True)):
            self.copy_many(targets, sources, sizes, stream)
            return
        for target, source, size in zip(targets, sources, sizes, strict=True):
            if page_locked(self.pinned, source, size):
                self.copy(target, source, size, stream)
            else:
                self._blocking("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Copy in `stream` memory that the device reaches by itself: its own, and page-locked memory of the host."""
        if len(sources) > 1 and self._copy_batch is not None:
            lists = [array("Q", values) for values in (targets, sources, sizes)]
            places = [values.buffer_info()[0] for values in lists]
            failed = c_size_t()
            if code := self._copy_batch(*places, len(sources), _IN_STREAM_ORDER, _FIRST, 1, failed, stream):
                raise self._error("cuMemcpyBatchAsync", code)
            return
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self.copy(target, source, size, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Make one of the copies of `copy_many`."""
        if code := self._copy(target, source, size, stream):  # the driver knows what is where
            raise self._error("cuMemcpyAsync", code)

    def within_device(self, target: int, copy: Copy, stream: int) -> None:
        """Copy rows of device memory in `stream`."""
        if copy.rows > 1:
            rows = _Copy2D(source_type=_DEVICE, source_device=copy.source)
            rows.source_pitch, rows.width, rows.height = copy.pitch, copy.width, copy.rows
            rows.target_type, rows.target_device, rows.target_pitch = _DEVICE, target, copy.width
            self._brief("cuMemcpy2DAsync_v2", byref(rows), stream)
        else:
            self.copy(target, copy.source, copy.width, stream)

    def event(self) -> int:
        """A new event."""
        event = c_void_p()
        with self.current():
            self._brief("cuEventCreate", byref(event), _EVENT_WITHOUT_TIME)
        assert event.value is not None
        self._events.append(event.value)
        return event.value

    def record(self, event: int, stream: int) -> None:
        """Let the event happen after everything that is in the stream now."""
        if code := self._record_event(event, stream):
            raise self._error("cuEventRecord", code)

    def order(self, event: int, before: int, after: int) -> None:
        """Let what follows in the stream `after` wait, by an event, for what is in the stream `before`."""
        self.record(event, before)
        if code := self._wait_in_stream(after, event, 0):
            raise self._error("cuStreamWaitEvent", code)

    def happened(self, event: int) -> bool:
        """Whether `wait` returns at once, or raises."""
        self.enter()
        return self._query_event(event) != _NOT_READY

    def wait(self, event: int) -> None:
        """Wait until the event has happened. Raises `CudaError` for work that failed."""
        self.enter()
        code = self._query_event(event)
        if code == _NOT_READY:
            self._blocking("cuEventSynchronize", event)
        elif code:
            raise self._error("cuEventQuery", code)

    def synchronise(self) -> None:
        """Wait for all streams."""
        with self.current():
            for stream in (self.incoming, self.compute, self.outgoing):
                self._blocking("cuStreamSynchronize", stream)

    def captured(self, run: Callable[[], object], pool: Any) -> Callable[[], object]:
        """A function that repeats `run()` in the stream `compute`, from a graph in the memory `pool`."""
        graph = capture(run, self._device, pool)
        if not hasattr(graph, "raw_cuda_graph_exec"):  # torch before 2.12
            return partial(self._replay, graph)
        return partial(self._launch, graph, graph.raw_cuda_graph_exec())

    def pin(self, address: int, byte_size: int) -> bool:
        """Page-lock host memory; False if it cannot be."""
        with self._lock:
            if not self._locked_pages.add((address, byte_size), self._register):
                return False
            self.pinned = tuple(sorted((*self.pinned, (address, address + byte_size))))  # replaced, never changed
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin`, once no copy uses the memory; without effect on other memory."""
        with self._lock:
            ends = [end for start, end in self.pinned if start == address]
            self.pinned = tuple(pages for pages in self.pinned if pages[0] != address)
            self._remembered = set()
            for end in ends:
                self._locked_pages.remove((address, end - address), self._unregister)

    def close(self) -> None:
        """Undo every `pin` and destroy the events."""
        for start, _ in self.pinned:
            self.unpin(start)
        with self.current():
            while self._events:
                self._brief("cuEventDestroy_v2", self._events.pop())

    def _page_locked(self, copies: Iterable[tuple[int, int]]) -> bool:
        """Whether every copy (address and bytes) is of page-locked memory; remembers those that are."""
        remembered = self._remembered
        missing = set(copies) - remembered
        if all(page_locked(self.pinned, source, size) for source, size in missing):
            if len(remembered) > MAX_REMEMBERED:
                remembered.clear()
            remembered |= missing
            return True
        return False

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(self.compute, self._device)):  # type: ignore[no-untyped-call]
            graph.replay()

    def _launch(self, _graph: object, handle: int) -> None:
        """`_graph` owns the handle."""
        if code := self._launch_graph(handle, self.compute):
            raise self._error("cuGraphLaunch", code)

    def _register(self, address: int, byte_size: int) -> bool:
        try:
            with self.current():
                self._blocking("cuMemHostRegister_v2", address, byte_size, _PORTABLE)
        except CudaError:
            return False
        return True

    def _unregister(self, address: int) -> None:
        with self.current():
            self._blocking("cuMemHostUnregister", address)


def capture(run: Callable[[], object], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one `run()`, in the memory `pool` where one is given; what `run` holds lives as long as it."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()  # compiles kernels and creates library handles, neither of which may happen in a capture
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads of a server may free pinned memory during the capture, which must not break it.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    # The graph knows addresses alone. Memory that `run` owns would be freed with it, and be given to another model.
    graph.captured_call = run  # type: ignore[attr-defined]
    return graph
