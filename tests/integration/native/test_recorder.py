"""`abserve record` before real servers, and servers that record themselves: unmodified clients notice nothing, and what
they sent is in the folder."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.again import again
from tests.integration.native.conftest import Server, Start, wait_until
from tests.integration.native.raw_client import MIB, read_answer
from tests.integration.native.test_held_memory import row_request
from tests.integration.native.test_processes import Client
from tests.recording import RecorderProcess, recorder

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(params=["before", "itself"])
def recording(
    request: pytest.FixtureRequest, open_controlled: Server, controlled: Start, tmp_path: Path
) -> Iterator[RecorderProcess]:
    """A recorder before the server, or another server that records itself, with two front ends."""
    if request.param == "itself":
        yield recording_itself(controlled, tmp_path / "traffic")
        return
    to = f"http://{open_controlled.address}"
    with recorder(tmp_path / "traffic", "--answers", to=to, grpc_to=open_controlled.grpc_address) as running:
        yield running


def recording_itself(controlled: Start, folder: Path, *options: str) -> RecorderProcess:
    """A server that records itself."""
    server = controlled(
        *("--record", str(folder), "--record-answers", "true", "--fronts", "2", "--max-queue-delay-us", "0", *options),
        grpc=True,
    )
    server.open("load", "infer")
    server.wait_ready(2)
    wait_until((folder / "traffic.json").exists, "the recording has begun")
    return RecorderProcess(server.process, folder, [server.port, server.grpc_port])


def through(recording: RecorderProcess, server: Server) -> Server:
    """The server as clients of the recorder see it."""
    return Server(server.process, recording.ports[0], server.folder, recording.ports[-1])


def item(client: object) -> object:
    made = client.InferInput("x", [2, 4], "FP32")  # type: ignore[attr-defined]
    made.set_data_from_numpy(ROWS)
    return made


def test_tritonclient_over_http(recording: RecorderProcess, open_controlled: Server) -> None:
    with triton_http.InferenceServerClient(through(recording, open_controlled).address) as client:
        assert client.is_server_ready()
        answers = [client.infer("rows", [item(triton_http)], model_version="1") for _ in range(3)]
    with triton_http.InferenceServerClient(open_controlled.address) as client:
        np.testing.assert_array_equal(
            answers[0].as_numpy("y"), client.infer("rows", [item(triton_http)]).as_numpy("y")
        )  # fmt: skip
    read = recording.end()
    assert [(each.transport, each.model, each.version, each.status) for each in read.requests] == [
        ("http", "rows", "1", 200)
    ] * 3
    assert [tensor.shape for tensor in read.requests[0].tensors] == [(2, 4)]
    assert ROWS.tobytes() in (read.content(read.requests[0]) or b"")
    assert all(0 <= each.at_ns <= (each.first_byte_ns or 0) <= (each.end_ns or 0) for each in read.requests)


def test_tritonclient_over_grpc_calls_and_streams(recording: RecorderProcess, open_controlled: Server) -> None:
    answered: list[object] = []
    done = threading.Semaphore(0)

    def take(result: object, error: object) -> None:
        answered.append(error or result)
        done.release()

    with triton_grpc.InferenceServerClient(through(recording, open_controlled).grpc_address) as client:
        assert client.is_server_ready()
        once = client.infer("rows", [item(triton_grpc)], compression_algorithm="gzip").as_numpy("y")
        client.start_stream(take)
        for _ in range(2):
            client.async_stream_infer("rows", [item(triton_grpc)])
        assert all(done.acquire(timeout=60) for _ in range(2))
        client.stop_stream()
    read = recording.end()
    methods = [each.route.rpartition("/")[2] for each in read.requests]
    assert methods == ["ModelInfer", "ModelStreamInfer", "ModelStreamInfer"]
    assert once is not None
    assert {(each.transport, each.model, each.tensors[0].shape, each.status) for each in read.requests} == {
        ("grpc", "rows", (2, 4), 0)
    }
    contents = [read.content(each) or b"" for each in read.requests]
    assert all(ROWS.tobytes() in content for content in contents)
    assert all(read.answer(each) for each in read.requests)


def test_curl_and_routes_that_are_not_recorded(recording: RecorderProcess, open_controlled: Server) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})

    def curl(server: Server, *arguments: str) -> bytes:
        *options, path = arguments
        command = ["curl", "-s", "-m", "60", "-w", "%{http_code}", *options, f"http://{server.address}{path}"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=100)
        return re.sub(rb"(?im)^date: .*", b"", done.stdout)  # the second may be another one

    before, behind = through(recording, open_controlled), open_controlled
    secrets = ("-H", "Authorization: Bearer hidden", "-b", "session=hidden")
    infer = (*secrets, "-H", "Expect: 100-continue", "-d", body, "/v2/models/rows/infer?key=hidden")
    for call in (
        infer,
        ("/v2",),
        ("-I", "/v2/health/live"),
        ("-X", "DELETE", "/nowhere"),
        ("-d", "{}", "/v2/models/no/infer"),
    ):
        assert curl(before, *call) == curl(behind, *call)
    read = recording.end()
    assert [(each.model, each.status) for each in read.requests] == [("rows", 200), ("no", 404)]
    stored = b"".join(path.read_bytes() for path in recording.folder.rglob("*") if path.is_file())
    assert b"hidden" not in stored
    assert not re.search(rf"(?<!\d){open_controlled.port}(?!\d)".encode(), stored)  # times may have its digits


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer(recording, open_controlled, perf_analyzer, protocol):
    server = through(recording, open_controlled)
    perf_analyzer.run(
        *("-m", "rows", "-i", protocol, "--concurrency-range", "2"),
        *("-u", server.address if protocol == "http" else server.grpc_address),
        *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"),
    )
    read = recording.end()
    assert len(read.requests) >= 50
    assert {(each.transport, each.model) for each in read.requests} == {(protocol, "rows")}


def test_a_killed_recorder_leaves_what_it_had_seen(recording: RecorderProcess, open_controlled: Server) -> None:
    server = through(recording, open_controlled)
    for _ in range(5):
        assert server.infer([1.0, 2.0, 3.0, 4.0]).status == 200
    wait_until(lambda: len(recording.read().requests) == 5, "the requests are on the disk while it records")
    recording.process.kill()
    recording.process.wait(60)
    read = recording.read()
    assert len(read.requests) == 5
    assert all(read.content(each) for each in read.requests)


@again
def test_a_recorder_that_is_killed_under_load_has_lost_a_second_at_most(
    open_controlled: Server, tmp_path: Path
) -> None:
    """What was answered a second before the kill is there."""
    with recorder(tmp_path / "traffic", to=f"http://{open_controlled.address}") as recording:
        server, answered_at = through(recording, open_controlled), list[float]()
        while not answered_at or answered_at[-1] - answered_at[0] < 2.5:
            assert server.infer([1.0, 2.0, 3.0, 4.0]).status == 200
            answered_at.append(monotonic())
        recording.process.kill()
        recording.process.wait(60)
        read = recording.read()
    assert len(read.requests) >= sum(at < answered_at[-1] - 1.0 for at in answered_at)
    assert all(read.content(each) for each in read.requests)


def failing(folder: Path) -> None:
    shutil.rmtree(folder)


def hanging(folder: Path) -> None:
    for stretch in range(30):  # nobody reads them, so that opening one to write never ends
        os.mkfifo(folder / f"requests/{stretch:06}.jsonl")


@pytest.mark.parametrize("spoil", [failing, hanging])
def test_a_recorder_that_fails_or_hangs_harms_no_traffic(
    recording: RecorderProcess, open_controlled: Server, spoil: Callable[[Path], None]
) -> None:
    server = through(recording, open_controlled)
    spoil(recording.folder)
    for _ in range(20):
        assert server.infer([1.0, 2.0, 3.0, 4.0]).status == 200
    recording.process.terminate()
    assert recording.process.wait(60) == (1 if recording.process.stdout else 0)  # the recorder's, or the server's


def test_a_server_counts_what_its_dead_recorder_misses(controlled: Start, tmp_path: Path) -> None:
    running = recording_itself(controlled, tmp_path / "traffic")
    server = Server(running.process, running.ports[0], tmp_path)
    counted = "abserve_native_unrecorded_bytes_total"
    assert server.metric(counted) == 0
    (own,) = (each for each in server.processes if "record" in each.cmdline())
    own.kill()

    def misses() -> bool:
        assert server.infer([1.0, 2.0, 3.0, 4.0]).status == 200
        return server.metric(counted) > 0

    wait_until(misses, "it counts")
    assert "not recorded any more" in (tmp_path / f"log-{server.port}").read_text()


def test_a_connection_of_which_bytes_are_missing_is_recorded_again(controlled: Start, tmp_path: Path) -> None:
    """The recorder hangs until no more bytes may wait for it; the server answers all the same."""
    (tmp_path / "wide").touch()
    running = recording_itself(controlled, tmp_path / "traffic", "--fronts", "0")
    server = Server(running.process, running.ports[0], tmp_path)
    (own,) = (each for each in server.processes if "record" in each.cmdline())
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:

        def ask(values: int) -> None:
            client.sendall(row_request(values))
            assert read_answer(client)[0] == 200

        ask(4)
        own.suspend()

        def misses() -> bool:
            ask(MIB)
            return server.metric("abserve_native_unrecorded_bytes_total") > 0

        wait_until(misses, "bytes are missing")
        own.resume()

        def is_recorded() -> bool:
            ask(8)
            return any(each.tensors[0].shape == (1, 8) for each in running.read().requests)

        wait_until(is_recorded, "it is recorded again")
    read = running.end()
    assert read.requests[0].tensors[0].shape == (1, 4)
    assert {each.status for each in read.requests} == {200}
    assert all(len(read.content(each) or b"") == each.content_bytes for each in read.requests)


def test_two_front_ends_and_one_that_died_are_in_one_recording(controlled: Start, tmp_path: Path) -> None:
    """Connections at once are spread over both; requests are in the order of their arrival."""
    running = recording_itself(controlled, tmp_path / "traffic", "--record-requests", "60")
    server = Server(running.process, running.ports[0], tmp_path)
    supervisor = server.processes[0]

    def ask(count: int) -> None:
        connections = [server.connect() for _ in range(4)]
        for connection in connections:
            connection.connect()
        for number in range(count):
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [number, 2, 3, 4]}]}
            connection = connections[number % 4]
            connection.request("POST", "/v2/models/rows/infer", json.dumps(body))
            assert connection.getresponse().read()
        for connection in connections:
            connection.close()

    def all_are_recorded(count: int) -> None:
        wait_until(lambda: len(running.read().requests) == count, "all are recorded")

    ask(20)
    all_are_recorded(20)
    before, client = supervisor.children(), Client(server)
    client.process.kill()
    wait_until(lambda: len(set(supervisor.children()) - {client.process}) == len(before), "another one has begun")
    client.close()
    server.wait_ready(2)
    ask(20)
    all_are_recorded(40)
    ask(20)
    all_are_recorded(60)
    ask(1)
    wait_until(lambda: running.read().recording.ended is not None, "the recording ends by itself")
    ask(1)
    read = running.end()
    numbers = [json.loads(read.content(each) or b"")["inputs"][0]["data"][0] for each in read.requests]
    assert numbers == [*range(20), *range(20), *range(20)]
    assert all(each.at_ns <= (each.first_byte_ns or 0) <= (each.end_ns or 0) for each in read.requests)


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with each connection, one after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(60)
                        serve(connection)
            except OSError:  # the test is over
                return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def test_a_stream_passes_as_it_comes(tmp_path: Path) -> None:
    """The server sends the second event only when the client has the first one."""
    has_first = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        assert has_first.wait(60)
        connection.sendall(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    with listening(serve) as url, recorder(tmp_path / "traffic", to=url) as running:
        with socket.create_connection(("127.0.0.1", running.ports[0]), timeout=60) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            received = b""
            while b"data: 1" not in received:
                received += client.recv(65536)
            has_first.set()
            while data := client.recv(65536):
                received += data
        (request,) = running.end().requests
    assert received.endswith(b"0\r\n\r\n")
    assert (request.answer_bytes, request.end_ns is not None) == (18, True)


def test_any_bytes_pass_both_ways_and_a_half_closed_connection_is_one(tmp_path: Path) -> None:
    """The server answers with the same bytes after the client has closed its half."""
    data = random.Random(0).randbytes(5_000_000)

    def serve(connection: socket.socket) -> None:
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
        connection.sendall(received)

    with listening(serve) as url, recorder(tmp_path / "traffic", to=url) as running:
        with socket.create_connection(("127.0.0.1", running.ports[0]), timeout=60) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            received = bytearray()
            while piece := client.recv(65536):
                received += piece
        assert bytes(received) == data
        assert running.end().requests == ()


def test_a_server_that_refuses_or_breaks_off_is_seen_by_the_client(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        recorder(tmp_path / "refused", to=url) as running,
        socket.create_connection(("127.0.0.1", running.ports[0])) as client,
    ):
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

    with listening(serve) as url, recorder(tmp_path / "half", to=url) as running:
        with socket.create_connection(("127.0.0.1", running.ports[0]), timeout=60) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            received = b""
            while data := client.recv(65536):
                received += data
        (request,) = running.end().requests
    assert received.endswith(b"half")
    assert (request.status, request.end_ns) == (200, None)


@pytest.mark.parametrize(
    "options",
    [
        ["--out", "OUT"], ["--to", "http://127.0.0.1:1/v1", "--out", "OUT"], ["--to", "ftp://x", "--out", "OUT"],
        ["--to", "http://127.0.0.1:1", "--listen", "9000", "--out", "OUT"],
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: list[str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from loadgen.entry import build

    given = [str(tmp_path / "traffic") if option == "OUT" else option for option in options]
    assert CliRunner().invoke(build(), ["record", *given]).exit_code == 2
    assert not (tmp_path / "traffic").exists()
