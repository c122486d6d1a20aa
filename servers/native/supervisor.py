"""A server of several processes: front ends, an engine process per device, and this one, which starts and watches all.

This process accepts connections and passes each to the front end that has the fewest. While none can take one, clients
wait in the kernel's backlog. It imports nothing slow and has one thread, so that it can fork at any time: a front end
that dies is started again, and only its own clients notice.
The end of an engine's process is that of the server: what was in it is lost, and your process manager starts all again.
A reload starts engines beside those that serve. When each could serve, the front ends get sockets to them and queue
requests there; the engines before end when every front end has all their answers. If one cannot serve nothing changes.
Children end when the socket to this process does, so none outlives it.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from servers.native.shared.errors import NOT_RELOADED
from servers.native.shared.ipc import CLOSED, ENGINE, GRPC, HTTP, STOP_BY, SWITCHED
from servers.native.shared.keys import Keys
from servers.native.shared.memory import Arena, ByteBudget, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics, row_width
from servers.native.shared.tls import Certificate

if TYPE_CHECKING:
    from servers.native.front_server import FrontServer

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
POLL_S = 0.5
"""How often the files of a model are looked at, and how long they must have stayed as they are."""
RELOAD_S = 1800.0
"""Within this time a new version must have been loaded."""
RETRY_S = 0.001
"""Pause before a connection that no front end could take is offered again."""


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
    switches: bool = False
    """Whether the engines that are to end may still owe it answers."""
    unsent: list[socket.socket] = field(default_factory=list)
    """To new engines: its own ends, which it has not taken yet."""


FileStates = tuple[tuple[int, ...] | None, ...]


def states_of(files: Sequence[Path]) -> FileStates:
    """What is another when a file is written or replaced; None for one that is missing."""
    states: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            states.append(None)
        else:
            states.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(states)


@dataclass(eq=False, slots=True)
class _Engines:
    """The engines' processes that serve one version of the model."""

    reloads: int
    files: FileStates
    ends: float = NEVER
    """When those that load, or are to end, are ended by force."""
    controls: dict[int, socket.socket] = field(default_factory=dict)
    """By process, in the order of the devices: the sockets to them."""
    ready: set[int] = field(default_factory=set)
    told: bool = False
    """To end."""


@dataclass(frozen=True, slots=True)
class Children:
    """What the children of a supervisor run; called in the child."""

    models: Sequence[str]
    """The names of those that are served."""
    run_engine: Callable[[NativeSettings, Sequence[Statistics], Arena, socket.socket, int], int]
    """Execute, until the supervisor says or has gone; its socket brings the sockets of front ends. After so many
    reloads the models are made of their files as they are now, and the process says when it could serve. Returns the
    exit status."""
    front_end: Callable[
        [NativeSettings, Sequence[Statistics], RequestMemory, socket.socket, Sequence[socket.socket]], FrontServer
    ]
    """A front end, with the socket to the supervisor, which brings the clients' connections, and those to the
    engines."""
    files: Sequence[Path] = ()
    """From which the models are made."""


class Supervisor:
    """Owns the children and the memory that they share."""

    def __init__(
        self,
        settings: NativeSettings,
        children: Children,
        listener: socket.socket,
        grpc_listener: socket.socket | None,
        on_listening: Callable[[], None],
        shown: socket.socket | None = None,
    ) -> None:
        """`shown` is the socket to a recorder, for the front ends."""
        self._on_listening = on_listening
        self._settings = settings
        self._keys = Keys.of(settings)
        self._certificate = Certificate.of(settings)
        self._recorder = [] if shown is None else [shown]
        self._children = children
        self._listeners = {listener: HTTP}
        if grpc_listener is not None:
            self._listeners[grpc_listener] = GRPC
        self._arena = make_arena(settings, len(children.models))
        self._selector = selectors.DefaultSelector()
        self._front_ends: dict[int, _FrontEnd] = {}
        self._engines = _Engines(0, states_of(children.files))
        self._loading: _Engines | None = None
        self._ending: _Engines | None = None
        self._seen = self._tried = self._engines.files
        self._reload_asked = self._access_asked = False
        self._next_poll = 0.0
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
        if self._takes_hangups:
            signal.signal(signal.SIGHUP, self._ask_for_reload)
        self._inherited = [wakes, wakeup, *self._recorder]
        for number, settings in enumerate(self._settings.of_engines()):
            self._start_engine(self._engines, number, settings)
        for number in range(self._settings.fronts or 0):
            self._start_front_end(number, number, 0)
        for listener in self._listeners:
            listener.listen(BACKLOG)
            self._selector.register(listener, selectors.EVENT_READ)
        self._on_listening()
        self._selector.register(wakes, selectors.EVENT_READ)
        while not self._signals and not self._failed:
            for key, _ in self._selector.select(self._turn_s):
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.fileobj is wakes:
                    wakes.recv(4096)
                elif isinstance(key.data, int):
                    self._note_loaded(key.data)
                else:
                    self._hear(key.data)
            self._reap()
            self._retry_held()
            self._reload()
            self._reload_access()
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
            reload_signal = [signal.SIGHUP] if self._takes_hangups else []
            for number in (signal.SIGTERM, signal.SIGINT, *reload_signal):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            controls = [
                *(control for engines in self._all_engines for control in engines.controls.values()),
                *(inherited.control for inherited in self._front_ends.values()),
                *(unsent for inherited in self._front_ends.values() for unsent in inherited.unsent),
            ]
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

    @property
    def _all_engines(self) -> list[_Engines]:
        return [engines for engines in (self._engines, self._loading, self._ending) if engines is not None]

    def _start_engine(self, engines: _Engines, number: int, settings: NativeSettings) -> int:
        control, childs = socket.socketpair()

        def run() -> int:
            control.close()
            statistics = self._statistics(self._row(engines, number))
            return self._children.run_engine(settings, statistics, self._arena, childs, engines.reloads)

        process = self._fork(run, [childs])
        engines.controls[process] = control
        childs.close()
        return process

    def _row(self, engines: _Engines, number: int) -> int:
        """Where an engine counts: two versions that serve at the same time have a row each."""
        return number + len(self._settings.devices) * (engines.reloads % 2)

    def _start_front_end(self, number: int, partition: int, short_lives: int) -> None:
        control_socket, childs = socket.socketpair()
        pairs = [socket.socketpair() for _ in self._engines.controls]
        to_engines = [to_engine for to_engine, _ in pairs]

        def run() -> int:
            for other_end in (control_socket, *(to_front_end for _, to_front_end in pairs)):
                other_end.close()
            budget = ByteBudget(self._settings.max_held_bytes, self._arena.held, partition)
            memory = RequestMemory(self._arena, budget, partition)
            statistics = self._statistics(_engine_rows(self._settings) + number)
            for of_model in statistics:
                of_model.set_decoding(0)  # its predecessor may have died with some
            server = self._children.front_end(self._settings, statistics, memory, childs, to_engines)
            server.admit(self._keys, self._certificate, next(iter(self._recorder), None))
            server.run(sockets=[])
            return 0

        process = self._fork(run, [childs, *self._recorder])
        childs.close()
        control_socket.setblocking(False)
        front_end = _FrontEnd(number, process, control_socket, partition, time.monotonic(), short_lives=short_lives)
        self._front_ends[process] = front_end
        self._selector.register(control_socket, selectors.EVENT_READ, front_end)
        for control, (to_engine, to_front_end) in zip(self._engines.controls.values(), pairs, strict=True):
            _give(control, to_front_end)
            to_engine.close()

    def _statistics(self, process: int) -> list[Statistics]:
        """Of each model: one row for each engine, then one for each front end."""
        size, rows = self._settings.max_batch_size, _process_count(self._settings)
        width, place = row_width(size), 0
        statistics = []
        for _ in self._children.models:
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
            code = os.waitstatus_to_exitcode(status)
            if process in self._engines.controls:
                self._engines.controls.pop(process).close()
                self._failed = True
                if code < 0:
                    log.error("the engine's process has died", status=code)
            elif self._loading is not None and process in self._loading.controls:
                # One that found a reason has logged it.
                self._abandon(f"the new engine's process has died with status {code}" if code < 0 else "")
            elif self._ending is not None and process in self._ending.controls:
                self._note_ended(self._ending, process)
            elif process in self._front_ends:
                self._restart(self._remove(process), code)

    def _remove(self, process: int) -> _FrontEnd:
        front_end = self._front_ends.pop(process)
        with suppress(KeyError):
            self._selector.unregister(front_end.control)
        for used in (front_end.control, *front_end.unsent):
            used.close()
        for counters in (self._arena.held, *self._arena.rows):  # nothing holds its bytes or waits for its rows any more
            counters[front_end.partition] = 0
        if self._keys is not None:
            self._keys.counts.forget(front_end.partition)
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

    def _retry_held(self) -> None:
        """Offer the connection that waits, and accept others once it is taken."""
        if self._waiting is not None and self._hand_over(*self._waiting):
            self._waiting = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)

    def _hear(self, front_end: _FrontEnd) -> None:
        """A front end has closed connections, or has switched to other engines."""
        try:
            data = front_end.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        front_end.open_connections -= data.count(CLOSED)
        if SWITCHED in data:
            front_end.switches = False
        if not data:  # it ends, as this process will know soon
            self._selector.unregister(front_end.control)

    # Reload

    @property
    def _takes_hangups(self) -> bool:
        return self._settings.reload != "off" or bool(self._access)

    @property
    def _access(self) -> list[Keys | Certificate]:
        return [part for part in (self._keys, self._certificate) if part is not None]

    def _ask_for_reload(self, _number: int, _frame: object) -> None:
        self._reload_asked = self._settings.reload != "off"
        self._access_asked = bool(self._access)

    def _reload_access(self) -> None:
        """Let front ends read the keys and the certificate again, if they can be read."""
        if self._access_asked:
            self._access_asked = False
            if any([part.reload() for part in self._access]):  # noqa: C419  each of them
                for process in self._front_ends:
                    os.kill(process, signal.SIGHUP)

    @property
    def _turn_s(self) -> float | None:
        """How long to wait for an event: those of a file, of a clock, and of a front end that can take a connection
        again are missing."""
        if self._waiting is not None:
            return RETRY_S
        waits = self._settings.reload != "poll" and self._loading is None and self._ending is None
        return None if waits else POLL_S

    def _reload(self) -> None:
        """Begin a reload that is due, or go on with the one that is under way."""
        now = time.monotonic()
        if self._ending is not None:
            self._switch(self._ending, now)
        elif self._loading is not None:
            if now > self._loading.ends:
                self._abandon(f"the new version was not ready within {RELOAD_S:g} s")
        elif self._is_due(now):
            self._begin_reload(now)

    def _is_due(self, now: float) -> bool:
        if self._reload_asked:
            self._reload_asked = False
            self._seen = states_of(self._children.files)
            if self._seen == self._engines.files:
                log.info("nothing to reload: no file has changed", reloads=self._engines.reloads)
            return self._seen != self._engines.files
        if self._settings.reload != "poll" or now < self._next_poll:
            return False
        self._next_poll = now + POLL_S
        before, self._seen = self._seen, states_of(self._children.files)
        settled = before == self._seen and None not in self._seen  # nobody is writing them any more
        return settled and self._seen not in (self._tried, self._engines.files)

    def _begin_reload(self, now: float) -> None:
        self._tried = self._seen
        needed, available = _memory_of(self._engines.controls), _available_memory()
        if needed > available:
            log.error(
                NOT_RELOADED,
                reason=f"the engines that serve have {needed >> 20} MiB, and {available >> 20} MiB are left for others",
            )
            return
        self._loading = _Engines(self._engines.reloads + 1, self._seen, now + RELOAD_S)
        log.info("reloading", reload=self._loading.reloads)
        for number, settings in enumerate(self._settings.of_engines()):
            process = self._start_engine(self._loading, number, settings)
            self._selector.register(self._loading.controls[process], selectors.EVENT_READ, process)

    def _note_loaded(self, process: int) -> None:
        """A new engine could serve, or ends, as this process will know soon; front ends get them when all could."""
        loading = self._loading
        assert loading is not None
        control = loading.controls[process]
        self._selector.unregister(control)
        with suppress(OSError):
            if control.recv(1):
                loading.ready.add(process)
        if len(loading.ready) < len(loading.controls):
            return
        self._ending, self._engines, self._loading = self._engines, loading, None
        self._ending.ends = time.monotonic() + self._settings.shutdown_timeout_s
        for front_end in self._front_ends.values():
            front_end.switches = True
            for control in loading.controls.values():
                to_engine, to_front_end = socket.socketpair()
                _give(control, to_front_end)
                front_end.unsent.append(to_engine)

    def _switch(self, ending: _Engines, now: float) -> None:
        """Give front ends their new engines, and let those before end when no front end waits for them any more."""
        for front_end in self._front_ends.values():
            with suppress(OSError):  # it has died, or is too busy to take one
                while front_end.unsent:
                    socket.send_fds(front_end.control, [bytes([ENGINE])], [front_end.unsent[0].fileno()])
                    front_end.unsent.pop(0).close()
        if now <= ending.ends and any(front_end.switches for front_end in self._front_ends.values()):
            return
        if not ending.told:
            log.info("reloaded", reloads=self._engines.reloads)
            ending.told, ending.ends = True, now + self._settings.shutdown_timeout_s
            for control in ending.controls.values():
                with suppress(OSError):  # it has ended
                    control.send(STOP_BY.pack(ending.ends - RESERVE_S))
        elif now > ending.ends:
            ending.ends = NEVER
            for process in ending.controls:
                log.error("ended by force: the engine of the version before could not stop in time", process=process)
                _kill(process)

    def _note_ended(self, ending: _Engines, process: int) -> None:
        """An engine of the version before has ended; with the last of them the reload is over."""
        ending.controls.pop(process).close()
        if not ending.controls:
            self._ending = None
            for front_end in self._front_ends.values():
                front_end.switches = False
            for number in range(len(self._settings.devices)):
                for of_model in self._statistics(self._row(ending, number)):
                    of_model.set_queued(0)

    def _abandon(self, reason: str) -> None:
        """The version before goes on."""
        loading, self._loading = self._loading, None
        assert loading is not None
        for process, control in loading.controls.items():
            with suppress(KeyError):
                self._selector.unregister(control)
            control.close()
            _kill(process)
        if reason:
            log.error(NOT_RELOADED, reason=reason)

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
        if self._loading is not None:
            self._abandon("")
        engines = [engine for served in self._all_engines for engine in served.controls.items()]
        for _, control in engines:
            with suppress(OSError):  # it has ended
                control.send(STOP_BY.pack(ends - RESERVE_S))
            control.close()
        if any([self._wait_for(process, ends) for process, _ in engines]) or self._failed:  # noqa: C419  wait for all
            return 1
        return exit_status(self._signals)

    def _wait_for(self, process: int, ends: float) -> int:
        """Wait for a child, until `ends` of `time.monotonic`, and then end it by force; returns its exit status. One
        that SIGKILL does not end within `KILLED_S` is left behind, with status 1."""
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
                _kill(process)
            time.sleep(0.005)


def keep_early_signals(stop: Callable[[], None]) -> list[int]:
    """Keep signals that come before uvicorn handles them, and call `stop`: uvicorn then stops as soon as it has begun.
    Returns the list that they are added to. After its shutdown uvicorn raises its signals again, and dying of one would
    skip what follows."""
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
    return _engine_rows(settings) + (settings.fronts or 0)


def _engine_rows(settings: NativeSettings) -> int:
    return len(settings.devices) * (1 if settings.reload == "off" else 2)


def _give(control: socket.socket, to_front_end: socket.socket) -> None:
    """Give an engine its end of the socket to a front end."""
    with suppress(OSError):  # it has ended, as the supervisor will know soon
        socket.send_fds(control, [b"f"], [to_front_end.fileno()])
    to_front_end.close()


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _memory_of(processes: Iterable[int]) -> int:
    """The bytes that these have for themselves, which others of the same model need as well."""
    total = 0
    for process in processes:
        with suppress(OSError):
            total += _kib(Path(f"/proc/{process}/status"), "RssAnon")
    return total


def _available_memory() -> int:
    """The bytes that new processes may take: of the machine and, where a container limits them, of that."""
    available = _kib(Path("/proc/meminfo"), "MemAvailable")
    with suppress(OSError, ValueError):  # no limit, or no version 2 of control groups
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        inactive = int(re.findall(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)[0])
        available = min(available, limit - used + inactive)
    return available


def _kib(file: Path, name: str) -> int:
    """A line of the kernel that counts in KiB, in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB", file.read_text(), re.M)
    return 1024 * int(match[1]) if match else 0
