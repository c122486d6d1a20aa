"""A server of several processes: front ends, an engine process per device, and this one, which starts and watches all.

This process accepts connections and passes each to the front end that has the fewest. While none can take one, clients
wait in the kernel's backlog. It imports nothing slow and has one thread, so that it can fork at any time: a front end
that dies is started again, and only its own clients notice.
The end of an engine's process is that of the server: what was in it is lost, and your process manager starts all again.
Children end when the socket to this process does, so none outlives it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import structlog

from servers.native.shared.ipc import GRPC, HTTP, STOP_BY
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics, row_width

log = structlog.get_logger("abserve.server")

NEVER = float("inf")
BACKLOG = 2048
ACCEPTS_PER_TURN = 64
SHORT_LIFE_S = 10.0
MOST_SHORT_LIVES = 5
"""A front end that has died so often soon after its start is not started again: the server ends."""
RESERVE_S = 0.2
"""Time for a child to end by itself after its work should have been finished."""
KILLED_S = 1.0
"""How long to wait for a child after SIGKILL: one that waits in a driver that hangs may never end."""
RETRY_S = 0.001
"""Pause before a connection that no front end could take is offered again, if the system did not say that one can."""


@dataclass(eq=False, slots=True)
class _FrontEnd:
    """A front end's process. Its successor gets the other partition: the engine may still read this one."""

    number: int
    process: int
    control: socket.socket
    partition: int
    since: float
    open_connections: int = 0
    short_lives: int = 0


class Children(Protocol):
    """What the children of a supervisor run; called in the child, each returns its exit status."""

    @property
    def models(self) -> int:
        """How many models are served."""

    def run_engine(
        self, settings: NativeSettings, statistics: Sequence[Statistics], arena: Arena, supervisor: socket.socket
    ) -> int:
        """Execute, until the supervisor says or has gone; its socket brings the sockets of front ends."""

    def run_front_end(
        self,
        settings: NativeSettings,
        statistics: Sequence[Statistics],
        memory: RequestMemory,
        supervisor: socket.socket,
        engines: Sequence[socket.socket],
    ) -> int:
        """Receive and answer; the supervisor's socket brings the clients' connections."""


class Supervisor:
    """Owns the children and the memory that they share."""

    def __init__(
        self,
        settings: NativeSettings,
        children: Children,
        listener: socket.socket,
        grpc_listener: socket.socket | None,
        on_listening: Callable[[], None],
    ) -> None:
        self._on_listening = on_listening
        self._settings = settings
        self._children = children
        self._listeners = {listener: HTTP}
        if grpc_listener is not None:
            self._listeners[grpc_listener] = GRPC
        self._arena = make_arena(settings, children.models)
        self._selector = selectors.DefaultSelector()
        self._front_ends: dict[int, _FrontEnd] = {}
        self._engines: dict[int, socket.socket] = {}
        """By process, in the order of the devices: the sockets to them."""
        self._waiting: tuple[socket.socket, int] | None = None
        """A connection that no front end could take, and its protocol: as long as it waits, no other is accepted."""
        self._signals: list[int] = []
        self._logged_signals = 1  # the first one ends the server and is not logged
        self._failed = False

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until an engine's process ends; returns the exit status."""
        wakes, wakeup = socket.socketpair()
        for opened in (wakes, wakeup, *self._listeners):
            opened.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._record_signal)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._inherited = [wakes, wakeup]
        for number, settings in enumerate(self._settings.of_engines()):
            self._start_engine(number, settings)
        for number in range(self._settings.fronts or 0):
            self._start_front_end(number, number, 0)
        for listener in self._listeners:
            listener.listen(BACKLOG)
            self._selector.register(listener, selectors.EVENT_READ)
        self._on_listening()
        self._selector.register(wakes, selectors.EVENT_READ)
        while not self._signals and not self._failed:
            for key, events in self._selector.select():
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.fileobj is wakes:
                    wakes.recv(4096)
                elif events & selectors.EVENT_READ:
                    self._count_closed(key.data)
            self._reap()
            self._retry_held()
        return self._end()

    def _record_signal(self, number: int, _frame: object) -> None:
        """`_wait_for` logs a second signal: a handler that logs would wait for ever if it interrupts a line of it."""
        self._signals.append(number)

    # Children

    def _fork(self, run: Callable[[], int], keeps: Sequence[socket.socket]) -> int:
        """A child that runs this and ends, with none of this process's sockets but those it `keeps`."""
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            controls = [*self._engines.values(), *(inherited.control for inherited in self._front_ends.values())]
            waiting = [] if self._waiting is None else [self._waiting[0]]
            for inherited in [*self._listeners, *self._inherited, *controls, *waiting]:
                if inherited not in keeps:
                    inherited.close()
            self._selector.close()
            status = run()
        except Exception:
            log.exception("a process of the server failed")
        finally:
            os._exit(status)

    def _start_engine(self, number: int, settings: NativeSettings) -> None:
        control, childs = socket.socketpair()

        def run() -> int:
            control.close()
            return self._children.run_engine(settings, self._statistics(number), self._arena, childs)

        self._engines[self._fork(run, [childs])] = control
        childs.close()

    def _start_front_end(self, number: int, partition: int, short_lives: int) -> None:
        control_socket, childs = socket.socketpair()
        pairs = [socket.socketpair() for _ in self._engines]
        to_engines = [to_engine for to_engine, _ in pairs]

        def run() -> int:
            for other_end in (control_socket, *(to_front_end for _, to_front_end in pairs)):
                other_end.close()
            budget = ByteBudget(self._settings.max_held_bytes, self._arena.held, partition)
            memory = RequestMemory(self._arena, budget, partition)
            statistics = self._statistics(len(to_engines) + number)
            for of_model in statistics:
                of_model.set_decoding(0)  # its predecessor may have died with some
            return self._children.run_front_end(self._settings, statistics, memory, childs, to_engines)

        process = self._fork(run, [childs])
        childs.close()
        control_socket.setblocking(False)
        front_end = _FrontEnd(number, process, control_socket, partition, time.monotonic(), short_lives=short_lives)
        self._front_ends[process] = front_end
        self._selector.register(control_socket, self._control_events, front_end)
        for control, (to_engine, to_front_end) in zip(self._engines.values(), pairs, strict=True):
            with suppress(OSError):  # it has ended, as this process will know soon
                socket.send_fds(control, [b"f"], [to_front_end.fileno()])
            to_engine.close()
            to_front_end.close()

    def _statistics(self, process: int) -> list[Statistics]:
        """Of each model: one row for each engine, then one for each front end."""
        size, rows = self._settings.max_batch_size, _process_count(self._settings)
        width, place = row_width(size), 0
        statistics = []
        for _ in range(self._children.models):
            views = [self._arena.counters[place + row * width : place + (row + 1) * width] for row in range(rows)]
            statistics.append(Statistics(size, views, process))
            place += rows * width
        return statistics

    def _reap(self) -> None:
        """Collect the exit statuses of children that have ended, and restart front ends."""
        while not self._failed:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process in self._engines:
                self._engines.pop(process).close()
                self._failed = True
                if os.waitstatus_to_exitcode(status) < 0:
                    log.error("the engine's process has died", status=os.waitstatus_to_exitcode(status))
            elif process in self._front_ends:
                self._restart(self._remove(process), os.waitstatus_to_exitcode(status))

    def _remove(self, process: int) -> _FrontEnd:
        front_end = self._front_ends.pop(process)
        with suppress(KeyError):
            self._selector.unregister(front_end.control)
        front_end.control.close()
        for counters in (self._arena.held, *self._arena.rows):  # nothing holds its bytes or waits for its rows any more
            counters[front_end.partition] = 0
        return front_end

    def _restart(self, dead: _FrontEnd, status: int) -> None:
        log.error("a front end has died and is started again", status=status)
        short = dead.short_lives + 1 if time.monotonic() - dead.since < SHORT_LIFE_S else 0
        if short > MOST_SHORT_LIVES:
            log.error("front ends die again and again")
            self._failed = True
            return
        count = self._settings.fronts or 0
        self._start_front_end(dead.number, (dead.partition + count) % (2 * count), short)

    # Connections

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._waiting is not None:
                return
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # such as no descriptor left: the client will try again
                log.warning("a connection could not be accepted", reason=str(error))
                time.sleep(0.01)
                return
            if not self._hand_over(connection, self._listeners[listener]):
                self._hold(connection, self._listeners[listener])

    def _hand_over(self, connection: socket.socket, kind: int) -> bool:
        """Give it to the front end with the fewest; False if none can take it."""
        for front_end in sorted(self._front_ends.values(), key=lambda front_end: front_end.open_connections):
            with suppress(OSError):  # it has died, or is too busy to take one
                socket.send_fds(front_end.control, [bytes([kind])], [connection.fileno()])
                front_end.open_connections += 1
                connection.close()
                return True
        return False

    def _hold(self, connection: socket.socket, kind: int) -> None:
        """Accept nothing until a front end takes this one: the others wait in the backlog."""
        self._waiting = connection, kind
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._watch_controls()

    def _retry_held(self) -> None:
        """Offer the connection that waits, and accept others once it is taken."""
        if self._waiting is None:
            return
        if not self._hand_over(*self._waiting):
            time.sleep(RETRY_S)
            return
        self._waiting = None
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._watch_controls()

    @property
    def _control_events(self) -> int:
        """A front end's socket brings closed connections; while one waits, it also matters whether it takes more."""
        return selectors.EVENT_READ | (0 if self._waiting is None else selectors.EVENT_WRITE)

    def _watch_controls(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _FrontEnd):
                self._selector.modify(key.fileobj, self._control_events, key.data)

    def _count_closed(self, front_end: _FrontEnd) -> None:
        try:
            closed = len(front_end.control.recv(4096))
        except BlockingIOError:
            return
        except OSError:
            closed = 0
        front_end.open_connections -= closed
        if closed == 0:  # it ends, as this process will know soon
            self._selector.unregister(front_end.control)

    # The end

    def _end(self) -> int:
        """Finish accepted work: the front ends first, then the engines."""
        ends = time.monotonic() + self._settings.shutdown_timeout_s
        for listener in self._listeners:
            listener.close()
        if self._waiting is not None:
            self._waiting[0].close()
        for front_end in self._front_ends.values():
            front_end.control.close()
        for process in list(self._front_ends):
            self._wait_for(process, ends)
        for control in self._engines.values():
            with suppress(OSError):  # it has ended
                control.send(STOP_BY.pack(ends - RESERVE_S))
            control.close()
        if any([self._wait_for(process, ends) for process in self._engines]) or self._failed:  # noqa: C419  wait for all
            return 1
        return exit_status(self._signals)

    def _wait_for(self, process: int, ends: float) -> int:
        """Wait for a child, until `ends` of `time.monotonic`, and then end it by force; returns its exit status.

        One that SIGKILL does not end within `KILLED_S` is left behind, with status 1.
        """
        killed = NEVER
        while True:
            for _ in range(self._logged_signals, len(self._signals)):
                timeout_s = self._settings.shutdown_timeout_s
                log.warning("already shutting down: accepted work is finished first", at_most_s=timeout_s)
                self._logged_signals += 1
            try:
                ended, status = os.waitpid(process, os.WNOHANG)
            except ChildProcessError:
                return 0
            if ended:
                return os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if now > killed + KILLED_S:
                log.error(
                    "a process of the server is left behind: it waits in the kernel, perhaps for a driver that hangs, "
                    "and keeps its memory, also on a GPU, until the driver or the machine is restarted",
                    process=process,
                )
                return 1
            if now > ends and killed == NEVER:
                killed = now
                log.error("ended by force: a process of the server could not stop in time", process=process)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)


def keep_early_signals(stop: Callable[[], None]) -> list[int]:
    """Keep signals that come before uvicorn handles them, and call `stop`: uvicorn then stops as soon as it has begun.
    Returns the list that they are added to.

    After its shutdown uvicorn raises its signals again, and dying of one would skip what follows.
    """
    received: list[int] = []

    def keep(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keep)
    return received


def exit_status(signals: Sequence[int]) -> int:
    """Of a server that these signals have stopped: the first one counts, the others only ask again."""
    return 130 if signals[:1] == [signal.SIGINT] else 0


def make_arena(settings: NativeSettings, models: int) -> Arena:
    """The memory for two partitions of each front end, and the counters of all processes."""
    count = settings.fronts or 0
    counters = models * _process_count(settings) * row_width(settings.max_batch_size)
    return Arena.of_settings(2 * count, settings, counters)


def _process_count(settings: NativeSettings) -> int:
    """How many processes count what they do."""
    return len(settings.devices) + (settings.fronts or 0)
