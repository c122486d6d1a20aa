"""Copies the requests that a relay has passed on to a second server, the candidate, and pairs the answers of both.

The traffic comes first. A copy begins when the whole request has passed, and waits in a queue of bounded size for one
of a bounded number of connections. A copy that finds the queue full is dropped and counted. A candidate that answers so
much that reading it would delay the traffic gets no copies for a while; all that is held for it has a place in
`Observer.holds`.

Copied are requests over HTTP and calls of `ModelInfer`. A `ModelStreamInfer` is not: its answers do not say which
request they belong to.

Both latencies begin when the last piece of a request is passed on, and end with bytes that the same event loop reads.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import Literal, cast

from loadgen.client.connection import Address
from loadgen.client.grpc import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GREETING,
    HEADERS,
    MOST_WINDOW,
    NUMBER,
    PREFIX,
    SERVICE,
    SendLimits,
    frame_head,
    header_block,
)
from loadgen.client.tls import failure_reason
from loadgen.recorder.grpc import GrpcTap
from loadgen.recorder.http import HttpTap
from loadgen.recorder.recorder import BYTES_BESIDE, Observer, PassedRequest
from loadgen.records.run import REQUEST_TIMEOUT_S, Label

MOST_UNDER_WAY = 256
"""Copies without an answer, each on a connection of its own."""
MOST_WAITING = 1024
CONNECT_TIMEOUT_S = 10.0
_WINDOW_NS, _MOST_READING_NS = 100_000_000, 30_000_000
"""The candidate's answers get at most three tenths of the time of a core, counted over a tenth of a second."""
_MOST_MORE_BYTES = 2**24
"""By which an answer of the candidate may be longer than twice the primary's."""
REST_S, REST_UNCONNECTED_S = 1.0, 0.25
"""How long a candidate that answered too much, or refused a connection, gets no copies."""
_READ_BYTES = 2**16
_NOT_COPIED = {
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
"""Headers of one connection; the copy's body is sent in one piece of a known length."""
_COPIED_CALL = f"{SERVICE}ModelInfer"
_LAST_STREAM = 2**31 - 1


@dataclass(slots=True)
class PairedRequest(PassedRequest):
    """A request to the primary, or its copy for the candidate."""

    head: str = ""
    """Over HTTP its first line and its fields, with the client's credentials, as the candidate needs them."""
    other: PairedRequest | None = None
    """The same request on the other server."""
    arm: Label = "a"
    """Whose answer the client gets."""
    is_copy: bool = False
    ended: bool = False
    failure: str | None = None
    """Why a copy has no whole answer."""
    is_dropped: bool = False
    moments: list[int] = field(default_factory=list)
    """When each piece of the answer came."""

    def add_answer(self, piece: bytes, now_ns: int) -> None:
        """A part of the answer has passed."""
        self.moments.append(now_ns)
        PassedRequest.add_answer(self, piece, now_ns)


class ReadingTime:
    """The time that reading answers of copies has taken of late, of all shadows of a process."""

    def __init__(self) -> None:
        self._window_ns = self._reading_ns = 0

    def is_over(self, cpu_ns: int, now_ns: int) -> bool:
        """Add the time of one read. Returns whether it was too much, and begins anew then."""
        if now_ns - self._window_ns > _WINDOW_NS:
            self._window_ns, self._reading_ns = now_ns, 0
        self._reading_ns += cpu_ns
        is_over = self._reading_ns > _MOST_READING_NS
        self._window_ns = 0 if is_over else self._window_ns
        return is_over


class Shadow(Observer):
    """Gives copies of a share of all requests to the candidate, and each pair of answered requests to `paired`."""

    def __init__(
        self, candidate: Address, context: ssl.SSLContext | None, *, share: float = 1.0,
        timeout_s: float = REQUEST_TIMEOUT_S, counts: Counter[str] | None = None, reading: ReadingTime | None = None,
        paired: Callable[[PairedRequest, PairedRequest | None], None], is_grpc: bool = False, arm: Label = "a",
        takes_turns: bool = False,
    ) -> None:  # fmt: skip
        """`paired` gets the request and the copy, and frees the memory of both (`freed_bytes`). All shadows of a run
        share `counts`, which have the names of `ShadowRecord`, and `reading`. `arm` is the server whose answers clients
        get. If it `takes_turns` with the candidate, `paired` also gets requests without a copy, for its latencies are
        those of bursts, too."""
        super().__init__()
        self.counts = Counter[str]() if counts is None else counts
        self.candidate = candidate
        self._context = context
        self._share = share
        self._timeout_s = timeout_s
        self._paired = paired
        self._waiting: deque[PairedRequest] = deque()
        self._connections: set[_CopyConnection] = set()
        self._idle: list[_CopyConnection] = []
        self._connecting: dict[asyncio.Task[None], PairedRequest] = {}
        self._rest_until_ns = 0
        self._has_ended = False
        self._arm, self._takes_turns = arm, takes_turns
        self._reading = reading or ReadingTime()
        self._make_connection = _GrpcCopyConnection if is_grpc else _CopyConnection

    def begin(
        self, transport: Literal["http", "grpc"], route: str, headers: Mapping[str, str], at_ns: int, head: str = ""
    ) -> PassedRequest | None:
        """A request of which the head has come; None if it is not chosen."""
        if self._has_ended or (transport == "grpc" and route != _COPIED_CALL):
            return None
        self.counts["requests"] += 1
        if self._share < 1.0 and random.random() >= self._share:
            return None
        if not self.holds(BYTES_BESIDE):
            self.counts["dropped"] += 1
            return None
        return PairedRequest(
            self, transport, route, dict(headers), at_ns, head=head, held_bytes=BYTES_BESIDE, arm=self._arm
        )

    def forwarded(self, request: PassedRequest) -> None:
        """Copy a request that has passed whole, or drop it."""
        if self._has_ended:
            return
        primary = cast(PairedRequest, request)
        now_ns = request.sent_ns or 0
        if primary.lost or now_ns < self._rest_until_ns or len(self._waiting) >= MOST_WAITING:
            self.counts["dropped"] += 1
            return
        copy = PairedRequest(
            self, primary.transport, primary.route, primary.headers, primary.at_ns, content=primary.content,
            content_bytes=primary.content_bytes, head=primary.head, other=primary, is_copy=True,
        )  # fmt: skip
        primary.other = copy
        self.counts["copied"] += 1
        self._waiting.append(copy)
        self._send_waiting()

    def take(self, request: PassedRequest) -> None:
        """A request has its answer, or has none."""
        ended = cast(PairedRequest, request)
        ended.ended = True
        other = ended.other
        if other is None:
            self._take_alone(ended)
        elif other.ended:
            self._pair(other, ended) if ended.is_copy else self._pair(ended, other)

    def _pair(self, primary: PairedRequest, copy: PairedRequest) -> None:
        if copy.is_dropped or self._has_ended:  # nobody compares pairs any more
            self.counts["copied"] -= 1
            self.counts["dropped"] += not self._has_ended
            self._free(copy)
            self._take_alone(primary)
        elif primary.end_ns is None:
            self.counts["unpaired"] += 1
            self._free(copy)
            self._take_alone(primary)
        else:
            self.counts["failed"] += copy.end_ns is None
            self._paired(primary, copy)

    def _take_alone(self, primary: PairedRequest) -> None:
        """A request without an answer to compare."""
        if self._takes_turns and not self._has_ended and (primary.end_ns is not None or primary.is_cut_off):
            self._paired(primary, None)
        else:
            self._free(primary)

    def _free(self, *requests: PairedRequest) -> None:
        self.taken_bytes -= sum(request.held_bytes for request in requests)

    # The connections to the candidate

    def _send_waiting(self) -> None:
        while self._waiting and len(self._connections) - len(self._idle) + len(self._connecting) < MOST_UNDER_WAY:
            self._send(self._waiting.popleft())

    def _send(self, copy: PairedRequest) -> None:
        if self._idle:
            self._idle.pop().send(copy)
            return
        task = asyncio.get_running_loop().create_task(self._connect(copy))
        self._connecting[task] = copy
        task.add_done_callback(lambda done: self._connecting.pop(done))

    async def _connect(self, copy: PairedRequest) -> None:
        loop, address = asyncio.get_running_loop(), self.candidate
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    partial(self._make_connection, self), address.host, address.port, ssl=self._context
                )
        except OSError as exc:  # also a timeout
            self._rest(REST_UNCONNECTED_S)
            copy.failure = f"no connection: {failure_reason(exc)}"
            copy.end(None, perf_counter_ns())
            return
        self._connections.add(connection)
        connection.send(copy)

    def unneeded(self, connection: _CopyConnection) -> None:
        """A connection is ready for the next copy."""
        self._idle.append(connection)
        self._send_waiting()

    def lost(self, connection: _CopyConnection, again: PairedRequest | None) -> None:
        """A connection is closed; a copy of which the candidate took no notice is sent `again`."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if again is not None:
            self._waiting.appendleft(again)
        self._send_waiting()

    def has_read(self, connection: _CopyConnection, cpu_ns: int, now_ns: int) -> None:
        """Reading a part of an answer took so long. Where that is too much, or the answer is, nobody reads any more for
        a while; only an answer that is too long is a failure of the candidate."""
        copy = connection.copy
        is_endless = (
            copy is not None
            and copy.other is not None
            and copy.answer_bytes > 2 * copy.other.answer_bytes + _MOST_MORE_BYTES
        )
        if is_endless:
            connection.fail("its answer does not end")
        if is_endless or self._reading.is_over(cpu_ns, now_ns):
            self._rest(REST_S)
            for each in [*self._connections]:
                each.drop()

    def _rest(self, seconds: float) -> None:
        self._rest_until_ns = perf_counter_ns() + int(seconds * 1e9)
        waiting, self._waiting = self._waiting, deque()
        for copy in waiting:
            _drop(copy)

    async def watch(self) -> None:
        """End copies that wait too long, until cancelled; then close every connection."""
        try:
            while True:
                await asyncio.sleep(min(1.0, self._timeout_s / 4))
                latest_ns = perf_counter_ns() - int(self._timeout_s * 1e9)
                for connection in [*self._connections]:
                    if connection.copy is not None and (connection.copy.sent_ns or latest_ns) < latest_ns:
                        connection.fail(f"no answer within {self._timeout_s:g} s")
        finally:
            self._has_ended = True
            self._rest(CONNECT_TIMEOUT_S)
            for task, copy in self._connecting.items():
                task.cancel()
                _drop(copy)
            for connection in [*self._connections]:
                connection.drop()


class _CopyConnection(asyncio.BufferedProtocol):
    """One connection to the candidate over HTTP/1.1, with one copy at a time."""

    PROTOCOL = "HTTP/1.1"

    def __init__(self, shadow: Shadow) -> None:
        self.copy: PairedRequest | None = None
        self._shadow = shadow
        self._tap: HttpTap | GrpcTap = self._make_tap()
        self._buffer = bytearray(_READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_used = self._has_received = False

    def _make_tap(self) -> HttpTap | GrpcTap:
        return HttpTap(self._shadow)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 (one size bounds how long a read delays others)
        return self._buffer

    def send(self, copy: PairedRequest) -> None:
        """Send a copy. Its time begins with the last piece, as that of the request to the primary does."""
        self.copy, self._has_received = copy, False
        if self._transport is None or self._transport.is_closing():
            self.connection_lost(None)
            return
        self._begin(copy)

    def _begin(self, copy: PairedRequest) -> None:
        cast(HttpTap, self._tap).expect("POST", copy)
        self._write_last(copy, [_head_of(copy, self._shadow.candidate.authority), *copy.content])

    def _write_last(self, copy: PairedRequest, parts: list[bytes | memoryview]) -> None:
        """Write the parts of a copy, of which the last one ends it."""
        if self._transport is None:
            return
        came_at_once = copy.other is not None and copy.at_ns == copy.other.sent_ns
        if len(parts) > 1 and not came_at_once:
            self._transport.write(b"".join(parts[:-1]))
            del parts[:-1]
        copy.sent_ns = perf_counter_ns()
        self._transport.write(b"".join(parts))

    def _is_over(self) -> bool:
        """Whether the connection takes no other copy."""
        return cast(HttpTap, self._tap).ends_connection

    def buffer_updated(self, nbytes: int) -> None:
        now_ns, began_ns = perf_counter_ns(), thread_time_ns()
        self._has_received = True
        try:
            self._tap.received(bytes(memoryview(self._buffer)[:nbytes]), now_ns)
        except Exception:  # noqa: BLE001 (the candidate may answer anything)
            self.fail(f"it does not answer in {self.PROTOCOL}")
        copy = self.copy
        if copy is not None and copy.ended:
            self.copy, self._is_used = None, True
            if self._is_over():
                self._close()
            elif self._transport is not None:
                self._shadow.unneeded(self)
        self._shadow.has_read(self, thread_time_ns() - began_ns, now_ns)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (the copy failed either way)
        self._transport = None
        copy, self.copy = self.copy, None
        again = None
        if copy is not None and self._is_used and not self._has_received and not copy.ended:
            again = copy  # the candidate closed an idle connection
        elif copy is not None:
            copy.failure = copy.failure or "it closed the connection"
            self._tap.closed(perf_counter_ns())
        self._shadow.lost(self, again)

    def fail(self, why: str) -> None:
        """End the copy without a whole answer, and the connection."""
        copy, self.copy = self.copy, None
        if copy is not None and not copy.ended:
            copy.failure = why
            copy.end(copy.status, perf_counter_ns(), whole=False)
        self._close()

    def drop(self) -> None:
        """Drop the copy, and end the connection."""
        if self.copy is not None:
            self.copy.is_dropped = True
        self.fail("it was dropped")

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._shadow.lost(self, None)


class _GrpcCopyConnection(_CopyConnection):
    """One connection to the candidate over HTTP/2, with one call at a time."""

    PROTOCOL = "gRPC"

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(shadow)
        self._stream = -1
        self._unsent = memoryview(b"")
        self._is_ending = False
        self._limits = SendLimits()
        self._received_bytes = 0

    def _make_tap(self) -> GrpcTap:
        return GrpcTap(self._shadow, self._control)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).write(GREETING)

    def _begin(self, copy: PairedRequest) -> None:
        """Its time begins anew with the last frame, for which the candidate may have no room yet."""
        copy.sent_ns = perf_counter_ns()
        self._stream += 2
        self._limits.open(self._stream)
        prefix = PREFIX.pack("grpc-encoding" in copy.headers, copy.content_bytes)
        self._unsent = memoryview(b"".join([prefix, *copy.content]))
        address = self._shadow.candidate
        fields = copy.headers | {":authority": address.authority, ":scheme": "https" if address.tls else "http"}
        block = header_block((name.encode(), value.encode()) for name, value in fields.items())
        cast(GrpcTap, self._tap).expect(self._stream, copy)
        self._send_unsent([frame_head(HEADERS, END_HEADERS, self._stream, len(block)), block])

    def _send_unsent(self, parts: list[bytes | memoryview]) -> None:
        """Send these parts, and as much of the message as the candidate takes now."""
        limits = self._limits
        while limits.has_settings and self._unsent:
            size = min(limits.window, limits.stream_window, limits.max_frame, len(self._unsent))
            if size <= 0:
                break
            piece, self._unsent = self._unsent[:size], self._unsent[size:]
            limits.window -= size
            limits.stream_window -= size
            flags = 0 if self._unsent else END_STREAM
            parts.append(frame_head(DATA, flags, self._stream, size) + piece)
        if self._transport is None or not parts:
            return
        if self._unsent or self.copy is None:
            self._transport.write(b"".join(parts))
        else:
            self._write_last(self.copy, parts)

    def _control(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        answer = self._limits.take(kind, flags, stream, content)
        if kind == GOAWAY:
            self._is_ending = True
            if self.copy is None or NUMBER.unpack_from(content)[0] & MOST_WINDOW < self._stream:
                self._has_received = False
                if self._transport is not None:
                    self._transport.close()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(answer))
            if self._unsent:
                self._send_unsent([])

    def buffer_updated(self, nbytes: int) -> None:
        self._received_bytes += nbytes
        super().buffer_updated(nbytes)

    def _is_over(self) -> bool:
        """Also if the answer came before the whole request, or the window that the greeting opened is used up."""
        is_used_up = self._received_bytes > MOST_WINDOW // 2 or self._stream > _LAST_STREAM - 2
        return self._is_ending or bool(self._unsent) or is_used_up


def _drop(copy: PairedRequest) -> None:
    if not copy.ended:
        copy.is_dropped = True
        copy.end(None, perf_counter_ns())


def _head_of(copy: PairedRequest, authority: str) -> bytes:
    """The head of an HTTP request for another server."""
    first, *lines = copy.head.lstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ", 2)
    fields = [line for line in lines if line.partition(":")[0].strip().lower() not in _NOT_COPIED]
    head = [f"{method} {target} HTTP/1.1", f"Host: {authority}", f"Content-Length: {copy.content_bytes}", *fields]
    return "\r\n".join([*head, "", ""]).encode("latin-1")
