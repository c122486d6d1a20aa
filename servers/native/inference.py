"""Inference as both doors see it: one object that checks a request, queues it, waits for it and shapes its answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

from servers.contract.errors import InternalError, InvalidRequestError, NotFoundError, UnavailableError
from servers.contract.records import InferRequest, InferResponse
from servers.contract.signature import ModelSignature
from servers.engines.interface import Engine, EngineDescription
from servers.models.image_decoder import DecodingSettings
from servers.models.specification import ModelSpecification
from servers.native.batcher import Batcher, batch_slots
from servers.native.decoder import RequestDecoder
from servers.native.entries import EXPIRED, Entry
from servers.native.errors import SHUTTING_DOWN, NotReadyError, RequestExpiredError, ShuttingDownError
from servers.native.loading import load_engine
from servers.native.responses import response_of, writes_to_device
from servers.native.settings import MAX_TIMEOUT_US
from servers.native.statistics import RequestTimes, Statistics
from servers.native.waiters import FutureWaiter, answered_in_place, wake_all

UNLOAD_SECONDS = 30
_DELAY_THREADS = 256


class State(Enum):
    """Where the served model stands; only READY answers inference requests. FAILED: to load, or ever since a batch."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """The dynamic batcher's limits; `queue_timeout_us` 0 means none."""

    max_batch_size: int = 32
    max_queue_delay_us: int = 2000
    queue_size: int = 512
    queue_timeout_us: int = 0
    pipeline: bool = False
    """Whether to gather one batch while another is executed, where the engine can."""


class InferenceService:
    """One served model. `build_engine` is called in the engine thread, where its imports may take their time.

    `start`, `infer` and `stop` belong to one event loop; everything else may be read from anywhere.
    """

    def __init__(
        self,
        specification: ModelSpecification,
        build_engine: Callable[[], Engine],
        batching: BatchingSettings,
        *,
        decoding: DecodingSettings = DecodingSettings(),  # noqa: B008  immutable
        added_delay_ms: float = 0,
    ) -> None:
        self.signature = ModelSignature(
            specification.name,
            specification.version,
            specification.inputs,
            specification.outputs,
            batching.max_batch_size,
        )
        self.payload = specification.payload
        self.batching = batching
        self.added_delay_ms = added_delay_ms
        self.statistics = Statistics(batching.max_batch_size)
        self.description: EngineDescription | None = None  # set before the state becomes READY, None once unloaded
        self.batch_slots: int | None = None  # likewise; None for an engine without a pipeline
        self.decoding = decoding if specification.payload == "jpeg" else None
        self._decoder = (
            RequestDecoder(specification, decoding, batching.queue_size) if specification.payload == "jpeg" else None
        )
        self._build_engine = build_engine
        self._state = State.LOADING
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._doors_open: threading.Event | None = None
        self._control = asyncio.Lock()
        self._settled = asyncio.Event()  # the load has ended, well or not
        self._delays = ThreadPoolExecutor(_DELAY_THREADS, "added-delay") if added_delay_ms else None
        self._batcher = self._new_batcher()

    @property
    def state(self) -> State:
        """Where the model stands now."""
        return self._state

    @property
    def ready(self) -> bool:
        """Loaded, warmed up and not shutting down."""
        return self._state is State.READY

    @property
    def pending(self) -> int:
        """Requests that wait in the queue, or for their images to be decoded."""
        return self._batcher.pending + (self._decoder.pending if self._decoder is not None else 0)

    def start(self, on_failure: Callable[[], None], doors_open: threading.Event | None = None) -> None:
        """Begin to load; returns at once. `on_failure` is called in the event loop if the model cannot be served.

        The model does not say that it is ready before `doors_open` is set.
        """
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._doors_open = doors_open
        self._batcher.start(self._prepare)

    async def load(self) -> None:
        """Load an unloaded model again; returns when it is ready. Raises `ContractError`."""
        async with self._control:
            if self._state not in (State.UNLOADED, State.FAILED):
                self.check_ready()
                return
            await self._finish()
            self._batcher = self._new_batcher()
            self._on_failure = lambda: None  # it is the one who asked that is told, the server goes on
            self._state = State.LOADING
            self._settled.clear()
            self._batcher.start(self._prepare)
            await self._settled.wait()
            if self._state is State.FAILED:
                raise InternalError(f"model '{self.signature.name}' failed to load, the server's log has the reason")

    async def unload(self) -> None:
        """Refuse new requests, finish the accepted ones and free the engine. Raises `ContractError`."""
        async with self._control:
            if self._state not in (State.UNLOADED, State.FAILED):
                self.check_ready()
            self._state = State.UNLOADED
            await self._finish()

    async def _finish(self) -> None:
        ends = time.perf_counter() + UNLOAD_SECONDS
        decoded = self._decoder is None or await self._decoder.idle(UNLOAD_SECONDS)  # it is on its way to the queue
        if not decoded or not await asyncio.to_thread(self._batcher.stop, max(0.0, ends - time.perf_counter())):
            raise UnavailableError(f"model '{self.signature.name}' still finishes accepted requests, try again")
        self.description = self.batch_slots = None  # nothing is in effect any more

    def stop(self, timeout: float) -> bool:
        """Execute what is queued, then free the engine; blocks. False if that took longer than `timeout` seconds."""
        loading = self._state is State.LOADING
        self._state = State.STOPPING
        if self._delays is not None:
            self._delays.shutdown(wait=False)
        if self._decoder is not None:
            self._decoder.close()
        # A load cannot be interrupted, and nobody waits for its end any more.
        return self._batcher.stop(0 if loading else timeout)

    def check_loaded(self) -> None:
        """Raises `NotFoundError` for a model that was unloaded: until it is loaded again nobody knows it."""
        if self._state is State.UNLOADED:
            raise NotFoundError(f"Request for unknown model: '{self.signature.name}' is unloaded")

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless the model can answer now."""
        if self._state is State.READY:
            return
        if self._state is State.STOPPING:
            raise ShuttingDownError(SHUTTING_DOWN)
        raise NotReadyError(f"model '{self.signature.name}' is not ready: {self._state.value}")

    @property
    def direct(self) -> bool:
        """Whether a checked request needs nothing but the queue, so that `enqueue` may take the place of `infer`."""
        return self._decoder is None and self._delays is None and not self.batching.queue_timeout_us

    def enqueue(self, entry: Entry) -> None:
        """Queue a checked request, whose token is a `Waiter`. Raises `UnavailableError`."""
        self.check_ready()
        self._batcher.submit(entry)

    def withdraw(self, entry: Entry) -> bool:
        """Take it back; True if the engine will not see it and its waiter will not hear of it."""
        return self._batcher.withdraw(entry)

    async def infer(
        self, request: InferRequest, times: RequestTimes | None = None, caller_deadline_ns: int | None = None
    ) -> InferResponse:
        """Answer one request. Raises `ContractError`. What decoding its images and writing outputs take is in `times`.

        The deadline is the request's own timeout or the caller's (`perf_counter_ns`), whichever comes first.

        Cancelling the caller's task takes the request out of the queue if it is still there. The arrays of `request`
        are read until this returns, and after a cancellation until the engine is done with them.
        """
        self.check_ready()
        rows, arrays = self.signature.validate(request)
        timeout_us = self._timeout_us(request)
        loop = asyncio.get_running_loop()
        start_ns = time.perf_counter_ns()
        deadline_ns = start_ns + timeout_us * 1000 if timeout_us else caller_deadline_ns
        if caller_deadline_ns is not None and deadline_ns is not None:
            deadline_ns = min(deadline_ns, caller_deadline_ns)
        if self._decoder is not None:
            arrays = await self._decoder.decode(arrays, deadline_ns)
            if times is not None:
                times.decode_ns += time.perf_counter_ns() - start_ns
        waiter = FutureWaiter()
        windows = [tensor.window for tensor in request.inputs if tensor.window is not None]
        entry = Entry(arrays, rows, deadline_ns, waiter, windows)
        self._batcher.submit(entry)
        timer = None
        if deadline_ns is not None:
            timer = loop.call_later((deadline_ns - time.perf_counter_ns()) / 1e9, self._expire, entry)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._batcher.withdraw(entry)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if self._delays is not None:  # not asyncio.sleep: libuv's timers round to whole ms, and this is a planted truth
            await loop.run_in_executor(self._delays, time.sleep, self.added_delay_ms / 1000)
        if entry.error is not None:
            raise entry.error
        executed_ns = time.perf_counter_ns()
        answer = functools.partial(response_of, self.signature, request, entry.outputs or {})
        response = await asyncio.to_thread(answer) if writes_to_device(request) else answer()
        if times is not None:
            times.encode_ns += time.perf_counter_ns() - executed_ns
        return response

    def _timeout_us(self, request: InferRequest) -> int:
        timeout = request.parameters.get("timeout", self.batching.queue_timeout_us)
        if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT_US:
            raise InvalidRequestError(f"'timeout' must be a whole number of microseconds from 0 to {MAX_TIMEOUT_US}")
        return timeout

    def _expire(self, entry: Entry) -> None:
        if self._batcher.withdraw(entry):
            entry.error = RequestExpiredError(EXPIRED)
            wake_all([entry])

    def _hand_over(self, entries: Sequence[Entry]) -> None:
        """In the thread that has executed them: answer there when it would sleep otherwise, else wake the loop once."""
        if len(entries) == 1 and not self._batcher.pending and answered_in_place(entries[0]):
            return
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(wake_all, entries)

    def _prepare(self) -> Engine | None:
        """In the engine thread: load and warm up."""
        loaded = load_engine(self.signature.name, self._build_engine, self.signature.max_batch_size)
        if loaded is None:
            self._state = State.FAILED
            self._tell(self._on_failure)
            self._tell(self._settled.set)
            return None
        engine, description = loaded
        self.batch_slots = batch_slots(engine, wanted=self.batching.pipeline)
        self.description = description
        if self._doors_open is not None:
            self._doors_open.wait()
        if self._state is State.LOADING:
            self._state = State.READY
        self._tell(self._settled.set)
        return engine

    def _broken(self) -> None:
        """In the engine thread: whoever supervises the server learns by its end, or by its not being ready."""
        if self._state is State.READY:
            self._state = State.FAILED
            self._tell(self._on_failure)

    def _tell(self, callback: Callable[[], object]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _new_batcher(self) -> Batcher:
        batching = self.batching
        return Batcher(
            max_batch_size=batching.max_batch_size,
            max_queue_delay_ns=batching.max_queue_delay_us * 1000,
            queue_size=batching.queue_size,
            statistics=self.statistics,
            on_complete=self._hand_over,
            on_broken=self._broken,
            pipeline=batching.pipeline,
        )
