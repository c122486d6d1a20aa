"""One inference request over HTTP between its last byte and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from servers.contract.errors import ContractError, InternalError
from servers.native.answers import Answer, error_status, refusal
from servers.native.entries import Entry
from servers.native.errors import failure_reason
from servers.native.inference import InferenceService
from servers.native.plans import Plan
from servers.native.statistics import RequestTimes

log = structlog.get_logger("abserve.http")

_FAULT = "internal error, the server's log has it"


class ExchangeOwner(Protocol):
    """The connection that a request came on; it waits for one answer at a time."""

    gone: bool
    """The client has left."""
    in_place: bool
    """Its answer may be sent from the engine thread."""

    @property
    def common_headers(self) -> bytes:
        """The header line."""

    def answer(self, answer: Answer) -> None:
        """Send the answer; in the event loop."""

    def send(self, data: bytes) -> None:
        """Send an answer's bytes; in the event loop."""

    def send_in_place(self, data: bytes) -> None:
        """Send them from the engine thread, where `in_place` allows it."""


class Exchange:
    """Belongs to the event loop, but for `answer_in_place`. Exactly one of the ways to end it is taken."""

    __slots__ = ("_entry", "_owner", "_plan", "_service", "_task", "_times")

    def __init__(self, owner: ExchangeOwner, service: InferenceService, times: RequestTimes) -> None:
        self._owner = owner
        self._service = service
        self._times = times
        self._plan: Plan | None = None
        self._entry: Entry | None = None
        self._task: asyncio.Task[None] | None = None

    def queue(self, plan: Plan, body: memoryview) -> None:
        """Without a task. Raises `QueueFullError` or `ShuttingDownError`."""
        self._plan = plan
        self._entry = entry = Entry(plan.arrays(body), plan.rows, None, self, (), plan.key)
        try:
            self._service.enqueue(entry)
        except ContractError:
            self._entry = None
            raise

    def run(self, work: Coroutine[Any, Any, Answer]) -> None:
        """As a task, cancelled when the client leaves."""
        self._task = asyncio.get_running_loop().create_task(self._carry_out(work))

    def abandon(self) -> None:
        """The client has left: take the request out of the queue if it still waits there."""
        if self._task is not None:
            self._task.cancel()
        elif self._entry is not None and self._service.withdraw(self._entry):
            self._service.statistics.record_disconnect()

    def give_up(self) -> None:
        """The server's time to finish is over and its owner has refused it: the engine need not see it any more."""
        if self._task is not None:
            self._task.cancel()
        elif self._entry is not None:
            self._service.withdraw(self._entry)
        self._service.statistics.record_failure("shutting_down", self._times.start_ns)

    def refuse(self, error: ContractError) -> None:
        """Answer with an error."""
        self._service.statistics.record_failure(failure_reason(error), self._times.start_ns)
        self._owner.answer(refusal(error_status(error), str(error)))

    def answer_in_place(self, entry: Entry) -> bool:
        """See `Waiter`."""
        if entry.error is not None or not self._owner.in_place:
            return False
        answer = self._encode(entry)
        if answer is None:
            return False
        self._entry = None  # else the two of them, and the arrays, would have to wait for the garbage collector
        self._count()
        self._owner.send_in_place(answer)
        return True

    def wake(self, entry: Entry) -> None:
        """See `Waiter`."""
        self._entry = None
        answer = None if entry.error is not None else self._encode(entry)
        if answer is None:
            self.refuse(entry.error or InternalError(_FAULT))
        else:
            self._count()
            self._owner.send(answer)

    def _encode(self, entry: Entry) -> bytes | None:
        """None where that fails: the error is then the entry's, since it must stop neither thread."""
        assert self._plan is not None
        start_ns = time.perf_counter_ns()
        try:
            answer = self._plan.answer(entry.outputs or {}, self._service.signature, self._owner.common_headers)
        except Exception:
            log.exception("an answer could not be encoded")
            entry.error = InternalError(_FAULT)
            return None
        self._times.encode_ns = time.perf_counter_ns() - start_ns
        return answer

    async def _carry_out(self, work: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await work
        except asyncio.CancelledError:
            if not self._owner.gone:
                raise  # the server is being stopped by force
            self._service.statistics.record_disconnect()
        except ContractError as error:
            self.refuse(error)
        except Exception:
            log.exception("a request failed unexpectedly")
            self.refuse(InternalError(_FAULT))
        else:
            self._count()
            self._owner.answer(answer)

    def _count(self) -> None:
        statistics = self._service.statistics
        if self._owner.gone:
            statistics.record_disconnect()
        else:
            statistics.record_success(self._times)
