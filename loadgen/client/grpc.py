"""The gRPC client for measured requests: it sends messages that were serialised beforehand and returns raw messages.

One TCP connection per user, one call at a time, and no call is sent twice. The call's deadline is sent to the server
(`grpc-timeout`) and enforced here too; a call that misses it closes the connection, which is made again for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from time import perf_counter_ns
from urllib.parse import unquote

from loadgen.client.exchange import GRPC_STATUS, MOST_ANSWER_BYTES, ConnectionRefused, Exchange
from loadgen.client.http2 import Http2Connection, Http2Error, header_block
from loadgen.client.requests import Address, AddressError, Pieces, assemble, is_host, open_socket
from loadgen.client.tls import reason
from loadgen.documents import one_line
from loadgen.headers import secret_of
from loadgen.records.run import DEFAULT_ACCESS, Access

SERVICE = "/inference.GRPCInferenceService/"
MOST_ADDRESS_BYTES = 126
"""Longer than any real host and port."""
MOST_PORT = 65_535
FRAME_BYTES = 5
"""gRPC's compression flag and length before every message."""

STATUS_NAMES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 2, 4, 8, 13, 14
_OF_RESET = {0x7: UNAVAILABLE, 0x8: 1, 0xB: RESOURCE_EXHAUSTED}
"""HTTP/2's error code → gRPC's status (gRPC over HTTP2, "Errors"): REFUSED_STREAM, CANCEL, ENHANCE_YOUR_CALM; any
other is INTERNAL."""
_OF_HTTP = {b"400": INTERNAL, b"401": 16, b"403": 7, b"404": 12, b"429": UNAVAILABLE, b"502": UNAVAILABLE,
            b"503": UNAVAILABLE, b"504": UNAVAILABLE}  # fmt: skip
"""HTTP's status → gRPC's, for a response without one; any other is UNKNOWN."""
_PREFIX = Struct(">BI")


@dataclass(frozen=True, slots=True, eq=False)
class GrpcRequest:
    """One serialised `ModelInferRequest`. `payload_bytes` of it are tensors; `pieces` are its parts if some vary."""

    message: bytes
    payload_bytes: int
    pieces: Pieces = ()


def parse_grpc_address(address: str, access: Access = DEFAULT_ACCESS) -> Address:
    """HOST:PORT, grpc://HOST:PORT or, with TLS, grpcs://HOST:PORT; after a scheme also a path. Raises
    `AddressError`."""
    scheme, separator, rest = address.rpartition("://")
    authority, slash, path = rest.partition("/") if separator else (rest, "", "")
    host, colon, port = authority.rpartition(":")
    host = host.strip("[]")
    possible = colon and host and is_host(host) and "/" not in authority and "@" not in authority
    possible = possible and scheme in ("", "grpc", "grpcs") and len(authority) <= MOST_ADDRESS_BYTES
    if not possible or not port.isascii() or not port.isdigit() or int(port) > MOST_PORT:
        raise AddressError(
            f"no gRPC address can be read from {address!r}; give one like 127.0.0.1:8101 or grpcs://HOST:PORT"
        )
    return Address(host, int(port), (slash + path).rstrip("/"), scheme == "grpcs", access)


class GrpcConnection:
    """One connection. `timeout_s` bounds connecting, the HTTP/2 greeting and, as its deadline, each call; a response of
    more than `most_bytes` is a failure."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 60.0,
        most_bytes: int = MOST_ANSWER_BYTES,
        access: Access = DEFAULT_ACCESS,
    ) -> None:
        """Raises `AddressError`."""
        self.address = address
        self.timeout_s = timeout_s
        self._most_bytes = most_bytes
        self.reconnects = 0
        """Connections that the server had closed and that were made again for a request, inside its latency."""
        self._peer = peer = parse_grpc_address(address, access)
        self._connection: Http2Connection | None = None
        self._exchange = Exchange()
        fields = {
            ":method": "POST",
            ":scheme": "https" if peer.tls else "http",
            ":path": f"{peer.base_path}{SERVICE}ModelInfer",
            ":authority": peer.authority,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "abserve",
            "grpc-timeout": f"{max(1, round(timeout_s * 1000))}m",
        }
        for name, value in access.header.items():
            fields[":authority" if name == "Host" else name.lower()] = secret_of(value)
        self._head = header_block((name.encode(), value.encode()) for name, value in fields.items())

    def connect(self) -> None:
        """Connect unless connected. Raises `ConnectionRefused`, also if the server does not speak gRPC."""
        if self._connection is not None:
            return
        opened = open_socket(self._peer, self.timeout_s, "h2")
        try:
            self._connection = Http2Connection(opened, timeout_s=self.timeout_s, most_bytes=self._most_bytes)
        except (Http2Error, OSError) as exc:
            opened.close()
            words = f"no response within {self.timeout_s:g} s" if isinstance(exc, TimeoutError) else reason(exc)
            raise ConnectionRefused(f"the server at {self.address} does not speak gRPC: {words}") from None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def send(self, request: GrpcRequest, patches: Sequence[bytes] = ()) -> Exchange:
        """Call `ModelInfer` once, with the patches at the places that vary. Raises `ConnectionRefused` when the server
        accepts no connection."""
        message = request.message
        pieces = assemble(_PREFIX.pack(0, len(message)), request.pieces or (memoryview(message),), patches)
        due_ns = perf_counter_ns()
        if self._connection is not None and not self._connection.usable():
            self.close()
            self.reconnects += 1
        if self._connection is None:
            self.connect()
        connection = self._connection
        assert connection is not None
        exchange = self._exchange
        exchange.begin(due_ns, len(message) + FRAME_BYTES)
        try:
            connection.request(self._head, pieces, due_ns)
            while not connection.ended:
                connection.receive()
                if exchange.first_byte_ns == 0 and connection.answered:
                    exchange.first_byte_ns = perf_counter_ns()
            exchange.end_ns = perf_counter_ns()
            exchange.first_byte_ns = exchange.first_byte_ns or exchange.end_ns
            self._finish(exchange, connection)
        except TimeoutError:
            self._fail(exchange, DEADLINE_EXCEEDED, f"no complete response within {self.timeout_s:g} s", midway=True)
        except Http2Error as exc:
            self._fail(exchange, UNAVAILABLE, str(exc), midway=True)
        except OSError as exc:
            self._fail(exchange, UNAVAILABLE, reason(exc), midway=True)
        return exchange

    def _finish(self, exchange: Exchange, connection: Http2Connection) -> None:
        """The outcome of a stream that has ended."""
        fields, http_status = connection.fields, connection.fields.get(b":status", b"none")
        if connection.reset is not None and b"grpc-status" not in fields:
            code = _OF_RESET.get(connection.reset, INTERNAL)
            self._fail(exchange, code, f"the server reset the stream (HTTP/2 error {connection.reset})")
            return
        status = fields.get(b"grpc-status", b"")
        if not status.isdigit() or len(status) > 2:
            code = _OF_HTTP.get(http_status, UNKNOWN)
            self._fail(exchange, code, f"HTTP status {http_status.decode('latin-1')} and no gRPC status")
        elif status != b"0":
            self._fail(exchange, int(status), unquote(fields.get(b"grpc-message", b"").decode("latin-1")))
        else:
            body = connection.body[0] if len(connection.body) == 1 else b"".join(connection.body)
            if len(body) < FRAME_BYTES or _PREFIX.unpack_from(body) != (0, len(body) - FRAME_BYTES):
                self._fail(exchange, INTERNAL, "the response is not one uncompressed message")
                return
            exchange.status = GRPC_STATUS
            exchange.response_bytes = len(body)
            exchange.body = memoryview(body)[FRAME_BYTES:]

    def _fail(self, exchange: Exchange, code: int, words: str, *, midway: bool = False) -> None:
        if midway:  # the server may still send parts of the response, so the connection cannot be used again
            exchange.end_ns = perf_counter_ns()
            self.close()
        name = STATUS_NAMES[code] if code < len(STATUS_NAMES) else f"status {code}"
        exchange.status = GRPC_STATUS + code
        exchange.first_byte_ns = exchange.response_bytes = 0
        exchange.body = memoryview(b"")
        exchange.failure = f"gRPC {name}: {one_line(words)}"
