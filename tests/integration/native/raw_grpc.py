"""A gRPC client that writes whatever HTTP/2 frames a test wants, and reads what comes back."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from hpack import Decoder, Encoder
from tritonclient.grpc import service_pb2

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST_WINDOW = 2**31 - 1


def frame(kind: int, flags: int = 0, stream: int = 0, content: bytes = b"", length: int | None = None) -> bytes:
    """A frame, whose head may lie about its length."""
    size = len(content) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def settings(**values: int) -> bytes:
    numbers = {"table": 1, "push": 2, "window": 4, "frame": 5}
    return frame(SETTINGS, content=b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items()))


def block(call: str = "ModelInfer", more: Iterable[tuple[str, str]] = (), **pseudo: str) -> bytes:
    """A header block without dynamic table entries. An argument replaces a pseudo-header; "" leaves it out."""
    fields = {"method": "POST", "scheme": "http", "path": f"/inference.GRPCInferenceService/{call}", "authority": "x"}
    named = [(f":{name}", value) for name, value in (fields | pseudo).items() if value]
    usual = [("te", "trailers"), ("content-type", "application/grpc")]
    given = dict(more)
    all_fields = [*named, *((name, given.pop(name, value)) for name, value in usual), *given.items()]
    return Encoder().encode([(name, value, True) for name, value in all_fields], huffman=False)


def prefixed(message: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


def rows_message(values: list[float], **changes: str) -> bytes:
    """One row for a controlled server's model, as a ModelInferRequest with a raw input."""
    raw = np.array(values, "<f4").tobytes()
    request = service_pb2.ModelInferRequest(model_name="rows", raw_input_contents=[raw], **changes)
    request.inputs.add(name="x", datatype="FP32", shape=[1, len(values)])
    serialised: bytes = request.SerializeToString()
    return serialised


@dataclass
class Answer:
    """What came back on a call."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int | None:
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None

    @property
    def rows(self) -> list[float]:
        """The first output of the only message."""
        assert self.status == 0, self
        assert self.data[0] == 0
        assert int.from_bytes(self.data[1:5], "big") == len(self.data) - 5
        response = service_pb2.ModelInferResponse.FromString(self.data[5:])
        return np.frombuffer(response.raw_output_contents[0], "<f4").tolist()


class RawGrpc:
    """A connection. `window` is that of its answers; they are acknowledged only by `widen`."""

    def __init__(self, port: int, *, greet: bool = True, window: int = 65535, timeout_s: float = 20) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.answers: dict[int, Answer] = {}
        self.settings: dict[int, int] = {}
        self.windows: dict[int, int] = {0: 65535}
        self.pings: list[bytes] = []
        self.goaway: int | None = None
        self.closed = False
        self._received = b""
        self._decoder = Decoder()
        if greet:
            self.send(PREFACE + settings(window=window))

    def __enter__(self) -> RawGrpc:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        """Send, or notice that the server has closed."""
        try:
            self.socket.sendall(b"".join(frames))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def open(self, stream: int, method: str = "ModelInfer") -> None:
        self.send(frame(HEADERS, END_HEADERS, stream, block(method)))

    def call(self, stream: int, message: bytes, method: str = "ModelInfer") -> Answer:
        """A whole unary call."""
        self.open(stream, method)
        self.send(frame(DATA, END_STREAM, stream, prefixed(message)))
        return self.answer(stream)

    def widen(self, stream: int, increment: int) -> None:
        self.send(frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big")))

    def answer(self, stream: int) -> Answer:
        """The call's answer, once it has ended."""
        answer = self.answers.setdefault(stream, Answer())
        while not (answer.ended or answer.reset is not None or self.closed):
            self.read()
        return answer

    def read_until_closed(self) -> None:
        while not self.closed:
            self.read()

    def read(self) -> None:
        """Read once, and use the whole frames. Raises `TimeoutError`."""
        try:
            part = self.socket.recv(65536)
        except ConnectionResetError:
            part = b""
        self.closed = not part
        self._received += part
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big")
            content, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._take(kind, flags, stream, content)

    def _take(self, kind: int, flags: int, stream: int, content: bytes) -> None:
        answer = self.answers.setdefault(stream, Answer())
        if kind == HEADERS:
            assert flags & END_HEADERS
            answer.headers |= {str(name): str(value) for name, value in self._decoder.decode(content)}
        elif kind == DATA:
            answer.data += content
        elif kind == RST_STREAM:
            answer.reset = int.from_bytes(content, "big")
        elif kind == SETTINGS and not flags & ACK:
            self.settings = dict(struct.iter_unpack(">HI", content))
            self.send(frame(SETTINGS, ACK))
        elif kind == PING and flags & ACK:
            self.pings.append(content)
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(content[4:8], "big")
        elif kind == WINDOW_UPDATE:
            self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(content, "big")
        if kind in (HEADERS, DATA) and flags & END_STREAM:
            answer.ended = True
