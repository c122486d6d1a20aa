"""The gRPC client of the measured path: messages serialised beforehand go out as bytes, answers stay bytes.

One channel and one TCP connection a user, and nothing sent twice: channels share no subchannels and never retry. A
unary call tells of nothing before the whole answer is there, so its first byte is its end.

In a process that gevent has patched, gRPC's own event loop must be told, before the first channel: without it one
call blocks all other users, and throughput falls to less than half while the latency looks better. With it, a channel
that is left open keeps the process from ending, so whoever makes a connection closes it.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import grpc

from loadgen.clients.exchange import GRPC_STATUS, ConnectionRefused, Exchange
from loadgen.clients.requests import AddressError

SERVICE = "/inference.GRPCInferenceService/"
FRAME_BYTES = 5
"""gRPC's compression flag and length before every message."""

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
_gevent_knows = False


@dataclass(frozen=True, slots=True, eq=False)
class GrpcRequest:
    """One serialised `ModelInferRequest`. `payload_bytes` of it are tensors."""

    message: bytes
    payload_bytes: int
    batch_size: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of the message and its length, without HTTP/2's headers and frames."""
        return len(self.message) + FRAME_BYTES


def parse_grpc_address(address: str) -> tuple[str, int]:
    """Host and port. Raises `AddressError`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or "/" in address:
        raise AddressError(f"{address} is no gRPC address; give one like 127.0.0.1:8101")
    return host.strip("[]"), int(port)


class GrpcConnection:
    """One channel. `timeout_s` bounds connecting and, as the call's deadline, a whole exchange."""

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        """Raises `AddressError`."""
        self.address = address
        self.timeout_s = timeout_s
        self.reconnects = 0
        """Always 0: a channel renews its connection without telling."""
        self._peer = parse_grpc_address(address)
        self._channel: Any = None
        self._infer: Any = None
        self._doubtful = False
        self._exchange = Exchange()

    def connect(self) -> None:
        """Open the channel and have the server answer on it. Raises `ConnectionRefused`."""
        if self._channel is None:
            self._reach()
            _tell_gevent()
            self._channel = grpc.insecure_channel(self.address, options=_OPTIONS)
            self._infer = self._channel.unary_unary(SERVICE + "ModelInfer")
            self._doubtful = True
        if self._doubtful:
            self._greet()
            self._doubtful = False

    def close(self) -> None:
        """Close the channel. Idempotent."""
        channel, self._channel, self._infer = self._channel, None, None
        if channel is not None:
            channel.close()

    def send(self, request: GrpcRequest) -> Exchange:
        """Call `ModelInfer` once. Raises `ConnectionRefused` when the server takes no connection any more."""
        if self._channel is None or self._doubtful:
            self.connect()
        exchange = self._exchange
        exchange.failure = None
        exchange.request_bytes = len(request.message) + FRAME_BYTES
        exchange.send_ns = perf_counter_ns()
        try:
            answer = self._infer(request.message, timeout=self.timeout_s)
        except grpc.RpcError as error:
            exchange.end_ns = perf_counter_ns()
            self._fail(exchange, error)
        else:
            exchange.first_byte_ns = exchange.end_ns = perf_counter_ns()
            exchange.status = GRPC_STATUS
            exchange.response_bytes = len(answer) + FRAME_BYTES
            exchange.body = memoryview(answer)
        return exchange

    def _fail(self, exchange: Exchange, error: Any) -> None:
        code = error.code()
        exchange.status = GRPC_STATUS + code.value[0]
        exchange.first_byte_ns = exchange.response_bytes = 0
        exchange.body = memoryview(b"")
        exchange.failure = f"gRPC {code.name}: {' '.join(str(error.details()).split())[:300]}"
        # A server that sheds load and one that is gone answer alike: find out before the next request.
        self._doubtful = code is grpc.StatusCode.UNAVAILABLE

    def _reach(self) -> None:
        """gRPC connects when it likes and says little; a socket says at once whether and why not."""
        try:
            socket.create_connection(self._peer, timeout=self.timeout_s).close()
        except TimeoutError:
            raise ConnectionRefused(f"no connection to {self.address} within {self.timeout_s:g} s") from None
        except OSError as exc:
            raise ConnectionRefused(f"no connection to {self.address}: {exc.strerror or exc}") from None

    def _greet(self) -> None:
        self._reach()
        try:
            self._channel.unary_unary(SERVICE + "ServerLive")(b"", timeout=self.timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionRefused(f"nothing speaks gRPC at {self.address}: {error.details()}") from None


def _tell_gevent() -> None:
    global _gevent_knows  # gRPC's loop is one for the process
    monkey = sys.modules.get("gevent.monkey")
    if not _gevent_knows and monkey is not None and monkey.is_module_patched("socket"):
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()
        _gevent_knows = True
