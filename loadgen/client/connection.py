"""What the connections of every transport share: addresses, sockets, deadlines, and the outcome of a request."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from http import HTTPStatus
from select import POLLIN
from time import perf_counter_ns
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from loadgen.base.documents import DocumentError, one_line, read_json, uncompressed
from loadgen.client.tls import AlpnProtocol, TlsError, tls_context, wrapped_socket
from loadgen.records.run import DEFAULT_ACCESS, Access

GRPC_STATUS = 1000
"""Added to a gRPC status, so that it differs from every HTTP status: OK is 1000, UNAVAILABLE 1014."""
MOST_ANSWER_BYTES = 2**28
"""The largest response that is read, so that a server that never stops sending cannot fill the client's memory."""
_IN_A_NAME = "!$&'()*+,;=:@"
"""Characters of RFC 3986's path segments that stay as they are in a model's name or version."""
_MOST_PARTS = 1_000
"""Most parts per `sendmsg`; the kernel takes 1,024."""
_READ, _WRITE = 1, 2
"""The events of libev's watchers."""
_EMPTY = memoryview(b"")
_VERSIONED = re.compile(r"/v\d+$")
_MOST_ERROR_BYTES = 2**16
"""How much of a body is searched for a server's words."""
_SHOWN = 300
_ERROR_FIELDS = ("error", "title", "message", "msg", "detail", "errors", "reason")
_DATA_LINE = re.compile(rb"^data: ?(\{.*)$", re.MULTILINE)
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]*)</title>", re.IGNORECASE)  # takes time in proportion to the text
_PHRASES: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}


class AddressError(ValueError):
    """A server's address cannot be used; the message shows a valid one."""


def is_host(name: str) -> bool:
    """Whether the socket module accepts a name as a host: it refuses empty labels and those of more than 63
    characters."""
    try:
        return b"\0" not in name.encode("idna")
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, from a URL such as http://127.0.0.1:8100, and how it is reached there."""

    host: str
    port: int
    base_path: str = ""
    tls: bool = False
    access: Access = DEFAULT_ACCESS

    @classmethod
    def parse(cls, url: str, access: Access = DEFAULT_ACCESS) -> Address:
        """Raises `AddressError` for anything but HTTP with a host."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as exc:
            raise AddressError(f"{url} is not an address ({exc}); give one like http://127.0.0.1:8100") from None
        if parts.username is not None:
            raise AddressError("an address with a user name or a password would be stored; send them with a header")
        if parts.query or parts.fragment:
            raise AddressError("an address ends before ? and #, which no request would have; send keys with a header")
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_host(parts.hostname):
            raise AddressError(f"{url} is not an http:// or https:// address; give one like http://127.0.0.1:8100")
        tls = parts.scheme == "https"
        try:
            port = (443 if tls else 80) if parts.port is None else parts.port
        except ValueError:
            port = 0
        if not port:
            raise AddressError(f"{url} has no valid port; give one like http://127.0.0.1:8100")
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, access)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is this machine's loopback address."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    @property
    def url(self) -> str:
        """The normalised URL, without a trailing slash."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base_path}"

    def openai_path(self, name: str) -> str:
        """A path of OpenAI's API; a base path that ends with a version, as OpenAI's clients take it, has that one."""
        return f"/{name}" if _VERSIONED.search(self.base_path) else f"/v1/{name}"

    def model_path(self, model: str) -> str:
        """The path of a model, or of its version, below which its requests go."""
        return model_path(model, self.access.version)


def quoted(name: str) -> str:
    """A name as one segment of a path, whatever characters it holds."""
    return quote(name, safe=_IN_A_NAME)


def model_path(model: str, version: str | None = None) -> str:
    """The path of a model, or of its version, below which its requests go."""
    return f"/v2/models/{quoted(model)}" + ("" if version is None else f"/versions/{quoted(version)}")


class ConnectionRefused(Exception):  # noqa: N818 (an outcome that callers branch on, named after ECONNREFUSED)
    """No connection could be made; nothing was sent."""


class ResponseError(Exception):
    """A response cannot be used, and its connection cannot be used any more; the message is the sample's error."""


class TlsRefused(ConnectionRefused):
    """No connection could be made because of TLS; trying again does not help."""


def is_patched() -> bool:
    """Whether gevent has replaced this process's sockets."""
    return "gevent" in sys.modules and socket.socket.__module__.startswith("gevent")


class GreenletSocket:
    """A TCP socket for one greenlet at a time, with the methods that the clients use. A wait past the timeout raises
    `TimeoutError`; with a timeout of 0 a call that would wait raises `BlockingIOError`.

    In a process that gevent has patched it stands in for gevent's own socket, which reads before it waits, though a
    response cannot be there right after its request, and makes a new timer object for every wait. This one waits first
    after it has sent, and has one timer. gevent is imported only in a process that it has patched.
    """

    def __init__(self, connected: Any) -> None:
        """Takes over a socket of gevent, which cannot be used afterwards."""
        import gevent
        from gevent.monkey import get_original

        self._timeout_s = float(connected.gettimeout())
        self._socket = get_original("socket", "socket")(fileno=connected.detach())
        self._socket.setblocking(False)
        self._sendmsg: Callable[[Sequence[bytes | memoryview]], int] = self._socket.sendmsg
        self._recv_into: Callable[[memoryview], int] = self._socket.recv_into
        poll = get_original("select", "poll")()
        poll.register(self._socket.fileno(), POLLIN)
        self._poll = poll.poll
        self._hub, self._current = gevent.get_hub(), gevent.getcurrent
        loop = self._hub.loop
        self._readable = loop.io(self._socket.fileno(), _READ)
        self._writable = loop.io(self._socket.fileno(), _WRITE)
        self._timer_s = self._timeout_s
        self._timer = loop.timer(self._timer_s)
        self._closed = False
        self._reader: Any = None
        """The greenlet that waits for a stream."""
        self._nothing_to_read = False
        """Whether a request was sent since the last read, so that the response has yet to come."""

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds
        if seconds:
            self._set_timer(seconds)

    def _set_timer(self, seconds: float) -> None:
        if seconds != self._timer_s:
            self._timer.close()
            self._timer, self._timer_s = self._hub.loop.timer(seconds), seconds

    def gettimeout(self) -> float:
        return self._timeout_s

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        self._nothing_to_read = True
        while True:
            try:
                return self._sendmsg(parts)
            except BlockingIOError:
                self._wait(self._writable)

    def sendall(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self.sendmsg([left]) :]

    def recv_into(self, buffer: memoryview) -> int:
        if self._nothing_to_read and self._timeout_s:
            self._wait(self._readable)
        self._nothing_to_read = False
        while True:
            try:
                return self._recv_into(buffer)
            except BlockingIOError:
                self._wait(self._readable)

    def receive_stream(self, take: Callable[[Callable[[memoryview], int]], bool], left_s: Callable[[], float]) -> None:
        """Wait until `take` says that it has enough: it is called with a `recv_into` whenever there is something to
        read, within the event loop, and must neither wait nor read twice. So a piece of a stream costs no switch to
        this greenlet and back. `left_s` is asked when the timeout is over; from then on it says how many seconds are
        left. Raises what `take` raises, and `TimeoutError` when none are left."""
        reader = self._reader = self._current()

        def readable() -> None:
            try:
                enough = take(self._recv_into)
            except BlockingIOError:
                return
            except Exception as exc:  # noqa: BLE001 (it belongs to the greenlet that waits)
                reader.throw(exc)
                return
            if enough:
                reader.switch(True)

        self._readable.start(readable)
        try:
            self._timer.start(reader.switch, False)
            while not self._hub.switch():
                if (seconds := left_s()) <= 0.0:
                    raise TimeoutError
                self._set_timer(seconds)
                self._timer.start(reader.switch, False)
        finally:
            self._reader = None
            self._nothing_to_read = False
            self._readable.stop()
            self._timer.stop()
            self._set_timer(self._timeout_s)

    def has_input(self) -> bool:
        """Whether there is something to read now, or the end of the stream."""
        return bool(self._poll(0))

    def close(self) -> None:
        """Idempotent; a greenlet that waits gets an `OSError`."""
        if not self._closed:
            self._closed = True
            if self._reader is not None:  # gevent ends only waits whose callback is a greenlet's
                self._hub.loop.run_callback(self._reader.throw, ConnectionAbortedError())
            self._timer.close()
            watchers = self._readable, self._writable
            self._hub.cancel_waits_close_and_then(watchers, ConnectionAbortedError, self._socket.close)

    def _wait(self, watcher: Any) -> None:
        if self._timeout_s == 0.0:
            raise BlockingIOError
        self._timer.start(self._current().throw, TimeoutError)
        try:
            self._hub.wait(watcher)
        finally:
            self._timer.stop()


AnySocket = socket.socket | GreenletSocket


def open_socket(address: Address, timeout_s: float, protocol: AlpnProtocol = "http/1.1") -> AnySocket:
    """A connection without Nagle's delay, after the TLS handshake if there is one. Raises `ConnectionRefused` with a
    sentence."""
    shown = address.authority
    try:
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except TimeoutError:
        raise ConnectionRefused(f"no connection to {shown} within {timeout_s:g} s") from None
    except OSError as exc:
        raise ConnectionRefused(f"no connection to {shown}: {exc.strerror or exc}") from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not address.tls:
        return GreenletSocket(connection) if is_patched() else connection
    try:
        return wrapped_socket(connection, tls_context(address.access, protocol), address.host, protocol)
    except (TlsError, TimeoutError) as exc:
        raise TlsRefused(f"no connection to {shown}: {exc}") from None


class Deadline:
    """The time limit of a whole request; a socket's timeout limits single reads and writes only.

    The socket's timeout is set at most 16 times per request, because a system call for every read would cost more than
    the read. So the last wait ends at most a sixteenth of the timeout late.
    """

    __slots__ = ("_changed", "_end_ns", "_timeout_ns", "_young_until_ns")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._changed = True
        self._end_ns = self._young_until_ns = 0

    def begin(self, connection: AnySocket, now_ns: int) -> None:
        """Start the time of a request on this socket."""
        if self._changed:
            connection.settimeout(self._timeout_ns / 1e9)
            self._changed = False
        self._young_until_ns = now_ns + (self._timeout_ns >> 4)
        self._end_ns = now_ns + self._timeout_ns

    def check(self, connection: AnySocket) -> None:
        """Call it after a read or a write, before the next one. Raises `TimeoutError` when the time is up."""
        now_ns = perf_counter_ns()
        if now_ns < self._young_until_ns:
            return
        if now_ns >= self._end_ns:
            raise TimeoutError
        self._changed = True
        connection.settimeout((self._end_ns - now_ns) / 1e9)
        self._young_until_ns = min(self._end_ns, now_ns + (self._timeout_ns >> 4))

    def reset(self) -> None:
        """Call it when the socket is new or its timeout was changed elsewhere."""
        self._changed = True


Pieces = tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """One request over HTTP or gRPC: the head, then the body, `payload_bytes` of which are tensors. Requests to several
    servers share the body, and one that is not for a certain server yet has no head. Over gRPC the head is what comes
    before the message in its stream. `pieces` are the body's if a part of it varies. A request to a language model asks
    for `output_tokens`. A recorded one has its own `headers`."""

    head: bytes
    body: bytes = b""
    payload_bytes: int = 0
    pieces: Pieces = ()
    output_tokens: int = 0
    headers: Mapping[str, str] | None = None


def split_at(body: bytes, places: Sequence[int], byte_size: int) -> Pieces:
    """Views of the body: constant, varying, constant, …; `byte_size` bytes vary at each of the places."""
    view, start, pieces = memoryview(body), 0, []
    for place in places:
        pieces += [view[start:place], view[place : place + byte_size]]
        start = place + byte_size
    return (*pieces, view[start:])


def assemble(first: bytes, pieces: Pieces, patches: Sequence[bytes]) -> list[bytes | memoryview]:
    """The parts to send: `first`, then the pieces, where the patches (if any) replace the varying ones."""
    if not pieces:
        return [first]
    parts = [first, *pieces]
    if patches:
        parts[2::2] = patches
    return parts


def send_parts(connection: AnySocket, parts: list[bytes | memoryview], deadline: Deadline) -> None:
    """Send all parts without joining them. Raises `OSError`, `TimeoutError` past the deadline."""
    while parts:
        sent = connection.sendmsg(parts[:_MOST_PARTS] if len(parts) > _MOST_PARTS else parts)
        if len(parts) == 1 and sent == len(parts[0]):
            return
        done = 0
        while done < len(parts) and sent >= len(parts[done]):
            sent -= len(parts[done])
            done += 1
        parts = parts[done:]
        if sent:
            parts[0] = memoryview(parts[0])[sent:]
        if parts:
            deadline.check(connection)


class Exchange:
    """The outcome of a connection's last request. Reused: it and its `body` are valid until the next request.

    `status` is HTTP's, or gRPC's + 1000; 0 and a `failure` if there was no complete response. Times are
    `perf_counter_ns`; `first_byte_ns` is 0 if no byte came. `request_bytes` and `response_bytes` count bytes on the
    wire: over HTTP with the headers, over gRPC the message and its 5 bytes of length without HTTP/2's compressed
    headers and frames.
    """

    __slots__ = ("body", "end_ns", "failure", "first_byte_ns", "head", "request_bytes", "response_bytes", "send_ns",
                 "status")  # fmt: skip

    def __init__(self) -> None:
        self.end_ns = 0
        self.begin(0, 0)

    def begin(self, send_ns: int, request_bytes: int) -> None:
        """Start a new request; forget the last response."""
        self.send_ns = send_ns
        self.request_bytes = request_bytes
        self.status = self.first_byte_ns = self.response_bytes = 0
        self.failure: str | None = None
        self.head = b""
        self.body = _EMPTY

    def copy(self) -> Exchange:
        """A copy of the response that stays valid after the next request."""
        copied = Exchange()
        copied.status, copied.failure, copied.head = self.status, self.failure, self.head
        copied.body = memoryview(bytes(self.body))
        return copied

    @property
    def good(self) -> bool:
        """Whether the response is the model's outputs."""
        return self.status in (200, GRPC_STATUS)

    def header(self, name: str) -> str | None:
        """The value of a response header, by its name in lower case; None if there is none."""
        value = find_header(self.head, b"\r\n" + name.encode("latin-1") + b":")
        return None if value is None else value.decode("latin-1")


def find_header(head: bytes, key: bytes) -> bytes | None:
    """The value of the header line that begins with `key`, its line break included; None if there is none."""
    start = head.find(key)
    if start < 0:
        return None
    start += len(key)
    return head[start : head.index(b"\r\n", start)].strip()


def unasked_coding(exchange: Exchange) -> str | None:
    """A sentence about a response that is compressed although no request asks for that; None for others."""
    coding = exchange.header("content-encoding") or "identity"
    if coding == "identity":
        return None
    return (
        f"it is compressed ({one_line(coding, 40)}), which was not asked for; turn compression off at that server or "
        "at the proxy before it"
    )


def failure_message(exchange: Exchange) -> str:
    """One line for a failed request: the transport's failure, or the status with the server's words."""
    return exchange.failure or f"HTTP {exchange.status}: {server_words(exchange)}"


def server_words(exchange: Exchange) -> str:
    """What a server says in a response that is not the expected one, as one line: the target of a redirect, the words
    of an error in any of the usual forms, the title of a web page, or else the text itself."""
    if 300 <= exchange.status < 400 and (target := exchange.header("location")):
        return f"redirects to {one_line(target)}"
    coding = exchange.header("content-encoding") or "identity"
    body = uncompressed(bytes(exchange.body[:_MOST_ERROR_BYTES]), coding, _MOST_ERROR_BYTES)
    if body is None:
        return f"a body in the coding {one_line(coding)}, which was not asked for"
    event = _DATA_LINE.search(body)  # the form of an error of a server that streams
    try:
        words = _words_of(read_json(event[1] if event else body))
    except DocumentError:
        words = ""
    text = body.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    kind = (exchange.header("content-type") or "").partition(";")[0]
    if not words and (kind == "text/html" or text[:9].lower().startswith(("<html", "<!doctype"))):
        title = _TITLE.search(text)
        words = f"a web page with the title {unescape(title[1])}" if title else "a web page"
    if not words and text[:_SHOWN].count("\ufffd") > _SHOWN // 20:
        words = f"{len(body):,} bytes that are no text ({kind or 'without a content type'})"
    return one_line(words or text) or _PHRASES.get(exchange.status) or "an empty body"


def _words_of(document: object) -> str:
    """The words in the document of an error: {"error": …}, {"error": {"message": …}}, {"message": …}, {"detail": …},
    with the fields that it names; empty without any."""
    if isinstance(document, list):
        return "; ".join(filter(None, map(_words_of, document)))
    if not isinstance(document, dict):
        return document if isinstance(document, str) else ""
    fields = {str(key).lower(): value for key, value in document.items()}
    found = dict.fromkeys(_words_of(fields[key]) for key in _ERROR_FIELDS if fields.get(key))
    words = ": ".join(filter(None, found))
    place = fields.get("loc") or fields.get("param")
    place = ".".join(str(step) for step in place if step != "body") if isinstance(place, list) else place
    return f"{place}: {words}" if isinstance(place, str) and place and place not in words else words


class ClientConnection(Protocol):
    """One user's connection to a server: one request at a time."""

    @property
    def reconnects(self) -> int:
        """Connections that the server had closed, while idle or with its last response, and that were made again for a
        request, inside its latency."""

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused` with a sentence."""

    def send(self, request: Any, patches: Sequence[bytes] = (), /) -> Exchange:
        """Send one prepared request of this transport, with the patches at the places that vary, and wait for the
        response; a failure is in the result. Raises `ConnectionRefused`, before anything is sent, when a connection is
        needed and cannot be made."""

    def close(self) -> None:
        """Free everything. Idempotent."""
