"""A failure that concerns one request or one connection stops no other, and does not fill the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
from structlog.testing import CapturingLogger

from servers.native.front import connections
from servers.native.front.inference import wake_all
from servers.native.grpc.inference import GrpcFrontEnd
from servers.native.http.inference import InferenceFrontEnd
from servers.native.shared import errors
from servers.native.shared.errors import FailureLog
from servers.native.shared.interface import QueuedRequest
from servers.native.shared.memory import RequestMemory
from servers.native.shared.settings import NativeSettings


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """What is logged."""
    logger = CapturingLogger()
    structlog.configure(processors=[], logger_factory=lambda *_: logger, cache_logger_on_first_use=False)
    yield logger.calls
    structlog.reset_defaults()


class Waiter:
    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.woken = False

    def __call__(self, _queued: QueuedRequest) -> None:
        self.woken = True
        if self.fails:
            raise RuntimeError("planted")


def test_one_answer_that_fails_strands_no_other_of_its_batch() -> None:
    waiters = [Waiter(fails=place in (0, 2)) for place in range(5)]
    wake_all([QueuedRequest({"x": np.zeros(1)}, 1, (), None, waiter) for waiter in waiters])
    assert all(waiter.woken for waiter in waiters)


class Connection:
    """Its first limit cannot be applied; the others can."""

    waits_for_room = False

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.deadline = 0.0
        self.expired = 0

    def expire(self, *_now: float, **_pressed: bool) -> None:
        self.expired += 1
        if self.fails:
            raise RuntimeError("planted")


def front_ends(settings: NativeSettings) -> list[Any]:
    memory = RequestMemory.alone(settings)
    models: Any = SimpleNamespace(default=SimpleNamespace(statistics=None))
    http = InferenceFrontEnd(None, [], None, settings, memory)  # type: ignore[arg-type]  # nobody asks it anything
    http._state = SimpleNamespace(connections=set(), tasks=set())  # type: ignore[assignment]
    return [http, GrpcFrontEnd(models, models, settings, memory)]


@pytest.mark.parametrize("place", [0, 1], ids=["HTTP", "gRPC"])
def test_a_limit_that_cannot_be_applied_disables_no_other(
    place: int, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(connections, "TICK_S", 0.001)
    monkeypatch.setattr(connections, "log", FailureLog("test"))

    async def tick() -> list[int]:
        front_end = front_ends(NativeSettings(fronts=0))[place]
        limited = [Connection(fails=fails) for fails in (True, False, True, False)]
        for connection in limited:
            front_end.add(connection)
        while min(connection.expired for connection in limited) < 5:
            await asyncio.sleep(0.001)
        for connection in limited:
            front_end.remove(connection) if place == 0 else front_end.discard(connection)
        return [connection.expired for connection in limited]

    assert min(asyncio.run(asyncio.wait_for(tick(), 10))) >= 5
    assert len(logged) == 1


def test_failures_of_one_kind_are_logged_once_and_then_counted(
    monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    log = FailureLog("test")

    def fail(event: str, error: Exception) -> None:
        try:
            raise error  # noqa: TRY301  the line counts
        except Exception:
            log.exception(event, rows=1)

    for number in range(1000):
        fail("inference failed", ValueError(str(number)))
    fail("inference failed", TypeError())
    fail("something else", ValueError())
    assert len(logged) == 3
    monkeypatch.setattr(errors, "LOGGED_EVERY_S", 0.0)
    fail("inference failed", ValueError())
    assert logged[-1].kwargs["repeated"] == 999
    for number in range(3 * errors.MAX_KINDS):
        fail(str(number), ValueError())
    assert len(log._kinds) <= errors.MAX_KINDS
