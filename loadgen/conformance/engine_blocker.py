"""Keeps a server's engine busy for a known while, so that requests queue behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter, sleep

from loadgen.conformance.grpc_calls import finish, infer_message
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Answer, Door, NotApplicableError
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import RawConnection, all_read

BUSY_SECONDS = 2.5
MOST_REQUESTS = 64
FEWEST_REQUESTS = 5
"""A server may take the next batches out of its queue before it executes them; these are to be ours."""
SHORTEST_SECONDS = 0.4
ANSWER_SECONDS = 60.0
ARRIVAL_SECONDS = 20.0
CALL_SECONDS = 30.0


class Background:
    """One inference request on a thread: `sent` is set when its last byte has left."""

    def __init__(self, subject: Subject, data: bytes) -> None:
        self.sent = threading.Event()
        self.answer = Answer("refused")
        self.connection: RawConnection | None = None
        self._subject, self._data = subject, data
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = ANSWER_SECONDS) -> Answer:
        """The answer; "silent" when it has not come in that time."""
        self._thread.join(seconds)
        return self.answer if self.done else Answer("silent")

    @property
    def done(self) -> bool:
        """Whether it has been answered."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        started = perf_counter()
        answer = self.answer
        try:
            with self._subject.connect() as self.connection:
                answer = self.connection.exchange(self._pieces(), ANSWER_SECONDS)
        except OSError:
            pass
        finally:
            self.sent.set()
        self.answer = replace(answer, elapsed_s=perf_counter() - started)

    def _pieces(self) -> Iterator[bytes]:
        yield self._data
        self.sent.set()


class PendingCall:
    """One gRPC inference under way."""

    def __init__(self, subject: Subject, request: InferenceRequest, deadline_s: float) -> None:
        self._started = perf_counter()
        self.future = subject.call().start("ModelInfer", infer_message(request), deadline_s)

    def wait(self) -> Answer:
        """The answer, DEADLINE_EXCEEDED at the latest."""
        return finish(self.future, self._started)

    @property
    def done(self) -> bool:
        """Whether it has been answered."""
        return bool(self.future.done())


def start(subject: Subject, door: Door, request: InferenceRequest) -> Background | PendingCall:
    """Begin an inference through either protocol."""
    if door is Door.GRPC:
        return PendingCall(subject, request, CALL_SECONDS)
    return Background(subject, subject.infer_bytes(request.body()))


class EngineBlocker:
    """Requests of the largest batch, enough for 2.5 s. Enter it: on return the engine is busy, at exit all are done."""

    def __init__(self, subject: Subject, limit: int = MOST_REQUESTS) -> None:
        """Raises `NotApplicableError` when the server is too fast to be kept busy."""
        self._subject = subject
        self.rows = subject.model.rows(1 << 30)
        self._data = subject.infer_bytes(subject.model.binary(self.rows))
        answer = subject.raw(self._data, ANSWER_SECONDS)
        if answer.status != "200":
            raise NotApplicableError(f"a request of {self.rows} rows is answered {answer.status}")
        self._one_s = answer.elapsed_s
        self._count = min(limit, max(FEWEST_REQUESTS, round(BUSY_SECONDS / self._one_s)))
        if self._count * self._one_s < SHORTEST_SECONDS:
            raise NotApplicableError(
                f"{self.rows} rows take {self._one_s * 1e3:.0f} ms, too fast to queue behind; launch a slower engine"
            )
        self.requests: list[Background] = []

    def __enter__(self) -> EngineBlocker:
        self.requests = [Background(self._subject, self._data) for _ in range(self._count)]
        wait_until_read(self.requests)
        sleep(min(0.1, self._one_s / 4))  # from the socket to the queue
        return self

    def __exit__(self, *_: object) -> None:
        for request in self.requests:
            request.wait()

    @property
    def busy(self) -> bool:
        """Whether some of them still wait for their answers."""
        return not all(request.done for request in self.requests)

    @property
    def rows_executed(self) -> int:
        """Rows of those that were answered 200."""
        return sum(self.rows for request in self.requests if request.wait().status == "200")


def wait_until_read(requests: Sequence[Background]) -> None:
    """Wait up to 20 s until the server has read all of these, as far as that can be known."""

    def arrived() -> bool:
        waiting = [request.connection for request in requests if request.connection is not None and not request.done]
        return all(request.sent.is_set() for request in requests) and all_read(waiting)

    wait_for(arrived, ARRIVAL_SECONDS)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll; whether it came true in time."""
    deadline = perf_counter() + seconds
    while not condition():
        if perf_counter() > deadline:
            return False
        sleep(0.01)
    return True
