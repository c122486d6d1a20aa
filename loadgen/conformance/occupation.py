"""Keeps a server's engine busy for a known while, so that requests queue behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import Any

from loadgen.conformance.model import Body, Model
from loadgen.conformance.records import Answer, NotApplicableError
from loadgen.conformance.subject import Subject
from loadgen.conformance.wire import RawConnection, all_read

BUSY_SECONDS = 2.5
MOST_REQUESTS = 64
FEWEST_REQUESTS = 5
"""A server may take the next batches out of its queue before it executes them; these are to be ours."""
SHORTEST_SECONDS = 0.4
ANSWER_SECONDS = 60.0
ARRIVAL_SECONDS = 20.0


class Background:
    """One request on a thread of its own: `sent` is set when its last byte has left us."""

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
        return Answer("silent") if self._thread.is_alive() else self.answer

    @property
    def done(self) -> bool:
        """Whether it has been answered."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        started = perf_counter()
        try:
            with self._subject.connect() as connection:
                self.connection = connection
                answer = connection.exchange(self._pieces(), ANSWER_SECONDS)
        except OSError:
            answer = Answer("refused")
        finally:
            self.sent.set()
        self.answer = Answer(answer.status, answer.headers, answer.body, answer.message, perf_counter() - started)

    def _pieces(self) -> Any:
        yield self._data
        self.sent.set()


class Occupation:
    """Requests of the largest batch, enough for 2.5 s. Enter it: on return the engine is busy, at exit all are done."""

    def __init__(self, subject: Subject, busy_s: float = BUSY_SECONDS, limit: int = MOST_REQUESTS) -> None:
        """Raises `NotApplicableError` when the server is too fast to be kept busy."""
        self._subject = subject
        self.rows = subject.model.rows(1 << 30)
        self._data = subject.infer_bytes(subject.model.binary(self.rows))
        started = perf_counter()
        with subject.connect() as connection:
            answer = connection.exchange(self._data, ANSWER_SECONDS)
        self.one_s = perf_counter() - started
        if answer.status != "200":
            raise NotApplicableError(f"a request of {self.rows} rows is answered {answer.status}")
        self.count = min(limit, max(FEWEST_REQUESTS, round(busy_s / self.one_s)))
        if self.count * self.one_s < SHORTEST_SECONDS:
            raise NotApplicableError(
                f"{self.rows} rows take {self.one_s * 1e3:.0f} ms, too fast to queue behind; launch a slower engine"
            )
        self.requests: list[Background] = []

    def __enter__(self) -> Occupation:
        self.requests = [Background(self._subject, self._data) for _ in range(self.count)]
        wait_for(lambda: arrived(self.requests), ARRIVAL_SECONDS)
        sleep(min(0.1, self.one_s / 4))  # from the socket to the queue
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


def arrived(requests: Sequence[Background]) -> bool:
    """Whether the server has read all of these, as far as that can be known."""
    if not all(request.sent.is_set() for request in requests):
        return False
    return all_read(request.connection for request in requests if request.connection is not None and not request.done)


def single_row(model: Model, seed: int = 1) -> Body:
    """A body of one row that is not the golden one."""
    return model.binary(1, seed)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll; whether it came true in time."""
    deadline = perf_counter() + seconds
    while not condition():
        if perf_counter() > deadline:
            return False
        sleep(0.01)
    return True
