"""Real native servers of language models in processes of their own, on free ports."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.native.conftest import Server, _starter, _stop

GATED = Path(__file__).with_name("gated_server.py")

StartGated = Callable[..., Server]


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[StartGated]:
    """Starts servers whose scripted engine waits for gates (see gated_server.py)."""
    servers: list[Server] = []
    yield _starter(tmp_path, lambda port: [str(GATED), str(port), str(tmp_path)], servers, "--model", "language:demo")
    _stop(servers)


@pytest.fixture(scope="module", params=["0", "2"], ids=["one process", "two front ends"])
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One ready server of the scripted engine for all tests of a module, as one process and as several."""
    servers: list[Server] = []
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "load").touch()
    start = _starter(folder, lambda port: [str(GATED), str(port), str(folder)], servers, "--model", "language:demo")
    server = start("--fronts", request.param, grpc=True)
    server.wait_ready()
    yield server
    _stop(servers)


def post(server: Server, path: str, document: object) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    answer = server.request("POST", path, json.dumps(document).encode(), {"Content-Type": "application/json"})
    return answer.status, json.loads(answer.body)


@dataclass
class EventStream:
    """A streamed answer, read from the socket as a client does."""

    server: Server
    path: str
    document: dict[str, Any]
    version: str = "1.1"
    head: bytes = b""
    _received: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> EventStream:
        self.socket = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        body = json.dumps(self.document).encode()
        lines = f"POST {self.path} HTTP/{self.version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(lines.encode() + body)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read_until(self, ending: bytes) -> bytes:
        """All that has come until these bytes, or the end."""
        while ending not in self._received:
            data = self.socket.recv(65536)
            if not data:
                break
            self._received += data
        return bytes(self._received)

    def read_head(self) -> int:
        """The status."""
        self.head, _, rest = self.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")
        self._received = bytearray(rest)
        return int(self.head.split()[1])

    def payload(self, ending: bytes = b"0\r\n\r\n") -> bytes:
        """The content of all chunks; fails if one is not as long as it says."""
        data, content = self.read_until(ending), b""
        while data:
            size, _, data = data.partition(b"\r\n")
            content, rest = content + data[: int(size, 16)], data[int(size, 16) :]
            assert rest.startswith(b"\r\n")
            data = rest[2:]
        return content

    def events(self) -> list[Any]:
        """The documents of all events; "[DONE]" as text."""
        return events_of(self.payload())


def events_of(content: bytes) -> list[Any]:
    assert content.endswith(b"\n\n")
    parts = [part for part in content.split(b"\n\n")[:-1] if part != b":"]  # which is a comment
    events = [part.removeprefix(b"data: ") for part in parts]
    return ["[DONE]" if event == b"[DONE]" else json.loads(event) for event in events]
