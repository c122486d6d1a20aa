"""The clients of the cases: HTTP/1.1 by hand, so that any bytes can be sent, and gRPC with any bytes as the message.

The HTTP client sends and reads at the same time, because a server that refuses a body answers before it has read it.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from loadgen.conformance.model import InferenceRequest
from loadgen.conformance.records import Response

RECEIVE_BYTES = 1 << 16
MAXIMAL_RESPONSE_BYTES = 1 << 28
CONNECT_SECONDS = 5.0
_KERNEL_TABLE = Path("/proc/net/tcp")
SERVICE = "inference.GRPCInferenceService"
_GRPC_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # the answers of a proxy would be judged as the server's
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
messages: Any = service_pb2


class RawConnection:
    """One TCP connection. Use as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        """Raises `OSError` when nothing listens."""
        self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes) -> bool:
        """Send all of it without reading; False when the server has closed."""
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def request(
        self, data: bytes | Iterable[bytes], deadline_s: float, *, head_only: bool = False, end: bool = False
    ) -> Response:
        """Send `data` and read one answer; stop sending when the answer arrives. With `end` the stream is half-closed
        after the last byte."""
        started = perf_counter()
        self._received.clear()
        pieces = iter((data,) if isinstance(data, bytes) else data)
        pending = memoryview(next(pieces, b""))
        sending = True
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                left = deadline_s - (perf_counter() - started)
                if left <= 0:
                    return Response("silent", elapsed_s=perf_counter() - started)
                for _, events in selector.select(left):
                    if events & selectors.EVENT_READ:
                        ended = self._read()
                        response = parse_response(bytes(self._received), ended is not None, head_only=head_only)
                        if response is not None or ended is not None:
                            response = response or Response(ended or "closed")
                            return replace(response, elapsed_s=perf_counter() - started)
                    elif sending:
                        try:
                            pending = pending[self._socket.send(pending) :]
                        except BlockingIOError:
                            continue
                        except OSError:
                            # The server reads no more, but its answer may already be in our receive buffer.
                            sending = False
                        if sending and not pending:
                            piece = next(pieces, None)
                            sending = piece is not None
                            pending = memoryview(piece or b"")
                            if end and not sending:
                                with suppress(OSError):
                                    self._socket.shutdown(socket.SHUT_WR)
                    if not sending:
                        selector.modify(self._socket, selectors.EVENT_READ)

    def names(self) -> tuple[str, str] | None:
        """Both ends as the kernel's table writes them, the client's first; None when closed, or not over IPv4."""
        try:
            if self._socket.family != socket.AF_INET:
                return None
            return _kernel_address(*self._socket.getsockname()), _kernel_address(*self._socket.getpeername())
        except OSError:
            return None

    def receives_within(self, seconds: float) -> bool:
        """Whether anything comes within that time; it is dropped."""
        try:
            self._socket.settimeout(seconds)
            return bool(self._socket.recv(RECEIVE_BYTES))
        except OSError:
            return False

    def closed_within(self, seconds: float) -> bool:
        """Whether the server closes the connection within that time; an answer before that is dropped."""
        deadline = perf_counter() + seconds
        while (left := deadline - perf_counter()) > 0:
            self._socket.settimeout(left)
            try:
                if not self._socket.recv(RECEIVE_BYTES):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
        return False

    def close(self, *, abruptly: bool = False) -> None:
        """Close it; `abruptly` sends a reset, as the kernel does for a killed client."""
        if abruptly:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _read(self) -> str | None:
        """None while the stream is open, else how it ended."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return "reset"
        if not data or len(self._received) > MAXIMAL_RESPONSE_BYTES:
            return "closed"
        self._received += data
        return None


def all_read(connections: Iterable[RawConnection]) -> bool:
    """Whether the server has read every byte of these connections, as far as this machine's kernel knows. Reads the
    kernel's table once, because that takes tens of milliseconds after many connections."""
    names = [pair for connection in connections if (pair := connection.names()) is not None]
    if not names or not _KERNEL_TABLE.exists():
        return True
    waiting = {}
    for line in _KERNEL_TABLE.read_text().splitlines()[1:]:
        fields = line.split(maxsplit=5)
        waiting[fields[1], fields[2]] = fields[4]
    empty = "00000000"
    return all(
        waiting.get((client, server), empty)[:8]
        == empty
        == waiting.get((server, client), f":{empty}").partition(":")[2]
        for client, server in names
    )


def _kernel_address(host: str, port: int) -> str:
    """The address as /proc/net/tcp writes it on a little-endian machine."""
    return f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"


def request_head(method: str, path: str, host: str, headers: Mapping[str, str], length: int | None) -> bytes:
    """A well-formed request head; without Content-Length if `length` is None."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_response(data: bytes, ended: bool, *, head_only: bool = False) -> Response | None:
    """The first final answer in `data`; None when it is not complete."""
    while True:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            return None
        lines = head.decode("latin-1").split("\r\n")
        status = [*lines[0].split(" "), "", ""][1]
        if not (status.startswith("1") and status != "101"):
            break
        data = rest
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if head_only or status in {"204", "304"}:
        return Response(status, headers)
    if "chunked" in headers.get("transfer-encoding", ""):
        body = _join_chunks(rest)
    elif headers.get("content-length", "").isdigit():
        length = int(headers["content-length"])
        body = rest[:length] if len(rest) >= length else None
    else:
        body = rest if ended else None
    return None if body is None else Response(status, headers, body)


def _join_chunks(data: bytes) -> bytes | None:
    body = b""
    while True:
        line, separator, data = data.partition(b"\r\n")
        try:
            size = int(line.split(b";")[0] or b"0", 16)
        except ValueError:
            return None
        if not separator or len(data) < size + 2:
            return None
        if size == 0:
            return body
        body, data = body + data[:size], data[size + 2 :]


class GrpcClient:
    """One channel to one server."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_GRPC_OPTIONS)

    def start(self, method: str, message: Any, deadline_s: float) -> Any:
        """Start a call and return its grpc future. `message` is a protobuf message or raw bytes."""
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=_serialise)
        return call.future(message, timeout=deadline_s)

    def call(self, method: str, message: Any, deadline_s: float = 30.0) -> Response:
        """One finished call."""
        started = perf_counter()
        return finish(self.start(method, message, deadline_s), started)

    def stream(self, method: str, sent: Iterable[Any], deadline_s: float = 30.0) -> Any:
        """Start a call with several messages, protobuf or raw bytes, and return its grpc call, an iterator of bytes."""
        call = self._channel.stream_stream(f"/{SERVICE}/{method}", request_serializer=_serialise)
        return call(iter(sent), timeout=deadline_s)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def finish(future: Any, started: float) -> Response:
    """Wait for a call. DEADLINE_EXCEEDED when the client's deadline passes."""
    try:
        body = future.result()
    except grpc.RpcError as exc:
        error: Any = exc
        headers = {name: str(value) for name, value in error.trailing_metadata() or ()}
        return Response(error.code().name, headers, b"", error.details() or "", perf_counter() - started)
    except grpc.FutureCancelledError:
        return Response("CANCELLED", message="cancelled by the client", elapsed_s=perf_counter() - started)
    return Response("OK", body=body, elapsed_s=perf_counter() - started)


def infer_message(request: InferenceRequest) -> Any:
    """The ModelInferRequest with raw contents."""
    message = messages.ModelInferRequest(
        model_name=request.name,
        model_version=request.version,
        id=request.document.get("id", ""),
        raw_input_contents=request.blobs,
    )
    for entry in request.entries:
        made = message.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
        for name, value in entry.get("parameters", {}).items():
            _set(made.parameters[name], value)
    for output in request.document.get("outputs", ()):
        message.outputs.add(name=output["name"])
    for name, value in request.document.get("parameters", {}).items():
        if name != "binary_data_output":
            _set(message.parameters[name], value)
    return message


def _set(parameter: Any, value: str | int) -> None:
    setattr(parameter, "string_param" if isinstance(value, str) else "int64_param", value)


def _serialise(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())
