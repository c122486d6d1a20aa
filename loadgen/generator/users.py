"""The code that all users of a load share: they send prepared bodies and record one sample per request.

The generator of `abserve compare` and the locustfile (`loadgen.scenarios`) both send their requests with it.
"""

from __future__ import annotations

from itertools import count
from time import perf_counter_ns

from loadgen.client.bodies import failure_message
from loadgen.client.exchange import Connection, ConnectionRefused, Exchange
from loadgen.client.expected_outputs import ExpectedOutputs
from loadgen.client.transports import Sendable, Target, keep_answer
from loadgen.client.variation import FreshItems
from loadgen.generator.kept_answers import KeptAnswers
from loadgen.records.samples import SampleWriter

GOOD = -1
_MOST_MESSAGES = 200


class Traffic:
    """The target, the requests and the sample file that the users of one block share."""

    def __init__(
        self, target: Target, requests: tuple[Sendable, ...], batch_size: int, writer: SampleWriter,
        *, timeout_s: float = 60.0, others: tuple[Sendable, ...] = (), fresh: FreshItems | None = None,
        expected: ExpectedOutputs | None = None, kept: KeptAnswers | None = None, first_body: int = 0,
    ) -> None:  # fmt: skip
        """`others` are further requests that a user may send. Without `fresh` the same bodies are sent again and again;
        without `expected` every answer with a good status is good."""
        self.target = target
        self.requests = requests
        self.batch_size = batch_size
        self.writer = writer
        self.timeout_s = timeout_s
        self.error_messages: list[str] = []
        self.errors = 0
        self.unmeasured = 0
        """Good answers that were not recorded: those of a cool-down."""
        self.unmeasured_ns = 0
        """Sum of their latencies."""
        self.last_end_ns = 0
        self.user_numbers = count()
        """Numbers users whose caller does not."""
        self.kept = kept or KeptAnswers(0, 0)
        self._fresh = fresh
        self._expected = expected
        self._first_body = first_body
        self._request_numbers = count()
        self._sendable = (*requests, *others)
        self._memory = target.memory(self._sendable)
        self._connections: list[Connection] = []

    def connection(self) -> Connection:
        """A new connection; `close` closes it if its user does not."""
        made = self.target.connection(self._sendable, timeout_s=self.timeout_s, memory=self._memory)
        self._connections.append(made)
        return made

    def close(self) -> None:
        """Close every connection: an open channel would keep the process alive, an open region its memory."""
        while self._connections:
            self._connections.pop().close()

    def infer(
        self, connection: Connection, user: int, intended_ns: int | None = None, *, measured: bool = True
    ) -> tuple[Exchange, str | None]:
        """Send the next body, due at `intended_ns` in an open loop, and wait for its answer; returns it with the reason
        when it failed. Together the users send the bodies in turn. If not `measured`, only a failure is recorded.

        Raises `ConnectionRefused`, after recording it, when the server no longer accepts connections.
        """
        number = next(self._request_numbers)
        body = (self._first_body + number) % len(self.requests)
        slot = self.kept.slot(number) if measured else None
        first, patches = (0, ()) if self._fresh is None else self._fresh.patches(body)
        try:
            exchange = connection.send(self.requests[body], patches)
        except ConnectionRefused as refused:
            nothing = Exchange()
            nothing.send_ns = nothing.end_ns = perf_counter_ns()
            self._record(nothing, str(refused), body, user, intended_ns)
            raise
        fault: str | None = None
        if not exchange.good:
            fault = failure_message(exchange)
        elif self._expected is not None:
            fault = self._expected.fault(exchange)
        if measured or fault is not None:
            self._record(exchange, fault, body, user, intended_ns)
        else:
            self.unmeasured += 1
            self.unmeasured_ns += exchange.end_ns - exchange.send_ns
            self.last_end_ns = exchange.end_ns
        if slot is not None and fault is None:
            self.kept.keep(
                slot, number, user, body, first, keep_answer(connection, exchange, batched=self.target.batched)
            )
        return exchange, fault

    def _record(self, exchange: Exchange, fault: str | None, body: int, user: int, intended_ns: int | None) -> None:
        """Store the sample. In a closed loop a request is due when it is sent."""
        error = GOOD if fault is None else self._error_index(fault)
        self.errors += fault is not None
        self.last_end_ns = exchange.end_ns
        self.writer.add(
            exchange.send_ns if intended_ns is None else intended_ns, exchange.send_ns, exchange.first_byte_ns,
            exchange.end_ns, exchange.request_bytes,
            exchange.response_bytes, self.batch_size, user, body, exchange.status, error,
        )  # fmt: skip

    def _error_index(self, message: str) -> int:
        """The index of `message` among the distinct ones; beyond a limit all count as "other errors"."""
        known = self.error_messages
        if message not in known:
            message = message if len(known) < _MOST_MESSAGES - 1 else "other errors"
            if message not in known:
                known.append(message)
        return known.index(message)
