"""HTTP/1.1 requests from bytes: no socket and no event loop.

`HeadReader` reads a head with httptools and then checks itself where the body ends, because requests are smuggled where
two servers read one stream differently. `RequestParser` finds heads and bodies in a connection's bytes and returns
whole requests. Both raise `HttpError` for what exceeds the limits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools

from servers.native.arena import RequestMemory
from servers.native.errors import HOLDS_ENOUGH, HttpError, unread
from servers.native.http_body import ChunkedBody, DroppedBody, FixedBody
from servers.native.limits import CONTROL_BODY_BYTES
from servers.native.settings import NativeSettings
from servers.protocol.codec import HEADER_LENGTH
from servers.protocol.errors import ContractError, UnavailableError

HEAD_ENDS = b"\r\n\r\n"
_CARRIAGE_RETURN = 13
_EMPTY = memoryview(b"")
BARE_LINE_FEED = "a line of the request's head does not end with CR LF"
_KEPT_HEADS = 256
_KEPT_HEAD_BYTES = 4096
_JSON_LENGTH = HEADER_LENGTH.lower().encode()


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

    @property
    def infers(self) -> bool:
        """Whether this is an inference request; other methods on its route are refused."""
        return self.target is not None and self.method == b"POST"

    @property
    def json_bytes(self) -> int:
        """`json_length` if it is a number, else 0: it lays the body out, and is checked later."""
        value = self.json_length
        return int(value) if value is not None and value.isdigit() and len(value) < 19 else 0

    def scope(self, client: object, server: object) -> dict[str, Any]:
        """The scope for an ASGI application; both addresses as the transport has them."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.version,
            "method": self.method.decode("ascii"),
            "scheme": "http",
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

    def __init__(self, settings: NativeSettings) -> None:
        self.settings = settings
        self._kept: dict[bytes, RequestHead] = {}

    def read(self, raw: bytes) -> RequestHead:
        """`raw` ends with the empty line. Raises `HttpError`."""
        head = self._kept.get(raw)
        if head is None:
            head = self._parse(raw)
            if len(raw) <= _KEPT_HEAD_BYTES:
                if len(self._kept) >= _KEPT_HEADS:  # heads that differ each time must not accumulate
                    self._kept.clear()
                self._kept[raw] = head
        return head

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
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HttpError(505, "the server speaks only HTTP/1.1 and HTTP/1.0")
        head = RequestHead(
            method=parser.get_method(),
            url=parsed.url,
            path=unquote(path) if "%" in path else path,
            query=url.query or b"",
            version=version,
            headers=parsed.headers,
            keep_alive=parsed.keep_alive,
        )
        _frame(head)
        head.target = infer_target(head.path)
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
class Request:
    """A whole request, or one with a `refusal`, whose body was dropped.

    The body's memory counts as held until `release`, and until nothing else refers to it.
    """

    head: RequestHead
    start_ns: int
    """The moment when its head was complete."""
    refusal: ContractError | None
    _body: FixedBody | ChunkedBody | None

    @property
    def body(self) -> memoryview:
        """All bytes of the body, until `release`."""
        return _EMPTY if self._body is None else self._body.view

    def release(self) -> None:
        """Give the memory back, unless the engine still reads it; idempotent."""
        self._body = None


class LostBody:
    """A chunked body whose memory was needed by others. Its end is not known before it comes, so it is not read."""

    arrived = 0
    complete = False

    def feed(self, _data: bytearray, _start: int, _end: int) -> int:
        """Raises `HttpError`."""
        raise unread(UnavailableError(HOLDS_ENOUGH))


class RequestParser:
    """The parser of one connection. Bytes come through `parse`, those of a large body through `space` and `received`.

    `check` returns why an inference request is refused whatever its body is. One request at a time: the next bytes may
    come when the last request is released.
    """

    def __init__(
        self,
        heads: HeadReader,
        memory: RequestMemory,
        check: Callable[[RequestHead], ContractError | None],
    ) -> None:
        self._heads = heads
        self._settings = heads.settings
        self._memory = memory
        self._budget = memory.budget
        self._check = check
        self._body: FixedBody | ChunkedBody | DroppedBody | LostBody | None = None
        self._body_began = 0.0
        self._refusal: ContractError | None = None
        self._skipped_line = False  # the one empty line that may come before a request
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
        return isinstance(self._body, FixedBody) and self._budget.left <= 0

    def parse(self, data: bytearray, start: int, end: int) -> tuple[int, Request | RequestHead | None]:
        """Parse the next piece of `data[start:end]`. Returns where it ends (`start`: more is needed), and a request.

        While a body is still missing the head is returned alone. Raises `HttpError`.
        """
        if self._body is None:
            return self._parse_head(data, start, end)
        return self._feed(self._body, data, start, end)

    def space(self) -> memoryview | None:
        """Memory for the transport's next bytes: never more than the body lacks or the budget has room for."""
        body = self._body
        if not isinstance(body, FixedBody):
            return None
        left = self._budget.left
        return body.view[body.filled : body.filled + left] if left > 0 else None

    def received(self, count: int) -> Request | None:
        """`count` bytes have been written to `space`. Returns the request if it is complete."""
        body = self._body
        assert isinstance(body, FixedBody)
        body.received(count)
        self._hold(body, count)
        return self._completed() if body.complete else None

    def drop_body(self, refusal: ContractError) -> None:
        """Refuse the request whose body is arriving: give its memory back and drop the bytes that still come."""
        assert isinstance(self._body, FixedBody)
        left = self._body.size - self._body.filled
        self.give_up()
        self._refusal = refusal
        self._body = DroppedBody(left)

    def give_up(self) -> None:
        """Drop the request that is arriving."""
        self._body = None

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
        if isinstance(self._body, FixedBody):
            self.drop_body(UnavailableError(HOLDS_ENOUGH))
        else:
            self._body = LostBody()

    def _parse_head(self, data: bytearray, start: int, end: int) -> tuple[int, Request | RequestHead | None]:
        if data.startswith(b"\r\n", start, end):
            if self._skipped_line:
                raise HttpError(400, "more than one empty line comes before the request")
            self._skipped_line = True
            return start + 2, None
        found = data.find(HEAD_ENDS, start, end)
        if found < 0:
            self.head = None
            if not ord("A") <= data[start] <= ord("Z") and data[start] != _CARRIAGE_RETURN:
                raise HttpError(400, "the request is not valid HTTP")
            self._heads.check_size(end - start)
            if data.count(b"\n", start, end) != data.count(b"\r\n", start, end):
                raise HttpError(400, BARE_LINE_FEED)
            return start, None
        self._skipped_line = False
        found += len(HEAD_ENDS)
        self.head = None
        self.head = head = self._heads.read(bytes(data[start:found]))
        self.start_ns = time.perf_counter_ns()
        self._body = body = self._choose_body(head)
        if body is None:
            return found, self._completed()
        found, request = self._feed(body, data, found, end)
        if request is None and self._refusal is not None and head.expects_continue:  # its body need not be sent
            raise unread(self._refusal)
        return found, request or head

    def _choose_body(self, head: RequestHead) -> FixedBody | ChunkedBody | DroppedBody | None:
        """Choose the body's memory. Raises `HttpError` for a body that is not read at all."""
        size = head.length or 0
        limit = self._settings.max_body_bytes if head.target is not None else CONTROL_BODY_BYTES
        self._refusal = None
        self._body_began = time.monotonic()
        if size > limit:
            raise HttpError(413, f"the body has {size} bytes, the server takes at most {limit}")
        if head.infers:
            self._refusal = self._check(head)
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
            body = FixedBody.take(self._memory, self, size, head.json_bytes) if size <= self._budget.left else None
            if body is not None:
                return body
            self._refusal = UnavailableError(HOLDS_ENOUGH)
        return DroppedBody(size)

    def _feed(
        self, body: FixedBody | ChunkedBody | DroppedBody | LostBody, data: bytearray, start: int, end: int
    ) -> tuple[int, Request | None]:
        if isinstance(body, FixedBody):
            used = body.feed(data, start, min(end, start + self._budget.left))
            self._hold(body, used - start)
        else:
            used = body.feed(data, start, end)
            if isinstance(body, ChunkedBody) and not self._hold(body, body.arrived - body.slot.charged):
                raise unread(UnavailableError(HOLDS_ENOUGH))
        return used, self._completed() if body.complete else None

    def _completed(self) -> Request:
        head, body, refusal = self.head, self._body, self._refusal
        assert head is not None
        if isinstance(body, FixedBody | ChunkedBody):
            self._memory.arrived(body.slot)
        self._body = None
        return Request(head, self.start_ns, refusal, body if isinstance(body, FixedBody | ChunkedBody) else None)

    def _hold(self, body: FixedBody | ChunkedBody, size: int) -> bool:
        held = self._budget.hold(size)
        body.slot.charged += size if held else 0
        return held
