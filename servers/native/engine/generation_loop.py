"""The engine's side of a language model: the loop that steps a generating engine, and the process that it is alone in.

One thread does everything with the engine. Between two steps it takes what front ends have sent: requests that came and
requests whose client has left, so that a slot is free within one step. All tokens of a step that belong to one front
end are one message; while the front end writes them to its clients the engine is in the next step already.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import structlog

from servers.engines.interface import EngineDescription
from servers.engines.processors import openmp_spinning
from servers.engines.settings import EngineError
from servers.language.engine import Emission, GeneratingEngine, GenerationRequest
from servers.native.engine.process import FrontEndChannel, FrontEnds, read_supervisor
from servers.native.shared.errors import RefusedError, shutting_down
from servers.native.shared.interface import ApplyStatus, FrontEndOpened, ModelState, ModelStatus
from servers.native.shared.ipc import (
    Cancel,
    Control,
    Done,
    Failure,
    Finished,
    Generate,
    Generated,
    Message,
    UnusableMessage,
    failure_of,
)
from servers.native.shared.memory import Arena
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.protocol.errors import ContractError, InternalError

log = structlog.get_logger("abserve.engine")

BuildGeneratingEngine = Callable[[], GeneratingEngine]
"""Makes the engine, in its thread: its imports take seconds."""


class GenerationLoop:
    """The thread of a generating engine, from loading to the end. Any thread calls the public methods."""

    _engine: GeneratingEngine
    """Loaded before the first message is read."""

    def __init__(
        self,
        build: BuildGeneratingEngine,
        settings: NativeSettings,
        statistics: Statistics,
        arena: Arena,
        on_failure: Callable[[], None],
    ) -> None:
        """`on_failure` is called, in the thread, when the model cannot be served; then the thread ends."""
        self._build = build
        self._settings = settings
        self._statistics = statistics
        self._on_failure = on_failure
        self._front_ends = FrontEnds(arena, self._handle, self._remove)
        self._incoming: deque[socket.socket] = deque()
        self._owners: dict[int, FrontEndChannel] = {}
        """By number: whose request it is, of all that wait or are generated."""
        self._client_of: dict[int, str] = {}
        self._clients: Counter[str] = Counter()
        """How many of these each client has, where that is limited."""
        self._unaware: list[Future[None]] = []
        """Of front ends that did not know the state yet when the last one of them was told."""
        self._queue: OrderedDict[int, Generate] = OrderedDict()
        """By number: requests that the engine has not got, because its slots are taken."""
        self._state = ModelState.LOADING
        self._description: EngineDescription | None = None
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failed = False

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def add(self, connected: socket.socket) -> None:
        """A front end's socket."""
        self._incoming.append(connected)
        self._front_ends.wake()

    def stop(self, timeout: float) -> bool:
        """Finish accepted requests; False if that took longer than `timeout` seconds."""
        self._stop_by = time.monotonic() + timeout
        self._front_ends.wake()
        if self._state is not ModelState.LOADING:  # a load cannot be interrupted, so do not wait for it
            self._thread.join(timeout)
        return not self._thread.is_alive() and not self._owners

    # In the thread

    def _run(self) -> None:
        engine: GeneratingEngine | None = None
        try:
            engine = self._build()
            engine.load()
            engine.warm_up()
            self._description = describe(engine)
            if trouble := self._description.details.get("choice_trouble"):
                log.warning(trouble)
            self._engine = engine
            self._set_state(ModelState.ACCEPTING)
            self._serve(engine)
        except EngineError as error:
            log.error("the model cannot be served", reason=str(error))  # noqa: TRY400  the sentence says it all
            self._fail()
        except Exception:
            log.exception("the model cannot be served")
            self._fail()
        finally:
            self._front_ends.close()
            if engine is not None:
                with suppress(Exception):
                    engine.close()

    def _serve(self, engine: GeneratingEngine) -> None:
        slots, queue, statistics = engine.slots, self._queue, self._statistics
        while self._stop_by is None or (self._owners and time.monotonic() < self._stop_by):
            self._front_ends.turn(None if not self._owners else 0)
            self._open_incoming()
            if self._state is ModelState.ACCEPTING and self._all_know:
                self._set_state(ModelState.READY)
            while queue and engine.active + engine.waiting < slots:
                self._add(engine, queue.popitem(last=False)[1])
            rows = min(slots, engine.active + engine.waiting)
            if rows:
                started_ns = time.perf_counter_ns()
                emissions = engine.step()
                if emissions:
                    self._send(emissions)
                statistics.record_step(rows, sum([len(emission.tokens) for emission in emissions]), started_ns)
            statistics.set_queued(len(queue) + engine.waiting)
            statistics.set_slots_in_use(engine.active)

    def _open_incoming(self) -> None:
        while self._incoming:
            self._notify(self._front_ends.add(self._incoming.popleft()))

    def _refuse(self, channel: FrontEndChannel, message: UnusableMessage) -> None:
        """End what a message is about that cannot be used: its client would wait until its own deadline."""
        if message.kind is not Generate:
            channel.fail(message, sent=False)
            return
        for number in message.numbers:
            if number in self._owners:
                self._disown(number)
            self._queue.pop(number, None)
            self._end(channel, number, failure_of(InternalError("the engine could not use the request")))

    def _handle(self, channel: FrontEndChannel, message: Message | UnusableMessage) -> None:
        if isinstance(message, Generate):
            self._accept(channel, message)
        elif isinstance(message, Cancel):
            self._cancel(message.number)
        elif isinstance(message, Done):
            channel.operation_done(message)
        elif isinstance(message, Control) and isinstance(message.operation, FrontEndOpened):
            channel.is_open = True
        elif isinstance(message, UnusableMessage):
            self._refuse(channel, message)

    def _accept(self, channel: FrontEndChannel, message: Generate) -> None:
        engine = self._engine
        free = max(0, engine.slots - engine.active - engine.waiting)  # these do not wait beyond the running step
        if len(self._queue) >= self._settings.queue_size + free:
            full = RefusedError("queue_full", f"Exceeds maximum queue size of {self._settings.queue_size} requests")
            self._end(channel, message.number, failure_of(full))
        elif self._stop_by is not None:
            self._end(channel, message.number, failure_of(shutting_down()))
        elif message.client and self._clients[message.client] >= self._settings.max_client_requests:
            most = RefusedError(
                "queue_full", f"this client has {self._settings.max_client_requests} requests under way"
            )
            self._end(channel, message.number, failure_of(most))
        else:
            if message.client:
                self._client_of[message.number] = message.client
                self._clients[message.client] += 1
            self._owners[message.number] = channel
            self._queue[message.number] = message

    def _add(self, engine: GeneratingEngine, message: Generate) -> None:
        waited_ns = time.perf_counter_ns() - message.received_ns
        request = GenerationRequest(message.number, message.prompt, message.max_tokens, message.ignore_eos)
        try:
            engine.add(request)
        except ContractError as error:
            self._end(self._disown(message.number), message.number, failure_of(error))
        else:
            self._statistics.record_prompt(len(message.prompt), waited_ns)

    def _cancel(self, number: int) -> None:
        if number not in self._owners:  # it is finished
            return
        self._disown(number)
        if self._queue.pop(number, None) is None:
            self._engine.cancel(number)

    def _send(self, emissions: Sequence[Emission]) -> None:
        """One message for each front end that has a request among these."""
        owners = self._owners
        messages: dict[FrontEndChannel, Generated] = {}
        for emission in emissions:
            number, tokens = emission.number, emission.tokens
            channel = owners.get(number)
            if channel is None:  # cancelled while the step ran
                continue
            message = messages.get(channel)
            if message is None:
                message = messages[channel] = Generated([], [], [], [])
            if emission.finish is not None:
                self._disown(number)
                failure = None
                if emission.finish == "error":
                    failure = failure_of(InternalError(emission.message or "the engine could not generate the answer"))
                message.finished.append(Finished(number, list(tokens), emission.finish, failure))
            elif len(tokens) == 1:
                message.numbers.append(number)
                message.tokens.append(tokens[0])
            elif tokens:
                message.several.append((number, list(tokens)))
        for channel, message in messages.items():
            channel.send([message])

    def _disown(self, number: int) -> FrontEndChannel:
        """A request has ended: forget whose it is."""
        if (client := self._client_of.pop(number, None)) is not None:
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]
        return self._owners.pop(number)

    def _end(self, channel: FrontEndChannel, number: int, failure: Failure) -> None:
        channel.send([Generated([], [], [], [Finished(number, [], "error", failure)])])

    def _remove(self, channel: FrontEndChannel) -> None:
        """A front end has ended, and with it the connections of its clients."""
        for number in [number for number, owner in self._owners.items() if owner is channel]:
            self._cancel(number)

    # States

    def _set_state(self, state: ModelState) -> None:
        """Tell all front ends."""
        self._state = state
        for channel in self._front_ends.channels:
            self._notify(channel)
        self._open_incoming()

    def _notify(self, channel: FrontEndChannel) -> None:
        status = ApplyStatus((ModelStatus(self._state, self._description),))
        self._unaware = [*(told for told in self._unaware if not told.done()), channel.notify(status)]

    @property
    def _all_know(self) -> bool:
        """Whether all front ends know the state, and answer clients: a model that is accepting is ready then."""
        opened = self._front_ends.open_count
        return opened >= (self._settings.fronts or 1) and all(told.done() for told in self._unaware)

    def _fail(self) -> None:
        self.failed = True
        self._set_state(ModelState.FAILED)
        self._on_failure()


def describe(engine: GeneratingEngine) -> EngineDescription:
    """The settings in effect, the limits of requests and, on a GPU, the kernels of a short answer."""
    settings = engine.settings()
    details = {
        **settings,
        "slots": engine.slots,
        "max_length": engine.max_length,
        "vocabulary": engine.vocabulary,
        "eos": list(engine.eos),
    }
    device = str(settings.get("device", "cpu"))
    threads = None if settings.get("threads") is None else int(str(settings["threads"]))
    if device.startswith("cuda"):
        from servers.language.torch_engine import generation_kernels  # imports torch, as engines on a GPU have

        details |= generation_kernels(engine)
    return EngineDescription(
        kind=str(settings.get("engine", "")),
        version=str(settings.get("engine_version", "")),
        precision=str(settings.get("precision", "")),
        mode=str(settings.get("mode", "")),
        device=device,
        threads=threads,
        max_batch_size=engine.slots,
        weights=str(settings.get("weights", "")),
        details=msgspec.to_builtins(details, enc_hook=str),
        spinning=None if threads is None else openmp_spinning(threads),
    )


def run_generation(
    build: BuildGeneratingEngine,
    settings: NativeSettings,
    statistics: Statistics,
    arena: Arena,
    supervisor: socket.socket,
) -> int:
    """The process of an engine: it gets the front ends' sockets from the supervisor until that says so, or has gone.
    Returns its exit status."""
    failed, failing = socket.socketpair()
    loop = GenerationLoop(build, settings, statistics, arena, lambda: failing.close())
    loop.start()
    stop_by: float | None = None
    while stop_by is None:
        readable, _, _ = select.select([supervisor, failed], [], [])
        if failed in readable:
            return 1
        message = read_supervisor(supervisor, settings)
        if isinstance(message, float):
            stop_by = message
        else:
            loop.add(message)
    finished = loop.stop(max(0.0, stop_by - time.monotonic()))
    log.info("stopped", accepted_work_finished=finished)
    return 1 if loop.failed else 0
