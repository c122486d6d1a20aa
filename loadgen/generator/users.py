"""The Locust user of every scenario: it sends prepared bodies and records one sample per request.

The locustfile (`loadgen.scenarios`) and the generator of `abserve compare` both run this code. Importing this module
imports locust, which patches the process with gevent.
"""

from __future__ import annotations

from itertools import count
from time import perf_counter_ns
from typing import Any

from locust import User

from loadgen.generator.kept_answers import KeptAnswers
from loadgen.records.samples import SampleWriter
from loadgen.transport.bodies import failure_message
from loadgen.transport.exchange import Connection, ConnectionRefused, Exchange
from loadgen.transport.promise import Promise
from loadgen.transport.transports import Sendable, Target, keep_answer
from loadgen.transport.variation import FreshItems

GOOD = -1
_MOST_MESSAGES = 200


class FailedRequestError(Exception):
    """A failed request in Locust's statistics."""


class Traffic:
    """What the users of one block share: the target, the requests and the sample file."""

    def __init__(
        self, target: Target, requests: tuple[Sendable, ...], batch_size: int, writer: SampleWriter,
        *, timeout_s: float = 60.0, others: tuple[Sendable, ...] = (), first_user: int = 0,
        fresh: FreshItems | None = None, promise: Promise | None = None, kept: KeptAnswers | None = None,
    ) -> None:  # fmt: skip
        """`others` are further requests that a user may send. Without `fresh` the same bodies are sent again and again;
        without `promise` every answer with a good status is good."""
        self.target = target
        self.requests = requests
        self.batch_size = batch_size
        self.writer = writer
        self.timeout_s = timeout_s
        self.error_messages: list[str] = []
        self.errors = 0
        self.unmeasured = 0
        """Good answers that were not recorded: those of a cool-down."""
        self.last_end_ns = 0
        self.user_numbers = count(first_user)
        self.kept = kept or KeptAnswers(0, 0)
        self._fresh = fresh
        self._promise = promise
        self._request_numbers = count()
        self._sendable = (*requests, *others)
        self._connections: list[Connection] = []

    def connection(self) -> Connection:
        """A new connection; `close` closes it if its user does not."""
        made = self.target.connection(self._sendable, timeout_s=self.timeout_s)
        self._connections.append(made)
        return made

    def close(self) -> None:
        """Close every connection: an open channel would keep the process alive, an open region its memory."""
        while self._connections:
            self._connections.pop().close()

    def next_request(self) -> tuple[int, int]:
        """Its number and that of its body; all users together send the bodies in turn."""
        number = next(self._request_numbers)
        return number, number % len(self.requests)

    def patches(self, body: int) -> tuple[int, list[bytes]]:
        """The number of the body's first item, and the bytes that make its items new."""
        return (0, []) if self._fresh is None else self._fresh.patches(body)

    def error_index(self, message: str) -> int:
        """The index of `message` among the distinct ones; beyond a limit all count as "other errors"."""
        known = self.error_messages
        if message not in known:
            message = message if len(known) < _MOST_MESSAGES - 1 else "other errors"
            if message not in known:
                known.append(message)
        return known.index(message)

    def fault(self, exchange: Exchange) -> str | None:
        """Why the request failed; None for a good answer."""
        if not exchange.good:
            return failure_message(exchange)
        return None if self._promise is None else self._promise.fault(exchange)

    def record(
        self, exchange: Exchange, fault: str | None, body: int, user: int, intended_ns: int | None = None
    ) -> None:
        """Store the sample. In a closed loop a request is due when it is sent."""
        error = GOOD if fault is None else self.error_index(fault)
        self.errors += fault is not None
        self.last_end_ns = exchange.end_ns
        self.writer.add(
            exchange.send_ns if intended_ns is None else intended_ns, exchange.send_ns, exchange.first_byte_ns,
            exchange.end_ns, exchange.request_bytes,
            exchange.response_bytes, self.batch_size, user, body, exchange.status, error,
        )  # fmt: skip

    def pass_over(self, exchange: Exchange) -> None:
        """Count a good answer of the cool-down, which is not measured."""
        self.unmeasured += 1
        self.last_end_ns = exchange.end_ns

    def record_refused(self, refused: ConnectionRefused, body: int, user: int, intended_ns: int | None = None) -> None:
        """Store a request for which no connection could be made: nothing was sent, and it counts as an error."""
        nothing = Exchange()
        nothing.send_ns = nothing.end_ns = perf_counter_ns()
        self.record(nothing, str(refused), body, user, intended_ns)


class InferenceUser(User):  # type: ignore[misc]  # locust ships no usable types
    """One user with one connection. Subclasses say when `infer` is called."""

    abstract = True
    traffic: Traffic
    fires_events = True
    """Whether Locust's statistics count every request: they do for its web page, not in a measured block."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.number = next(self.traffic.user_numbers)
        self.connection = self.traffic.connection()

    def on_stop(self) -> None:
        self.connection.close()

    def infer(self, intended_ns: int | None = None, *, measured: bool = True) -> bool:
        """Send the next body, due at `intended_ns` in an open loop, and wait for its answer; returns whether it was
        good. If not `measured`, only a failure is recorded.

        Raises `ConnectionRefused`, after recording it, when the server no longer accepts connections.
        """
        traffic = self.traffic
        number, body = traffic.next_request()
        request = traffic.requests[body]
        slot = traffic.kept.slot(number) if measured else None
        first, patches = traffic.patches(body)
        try:
            exchange = self.connection.send(request, patches)
        except ConnectionRefused as refused:
            traffic.record_refused(refused, body, self.number, intended_ns)
            if self.fires_events:
                self._fire(0.0, 0, str(refused))
            raise
        fault = traffic.fault(exchange)
        if not measured and fault is None:
            traffic.pass_over(exchange)
            return True
        traffic.record(exchange, fault, body, self.number, intended_ns)
        if slot is not None and fault is None:
            traffic.kept.keep(slot, number, self.number, body, first, keep_answer(self.connection, exchange))
        if self.fires_events:
            latency_ms = (exchange.end_ns - (intended_ns or exchange.send_ns)) / 1e6
            self._fire(latency_ms, exchange.response_bytes, fault)
        return fault is None

    def _fire(self, latency_ms: float, response_bytes: int, failure: str | None) -> None:
        self.environment.events.request.fire(
            request_type="POST",
            name=f"infer, batch {self.traffic.batch_size}",
            response_time=latency_ms,
            response_length=response_bytes,
            exception=None if failure is None else FailedRequestError(failure),
            context={},
        )
