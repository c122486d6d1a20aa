"""The ways from a front end to its engines: in this process, in another one, or in several, one per device."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import msgspec

from servers.engines.processors import cuda_index
from servers.gpu.info import details_on_all
from servers.native.front.inference import wake_all
from servers.native.shared.errors import FailureLog
from servers.native.shared.interface import (
    ApplyStatus,
    CheckCuda,
    CloseRegions,
    ControlModel,
    EngineOperation,
    FrontEndOperation,
    ModelState,
    ModelStatus,
    OpenRegion,
    QueuedRequest,
)
from servers.native.shared.ipc import (
    FORM_UNKNOWN,
    MAX_GROUP_ROWS,
    REQUESTS,
    Cancel,
    Control,
    Done,
    Form,
    Message,
    SentForms,
    Submit,
    UnusableMessage,
    divided,
    encode_all,
    error_of,
    failed,
    failure_of,
    outputs_of,
    read_frames,
    settle,
    submit_message,
    unusable_of,
)
from servers.native.shared.limits import start_task
from servers.native.shared.memory import RequestMemory
from servers.protocol.errors import ContractError, InternalError, InvalidRequestError, UnavailableError
from servers.protocol.records import ModelSignature, shown
from servers.protocol.tensors import Array

log = FailureLog("abserve.front")

DRAIN_POLL_S = 0.01
ENGINE_ENDED = "the engine has ended, send the request again later"

Execute = Callable[[FrontEndOperation], Coroutine[Any, Any, None]]
"""Executes in the front end what the engine's side asks for."""


class BusyPolling:
    """Keeps an event loop from sleeping for a time after each event that matters; belongs to that loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0
        self._awake = False

    def extend(self) -> None:
        """Something has happened, so the next event may come soon."""
        self._until = time.monotonic() + self._seconds
        if not self._awake:
            self._turn()

    def _turn(self) -> None:
        self._awake = time.monotonic() < self._until
        if self._awake:  # a loop with something to do asks its sockets and does not wait for them
            asyncio.get_running_loop().call_soon(self._turn)


class EngineSocket(asyncio.Protocol, ABC):
    """A socket to an engine's side; belongs to the front end's event loop.

    Messages that are sent in one turn of the loop leave together. One that cannot be used fails what it is about.
    """

    def __init__(self, on_end: Callable[[], None], first: int = 0, polling: BusyPolling | None = None) -> None:
        """`on_end` is called when the engine's side has ended; `first` is the number of the first message."""
        self._on_end = on_end
        self._numbers = itertools.count(first)
        self._polling = polling
        self._outgoing: list[Message] = []
        self._unread = bytearray()
        self._transport: asyncio.Transport | None = None
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not subclasses

    def data_received(self, data: bytes) -> None:
        """Messages of the engine's side."""
        if self._polling is not None:
            self._polling.extend()
        for message in read_frames(self._unread, data):
            try:
                if isinstance(message, UnusableMessage):
                    self._fail(message, sent=False)
                else:
                    self._take(message)
            except Exception:  # it must not end the connection: others wait for theirs
                log.exception("a message of the engine could not be used")
                self._fail(unusable_of(message), sent=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The engine's side has ended."""
        self._ended = True
        self._on_end()
        self._lose_all()

    @abstractmethod
    def _take(self, message: Message) -> None:
        """Use a message of the engine's side."""

    @abstractmethod
    def _fail(self, message: UnusableMessage, *, sent: bool) -> None:
        """Fail what a message is about that could not be sent, or not be used: here, or at the engine's side."""

    @abstractmethod
    def _lose_all(self) -> None:
        """Fail all that waits, which nobody will answer."""

    def _send(self, message: Message) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._ended:
            frame, unusable = encode_all(outgoing)
            self._transport.write(frame)
            for message in unusable:
                self._fail(message, sent=True)


class EngineClient(EngineSocket):
    """An `EngineLink` over a socket."""

    def __init__(
        self,
        memory: RequestMemory,
        signatures: list[ModelSignature],
        on_end: Callable[[], None],
        number: int = 0,
        polling: BusyPolling | None = None,
    ) -> None:
        """`number`: which of the engines. `on_end` is called when the engine's process has ended."""
        super().__init__(on_end, polling=polling)
        self._memory = memory
        self._rows, self._own_rows = memory.arena.rows[number], memory.number
        self._answer_bytes = [_answer_bytes(signature) for signature in signatures]
        self._forms = SentForms()
        self._answers_of_forms: dict[int, int] = {}  # bytes of the last answer to a form, where no signature says them
        # With the memory that is kept, whether the last of it is a room for the answer, and the form.
        self._waiting: dict[int, tuple[QueuedRequest, list[Array], bool, int]] = {}
        self._controls: dict[int, asyncio.Future[None]] = {}
        self._execute: Execute | None = None
        self._groups: dict[int, Submit] = {}  # by form: the last of those outgoing that others may join
        self._executing: set[asyncio.Task[Any]] = set()
        self.models: Sequence[ModelStatus] = ()
        """As the engine said last; kept by `EnginePool`."""

    @property
    def rows(self) -> int:
        """Of requests of all front ends that are not complete."""
        return sum(self._rows)

    async def open(self, connected: Sequence[socket.socket], execute: Execute) -> None:
        """Begin to use a connected socket, the only one; `execute` serves the operations of the engine's side."""
        self._execute = execute
        (engine,) = connected
        await asyncio.get_running_loop().create_connection(lambda: self, sock=engine)

    async def drain(self) -> None:
        """Close it once every request has been answered; nothing may be submitted any more."""
        while self._waiting or self._controls:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._transport is not None:
            self._transport.close()

    # EngineLink

    def submit(self, model: int, queued: QueuedRequest) -> None:
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        number_of_form, form = self._forms.number(model, queued.inputs)
        if form is not None:  # those before it had another form of this number
            self._groups.pop(number_of_form, None)
            self._answers_of_forms.pop(number_of_form, None)
            self._send(form)
        answer_bytes = self._answer_bytes[model] * queued.rows
        if not answer_bytes:
            answer_bytes = self._answers_of_forms.setdefault(number_of_form, 0)
        message, memory = submit_message(number, number_of_form, queued, self._memory, answer_bytes)
        queued.engine, queued.number = self, number
        if self._polling is not None:
            self._polling.extend()
        self._rows[self._own_rows] += queued.rows
        self._waiting[number] = queued, memory, message.room is not None, number_of_form
        plain = message.deadline_ns is None and message.room is None and not message.device_outputs
        if plain and message.trace is None and all([isinstance(place, int) for place in message.data[0]]):  # noqa: C419  faster
            group = self._groups.get(number_of_form)
            if group is not None and (len(group.numbers) + 1) * group.rows <= MAX_GROUP_ROWS:
                group.numbers.append(number)
                group.data += message.data
                return
            self._groups[number_of_form] = message
        self._send(message)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:  # noqa: ARG002  see EngineLink
        if queued.number in self._waiting:
            self._send(Cancel(queued.number))
        return False

    async def control(self, operation: EngineOperation) -> None:
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        self._controls[number] = done = asyncio.get_running_loop().create_future()
        self._send(Control(number, operation))
        await done

    # EngineSocket

    def _lose_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for queued, *_ in waiting.values():
            queued.error = InternalError(ENGINE_ENDED)
            self._wake(queued)
        for done in self._controls.values():
            if not done.done():
                done.set_exception(UnavailableError(ENGINE_ENDED))

    def _take(self, message: Message) -> None:
        if isinstance(message, Done):
            self._complete(message)
        elif isinstance(message, Control):
            start_task(self._execute_control(message), self._executing)

    def _fail(self, message: UnusableMessage, *, sent: bool) -> None:
        if message.kind is Form:
            self._forms.forget()
        for reply in failed(message):
            if sent == (message.kind in REQUESTS):
                self._take(reply)
            else:
                self._send(reply)

    def _complete(self, message: Done) -> None:
        if message.failure is not None:
            if message.failure == FORM_UNKNOWN:
                self._forms.forget()
            for number in message.numbers:
                if number in self._waiting:  # else it is complete already, or an operation
                    self._end(number, None, error_of(message.failure))
                else:
                    settle(self._controls, number, message.failure)
        elif len(message.numbers) > 1:
            for number, outputs in divided(message):
                self._end(number, outputs)
        else:
            (number,) = message.numbers
            if number in self._controls:
                settle(self._controls, number, None)
                return
            _, memory, has_room, _ = self._waiting[number]
            self._end(number, outputs_of(message, self._memory.arena, memory[-1] if has_room else None))

    def _end(self, number: int, outputs: dict[str, Array] | None, error: ContractError | None = None) -> None:
        queued, _, _, form = self._waiting.pop(number)
        if form in self._answers_of_forms and outputs is not None:
            self._answers_of_forms[form] = sum(
                array.nbytes
                for name, array in outputs.items()
                if name not in queued.device_outputs and not array.dtype.hasobject
            )
        queued.drop_inputs()
        queued.outputs, queued.error = outputs, error
        self._wake(queued)

    def _flush(self) -> None:
        self._groups = {}
        super()._flush()

    def _wake(self, queued: QueuedRequest) -> None:
        """A request is complete."""
        self._rows[self._own_rows] -= queued.rows
        wake_all([queued])

    async def _execute_control(self, message: Control) -> None:
        """Execute an operation of the engine's side; one that takes long does not delay those after it."""
        failure = None
        try:
            assert self._execute is not None
            assert isinstance(message.operation, FrontEndOperation)
            await self._execute(message.operation)
        except Exception as error:  # noqa: BLE001  the engine's side raises it
            failure = failure_of(error)
        self._send(Done([message.number], [], failure))


def _answer_bytes(signature: ModelSignature) -> int:
    """The bytes of one row's outputs; 0 if they are not known before."""
    if any(-1 in spec.item_shape or spec.dtype.hasobject for spec in signature.outputs):
        return 0
    return sum(prod(spec.item_shape) * spec.dtype.itemsize for spec in signature.outputs)


_ROWS = attrgetter("rows")


class EnginePool:
    """An `EngineLink` over several sockets, one for each device; belongs to the front end's event loop.

    A request goes to the engine with the fewest rows that are not done. System shared memory is registered by the first
    engine. CUDA shared memory is registered by the engine on its GPU, its home, or by the first one, and then by every
    other engine whose GPU reaches it: these execute requests that use it. Each engine has its own models: the server
    shows the state of the engine on which a model is least ready.
    """

    def __init__(
        self,
        devices: Sequence[str],
        memory: RequestMemory,
        signatures: list[ModelSignature],
        on_end: Callable[[], None],
        polling: BusyPolling | None = None,
    ) -> None:
        """`on_end` is called when one of the processes has ended."""
        self._on_end = on_end
        self._engines = [EngineClient(memory, signatures, self._end, place, polling) for place in range(len(devices))]
        self._gpus = [cuda_index(device) for device in devices]
        self._turns = list(self._engines)  # of those with equally few rows, the next one is the first
        self._homes: dict[str, EngineClient] = {}  # by name of a region, of the system as well
        self._peers: dict[str, set[EngineClient]] = {}  # the others that reach it
        self._execute: Execute | None = None
        self._ended = False

    async def open(self, connected: Sequence[socket.socket], execute: Execute) -> None:
        """Begin to use connected sockets, in the order of the devices; `execute`: see `EngineClient`."""
        self._execute = execute
        for engine, engine_socket in zip(self._engines, connected, strict=True):
            await engine.open([engine_socket], partial(self._execute_for, engine))

    async def drain(self) -> None:
        """See `EngineClient`."""
        await asyncio.gather(*(engine.drain() for engine in self._engines))

    # EngineLink

    def submit(self, model: int, queued: QueuedRequest) -> None:
        if queued.device_inputs or queued.device_outputs:
            engine = self._with_regions_of(queued)
        else:
            engine = min(self._turns, key=_ROWS)
        self._turns.remove(engine)
        self._turns.append(engine)
        engine.submit(model, queued)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:
        assert queued.engine is not None
        return queued.engine.withdraw(model, queued)

    async def control(self, operation: EngineOperation) -> None:
        """See `EngineLink`; returns when all engines that it concerns have done it, or raises the first error;
        a load that fails on one is undone on the others."""
        engines = self._engines
        if isinstance(operation, OpenRegion):
            await self._open_region(operation)
            return
        if isinstance(operation, CheckCuda):
            engines = engines[:1]
        results = await asyncio.gather(*(engine.control(operation) for engine in engines), return_exceptions=True)
        failure = next((result for result in results if result is not None), None)
        if failure is None:
            return
        if isinstance(operation, ControlModel) and operation.load:  # half of it would hold memory and serve nobody
            undo = msgspec.structs.replace(operation, load=False)
            loaded = (engine for engine, result in zip(engines, results, strict=True) if result is None)
            await asyncio.gather(*(engine.control(undo) for engine in loaded), return_exceptions=True)
        raise failure

    async def _open_region(self, opening: OpenRegion) -> None:
        home = self._engines[self._gpus.index(opening.device) if opening.device in self._gpus else 0]
        await home.control(opening)
        if opening.device is not None:
            as_peer = msgspec.structs.replace(opening, peer=True)
            asked = (engine.control(as_peer) for engine in self._engines if engine is not home)
            await asyncio.gather(*asked, return_exceptions=True)  # one that cannot have it gets no such requests

    def _with_regions_of(self, queued: QueuedRequest) -> EngineClient:
        """The engine with the fewest rows that reaches the request's CUDA regions, of equals the home of the first;
        the first engine if they have just been unregistered."""
        names = [region for region, *_ in (*queued.device_inputs.values(), *queued.device_outputs.values())]
        homes = [self._homes.get(name, self._engines[0]) for name in names]
        reached = list(zip(homes, [self._peers.get(name, ()) for name in names], strict=True))
        able = [engine for engine in self._turns if all(engine is home or engine in peers for home, peers in reached)]
        if not able:
            raise InvalidRequestError(
                "the request's CUDA regions are on several GPUs, and none reaches all of them: give it those of one GPU"
            )
        return min(able, key=lambda engine: (engine.rows, engine is not homes[0]))

    # Operations of the engines

    async def _execute_for(self, engine: EngineClient, operation: FrontEndOperation) -> None:
        assert self._execute is not None
        if isinstance(operation, ApplyStatus):
            engine.models = operation.models
            of_models = list(zip(*(each.models for each in self._engines), strict=False))
            if of_models and not self._ended:
                await self._execute(ApplyStatus(tuple(combined(statuses) for statuses in of_models)))
        elif isinstance(operation, OpenRegion) and operation.peer:
            self._peers.setdefault(operation.name, set()).add(engine)
        elif isinstance(operation, OpenRegion):
            # A name is taken by the engine that came first, so of two that come at once both may be refused.
            if operation.name in self._homes:
                raise InvalidRequestError(f"region {shown(operation.name)} is registered already: unregister it first")
            await self._execute(operation)
            self._homes[operation.name] = engine
        else:
            for name in operation.names:
                self._peers.get(name, set()).discard(engine)
                if not self._peers.get(name, True):
                    del self._peers[name]
            names = tuple(name for name in operation.names if self._homes.get(name) is engine)
            for name in names:
                del self._homes[name]
            if names:
                await self._execute(CloseRegions(operation.on_device, names))

    def _end(self) -> None:
        self._ended = True
        self._on_end()


def combined(statuses: Sequence[ModelStatus]) -> ModelStatus:
    """A model's least ready state on several engines, with the first one's description, in which all devices are, and
    what proves where the model is on each."""
    least = min((status.state for status in statuses), key=list(ModelState).index)
    descriptions = [status.description for status in statuses if status.description is not None]
    if len(descriptions) < len(statuses):
        return ModelStatus(least, None, statuses[0].version)
    devices = ",".join(description.device for description in descriptions)
    details = details_on_all([description.details for description in descriptions])
    return ModelStatus(least, replace(descriptions[0], device=devices, details=details), statuses[0].version)
