"""Inference behind HTTP and gRPC: one object checks a request, queues it, awaits it and makes its response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from enum import Enum
from typing import Protocol, TypeVar

import structlog

from servers.contract.codec import read_elements, write_output
from servers.contract.errors import InternalError, InvalidRequestError, NotFoundError, UnavailableError
from servers.contract.records import (
    InferRequest,
    InferResponse,
    InputTensor,
    ModelSignature,
    OutputTensor,
    RequestedOutput,
)
from servers.contract.tensors import Array
from servers.engines.batches import warm_up_sizes
from servers.engines.interface import Engine, EngineDescription, EngineError, profiled
from servers.engines.padding import batch_key, padding_of
from servers.models.image_decoder import Decoding, DecodingSettings, ImageDecoder
from servers.models.specification import ModelSpecification
from servers.native.batcher import Batcher, QueuedRequest
from servers.native.errors import (
    EXPIRED,
    SHUTTING_DOWN,
    NotReadyError,
    QueueFullError,
    RequestExpiredError,
    ShuttingDownError,
)
from servers.native.settings import MAX_TIMEOUT_US, NativeSettings
from servers.native.statistics import RequestTimes, Statistics

log = structlog.get_logger("abserve.loading")

UNLOAD_SECONDS = 30
DECODING_S = 30.0
_DELAY_THREADS = 256

R = TypeVar("R")


class State(Enum):
    """Only READY answers inference requests; FAILED means that loading failed, or that the engine broke."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"
    STOPPING = "stopping"


class Waiter(Protocol):
    """The part of a front end that waits for a queued request."""

    def answer_in_place(self, queued: QueuedRequest) -> bool:
        """Answer in the engine thread, if that needs no event loop; False leaves the request to `wake`.

        Called when no other request waits: without a wake-up of the event loop the hand-off costs half, and the engine
        would only sleep.
        """

    def wake(self, queued: QueuedRequest) -> None:
        """The request is complete; called in the event loop."""


class FutureWaiter:
    """A coroutine that awaits `future`."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer_in_place(self, queued: QueuedRequest) -> bool:  # noqa: ARG002  a coroutine needs the event loop
        return False

    def wake(self, queued: QueuedRequest) -> None:  # noqa: ARG002  the awaiting coroutine has it
        if not self.future.done():  # its task was cancelled while the engine worked
            self.future.set_result(None)  # not the request: they would refer to each other

    async def again(self) -> None:
        """After `future` was cancelled: wait for the incomplete request."""
        self.future = asyncio.get_running_loop().create_future()
        await self.future


class RequestDecoder:
    """The decoder of one model that takes JPEG files. Belongs to one event loop.

    It decodes at most `queue_size` requests at a time, as many as may wait for the engine afterwards, each for at most
    `DECODING_S`.
    """

    def __init__(self, specification: ModelSpecification, settings: DecodingSettings, queue_size: int) -> None:
        self.settings = settings
        self.pending = 0
        self.idle = asyncio.Event()  # no request is being decoded
        self.idle.set()
        self._queue_size = queue_size
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, settings)

    async def decode(self, files: InputTensor, deadline_ns: int | None) -> Mapping[str, Array]:
        """The engine's inputs for a request's files; a thread reads those in shared memory.

        Raises `ImageError`, `QueueFullError` at once, `RequestExpiredError` at `deadline_ns` of `perf_counter_ns`.
        """
        if self.pending >= self._queue_size:
            raise QueueFullError(f"Exceeds maximum queue size of {self._queue_size} requests")
        self.pending += 1
        self.idle.clear()
        decoding: Decoding | None = None
        timeout_s = float("inf") if deadline_ns is None else max(0.0, (deadline_ns - time.perf_counter_ns()) / 1e9)
        try:
            async with asyncio.timeout(min(timeout_s, DECODING_S)):
                images = files.data if files.window is None else await asyncio.to_thread(read_elements, files)
                decoding = self._decoder.start(images)
                for image in decoding.images:
                    await asyncio.wrap_future(image)
        except TimeoutError:
            if timeout_s < DECODING_S:
                raise RequestExpiredError(EXPIRED) from None
            raise RequestExpiredError(f"the images were not decoded within {DECODING_S:g} s, send fewer") from None
        finally:
            self.pending -= 1
            if not self.pending:
                self.idle.set()
            if decoding is not None:
                decoding.cancel()  # only a failure leaves images to cancel
        return {self._pixels: decoding.pixels}

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()


class InferenceService:
    """One served model. `build_engine` is called in the engine thread, where its imports block nothing else.

    `start`, `load`, `unload` and `infer` belong to one event loop; `stop` comes last. Any thread may read the rest.
    """

    def __init__(
        self,
        specification: ModelSpecification,
        build_engine: Callable[[], Engine],
        settings: NativeSettings,
    ) -> None:
        self.signature = ModelSignature(
            specification.name,
            specification.version,
            specification.inputs,
            specification.outputs,
            settings.max_batch_size,
            specification.axes,
            specification.id_counts,
        )
        self.specification = specification
        self.padding = padding_of(specification, settings.pad_sizes)
        self.settings = settings
        self.statistics = Statistics(settings.max_batch_size)
        self.description: EngineDescription | None = None  # set before the state becomes READY, None once unloaded
        self.decoding: DecodingSettings | None = None  # None for a model that takes tensors
        self._decoder: RequestDecoder | None = None
        if specification.payload == "jpeg":
            self.decoding = DecodingSettings(settings.decode_threads, settings.max_image_pixels)
            self._decoder = RequestDecoder(specification, self.decoding, settings.queue_size)
        self._build_engine = build_engine
        self.state = State.LOADING
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._front_ends_open: threading.Event | None = None
        self._control = asyncio.Lock()
        self._settled = asyncio.Event()  # the load has ended, with or without success
        self._delays = ThreadPoolExecutor(_DELAY_THREADS, "added-delay") if settings.added_delay_ms else None
        self._batcher = self._new_batcher()

    @property
    def ready(self) -> bool:
        """Loaded, warmed up and not shutting down."""
        return self.state is State.READY

    @property
    def pending(self) -> int:
        """Requests that wait in the queue or whose images are being decoded."""
        return self._batcher.waiting + (self._decoder.pending if self._decoder is not None else 0)

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event | None = None) -> None:
        """Begin to load; returns at once. `on_failure` is called in the event loop if the model cannot be served.

        The model is not READY before `front_ends_open` is set.
        """
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._front_ends_open = front_ends_open
        self._batcher.start(self._prepare)

    async def load(self) -> None:
        """Load an unloaded model again; returns when it is ready. Raises `ContractError`."""
        async with self._control:
            if self.state not in (State.UNLOADED, State.FAILED):
                self.check_ready()
                return
            await self._finish()
            self._batcher = self._new_batcher()
            self._on_failure = lambda: None  # the client gets the error, and the server goes on
            self.state = State.LOADING
            self._settled.clear()
            self._batcher.start(self._prepare)
            await self._settled.wait()
            if self.state is State.FAILED:
                raise InternalError(f"model '{self.signature.name}' failed to load, the server's log has the reason")

    async def unload(self) -> None:
        """Refuse new requests, finish the accepted ones and free the engine. Raises `ContractError`."""
        async with self._control:
            if self.state not in (State.UNLOADED, State.FAILED):
                self.check_ready()
            self.state = State.UNLOADED
            await self._finish()

    async def _finish(self) -> None:
        ends = time.perf_counter() + UNLOAD_SECONDS
        if self._decoder is not None:  # its requests go to the queue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._decoder.idle.wait(), UNLOAD_SECONDS)
        decoded = self._decoder is None or self._decoder.idle.is_set()
        if not decoded or not await asyncio.to_thread(self._batcher.stop, max(0.0, ends - time.perf_counter())):
            raise UnavailableError(f"model '{self.signature.name}' still finishes accepted requests, try again later")
        self.description = None  # nothing is in effect any more

    def stop(self, timeout: float) -> bool:
        """Execute the queue, then free the engine; blocks. False if that took longer than `timeout` seconds."""
        loading = self.state is State.LOADING
        self.state = State.STOPPING
        if self._delays is not None:
            self._delays.shutdown(wait=False)
        if self._decoder is not None:
            self._decoder.close()
        # A load cannot be interrupted, so do not wait for it.
        return self._batcher.stop(0 if loading else timeout)

    def check_loaded(self) -> None:
        """Raises `NotFoundError` for an unloaded model, which is as unknown as any other until it is loaded again."""
        if self.state is State.UNLOADED:
            raise NotFoundError(f"Request for unknown model: '{self.signature.name}' is unloaded")

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless the model can answer now."""
        if self.state is State.READY:
            return
        if self.state is State.STOPPING:
            raise ShuttingDownError(SHUTTING_DOWN)
        raise NotReadyError(f"model '{self.signature.name}' is not ready: {self.state.value}")

    @property
    def direct(self) -> bool:
        """Whether a checked request needs only the queue, so that `enqueue` can replace `infer`."""
        return self._decoder is None and self._delays is None and not self.settings.queue_timeout_us

    def enqueue(self, queued: QueuedRequest) -> None:
        """Queue a checked request. Raises `UnavailableError`."""
        self.check_ready()
        self._batcher.submit(queued)

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Take it back; True if the engine will not execute it and its waiter will not be called."""
        return self._batcher.withdraw(queued)

    async def infer(
        self, request: InferRequest, times: RequestTimes, caller_deadline_ns: int | None = None
    ) -> InferResponse:
        """Answer one request, and add the time for decoding images and writing outputs to `times`.

        The deadline is the request's own timeout or the caller's (`perf_counter_ns`), whichever comes first. Cancelling
        the caller's task takes the request out of the queue, or waits until the engine is done with it: the arrays of
        `request` are read until this returns. Raises `ContractError`.
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
            arrays = await self._decoder.decode(request.inputs[0], deadline_ns)
            times.decode_ns += time.perf_counter_ns() - start_ns
        elif in_memory := [item for item in request.inputs if item.datatype == "BYTES" and item.window is not None]:
            elements = {item.name: await asyncio.to_thread(read_elements, item) for item in in_memory}
            arrays = {**arrays, **elements}
        waiter = FutureWaiter()
        windows = [item.window for item in request.inputs if item.window is not None and item.datatype != "BYTES"]
        key = batch_key(((name, array.shape) for name, array in arrays.items()), self.padding)
        queued = QueuedRequest(arrays, rows, key, deadline_ns, waiter, windows)
        self._batcher.submit(queued)
        timer = None
        if deadline_ns is not None:
            timer = loop.call_later((deadline_ns - time.perf_counter_ns()) / 1e9, self._expire, queued)
        try:
            await waiter.future
        except asyncio.CancelledError:
            if not self._batcher.withdraw(queued) and not queued.complete:
                await waiter.again()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if self._delays is not None:  # asyncio.sleep would round to whole ms, and tests rely on this delay
            await loop.run_in_executor(self._delays, time.sleep, self.settings.added_delay_ms / 1000)
        if queued.error is not None:
            raise copy(queued.error)  # else its traceback would keep this frame and its arrays
        executed_ns = time.perf_counter_ns()
        arguments = self.signature, request, queued.outputs or {}
        on_device = any(
            wanted.window is not None and wanted.window.region.on_device for wanted in request.outputs or ()
        )
        response = await asyncio.to_thread(_response, *arguments) if on_device else _response(*arguments)
        times.encode_ns += time.perf_counter_ns() - executed_ns
        return response

    def _timeout_us(self, request: InferRequest) -> int:
        timeout = request.parameters.get("timeout", self.settings.queue_timeout_us)
        if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT_US:
            raise InvalidRequestError(f"'timeout' must be a whole number of microseconds from 0 to {MAX_TIMEOUT_US}")
        return timeout

    def _expire(self, queued: QueuedRequest) -> None:
        if self._batcher.withdraw(queued):
            queued.error = RequestExpiredError(EXPIRED)
            _wake_all([queued])

    def _hand_over(self, requests: Sequence[QueuedRequest]) -> None:
        """Answer in the engine thread if it would only sleep otherwise, else wake the event loop once."""
        if len(requests) == 1 and not self._batcher.waiting and requests[0].waiter.answer_in_place(requests[0]):
            return
        self._call(_wake_all, requests)

    def _prepare(self) -> Engine | None:
        """Load and warm up, in the engine thread. None when that failed, after the log has the reason."""
        engine: Engine | None = None
        try:
            engine, self.description = _load_engine(self._build_engine, self.signature)
        except EngineError as error:
            log.error("the model cannot be served", reason=str(error))  # noqa: TRY400  the sentence says it all
        except Exception:
            log.exception("the model cannot be served")
        if engine is None:
            self.state = State.FAILED
            self._call(self._on_failure)
        else:
            if self._front_ends_open is not None:
                self._front_ends_open.wait()
            if self.state is State.LOADING:
                self.state = State.READY
        self._call(self._settled.set)
        return engine

    def _broken(self) -> None:
        """The engine broke: the server ends, or stays not ready, and its supervisor sees that. In the engine thread."""
        if self.state is State.READY:
            self.state = State.FAILED
            self._call(self._on_failure)

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call back in the event loop, unless it is closed; any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _new_batcher(self) -> Batcher:
        check_values = self.signature.check_values if self.signature.id_counts else None
        return Batcher(self.settings, self.statistics, self._hand_over, self._broken, self.padding, check_values)


def _wake_all(requests: Sequence[QueuedRequest]) -> None:
    for queued in requests:
        queued.waiter.wake(queued)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[..., R], *arguments: object) -> R:
    """Run `work` in one of `threads`, whose queue does not keep the arguments of a cancelled caller."""
    waiting = [arguments]
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: work(*waiting.pop()))
    finally:
        waiting.clear()


def _load_engine(build_engine: Callable[[], Engine], signature: ModelSignature) -> tuple[Engine, EngineDescription]:
    """A loaded and warm engine; blocks, in the thread that will use it. Raises `EngineError` and whatever it raises."""
    started_ns = time.perf_counter_ns()
    engine = build_engine()
    log.info("engine imported", model=signature.name)  # a step of a cold start, as is "weights loaded"
    engine.load()
    log.info("weights loaded", model=signature.name)
    description = engine.describe()
    if description.max_batch_size < signature.max_batch_size:
        most = description.max_batch_size
        raise EngineError(f"the engine executes at most {most} items at once: set --max-batch-size {most} or less")
    loaded_ns = time.perf_counter_ns()
    engine.warm_up(warm_up_sizes(signature.max_batch_size))
    description = profiled(engine) or description
    log.info(
        "ready",
        model=signature.name,
        engine=f"{description.kind} {description.version}",
        precision=description.precision,
        device=description.device,
        weights=description.weights,
        load_s=round((loaded_ns - started_ns) / 1e9, 2),
        warm_up_s=round((time.perf_counter_ns() - loaded_ns) / 1e9, 2),
    )
    return engine, description


def _response(signature: ModelSignature, request: InferRequest, outputs: Mapping[str, Array]) -> InferResponse:
    """The response, with outputs in shared memory written; blocks if one is on a GPU. Raises `ContractError`."""
    datatypes = {spec.name: spec.datatype for spec in signature.outputs}
    wanted = request.outputs or [RequestedOutput(name, request.binary_output) for name in datatypes]
    tensors = []
    for output in wanted:
        data = outputs[output.name]
        reference = None if output.window is None else write_output(output.window, data)
        tensors.append(OutputTensor(output.name, datatypes[output.name], data, output.binary, reference))
    return InferResponse(signature.name, signature.version, request.id, tuple(tensors))
