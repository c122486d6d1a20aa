"""A client over raw sockets that writes whatever a test wants, and the one good request that must still be answered."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import numpy as np

PATH = "/v2/models/openclip_vit_b32/infer"
PIXELS = np.arange(3 * 224 * 224, dtype="<f4")
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
MIB = 2**20


def head(*lines: str, path: str = PATH, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode("latin-1")


def golden() -> bytes:
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224]}
    tensor["parameters"] = {"binary_data_size": PIXELS.nbytes}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    size = len(header) + PIXELS.nbytes
    return (
        head(f"Content-Length: {size}", f"Inference-Header-Content-Length: {len(header)}") + header + PIXELS.tobytes()
    )


@contextlib.contextmanager
def connected(server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        yield connection


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        assert part, f"closed after {received!r}"
        received += part
    text, _, body = received.partition(b"\r\n\r\n")
    lines = text.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    while len(body) < int(headers["content-length"]):
        part = connection.recv(65536)
        assert part
        body += part
    return int(lines[0].split(" ")[1]), headers, body


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
