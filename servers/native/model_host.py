"""One served model on the engine's side: its engine, its queue, and its life from loading to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import structlog

from servers.engines.batches import warm_up_sizes
from servers.engines.interface import Engine, EngineDescription, EngineError, profiled
from servers.engines.padding import padding_of
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.arena import Arena
from servers.native.batcher import Batcher
from servers.native.errors import SHUTTING_DOWN, NotReadyError, ShuttingDownError
from servers.native.inference import State, signature_of
from servers.native.queued_request import QueuedRequest
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.protocol.errors import ContractError, InternalError, UnavailableError
from servers.protocol.records import ModelSignature

log = structlog.get_logger("abserve.loading")

UNLOAD_SECONDS = 30

_LOADING = threading.Lock()
"""Models of one process load one after the other: while one captures CUDA graphs, no other may wait for a device."""

BuildEngine = Callable[[EngineSettings], Engine]
"""Builds a model's engine; called in the engine thread, where its imports block nothing else."""


class ModelHost:
    """Any thread; `load` and `unload` block."""

    def __init__(
        self,
        specification: ModelSpecification,
        build_engine: BuildEngine,
        settings: NativeSettings,
        statistics: Statistics,
        arena: Arena,
        on_complete: Callable[[Sequence[QueuedRequest]], None],
        on_change: Callable[[bool], None],
        wake: Callable[[], None] | None,
    ) -> None:
        """`on_complete` gets requests that the engine is done with.

        `wake`: see `Batcher`.
        `on_change` is called when `state` or `description` is another; with True it returns when all front ends know.
        """
        self.signature = signature_of(specification, settings)
        self.state = State.LOADING
        self.description: EngineDescription | None = None  # set before the state becomes READY, None once unloaded
        self._build_engine = partial(build_engine, settings.engine_settings())
        self._settings = settings
        self._statistics = statistics
        self._arena = arena
        self.padding = padding_of(specification, settings.pad_sizes)
        self._on_complete = on_complete
        self._on_change = on_change
        self._wake = wake
        self._on_failure: Callable[[], None] = lambda: None
        self._front_ends_open: threading.Event | None = None
        self._control = threading.Lock()
        self._settled = threading.Event()  # the load has ended, with or without success
        self._batcher = self._new_batcher()

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event) -> None:
        """Begin to load; returns at once. `on_failure` is called, in any thread, if the model cannot be served.

        The model is not READY before `front_ends_open` is set.
        """
        self._on_failure = on_failure
        self._front_ends_open = front_ends_open
        self._batcher.start(self._prepare)

    def load(self) -> None:
        """Load an unloaded model again; returns when it is ready. Raises `ContractError`."""
        with self._control:
            if self.state not in (State.UNLOADED, State.FAILED):
                self._check_ready()
                return
            self._finish()
            self._batcher = self._new_batcher()
            self._on_failure = lambda: None  # the client gets the error, and the server goes on
            self._settled.clear()
            self._change(State.LOADING)
            self._batcher.start(self._prepare)
            self._settled.wait()
            if self.state is State.FAILED:
                raise InternalError(f"model '{self.signature.name}' failed to load, the server's log has the reason")

    def unload(self) -> None:
        """Refuse new requests, finish the accepted ones and free the engine. Raises `ContractError`."""
        with self._control:
            if self.state not in (State.UNLOADED, State.FAILED):
                self._check_ready()
            self._change(State.UNLOADED, wait=True)
            self._finish()

    def submit(self, queued: QueuedRequest) -> None:
        """Queue a checked request. Raises `UnavailableError`."""
        self._batcher.submit(queued)

    @property
    def takes_addresses(self) -> bool:
        """Whether the inputs of a request may be `HostMemory`."""
        return self._batcher.takes_addresses

    def turn(self) -> float | None:
        """See `Batcher`."""
        return self._batcher.turn()

    def withdraw(self, queued: QueuedRequest, instead: Sequence[QueuedRequest] = ()) -> bool:
        """Take it back; True if the engine will not execute it and `on_complete` will not get it. See `Batcher`."""
        return self._batcher.withdraw(queued, instead)

    def stop(self, timeout: float) -> bool:
        """Execute the queue, then free the engine. False if that took longer than `timeout` seconds."""
        loading = self.state in (State.LOADING, State.ACCEPTING)
        self.state = State.STOPPING
        # A load cannot be interrupted, so do not wait for it.
        return self._batcher.stop(0 if loading else timeout)

    def _check_ready(self) -> None:
        if self.state is State.STOPPING:
            raise ShuttingDownError(SHUTTING_DOWN)
        if self.state is not State.READY:
            raise NotReadyError(f"model '{self.signature.name}' is not ready: {self.state.value}")

    def _finish(self) -> None:
        if not self._batcher.stop(UNLOAD_SECONDS):
            raise UnavailableError(f"model '{self.signature.name}' still finishes accepted requests, try again later")
        self.description = None  # nothing is in effect any more
        self._on_change(True)

    def _change(self, state: State, *, wait: bool = False) -> None:
        if self.state is not State.STOPPING:
            self.state = state
        self._on_change(wait)
        if state is State.FAILED:
            self._on_failure()

    def _prepare(self) -> Engine | None:
        """Load and warm up, in the engine thread. None when that failed, after the log has the reason."""
        engine: Engine | None = None
        try:
            with _LOADING:
                engine, self.description = _load_engine(self._build_engine, self.signature)
        except EngineError as error:
            log.error("the model cannot be served", reason=str(error))  # noqa: TRY400  the sentence says it all
        except Exception:
            log.exception("the model cannot be served")
        if engine is not None and engine.device_index is not None:
            self._arena.page_locks = True
        if engine is not None and self._front_ends_open is not None:
            self._front_ends_open.wait()
        if engine is not None:
            with suppress(ContractError):  # a front end that does not answer learns it all the same
                self._change(State.ACCEPTING, wait=True)
        self._change(State.FAILED if engine is None else State.READY)
        self._settled.set()
        return engine

    def _broken(self) -> None:
        """The engine broke: the server ends, or stays not ready, and its supervisor sees that. In the engine thread."""
        if self.state in (State.LOADING, State.ACCEPTING, State.READY):
            self._change(State.FAILED)
        self._settled.set()

    def _new_batcher(self) -> Batcher:
        check_values = self.signature.check_values if self.signature.id_counts else None
        own = self._settings, self._statistics, self._on_complete, self._broken
        return Batcher(*own, self.padding, check_values, self._arena, self._wake)


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
