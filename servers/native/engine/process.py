"""The engine's side of a server, and the process that executes.

`EngineSide` has the models and the regions of memory that clients have registered, for front ends anywhere.
`EngineServer` is the loop of an engine's process. One thread receives what the front ends send, and gives the engines
that execute beside Python their turns: while a batch is on a GPU it asks again and again for the next message and for
the end of the batch, so that neither waits for a thread to wake up. Engines that execute in Python's threads have their
own, and whatever blocks goes to other threads. All answers of a batch that belong to one front end are one message.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

import msgspec
import structlog

from servers.engines.interface import EngineDescription, HostMemory
from servers.engines.processors import cuda_index
from servers.native.engine.batcher import Batcher
from servers.native.engine.model_host import ModelHost, Offer
from servers.native.engine.region_register import RegionRegister
from servers.native.shared.errors import FailureLog, expired
from servers.native.shared.interface import (
    ApplyStatus,
    CheckCuda,
    CloseRegions,
    ControlModel,
    EngineOperation,
    FrontEnd,
    FrontEndOpened,
    FrontEndOperation,
    ModelState,
    ModelStatus,
    OpenRegion,
    QueuedRequest,
    not_ready,
)
from servers.native.shared.ipc import (
    FORM_UNKNOWN,
    LOADED,
    REQUESTS,
    STOP_BY,
    Cancel,
    Control,
    Done,
    Form,
    Message,
    ReceivedForm,
    Submit,
    SubmittedInput,
    UnusableMessage,
    done_message,
    encode_all,
    failed,
    failure_of,
    read_frames,
    settle,
    unusable_of,
)
from servers.native.shared.memory import Arena
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from servers.native.shared.traces import flush_traces
from servers.protocol.errors import ContractError, UnavailableError
from servers.protocol.tensors import Array, like

log = structlog.get_logger("abserve.engine")
log_limited = FailureLog("abserve.engine")

NOTIFY_SECONDS = 35.0
"""How long a front end may take to execute an operation: longer than the decoding of images that it has accepted."""
MAX_BLOCKING = 8
"""Threads for operations that block, but for loads and unloads; more wait."""
READ_BYTES = 256 * 1024
LONG_S = 0.002


class EngineSide:
    """The models, the regions, and the front ends that are notified of every change. Any thread."""

    def __init__(
        self,
        settings: NativeSettings,
        offers: Sequence[Offer],
        statistics: Sequence[Statistics],
        arena: Arena,
        wake: Callable[[], None] | None = None,
        *,
        reloaded: bool = False,
    ) -> None:
        """`wake`: see `LoopBatcher`; it is also called when a model's state changes. `reloaded`: see `ModelHost`."""
        self._front_ends: list[FrontEnd] = []
        self._lock = threading.RLock()  # so that all front ends are notified in the same order
        self._device = settings.device
        self._wake = wake or (lambda: None)
        self.regions = RegionRegister(self._notify_all, device=self._gpu, others_come=wake is not None)
        self.hosts = [
            ModelHost(specification, build, settings, counters, arena, complete, self._changed, wake, reloaded)
            for (specification, build), counters in zip(offers, statistics, strict=True)
        ]
        self._blocking = ThreadPoolExecutor(MAX_BLOCKING, "control")
        self._loading = [ThreadPoolExecutor(1, "loading") for _ in self.hosts]

    def _gpu(self) -> int | None:
        """The number of the GPU that executes: that of the settings, or where `auto` has loaded a model."""
        loaded = (host.description.device for host in self.hosts if host.description is not None)
        asked = cuda_index(self._device)
        return cuda_index(next(loaded, self._device)) if asked is None else asked

    def start(self, on_failure: Callable[[], None], front_ends_open: threading.Event) -> None:
        """Begin to load all models; none is READY before `front_ends_open` is set. `on_failure` is called, in any
        thread, when a model cannot be served."""
        for host in self.hosts:
            host.start(on_failure, front_ends_open)

    def add(self, front_end: FrontEnd) -> None:
        """A front end has begun: it learns everything."""
        with self._lock:
            self._front_ends.append(front_end)
            front_end.notify(self._status())
            for opening in self.regions.openings:
                front_end.notify(opening)

    def remove(self, front_end: FrontEnd) -> None:
        """A front end has ended."""
        with self._lock, suppress(ValueError):
            self._front_ends.remove(front_end)

    def threads(self, operation: EngineOperation) -> ThreadPoolExecutor:
        """Where `execute` may block. A model is loaded and unloaded in one thread, however many ask for that."""
        if isinstance(operation, ControlModel):
            return self._loading[operation.model]
        return self._blocking

    def execute(self, operation: EngineOperation) -> None:
        """Execute an operation for a front end; blocks. Raises `ContractError`."""
        match operation:
            case ControlModel(model=model, load=True):
                self.hosts[model].load()
                self._changed(True)  # front ends were notified of READY without waiting
            case ControlModel(model=model):
                self.hosts[model].unload()
            case OpenRegion():
                self.regions.open(operation)
            case CloseRegions():
                self.regions.close(operation)
            case CheckCuda():
                self.regions.cuda()
            case _:
                raise TypeError(f"only the process of the engine executes {type(operation).__name__}")

    def submit(self, model: int, queued: QueuedRequest) -> None:
        """Queue a checked request. Raises `ContractError`."""
        if queued.device_inputs or queued.device_outputs:
            self._open_windows(model, queued)
        self._batcher(model).submit(queued)

    def withdraw(self, model: int, queued: QueuedRequest, remaining: Sequence[QueuedRequest] = ()) -> bool:
        """Take it back; True if the engine will not execute it and no front end will get it. See `Batcher`."""
        batcher = self.hosts[model].batcher
        return batcher is not None and batcher.withdraw(queued, remaining)

    def _batcher(self, model: int) -> Batcher:
        """Raises `RefusedError` until the model has been loaded once."""
        host = self.hosts[model]
        if host.batcher is None:
            raise not_ready(host.signature.name, host.state)
        return host.batcher

    def _open_windows(self, model: int, queued: QueuedRequest) -> None:
        window, inputs = self.regions.window, queued.inputs
        outputs = {
            spec.name: like(spec.dtype, (queued.rows, *spec.item_shape))
            for spec in self.hosts[model].signature.outputs
            if -1 not in spec.item_shape and not spec.dtype.hasobject
        }
        queued.input_windows = {
            name: window(region, offset, size, inputs[name])
            for name, (region, offset, size) in queued.device_inputs.items()
        }
        queued.output_windows = {
            name: window(region, offset, size, outputs.get(name))
            for name, (region, offset, size) in queued.device_outputs.items()
        }

    def turn(self) -> float | None:
        """A turn of every model; see `LoopBatcher`."""
        batchers = [host.batcher for host in self.hosts if host.batcher is not None]
        return min([seconds for batcher in batchers if (seconds := batcher.turn()) is not None], default=None)

    def stop(self, timeout: float) -> bool:
        """Execute the queues and free the engines; blocks. False if that took longer than `timeout` in all."""
        ends = time.perf_counter() + timeout
        finished = [host.stop(max(0.0, ends - time.perf_counter())) for host in self.hosts]
        return all(finished)

    @property
    def ready(self) -> bool:
        return all(host.state is ModelState.READY for host in self.hosts)

    @property
    def failed(self) -> bool:
        return any(host.state is ModelState.FAILED for host in self.hosts)

    def _changed(self, wait: bool) -> None:
        """A model has another state: notify the front ends, and wait for them if `wait`."""
        with self._lock:
            notified = self._notify(self._status())
        self._wake()
        if wait:
            _wait_for(notified)

    def _status(self) -> ApplyStatus:
        statuses = []
        for host in self.hosts:
            # Details may hold objects of an engine's library, which no message can carry.
            plain = msgspec.to_builtins(host.description, enc_hook=str)
            description = None if plain is None else msgspec.convert(plain, EngineDescription)
            statuses.append(ModelStatus(host.state, description, host.signature.version))
        return ApplyStatus(tuple(statuses))

    def _notify_all(self, operation: FrontEndOperation) -> None:
        """Let every front end execute an operation, and wait for all. Raises the first `ContractError`."""
        _wait_for(self._notify(operation))

    def _notify(self, operation: FrontEndOperation) -> list[Future[None]]:
        with self._lock:
            return [front_end.notify(operation) for front_end in self._front_ends]


def _wait_for(notified: Sequence[Future[None]]) -> None:
    """Raises the first `ContractError`, after all have answered."""
    ends = time.monotonic() + NOTIFY_SECONDS
    errors: list[ContractError] = []
    for done in notified:
        try:
            done.result(max(0.0, ends - time.monotonic()))
        except ContractError as error:
            errors.append(error)
        except FutureTimeoutError:
            errors.append(UnavailableError("accepted requests are still being prepared, try again later"))
    if errors:
        raise errors[0]


def complete(requests: Sequence[QueuedRequest]) -> None:
    """Hand each request to its front end, in one call for all that belong to the same."""
    by_front_end: dict[FrontEnd, list[QueuedRequest]] = {}
    for queued in requests:
        if queued.front_end is not None:
            by_front_end.setdefault(queued.front_end, []).append(queued)
    for front_end, completed in by_front_end.items():
        front_end.complete(completed)


class FrontEndChannel:
    """A front end in another process, as the engine's side sees it; any thread sends."""

    def __init__(self, connected: socket.socket, arena: Arena, epoll: select.epoll) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.is_open = False
        """Whether it has said that clients are answered."""
        self.unread = bytearray()
        self.forms: dict[int, ReceivedForm] = {}
        self.groups: dict[int, list[int]] = {}
        """By the number of the first: the numbers of requests that were queued as one."""
        self.requests: dict[int, tuple[QueuedRequest, int, tuple[int, int] | None]] = {}
        """By number: requests that are not done, with their model and their room."""
        self._arena = arena
        self._epoll = epoll
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._ended = False
        self._numbers = itertools.count()
        self._operations: dict[int, Future[None]] = {}

    def form(self, number: int, rows: int) -> ReceivedForm | None:
        """The form of a message, None if it did not come. Raises `ValueError` for another number of rows."""
        form = self.forms.get(number)
        if form is not None and not 0 < rows == form.rows:
            raise ValueError(f"a request has {rows} rows, its form {form.rows}")
        return form

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        done: list[Message] = []
        for queued in requests:
            try:
                self._add_done(done, queued)
            except Exception as error:  # it must not stop the thread of an engine
                log_limited.exception("an answer could not be sent")
                done.append(Done([queued.number], [], failure_of(error)))
        self.send(done)

    def _add_done(self, done: list[Message], queued: QueuedRequest) -> None:
        numbers = self.groups.pop(queued.number, None)
        if numbers is None:
            _, _, room = self.requests.pop(queued.number)
            if not self._ended:  # else the room may belong to another request by now
                done.append(done_message([queued.number], queued, self._arena, room))
            return
        for number in numbers:
            del self.requests[number]
        done.append(done_message(numbers, queued, self._arena))

    def receive(self, events: int, buffer: bytearray) -> list[Message | UnusableMessage] | None:
        """What epoll's events of its socket mean: send more, and read once into `buffer`. Returns the whole messages;
        None once the front end has ended."""
        if events & select.EPOLLOUT:
            self.send_more()
        if not events & ~select.EPOLLOUT:
            return []
        try:
            count = self.socket.recv_into(buffer)
        except BlockingIOError:
            return []
        except ConnectionError:
            count = 0
        return read_frames(self.unread, memoryview(buffer)[:count]) if count else None

    def notify(self, operation: FrontEndOperation) -> Future[None]:
        """See `FrontEnd`; one that has ended has done everything."""
        done: Future[None] = Future()
        with self._lock:
            number = next(self._numbers)
            self._operations[number] = done
            ended = self._ended
        if ended:
            done.set_result(None)
        else:
            self.send([Control(number, operation)])
        return done

    def operation_done(self, message: Done) -> None:
        """The front end has executed an operation."""
        for number in message.numbers:
            settle(self._operations, number, message.failure)

    def send(self, messages: Sequence[Message]) -> None:
        """Send now or, where the front end is slow to read, soon; never blocks. A message that cannot be encoded fails
        what it is about, and no other."""
        frame, unusable = encode_all(messages)
        for message in unusable:
            self.fail(message, sent=True)
        with self._lock:
            if self._ended:
                return
            if not self._unsent:
                with suppress(BlockingIOError, ConnectionError):
                    frame = frame[self.socket.send(frame) :]
            if frame:
                self._unsent += frame
                self._epoll.modify(self.socket, select.EPOLLIN | select.EPOLLOUT)

    def fail(self, message: UnusableMessage, *, sent: bool) -> None:
        """Fail what a message is about that could not be sent, or not be used: here, or at the front end."""
        if message.kind is Form:
            for number in message.numbers or list(self.forms):
                self.forms.pop(number, None)  # else its requests would be read as those of the form before it
        for reply in failed(message):
            if sent != (message.kind in REQUESTS):
                self.send([reply])
            else:
                self.operation_done(reply)

    def send_more(self) -> None:
        """The socket takes bytes again."""
        with self._lock, suppress(BlockingIOError, ConnectionError):
            del self._unsent[: self.socket.send(self._unsent)]
            if not self._unsent:
                self._epoll.modify(self.socket, select.EPOLLIN)

    def end(self) -> None:
        """The front end has ended."""
        with self._lock:
            self._ended = True
            self._epoll.unregister(self.socket)
            self.socket.close()
            operations, self._operations = self._operations, {}
        for done in operations.values():
            done.set_result(None)


class FrontEnds:
    """The channels of all front ends. One thread turns, any thread wakes it."""

    def __init__(
        self,
        arena: Arena,
        handle: Callable[[FrontEndChannel, Message | UnusableMessage], None],
        removed: Callable[[FrontEndChannel], None],
    ) -> None:
        """`handle` takes a message, or ends what one is about that cannot be used; `removed` is called before the
        channel of a front end that has ended is closed."""
        self._arena = arena
        self._handle, self._removed = handle, removed
        self._epoll = select.epoll()
        self._wakes, self._waker = socket.socketpair()
        for wake_socket in (self._wakes, self._waker):
            wake_socket.setblocking(False)
        self._others: dict[int, Callable[[], object]] = {}
        self.watch(self._wakes, lambda: self._wakes.recv(4096))
        self._channels: dict[int, FrontEndChannel] = {}
        self._buffer = bytearray(READ_BYTES)

    @property
    def channels(self) -> list[FrontEndChannel]:
        """Those of front ends that have not ended."""
        return list(self._channels.values())

    @property
    def open_count(self) -> int:
        """How many have said that clients are answered, and have not ended."""
        return sum(channel.is_open for channel in self._channels.values())

    def wake(self) -> None:
        """Let `turn` return; any thread."""
        with suppress(OSError):  # it is full, or closed
            self._waker.send(b"!")

    def watch(self, other: socket.socket, read: Callable[[], object]) -> None:
        """Call `read` in a turn in which this socket can be read."""
        self._others[other.fileno()] = read
        self._epoll.register(other, select.EPOLLIN)

    def forget(self, other: socket.socket) -> None:
        """Watch this socket no more."""
        del self._others[other.fileno()]
        self._epoll.unregister(other)

    def add(self, connected: socket.socket) -> FrontEndChannel:
        """A front end has begun."""
        channel = self._channels[connected.fileno()] = FrontEndChannel(connected, self._arena, self._epoll)
        self._epoll.register(connected, select.EPOLLIN)
        return channel

    def close(self) -> None:
        """End all channels: what waits at their front ends fails. Idempotent."""
        while self._channels:
            self._channels.popitem()[1].end()
        for used in (self._wakes, self._waker, self._epoll):
            used.close()

    def turn(self, seconds: float | None) -> None:
        """Take what has come; wait for something at most so long."""
        for descriptor, events in self._epoll.poll(seconds):
            channel = self._channels.get(descriptor)
            if channel is not None:
                self._read(descriptor, channel, events)
            else:
                with suppress(BlockingIOError):
                    self._others[descriptor]()

    def _read(self, descriptor: int, channel: FrontEndChannel, events: int) -> None:
        messages = channel.receive(events, self._buffer)
        if messages is None:
            del self._channels[descriptor]
            self._removed(channel)
            channel.end()
            return
        for message in messages:
            try:
                self._handle(channel, message)
            except Exception:  # it must not end the loop: others wait for theirs
                log_limited.exception("a message of a front end could not be used")
                self._handle(channel, unusable_of(message))


def read_supervisor(supervisor: socket.socket, settings: NativeSettings) -> socket.socket | float:
    """The socket of a new front end, or when to have stopped, in `time.monotonic` seconds: the supervisor says that, or
    has died."""
    data, descriptors, _, _ = socket.recv_fds(supervisor, STOP_BY.size, 1)
    if descriptors:
        return socket.socket(fileno=descriptors[0])
    if len(data) == STOP_BY.size:
        return float(STOP_BY.unpack(data)[0])
    return time.monotonic() + settings.shutdown_timeout_s


class EngineServer:
    """Receives for the engine's side, in the main thread, until the supervisor says or has gone."""

    def __init__(
        self,
        settings: NativeSettings,
        offers: Sequence[Offer],
        statistics: Sequence[Statistics],
        arena: Arena,
        supervisor: socket.socket,
        *,
        reloaded: bool = False,
    ) -> None:
        """The supervisor's socket brings the sockets of front ends; its end means that this process is to stop. One
        that is `reloaded` is to replace an engine that serves: it says when it could, and gets front ends then."""
        self._settings = settings
        self._arena = arena
        self._supervisor = supervisor
        self._front_ends = FrontEnds(arena, self._handle, self._remove)
        self._side = EngineSide(settings, offers, statistics, arena, self._front_ends.wake, reloaded=reloaded)
        self._unannounced = reloaded
        self._front_ends_open = threading.Event()
        if reloaded:
            self._front_ends_open.set()
        self._failed = threading.Event()
        self._stop_by: float | None = None

    def run(self) -> int:
        """Returns the process's exit status."""
        self._front_ends.watch(self._supervisor, self._read_supervisor)
        self._side.start(self._fail, self._front_ends_open)
        while not self._failed.is_set() and self._stop_by is None:
            self._turn()
            if self._unannounced and self._side.ready:
                self._unannounced = False
                self._supervisor.send(LOADED)
        stop_by = self._stop_by or time.monotonic() + self._settings.shutdown_timeout_s
        self._front_ends.forget(self._supervisor)
        stopping = ThreadPoolExecutor(1).submit(self._side.stop, max(0.0, stop_by - time.monotonic()))
        stopping.add_done_callback(lambda _: self._front_ends.wake())
        while not stopping.done():
            self._turn()
        log.info("stopped", accepted_work_finished=stopping.result())
        self._front_ends.close()
        flush_traces(self._settings)
        return 1 if self._side.failed or self._failed.is_set() else 0

    def _turn(self) -> None:
        seconds = self._side.turn()
        if seconds is not None and seconds < LONG_S:  # epoll would sleep whole milliseconds
            seconds = 0.0
        self._front_ends.turn(seconds)

    def _fail(self) -> None:
        self._failed.set()
        self._front_ends.wake()

    def _read_supervisor(self) -> None:
        message = read_supervisor(self._supervisor, self._settings)
        if isinstance(message, float):
            self._stop_by = message
        else:
            self._side.add(self._front_ends.add(message))

    def _handle(self, channel: FrontEndChannel, message: Message | UnusableMessage) -> None:
        if isinstance(message, Submit):
            self._submit(channel, message)
        elif isinstance(message, Form):
            channel.forms[message.number] = ReceivedForm(message, self._side.hosts[message.model].padding)
        elif isinstance(message, Cancel):
            self._cancel(channel, message.number)
        elif isinstance(message, Done):
            channel.operation_done(message)
        elif isinstance(message, Control) and isinstance(message.operation, FrontEndOpened):
            channel.is_open = True
            if self._front_ends.open_count >= (self._settings.fronts or 0):
                self._front_ends_open.set()
            channel.send([Done([message.number])])
        elif isinstance(message, Control):
            assert isinstance(message.operation, EngineOperation)
            self._side.threads(message.operation).submit(self._execute, channel, message.number, message.operation)
        elif isinstance(message, UnusableMessage):
            channel.fail(message, sent=False)

    def _submit(self, channel: FrontEndChannel, message: Submit) -> None:
        """Queue several requests as one object if the engine takes addresses: that costs as little as a single one."""
        form = channel.form(message.form, message.rows)
        if form is None:
            channel.send([Done(message.numbers, [], FORM_UNKNOWN)])
            return
        if len(message.numbers) != len(message.data):
            raise ValueError("not every request has its data")
        if len(message.numbers) == 1 or not self._side.hosts[form.model].takes_addresses:
            for number, data in zip(message.numbers, message.data, strict=True):
                self._submit_single(channel, form, message, number, data)
            return
        queued = self._group(channel, form, message.rows, message.numbers, message.data)
        try:
            self._side.submit(form.model, queued)
        except ContractError as error:
            queued.error = error
            channel.complete([queued])

    def _submit_single(
        self, channel: FrontEndChannel, form: ReceivedForm, message: Submit, number: int, data: Sequence[SubmittedInput]
    ) -> None:
        try:
            inputs: Mapping[str, Array | HostMemory]
            if self._side.hosts[form.model].takes_addresses and not message.device_inputs:
                inputs = form.addresses([data], self._arena)
            else:
                inputs = form.arrays(data, self._arena)
            queued = QueuedRequest(inputs, message.rows, form.key, message.deadline_ns, None)
            queued.front_end, queued.number, queued.trace = channel, number, message.trace
            if message.device_inputs or message.device_outputs:
                queued.device_inputs, queued.device_outputs = message.device_inputs or {}, message.device_outputs or {}
            channel.requests[number] = queued, form.model, message.room
            self._side.submit(form.model, queued)
        except Exception as error:
            if not isinstance(error, ContractError):
                log_limited.exception("a request could not be queued")
            channel.requests.pop(number, None)
            channel.send([Done([number], [], failure_of(error))])

    def _group(
        self,
        channel: FrontEndChannel,
        form: ReceivedForm,
        rows: int,
        numbers: list[int],
        data: Sequence[Sequence[SubmittedInput]],
    ) -> QueuedRequest:
        """One queued request for all of these, each of `rows` rows."""
        count = len(numbers)
        queued = QueuedRequest(form.addresses(data, self._arena), rows * count, form.key, None, None)
        queued.count, queued.front_end, queued.number = count, channel, numbers[0]

        def split(first: int) -> tuple[QueuedRequest, QueuedRequest]:
            parts = (
                self._group(channel, form, rows, numbers[:first], data[:first]),
                self._group(channel, form, rows, numbers[first:], data[first:]),
            )
            for part in parts:
                part.enqueued_ns, part.taken = queued.enqueued_ns, queued.taken
            return parts

        channel.groups[numbers[0]] = numbers
        channel.requests.update(dict.fromkeys(numbers, (queued, form.model, None)))
        if count > 1:
            queued.split = split
        return queued

    def _cancel(self, channel: FrontEndChannel, number: int) -> None:
        queued, model, _ = channel.requests.get(number, (None, 0, None))
        if queued is None or queued.taken:
            return
        leaving, remaining = queued, list[QueuedRequest]()
        place = channel.groups.get(queued.number, [number]).index(number)
        if leaving.split is not None and place:
            before, leaving = leaving.split(place)
            remaining.append(before)
        if leaving.split is not None:
            leaving, after = leaving.split(1)
            remaining.append(after)
        if self._side.withdraw(model, queued, remaining):
            leaving.error = expired()
            channel.complete([leaving])

    def _execute(self, channel: FrontEndChannel, number: int, operation: EngineOperation) -> None:
        failure = None
        try:
            self._side.execute(operation)
        except Exception as error:
            if not isinstance(error, ContractError):
                log_limited.exception("a control operation failed", operation=type(operation).__name__)
            failure = failure_of(error)
        channel.send([Done([number], [], failure)])

    def _remove(self, channel: FrontEndChannel) -> None:
        """A front end has ended: withdraw its requests."""
        self._side.remove(channel)
        for queued, model, _ in list(channel.requests.values()):
            self._side.withdraw(model, queued)
