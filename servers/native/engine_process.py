"""The process that executes: the engine's side of a server, whose front ends are other processes.

One thread receives what the front ends send, and gives the engines that execute beside Python their turns: while a
batch is on a GPU it asks again and again for the next message and for the end of the batch, so that neither waits for a
thread to wake up. Engines that execute in Python's threads have their own, and whatever blocks goes to other threads.
All answers of a batch that belong to one front end are one message.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import structlog

from servers.engines.interface import HostMemory
from servers.native.arena import Arena
from servers.native.engine_side import EngineSide, Offer
from servers.native.errors import EXPIRED, RequestExpiredError
from servers.native.failure_log import FailureLog
from servers.native.messages import (
    FAILED,
    FORM_UNKNOWN,
    REQUESTS,
    STOP_BY,
    Answer,
    Ask,
    Cancel,
    Done,
    Form,
    FrameReader,
    Message,
    ReceivedForm,
    Submit,
    SubmitMany,
    Unusable,
    done_many_message,
    done_message,
    encode_all,
    error_of,
    failed,
    failure_of,
    unusable_of,
)
from servers.native.queued_request import QueuedRequest
from servers.native.settings import NativeSettings
from servers.native.statistics import Statistics
from servers.protocol.errors import ContractError
from servers.protocol.tensors import Array

log = structlog.get_logger("abserve.engine")
log_limited = FailureLog("abserve.engine")

READ_BYTES = 256 * 1024
LONG_S = 0.002


class FrontEndChannel:
    """A front end in another process, as the engine's side sees it; any thread sends."""

    def __init__(self, connected: socket.socket, arena: Arena, epoll: select.epoll) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.reader = FrameReader()
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
        self._told: dict[int, Future[Any]] = {}

    def form(self, number: int, rows: int) -> ReceivedForm | None:
        """The form of a message, None if it did not come. Raises `ValueError` for another number of rows."""
        form = self.forms.get(number)
        if form is not None and not 0 < rows == form.rows:
            raise ValueError(f"a request has {rows} rows, its form {form.rows}")
        return form

    def complete(self, requests: Sequence[QueuedRequest]) -> None:
        """See `FrontEnd`."""
        done: list[Message] = []
        for queued in requests:
            try:
                self._add_done(done, queued)
            except Exception as error:  # it must not stop the thread of an engine
                log_limited.exception("an answer could not be sent")
                done.append(Done(queued.number, [], failure_of(error)))
        self.send(done)

    def _add_done(self, done: list[Message], queued: QueuedRequest) -> None:
        numbers = self.groups.pop(queued.number, None)
        if numbers is None:
            _, _, room = self.requests.pop(queued.number)
            if not self._ended:  # else the room may belong to another request by now
                done.append(done_message(queued, self._arena, room))
            return
        for number in numbers:
            del self.requests[number]
        if queued.error is None:
            done.append(done_many_message(numbers, queued.outputs or {}))
        else:
            failure = failure_of(queued.error)
            done += [Done(number, [], failure) for number in numbers]

    def tell(self, method: str, *arguments: object) -> Future[Any]:
        """See `FrontEnd`; one that has ended has done everything."""
        told: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._told[number] = told
            ended = self._ended
        if ended:
            told.set_result(None)
        else:
            self.send([Ask(number, method, list(arguments))])
        return told

    def answered(self, answer: Answer) -> None:
        """The front end has done what it was told."""
        told = self._told.pop(answer.number, None)
        if told is None:
            return
        if answer.failure is None:
            told.set_result(None)
        else:
            told.set_exception(error_of(answer.failure))

    def send(self, messages: Sequence[Message]) -> None:
        """Send now or, where the front end is slow to read, soon; never blocks.

        A message that cannot be encoded fails what it is about, and no other.
        """
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

    def fail(self, message: Unusable, *, sent: bool) -> None:
        """Fail what a message is about that could not be sent, or not be used: here, or at the front end."""
        if message.kind is Form:
            for number in message.numbers or list(self.forms):
                self.forms.pop(number, None)  # else its requests would be read as those of the form before it
        for reply in failed(message, FAILED):
            if sent != (message.kind in REQUESTS):
                self.send([reply])
            elif isinstance(reply, Answer):
                self.answered(reply)

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
            told, self._told = self._told, {}
        for answer in told.values():
            answer.set_result(None)


class EngineServer:
    """Receives for the engine's side, in the main thread, until the supervisor says or has gone."""

    def __init__(
        self,
        settings: NativeSettings,
        offers: Sequence[Offer],
        statistics: Sequence[Statistics],
        arena: Arena,
        supervisor: socket.socket,
    ) -> None:
        """The supervisor's socket brings the sockets of front ends; its end means that this process is to stop."""
        self._settings = settings
        self._arena = arena
        self._supervisor = supervisor
        wakes, self._waker = socket.socketpair()
        for one in (wakes, self._waker):
            one.setblocking(False)
        self._wakes = wakes
        self._side = EngineSide(settings, offers, statistics, arena, self._wake)
        self._epoll = select.epoll()
        self._channels: dict[int, FrontEndChannel] = {}
        self._front_ends_open = threading.Event()
        self._opened: set[FrontEndChannel] = set()
        self._failed = threading.Event()
        self._stop_by: float | None = None
        self._buffer = bytearray(READ_BYTES)

    def run(self) -> int:
        """Returns the process's exit status."""
        self._epoll.register(self._supervisor, select.EPOLLIN)
        self._epoll.register(self._wakes, select.EPOLLIN)
        self._side.start(self._fail, self._front_ends_open)
        while not self._failed.is_set() and self._stop_by is None:
            self._turn()
        stop_by = self._stop_by or time.monotonic() + self._settings.shutdown_timeout_s
        self._epoll.unregister(self._supervisor)
        stopping = ThreadPoolExecutor(1).submit(self._side.stop, max(0.0, stop_by - time.monotonic()))
        stopping.add_done_callback(lambda _: self._wake())
        while not stopping.done():
            self._turn()
        log.info("stopped", accepted_work_finished=stopping.result())
        return 1 if self._side.failed or self._failed.is_set() else 0

    def _turn(self) -> None:
        seconds = self._side.turn()
        if seconds is not None and seconds < LONG_S:  # epoll would sleep whole milliseconds
            seconds = 0.0
        for descriptor, events in self._epoll.poll(seconds):
            if descriptor in self._channels:
                self._serve(self._channels[descriptor], events)
            elif descriptor == self._supervisor.fileno():
                self._stop_by = self._meet()
            else:
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)

    def _wake(self) -> None:
        """Let the loop turn; any thread."""
        with suppress(BlockingIOError):
            self._waker.send(b"!")

    def _fail(self) -> None:
        self._failed.set()
        self._wake()

    def _meet(self) -> float | None:
        """Take the socket of a new front end; when to have stopped if the supervisor wants that, or has died."""
        data, descriptors, _, _ = socket.recv_fds(self._supervisor, STOP_BY.size, 1)
        for descriptor in descriptors:
            channel = FrontEndChannel(socket.socket(fileno=descriptor), self._arena, self._epoll)
            self._channels[descriptor] = channel
            self._epoll.register(descriptor, select.EPOLLIN)
            self._side.add(channel)
        if descriptors:
            return None
        if len(data) == STOP_BY.size:
            stop_by: float = STOP_BY.unpack(data)[0]
            return stop_by
        return time.monotonic() + self._settings.shutdown_timeout_s

    def _serve(self, channel: FrontEndChannel, events: int) -> None:
        if events & select.EPOLLOUT:
            channel.send_more()
        if not events & ~select.EPOLLOUT:
            return
        try:
            count = channel.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionError:
            count = 0
        if count == 0:
            self._lose(channel)
            return
        for message in channel.reader.feed(memoryview(self._buffer)[:count]):
            try:
                self._take(channel, message)
            except Exception:  # it must not end the process: others wait for theirs
                log_limited.exception("a message of a front end could not be used")
                channel.fail(unusable_of(message), sent=False)

    def _take(self, channel: FrontEndChannel, message: Message | Unusable) -> None:
        if isinstance(message, Submit):
            self._submit(channel, message)
        elif isinstance(message, SubmitMany):
            self._submit_many(channel, message)
        elif isinstance(message, Form):
            channel.forms[message.number] = ReceivedForm(message, self._side.hosts[message.model].padding)
        elif isinstance(message, Cancel):
            self._cancel(channel, message.number)
        elif isinstance(message, Answer):
            channel.answered(message)
        elif isinstance(message, Ask):
            self._side.threads(message.method, message.arguments).submit(self._carry_out, channel, message)
        elif isinstance(message, Unusable):
            channel.fail(message, sent=False)

    def _submit(self, channel: FrontEndChannel, message: Submit) -> None:
        form = channel.form(message.form, message.rows)
        if form is None:
            channel.send([Done(message.number, [], FORM_UNKNOWN)])
            return
        try:
            inputs: Mapping[str, Array | HostMemory]
            if self._side.hosts[form.model].takes_addresses and not message.device_inputs:
                inputs = form.addresses([message.data], self._arena)
            else:
                inputs = form.arrays(message.data, self._arena)
            queued = QueuedRequest(inputs, message.rows, form.key, message.deadline_ns, None)
            queued.owner, queued.number = channel, message.number
            if message.device_inputs or message.device_outputs:
                queued.device_inputs, queued.device_outputs = message.device_inputs or {}, message.device_outputs or {}
            channel.requests[message.number] = queued, form.model, message.room
            self._side.submit(form.model, queued)
        except Exception as error:
            if not isinstance(error, ContractError):
                log_limited.exception("a request could not be queued")
            channel.requests.pop(message.number, None)
            channel.send([Done(message.number, [], failure_of(error))])

    def _submit_many(self, channel: FrontEndChannel, message: SubmitMany) -> None:
        """As one, where the engine takes addresses: then the batcher has as little to do as for a single request."""
        form = channel.form(message.form, message.rows)
        if form is None:
            channel.send([Done(number, [], FORM_UNKNOWN) for number in message.numbers])
            return
        if len(message.numbers) == 1 or not self._side.hosts[form.model].takes_addresses:
            for number, data in zip(message.numbers, message.data, strict=True):
                self._submit(channel, Submit(number, message.form, message.rows, None, list(data)))
            return
        if len(message.numbers) != len(message.data):
            raise ValueError("not every request of a group has its data")
        queued = self._group(channel, form, message.rows, message.numbers, message.data)
        try:
            self._side.submit(form.model, queued)
        except ContractError as error:
            queued.error = error
            channel.complete([queued])

    def _group(
        self, channel: FrontEndChannel, form: ReceivedForm, rows: int, numbers: list[int], data: list[list[int]]
    ) -> QueuedRequest:
        """One for all of these requests, each of so many rows."""
        count = len(numbers)
        queued = QueuedRequest(form.addresses(data, self._arena), rows * count, form.key, None, None)
        queued.count, queued.owner, queued.number = count, channel, numbers[0]

        def apart(first: int) -> tuple[QueuedRequest, QueuedRequest]:
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
            queued.apart = apart
        return queued

    def _cancel(self, channel: FrontEndChannel, number: int) -> None:
        queued, model, _ = channel.requests.get(number, (None, 0, None))
        if queued is None or queued.taken:
            return
        leaving, stay = queued, list[QueuedRequest]()
        place = channel.groups.get(queued.number, [number]).index(number)
        if leaving.apart is not None and place:
            before, leaving = leaving.apart(place)
            stay.append(before)
        if leaving.apart is not None:
            leaving, after = leaving.apart(1)
            stay.append(after)
        if self._side.hosts[model].withdraw(queued, stay):
            leaving.error = RequestExpiredError(EXPIRED)
            channel.complete([leaving])

    def _carry_out(self, channel: FrontEndChannel, message: Ask) -> None:
        failure = None
        try:
            if message.method == "opened":
                self._opened = {*self._opened, channel} & {*self._channels.values()}  # without those that have ended
                if len(self._opened) >= (self._settings.fronts or 0):
                    self._front_ends_open.set()
            else:
                self._side.carry_out(message.method, message.arguments)
        except Exception as error:
            if not isinstance(error, ContractError):
                log_limited.exception("a request for a change failed", method=message.method[:64])
            failure = failure_of(error)
        channel.send([Answer(message.number, failure)])

    def _lose(self, channel: FrontEndChannel) -> None:
        """A front end has ended: nobody waits for its requests."""
        del self._channels[channel.socket.fileno()]
        self._side.remove(channel)
        for queued, model, _ in list(channel.requests.values()):
            self._side.hosts[model].withdraw(queued)
        channel.end()
