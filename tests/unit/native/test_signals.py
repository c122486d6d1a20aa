"""A second signal during the shutdown, in the middle of a line of the log: the server goes on."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import structlog

from servers.native.front_server import NativeServer
from servers.native.settings import NativeSettings
from servers.native.supervisor import Supervisor

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
    log_file.handler = lambda: supervisor._note(signal.SIGINT, None)
    run_within(5, lambda: log.warning("one line"))
    assert supervisor._signals == [signal.SIGTERM, signal.SIGINT]
