"""Several processes that generate load as one: a Locust master here, Locust workers as its children.

Locust carries the commands and replies and counts heartbeats; which user sends what is ours to divide
(`loadgen.generator.distribution`), since Locust's own dispatcher spawns users one by one and starts each when it is
ready, while a block's users start together. A worker that ends or falls silent is lost: the others are stopped, what
all of them measured is kept, and the block is not complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from time import monotonic, perf_counter_ns
from typing import Any

import msgspec
from gevent.queue import Queue
from locust.env import Environment
from locust.runners import STATE_MISSING

from loadgen.generator.distribution import Contribution, merge, shares
from loadgen.generator.messages import Abort, Command, Go, Open, Opened, Outcome, Prepare, Refusal, Reply
from loadgen.generator.worker import COMMAND, HELLO, REPLY
from loadgen.invocation import OWN_MODULE
from loadgen.targets.process import ChildProcess, ProcessError
from loadgen.transport.shared_memory import sweep

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_LEAD_NS = 150_000_000
"""Between telling the workers when to start and that moment: they have to have heard of it."""


@dataclass(slots=True)
class _Worker:
    index: int
    process: ChildProcess
    client_id: str = ""
    host: str = ""
    lost: str | None = None


class DistributedGenerator:
    """The same to its driver as one process: a command, a reply, at most one block."""

    def __init__(self, processes: int, logs: Path) -> None:
        """Start the workers and wait for them. Raises `ProcessError`."""
        self._runner: Any = Environment(user_classes=[]).create_master_runner("127.0.0.1", 0)
        self._replies: Queue[tuple[int, Reply]] = Queue()
        self._decoder = msgspec.json.Decoder(Reply)
        self._runner.register_message(HELLO, self._greeted)
        self._runner.register_message(REPLY, self._replied)
        self._block: tuple[Open, list[Open]] | None = None
        self._running = False
        self._workers: list[_Worker] = []
        port = str(self._runner.server.port)
        for index in range(processes):
            argv = [*OWN_MODULE, "loadgen.generator.worker", "127.0.0.1", port, str(index)]
            log = logs.with_name(f"{logs.name}-worker{index}.log")
            self._workers.append(_Worker(index, ChildProcess(argv, log_path=log)))
        deadline = monotonic() + _START_SECONDS
        while any(not worker.client_id for worker in self._workers):
            self._take(_POLL_SECONDS)
            late = next((worker for worker in self._workers if not worker.client_id and self._is_lost(worker)), None)
            if late is not None or monotonic() > deadline:
                self.close()
                why = late.lost if late is not None else f"did not come up within {_START_SECONDS:g} s"
                raise ProcessError(f"a load worker {why}")

    def answer(self, command: Command) -> Reply:
        """Do what one command says."""
        try:
            match command:
                case Prepare():
                    return self._all_alike({worker.index: command for worker in self._workers})
                case Open():
                    return self._open(command)
                case Go():
                    return self._go()
                case Abort():
                    return Refusal(reason="no block is running")
        except ValueError as exc:
            return Refusal(reason=str(exc))

    def abort(self, reason: str) -> bool:
        """End the running window early; False where there is none."""
        if not self._running:
            return False
        for worker in self._workers:
            if worker.lost is None:
                self._send(worker, Abort(reason=reason))
        return True

    def close(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            worker.process.stop(timeout_s=0.5)
            sweep(worker.process.pid)

    def _open(self, command: Open) -> Reply:
        parts = shares(command, len(self._workers))
        reply = self._all_alike(dict(enumerate(parts)))
        if isinstance(reply, Opened):
            self._block = (command, parts)
        return reply

    def _go(self) -> Reply:
        if self._block is None:
            return Refusal(reason="no block is open")
        (command, parts), self._block = self._block, None
        self._running = True
        try:
            start = Go(start_ns=perf_counter_ns() + _LEAD_NS)
            replies = self._ask(dict.fromkeys(range(len(parts)), start), stop_at_first_fault=True)
        finally:
            self._running = False
        refusal = next((replies[index] for index in sorted(replies) if isinstance(replies[index], Refusal)), None)
        if refusal is not None:
            return refusal
        contributions = []
        for worker, part in zip(self._workers, parts, strict=False):
            reply = replies.get(worker.index)
            outcome = reply if isinstance(reply, Outcome) else None
            lost = worker.lost if outcome is None else None
            contributions.append(Contribution(worker.index, worker.host, worker.process.pid, part, outcome, lost))
        return merge(command, contributions)

    def _all_alike(self, commands: Mapping[int, Command]) -> Reply:
        """The reply that all give, or the first refusal where one refuses or is lost: refusals mostly agree."""
        replies = self._ask(commands)
        for index in commands.keys() - replies.keys():
            lost = f"load worker {index + 1} of {len(self._workers)} {self._workers[index].lost}"
            replies[index] = Refusal(reason=lost)
        ordered = [replies[index] for index in sorted(replies)]
        return next((reply for reply in ordered if isinstance(reply, Refusal)), ordered[0])

    def _ask(self, commands: Mapping[int, Command], *, stop_at_first_fault: bool = False) -> dict[int, Reply]:
        """The replies of those that are not lost before they give one. With `stop_at_first_fault` the others' window
        ends when one is cut short or lost: what they sent alone would be another load."""
        replies: dict[int, Reply] = {}
        for index, command in commands.items():
            if not self._is_lost(self._workers[index]):
                self._send(self._workers[index], command)
        waiting = set(commands)
        stopped = not stop_at_first_fault
        while waiting:
            taken = self._take(_POLL_SECONDS)
            if taken is not None and taken[0] in waiting:
                replies[taken[0]] = taken[1]
                waiting.discard(taken[0])
                if isinstance(taken[1], Outcome) and taken[1].cut_reason is not None and not stopped:
                    stopped = self.abort(taken[1].cut_reason)
            for index in [index for index in waiting if self._is_lost(self._workers[index])]:
                waiting.discard(index)
                if not stopped:
                    stopped = self.abort(f"load worker {index + 1} was lost")
        return replies

    def _is_lost(self, worker: _Worker) -> bool:
        """Whether it has ended or fallen silent; one that is silent is ended, so that it sends nothing more."""
        if worker.lost is None:
            node = self._runner.clients.get(worker.client_id)
            failure = worker.process.failure()
            if failure is not None:
                worker.lost = failure
            elif worker.client_id and (node is None or node.state == STATE_MISSING):
                worker.process.popen.kill()
                worker.lost = "sent no heartbeat for some seconds and was ended"
        return worker.lost is not None

    def _send(self, worker: _Worker, command: Command) -> None:
        line = msgspec.json.encode(command).decode()
        self._runner.send_message(COMMAND, {"line": line}, client_id=worker.client_id)

    def _take(self, timeout_s: float) -> tuple[int, Reply] | None:
        try:
            taken: tuple[int, Reply] = self._replies.get(timeout=timeout_s)
        except Empty:
            return None
        return taken

    def _greeted(self, msg: Any, **_: object) -> None:
        worker = self._workers[msg.data["index"]]
        worker.host = msg.data["host"]
        worker.client_id = msg.node_id

    def _replied(self, msg: Any, **_: object) -> None:
        self._replies.put((msg.data["index"], self._decoder.decode(msg.data["line"])))
