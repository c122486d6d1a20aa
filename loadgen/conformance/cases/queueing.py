"""Cases 14, 22 and 28 to 32: requests in the queue and in one batch, and servers that start or end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np

from loadgen.conformance.case import Case, Theme, infer
from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Fact, NotApplicableError, Protocol, Response, Seen
from loadgen.conformance.servers import OWN_SERVERS, SMALL_QUEUE, SMALL_QUEUES, Subject, output_difference
from loadgen.conformance.wire import RawConnection, all_read, finish, infer_message

BUSY_SECONDS = 2.5
MOST_REQUESTS = 64
FEWEST_REQUESTS = 5
"""A server may take the next batches out of its queue before it executes them; those must be the blocker's."""
SHORTEST_SECONDS = 0.4
RESPONSE_SECONDS = 60.0
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


class StartedRequest:
    """One inference on a thread. Over HTTP `sent` is set when its last byte has been sent."""

    def __init__(
        self, subject: Subject, protocol: Protocol, request: InferenceRequest | bytes, deadline_s: float = CALL_SECONDS
    ) -> None:
        """`request` may be the bytes of a whole request; `deadline_s` is the deadline of a gRPC call."""
        self.sent = threading.Event()
        self.connection: RawConnection | None = None
        self.call: Any = None
        """The gRPC future."""
        self._started = perf_counter()
        self._response = Response("silent")
        if protocol == "grpc":
            message = infer_message(request) if isinstance(request, InferenceRequest) else request
            self.call = subject.grpc_client().start("ModelInfer", message, deadline_s)
            self._thread = threading.Thread(target=self._await_call, daemon=True)
        else:
            data = subject.infer_bytes(request.body()) if isinstance(request, InferenceRequest) else request
            self._thread = threading.Thread(target=self._send, args=(subject, data), daemon=True)
        self._thread.start()

    def wait(self) -> Response:
        """The answer; "silent" when it has not come in 60 s, DEADLINE_EXCEEDED at a call's deadline."""
        self._thread.join(RESPONSE_SECONDS)
        return self._response

    @property
    def done(self) -> bool:
        """Whether the request has been answered."""
        return not self._thread.is_alive()

    def _await_call(self) -> None:
        self._response = finish(self.call, self._started)

    def _send(self, subject: Subject, data: bytes) -> None:
        def pieces() -> Iterator[bytes]:
            yield data
            self.sent.set()

        response = Response("refused")
        with suppress(OSError), subject.connect() as self.connection:
            response = self.connection.request(pieces(), RESPONSE_SECONDS)
        self.sent.set()
        self._response = replace(response, elapsed_s=perf_counter() - self._started)


class EngineBlocker:
    """Keeps the engine busy for 2.5 s with requests of the largest batch, so that others queue behind them. When it is
    entered the engine is busy; it exits when all are answered."""

    def __init__(self, subject: Subject, limit: int = MOST_REQUESTS) -> None:
        """Raises `NotApplicableError` when the server is too fast to be kept busy."""
        self._subject = subject
        self.rows = subject.model.rows(1 << 30)
        self._data = subject.infer_bytes(subject.model.binary(self.rows))
        response = subject.raw(self._data, RESPONSE_SECONDS)
        if response.status != "200":
            raise NotApplicableError(f"a request of {self.rows} rows got {response.status}")
        self._one_s = response.elapsed_s
        self._count = min(limit, max(FEWEST_REQUESTS, round(BUSY_SECONDS / self._one_s)))
        if self._count * self._one_s < SHORTEST_SECONDS:
            raise NotApplicableError(
                f"{self.rows} rows take {self._one_s * 1e3:.0f} ms, too fast for a queue to form; use a slower engine"
            )
        self.requests: list[StartedRequest] = []

    def __enter__(self) -> EngineBlocker:
        self.requests = [StartedRequest(self._subject, "http", self._data) for _ in range(self._count)]
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


def wait_until_read(requests: Sequence[StartedRequest]) -> None:
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


def _disconnect(subject: Subject) -> list[Response]:
    request = subject.infer_bytes(subject.model.binary(1, seed=1))
    connections = [subject.connect() for _ in range(ABANDONED)]
    for connection in connections:
        connection.send(request)
    # They must be in the queue when their clients disconnect, not in a socket's buffer.
    wait_for(lambda: all_read(connections), ARRIVAL_SECONDS)
    sleep(0.2)
    for index, connection in enumerate(connections):
        connection.close(abruptly=index % 2 == 0)
    return []


def _cancel(subject: Subject) -> list[Response]:
    requests = [StartedRequest(subject, "grpc", subject.model.request(seed=1)) for _ in range(ABANDONED)]
    sleep(0.1)
    for request in requests:
        request.call.cancel()
    return [request.wait() for request in requests]


def _pass_the_deadline(subject: Subject) -> list[Response]:
    content = subject.model.request(seed=1)
    requests = [StartedRequest(subject, "grpc", content, CLIENT_DEADLINE_SECONDS) for _ in range(ABANDONED)]
    return [request.wait() for request in requests]


def abandoned(subject: Subject, _: Protocol, abandon: Callable[[Subject], list[Response]]) -> Seen:
    """Requests whose clients give up while the engine is busy: they must not be executed."""
    blocker = EngineBlocker(subject)
    before = _settled_rows(subject)
    with blocker:
        responses = abandon(subject)
        in_time = blocker.busy
    answered = sum(blocker.rows for request in blocker.requests if request.wait().status == "200")
    executed = _settled_rows(subject) - before - answered
    if not in_time:
        raise NotApplicableError("the queue was empty before the clients gave up; use a slower engine")
    # Fewer rows than were answered would mean that the statistics are unreliable.
    seen = f"{executed} of {ABANDONED} abandoned requests executed"
    return [*responses, Fact("dropped before the engine", None if executed < 0 else executed == 0, seen)]


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
    health: list[Response] = []
    with EngineBlocker(subject, limit=SMALL_QUEUE) as blocker:
        flood = [StartedRequest(subject, protocol, subject.model.request(seed=1)) for _ in range(FLOOD)]
        while blocker.busy and protocol == "http":
            health += [subject.http("GET", f"/v2/health/{kind}", deadline_s=5.0) for kind in ("live", "ready")]
            sleep(0.02)
        responses = [request.wait() for request in flood]
    refused = [response for response in responses if not response.succeeded]
    yield from refused
    yield Fact("some are refused", bool(refused), f"{len(refused)} of {FLOOD}")
    if protocol == "http":
        slowest = max((response.elapsed_s for response in refused), default=0.0)
        bad = [response for response in health if response.status != "200" or response.elapsed_s > 1.0]
        yield Fact("at once", slowest < PROMPT_SECONDS, f"slowest {slowest * 1e3:.0f} ms")
        yield Fact("health requests answered", not bad, f"{len(bad)} of {len(health)} refused or slow")


def _queue_timeout(subject: Subject, protocol: Protocol) -> Seen:
    def with_timeout(request: InferenceRequest) -> None:
        request.document["parameters"] |= {"timeout": TIMEOUT_US}

    with EngineBlocker(subject) as blocker:
        response = infer(with_timeout)(subject, protocol)
        ok = blocker.busy and response.elapsed_s < TIMEOUT_US / 1e6 + PROMPT_SECONDS
    seen = f"after {response.elapsed_s * 1e3:.0f} ms with a timeout of {TIMEOUT_US / 1e3:g} ms"
    return response, Fact("promptly", ok, seen)


def _nan_in_a_batch(subject: Subject, _: Protocol) -> Seen:
    """One request of NaN among others sent at the same moment, whose answers must not change."""
    model = subject.model
    if not model.batches or any(tensor.datatype not in {"FP32", "FP64"} for tensor in model.inputs):
        raise NotApplicableError("needs a batching model of FP32 or FP64 inputs")
    bodies = [model.binary(1, seed) for seed in range(1, 6)]
    alone = [subject.infer(body) for body in bodies]
    nan = model.request(arrays=[np.full_like(array, np.nan) for array in model.arrays(1)]).body()
    together = [subject.infer_bytes(body) for body in (*bodies[:2], nan, *bodies[2:])]
    changed: list[str] = []
    before = subject.statistics()["execution_count"]
    for _round in range(MERGE_ROUNDS):
        running = [StartedRequest(subject, "http", data) for data in together]
        merged = [request.wait() for request in running]
        del merged[2]
        yield from merged
        differences = (output_difference(a, b, MERGED_TOLERANCE) for a, b in zip(alone, merged, strict=True))
        changed += filter(None, differences)
    executed, sent = subject.statistics()["execution_count"] - before, MERGE_ROUNDS * len(together)
    yield Fact("the others equal their results alone", not changed, changed[0] if changed else "yes")
    yield Fact("batches were merged", executed < sent or None, f"{executed} executions of {sent} requests")


QUEUE_FULL: dict[str, Any] = {"setting": SMALL_QUEUES, "destructive": True}
HARM: dict[str, Any] = {"destructive": True}
TIMEOUT = HARM | {"naming": ("timeout", "timed out", "expired"), "note": "promptly"}
NOT_STARTED = HARM | {"note": "not started"}

# fmt: off
QUEUE_CASES = (
    Case("14", "client disconnects while queued", partial(abandoned, abandon=_disconnect), "",
         note="dropped before it reaches the engine", **HARM),
    Case("22", "one NaN row in a merged batch", _nan_in_a_batch, "200", note="the other results do not change"),
    Case("28a", "queue full", _flood, "503", headers=("Retry-After",), note="at once; health requests are answered",
         **QUEUE_FULL),
    Case("28b", "queue full", _flood, "UNAVAILABLE", **QUEUE_FULL),
    Case("29a", "queue timeout", _queue_timeout, "503", **TIMEOUT),
    Case("29b", "queue timeout", _queue_timeout, "UNAVAILABLE", **TIMEOUT),
    Case("30a", "cancelled while queued", partial(abandoned, abandon=_cancel), "CANCELLED", **NOT_STARTED),
    Case("30b", "client deadline while queued", partial(abandoned, abandon=_pass_the_deadline), "DEADLINE_EXCEEDED",
         **NOT_STARTED),
)
# fmt: on


IN_FLIGHT = 6
EXIT_SECONDS = 30.0
SETTLED_SECONDS = 0.3
LOADING_SECONDS = 120.0


@contextmanager
def _new_server(subject: Subject, *, ready: bool) -> Iterator[Subject]:
    if subject.new_server is None:
        raise NotApplicableError("needs a separate server; use --launch")
    with subject.new_server(ready) as server:
        yield replace(server, model=subject.model)


def _rows_of_a_second(subject: Subject) -> int:
    """The number of rows that this machine computes in about 1 s: six such requests end well within 30 s."""
    most = subject.model.rows(1 << 30)
    response = subject.infer(subject.model.binary(most), deadline_s=EXIT_SECONDS)
    return max(1, min(most, round(most / max(response.elapsed_s, 1e-3))))


def _terminate(server: Subject) -> Callable[[], Fact]:
    """Send SIGTERM to the server's main process; the returned function waits until it has ended."""
    os.kill(server.pids()[0], signal.SIGTERM)
    since = perf_counter()

    def exited() -> Fact:
        gone = wait_for(lambda: server.failure() is not None, EXIT_SECONDS - (perf_counter() - since))
        seconds = perf_counter() - since
        seen = f"{seconds:.1f} s" if gone else "still running"
        return Fact("exit within 30 s", gone and seconds < EXIT_SECONDS, seen)

    return exited


def _in_flight(subject: Subject, protocol: Protocol) -> Seen:
    with _new_server(subject, ready=True) as server:
        content = server.model.request(_rows_of_a_second(server))
        running = [StartedRequest(server, protocol, content) for _ in range(IN_FLIGHT)]
        if protocol == "http":
            wait_until_read(running)
        sleep(2 * SETTLED_SECONDS)
        left = sum(not request.done for request in running)
        exited = _terminate(server)
        if protocol == "http":
            sleep(SETTLED_SECONDS)
            new = server.infer(server.model.binary(1, seed=1), deadline_s=10.0).status
            yield Fact("requests in flight at the signal", left > 0 or None, f"{left} of {IN_FLIGHT}")
            yield Fact("new requests refused", new in {"503", "refused", "reset", "closed"}, new)
        for request in running:
            yield request.wait()
        yield exited()


def _while_loading(subject: Subject, _: Protocol) -> Seen:
    with _new_server(subject, ready=False) as server:
        sleep(SETTLED_SECONDS)
        ready = server.http("GET", "/v2/health/ready", deadline_s=1.0).status == "200"
        yield Fact("still loading", None if ready else True, "ready already" if ready else "yes")
        yield _terminate(server)()


def _idle(subject: Subject, _: Protocol) -> Seen:
    with _new_server(subject, ready=True) as server:
        connections = [server.connect() for _ in range(3)]
        head = f"GET /v2/health/live HTTP/1.1\r\nHost: {server.authority}\r\n\r\n".encode()
        for connection in connections:
            yield connection.request(head, 5.0)
        yield _terminate(server)()
        for connection in connections:
            connection.close()


def _before_ready(subject: Subject, protocol: Protocol) -> Seen:
    """Inference until the server is ready. An answer counts only if the server is not ready before and after it."""
    responses: list[Response] = []
    with _new_server(subject, ready=False) as server:
        begun = perf_counter()
        while perf_counter() - begun < LOADING_SECONDS and not (ready := _ready(server, protocol)):
            if ready is False:
                response = infer(lambda _: None)(server, protocol)
                if _ready(server, protocol) is False:
                    responses.append(response)
            if server.failure() is not None:
                raise NotApplicableError("the server ended while it was loading")
            sleep(0.05)
    if not responses:
        kind = "calls" if protocol == "grpc" else "connections"
        raise NotApplicableError(f"it accepts no {kind} before it is ready")
    return responses


def _ready(subject: Subject, protocol: Protocol) -> bool | None:
    """Whether the server reports that it is ready; None when nothing answers."""
    if protocol == "grpc":
        response = subject.grpc_client().call("ServerReady", b"", 2.0)
        return bool(response.body) if response.succeeded else None  # ready: true takes two bytes, false takes no bytes
    response = subject.http("GET", "/v2/health/ready", deadline_s=5.0)
    return response.succeeded if response.received else None


OWN: dict[str, Any] = {"setting": OWN_SERVERS}
ENDED: dict[str, Any] = OWN | {"destructive": True}
EXITS = ENDED | {"note": "exit ≤ 30 s"}

# fmt: off
LIFECYCLE_CASES = (
    Case("31a", f"SIGTERM with {IN_FLIGHT} requests in flight", _in_flight, "200",
         note="all 6 answered, new ones refused, exit ≤ 30 s", **ENDED),
    Case("31b", f"SIGTERM with {IN_FLIGHT} calls in flight", _in_flight, "OK",
         note="all 6 answered, exit ≤ 30 s", **ENDED),
    Case("31c", "SIGTERM while loading", _while_loading, "", **EXITS),
    Case("31d", "SIGTERM with idle keep-alive connections", _idle, "200", **EXITS),
    Case("32a", "before ready", _before_ready, "503", note="ready route ≠ 200", **OWN),
    Case("32b", "before ready", _before_ready, "UNAVAILABLE", note="ready: false", **OWN),
)
# fmt: on

THEMES = (
    Theme("Queue and batch", "Abandoned requests are not executed; no request changes another.", QUEUE_CASES),
    Theme(
        "Start and end", "Orchestrators rely on SIGTERM and the ready route; accepted requests finish.", LIFECYCLE_CASES
    ),
)
