"""The engine's side of a server: its models, what is registered, and the front ends that are told of every change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from servers.models.specification import ModelSpecification
from servers.native.arena import Arena
from servers.native.inference import State
from servers.native.model_host import BuildEngine, ModelHost
from servers.native.queued_request import QueuedRequest
from servers.native.region_register import RegionRegister
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.protocol.errors import ContractError, UnavailableError
from servers.protocol.tensors import like

TELL_SECONDS = 35.0
"""How long a front end may take to do as it is told: longer than the decoding of images that it has accepted."""

MAX_ASKING = 8
"""Threads for what blocks, but for loads and unloads; more wait."""

Offer = tuple[ModelSpecification, BuildEngine]
"""A model to be served, and how its engine is built."""


class FrontEnd(Protocol):
    """A front end as the engine's side sees it."""

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        """These requests of it are complete; any thread."""

    def tell(self, method: str, *arguments: object) -> Future[Any]:
        """Let it do something, after everything that it was told before; any thread."""


class EngineSide:
    """Any thread."""

    def __init__(
        self,
        settings: NativeSettings,
        offers: Sequence[Offer],
        statistics: Sequence[Statistics],
        arena: Arena,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`wake`: see `Batcher`."""
        self._front_ends: list[FrontEnd] = []
        self._lock = threading.RLock()  # so that all front ends are told in the same order
        self.regions = RegionRegister(self._tell, others_come=wake is not None)
        self.hosts = [
            ModelHost(specification, build, settings, own, arena, complete, self._changed, wake)
            for (specification, build), own in zip(offers, statistics, strict=True)
        ]
        self._asking = ThreadPoolExecutor(MAX_ASKING, "asking")
        self._changing = [ThreadPoolExecutor(1, "changing") for _ in self.hosts]
        self._methods: Mapping[str, Callable[..., None]] = {
            "load": self._load,
            "unload": lambda model: self.hosts[model].unload(),
            "register_system": self.regions.register_system,
            "register_cuda": self.regions.register_cuda,
            "unregister": self.regions.unregister,
            "check_cuda": self.regions.check_cuda,
        }

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event) -> None:
        """Begin to load all models; none is READY before `front_ends_open` is set.

        `on_failure` is called, in any thread, when a model cannot be served.
        """
        for host in self.hosts:
            host.start(on_failure, front_ends_open)

    def add(self, front_end: FrontEnd) -> None:
        """A front end has begun: it learns everything."""
        with self._lock:
            self._front_ends.append(front_end)
            front_end.tell("states", self._states())
            for opening in self.regions.openings:
                front_end.tell("open", *opening)

    def remove(self, front_end: FrontEnd) -> None:
        """A front end has ended."""
        with self._lock, suppress(ValueError):
            self._front_ends.remove(front_end)

    def threads(self, method: str, arguments: Sequence[Any]) -> ThreadPoolExecutor:
        """Where `carry_out` may block. A model is loaded and unloaded in its own thread, however many ask for that."""
        return self._changing[arguments[0]] if method in ("load", "unload") else self._asking

    def carry_out(self, method: str, arguments: Sequence[Any]) -> None:
        """What a front end asks for; blocks. Raises `ContractError`."""
        self._methods[method](*arguments)

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """Queue a checked request. Raises `ContractError`."""
        if queued.device_inputs or queued.device_outputs:
            self._open_windows(model, queued)
        self.hosts[model].submit(queued)

    def _open_windows(self, model: int, queued: QueuedRequest) -> None:
        find, inputs = self.regions.window, queued.inputs
        outputs = {
            spec.name: like(spec.dtype, (queued.rows, *spec.item_shape))
            for spec in self.hosts[model].signature.outputs
            if -1 not in spec.item_shape and not spec.dtype.hasobject
        }
        queued.device_inputs = {
            name: find(region, offset, size, inputs[name])
            for name, (region, offset, size) in queued.device_inputs.items()
        }
        queued.device_outputs = {
            name: find(region, offset, size, outputs.get(name))
            for name, (region, offset, size) in queued.device_outputs.items()
        }

    def turn(self) -> float | None:
        """A turn of every model; see `Batcher`."""
        waits = [seconds for host in self.hosts if (seconds := host.turn()) is not None]
        return min(waits, default=None)

    def stop(self, timeout: float) -> bool:
        """Execute the queues and free the engines; blocks. False if that took longer than `timeout` in all."""
        ends = time.perf_counter() + timeout
        finished = [host.stop(max(0.0, ends - time.perf_counter())) for host in self.hosts]
        return all(finished)

    @property
    def failed(self) -> bool:
        return any(host.state is State.FAILED for host in self.hosts)

    def _load(self, model: int) -> None:
        self.hosts[model].load()
        self._changed(True)  # READY was told without waiting

    def _changed(self, wait: bool) -> None:
        """A model has another state: tell the front ends, and wait for them if `wait`."""
        with self._lock:
            answers = self._begin_to_tell("states", self._states())
        if wait:
            _wait_for(answers)

    def _states(self) -> list[tuple[str, object]]:
        return [(host.state.value, msgspec.to_builtins(host.description, enc_hook=str)) for host in self.hosts]

    def _tell(self, method: str, *arguments: object) -> None:
        """Call a method of every front end and wait for all. Raises the first `ContractError`."""
        _wait_for(self._begin_to_tell(method, *arguments))

    def _begin_to_tell(self, method: str, *arguments: object) -> list[Future[Any]]:
        with self._lock:
            return [front_end.tell(method, *arguments) for front_end in self._front_ends]


def _wait_for(answers: Sequence[Future[Any]]) -> None:
    """Raises the first `ContractError`, after all have answered."""
    ends = time.monotonic() + TELL_SECONDS
    errors: list[ContractError] = []
    for answer in answers:
        try:
            answer.result(max(0.0, ends - time.monotonic()))
        except ContractError as error:
            errors.append(error)
        except FutureTimeoutError:
            errors.append(UnavailableError("accepted requests are still being prepared, try again later"))
    if errors:
        raise errors[0]


def complete(requests: Sequence[QueuedRequest]) -> None:
    """Hand each request to its front end, in one call for all that belong to the same."""
    of: dict[FrontEnd, list[QueuedRequest]] = {}
    for queued in requests:
        of.setdefault(queued.owner, []).append(queued)
    for owner, own in of.items():
        owner.complete(own)
