"""A client over raw sockets that writes whatever a test wants, and the one good request that must still be answered."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

PATH = "/v2/models/openclip_vit_b32/infer"
PIXELS = np.arange(3 * 224 * 224, dtype="<f4")
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
MIB = 2**20


def head(*lines: str, path: str = PATH, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


def golden() -> bytes:
    tensor: dict[str, Any] = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224]}
    tensor["parameters"] = {"binary_data_size": PIXELS.nbytes}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    size = len(header) + PIXELS.nbytes
    return (
        head(f"Content-Length: {size}", f"Inference-Header-Content-Length: {len(header)}") + header + PIXELS.tobytes()
    )


@contextlib.contextmanager
def connected(server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        assert part, f"closed after {received!r}"
        received += part
    text, _, begun = received.partition(b"\r\n\r\n")
    body = bytearray(begun)
    lines = text.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        part = connection.recv(65536)
        assert part
        body += part
    return int(lines[0].split(" ")[1]), headers, bytes(body)


def send_all(connection: socket.socket, data: bytes) -> None:
    """Like a client that writes before it reads; one that was refused may be cut off."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def check_well(server) -> None:
    assert server.process.poll() is None
    with connected(server) as connection:
        connection.sendall(golden())
        status, headers, body = read_answer(connection)
    assert status == 200
    length = int(headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(body[length:], "<f4"), PIXELS[:512])


class UnfinishedCall:
    """A gRPC call that sends all of a message but its end, as fast as the server's windows let it."""

    def __init__(self, port: int, message_bytes: int, method: str = "ModelInfer") -> None:
        self._left = message_bytes - 1
        self._windows = {0: 65535, 1: 65535}
        self.ended = False
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=0.02)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/inference.GRPCInferenceService/{method}",
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(
            bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields.items()
        )
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, 0, 0, b""))
        self._socket.sendall(self._frame(1, 4, 1, block))
        self._received = b""
        self._data = struct.pack(">BI", 0, message_bytes)  # the prefix first, then zeros

    def advance(self) -> None:
        """Send what the windows allow, and read what came."""
        try:
            while not self.ended and self._left > 0 and (room := min(16384, *self._windows.values())) > 0:
                data = (self._data + bytes(min(room, self._left)))[:room]
                self._left -= len(data) - len(self._data)
                self._data = b""
                self._windows = {stream: window - len(data) for stream, window in self._windows.items()}
                self._socket.settimeout(20)
                self._socket.sendall(self._frame(0, 0, 1, data))
            self._socket.settimeout(0.02)
            part = self._socket.recv(65536)
            self.ended = self.ended or not part
            self._received += part
        except TimeoutError:
            return
        except OSError:
            self.ended = True
        self._use_frames()

    def close(self) -> None:
        self._socket.close()

    def _use_frames(self) -> None:
        while len(self._received) >= 9:
            size, kind, flags = int.from_bytes(self._received[:3], "big"), self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big")
            if len(self._received) < 9 + size:
                return
            payload, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            if kind == 8:
                self._windows[stream] += int.from_bytes(payload, "big")
            elif kind == 4 and not flags & 1:
                settings = dict(struct.iter_unpack(">HI", payload))
                self._windows[1] += settings.get(4, 65535) - 65535
                self._socket.sendall(self._frame(4, 1, 0, b""))
            elif kind == 6 and not flags & 1:
                self._socket.sendall(self._frame(6, 1, 0, payload))
            elif kind in (3, 7) or (kind == 1 and flags & 1):
                self.ended = True

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
