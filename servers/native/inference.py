"""Inference as both doors see it: one object that checks a request, queues it, waits for it and shapes its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum

import structlog

from servers.contract.errors import InvalidRequestError, NotFoundError
from servers.contract.records import InferRequest, InferResponse, OutputTensor
from servers.contract.signature import ModelSignature
from servers.engines.interface import Engine, EngineDescription, EngineError
from servers.models.specification import ModelSpecification
from servers.native.batcher import Batcher, Entry
from servers.native.errors import NotReadyError, RequestExpiredError, ShuttingDownError
from servers.native.statistics import Statistics

log = structlog.get_logger("abserve.inference")

MAX_TIMEOUT_US = 3_600_000_000
_DELAY_THREADS = 256


class State(Enum):
    """Where the served model stands; only READY answers inference requests."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class BatchingSettings:
    """The dynamic batcher's limits; `queue_timeout_us` 0 means none."""

    max_batch_size: int = 32
    max_queue_delay_us: int = 2000
    queue_size: int = 512
    queue_timeout_us: int = 0


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
        added_delay_ms: float = 0,
    ) -> None:
        self.signature = ModelSignature(
            specification.name,
            specification.version,
            specification.inputs,
            specification.outputs,
            batching.max_batch_size,
        )
        self.batching = batching
        self.added_delay_ms = added_delay_ms
        self.statistics = Statistics(batching.max_batch_size)
        self.description: EngineDescription | None = None  # set once, before the state becomes READY
        self._datatypes = {spec.name: spec.datatype for spec in specification.outputs}
        self._build_engine = build_engine
        self._state = State.LOADING
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._delays = ThreadPoolExecutor(_DELAY_THREADS, "added-delay") if added_delay_ms else None
        self._batcher = Batcher(
            max_batch_size=batching.max_batch_size,
            max_queue_delay_ns=batching.max_queue_delay_us * 1000,
            queue_size=batching.queue_size,
            statistics=self.statistics,
            on_complete=self._hand_over,
        )

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
        """Requests that wait in the queue."""
        return self._batcher.pending

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin to load; returns at once. `on_failure` is called in the event loop if the model cannot be served."""
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._batcher.start(self._prepare)

    def stop(self, timeout: float) -> bool:
        """Execute what is queued, then free the engine; blocks. False if that took longer than `timeout` seconds."""
        loading = self._state is State.LOADING
        self._state = State.STOPPING
        if self._delays is not None:
            self._delays.shutdown(wait=False)
        # A load cannot be interrupted, and nobody waits for its end any more.
        return self._batcher.stop(0 if loading else timeout)

    def check_model(self, name: str, version: str | None) -> None:
        """Raises `NotFoundError` unless this server serves that model in that version."""
        if name != self.signature.name:
            raise NotFoundError(f"Request for unknown model: {_shown(name)} is not found")
        if version is not None and version != self.signature.version:
            raise NotFoundError(f"Request for unknown model: {_shown(name)} version {_shown(version)} is not found")

    def check_ready(self) -> None:
        """Raises `UnavailableError` unless the model can answer now."""
        if self._state is State.READY:
            return
        if self._state is State.STOPPING:
            raise ShuttingDownError("the server is shutting down, send the request to another one")
        raise NotReadyError(f"model '{self.signature.name}' is not ready: {self._state.value}")

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request. Raises `ContractError`.

        Cancelling the caller's task takes the request out of the queue if it is still there. The arrays of `request`
        are read until this returns, and after a cancellation until the engine is done with them.
        """
        self.check_ready()
        rows, arrays = self.signature.validate(request)
        timeout_us = self._timeout_us(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Entry] = loop.create_future()
        deadline_ns = time.perf_counter_ns() + timeout_us * 1000 if timeout_us else None
        entry = Entry(arrays, rows, deadline_ns, future)
        self._batcher.submit(entry)
        timer = loop.call_later(timeout_us / 1e6, self._expire, entry) if timeout_us else None
        try:
            await future
        except asyncio.CancelledError:
            self._batcher.withdraw(entry)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if self._delays is not None:
            # Not asyncio.sleep: libuv's timers round to whole milliseconds, and this delay is a planted truth.
            await loop.run_in_executor(self._delays, time.sleep, self.added_delay_ms / 1000)
        return self._answer(request, entry)

    def _answer(self, request: InferRequest, entry: Entry) -> InferResponse:
        if entry.error is not None:
            raise entry.error
        outputs = entry.outputs or {}
        wanted = (
            [(name, request.binary_output) for name in self._datatypes]
            if request.outputs is None
            else [(output.name, output.binary) for output in request.outputs]
        )
        return InferResponse(
            self.signature.name,
            self.signature.version,
            request.id,
            tuple(OutputTensor(name, self._datatypes[name], outputs[name], binary) for name, binary in wanted),
        )

    def _timeout_us(self, request: InferRequest) -> int:
        timeout = request.parameters.get("timeout", self.batching.queue_timeout_us)
        if type(timeout) is not int or not 0 <= timeout <= MAX_TIMEOUT_US:
            raise InvalidRequestError(f"'timeout' must be a whole number of microseconds from 0 to {MAX_TIMEOUT_US}")
        return timeout

    def _expire(self, entry: Entry) -> None:
        if self._batcher.withdraw(entry):
            entry.error = RequestExpiredError("Request timeout expired")
            _resolve([entry])

    def _hand_over(self, entries: Sequence[Entry]) -> None:
        """In the engine thread: wake the waiting requests with one call into the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_resolve, entries)

    def _prepare(self) -> Engine | None:
        """In the engine thread: load and warm up."""
        started_ns = time.perf_counter_ns()
        try:
            engine = self._build_engine()
            engine.load()
            description = engine.describe()
            _check_batch_size(description, self.signature.max_batch_size)
            loaded_ns = time.perf_counter_ns()
            engine.warm_up(warm_up_sizes(self.signature.max_batch_size))
        except EngineError as error:
            log.error("the model cannot be served", reason=str(error))  # noqa: TRY400  the sentence says it all
            self._fail()
            return None
        except Exception:
            log.exception("the model cannot be served")
            self._fail()
            return None
        self.description = description
        if self._state is State.LOADING:
            self._state = State.READY
        log.info(
            "ready",
            model=self.signature.name,
            engine=f"{description.kind} {description.version}",
            precision=description.precision,
            device=description.device,
            weights=description.weights,
            load_s=round((loaded_ns - started_ns) / 1e9, 2),
            warm_up_s=round((time.perf_counter_ns() - loaded_ns) / 1e9, 2),
        )
        return engine

    def _fail(self) -> None:
        self._state = State.FAILED
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_failure)


def _check_batch_size(description: EngineDescription, max_batch_size: int) -> None:
    if description.max_batch_size < max_batch_size:
        raise EngineError(
            f"the engine executes at most {description.max_batch_size} items at once: "
            f"set --max-batch-size {description.max_batch_size} or less"
        )


def warm_up_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two up to `max_batch_size`, and `max_batch_size` itself; ascending."""
    powers = [1 << exponent for exponent in range(max_batch_size.bit_length()) if 1 << exponent < max_batch_size]
    return (*powers, max_batch_size)


def _resolve(entries: Sequence[Entry]) -> None:
    for entry in entries:
        future = entry.token
        assert isinstance(future, asyncio.Future)
        if not future.done():  # its task was cancelled while the engine worked
            future.set_result(entry)


def _shown(name: str) -> str:
    """A client's name in a message: escaped, and never longer than a line."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
