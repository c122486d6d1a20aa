"""Request heads: bytes up to the empty line become a `Head`, or an `HttpError`.

httptools reads them; what decides where a body ends is checked again here, because two readings of one stream are how
requests are smuggled. Load clients repeat their head byte for byte, so parsed heads are kept by their bytes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from urllib.parse import unquote

import httptools

from servers.contract.codec import HEADER_LENGTH
from servers.native.limits import HttpError, HttpLimits

HEAD_ENDS = b"\r\n\r\n"
_KEPT_HEADS = 256
_KEPT_HEAD_BYTES = 4096
_JSON_LENGTH = HEADER_LENGTH.lower().encode()


@dataclass(slots=True)
class Head:
    """One parsed head; shared by all requests with the same bytes, so nobody writes to it.

    `length` is the body's size, None where there is no body or a chunked one; `target` is the model and the version of
    an inference route, None for every other; `json_length` and `encoding` are the values as they came.
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
        """Whether it asks for an inference; a target with another method asks for nothing."""
        return self.target is not None and self.method == b"POST"

    @property
    def json_bytes(self) -> int:
        """`json_length` as far as it is a number, to lay the body out; whether it is right is checked later."""
        value = self.json_length
        return int(value) if value is not None and value.isdigit() and len(value) < 19 else 0


class _Parsed:
    """What httptools calls back with."""

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
        self.keep_alive = self.parser.should_keep_alive()  # it forgets that at the end of the message


class HeadReader:
    """Parses heads within `limits` and remembers the latest."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._kept: dict[bytes, Head] = {}

    def read(self, raw: bytes) -> Head:
        """`raw` ends with the empty line. Raises `HttpError`."""
        head = self._kept.get(raw)
        if head is None:
            head = self._parse(raw)
            if len(raw) <= _KEPT_HEAD_BYTES:
                if len(self._kept) >= _KEPT_HEADS:  # heads that differ each time must not collect
                    self._kept.clear()
                self._kept[raw] = head
        return head

    def check_size(self, size: int) -> None:
        """Raises `HttpError` for a head of more bytes than are taken."""
        if size > self._limits.header_bytes:
            raise HttpError(431, f"the request's head has more than {self._limits.header_bytes} bytes")

    def _parse(self, raw: bytes) -> Head:
        self.check_size(len(raw))
        lines = raw.count(b"\n")
        if lines - 2 > self._limits.headers:
            raise HttpError(431, f"the request has more than {self._limits.headers} headers")
        if lines != raw.count(b"\r\n"):
            raise HttpError(400, "a line of the request's head does not end with CR LF")
        parsed = _Parsed()
        parser = parsed.parser
        try:
            with contextlib.suppress(httptools.HttpParserUpgrade):  # an offer, which is not taken
                parser.feed_data(raw)
            if parsed.complete != 1:
                raise HttpError(400, "the request is not valid HTTP")
            url = httptools.parse_url(parsed.url)
            path = (url.path or b"/").decode("ascii")
        except (httptools.HttpParserError, UnicodeDecodeError) as exc:
            raise HttpError(400, "the request is not valid HTTP") from exc
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HttpError(505, "the server speaks HTTP/1.1 and HTTP/1.0 alone")
        head = Head(
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


def _frame(head: Head) -> None:
    """Where the body ends, and what is in it. Raises `HttpError`."""
    encodings: list[bytes] = []
    for name, value in head.headers:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18 or head.length not in (None, int(value)):
                raise HttpError(400, "Content-Length must be one whole number of bytes")
            head.length = int(value)
        elif name == b"transfer-encoding":
            if head.chunked or value.strip().lower() != b"chunked" or head.version == "1.0":
                raise HttpError(400, "the only Transfer-Encoding taken is chunked, in HTTP/1.1")
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
