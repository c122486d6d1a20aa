"""The runner's handle on the load generator: starts the process, speaks its messages, ends it."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from typing import TypeVar

import msgspec

from loadgen.generator.messages import (
    Abort,
    Command,
    Go,
    Open,
    Opened,
    Outcome,
    Prepare,
    Prepared,
    Refusal,
    Reply,
)
from loadgen.invocation import OWN_MODULE
from loadgen.targets.process import ChildProcess
from loadgen.transport.shared_memory import sweep

_DECODER = msgspec.json.Decoder(Reply)
_R = TypeVar("_R", Prepared, Opened, Outcome)


class GeneratorError(Exception):
    """The generator refused a command, answered something else or is gone."""


class GeneratorProcess:
    """One long-lived generator. Not thread-safe: one command at a time."""

    def __init__(self, log_path: Path, *, processes: int = 1) -> None:
        """With several processes each writes a log beside `log_path`."""
        argv = [*OWN_MODULE, "loadgen.generator"]
        if processes > 1:
            argv += ["--processes", str(processes), "--logs", str(log_path.with_suffix(""))]
        self._process = ChildProcess(argv, log_path=log_path, pipes=True)
        self._unread = b""

    def prepare(self, command: Prepare, *, timeout_s: float = 300.0) -> Prepared:
        """Make the bodies. Raises `GeneratorError`."""
        return self._ask(command, Prepared, timeout_s)

    def open(self, command: Open) -> Opened:
        """Get one block ready to start. Raises `GeneratorError`, for a server that is not there too."""
        return self._ask(command, Opened, 30.0 + 2 * command.timeout_s)

    def go(self, command: Open) -> Outcome:
        """Run the block that `command` opened; returns when its last answer is in."""
        return self._ask(Go(), Outcome, 1.25 * command.max_seconds + 2 * command.timeout_s + 30.0)

    def abort(self, reason: str, *, timeout_s: float = 10.0) -> Outcome | None:
        """End the running block early; its outcome, or None when the generator does not answer in time."""
        try:
            return self._ask(Abort(reason=reason), Outcome, timeout_s)
        except GeneratorError:
            return None

    def stop(self) -> None:
        """End the process and its workers. Idempotent."""
        process_ids = {self._process.pid, *(process.pid for process in self._process.tree())}
        if len(process_ids) > 1 and self._process.popen.stdin is not None:
            with suppress(OSError, TimeoutExpired):  # it ends its workers, whose parent it is, and then itself
                self._process.popen.stdin.close()
                self._process.popen.wait(2.0)
        self._process.stop(timeout_s=2.0)
        for process_id in process_ids:
            sweep(process_id)

    def _ask(self, command: Command, expected: type[_R], timeout_s: float) -> _R:
        assert self._process.popen.stdin is not None
        try:
            self._process.popen.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.popen.stdin.flush()
        except OSError:
            raise GeneratorError(f"the load generator {self._gone()}") from None
        reply = _DECODER.decode(self._line(timeout_s))
        if isinstance(reply, Refusal):
            raise GeneratorError(reply.reason)
        if not isinstance(reply, expected):
            raise GeneratorError(f"the load generator answered {type(reply).__name__} to {type(command).__name__}")
        return reply

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.popen.stdout is not None
        descriptor = self._process.popen.stdout.fileno()
        deadline = monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, deadline - monotonic()))[0]:
                raise GeneratorError(f"the load generator did not answer within {timeout_s:g} s")
            content = os.read(descriptor, 65536)
            if not content:
                raise GeneratorError(f"the load generator {self._gone()}")
            self._unread += content
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _gone(self) -> str:
        self._process.popen.wait(5.0)
        return self._process.failure() or "has closed its output"
