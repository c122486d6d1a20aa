"""`abserve shadow` before real sockets: clients get the primary's answers, whatever the candidate does."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMAND = "import typer; from loadgen.cli.shadow import shadow; typer.run(shadow)"
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
    port: int
    folder: Path
    said: str = field(default="", init=False)

    def end(self) -> str:
        """Stop it; what it has said."""
        self.process.terminate()
        self.said, errors = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, errors
        return self.said


@contextmanager
def shadowing(primary: str, candidate: str, folder: Path, *options: str) -> Iterator[Shadowing]:
    command = [sys.executable, "-c", COMMAND, "--primary", primary, "--candidate", candidate, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--share", "1", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        yield Shadowing(process, int(line.split(" ")[0].rpartition(":")[2]), folder)
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    answers = []
    for body in bodies:
        connection.request("POST", path, body, {"Authorization": "Bearer t"})
        response = connection.getresponse()
        answers.append((response.status, response.read()))
    connection.close()
    return answers


@pytest.mark.parametrize(
    "candidate", [echo, hang, die, answer_500, speak_nonsense, flood_bytes, flood_chunks, None],
    ids=["echoes", "hangs", "dies", "500", "nonsense", "floods", "floods in chunks", "refuses"],
)  # fmt: skip
def test_clients_get_the_answers_of_the_primary_whatever_the_candidate_does(
    candidate: Answers | None, tmp_path: Path
) -> None:
    with serving(echo) as primary, serving(candidate or echo) as second:
        if candidate is None:
            second.socket.close()
        with shadowing(primary.url, second.url, tmp_path) as running, ThreadPoolExecutor(4) as clients:
            bodies = [[b"%d-%d" % (user, turn) * 50 for turn in range(100)] for user in range(4)]
            answers = list(clients.map(ask, [running.port] * 4, bodies))
            assert answers == [[(200, body) for body in of_user] for of_user in bodies]
            running.end()
    assert len(primary.got) == 400


def test_the_candidate_gets_the_requests_to_models_and_no_others(tmp_path: Path) -> None:
    big = bytes(range(256)) * 4096
    with serving(echo) as primary, serving(echo) as second, shadowing(primary.url, second.url, tmp_path) as running:
        asked = [(INFER + "?key=1", b"small"), (INFER, big), ("/v2/models/m/load", b"x"), ("/v1/completions", b"{}")]
        for path, body in asked:
            assert ask(running.port, [body], path) == [(200, body)]
        assert all(second.came.acquire(timeout=100) for _ in range(3))
        running.end()
    copied = sorted((path, body) for path, _, body in second.got)
    assert copied == sorted((path, body) for path, body in asked if "load" not in path)
    headers = second.got[0][1]
    assert (headers["Authorization"], headers["Host"]) == ("Bearer t", second.url.removeprefix("http://"))
