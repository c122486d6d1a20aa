"""A server with two engine processes behind its front ends, here both on the CPU."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import pytest

from tests.integration.native.conftest import Server, wait_until
from tests.integration.native.test_driven_engine import ask, ask_once, connected
from tests.integration.native.test_held_memory import PENDING
from tests.integration.native.test_processes import all_ended

TWO = ("--device", "cpu,cpu", "--max-queue-delay-us", "0")


def children(server: Server) -> list[psutil.Process]:
    """The two engines' processes, then the front ends'."""
    return sorted(psutil.Process(server.process.pid).children(), key=lambda child: child.pid)


def started(server: Server) -> list[tuple[int, int]]:
    """The process and the rows of each batch that has been started, in order."""
    names = sorted(file.name.split("-") for file in server.folder.glob("started-*"))
    return [(int(process), int(rows)) for _, _, process, rows in names]


def rows_of(server: Server) -> Counter[int]:
    """Rows that have been started in each process."""
    rows_by_process = Counter[int]()
    for process, rows in started(server):
        rows_by_process[process] += rows
    return rows_by_process


@pytest.fixture
def two(runner: Callable[..., Server]) -> Callable[..., Server]:
    """Starts a ready server with two engines and one front end, or as many as the options say; its gate is closed."""

    def start(*options: str) -> Server:
        server = runner(*TWO, "--fronts", "1", *options)
        server.wait_ready()
        return server

    return start


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_the_engine_with_the_fewest_outstanding_rows_gets_the_next_request(two, fronts: str) -> None:
    """Whichever front end has the others."""
    server = two("--fronts", fronts)
    first, second, *_ = (child.pid for child in children(server))
    with ThreadPoolExecutor(16) as clients:
        large = clients.submit(ask_once, server, *[1.0] * 16)
        server.wait_until(lambda: len(started(server)) == 1, "it is executed")
        small = [clients.submit(ask_once, server, value) for value in (2.0, 3.0, 4.0, 5.0, 6.0)]
        server.wait_until(lambda: rows_of(server).total() + server.metric(PENDING) == 21, "all are with the engines")
        server.open("infer")
        assert large.result() == [2.0] * 16
        assert [future.result() for future in small] == [[4.0], [6.0], [8.0], [10.0], [12.0]]
    assert sorted(rows_of(server).items()) in ([(first, 16), (second, 5)], [(first, 5), (second, 16)])


def test_a_slow_engine_gets_fewer_requests(two) -> None:
    server = two()
    slow, quick, _ = (child.pid for child in children(server))
    server.open(f"hold-{slow}", "infer")
    enough = Event()
    answers = Counter[bool]()

    def client(value: float) -> None:
        with closing(connected(server)) as connection:
            while not enough.is_set():
                answers[ask(connection, value) == [2 * value]] += 1

    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(client, float(1 + number)) for number in range(4)]
        server.wait_until(lambda: rows_of(server)[quick] >= 100, "the other engine goes on")
        assert 1 <= rows_of(server)[slow] <= 2
        enough.set()
        (server.folder / f"hold-{slow}").unlink()
        for future in running:
            future.result(60)
    assert set(answers) == {True}


def test_every_request_gets_its_own_rows_and_counters_are_those_of_both(two) -> None:
    server = two("--fronts", "2")
    server.open("infer")

    def client(seed: int) -> None:
        chance = random.Random(seed)
        with closing(connected(server)) as connection:
            for _ in range(60):
                rows = [float(chance.randrange(1000, 9000)) for _ in range(chance.choice((1, 1, 1, 2, 5)))]
                assert ask(connection, *rows) == [2 * row for row in rows]

    with ThreadPoolExecutor(16) as clients:
        for future in [clients.submit(client, seed) for seed in range(16)]:
            future.result()
    counted, rows = server.model_stats(), rows_of(server)
    assert set(rows) == {future.pid for future in children(server)[:2]}
    assert counted["inference_count"] == rows.total() == server.metric("abserve_native_items_total")
    assert counted["execution_count"] == len(started(server))
    assert counted["inference_stats"]["queue"]["count"] == counted["inference_stats"]["success"]["count"] == 960
    assert server.metric(PENDING) == 0


def test_a_full_queue_is_the_share_of_its_engine(two) -> None:
    server = two("--queue-size", "3")
    with ThreadPoolExecutor(16) as clients:
        flying = []
        for count in range(1, 5):
            flying.append(clients.submit(ask_once, server, *[1.0] * 16))
            server.wait_until(lambda count=count: len(started(server)) == count, "it is in flight")
        waiting = [clients.submit(ask_once, server, 2.0) for _ in range(4)]
        server.wait_until(lambda: server.metric(PENDING) == 4, "two wait for each")
        assert ask_once(server, 3.0) == 503
        server.open("infer")
        assert [future.result() for future in flying + waiting] == [[2.0] * 16] * 4 + [[4.0]] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_without_either_engine_the_server_ends(two, victim: int) -> None:
    server = two()
    processes = children(server)
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask_once, server, 1.0) for _ in range(2)]
        server.wait_until(lambda: len(rows_of(server)) == 2, "each engine has one")
        processes[victim].kill()
        server.wait_until(lambda: any(future.done() for future in asked), "one is answered")
        assert [future.result() for future in asked if future.done()] == [500]
        server.open("infer")
        assert sorted(map(str, (future.result(60) for future in asked))) == ["500", "[2.0]"]
    assert server.process.wait(60) == 1
    wait_until(lambda: all_ended(processes), "no child remains")


def test_a_front_end_that_replaces_another_has_both_engines(two) -> None:
    server = two()
    server.open("infer")
    *engines, front_end = children(server)
    front_end.kill()
    wait_until(lambda: front_end not in children(server) and len(children(server)) == 3, "another one has begun")
    server.wait_ready()
    for value in (1.0, 2.0):
        assert ask_once(server, value) == [2 * value]
    assert set(rows_of(server)) == {engine.pid for engine in engines}


def test_both_engines_are_unloaded_and_loaded(controlled) -> None:
    server = controlled(*TWO, "--fronts", "2", "--allow-model-control", "true")
    server.open("load", "infer")
    server.wait_ready()
    engines = [engine.pid for engine in children(server)[:2]]
    assert server.request("POST", "/v2/repository/models/rows/unload", b"{}").status == 200
    assert sorted(map(int, (server.folder / "closed").read_text().split())) == engines
    assert server.infer([1.0] * 4).status == 404
    (server.folder / "load-reached").unlink()
    assert server.request("POST", "/v2/repository/models/rows/load", b"{}").status == 200
    assert (server.folder / "load-reached").exists()
    for _ in range(4):
        assert server.infer([1.0] * 4).status == 200
    assert server.model_stats()["inference_count"] == 4


def test_a_load_that_fails_on_one_engine_is_undone_on_the_other(controlled) -> None:
    server = controlled(*TWO, "--fronts", "2", "--allow-model-control", "true")
    server.open("load", "infer")
    server.wait_ready()
    first, second = (engine.pid for engine in children(server)[:2])
    assert server.request("POST", "/v2/repository/models/rows/unload", b"{}").status == 200
    (server.folder / "load").write_text(f"fail {second}")
    (server.folder / "closed").unlink()
    assert server.request("POST", "/v2/repository/models/rows/load", b"{}").status == 500
    assert str(first) in (server.folder / "closed").read_text().split()
    assert server.infer([1.0] * 4).status == 503
    (server.folder / "load").write_text("")
    assert server.request("POST", "/v2/repository/models/rows/load", b"{}").status == 200
    assert server.infer([1.0] * 4).status == 200


def test_the_server_is_ready_when_both_engines_are(controlled) -> None:
    server = controlled(*TWO, "--fronts", "2")
    server.wait_live()
    late = children(server)[1]
    server.open(f"hold-{late.pid}", "load", "infer")
    log = server.folder / f"log-{server.port}"
    server.wait_until(lambda: log.read_text().count(" ready ") == 1, "one is loaded")
    for _ in range(20):
        assert server.infer([1.0] * 4).status == 503
        assert server.status("/v2/health/ready") == 503
        assert server.status("/v2/models/rows/ready") == 503
    (server.folder / f"hold-{late.pid}").unlink()
    server.wait_ready()
    assert server.infer([1.0] * 4).status == 200
    config = json.loads(server.request("GET", "/v2/models/rows/config").body)
    assert config["parameters"]["device"]["string_value"] == "cpu,cpu"
    assert [(group["kind"], group["count"]) for group in config["instance_group"]] == [("KIND_CPU", 2)]
    assert json.loads(server.request("GET", "/gpu-info").body)["runtime"]["device"] == "cpu,cpu"


def test_both_engines_execute_requests_from_one_system_region(two) -> None:
    server = two("--allow-shared-memory", "true")
    server.open("infer")
    file = Path("/dev/shm") / f"abserve_test_several_engines_{os.getpid()}"
    file.write_bytes(np.full(4, 3.0, np.float32).tobytes() + bytes(16))
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    tensors: dict[str, Any] = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}],
        "outputs": [{"name": "y", "parameters": {**place, "shared_memory_offset": 16}}],
    }
    try:
        region = json.dumps({"key": f"/{file.name}", "offset": 0, "byte_size": 32}).encode()
        assert server.request("POST", "/v2/systemsharedmemory/region/r/register", region).status == 200
        for value in (3.0, 4.0):
            file.write_bytes(np.full(4, value, np.float32).tobytes() + bytes(16))
            assert server.request("POST", "/v2/models/rows/infer", json.dumps(tensors).encode()).status == 200
            assert np.frombuffer(file.read_bytes()[16:], np.float32).tolist() == [2 * value] * 4
        assert set(rows_of(server)) == {child.pid for child in children(server)[:2]}
        assert server.request("POST", "/v2/systemsharedmemory/unregister", b"").status == 200
        assert server.request("POST", "/v2/models/rows/infer", json.dumps(tensors).encode()).status == 404
    finally:
        file.unlink(missing_ok=True)


def test_a_front_end_that_polls_stays_awake_for_the_time_and_then_sleeps(two) -> None:
    server = two("--busy-poll-us", "300000")
    server.open("infer")
    *_, front_end = children(server)

    def is_awake_after_an_answer() -> bool:
        """Whether it runs, or waits for a core, as often as it is looked at in a third of the time."""
        assert ask_once(server, 1.0) == [2.0]
        looks, ends_s = 0, time.monotonic() + 0.1
        while time.monotonic() < ends_s:
            if front_end.status() == psutil.STATUS_SLEEPING:
                return False
            looks += 1
            time.sleep(0.001)
        return looks >= 10

    def sleeps() -> bool:
        return front_end.status() == psutil.STATUS_SLEEPING

    wait_until(sleeps, "nobody asks")
    assert any(is_awake_after_an_answer() for _ in range(10)), "this test may have got no core for some of them"
    wait_until(sleeps, "it sleeps")
