"""HTTP/1.1 requests from bytes, and responses to bytes, without a socket or an event loop.

`HeadReader` reads a head with httptools and then checks itself where the body ends, because requests are smuggled where
two servers read one stream differently. `RequestParser` finds heads and bodies in a connection's bytes and returns
whole requests. Both raise `HttpError` for what exceeds the limits.

The transport receives a body of known size (`ArrivingBytes`) straight into the slot that the engine reads; only the
bytes that came in one read with the head, at most 64 KiB, are copied once. A slot costs nothing before the bytes
arrive, and each byte is charged when it does. A `ChunkedBody` is copied once, out of its framing. A `DroppedBody`
belongs to a request that is refused already: its bytes are read and dropped, so that the connection can go on.

Every body has `arrived`, the number of bytes so far, and `feed`, which takes the body's bytes of `data[start:end]` and
returns where they end. Pass unconsumed bytes again: with more data if none was consumed, else in the next turn.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
import numpy as np

from servers.native.shared.errors import HOLDS_ENOUGH, HttpError, http_status, unread
from servers.native.shared.keys import KeyLimit, Keys
from servers.native.shared.limits import CONTROL_BODY_BYTES
from servers.native.shared.memory import ArenaSlot, ArrivingBytes, RequestMemory
from servers.native.shared.settings import NativeSettings
from servers.native.shared.traces import trace_headers
from servers.protocol.codec import HEADER_LENGTH
from servers.protocol.errors import ContractError, UnavailableError

MAX_CHUNK_LINE = 256
FREE_CHUNKS = 256
MIN_MEAN_CHUNK_BYTES = 64
"""Chunks beyond the free ones must have this many bytes on average: a chunk costs as much work as some KiB."""
STEPS_PER_FEED = 128
"""A chunk takes two or three steps. The rest is read after the other connections had their turn."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\r\n\x00]*)?\r\n")


class DroppedBody:
    """A body whose bytes are not needed; None: of unknown size."""

    __slots__ = ("_left", "_size", "complete")

    def __init__(self, size: int | None) -> None:
        self._left = self._size = size
        self.complete = size == 0

    @property
    def arrived(self) -> int:
        return 0 if self._size is None or self._left is None else self._size - self._left

    def feed(self, data: bytearray, start: int, end: int) -> int:  # noqa: ARG002  the bytes are dropped
        """Raises `HttpError` for a body of unknown size."""
        if self._left is None:
            raise unread(UnavailableError(HOLDS_ENOUGH))
        taken = min(end - start, self._left)
        self._left -= taken
        self.complete = self._left == 0
        return start + taken


class ChunkedBody:
    """A body in chunks: at most as many bytes as its slot has, in at most `max_chunks`, and trailers, which are
    dropped."""

    __slots__ = ("_chunks", "_left", "_limit", "_max_chunks", "_memory", "_trailers", "arrived", "complete", "slot")

    def __init__(self, slot: ArenaSlot, max_bytes: int, max_chunks: int) -> None:
        """The slot has room for `max_bytes`."""
        self.slot = slot
        self._memory = np.asarray(slot)[:max_bytes].data
        self.complete = False
        self.arrived = 0
        self._limit = max_bytes
        self._max_chunks = max_chunks
        self._chunks = 0
        self._left = 0  # of the current chunk, with the CR LF behind it
        self._trailers = -1  # bytes of them so far; -1 until the last chunk

    @property
    def content(self) -> memoryview:
        return self._memory[: self.arrived]

    def feed(self, data: bytearray, start: int, end: int) -> int:
        """Take up to `STEPS_PER_FEED` pieces of chunks. Raises `HttpError`."""
        view = memoryview(data)
        for _ in range(STEPS_PER_FEED):
            if start == end or self.complete:
                break
            if self._trailers >= 0:
                at = self._trailer(data, start, end)
            elif self._left:
                at = self._chunk(view, start, end)
            else:
                at = self._size_line(data, start, end)
            if at == start:
                break
            start = at
        view.release()
        return start

    def _chunk(self, view: memoryview, start: int, end: int) -> int:
        content = min(end - start, self._left - 2)
        if content > 0:
            self._memory[self.arrived : self.arrived + content] = view[start : start + content]
            self.arrived += content
            self._left -= content
            return start + content
        if end - start < 2:
            return start
        if bytes(view[start : start + 2]) != b"\r\n":
            raise HttpError(400, "a chunk of the body is not as long as it says")
        self._left = 0
        return start + 2

    def _size_line(self, data: bytearray, start: int, end: int) -> int:
        match = _SIZE_LINE.match(data, start, end)
        if match is None:
            if end - start > MAX_CHUNK_LINE or data.find(b"\n", start, end) >= 0:
                raise HttpError(400, "a chunk of the body has no valid size")
            return start
        if match.end() - start > MAX_CHUNK_LINE:
            raise HttpError(400, "a chunk of the body has too long an extension")
        size = int(match[1], 16)
        if size == 0:
            self._trailers = 0
            return match.end()
        self._chunks += 1
        if self._chunks > self._max_chunks:
            raise HttpError(400, f"the body has more than {self._max_chunks} chunks")
        if self._chunks > FREE_CHUNKS and self.arrived < (self._chunks - 1) * MIN_MEAN_CHUNK_BYTES:
            raise HttpError(400, f"the body's chunks have less than {MIN_MEAN_CHUNK_BYTES} bytes on average")
        if self.arrived + size > self._limit:
            raise HttpError(413, f"the body has more than {self._limit} bytes, the server's limit")
        self._left = size + 2
        return match.end()

    def _trailer(self, data: bytearray, start: int, end: int) -> int:
        line = data.find(b"\n", start, end) + 1
        self._trailers += max(0, line - start)
        if self._trailers + (end - start if line == 0 else 0) > 16 * MAX_CHUNK_LINE:
            raise HttpError(400, "the trailers of the body are too long")
        if line == 0:
            return start
        if data[line - 2 : line] != b"\r\n":
            raise HttpError(400, "a trailer of the body does not end with CR LF")
        self.complete = line - start == 2
        return line


HEAD_ENDS = b"\r\n\r\n"
_CARRIAGE_RETURN = 13
_EMPTY = memoryview(b"")
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_FORBIDDEN = b"\r\n\x00"
Headers = list[tuple[bytes, bytes]]
BARE_LINE_FEED = "a line of the request's head does not end with CR LF"
_KEPT_HEADS = 256
_KEPT_HEAD_BYTES = 4096
_JSON_LENGTH = HEADER_LENGTH.lower().encode()
InferTarget = Callable[[str], tuple[str, str | None] | None]
"""Model and version of a path that is inference, None for every other path."""


@dataclass(slots=True)
class RequestHead:
    """One parsed head; shared by all requests with the same bytes, so it must not be changed.

    `length` is the body's size, None for no body or a chunked one; `target` is the model and the version of an
    inference route, None for every other route; `json_length` and `encoding` are the headers' values, unchecked.
    """

    method: bytes
    url: bytes
    path: str
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keep_alive: bool
    length: int | None = None
    chunked: bool = False
    expects_continue: bool = False
    json_length: bytes | None = None
    encoding: str | None = None
    target: tuple[str, str | None] | None = None
    trace_headers: dict[str, str] | None = None
    limit: KeyLimit | None = None
    """Of its key; None: it has none."""

    @property
    def infers(self) -> bool:
        """Whether this is an inference request; other methods on its route are refused."""
        return self.target is not None and self.method == b"POST"

    @property
    def json_bytes(self) -> int:
        """`json_length` if it is a number, else 0: it lays the body out, and is checked later."""
        value = self.json_length
        return int(value) if value is not None and value.isdigit() and len(value) < 19 else 0

    def scope(self, client: object, server: object, scheme: str = "http") -> dict[str, Any]:
        """The scope for an ASGI application; both addresses as the transport has them."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.version,
            "method": self.method.decode("ascii"),
            "scheme": scheme,
            "path": self.path,
            "raw_path": self.url.partition(b"?")[0],
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": client,
            "server": server,
            "state": {},
        }


class _Parsed:
    """Collects the values that httptools passes to its callbacks."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = 0
        self.keep_alive = False
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete += 1
        self.keep_alive = self.parser.should_keep_alive()  # httptools forgets it at the end of the message


class HeadReader:
    """Parses heads within the settings' limits and keeps the latest by their bytes."""

    def __init__(self, settings: NativeSettings, target: InferTarget | None = None) -> None:
        """`target`: `infer_target` unless given."""
        self.settings = settings
        self.keys: Keys | None = None
        """One of which a request needs; None: it needs none."""
        self._target = target or infer_target
        self._kept: dict[bytes, RequestHead] = {}

    def read(self, raw: bytes) -> RequestHead:
        """`raw` ends with the empty line. Raises `HttpError`."""
        head = self._kept.get(raw)
        if head is None:
            head = self._parse(raw)
            if len(raw) <= _KEPT_HEAD_BYTES and head.trace_headers is None:  # whose number never comes again
                if len(self._kept) >= _KEPT_HEADS:  # heads that differ each time must not accumulate
                    self._kept.clear()
                self._kept[raw] = head
        return head

    def forget(self) -> None:
        """Parse heads anew: the keys have changed."""
        self._kept.clear()

    def check_size(self, size: int) -> None:
        """Raises `HttpError` for a head that is too long."""
        if size > self.settings.max_header_bytes:
            raise HttpError(431, f"the request's head has more than {self.settings.max_header_bytes} bytes")

    def _parse(self, raw: bytes) -> RequestHead:
        self.check_size(len(raw))
        lines = raw.count(b"\n")
        if lines - 2 > self.settings.max_headers:
            raise HttpError(431, f"the request has more than {self.settings.max_headers} headers")
        if lines != raw.count(b"\r\n"):
            raise HttpError(400, BARE_LINE_FEED)
        parsed = _Parsed()
        parser = parsed.parser
        try:
            with contextlib.suppress(httptools.HttpParserUpgrade):  # an offer to switch protocols, which is not taken
                parser.feed_data(raw)
            if parsed.complete != 1:
                raise HttpError(400, "the request is not valid HTTP")
            url = httptools.parse_url(parsed.url)
            path = (url.path or b"/").decode("ascii")
        except (httptools.HttpParserError, UnicodeDecodeError) as exc:
            raise HttpError(400, "the request is not valid HTTP") from exc
        path = unquote(path) if "%" in path else path
        limit: KeyLimit | None = None
        if self.keys is not None:
            limit = self.keys.admit_path(path, [value for name, value in parsed.headers if name == b"authorization"])
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HttpError(505, "the server speaks only HTTP/1.1 and HTTP/1.0")
        head = RequestHead(
            method=parser.get_method(),
            url=parsed.url,
            path=path,
            query=url.query or b"",
            version=version,
            headers=parsed.headers,
            keep_alive=parsed.keep_alive,
            limit=limit,
        )
        _frame(head)
        head.target = self._target(head.path)
        head.trace_headers = trace_headers(head.headers)
        return head


def _frame(head: RequestHead) -> None:
    """Set where the body ends, and what is in it. Raises `HttpError`."""
    encodings: list[bytes] = []
    for name, value in head.headers:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or head.length not in (None, int(value)):
                raise HttpError(400, "Content-Length must be one whole number of bytes")
            head.length = int(value)
        elif name == b"transfer-encoding":
            if head.chunked or value.strip().lower() != b"chunked" or head.version == "1.0":
                raise HttpError(400, "the only Transfer-Encoding that the server reads is chunked, in HTTP/1.1")
            head.chunked = True
        elif name == b"expect":
            head.expects_continue = value.strip().lower() == b"100-continue" and head.version == "1.1"
        elif name == b"content-encoding":
            encodings.append(value.strip().lower())
        elif name == _JSON_LENGTH:
            if head.json_length not in (None, value):
                raise HttpError(400, f"{HEADER_LENGTH} is given twice")
            head.json_length = value
    if head.chunked and head.length is not None:
        raise HttpError(400, "Content-Length and Transfer-Encoding cannot be given together")
    if encodings and encodings != [b"identity"]:
        head.encoding = b",".join(encodings).decode("latin-1")


def infer_target(path: str) -> tuple[str, str | None] | None:
    """Model and version of an inference route, None for every other path."""
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return model, None
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return model, version
        case _:
            return None


@dataclass(eq=False, slots=True)
class HttpRequest:
    """A whole request, or one with a `refusal`, whose body was dropped.

    The body's memory counts as held until `release`, and until nothing else refers to it.
    """

    head: RequestHead
    start_ns: int
    """The moment when its head was complete."""
    refusal: ContractError | None
    _body: ArrivingBytes | ChunkedBody | None

    @property
    def body(self) -> memoryview:
        """All bytes of the body, until `release`."""
        return _EMPTY if self._body is None else self._body.content

    def release(self) -> None:
        """Give the memory back, unless the engine still reads it; idempotent."""
        self._body = None


class RequestParser:
    """The parser of one connection. Bytes come through `parse`, those of a large body through `space` and `received`.

    `check` raises `ContractError` for an inference request that is refused whatever its body is. One request at a time:
    the next bytes may come when the last request is released.
    """

    def __init__(
        self,
        heads: HeadReader,
        memory: RequestMemory,
        check: Callable[[RequestHead], None],
    ) -> None:
        self._heads = heads
        self._settings = heads.settings
        self._memory = memory
        self._budget = memory.budget
        self._check = check
        self._body: ArrivingBytes | ChunkedBody | DroppedBody | None = None
        self._body_began = 0.0
        self._refusal: ContractError | None = None
        self._skipped_line = False  # the one empty line that may come before a request
        self.taken: KeyLimit | None = None
        """Where the present request counts, until `leave`."""
        self.head: RequestHead | None = None
        """The head that is arriving or arrived last; None when it could not be read."""
        self.start_ns = 0

    @property
    def in_body(self) -> bool:
        """Whether a head is complete and its body is not."""
        return self._body is not None

    @property
    def body_arrived(self) -> int:
        return 0 if self._body is None else self._body.arrived

    @property
    def starved(self) -> bool:
        """Whether the budget has no room for the next byte of the body."""
        return isinstance(self._body, ArrivingBytes) and self._budget.left <= 0

    def parse(self, data: bytearray, start: int, end: int) -> tuple[int, HttpRequest | RequestHead | None]:
        """Parse the next piece of `data[start:end]`. Returns where it ends (`start`: more is needed), and a request.

        While a body is still missing the head is returned alone. Raises `HttpError`.
        """
        if self._body is None:
            return self._parse_head(data, start, end)
        return self._feed(self._body, data, start, end)

    def space(self) -> memoryview | None:
        """Memory for the transport's next bytes: never more than the body lacks or the budget has room for."""
        body = self._body
        if not isinstance(body, ArrivingBytes):
            return None
        space = body.space
        return body.room[body.arrived : body.arrived + space] if space > 0 else None

    def received(self, count: int) -> HttpRequest | None:
        """`count` bytes have been written to `space`. Returns the request if it is complete."""
        body = self._body
        assert isinstance(body, ArrivingBytes)
        body.received(count)
        return self._completed() if body.complete else None

    def drop_body(self, refusal: ContractError) -> None:
        """Refuse the request whose body is arriving: give its memory back and drop the bytes that still come."""
        assert isinstance(self._body, ArrivingBytes)
        left = self._body.size - self._body.arrived
        self.give_up()
        self._refusal = refusal
        self._body = DroppedBody(left)

    def give_up(self) -> None:
        """Drop the request that is arriving."""
        self._body = None

    def leave(self) -> None:
        """The present request counts for its key no more: its client has the answer, or has left."""
        if self.taken is not None:
            self.taken.leave()
            self.taken = None

    # As a `Receiver`

    @property
    def greedy(self) -> bool:
        """A connection has one body at a time."""
        return False

    def late(self, now: float) -> bool:
        """Whether the body arrives more slowly than it must."""
        return self.body_arrived < (now - self._body_began) * self._settings.min_body_bytes_per_s

    def make_way(self) -> None:
        """Others need the memory of the body that is arriving."""
        if isinstance(self._body, ArrivingBytes):
            self.drop_body(UnavailableError(HOLDS_ENOUGH))
        else:  # its end is not known before it comes, so it is not read
            self._body = DroppedBody(None)

    def _parse_head(self, data: bytearray, start: int, end: int) -> tuple[int, HttpRequest | RequestHead | None]:
        if data.startswith(b"\r\n", start, end):
            if self._skipped_line:
                raise HttpError(400, "more than one empty line comes before the request")
            self._skipped_line = True
            return start + 2, None
        head_end = data.find(HEAD_ENDS, start, end)
        if head_end < 0:
            self.head = None
            if not ord("A") <= data[start] <= ord("Z") and data[start] != _CARRIAGE_RETURN:
                raise HttpError(400, "the request is not valid HTTP")
            self._heads.check_size(end - start)
            if data.count(b"\n", start, end) != data.count(b"\r\n", start, end):
                raise HttpError(400, BARE_LINE_FEED)
            return start, None
        self._skipped_line = False
        head_end += len(HEAD_ENDS)
        self.head = None
        self.head = head = self._heads.read(bytes(data[start:head_end]))
        self.start_ns = time.perf_counter_ns()
        self._body = body = self._choose_body(head)
        if body is None:
            return head_end, self._completed()
        head_end, request = self._feed(body, data, head_end, end)
        if request is None and self._refusal is not None and head.expects_continue:  # its body need not be sent
            raise unread(self._refusal)
        return head_end, request or head

    def _choose_body(self, head: RequestHead) -> ArrivingBytes | ChunkedBody | DroppedBody | None:
        """Choose the body's memory. Raises `HttpError` for a body that is not read at all."""
        size = head.length or 0
        limit = self._settings.max_body_bytes if head.target is not None else CONTROL_BODY_BYTES
        self._refusal = None
        self._body_began = time.monotonic()
        if size > limit:
            raise HttpError(413, f"the body has {size} bytes, the server takes at most {limit}")
        if head.infers:
            try:
                self._check(head)
                if head.limit is not None:
                    head.limit.take()
                    self.taken = head.limit
            except ContractError as error:
                self._refusal = error.with_traceback(None)  # which would keep this parser
        if head.chunked:
            if self._refusal is not None:
                raise unread(self._refusal)
            slot = self._memory.take_for(self, limit)
            if slot is None:
                raise unread(UnavailableError(HOLDS_ENOUGH))
            return ChunkedBody(slot, limit, self._settings.max_chunks)
        if size == 0:
            return None
        if self._refusal is None:
            if size <= self._budget.left:
                try:
                    return ArrivingBytes(self._memory, self, size, head.json_bytes)
                except MemoryError:
                    pass
            self._refusal = UnavailableError(HOLDS_ENOUGH)
        return DroppedBody(size)

    def _feed(
        self, body: ArrivingBytes | ChunkedBody | DroppedBody, data: bytearray, start: int, end: int
    ) -> tuple[int, HttpRequest | None]:
        used = body.feed(data, start, end)
        if isinstance(body, ChunkedBody):
            count = body.arrived - body.slot.charged
            if not self._budget.hold(count):
                raise unread(UnavailableError(HOLDS_ENOUGH))
            body.slot.charged += count
        return used, self._completed() if body.complete else None

    def _completed(self) -> HttpRequest:
        head, body, refusal = self.head, self._body, self._refusal
        assert head is not None
        if isinstance(body, ChunkedBody):
            self._memory.arrived(body.slot)
        self._body = None
        return HttpRequest(head, self.start_ns, refusal, None if isinstance(body, DroppedBody) else body)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One response; `headers` include its Content-Length. The rest of a large body comes in `more` pieces."""

    status: int
    headers: Headers
    body: bytes
    more: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        """The bytes of the whole body."""
        return len(self.body) + sum(map(len, self.more))

    def encode(self, common: bytes, *, with_body: bool = True) -> bytes:
        """The bytes to send before `more`, with the header lines `common`. Line ends inside a header are left out."""
        parts = [STATUS_LINES.get(self.status, b"HTTP/1.1 %d \r\n" % self.status), common]
        for name, value in self.headers:
            # Starlette's redirects and errors may quote the client; a line end in the quote would begin a header.
            parts += [name.translate(None, _FORBIDDEN), b": ", value.translate(None, _FORBIDDEN), b"\r\n"]
        parts.append(b"\r\n")
        if with_body:
            parts.append(self.body)
        return b"".join(parts)


def refusal(error: ContractError | HttpError) -> HttpResponse:
    """The response to a failed request: `{"error": …}` in ASCII, since a message may quote any text of a client."""
    return json_response(http_status(error), json.dumps({"error": str(error)}).encode())


def json_response(status: int, body: bytes) -> HttpResponse:
    """A response with a document; a client that gets 503 or 429 may try again."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status in (429, 503):
        headers.append((b"retry-after", b"1"))
    elif status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return HttpResponse(status, headers, body)
