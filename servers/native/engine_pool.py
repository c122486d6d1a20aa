"""A front end's way to several engine processes, one for each device; belongs to the front end's event loop.

A request goes to the engine with the fewest rows of this front end that are not done. System shared memory is
registered by the first engine, CUDA shared memory by the engine on its GPU, which alone executes requests that use it.
Each engine has its own models: the server shows the state of the engine on which a model is least ready.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from servers.engines.processors import cuda_index
from servers.native.arena import RequestMemory
from servers.native.engine_client import EngineClient, Told
from servers.native.inference import State
from servers.native.queued_request import QueuedRequest
from servers.protocol.errors import InvalidRequestError
from servers.protocol.records import ModelSignature, shown

_LEAST_READY_FIRST = [
    state.value for state in (State.FAILED, State.STOPPING, State.UNLOADED, State.LOADING, State.ACCEPTING, State.READY)
]
_BY_THE_FIRST = ("register_system", "check_cuda")

ModelState = tuple[str, Any]
"""What an engine process says about a model: its state, and its engine's description or None."""


class _Engine(EngineClient):
    """An engine process, with what it has to do for this front end."""

    def __init__(self, memory: RequestMemory, signatures: list[ModelSignature], on_end: Callable[[], None]) -> None:
        super().__init__(memory, signatures, on_end)
        self.rows = 0
        self.states: Sequence[ModelState] = ()

    def submit(self, model: int, queued: QueuedRequest) -> None:
        super().submit(model, queued)
        self.rows += queued.rows
        queued.owner = self

    def _wake(self, queued: QueuedRequest) -> None:
        self.rows -= queued.rows
        super()._wake(queued)


_ROWS = attrgetter("rows")


class EnginePool:
    """An `EngineLink` over several sockets."""

    def __init__(
        self,
        devices: Sequence[str],
        memory: RequestMemory,
        signatures: list[ModelSignature],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` is called when one of the processes has ended."""
        self._on_end = on_end
        self._engines = [_Engine(memory, signatures, self._end) for _ in devices]
        self._gpus = [cuda_index(device) for device in devices]
        self._turns = list(self._engines)  # of those with equally few rows, the next one is the first
        self._regions: dict[str, _Engine] = {}  # by name, of the system as well: who has registered it
        self._told: Told = {}
        self._ended = False

    async def open(self, connected: Sequence[socket.socket], told: Told) -> None:
        """Begin to use connected sockets, in the order of the devices; `told`: see `EngineClient`."""
        self._told = told
        methods: Told = {"states": self._apply, "open": self._open, "forget": self._forget}
        for engine, one in zip(self._engines, connected, strict=True):
            await engine.open(one, {name: partial(method, engine) for name, method in methods.items()})

    # EngineLink

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """See `EngineLink`."""
        if queued.device_inputs or queued.device_outputs:
            engine = self._with_regions_of(queued)
        else:
            engine = min(self._turns, key=_ROWS)
            self._turns.remove(engine)
            self._turns.append(engine)
        engine.submit(model, queued)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        """See `EngineLink`."""
        engine: _Engine = queued.owner
        return engine.withdraw(model, queued)

    async def ask(self, method: str, *arguments: object) -> None:
        """See `EngineLink`; returns when all engines that it concerns have done it, or raises the first error."""
        engines = self._engines
        if method in _BY_THE_FIRST:
            engines = engines[:1]
        elif method == "register_cuda":
            engines = [engines[self._gpus.index(arguments[2])]] if arguments[2] in self._gpus else engines[:1]
        answers = await asyncio.gather(*(one.ask(method, *arguments) for one in engines), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    def _with_regions_of(self, queued: QueuedRequest) -> _Engine:
        """The engine that has the request's CUDA regions; the first one if they have just been unregistered."""
        places = (*queued.device_inputs.values(), *queued.device_outputs.values())
        engines = {self._regions.get(region, self._engines[0]) for region, *_ in places}
        if len(engines) > 1:
            raise InvalidRequestError("the request's CUDA regions are on several GPUs: give it those of one GPU")
        return engines.pop()

    # What the engines tell

    async def _apply(self, engine: _Engine, states: Sequence[ModelState]) -> None:
        engine.states = states
        of_models = list(zip(*(one.states for one in self._engines), strict=False))
        if of_models and not self._ended:
            await self._told["states"]([combined(states) for states in of_models])

    async def _open(self, engine: _Engine, name: str, *opening: object) -> None:
        """A name is taken by the engine that came first, so of two that come at once both may be refused."""
        if name in self._regions:
            raise InvalidRequestError(f"region {shown(name)} is registered already: unregister it first")
        await self._told["open"](name, *opening)
        self._regions[name] = engine

    async def _forget(self, engine: _Engine, names: Sequence[str]) -> None:
        own = [name for name in names if self._regions.get(name) is engine]
        for name in own:
            del self._regions[name]
        await self._told["forget"](own)

    def _end(self) -> None:
        self._ended = True
        self._on_end()


def combined(states: Sequence[ModelState]) -> ModelState:
    """A model's least ready state on several engines, with the first one's description, in which all devices are."""
    least = min((state for state, _ in states), key=_LEAST_READY_FIRST.index)
    descriptions = [description for _, description in states]
    if None in descriptions:
        return least, None
    return least, {**descriptions[0], "device": ",".join(one["device"] for one in descriptions)}
