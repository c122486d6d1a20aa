"""A raw HTTP/1.1 client for prepared bodies: it sends every measured request over HTTP and shared memory.

One connection serves one user at a time. It uses the `socket` module of its process, so it blocks in a plain process
and yields to other users in one that gevent has patched (Locust does).

Cost per request on this side: one `sendmsg` of head and body without joining them, one `recv_into` a reused buffer for
a response that fits, no copy of the body in either direction, no object but the `Exchange`, which is reused too. A
request is never sent twice. Over TLS the `ssl` module copies every byte. The handshake is a part of connecting, which
comes before the measured requests except where the server has closed the connection.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from time import perf_counter_ns
from urllib.parse import quote

from loadgen.base.headers import secret_of
from loadgen.client.connection import (
    MOST_ANSWER_BYTES,
    Address,
    AnySocket,
    Deadline,
    Exchange,
    GreenletSocket,
    PreparedRequest,
    ResponseError,
    assemble,
    find_header,
    open_socket,
    send_parts,
)
from loadgen.client.tls import failure_reason

_UNQUOTED = "/-._~%!$&'()*+,;=:@?"
"""Characters that are not quoted in a path whose names are quoted already."""

_BUFFER_BYTES = 64 * 1024
MALFORMED = "malformed response"
"""How the failure of a request begins whose response is not HTTP/1.1."""
MAX_HEAD_BYTES = 64 * 1024
_MOST_INTERIM = 100
_MOST_TRAILERS = 100
_NO_HEAD = b"\0"
"""The beginning of no response."""
SOON_NS = 1_000_000_000
"""A connection that is closed so soon after a response was not idle for too long: no server's limit for that is below
a second."""
_MOST_DIGITS = 10
"""Most digits of a Content-Length or a chunk size."""


def request_head(
    method: str, path: str, address: Address, *, content_length: int = 0, headers: dict[str, str] | None = None
) -> bytes:
    """The request line and headers, with those of the address. They ask for `identity`, since Triton compresses if it
    may (8.7 → 38 ms)."""
    fields = {"Host": address.authority, "Accept-Encoding": "identity"}
    if content_length or method == "POST":
        fields["Content-Length"] = str(content_length)
    fields |= headers or {}
    fields |= {name: secret_of(value) for name, value in address.access.header.items()}
    lines = [f"{method} {quote(address.base_path + path, safe=_UNQUOTED)} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class HttpConnection:
    """One keep-alive connection; see `ClientConnection`. `timeout_s` bounds connecting and, separately, a whole request
    (see `Deadline`); a response of more than `most_bytes` is a failure."""

    def __init__(self, address: Address, *, timeout_s: float = 60.0, most_bytes: int = MOST_ANSWER_BYTES) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.reconnects = 0
        self._server_closed = False
        """Whether the server has closed the connection with its last response."""
        self._closes_soon = False
        """Whether it closed one soon after a response without saying so, as llama.cpp does after every stream. Then no
        connection is used twice: the next request would be lost if it were sent just before that."""
        self._deadline = Deadline(timeout_s)
        self._most_bytes = most_bytes + MAX_HEAD_BYTES
        self._socket: AnySocket | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._exchange = Exchange()
        self._last_head = _NO_HEAD
        """The head of an earlier response, with its form in lower case, its status and the end of its response: a
        server's answers to requests of a kind mostly begin with the same bytes."""
        self._last_lower, self._last_status, self._last_end = b"", 0, 0

    def connect(self) -> None:
        if self._socket is None:
            self._socket = open_socket(self.address, self.timeout_s)
            self._deadline.reset()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, request: PreparedRequest, patches: Sequence[bytes] = ()) -> Exchange:
        parts = assemble(request.head, request.pieces or ((request.body,) if request.body else ()), patches)
        due_ns = perf_counter_ns()  # before connecting again: a server that closes its connections makes users wait
        if self._socket is not None and self._closed_while_idle(self._socket):
            self._closes_soon = self._closes_soon or due_ns - self._exchange.end_ns < SOON_NS
            self.close()
            self.reconnects += 1
        if self._socket is None:
            self.connect()
            self.reconnects += self._server_closed
        self._server_closed = False
        connection = self._socket
        assert connection is not None
        exchange = self._exchange
        exchange.begin(due_ns, len(request.head) + len(request.body))
        self._deadline.begin(connection, due_ns)
        try:
            sent_whole = True
            try:
                send_parts(connection, parts, self._deadline)
            except (BrokenPipeError, ConnectionResetError):  # a server may respond early and stop reading (413)
                sent_whole = False
            self._receive(connection, exchange)
            exchange.end_ns = perf_counter_ns()
            closes = exchange.head is not self._last_lower and _closes(exchange.head)
            if closes or self._closes_soon or not sent_whole:
                self.close()
            self._server_closed = self._socket is None
        except ResponseError as exc:
            self._fail(exchange, str(exc))
        except TimeoutError:
            self._fail(exchange, self._time_is_up())
        except ConnectionResetError:
            self._fail(exchange, "connection reset by the server")
        except OSError as exc:
            self._fail(exchange, f"connection failed: {failure_reason(exc)}")
        return exchange

    def _time_is_up(self) -> str:
        """The failure of a request that reached a time limit."""
        return f"no complete response within {self.timeout_s:g} s"

    def _fail(self, exchange: Exchange, message: str) -> None:
        exchange.end_ns = perf_counter_ns()
        exchange.status = 0
        exchange.failure = message
        self.close()

    @staticmethod
    def _closed_while_idle(connection: AnySocket) -> bool:
        """Whether the server has closed, or has sent bytes that belong to no request: both make it unusable."""
        if isinstance(connection, GreenletSocket):
            return connection.has_input()
        timeout = connection.gettimeout()
        connection.settimeout(0.0)
        try:
            connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            connection.settimeout(timeout)
        return True

    def _receive(self, connection: AnySocket, exchange: Exchange) -> None:
        filled, head = self._read(connection, exchange, 0), self._last_head
        if filled >= len(head) and self._buffer.startswith(head):
            exchange.head, exchange.status = self._last_lower, self._last_status
            if filled == self._last_end:  # the usual case, in a few steps
                exchange.body, exchange.response_bytes = self._view[len(head) : filled], filled
            else:
                self._receive_counted(connection, exchange, len(head), filled, self._last_end)
            return
        filled, head_end = self._receive_head(connection, exchange, filled)
        for _ in range(_MOST_INTERIM):
            head = bytes(self._view[:head_end]).lower()
            code = head[9:12]
            if not head.startswith(b"http/1.") or not code.isdigit():
                raise ResponseError(f"{MALFORMED}: not HTTP/1.1")
            status = int(code)
            if status >= 200:
                break
            remaining = filled - head_end  # the final response follows
            self._view[:remaining] = bytes(self._view[head_end:filled])
            filled, head_end = self._receive_head(connection, exchange, remaining)
        else:
            raise ResponseError(f"{MALFORMED}: more than 100 interim responses")
        exchange.head = head if status < 300 else _with_location(head, bytes(self._view[:head_end]))
        if status in (204, 304):
            exchange.body = self._view[:0]
            exchange.response_bytes = head_end
        elif (coding := find_header(head, b"\r\ntransfer-encoding:")) is not None:
            if coding != b"chunked":
                raise ResponseError(f"{MALFORMED}: unknown transfer encoding")
            self._receive_chunked(connection, exchange, head_end, filled)
        elif (length := find_header(head, b"\r\ncontent-length:")) is not None:
            if not length.isdigit() or len(length) > _MOST_DIGITS:
                raise ResponseError(f"{MALFORMED}: impossible Content-Length")
            end = head_end + int(length)
            if not _closes(head):
                self._last_head, self._last_lower = bytes(self._view[:head_end]), head
                self._last_status, self._last_end = status, end
            self._receive_counted(connection, exchange, head_end, filled, end)
        else:
            self._receive_until_closed(connection, exchange, head_end, filled)
        exchange.status = status

    def _receive_counted(self, connection: AnySocket, exchange: Exchange, start: int, filled: int, end: int) -> None:
        """The rest of a response whose body begins at `start`, up to `end`; `filled` bytes are there."""
        self._bound(end)
        while filled < end:
            filled += self._read(connection, exchange, filled)
        if filled > end:
            raise ResponseError(f"{MALFORMED}: longer than its Content-Length")
        exchange.body = self._view[start:end]
        exchange.response_bytes = end

    def _receive_head(self, connection: AnySocket, exchange: Exchange, filled: int) -> tuple[int, int]:
        """Bytes in the buffer and the end of the head among them."""
        searched = 0
        while True:
            end = self._buffer.find(b"\r\n\r\n", searched, filled)
            if end >= 0:
                return filled, end + 4
            if filled >= MAX_HEAD_BYTES:
                raise ResponseError(f"{MALFORMED}: more than {MAX_HEAD_BYTES} bytes of headers")
            searched = max(0, filled - 3)
            filled += self._read(connection, exchange, filled)

    def _receive_until_closed(self, connection: AnySocket, exchange: Exchange, start: int, filled: int) -> None:
        while count := self._read_some(connection, exchange, filled):
            filled += count
        exchange.body = self._view[start:filled]
        exchange.response_bytes = filled
        self.close()

    def _receive_line(
        self, connection: AnySocket, exchange: Exchange, start: int, filled: int
    ) -> tuple[bytes, int, int]:
        """The line that begins at `start`, where the next one begins, and how many bytes there are now."""
        while (end := self._buffer.find(b"\r\n", start, filled)) < 0:
            if filled - start > MAX_HEAD_BYTES:
                raise ResponseError(f"{MALFORMED}: more than {MAX_HEAD_BYTES} bytes before a chunk")
            filled += self._read(connection, exchange, filled)
        return bytes(self._view[start:end]), end + 2, filled

    def _receive_chunked(
        self, connection: AnySocket, exchange: Exchange, start: int, filled: int, *, decode: bool = True
    ) -> None:
        """Decodes chunks in place: the payload of every chunk moves to the end of the body so far. If not `decode`, it
        only finds the end."""
        body_end = cursor = start
        while True:
            line, cursor, filled = self._receive_line(connection, exchange, cursor, filled)
            if not (size := chunk_size(line)):
                break
            following = cursor + size + 2
            self._bound(following)
            while filled < following:
                filled += self._read(connection, exchange, filled)
            if decode:
                self._buffer[body_end : body_end + size] = self._buffer[cursor : cursor + size]
                body_end += size
            cursor = following
        for _ in range(_MOST_TRAILERS):
            line, cursor, filled = self._receive_line(connection, exchange, cursor, filled)
            if not line:
                break
        else:
            raise ResponseError(f"{MALFORMED}: more than 100 trailers")
        exchange.body = self._view[start:body_end]
        exchange.response_bytes = cursor

    def _read(self, connection: AnySocket, exchange: Exchange, filled: int) -> int:
        count = self._read_some(connection, exchange, filled)
        if count == 0:
            moment = "in the middle of a response" if filled else "without a response"
            raise ResponseError(f"connection closed by the server {moment}")
        return count

    def _read_some(self, connection: AnySocket, exchange: Exchange, filled: int) -> int:
        """Read what there is behind the `filled` bytes; 0 at the end of the stream."""
        if filled == len(self._buffer):
            self._grow(filled)
        count = connection.recv_into(self._view[filled:] if filled else self._view)
        if exchange.first_byte_ns == 0:
            exchange.first_byte_ns = perf_counter_ns() if count else 0
        self._deadline.check(connection)
        return count

    def _bound(self, needed: int) -> None:
        if needed > self._most_bytes:
            raise ResponseError(f"the response is larger than the limit of {self._most_bytes - MAX_HEAD_BYTES:,} bytes")

    def _grow(self, filled: int) -> None:
        """Double the buffer as bytes arrive, never to a size that the server only announced."""
        self._bound(filled + 1)
        grown = bytearray(min(2 * filled, self._most_bytes))
        grown[:filled] = self._view[:filled]
        self._buffer = grown
        self._view = memoryview(grown)


def chunk_size(line: bytes) -> int:
    """The size that the line before a chunk gives. Raises `ResponseError`."""
    text = line if line.isalnum() else line.partition(b";")[0].strip()
    try:
        size = int(text, 16)
    except ValueError:
        raise ResponseError(f"{MALFORMED}: a chunk without a size") from None
    if size < 0 or len(text) > _MOST_DIGITS:
        raise ResponseError(f"{MALFORMED}: impossible chunk size")
    return size


def _with_location(head: bytes, received: bytes) -> bytes:
    """A head in lower case with the target of a redirect as it was received."""
    start = head.find(b"\r\nlocation:")
    if start < 0:
        return head
    end = head.index(b"\r\n", start + 2)
    return head[:start] + b"\r\nlocation:" + received[start + len(b"\r\nlocation:") : end] + head[end:]


def _closes(head: bytes) -> bool:
    connection = find_header(head, b"\r\nconnection:")
    return connection == b"close" or (head.startswith(b"http/1.0") and connection != b"keep-alive")
