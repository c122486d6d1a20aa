"""Real native servers in processes of their own, on free ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from loadgen.launch.embedded import PortReservation, port_range
from servers.native.shared.settings import NativeSettings

CONTROLLED = Path(__file__).with_name("controlled_server.py")
FRONTS = NativeSettings().fronts or 0
"""Front-end processes of the servers, from the environment; 0: each server is one process."""
ECHO = Path(__file__).with_name("echo_server.py")
RUNNER = "tests.integration.native.runner_server"


_PORTS = deque[PortReservation](maxlen=60)
_CANDIDATES = 200


def free_ports(count: int) -> tuple[int, ...]:
    """Ports for servers that start later: no outgoing connection gets one of them, and no other test for a while."""
    if len(_PORTS) == _PORTS.maxlen:
        _PORTS.popleft().release()
    first = random.SystemRandom().choice(port_range()[:-_CANDIDATES])
    _PORTS.append(PortReservation(count, range(first, first + _CANDIDATES)))
    return _PORTS[-1].ports


def free_port() -> int:
    return free_ports(1)[0]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.005)


def status_of(caught: pytest.ExceptionInfo[InferenceServerException]) -> str:
    return caught.value.status().removeprefix("StatusCode.")


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """One server process; `folder` holds a controlled server's gates."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    grpc_port: int = 0
    tls: ssl.SSLContext | None = None
    """Of clients, where the server has been started with TLS."""

    @property
    def processes(self) -> list[psutil.Process]:
        """The process that was started, and those that it has started."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    @property
    def memory_bytes(self) -> int:
        """The memory of all its processes; what several share counts once."""
        return sum(process.memory_full_info().pss for process in self.processes)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def connect(self) -> http.client.HTTPConnection:
        """A client that connects with its first request."""
        if self.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, answer_headers, response.read())
        finally:
            connection.close()

    def status(self, path: str) -> int | None:
        """The status of a GET; None while nobody answers."""
        try:
            return self.request("GET", path).status
        except OSError:
            return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what)

    def infer(self, *rows: list[float]) -> Answer:
        """Send rows to a controlled server's model as JSON."""
        data = [value for row in rows for value in row]
        tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), 4], "data": data}
        return self.request("POST", "/v2/models/rows/infer", json.dumps({"inputs": [tensor]}).encode())

    def model_stats(self) -> dict[str, Any]:
        """The one model's statistics."""
        return json.loads(self.request("GET", "/v2/models/stats").body)["model_stats"][0]

    def metric(self, line_start: str) -> float:
        """The value of the first metric whose line begins so."""
        text = self.request("GET", "/metrics").body.decode()
        return float(next(line for line in text.splitlines() if line.startswith(line_start)).rpartition(" ")[2])

    def open(self, *gates: str) -> None:
        for gate in gates:
            (self.folder / gate).touch()

    def wait_live(self) -> None:
        wait_until(lambda: self.process.poll() is not None or self.status("/v2/health/live") == 200, "live")
        assert self.process.poll() is None, "the server has exited"

    def wait_ready(self, fronts: int = FRONTS) -> None:
        """Wait until every front end knows that the models are ready: connections at once are spread over all."""
        self.wait_live()

        def ready() -> bool:
            with contextlib.ExitStack() as stack:
                for _ in range(2 * fronts or 1):
                    connection = self.connect()
                    stack.callback(connection.close)
                    connection.request("GET", "/v2/health/ready")
                    response = connection.getresponse()
                    response.read()
                    if response.status != 200:
                        return False
            return True

        wait_until(ready, "ready")


Start = Callable[..., Server]


def _starter(folder: Path, argv: Callable[[int], list[str]], servers: list[Server], *usual: str) -> Start:
    """Starts processes that get their settings, here written as options, as one JSON argument after `argv`."""

    def start(*options: str, port: int | None = None, grpc: bool = False, ulimit: str = "") -> Server:
        port = port or free_port()
        grpc_port = free_port() if grpc else 0
        options = (*usual, *options)
        pairs = zip(options[::2], options[1::2], strict=True)
        settings = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
        command = [sys.executable, *argv(port), json.dumps({"http_port": port, "grpc_port": grpc_port, **settings})]
        if ulimit:
            command = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh", *command]
        with (folder / f"log-{port}").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
        server = Server(process, port, folder, grpc_port)
        servers.append(server)
        return server

    return start


def _stop(servers: list[Server]) -> None:
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(60)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Start]:
    """Starts servers whose engine waits for the gates `load` and `infer` (see controlled_server.py)."""
    servers: list[Server] = []
    yield _starter(tmp_path, lambda port: [str(CONTROLLED), str(port), str(tmp_path)], servers)
    _stop(servers)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Start]:
    """Starts servers whose engine is driven as one on a GPU is (see runner_server.py); its gate is `infer`."""
    servers: list[Server] = []
    yield _starter(tmp_path, lambda port: ["-m", RUNNER, str(port), str(tmp_path)], servers)
    _stop(servers)


@pytest.fixture(scope="module")
def open_controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One ready controlled server with HTTP and gRPC for all tests of a module; its gates are open."""
    servers: list[Server] = []
    folder = tmp_path_factory.mktemp("controlled")
    start = _starter(folder, lambda port: [str(CONTROLLED), str(port), str(folder)], servers)
    server = start("--max-queue-delay-us", "0", grpc=True)
    server.open("load", "infer")
    server.wait_ready()
    yield server
    _stop(servers)


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Start]:
    """Starts the real process, `python -m servers.native`, with the null engine."""
    servers: list[Server] = []
    yield _starter(tmp_path, lambda _: ["-m", "servers.native"], servers, "--engine", "null")
    _stop(servers)


@pytest.fixture(scope="module")
def null_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One ready native server with the null engine for all tests of a module that do not harm it."""
    servers: list[Server] = []
    folder = tmp_path_factory.mktemp("null")
    start = _starter(folder, lambda _: ["-m", "servers.native"], servers, "--engine", "null")
    server = start()
    server.wait_ready()
    yield server
    _stop(servers)


@pytest.fixture(scope="module")
def native_starter() -> Iterator[Callable[..., Server]]:
    """Starts ready native servers with HTTP and gRPC, with whatever options, for all tests of a module."""
    servers: list[Server] = []

    def start(folder: Path, *options: str) -> Server:
        begin = _starter(folder, lambda _: ["-m", "servers.native"], servers)
        server = begin(*options, grpc=True)
        server.wait_ready()
        return server

    yield start
    _stop(servers)


@pytest.fixture(scope="module", params=["none", "4,8"])
def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server whose model answers every datatype (see echo_server.py), without and with sizes to pad to.

    Its long delay makes requests that are sent together one batch.
    """
    servers: list[Server] = []
    start = _starter(tmp_path_factory.mktemp("echo"), lambda port: [str(ECHO), str(port)], servers)
    options = ("--allow-shared-memory", "true", "--max-queue-delay-us", "50000", "--pad-to", request.param)
    server = start(*options, grpc=True)
    server.wait_ready()
    yield server
    _stop(servers)


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory, native_starter: Callable[..., Server]) -> Server:
    """One ready native server with the null engine, HTTP and gRPC, and everything allowed that is off by default."""
    return native_starter(
        tmp_path_factory.mktemp("open"),
        *("--engine", "null", "--allow-shared-memory", "true", "--allow-model-control", "true"),
    )
