"""A front end's way to the engine in another process; belongs to the front end's event loop.

A front end's way to several engine processes, one for each device; belongs to the front end's event loop.

A request goes to the engine with the fewest rows of this front end that are not done. System shared memory is
registered by the first engine, CUDA shared memory by the engine on its GPU, which alone executes requests that use it.
Each engine has its own models: the server shows the state of the engine on which a model is least ready.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

from servers.engines.processors import cuda_index
from servers.native.batcher import QueuedRequest
from servers.native.errors import FailureLog
from servers.native.inference import ModelState, wake_all
from servers.native.ipc import (
    FAILED,
    FORM_UNKNOWN,
    MAX_GROUP_ROWS,
    REQUESTS,
    Cancel,
    Control,
    ControlDone,
    Form,
    FrameReader,
    Message,
    RequestDone,
    RequestsDone,
    SentForms,
    Submit,
    SubmitMany,
    UnusableMessage,
    divided,
    encode_all,
    error_of,
    failed,
    failure_of,
    outputs_of,
    submit_message,
    unusable_of,
)
from servers.native.memory import RequestMemory
from servers.protocol.errors import InternalError, InvalidRequestError, UnavailableError
from servers.protocol.records import ModelSignature, shown
from servers.protocol.tensors import Array

log = FailureLog("abserve.front")

ENGINE_ENDED = "the engine has ended, send the request again later"

Told = Mapping[str, Callable[..., Coroutine[Any, Any, None]]]


class EngineClient(asyncio.Protocol):
    """An `EngineLink` over a socket. Messages that are sent in one turn of the event loop leave together."""

    def __init__(self, memory: RequestMemory, signatures: list[ModelSignature], on_end: Callable[[], None]) -> None:
        """`on_end` is called when the engine's process has ended."""
        self._memory = memory
        self._answer_bytes = [_answer_bytes(signature) for signature in signatures]
        self._on_end = on_end
        self._numbers = itertools.count()
        self._forms = SentForms()
        # With the memory that is kept, and whether the last of it is a room for the answer.
        self._waiting: dict[int, tuple[QueuedRequest, list[Array], bool]] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._told: Told = {}
        self._outgoing: list[Message] = []
        self._groups: dict[int, SubmitMany] = {}  # by form: those that are outgoing
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._carrying_out: set[asyncio.Task[None]] = set()
        self._ended = False

    async def open(self, connected: socket.socket, told: Told) -> None:
        """Begin to use a connected socket; `told` is what the engine's side may tell the front end."""
        self._told = told
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connected)

    # EngineLink

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """See `EngineLink`."""
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        answer_bytes = self._answer_bytes[model] * queued.rows
        number_of_form, form = self._forms.number(model, queued.inputs)
        if form is not None:
            self._groups.pop(number_of_form, None)  # those before it had another form of this number
            self._send(form)
        message, kept = submit_message(number, number_of_form, queued, self._memory, answer_bytes)
        queued.number = number
        self._waiting[number] = queued, kept, message.room is not None
        plain = message.deadline_ns is None and message.room is None and not message.device_outputs
        if plain and all([isinstance(one, int) for one in message.data]):  # noqa: C419  faster
            self._send_together(message)
        else:
            self._send(message)

    def withdraw(self, model: int, queued: QueuedRequest) -> bool:  # noqa: ARG002  see EngineLink
        """See `EngineLink`."""
        if queued.number in self._waiting:
            self._send(Cancel(queued.number))
        return False

    async def ask(self, method: str, *arguments: object) -> None:
        """See `EngineLink`."""
        if self._ended:
            raise UnavailableError(ENGINE_ENDED)
        number = next(self._numbers)
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        self._send(Control(number, method, list(arguments)))
        await answer

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not subclasses

    def data_received(self, data: bytes) -> None:
        """Messages of the engine's side."""
        for message in self._reader.feed(data):
            try:
                self._take(message)
            except Exception:  # it must not end the connection: others wait for theirs
                log.exception("a message of the engine could not be used")
                self._fail(unusable_of(message), sent=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        """The engine's process has ended: nothing that waits will be answered by it."""
        self._ended = True
        self._on_end()
        waiting, self._waiting = self._waiting, {}
        for queued, _, _ in waiting.values():
            queued.error = InternalError(ENGINE_ENDED)
            self._wake(queued)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(UnavailableError(ENGINE_ENDED))

    def _take(self, message: Message | UnusableMessage) -> None:
        if isinstance(message, RequestsDone):
            for number, outputs in divided(message):
                self._succeed(number, outputs)
        elif isinstance(message, RequestDone):
            self._complete(message)
        elif isinstance(message, Control):
            task = asyncio.get_running_loop().create_task(self._carry_out(message))
            self._carrying_out.add(task)
            task.add_done_callback(self._carrying_out.discard)
        elif isinstance(message, ControlDone):
            self._answered(message)
        elif isinstance(message, UnusableMessage):
            self._fail(message, sent=False)

    def _fail(self, message: UnusableMessage, *, sent: bool) -> None:
        """Fail what a message is about that could not be sent, or not be used: here, or at the engine's side."""
        if message.kind is Form:
            self._forms.forget()
        for reply in failed(message, FAILED):
            if sent == (message.kind in REQUESTS):
                with suppress(KeyError):  # it is complete already
                    self._take(reply)
            else:
                self._send(reply)

    def _answered(self, message: ControlDone) -> None:
        answer = self._asked.pop(message.number, None)
        if answer is None or answer.done():
            return
        if message.failure is None:
            answer.set_result(None)
        else:
            answer.set_exception(error_of(message.failure))

    def _succeed(self, number: int, outputs: dict[str, Array]) -> None:
        queued, _, _ = self._waiting.pop(number)
        queued.drop_inputs()
        queued.outputs = outputs
        self._wake(queued)

    def _complete(self, message: RequestDone) -> None:
        queued, kept, has_room = self._waiting[message.number]
        if message.failure is None:
            queued.outputs = outputs_of(message, self._memory.arena, kept[-1] if has_room else None)
        else:
            queued.error = error_of(message.failure)
            if message.failure == FORM_UNKNOWN:
                self._forms.forget()
        del self._waiting[message.number]
        queued.drop_inputs()
        self._wake(queued)

    def _send_together(self, message: Submit) -> None:
        """Send a request with the others of its form that come in the same turn."""
        group = self._groups.get(message.form)
        if group is None or (len(group.numbers) + 1) * message.rows > MAX_GROUP_ROWS:
            group = self._groups[message.form] = SubmitMany([], message.form, message.rows, [])
            self._send(group)
        group.numbers.append(message.number)
        group.data.append(message.data)  # type: ignore[arg-type]  # all are offsets

    def _send(self, message: Message) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._groups = {}
        if self._transport is not None and not self._ended:
            frame, unusable = encode_all(outgoing)
            self._transport.write(frame)
            for message in unusable:
                self._fail(message, sent=True)

    def _wake(self, queued: QueuedRequest) -> None:
        """A request is complete."""
        wake_all([queued])

    async def _carry_out(self, message: Control) -> None:
        """Do what the engine's side tells; what takes long does not delay what it tells next."""
        failure = None
        try:
            await self._told[message.method](*message.arguments)
        except Exception as error:  # noqa: BLE001  the engine's side raises it
            failure = failure_of(error)
        self._send(ControlDone(message.number, failure))


def _answer_bytes(signature: ModelSignature) -> int:
    """The bytes of one row's outputs; 0 if they are not known before."""
    if any(-1 in spec.item_shape or spec.dtype.hasobject for spec in signature.outputs):
        return 0
    return sum(prod(spec.item_shape) * spec.dtype.itemsize for spec in signature.outputs)


_LEAST_READY_FIRST = [
    state.value
    for state in (
        ModelState.FAILED,
        ModelState.STOPPING,
        ModelState.UNLOADED,
        ModelState.LOADING,
        ModelState.ACCEPTING,
        ModelState.READY,
    )
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
