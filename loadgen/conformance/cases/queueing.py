"""Cases 14, 22 and 28 to 30: requests that wait in the queue, share a batch, or whose clients give up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

import numpy as np

from loadgen.conformance.case import Case, Section, infer
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Answer, Fact, NotApplicableError, Protocol, Seen
from loadgen.conformance.servers import SMALL_QUEUE, SMALL_QUEUES
from loadgen.conformance.subject import Subject, output_difference
from loadgen.conformance.wire import RawConnection, all_read, finish, infer_message

BUSY_SECONDS = 2.5
MOST_REQUESTS = 64
FEWEST_REQUESTS = 5
"""A server may take the next batches out of its queue before it executes them; those must be the blocker's."""
SHORTEST_SECONDS = 0.4
ANSWER_SECONDS = 60.0
READ_SECONDS = 20.0
CALL_SECONDS = 30.0
ABANDONED = 4
FLOOD = 12
ARRIVAL_SECONDS = 5.0
PROMPT_SECONDS = 0.5
TIMEOUT_US = 50_000
CLIENT_DEADLINE_SECONDS = 0.2
MERGED_TOLERANCE = 1e-4
MERGE_ROUNDS = 5


class PendingRequest:
    """One HTTP inference request on a thread: `sent` is set when its last byte has been sent."""

    def __init__(self, subject: Subject, data: bytes) -> None:
        self.sent = threading.Event()
        self.connection: RawConnection | None = None
        self._answer = Answer("silent")
        self._thread = threading.Thread(target=self._run, args=(subject, data), daemon=True)
        self._thread.start()

    def wait(self) -> Answer:
        """The answer; "silent" when it has not come in 60 s."""
        self._thread.join(ANSWER_SECONDS)
        return self._answer

    @property
    def done(self) -> bool:
        """Whether the request has been answered."""
        return not self._thread.is_alive()

    def _run(self, subject: Subject, data: bytes) -> None:
        def pieces() -> Iterator[bytes]:
            yield data
            self.sent.set()

        answer = Answer("refused")
        started = perf_counter()
        with suppress(OSError), subject.connect() as self.connection:
            answer = self.connection.request(pieces(), ANSWER_SECONDS)
        self.sent.set()
        self._answer = replace(answer, elapsed_s=perf_counter() - started)


class PendingCall:
    """One gRPC inference call."""

    def __init__(self, subject: Subject, request: InferenceRequest, deadline_s: float) -> None:
        self._started = perf_counter()
        self.future = subject.grpc_client().start("ModelInfer", infer_message(request), deadline_s)

    def wait(self) -> Answer:
        """The answer; DEADLINE_EXCEEDED when none comes in time."""
        return finish(self.future, self._started)

    @property
    def done(self) -> bool:
        """Whether the request has been answered."""
        return bool(self.future.done())


def start(subject: Subject, protocol: Protocol, request: InferenceRequest) -> PendingRequest | PendingCall:
    """Start an inference over either protocol."""
    if protocol is Protocol.GRPC:
        return PendingCall(subject, request, CALL_SECONDS)
    return PendingRequest(subject, subject.infer_bytes(request.body()))


class EngineBlocker:
    """Keeps the engine busy for 2.5 s with requests of the largest batch, so that others queue behind them. When it is
    entered the engine is busy; it exits when all are answered."""

    def __init__(self, subject: Subject, limit: int = MOST_REQUESTS) -> None:
        """Raises `NotApplicableError` when the server is too fast to be kept busy."""
        self._subject = subject
        self.rows = subject.model.rows(1 << 30)
        self._data = subject.infer_bytes(subject.model.binary(self.rows))
        answer = subject.raw(self._data, ANSWER_SECONDS)
        if answer.status != "200":
            raise NotApplicableError(f"a request of {self.rows} rows got {answer.status}")
        self._one_s = answer.elapsed_s
        self._count = min(limit, max(FEWEST_REQUESTS, round(BUSY_SECONDS / self._one_s)))
        if self._count * self._one_s < SHORTEST_SECONDS:
            raise NotApplicableError(
                f"{self.rows} rows take {self._one_s * 1e3:.0f} ms, too fast for a queue to form; use a slower engine"
            )
        self.requests: list[PendingRequest] = []

    def __enter__(self) -> EngineBlocker:
        self.requests = [PendingRequest(self._subject, self._data) for _ in range(self._count)]
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


def wait_until_read(requests: Sequence[PendingRequest]) -> None:
    """Wait up to 20 s until the server has read all of these requests, as far as the kernel knows."""

    def arrived() -> bool:
        waiting = [request.connection for request in requests if request.connection is not None and not request.done]
        return all(request.sent.is_set() for request in requests) and all_read(waiting)

    wait_for(arrived, READ_SECONDS)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition is true; False when it is not in time."""
    deadline = perf_counter() + seconds
    while not condition():
        if perf_counter() > deadline:
            return False
        sleep(0.01)
    return True


def _disconnect(subject: Subject, _: Protocol) -> Seen:
    request = subject.infer_bytes(subject.model.binary(1, seed=1))

    def abandon() -> list[Answer]:
        connections = [subject.connect() for _ in range(ABANDONED)]
        for connection in connections:
            connection.send(request)
        # They must be in the queue when their clients disconnect, not in a socket's buffer.
        wait_for(lambda: all_read(connections), ARRIVAL_SECONDS)
        sleep(0.2)
        for index, connection in enumerate(connections):
            connection.close(abruptly=index % 2 == 0)
        return []

    return _abandoned(subject, abandon)


def _cancel(subject: Subject, _: Protocol) -> Seen:
    def abandon() -> list[Answer]:
        calls = [PendingCall(subject, subject.model.request(seed=1), CALL_SECONDS) for _ in range(ABANDONED)]
        sleep(0.1)
        for call in calls:
            call.future.cancel()
        return [call.wait() for call in calls]

    return _abandoned(subject, abandon)


def _pass_the_deadline(subject: Subject, _: Protocol) -> Seen:
    def abandon() -> list[Answer]:
        request = subject.model.request(seed=1)
        calls = [PendingCall(subject, request, CLIENT_DEADLINE_SECONDS) for _ in range(ABANDONED)]
        return [call.wait() for call in calls]

    return _abandoned(subject, abandon)


def _abandoned(subject: Subject, abandon: Callable[[], list[Answer]]) -> Seen:
    """Requests whose clients give up while the engine is busy: they must not be executed."""
    blocker = EngineBlocker(subject)
    before = _settled_rows(subject)
    with blocker:
        answers = abandon()
        in_time = blocker.busy
    executed = _settled_rows(subject) - before - blocker.rows_executed
    if not in_time:
        raise NotApplicableError("the queue was empty before the clients gave up; use a slower engine")
    # Fewer rows than were answered would mean that the statistics are unreliable.
    seen = f"{executed} of {ABANDONED} abandoned requests executed"
    return [*answers, Fact("dropped before the engine", None if executed < 0 else executed == 0, seen)]


def _settled_rows(subject: Subject) -> int:
    """Rows executed so far, once the statistics stop changing."""
    last = subject.statistics()

    def still() -> bool:
        nonlocal last
        sleep(0.25)
        previous, last = last, subject.statistics()
        return previous == last

    wait_for(still, 20.0)
    return last["inference_count"]


def _flood(subject: Subject, protocol: Protocol) -> Seen:
    """More requests than the queue holds, while the engine is busy and health is requested."""
    health: list[Answer] = []
    with EngineBlocker(subject, limit=SMALL_QUEUE) as blocker:
        flood = [start(subject, protocol, subject.model.request(seed=1)) for _ in range(FLOOD)]
        while blocker.busy and protocol is Protocol.HTTP:
            health += [subject.http("GET", f"/v2/health/{kind}", deadline_s=5.0) for kind in ("live", "ready")]
            sleep(0.02)
        answers = [one.wait() for one in flood]
    refused = [answer for answer in answers if not answer.good]
    yield from refused
    yield Fact("some are refused", bool(refused), f"{len(refused)} of {FLOOD}")
    if protocol is Protocol.HTTP:
        slowest = max((answer.elapsed_s for answer in refused), default=0.0)
        bad = [answer for answer in health if answer.status != "200" or answer.elapsed_s > 1.0]
        yield Fact("at once", slowest < PROMPT_SECONDS, f"slowest {slowest * 1e3:.0f} ms")
        yield Fact("health requests answered", not bad, f"{len(bad)} of {len(health)} refused or slow")


def _queue_timeout(subject: Subject, protocol: Protocol) -> Seen:
    def with_timeout(request: InferenceRequest) -> None:
        request.document["parameters"] |= {"timeout": TIMEOUT_US}

    with EngineBlocker(subject) as blocker:
        answer = infer(with_timeout)(subject, protocol)
        ok = blocker.busy and answer.elapsed_s < TIMEOUT_US / 1e6 + PROMPT_SECONDS
    seen = f"after {answer.elapsed_s * 1e3:.0f} ms with a timeout of {TIMEOUT_US / 1e3:g} ms"
    return answer, Fact("promptly", ok, seen)


def _nan_in_a_batch(subject: Subject, _: Protocol) -> Seen:
    """One request of NaN among others sent at the same moment, whose answers must not change."""
    model = subject.model
    if not model.batches or any(tensor.datatype not in {"FP32", "FP64"} for tensor in model.inputs):
        raise NotApplicableError("needs a batching model of FP32 or FP64 inputs")
    bodies = [model.binary(1, seed) for seed in range(1, 6)]
    alone = [subject.infer(body) for body in bodies]
    nan = model.request(arrays=[np.full_like(array, np.nan) for array in model.arrays(1)]).body()
    changed: list[str] = []
    before = subject.statistics()["execution_count"]
    for _round in range(MERGE_ROUNDS):
        running = [PendingRequest(subject, subject.infer_bytes(body)) for body in (*bodies[:2], nan, *bodies[2:])]
        merged = [request.wait() for request in running]
        del merged[2]
        yield from merged
        differences = (output_difference(a, b, MERGED_TOLERANCE) for a, b in zip(alone, merged, strict=True))
        changed += filter(None, differences)
    executed, requests = subject.statistics()["execution_count"] - before, MERGE_ROUNDS * (len(bodies) + 1)
    yield Fact("the others equal their results alone", not changed, changed[0] if changed else "yes")
    yield Fact("batches were merged", executed < requests or None, f"{executed} executions of {requests} requests")


QUEUE_FULL: dict[str, Any] = {"setting": SMALL_QUEUES, "destructive": True}
HARM: dict[str, Any] = {"destructive": True}
TIMEOUT = HARM | {"naming": ("timeout", "timed out", "expired"), "note": "promptly"}
NOT_STARTED = HARM | {"note": "not started"}

# fmt: off
CASES = (
    Case("14", "client disconnects while queued", _disconnect, "", note="dropped before it reaches the engine", **HARM),
    Case("22", "one NaN row in a merged batch", _nan_in_a_batch, "200", note="the other results do not change"),
    Case("28a", "queue full", _flood, "503", headers=("Retry-After",), note="at once; health requests are answered",
         **QUEUE_FULL),
    Case("28b", "queue full", _flood, "UNAVAILABLE", **QUEUE_FULL),
    Case("29a", "queue timeout", _queue_timeout, "503", **TIMEOUT),
    Case("29b", "queue timeout", _queue_timeout, "UNAVAILABLE", **TIMEOUT),
    Case("30a", "cancelled while queued", _cancel, "CANCELLED", **NOT_STARTED),
    Case("30b", "client deadline while queued", _pass_the_deadline, "DEADLINE_EXCEEDED", **NOT_STARTED),
)
# fmt: on

SECTIONS = (Section("Queue and batch", "Abandoned requests are not executed; no request changes another.", CASES),)
