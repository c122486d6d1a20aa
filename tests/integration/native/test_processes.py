"""A server of several processes: each may be killed, what they share is shared, and none outlives the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.again import again
from tests.integration.native.conftest import Server, wait_until
from tests.integration.native.raw_client import MIB, is_closed, read_answer
from tests.integration.native.test_held_memory import PENDING, row_request

FRONT_ENDS = 2
MODEL_PATH = "/v2/models/openclip_vit_b32/infer"
IMAGE_BYTES = 3 * 224 * 224 * 4


class Client:
    """One connection, and the process that serves it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._http.connect()
        self.socket = self._http.sock
        self._port = self.socket.getsockname()[1]
        assert self.send("GET", "/v2/health/live") == (200, b"")
        self.process = self._owner()

    def _owner(self) -> psutil.Process:
        for process in front_ends(self._server):
            if any(
                connection.raddr and connection.raddr.port == self._port
                for connection in process.net_connections("tcp")
            ):
                return process
        raise AssertionError("no front end has the connection")

    def send(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        self._http.request(method, path, body)
        response = self._http.getresponse()
        return response.status, response.read()

    def infer(self) -> int:
        self.socket.sendall(row_request(4))
        return read_answer(self.socket)[0]

    def metric(self, line_start: str) -> float:
        lines = self.send("GET", "/metrics")[1].decode().splitlines()
        return float(next(line for line in lines if line.startswith(line_start)).rpartition(" ")[2])

    def close(self) -> None:
        self._http.close()


def engine(server: Server) -> psutil.Process:
    return min(psutil.Process(server.process.pid).children(), key=lambda child: child.pid)


def front_ends(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if child.pid != min(child.pid for child in children)]


def established(process: psutil.Process, port: int) -> bool:
    """Whether the process has a connection of a client, open or half closed."""
    return any(connection.laddr.port == port and connection.raddr for connection in process.net_connections("tcp"))


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def all_ended(processes: list[psutil.Process]) -> bool:
    def ended(process: psutil.Process) -> bool:
        try:
            return has_ended(process)
        except psutil.NoSuchProcess:
            return True

    return all(map(ended, processes))


@pytest.fixture
def clients() -> Iterator[Callable[[Server, psutil.Process], Client]]:
    """Opens connections until a front end has one; those that another one got are closed then."""
    opened: list[Client] = []

    def open_at(server: Server, process: psutil.Process) -> Client:
        elsewhere: list[Client] = []
        for _ in range(20):
            opened.append(Client(server))
            if opened[-1].process == process:
                for client in elsewhere:
                    client.close()
                return opened[-1]
            elsewhere.append(opened[-1])
        raise AssertionError("the front end gets no connection")

    yield open_at
    for client in opened:
        client.close()


@pytest.fixture
def rows(controlled, tmp_path) -> Callable[..., Server]:
    """Starts a ready server with two front ends, whose rows have any size; the gate `infer` is closed."""

    def start(*options: str) -> Server:
        (tmp_path / "wide").touch()
        server: Server = controlled("--fronts", str(FRONT_ENDS), "--max-queue-delay-us", "0", *options)
        server.open("load")
        server.wait_ready()
        return server

    return start


def replaced(server: Server, known: list[psutil.Process]) -> psutil.Process:
    """The front end that has begun in place of one of those that were known."""
    wait_until(lambda: len(set(front_ends(server)) - set(known)) == 1, "another one has begun")
    (new,) = set(front_ends(server)) - set(known)
    return new


@again
def test_connections_are_spread_evenly(rows) -> None:
    server = rows()
    wait_until(lambda: not any(established(each, server.port) for each in front_ends(server)), "nobody is connected")
    with contextlib.ExitStack() as stack:
        owners = Counter[int]()
        for _ in range(20):
            client = Client(server)
            stack.callback(client.close)
            owners[client.process.pid] += 1
    assert len(owners) == FRONT_ENDS
    assert min(owners.values()) >= 9


def test_only_the_clients_of_a_killed_front_end_notice(rows, clients) -> None:
    server = rows()
    server.open("infer")
    known = front_ends(server)
    victim, other = known
    lost, kept, watching = clients(server, victim), clients(server, other), clients(server, other)
    for _ in range(5):
        assert lost.infer() == 200
    statuses: list[int] = []
    enough = threading.Event()

    def go_on() -> None:
        while not enough.is_set():
            statuses.append(kept.infer())

    def answered() -> float:
        return watching.metric("abserve_native_requests_success_total")

    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(go_on)
        before = answered()
        assert before >= 5
        victim.kill()
        assert is_closed(lost.socket)
        counts = [before, answered()]
        new = replaced(server, known)
        assert clients(server, new).infer() == 200
        counts += [answered()]
        served = len(statuses)
        wait_until(lambda: len(statuses) > served + 5, "the other connection is served")
        enough.set()
        going_on.result(60)
    assert set(statuses) == {200}
    assert counts == sorted(counts)
    assert clients(server, new).metric("abserve_native_requests_success_total") >= counts[-1] + 1


def test_a_killed_front_end_gives_back_what_it_held_and_what_it_had_queued(rows, clients) -> None:
    """A budget for one large body: half of one that will never be complete would leave no room for another."""
    values = 4 * MIB
    server = rows("--max-body-bytes", str(17 * MIB), "--max-held-bytes", str(17 * MIB), "--max-batch-size", "1")
    known = front_ends(server)
    victim, other = known
    watching, executing, queued, half = (clients(server, process) for process in (other, other, victim, victim))
    executing.socket.sendall(row_request(4))
    server.wait_until((server.folder / "infer-reached").exists, "the engine has one")
    queued.socket.sendall(row_request(4))
    half.socket.sendall(row_request(values)[: 2 * values])
    server.wait_until(lambda: watching.metric(PENDING) == 1, "one waits")
    victim.kill()
    server.wait_until(lambda: watching.metric(PENDING) == 0, "it does not wait any more")
    new = replaced(server, known)
    server.open("infer")
    assert read_answer(executing.socket)[0] == 200
    for process in (new, other):
        client = clients(server, process)
        client.socket.sendall(row_request(values))
        assert read_answer(client.socket)[0] == 200
    assert watching.metric("abserve_native_items_total") == 3


def test_a_front_end_that_dies_again_and_again_ends_the_server(rows) -> None:
    server = rows()
    processes = psutil.Process(server.process.pid).children()
    known = front_ends(server)
    known[0].kill()
    for _ in range(5):
        new = replaced(server, known)
        known, processes = [*known, new], [*processes, new]
        new.kill()
    assert server.process.wait(60) == 1
    wait_until(lambda: all_ended(processes), "no child remains")


def test_without_the_engine_s_process_the_server_ends(rows) -> None:
    server = rows("--max-batch-size", "1")
    children = psutil.Process(server.process.pid).children()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(server.infer, [1.0] * 4) for _ in range(3)]
        server.wait_until(lambda: server.metric(PENDING) == 2, "the engine has one, two wait")
        engine(server).kill()
        assert {future.result(60).status for future in futures} == {500}
    assert server.process.wait(60) == 1
    wait_until(lambda: all_ended(children), "no child remains")


def test_children_end_when_the_first_process_is_killed(rows) -> None:
    server = rows()
    server.open("infer")
    assert server.infer([1.0] * 4).status == 200
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 1 + FRONT_ENDS
    for process in server.processes:
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()  # so nothing of theirs can remain there
    server.process.kill()
    server.process.wait(60)
    wait_until(lambda: all_ended(children), "all have ended")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_finishes_what_is_executed_what_waits_and_what_arrives(rows, clients, number, status) -> None:
    """Ctrl-C goes to the whole group of a terminal, SIGTERM to one process."""
    server = rows("--max-batch-size", "1")
    first, second = front_ends(server)
    watching, executing, queued, arriving = (clients(server, process) for process in (first, first, second, second))
    data = row_request(4)
    executing.socket.sendall(data)
    server.wait_until((server.folder / "infer-reached").exists, "the engine has one")
    queued.socket.sendall(data)
    arriving.socket.sendall(data[:-3])
    server.wait_until(lambda: watching.metric(PENDING) == 1, "one waits")
    children = psutil.Process(server.process.pid).children()
    for process in server.processes if number == signal.SIGINT else server.processes[:1]:
        process.send_signal(number)
    assert is_closed(watching.socket)
    arriving.socket.sendall(data[-3:])
    server.open("infer")
    assert [read_answer(client.socket)[0] for client in (executing, queued, arriving)] == [200] * 3
    assert server.process.wait(60) == status
    assert (server.folder / "closed").exists()
    wait_until(lambda: all_ended(children), "no child remains")


def test_two_front_ends_have_one_budget(rows, clients) -> None:
    values = 12 * MIB  # 48 MiB, of which the budget holds one and a third
    server = rows("--max-held-bytes", str(64 * MIB), "--max-body-bytes", str(64 * MIB))
    server.open("infer")
    first, second = (clients(server, process) for process in front_ends(server))
    data = row_request(values)
    before = server.memory_bytes
    first.socket.sendall(data[:-1])
    second.socket.sendall(data)
    assert read_answer(second.socket)[0] == 503
    assert server.memory_bytes - before < 80 * MIB
    first.socket.sendall(data[-1:])
    assert read_answer(first.socket)[0] == 200

    def answered() -> bool:
        second.socket.sendall(data)
        return read_answer(second.socket)[0] == 200

    wait_until(answered, "the first front end has given the memory back, a moment after its answer")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_front_ends_whose_last_words_are_not_read_end_as_well(rows, clients, number) -> None:
    """A socket whose other end is closed with something unread in it is not at its end, but reset."""
    server = rows("--shutdown-timeout-s", "60")
    first, second = front_ends(server)
    leaving = [clients(server, process) for process in (first, second)]
    children = psutil.Process(server.process.pid).children()
    server.process.send_signal(signal.SIGSTOP)
    for client in leaving:
        client.close()
    wait_until(lambda: not any(established(process, server.port) for process in (first, second)), "both are closed")
    server.process.send_signal(number)
    server.process.send_signal(signal.SIGCONT)
    assert server.process.wait(60) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: all_ended(children), "all have ended")


def from_region() -> bytes:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": IMAGE_BYTES}
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 224, 224], "parameters": parameters}
    return json.dumps({"inputs": [tensor]}).encode()


def test_regions_are_those_of_all_front_ends(native, clients) -> None:
    server = native("--fronts", str(FRONT_ENDS), "--allow-shared-memory", "true")
    server.wait_ready()
    known = front_ends(server)
    first, second = (clients(server, process) for process in known)
    key = f"abserve_test_processes_{os.getpid()}"
    file = Path("/dev/shm") / key
    file.write_bytes(np.ones(IMAGE_BYTES // 4, "<f4").tobytes())
    try:
        region = json.dumps({"key": f"/{key}", "offset": 0, "byte_size": IMAGE_BYTES}).encode()
        assert first.send("POST", "/v2/systemsharedmemory/region/r/register", region)[0] == 200
        for client in (first, second):
            assert client.send("POST", MODEL_PATH, from_region())[0] == 200
        file.unlink()  # as clients do at once
        known[0].kill()
        third = clients(server, replaced(server, known))
        assert third.send("POST", MODEL_PATH, from_region())[0] == 200
        assert third.send("POST", "/v2/systemsharedmemory/region/r/unregister")[0] == 200
        for client in (second, third):
            assert client.send("POST", MODEL_PATH, from_region())[0] == 404
            assert json.loads(client.send("GET", "/v2/systemsharedmemory/status")[1]) == []
    finally:
        file.unlink(missing_ok=True)


def test_a_model_is_loaded_and_unloaded_for_all_front_ends(rows, clients) -> None:
    server = rows("--allow-model-control", "true")
    server.open("infer")
    first, second = (clients(server, process) for process in front_ends(server))
    for _ in range(3):
        assert first.send("POST", "/v2/repository/models/rows/unload")[0] == 200
        assert [several.infer() for several in (first, second)] == [404, 404]
        assert second.send("POST", "/v2/repository/models/rows/load")[0] == 200
        assert [several.infer() for several in (first, second)] == [200, 200]
        assert first.send("GET", "/v2/health/ready")[0] == 200


@pytest.mark.parametrize("fronts", [0, FRONT_ENDS])
@pytest.mark.parametrize("flights", ["one", "two"])
def test_a_failure_of_the_server_s_own_ends_it(controlled, fronts, flights) -> None:
    """An engine with room for two batches is driven by the thread that receives, if that is another process."""
    server = controlled("--fronts", str(fronts))
    if flights == "two":
        server.open("two")
    server.open("load", "infer")
    server.wait_ready()
    assert server.infer([1.0] * 4).status == 200
    server.open("unready")
    assert server.infer([1.0] * 4).status == 500
    assert server.process.wait(60) == 1
    assert "planted: not even whether it is ready is known" in (server.folder / f"log-{server.port}").read_text()
