"""Small servers on real sockets, `abserve shadow` in a process between two of them, and clients of it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from loadgen.client.grpc_messages import ModelInferRequest, ModelInferResponse
from loadgen.verdict.result import Result, stored_result

INFER = "/v2/models/m/infer"


class Handler(BaseHTTPRequestHandler):
    """Answers with the body that it got, or as its server's `answers` says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SmallServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.got.append((self.path, dict(self.headers), body))
        self.server.came.release()
        self.server.answers(self, body)

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


Answers = Callable[[Handler, bytes], None]


class SmallServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, answers: Answers) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.came, self.over = threading.Semaphore(0), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """The other side has closed the connection."""


@contextmanager
def serving(answers: Answers) -> Iterator[SmallServer]:
    with SmallServer(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join(60)


@dataclass
class Shadowing:
    """The command, running."""

    process: subprocess.Popen[str]
    ports: list[int]
    folder: Path

    @property
    def port(self) -> int:
        return self.ports[0]

    def end(self) -> Result:
        """Stop it; what it has found."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, errors
        return stored_result(self.folder)


@contextmanager
def shadowing(
    primary: str | None, candidate: str | None, folder: Path, *options: str, grpc: tuple[str, str] | None = None
) -> Iterator[Shadowing]:
    """The command between servers over HTTP, at the addresses `grpc`, or both."""
    given = [] if primary is None else [f"--primary={primary}", f"--candidate={candidate}", "--listen=127.0.0.1:0"]
    if grpc is not None:
        given += [f"--primary-grpc={grpc[0]}", f"--candidate-grpc={grpc[1]}", "--grpc-listen=127.0.0.1:0"]
    command = [sys.executable, "-m", "loadgen.entry", "shadow", *given, "--share", "1", *options, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    running = Shadowing(process, [], folder)
    try:
        for _ in range((primary is not None) + (grpc is not None)):
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            running.ports.append(int(line.split(" ")[0].rpartition(":")[2]))
        yield running
    finally:
        process.kill()
        process.communicate()


def echo(handler: Handler, body: bytes) -> None:
    handler.send(body)


def hang(handler: Handler, _: bytes) -> None:
    handler.server.over.wait(100)


def die(handler: Handler, _: bytes) -> None:
    handler.close_connection = True


def answer_500(handler: Handler, _: bytes) -> None:
    handler.send(b"broken", 500)


def speak_nonsense(handler: Handler, _: bytes) -> None:
    handler.wfile.write(b"nonsense\r\n\r\n")


def flood_of(piece: bytes) -> Answers:
    def flood(handler: Handler, _: bytes) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not handler.server.over.is_set():
            handler.wfile.write(piece)

    return flood


flood_bytes = flood_of(b"10000\r\n" + bytes(2**16) + b"\r\n")
flood_chunks = flood_of(b"1\r\nx\r\n" * 10_000)


def ask(port: int, bodies: list[bytes], path: str = INFER) -> list[tuple[int, bytes]]:
    """The answers to these requests, one after another on one connection."""
    answers = []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=100)) as connection:
        for body in bodies:
            connection.request("POST", path, body, {"Authorization": "Bearer t"})
            with connection.getresponse() as response:
                answers.append((response.status, response.read()))
    return answers


def tensor_request(values: list[float]) -> bytes:
    """A request to a model, with its values in JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


def doubling(delay_s: float = 0.0, wrong: Callable[[list[float]], bool] = lambda _: False) -> Answers:
    """A model that answers with twice its input after a while, to some inputs with something else."""

    def answer(handler: Handler, body: bytes) -> None:
        (tensor,) = json.loads(body)["inputs"]
        handler.server.over.wait(delay_s)
        values = [2.0 * value + 1000.0 * wrong(tensor["data"]) for value in tensor["data"]]
        handler.send(json.dumps({"outputs": [{**tensor, "name": "y", "data": values}]}).encode())

    return answer


@contextmanager
def serving_grpc(
    wrong: Callable[[np.ndarray], bool] = lambda _: False,
    compression: grpc.Compression | None = None,
    factor: int = 2,
) -> Iterator[str]:
    """The address of a model over gRPC that answers with so many times its input, to some inputs with another."""

    def infer(request: Any, _: grpc.ServicerContext) -> Any:
        x = np.frombuffer(request.raw_input_contents[0], "<f4")
        response = ModelInferResponse(model_name="m", raw_output_contents=[(factor * x + 1000 * wrong(x)).tobytes()])
        response.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
        return response

    method = grpc.unary_unary_rpc_method_handler(
        infer, ModelInferRequest.FromString, lambda response: response.SerializeToString()
    )
    handler = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method})
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, handlers=(handler,), compression=compression)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield address
        finally:
            server.stop(None).wait()
