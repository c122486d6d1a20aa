"""Reads the requests and answers of one HTTP/1.1 connection from the bytes that pass.

Nothing here changes or delays those bytes. What is not HTTP/1.1 raises `ValueError`, and the connection is then passed
on without being recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from loadgen.recorder.recorder import Observer, PassedRequest
from loadgen.records.traffic import MODEL_ROUTE

MOST_HEAD_BYTES = 2**16
Headers = Mapping[str, str]
_UNTIL_THE_END = -1


class _Message:
    """The part of a message that has come: a head, then `left` bytes of a body, of a chunk, or until the end."""

    def __init__(self, body_of: Callable[[str, Headers], int | None]) -> None:
        self._body_of = body_of
        """Gives for a head the length of its body; None: it is chunked."""
        self._buffer = bytearray()
        """An incomplete head or line of a chunk."""
        self._began_ns = 0
        self._left = 0
        self._chunked = self._in_trailers = False
        self._in_body = False

    def read(self, data: bytes, now_ns: int) -> Iterator[tuple[str, Headers, int, str] | bytes | None]:
        """The heads (first line, fields, the time of the first byte, text), the pieces of bodies, and None at the end
        of each message."""
        place = 0
        while place < len(data):
            if self._in_body and self._left:
                piece = data[place:] if self._left < 0 else data[place : place + self._left]
                place += len(piece)
                self._left -= len(piece) if self._left > 0 else 0
                yield piece
                if not self._left and not self._chunked:
                    self._in_body = False
                    yield None
                continue
            if not self._buffer and not self._in_body:
                self._began_ns = now_ns
            end = b"\r\n" if self._in_body else b"\r\n\r\n"
            if not self._buffer and (ends_at := data.find(end, place, place + MOST_HEAD_BYTES)) >= 0:
                text = data[place:ends_at].decode("latin-1")  # without a copy of the body behind it
                place = ends_at + len(end)
                yield from self._line_of_chunk(text) if self._in_body else self._head(text)
                continue
            searched = max(0, len(self._buffer) - len(end) + 1)
            before = len(self._buffer)
            self._buffer += data[place : place + MOST_HEAD_BYTES]
            ends_at = self._buffer.find(end, searched)
            if ends_at < 0:
                if len(self._buffer) > MOST_HEAD_BYTES:
                    raise ValueError("a head is too long")
                place = min(len(data), place + MOST_HEAD_BYTES)
                continue
            text = self._buffer[:ends_at].decode("latin-1")
            place += ends_at + len(end) - before
            self._buffer.clear()
            yield from self._line_of_chunk(text) if self._in_body else self._head(text)

    @property
    def is_between(self) -> bool:
        """Whether no message has begun and not ended."""
        return not (self._buffer or self._in_body)

    @property
    def until_the_end(self) -> bool:
        """Whether the end of the connection is that of the message."""
        return self._in_body and self._left == _UNTIL_THE_END

    def _head(self, text: str) -> Iterator[tuple[str, Headers, int, str] | None]:
        first, *lines = text.lstrip("\r\n").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        yield first, headers, self._began_ns, text
        length = self._body_of(first, headers)
        self._chunked, self._left = length is None, length or 0
        self._in_body = self._chunked or self._left != 0
        if not self._in_body:
            yield None

    def _line_of_chunk(self, text: str) -> Iterator[None]:
        """A size, the empty line after a chunk, or a trailer."""
        if self._in_trailers:
            if not text:
                self._in_body = self._in_trailers = False
                yield None
        elif text:
            self._left = int(text.partition(";")[0], 16)
            self._in_trailers = not self._left


def _length(headers: Headers, otherwise: int) -> int | None:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return None
    return int(headers.get("content-length", otherwise))


class HttpTap:
    """The requests of one connection, each until its answer has passed."""

    def __init__(self, recorder: Observer) -> None:
        self._recorder = recorder
        self._waiting: deque[tuple[str, PassedRequest | None]] = deque()
        """The methods of requests without a whole answer, and what is recorded of them."""
        self._request: PassedRequest | None = None
        self._status = 0
        self.ends_connection = False
        """Whether the server closes the connection after the last answer that has begun."""
        self._requests = _Message(lambda _, headers: _length(headers, 0))
        self._answers = _Message(self._answer_length)

    def sent(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the server."""
        for part in self._requests.read(data, now_ns):
            if isinstance(part, tuple):
                first, headers, began_ns, head = part
                method, target, version = first.split(" ", 2)
                if not version.startswith("HTTP/1."):
                    raise ValueError("it is not HTTP/1.1")
                path = target.partition("?")[0]
                wanted = method == "POST" and MODEL_ROUTE.fullmatch(path) is not None
                self._request = self._recorder.begin("http", path, headers, began_ns, head) if wanted else None
                self.expect(method, self._request)
            elif self._request is not None:
                if part is None:
                    self._request.forwarded(now_ns)
                else:
                    self._request.add_content(part)

    def expect(self, method: str, request: PassedRequest | None) -> None:
        """A request is on its way, whose answer comes after those that are expected already."""
        self._waiting.append((method, request))

    def received(self, data: bytes, now_ns: int) -> None:
        """Bytes on their way to the client."""
        for part in self._answers.read(data, now_ns):
            if not self._waiting:
                raise ValueError("an answer without a request")
            _, request = self._waiting[0]
            if isinstance(part, tuple):
                first, headers, _, _ = part
                if request is not None:
                    request.answer_headers = headers
                self._status = int(first.split(" ", 2)[1])
                self.ends_connection = first[:8] == "HTTP/1.0" or "close" in headers.get("connection", "").lower()
                if self._status == 101:
                    raise ValueError("the connection speaks another protocol from here on")
            elif part is None:
                if self._status >= 200:
                    self._waiting.popleft()
                    if request is not None:
                        request.end(self._status, now_ns)
                continue
            if request is not None and self._status >= 200:
                request.add_answer(part if isinstance(part, bytes) else b"", now_ns)

    @property
    def is_between(self) -> bool:
        """Whether every request has its answer and the next one has not begun."""
        return not self._waiting and self._requests.is_between

    def farewell(self) -> bytes:
        """Nothing: a connection goes over between two requests."""
        return b""

    def lose(self) -> None:
        """Bytes are missing: no request under way can be recorded."""
        for _, request in self._waiting:
            if request is not None:
                request.lost = True

    def closed(self, now_ns: int, *, by_server: bool = False) -> None:
        """The connection has ended, and with it an answer without a length."""
        for _, request in self._waiting:
            if request is not None:
                request.is_cut_off = by_server
                request.end(self._status if request.answered else None, now_ns, whole=self._answers.until_the_end)
        self._waiting.clear()

    def _answer_length(self, first: str, headers: Headers) -> int | None:
        status = int(first.split(" ", 2)[1])
        method = self._waiting[0][0] if self._waiting else ""
        if status < 200 or status in (204, 304) or method == "HEAD":
            return 0
        return _length(headers, _UNTIL_THE_END)
