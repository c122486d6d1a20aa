"""A served model where it is executed, from loading to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog

from servers.engines.agreement import check_finite, proof_at_load
from servers.engines.batches import warm_up_sizes
from servers.engines.choice import choices_folder
from servers.engines.interface import Engine, EngineDescription, EngineError, profiled
from servers.engines.padding import padding_of
from servers.engines.settings import EngineSettings
from servers.models.specification import ModelSpecification
from servers.native.engine.batcher import Batcher, LoopBatcher
from servers.native.shared.errors import NOT_RELOADED
from servers.native.shared.interface import ModelState, QueuedRequest, check_ready, signature_of
from servers.native.shared.memory import Arena
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.options.stages import stage, stages
from servers.protocol.errors import ContractError, InternalError, UnavailableError
from servers.protocol.records import ModelSignature

log = structlog.get_logger("abserve.engine")

UNLOAD_SECONDS = 30

_LOADING = threading.Lock()
"""Models of one process load one after the other: while one captures CUDA graphs, no other may wait for a device."""

BuildEngine = Callable[[EngineSettings], Engine]
"""Builds a model's engine; called in the engine thread, where its imports block nothing else."""
Offer = tuple[ModelSpecification, BuildEngine]
"""A model to be served, and how its engine is built."""


class ModelHost:
    """One served model: its engine, its queue, and its life from loading to the end. Any thread; some methods block."""

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
        reloaded: bool = False,
    ) -> None:
        """`on_complete` gets requests that the engine is done with. `wake`: see `LoopBatcher`. One that is `reloaded`
        is to replace a model that is served: it has to prove itself before it is ready. `on_change` is called when
        `state` or `description` is another; with True it returns when all front ends know."""
        self.signature = signature_of(specification, settings)
        self.state = ModelState.LOADING
        self.description: EngineDescription | None = None  # set before the state becomes READY, None once unloaded
        self._build_engine = partial(build_engine, settings.engine_settings())
        self._proof = proof_at_load(specification.executed, settings.max_batch_size) if reloaded else None
        self._no_use = NOT_RELOADED if reloaded else "the model cannot be served"
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
        self._thread: threading.Thread | None = None
        self.batcher: Batcher | None = None
        """The queue of requests, from the end of the first load on."""
        self.takes_addresses = False
        """Whether the inputs of a request may be `HostMemory`."""

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event) -> None:
        """Begin to load; returns at once. `on_failure` is called, in any thread, if the model cannot be served. The
        model is not READY before `front_ends_open` is set."""
        self._on_failure = on_failure
        self._front_ends_open = front_ends_open
        self._start_thread()

    def load(self) -> None:
        """Load an unloaded model again; returns when it is ready. Raises `ContractError`."""
        with self._control:
            if self.state not in (ModelState.UNLOADED, ModelState.FAILED):
                check_ready(self.signature.name, self.state)
                return
            self._finish()
            self._on_failure = lambda: None  # the client gets the error, and the server goes on
            self._settled.clear()
            self._change(ModelState.LOADING)
            self._start_thread()
            self._settled.wait()
            if self.state is ModelState.FAILED:
                raise InternalError(f"model '{self.signature.name}' failed to load, the server's log has the reason")

    def unload(self) -> None:
        """Refuse new requests, finish the accepted ones and free the engine. Raises `ContractError`."""
        with self._control:
            if self.state not in (ModelState.UNLOADED, ModelState.FAILED):
                check_ready(self.signature.name, self.state)
            self._change(ModelState.UNLOADED, wait=True)
            self._finish()

    def stop(self, timeout: float) -> bool:
        """Execute the queue, then free the engine. False if that took longer than `timeout` seconds."""
        loading = self.state in (ModelState.LOADING, ModelState.ACCEPTING)
        self.state = ModelState.STOPPING
        # A load cannot be interrupted, so do not wait for it.
        if self.batcher is None:
            return self._thread is None or not loading
        return self.batcher.stop(0 if loading else timeout)

    def _finish(self) -> None:
        if self.batcher is not None and not self.batcher.stop(UNLOAD_SECONDS):
            raise UnavailableError(f"model '{self.signature.name}' still finishes accepted requests, try again later")
        self.description = None  # nothing is in effect any more
        self._on_change(True)

    def _change(self, state: ModelState, *, wait: bool = False) -> None:
        if self.state is not ModelState.STOPPING:
            self.state = state
        self._on_change(wait)
        if state is ModelState.FAILED:
            self._on_failure()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Load, and execute unless the process's loop does that; in the engine's thread."""
        batcher = self._load_batcher()
        if batcher is None:
            self._change(ModelState.FAILED)
            self._settled.set()
            return
        self.batcher = batcher
        self.takes_addresses = batcher.takes_addresses
        try:
            if self.state is ModelState.STOPPING:  # since the load began
                batcher.stop(0)
            elif self._front_ends_open is not None:
                self._front_ends_open.wait()
            with suppress(ContractError):  # a front end that does not answer learns it all the same
                self._change(ModelState.ACCEPTING, wait=True)
            self._change(ModelState.READY)
        except Exception:
            log.exception("the thread of an engine failed")
            batcher.fail()
        self._settled.set()
        batcher.run()

    def _load_batcher(self) -> Batcher | None:
        """Load and warm up. None when that failed, after the log has the reason."""
        check_values = self.signature.check_values if self.signature.id_counts else None
        try:
            with _LOADING:
                engine, self.description = _load_engine(self._build_engine, self.signature)
                if self._proof is not None:
                    check_finite(self._proof, engine.infer)
            if engine.device_index is not None:
                self._arena.page_locks = True
            kind = LoopBatcher if engine.flights > 1 and self._wake is not None else Batcher
            return kind(
                engine,
                self._settings,
                self._statistics,
                self._on_complete,
                self._broken,
                self.padding,
                check_values,
                self._arena,
                self._wake,
            )
        except EngineError as error:
            log.error(self._no_use, reason=str(error))  # noqa: TRY400  the sentence says it all
        except Exception:
            log.exception(self._no_use)
        return None

    def _broken(self) -> None:
        """The engine broke: the server ends, or stays not ready, and its supervisor sees that. In the engine thread."""
        if self.state in (ModelState.LOADING, ModelState.ACCEPTING, ModelState.READY):
            self._change(ModelState.FAILED)
        self._settled.set()


def _load_engine(build_engine: Callable[[], Engine], signature: ModelSignature) -> tuple[Engine, EngineDescription]:
    """A loaded and warm engine; blocks, in the thread that will use it. Raises `EngineError` and whatever it raises."""
    started_ns = time.perf_counter_ns()
    with stage("build"):
        engine = build_engine()
    log.info("engine imported", model=signature.name)  # a step of a cold start, as is "weights loaded"
    with stage("load"):
        engine.load()
    log.info("weights loaded", model=signature.name)
    description = engine.describe()
    if description.max_batch_size < signature.max_batch_size:
        most = description.max_batch_size
        raise EngineError(f"the engine executes at most {most} items at once: set --max-batch-size {most} or less")
    loaded_ns = time.perf_counter_ns()
    with stage("warm_up"):
        engine.warm_up(warm_up_sizes(signature.max_batch_size))
    start = stages()
    description = profiled(engine) or description
    if trouble := description.details.get("choice_trouble"):
        log.warning(trouble, model=signature.name)
    if chosen := description.details.get("choices"):
        log.info("choices", model=signature.name, choices=chosen, stored_in=str(choices_folder()))
    log.info(
        "ready",
        model=signature.name,
        engine=f"{description.kind} {description.version}",
        precision=description.precision,
        device=description.device,
        weights=description.weights,
        load_s=round((loaded_ns - started_ns) / 1e9, 2),
        warm_up_s=round((time.perf_counter_ns() - loaded_ns) / 1e9, 2),
        **({} if (plans_s := description.details.get("plan_seconds")) is None else {"plans_s": plans_s}),
    )
    log.info("start", model=signature.name, **{f"{name}_s": seconds for name, seconds in start.items()})
    return engine, replace(description, details={**description.details, "start": start})
