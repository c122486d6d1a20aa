"""The Locust user that every scenario is made of: it sends prepared bodies and records one sample a request.

The locustfile (`loadgen.scenarios`) and the generator of `abserve compare` run this same code. Importing this module
imports locust, which patches the process with gevent.
"""

from __future__ import annotations

from itertools import count
from time import perf_counter_ns
from typing import Any

from locust import User

from loadgen.clients.bodies import failure_message
from loadgen.clients.exchange import Connection, ConnectionRefused, Exchange
from loadgen.clients.transports import Door, Sendable
from loadgen.records.sample_files import SampleWriter

GOOD = -1
_MOST_MESSAGES = 200


class FailedRequestError(Exception):
    """What Locust's statistics are told about a request that failed."""


class Traffic:
    """What the users of one block share: where they send, what, and where their samples go."""

    def __init__(
        self, door: Door, requests: tuple[Sendable, ...], batch_size: int, writer: SampleWriter,
        *, timeout_s: float = 60.0, others: tuple[Sendable, ...] = (), first_user: int = 0,
    ) -> None:  # fmt: skip
        """`others` are requests that a user may send besides."""
        self.door = door
        self.requests = requests
        self.batch_size = batch_size
        self.writer = writer
        self.timeout_s = timeout_s
        self.error_messages: list[str] = []
        self.errors = 0
        self.last_end_ns = 0
        self.user_numbers = count(first_user)
        self._body_numbers = count()
        self._sendable = (*requests, *others)
        self._connections: list[Connection] = []

    def connection(self) -> Connection:
        """A user's own; closed at the latest by `close`."""
        made = self.door.connection(self._sendable, timeout_s=self.timeout_s)
        self._connections.append(made)
        return made

    def close(self) -> None:
        """Close every connection: an open channel would keep the process from ending, an open region its memory."""
        while self._connections:
            self._connections.pop().close()

    def next_body(self) -> int:
        """The bodies take turns, over all users."""
        return next(self._body_numbers) % len(self.requests)

    def error_index(self, message: str) -> int:
        """Where `message` stands among the distinct ones."""
        if message not in self.error_messages:
            if len(self.error_messages) == _MOST_MESSAGES:
                return self.error_index("other errors") if "other errors" in self.error_messages else _MOST_MESSAGES - 1
            last = len(self.error_messages) == _MOST_MESSAGES - 1
            self.error_messages.append("other errors" if last else message)
            return len(self.error_messages) - 1
        return self.error_messages.index(message)

    def record(self, exchange: Exchange, body: int, user: int, intended_ns: int | None = None) -> bool:
        """Keep the sample; whether the answer was good. In a closed loop a request is due when it is sent."""
        good = exchange.good
        if good:
            error = GOOD
        else:
            error = self.error_index(failure_message(exchange))
            self.errors += 1
        self.last_end_ns = exchange.end_ns
        self.writer.add(
            exchange.send_ns if intended_ns is None else intended_ns, exchange.send_ns, exchange.first_byte_ns,
            exchange.end_ns, exchange.request_bytes,
            exchange.response_bytes, self.batch_size, user, body, exchange.status, error,
        )  # fmt: skip
        return good

    def record_refused(self, refused: ConnectionRefused, body: int, user: int, intended_ns: int | None = None) -> None:
        """A request for which no connection could be made: nothing was sent, and it counts as an error."""
        now = perf_counter_ns()
        self.errors += 1
        self.last_end_ns = now
        self.writer.add(
            now if intended_ns is None else intended_ns,
            now,
            0,
            now,
            0,
            0,
            self.batch_size,
            user,
            body,
            0,
            self.error_index(str(refused)),
        )


class InferenceUser(User):  # type: ignore[misc]  # locust ships no usable types
    """One user with one connection. Subclasses say when `infer` is called."""

    abstract = True
    traffic: Traffic
    fires_events = True
    """Whether Locust's own statistics hear of every request (its web page does, a measured block does not)."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.number = next(self.traffic.user_numbers)
        self.connection = self.traffic.connection()

    def on_stop(self) -> None:
        """Locust calls this when the user ends."""
        self.connection.close()

    def infer(self, intended_ns: int | None = None) -> bool:
        """Send the next body, which in an open loop was due at `intended_ns`, and wait for its answer; whether it was
        good.

        Raises `ConnectionRefused`, after recording it, when the server no longer takes connections.
        """
        traffic = self.traffic
        body = traffic.next_body()
        request = traffic.requests[body]
        try:
            exchange = self.connection.send(request)
        except ConnectionRefused as refused:
            traffic.record_refused(refused, body, self.number, intended_ns)
            if self.fires_events:
                self._fire(0.0, 0, str(refused))
            raise
        good = traffic.record(exchange, body, self.number, intended_ns)
        if self.fires_events:
            latency_ms = (exchange.end_ns - (intended_ns or exchange.send_ns)) / 1e6
            self._fire(latency_ms, exchange.response_bytes, None if good else failure_message(exchange))
        return good

    def _fire(self, latency_ms: float, response_bytes: int, failure: str | None) -> None:
        self.environment.events.request.fire(
            request_type="POST",
            name=f"infer, batch {self.traffic.batch_size}",
            response_time=latency_ms,
            response_length=response_bytes,
            exception=None if failure is None else FailedRequestError(failure),
            context={},
        )
