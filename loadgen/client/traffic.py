"""What the users of one block share: its requests and sample file, the rule that ends it, and the answers kept from it.

The generator of `abserve compare` and the locustfile (`loadgen.locust`) both send their requests with `Traffic`.

`LoadWindow` decides when the block ends; callers pass the time, so tests need no clock. In a closed loop whose users
stop one by one the last requests run at less than the intended load, and the users with slow requests finish last. So
when a block has enough requests, its users keep sending until every counted request is answered: the cool-down, whose
requests keep the load up and are not measured. Several load processes share the counts of a block, so that one rule
ends it for all of them: a process whose own requests are answered goes on while another one's are not.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from time import perf_counter_ns
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from loadgen.base.documents import one_line
from loadgen.client.connection import ClientConnection, ConnectionRefused, Exchange, failure_message
from loadgen.client.inputs import Array, byte_array
from loadgen.client.messages import KeptAnswer, KeptTensor
from loadgen.client.outputs import AnswerError, ExpectedOutputs
from loadgen.client.transports import InferenceTarget, Request, keep_answer
from loadgen.records.samples import SampleWriter, error_index

FAILURES_IN_A_ROW = 100
COOL_DOWN_SHARE = 1.0
"""The longest cool-down, as a share of the time before it. Requests that are still running then end at a falling
load."""


Counts = memoryview | list[int]
"""The counts of one block: first the moment since which it has enough, 0 until then; then a row per process, which only
that process writes. A row fills a cache line of its own, so that writing it does not slow the other processes down."""
_CLAIMED, _UNDER_WAY, _LATE, _ROW = 0, 1, 2, 8

MOST_ROWS = 1
"""Items of one answer that are compared; all of them are searched for NaN and infinity."""
_MOST_BYTES = 4 * 2**20
"""Limit of a block's kept outputs; the first answer is kept whatever its size."""

GOOD = -1


Claim = Literal["counted", "cool-down"]
"""Whether a request of a closed loop is measured."""


def counts_bytes(processes: int) -> int:
    """Size of the memory for the counts of a block."""
    return 8 * _ROW * (1 + processes)


def shared_counts(descriptor: int) -> Counts:
    """The counts in a memory that several processes map; zero the memory before each block. Raises `OSError`."""
    return memoryview(mmap.mmap(descriptor, 0)).cast("q")


class LoadWindow:
    """Lets users send until the block has enough: `requests` requests and `seconds`, at most `max_seconds`.

    It is cut short by `cut`, by FAILURES_IN_A_ROW failures without a good answer between them, and with a latency bound
    as soon as more requests than allowed were late or failed. Requests, late ones included, are those of all processes
    that share `counts`, of which this is number `part`; failures in a row are those of this process.
    """

    def __init__(
        self,
        requests: int,
        seconds: float,
        max_seconds: float,
        *,
        latency_bound_ns: int | None = None,
        late_allowed: int = 0,
        counts: Counts | None = None,
        part: int = 0,
    ) -> None:
        self.claimed = 0
        self.late = 0
        """Requests that failed or took longer than the bound; 0 without one."""
        self.cut_reason: str | None = None
        self._under_way = 0
        """Counted requests without an answer so far."""
        self._counts: Counts = [0] * (2 * _ROW) if counts is None else counts
        self._row = _ROW * (1 + part)
        self._requests = requests
        self._enough_ns = int(seconds * 1e9)
        self._most_ns = int(max_seconds * 1e9)
        self._start_ns = 0
        self._failures = 0
        self._bound_ns = latency_bound_ns
        self._late_allowed = late_allowed

    def start(self, now_ns: int) -> None:
        self._start_ns = now_ns

    def claim(self, now_ns: int) -> Claim | None:
        """The purpose of the caller's next request; None when it must send no more."""
        if self.cut_reason is not None:
            return None
        counts, row = self._counts, self._row
        enough_since_ns = counts[0]
        if not enough_since_ns:
            elapsed_ns = now_ns - self._start_ns
            enough = elapsed_ns >= self._enough_ns and self._total(_CLAIMED) >= self._requests
            if not enough and elapsed_ns < self._most_ns:
                self.claimed += 1
                self._under_way += 1
                counts[row + _CLAIMED] = self.claimed
                counts[row + _UNDER_WAY] = self._under_way
                return "counted"
            counts[0] = enough_since_ns = now_ns
        until_ns = enough_since_ns + int(COOL_DOWN_SHARE * (enough_since_ns - self._start_ns))
        return "cool-down" if now_ns < until_ns and self._total(_UNDER_WAY) > 0 else None

    def _total(self, column: int) -> int:
        """The sum over all processes."""
        return sum(self._counts[_ROW + column :: _ROW])

    def answered(self, good: bool, latency_ns: int = 0, claim: Claim | None = None) -> None:
        """Report the end of a request: good or failed, its latency from the intended start, and its claim."""
        if claim == "counted":
            self._under_way -= 1
            self._counts[self._row + _UNDER_WAY] = self._under_way
        if self._bound_ns is not None and (not good or latency_ns > self._bound_ns):
            self.late += 1
            self._counts[self._row + _LATE] = self.late
            if self._total(_LATE) > self._late_allowed:
                self.cut(f"more than {self._late_allowed} requests were late")
        if good:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self.cut(f"{FAILURES_IN_A_ROW} requests in a row failed")

    def cut(self, reason: str) -> None:
        """End the window early; the first reason stays."""
        self.cut_reason = self.cut_reason or reason


class SentRequest(NamedTuple):
    """What a request was, besides its outcome."""

    number: int
    """Number of requests that were sent before."""
    slot: int | None
    """Where its answer is kept, if it is."""
    first: int
    """The number of its first item."""
    body: int
    user: int
    intended_ns: int | None
    measured: bool


ReadAnswer = Callable[[], Mapping[str, Array]]
"""Decodes the outputs of an answer."""


class KeptAnswers:
    """At most `most` answers of a block; each request has the same chance, however many there will be.

    Reservoir sampling by skips (Li, ACM TOMS 20, 1994, algorithm L). The seed alone decides which answers are kept, so
    a server cannot recognise their requests.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._random = Random(seed)
        self._slots: list[tuple[SentRequest, ReadAnswer] | None] = [None] * most
        self._following = 0 if most else -1
        self._weight = 1.0

    def slot(self, request: int) -> int | None:
        """The slot for the answer to this request, None to drop it; called once per request, in ascending order."""
        if request != self._following:
            return None
        most = len(self._slots)
        if request + 1 < most:
            self._following += 1
            return request
        self._weight *= self._uniform() ** (1.0 / most)
        self._following += 1 + int(math.log(self._uniform()) / math.log1p(-self._weight))
        return request if request < most else self._random.randrange(most)

    def keep(self, slot: int, sent: SentRequest, read: ReadAnswer) -> None:
        """Keep an answer, unless the slot holds that of a later request."""
        before = self._slots[slot]
        if before is None or before[0].number < sent.number:
            self._slots[slot] = sent, read

    def read(self) -> tuple[KeptAnswer, ...]:
        """Decode the kept answers, with the rows that are compared."""
        answers: list[KeptAnswer] = []
        left = _MOST_BYTES
        for kept in filter(None, self._slots):
            answer = self._decode(*kept)
            left -= sum(len(tensor.data) for tensor in answer.outputs)
            if left < 0 and answers:
                break
            answers.append(answer)
        return tuple(answers)

    def _decode(self, sent: SentRequest, read: ReadAnswer) -> KeptAnswer:
        outputs: list[KeptTensor] = []
        rows: list[int] = []
        error: str | None = None
        try:
            answer = read()
            count = min((len(array) for array in answer.values()), default=0)
            rows = sorted(self._random.sample(range(count), min(count, MOST_ROWS)))
            for name, array in answer.items():
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    error = f"output {name} holds NaN or infinite values"
                outputs.append(packed(name, array[rows]))
        except AnswerError as exc:
            error = str(exc)
        except Exception as exc:  # noqa: BLE001 (as an output without dimensions: one answer costs itself only)
            error = f"the answer cannot be read: {one_line(repr(exc))}"
        return KeptAnswer(
            request=sent.number, user=sent.user, body=sent.body, first=sent.first, rows=tuple(rows),
            outputs=tuple(outputs), error=error,
        )  # fmt: skip

    def _uniform(self) -> float:
        return 1.0 - self._random.random()  # never 0


def packed(name: str, array: Array) -> KeptTensor:
    if array.dtype.hasobject:
        data = msgspec.msgpack.encode([bytes(value) for value in array.ravel().tolist()])
        return KeptTensor(name=name, dtype="O", shape=array.shape, data=data)
    return KeptTensor(name=name, dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def unpacked(tensor: KeptTensor) -> Array:
    if tensor.dtype == "O":
        return byte_array(msgspec.msgpack.decode(tensor.data, type=list[bytes])).reshape(tensor.shape)
    return np.frombuffer(tensor.data, np.dtype(tensor.dtype)).reshape(tensor.shape)


class Bodies(Protocol):
    """Prepared requests, and what makes each of them new."""

    @property
    def requests(self) -> Sequence[Request]: ...

    def patches(self, body: int, /) -> tuple[int, Sequence[bytes]]:
        """The number of the request's first item, and the bytes at the places that vary."""


class Traffic:
    """The target, the requests and the sample file that the users of one block share."""

    def __init__(
        self, target: InferenceTarget, bodies: Bodies, batch_size: int, writer: SampleWriter,
        *, timeout_s: float = 60.0, others: tuple[Request, ...] = (), expected: ExpectedOutputs | None = None,
        answers: KeptAnswers | None = None, first_body: int = 0, body_step: int = 1, sizes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """`others` are further requests that a user may send. Without `expected` every answer with a good status is
        good, also in JSON. `sizes` are the items in each request where not all have `batch_size`."""
        self.target = target
        made = {id(body): target.sendable(body) for body in bodies.requests}  # a replay has one body in many places
        self.requests = tuple(made[id(body)] for body in bodies.requests)
        self.batch_size = batch_size
        self._sizes = sizes or (batch_size,) * len(self.requests)
        self.writer = writer
        self.timeout_s = timeout_s
        self.error_messages: list[str] = []
        self.errors = 0
        self.unmeasured = 0
        """Good answers that were not recorded: those of a cool-down."""
        self.unmeasured_ns = 0
        """Sum of their latencies."""
        self.unmeasured_tokens = 0
        """Tokens in them, of a language model."""
        self.last_end_ns = 0
        self.user_numbers = count()
        """Numbers users whose caller does not."""
        self.answers = answers or KeptAnswers(0, 0)
        self._bodies = bodies
        self._expected = expected
        self._first_body, self._body_step = first_body, body_step
        self._request_numbers = count()
        self._sendable = (*self.requests, *others)
        self._memory = target.memory(self._sendable)
        self._connections: list[ClientConnection] = []

    def connection(self) -> ClientConnection:
        """A new connection; `close` closes it if its user does not."""
        connection = self.target.connection(self._sendable, timeout_s=self.timeout_s, memory=self._memory)
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        """Close every connection: an open channel would keep the process alive, an open region its memory."""
        while self._connections:
            self._connections.pop().close()

    def infer(
        self, connection: ClientConnection, user: int, intended_ns: int | None = None, *, measured: bool = True
    ) -> tuple[Exchange, str | None]:
        """Send the next body, due at `intended_ns` in an open loop, and wait for its answer; returns it with the reason
        when it failed. Together the users send the bodies in turn. If not `measured`, only a failure is recorded.

        Whatever else is raised while one answer is read, judged or kept is that request's failure. Raises
        `ConnectionRefused`, after recording it, when the server no longer accepts connections, and `OSError` when the
        sample cannot be stored.
        """
        number = next(self._request_numbers)
        body = (self._first_body + number * self._body_step) % len(self.requests)
        slot = self.answers.slot(number) if measured else None
        first, patches = self._bodies.patches(body)
        sent = SentRequest(number, slot, first, body, user, intended_ns, measured)
        try:
            exchange = connection.send(self.requests[body], patches)
        except ConnectionRefused as refused:
            self._take(connection, _without_answer(str(refused)), sent)
            raise
        except Exception as exc:  # noqa: BLE001 (see above)
            connection.close()  # what is left of the answer belongs to no request
            exchange = _without_answer(f"the client could not read the answer: {one_line(repr(exc))}")
        return exchange, self._take(connection, exchange, sent)

    def settling_fault(self, _connection: ClientConnection, exchange: Exchange) -> str | None:
        """Why the small request before a block failed; None if its answer is good."""
        return None if exchange.good else failure_message(exchange)

    def finish(self) -> None:
        """Call it after the last answer, when time no longer matters. May raise `OSError` (disk full)."""

    def _take(self, connection: ClientConnection, exchange: Exchange, sent: SentRequest) -> str | None:
        """Judge and record an answer; returns why it failed."""
        fault = self._fault(exchange)
        if sent.measured or fault is not None:
            self._record(exchange, fault, sent)
        else:
            self.unmeasured += 1
            self.unmeasured_ns += exchange.end_ns - exchange.send_ns
            self.last_end_ns = exchange.end_ns
        if sent.slot is not None and fault is None:
            self.answers.keep(sent.slot, sent, self._kept_answer(connection, exchange))
        return fault

    def _fault(self, exchange: Exchange) -> str | None:
        try:
            if not exchange.good:
                return failure_message(exchange)
            return None if self._expected is None else self._expected.fault(exchange)
        except Exception as exc:  # noqa: BLE001 (one answer costs itself only)
            return f"the client could not judge the answer: {one_line(repr(exc))}"

    def _kept_answer(self, connection: ClientConnection, exchange: Exchange) -> ReadAnswer:
        """The function that reads the answer later; it raises what copying the answer raised."""
        try:
            return keep_answer(connection, exchange, batched=self.target.batched, binary=self._expected is not None)
        except Exception as exc:  # noqa: BLE001 (one answer costs itself only)
            fault = AnswerError(f"the answer could not be kept: {one_line(repr(exc))}")

        def fail() -> Mapping[str, Array]:
            raise fault

        return fail

    def _record(self, exchange: Exchange, fault: str | None, sent: SentRequest) -> None:
        """Store the sample. In a closed loop a request is due when it is sent."""
        error = GOOD if fault is None else error_index(self.error_messages, fault)
        self.errors += fault is not None
        self.last_end_ns = exchange.end_ns
        self.writer.add(
            exchange.send_ns if sent.intended_ns is None else sent.intended_ns, exchange.send_ns,
            exchange.first_byte_ns, exchange.end_ns, exchange.request_bytes, exchange.response_bytes,
            self._sizes[sent.body], sent.user, sent.body, exchange.status, error,
        )  # fmt: skip


def _without_answer(failure: str) -> Exchange:
    """The outcome of a request that has none."""
    exchange = Exchange()
    exchange.send_ns = exchange.end_ns = perf_counter_ns()
    exchange.failure = failure
    return exchange
