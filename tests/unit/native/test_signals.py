"""The shutdown: a signal in the middle of a line of the log, and children that do not end."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import structlog

from servers.native.front_server import NativeServer
from servers.native.shared.settings import NativeSettings
from servers.native.supervisor import KILLED_S, Supervisor

log = structlog.get_logger()


class Interrupted(io.StringIO):
    """Where the log goes; in the middle of its first line the handler runs, as it does when a signal comes."""

    handler: Callable[[], object] | None = None

    def write(self, text: str) -> int:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        return super().write(text)


@pytest.fixture
def log_file() -> Iterator[Interrupted]:
    before, file = structlog.get_config(), Interrupted()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file))
    yield file
    structlog.configure(**before)


def run_within(seconds: float, run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the handler waits for the line that it has interrupted"


def test_one_process_goes_on_and_logs_the_signal_afterwards(log_file: Interrupted) -> None:
    server = object.__new__(NativeServer)
    server.should_exit, server._settings = True, NativeSettings()
    log_file.handler = lambda: server.handle_exit(signal.SIGINT, None)

    async def end() -> None:
        log.warning("one line")
        await asyncio.sleep(0)

    run_within(5, lambda: asyncio.run(end()))
    first, second = log_file.getvalue().splitlines()
    assert "one line" in first
    assert "already shutting down" in second


def test_the_supervisor_goes_on(log_file: Interrupted) -> None:
    supervisor = object.__new__(Supervisor)
    supervisor._signals, supervisor._settings = [signal.SIGTERM], NativeSettings()
    log_file.handler = lambda: supervisor._record_signal(signal.SIGINT, None)
    run_within(5, lambda: log.warning("one line"))
    assert supervisor._signals == [signal.SIGTERM, signal.SIGINT]


def test_a_child_that_no_signal_ends_is_left_behind_after_one_attempt(
    log_file: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in a driver that hangs. It got a signal and a line of the log every 5 ms, for ever."""
    supervisor = object.__new__(Supervisor)
    supervisor._signals, supervisor._settings, supervisor._logged_signals = [], NativeSettings(), 1
    statuses: list[int] = []
    sent: list[tuple[int, int]] = []
    kill, process = os.kill, os.fork()
    if not process:
        time.sleep(60)
        os._exit(0)
    monkeypatch.setattr(os, "kill", lambda process, number: sent.append((process, number)))
    began = time.monotonic()
    try:
        run_within(KILLED_S + 10, lambda: statuses.append(supervisor._wait_for(process, began + 0.1)))
    finally:
        kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert statuses == [1]
    assert sent == [(process, signal.SIGKILL)]
    ended, left = log_file.getvalue().splitlines()
    assert "ended by force" in ended
    assert "left behind" in left
