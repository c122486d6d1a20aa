"""A model is said to be ready when every front end answers, so that no client is sent from one that does not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from servers.engines.null import NullEngine
from servers.engines.settings import EngineSettings
from servers.native.engine.process import MAX_BLOCKING, EngineServer, EngineSide
from servers.native.front.inference import InferenceService
from servers.native.local_link import LocalLink
from servers.native.shared.errors import RefusedError
from servers.native.shared.interface import (
    ApplyStatus,
    FrontEndOpened,
    FrontEndOperation,
    ModelState,
    ModelStatus,
    QueuedRequest,
)
from servers.native.shared.ipc import Control, Done, encode, read_frames
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.statistics import Statistics
from tests.unit.native.conftest import ROWS

SETTINGS = NativeSettings(max_batch_size=8)


class SlowFrontEnd:
    """Has executed an operation when a test says so."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.answers: list[Future[None]] = []

    def complete(self, _requests: object) -> None:
        """Sends none."""

    def notify(self, operation: FrontEndOperation) -> Future[None]:
        assert isinstance(operation, ApplyStatus)
        self.states.append(operation.models[0].state.value)
        self.answers.append(Future())
        return self.answers[-1]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("dies", [False, True])
def test_a_model_is_ready_when_all_front_ends_accept_its_requests(dies: bool) -> None:
    memory = RequestMemory.alone(SETTINGS)
    engine = NullEngine(ROWS, EngineSettings("null", max_batch_size=8))
    side = EngineSide(SETTINGS, [(ROWS, lambda _: engine)], [Statistics(8)], memory.arena)
    quick, slow = SlowFrontEnd(), SlowFrontEnd()
    side.add(quick)
    side.add(slow)
    opened = threading.Event()
    opened.set()
    side.start(lambda: None, opened)
    until(lambda: slow.states[-1] == "accepting")
    quick.answers[-1].set_result(None)
    assert side.hosts[0].state.value == "accepting"
    assert "ready" not in quick.states + slow.states
    if dies:
        side.remove(slow)
    slow.answers[-1].set_result(None)  # as the channel of one that has died does
    until(lambda: quick.states[-1] == "ready")
    assert side.hosts[0].state.value == "ready"
    assert (slow.states[-1] == "ready") is not dies
    assert side.stop(10)


def test_a_front_end_that_accepts_requests_is_not_yet_said_to_be_ready() -> None:
    memory = RequestMemory.alone(SETTINGS)
    link = LocalLink(EngineSide(SETTINGS, [], [], memory.arena))
    service = InferenceService(0, ROWS, SETTINGS, link, memory, Statistics(8))
    with pytest.raises(RefusedError, match="is not ready"):
        service.check_accepting()
    asyncio.run(service.apply(ModelStatus(ModelState.ACCEPTING, None)))
    service.check_accepting()
    assert not service.ready
    with pytest.raises(RefusedError, match="is not ready"):
        service.check_ready()
    asyncio.run(service.apply(ModelStatus(ModelState.READY, None)))
    service.check_accepting()
    service.check_ready()
    assert service.ready


def test_a_model_whose_engine_cannot_be_used_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NullEngine, "row_bytes", property(lambda _: 1 // 0))
    engine = NullEngine(ROWS, EngineSettings("null", max_batch_size=8))
    side = EngineSide(SETTINGS, [(ROWS, lambda _: engine)], [Statistics(8)], RequestMemory.alone(SETTINGS).arena)
    failed = threading.Event()
    side.start(failed.set, threading.Event())
    assert failed.wait(60)
    assert side.failed
    with pytest.raises(RefusedError, match="is not ready"):
        side.submit(0, QueuedRequest({}, 1, (), None, None))
    assert side.stop(10)


class OpeningFrontEnd:
    """A front end's process as the engine's process sees it."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(30)
        socket.send_fds(supervisor, [b"f"], [theirs.fileno()])
        theirs.close()
        self._unread = bytearray()
        self._messages: list[Any] = []

    def open(self) -> None:
        """Say so, and return when the engine's process has heard it."""
        self._socket.sendall(encode([Control(7, FrontEndOpened())]))
        while not any(isinstance(message, Done) for message in self._messages):
            self._messages += read_frames(self._unread, self._socket.recv(65536))

    def die(self) -> None:
        self._socket.close()


def test_a_front_end_that_opens_and_dies_does_not_count_for_one_that_is_not_open() -> None:
    settings = NativeSettings(max_batch_size=8, fronts=2)
    supervisor, child = socket.socketpair()
    server = EngineServer(settings, [], [], RequestMemory.alone(settings).arena, child)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        first, second = OpeningFrontEnd(supervisor), OpeningFrontEnd(supervisor)
        first.open()
        first.die()
        until(lambda: len(server._front_ends.channels) == 1)
        successor = OpeningFrontEnd(supervisor)
        successor.open()
        assert not server._front_ends_open.is_set()
        second.open()
        assert server._front_ends_open.is_set()
        for front_end in (second, successor):
            front_end.die()
        until(lambda: not server._front_ends.channels)
    finally:
        supervisor.close()
        thread.join(60)
        child.close()
    assert not thread.is_alive()


def test_front_ends_that_open_are_noted_by_one_thread() -> None:
    """Two that opened at the same moment were noted in a thread each, of which one could lose what the other wrote, so
    that the server was never ready; and threads that block kept them waiting."""
    settings = NativeSettings(max_batch_size=8, fronts=2)
    supervisor, child = socket.socketpair()
    server = EngineServer(settings, [], [], RequestMemory.alone(settings).arena, child)
    gate = threading.Event()
    for _ in range(MAX_BLOCKING):
        server._side._blocking.submit(gate.wait, 60)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        front_ends = [OpeningFrontEnd(supervisor), OpeningFrontEnd(supervisor)]
        for front_end in front_ends:
            front_end.open()
        assert server._front_ends_open.is_set()
        assert not gate.is_set()
        for front_end in front_ends:
            front_end.die()
    finally:
        gate.set()
        supervisor.close()
        thread.join(60)
        child.close()
    assert not thread.is_alive()
