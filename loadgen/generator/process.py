"""Drives the load generator: starts its processes, sends them commands, and merges their answers into one outcome.

With several processes each gets its share of a block (`loadgen.generator.distribution`), and all start at one moment of
the clock that they share. A process that ends or sends no heartbeat is lost: the others are stopped, everything
measured is kept, and the block is not complete.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter_ns

import msgspec

from loadgen.client.shared_memory import sweep
from loadgen.generator.distribution import Contribution, merge, shares
from loadgen.generator.messages import (
    CONNECT_SECONDS,
    Abort,
    Alive,
    Command,
    Done,
    Go,
    Open,
    Outcome,
    Prepare,
    Refusal,
    Reply,
)
from loadgen.generator.window import counts_bytes
from loadgen.headers import secret_of
from loadgen.invocation import OWN_MODULE
from loadgen.launch.process import ChildProcess

SILENCE_SECONDS = 10.0
"""A process that opens or runs a block and sends no heartbeat for this long counts as hung."""
_PREPARE_SECONDS = 300.0
_ABORT_SECONDS = 10.0
_LEAD_NS = 150_000_000
"""Time from the command to the common start of several processes, which must have read it by then."""
_DECODER = msgspec.json.Decoder(Reply | Alive)


class GeneratorError(Exception):
    """The load generator refused a command, gave an unexpected answer or has ended."""


class _Worker:
    """One process of the generator."""

    def __init__(self, name: str, log_path: Path, counts: int) -> None:
        self.name = name
        command = [*OWN_MODULE, "loadgen.generator"]
        self.child = ChildProcess(command, log_path=log_path, pipes=True, descriptors=(counts,))
        self.reply: Reply | None = None
        """The reply to the last command."""
        self.lost: str | None = None
        """How it ended; it gets no more commands."""
        self.heard_s = 0.0

    def send(self, command: Command) -> None:
        if self.lost is None and not self.child.send(msgspec.json.encode(command, enc_hook=secret_of)):
            self.lost = self.child.ended()

    def receive(self) -> None:
        while self.reply is None and self.lost is None and (line := self.child.read_line(0.0)) is not None:
            if not line:
                self.lost = self.child.ended()
                return
            self.heard_s = monotonic()
            message = _DECODER.decode(line)
            if not isinstance(message, Alive):
                self.reply = message

    def kill(self, reason: str) -> None:
        """End a process that is not reliable, so that it sends no more requests."""
        self.child.popen.kill()
        self.lost = f"{reason} and was killed"

    def fault(self) -> str | None:
        """Why the block ends for the other processes too; None while this one works."""
        if self.lost is not None:
            return f"{self.name} was lost"
        if isinstance(self.reply, Refusal):
            return self.reply.reason
        return self.reply.cut_reason if isinstance(self.reply, Outcome) else None

    def error(self) -> GeneratorError:
        if isinstance(self.reply, Refusal):
            return GeneratorError(self.reply.reason)
        return GeneratorError(f"{self.name} {self.lost or f'answered {type(self.reply).__name__}'}")


class GeneratorProcess:
    """A long-lived generator of one or more processes. Not thread-safe: one command at a time."""

    def __init__(self, log_path: Path, *, processes: int = 1) -> None:
        """With several processes each writes its own log beside `log_path`. Raises `GeneratorError`, `ProcessError`."""
        names, logs = ["the load generator"], [log_path]
        if processes > 1:
            names = [f"load worker {number} of {processes}" for number in range(1, processes + 1)]
            logs = [log_path.with_name(f"{log_path.stem}-worker{number}.log") for number in range(processes)]
        try:
            self._counts = os.memfd_create("abserve-counts")
            os.ftruncate(self._counts, counts_bytes(processes))
        except OSError as exc:
            raise GeneratorError(f"the load generator cannot start: {exc.strerror or exc}") from exc
        self._workers = [_Worker(name, log, self._counts) for name, log in zip(names, logs, strict=True)]
        self._asked: list[_Worker] = []
        """Workers that got the last command: not all of them when there are fewer users than processes."""
        self._parts: list[Open] = []
        self._running = False
        self._beating = False
        """Whether the last command is one during which the workers send heartbeats."""

    def prepare(self, command: Prepare) -> None:
        """Make the request bodies. Raises `GeneratorError`."""
        self._ask([command] * len(self._workers), _PREPARE_SECONDS)
        self._require_done()

    def open(self, command: Open) -> None:
        """Get one block ready to start. Raises `GeneratorError`, also when the server cannot be reached."""
        os.pwrite(self._counts, bytes(counts_bytes(len(self._workers))), 0)
        shared = msgspec.structs.replace(command, counts=self._counts)
        self._parts = shares(shared, len(self._workers))
        limit_s = 2 * CONNECT_SECONDS + command.timeout_s + command.settling_s(command.timeout_s)
        self._ask(self._parts, limit_s, beating=True)
        self._require_done()

    def go(self, command: Open) -> Outcome:
        """Run the block that `command` opened; returns after its last answer. Raises `GeneratorError`."""
        start_ns = perf_counter_ns() + _LEAD_NS if len(self._parts) > 1 else None
        self._running = True
        limit_s = 1.25 * command.max_seconds + 2 * command.timeout_s + 30.0
        self._ask([Go(start_ns=start_ns)] * len(self._parts), limit_s, beating=True)
        return self._outcome(command)

    def abort(self, command: Open, reason: str) -> Outcome | None:
        """End the block early, after `go` was interrupted; None when it has not begun or gives no outcome in time."""
        if not self._running:
            return None
        self._stop_block(reason)
        self._receive(_ABORT_SECONDS)
        try:
            return self._outcome(command)
        except GeneratorError:
            return None

    def stop(self) -> None:
        """End all processes. Idempotent."""
        for worker in self._workers:
            worker.child.stop(timeout_s=2.0)
            sweep(worker.child.pid)
        if self._counts >= 0:
            os.close(self._counts)
            self._counts = -1

    def _ask(self, commands: Sequence[Command], timeout_s: float, *, beating: bool = False) -> None:
        self._beating = beating
        self._asked = self._workers[: len(commands)]
        for worker, command in zip(self._asked, commands, strict=True):
            worker.reply = None
            worker.heard_s = monotonic()
            worker.send(command)
        self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        stopped = False
        while waiting := [worker for worker in self._asked if worker.reply is None and worker.lost is None]:
            select.select([worker.child for worker in waiting], [], [], 0.5)
            for worker in waiting:
                worker.receive()
                if worker.reply is None and monotonic() > deadline:
                    worker.kill(f"did not answer within {timeout_s:g} s")
                elif worker.reply is None and self._beating and monotonic() - worker.heard_s > SILENCE_SECONDS:
                    worker.kill(f"sent no heartbeat for {SILENCE_SECONDS:g} s")
            fault = next((fault for worker in self._asked if (fault := worker.fault())), None)
            if self._beating and fault is not None and not stopped:
                stopped = True
                self._stop_block(fault)

    def _stop_block(self, reason: str) -> None:
        """Stop the block in all processes: without the lost one the load is not the intended one."""
        for worker in self._asked:
            if worker.reply is None:
                worker.send(Abort(reason=reason))

    def _outcome(self, command: Open) -> Outcome:
        self._running = False
        refused = next((worker for worker in self._asked if isinstance(worker.reply, Refusal)), None)
        if len(self._parts) == 1 or refused is not None:
            worker = refused or self._asked[0]
            if not isinstance(worker.reply, Outcome):
                raise worker.error()
            return worker.reply
        contributions = [
            Contribution(
                number, worker.child.pid, part, worker.reply if isinstance(worker.reply, Outcome) else None, worker.lost
            )
            for number, (worker, part) in enumerate(zip(self._asked, self._parts, strict=True))
        ]
        return merge(command, contributions)

    def _require_done(self) -> None:
        for worker in self._asked:
            if not isinstance(worker.reply, Done):
                raise worker.error()
