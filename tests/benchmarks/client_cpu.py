"""CPU time per request of our clients beside Locust's FastHttpUser and NVIDIA's perf_analyzer, for the same 602 KB.

    python -m pytest tests/benchmarks/client_cpu.py -m benchmark -s

Everything runs on loopback against one sink (`tests.benchmarks.open_sink`: reads the body, answers 2 KB) in alternating
rounds: one user, one connection, one FP32 image a request. The Locust
users live in one gevent-patched process; their figure is the process's user and system time over the requests of a
round. perf_analyzer is started twice a round, for few requests and for many; its figure is the difference of its CPU
times over the difference of the requests, so that its start-up is not charged. Ratios are medians over rounds.

Our user records its samples to a file as in a measured block; FastHttpUser feeds Locust's statistics, as it always
does. Through shared memory both our client and perf_analyzer write the image once and refer to it in every request.
`shm, new inputs` writes the few bytes that make each input new, as in a comparison.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 7
REQUESTS = 2000
FEW, MANY = 100, 2100
FAST_HTTP_LIMIT = 0.5
PERF_ANALYZER_LIMIT = 0.5
SHARED_MEMORY_LIMIT = 0.6
"""The ratio is about 0.5, and differs by 0.1 between runs."""
OURS = ("http", "grpc", "shm", "shm, new inputs")

CLIENTS = """
import locust  # patches
import gc, json, sys, time
import gevent
from pathlib import Path
from locust import FastHttpUser, task
from locust.env import Environment
from locust.exception import StopUser
from loadgen.measure.calibrate import signature, write_images
from loadgen.client.connection import Address
from loadgen.client.inputs import read_inputs
from loadgen.records.samples import SampleWriter
from loadgen.client.transports import InferenceTarget, PreparedBodies, prepare
from loadgen.client.traffic import Traffic
from loadgen.client.bodies import find_variation, fresh_numbers

url, grpc_address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
write_images(folder / "samples")
inputs = read_inputs(folder / "samples", "fp32")
targets = {name: InferenceTarget(name, url, "sink", grpc_address) for name in ("http", "grpc", "shm")}
targets["shm, new inputs"] = targets["shm"]
variation = find_variation(inputs, signature("fp32"))
varied = {"shm, new inputs": variation}
bodies = {
    name: prepare(target.transport, inputs, signature("fp32"), (0,), varied.get(name))
    for name, target in targets.items()
}

def run(user_class):
    environment = Environment(user_classes=[user_class], host=url)
    environment.create_local_runner()
    gc.collect()
    environment.runner.start(1, spawn_rate=1)
    environment.runner.spawning_greenlet.join()
    environment.runner.user_greenlets.join()
    environment.runner.quit()
    return user_class.cpu_us

def measured(send, requests):
    for _ in range(20):
        send()
    begun = time.process_time_ns()
    for _ in range(requests):
        send()
    return (time.process_time_ns() - begun) / requests / 1000

def ours(name, requests):
    writer = SampleWriter(folder / "samples.npy")
    prepared = PreparedBodies((bodies[name],), ((0,),), varied.get(name), fresh_numbers())
    traffic = Traffic(targets[name], prepared, 1, writer)
    def user():
        connection = traffic.connection()
        traffic.infer(connection, 0)
        return measured(lambda: traffic.infer(connection, 0), requests)
    gc.collect()
    found = gevent.spawn(user).get()
    assert traffic.errors == 0, traffic.error_messages
    traffic.close()
    writer.close()
    return found

def fast(requests):
    request = targets["http"].sendable(bodies["http"])
    lines = request.head.decode().split("\\r\\n")[1:]
    headers = dict(line.split(": ", 1) for line in lines if line and not line.startswith(("Host", "Content-Length")))
    class Fast(FastHttpUser):
        @task
        def load(self):
            def send():
                with self.client.post("/v2/models/sink/infer", data=request.body, headers=headers) as answer:
                    assert answer.status_code == 200, answer.text
            type(self).cpu_us = measured(send, requests)
            raise StopUser
    return run(Fast)

for line in sys.stdin:
    name, requests = json.loads(line)
    print(json.dumps(fast(requests) if name == "FastHttpUser" else ours(name, requests)), flush=True)
"""


class OpenSink:
    """A sink that any client can use, as a process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.open_sink"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{ports['port']}"
        self.grpc_address = f"127.0.0.1:{ports['grpc_port']}"


class Clients:
    """The process in which all Locust users live."""

    def __init__(self, sink: OpenSink, folder: Path) -> None:
        arguments = [sys.executable, "-c", CLIENTS, sink.url, sink.grpc_address, str(folder)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def cpu_us(self, name: str) -> float:
        """CPU µs a request of one round."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, REQUESTS]).encode() + b"\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


@pytest.fixture
def sink() -> Iterator[OpenSink]:
    found = OpenSink()
    yield found
    with found.process as process:
        process.kill()


@pytest.fixture
def clients(sink: OpenSink, tmp_path: Path) -> Iterator[Clients]:
    found = Clients(sink, tmp_path)
    yield found
    with found.process as process:
        process.kill()


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def perf_analyzer_cpu_us(analyzer: Any, sink: OpenSink, transport: str) -> float:
    """CPU µs a request, start-up excluded; the clients' process has not been waited for, so it is not in the sum."""
    address = sink.grpc_address if transport == "grpc" else sink.url.removeprefix("http://")
    command = ["-m", "sink", "-i", "grpc" if transport == "grpc" else "http", "-u", address, "-b", "1"]
    if transport == "shm":
        command += ["--shared-memory", "system", "--output-shared-memory-size", "2048"]
    used = []
    for requests in (FEW, MANY):
        before = cpu_s_of_children()
        analyzer.run(*command, "--concurrency-range", "1", "--request-count", str(requests))
        used.append(cpu_s_of_children() - before)
    return (used[1] - used[0]) / (MANY - FEW) * 1e6


def test_cpu_of_a_request(sink: OpenSink, clients: Clients, perf_analyzer: Any) -> None:
    names = [*OURS, "FastHttpUser", *(f"perf_analyzer {transport}" for transport in ("http", "grpc", "shm"))]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS):
        for name in names if number % 2 else names[::-1]:
            if name.startswith("perf_analyzer"):
                found[name].append(perf_analyzer_cpu_us(perf_analyzer, sink, name.split()[1]))
            else:
                found[name].append(clients.cpu_us(name))
    for name in names:
        spread = f"{min(found[name]):.0f} to {max(found[name]):.0f}"
        sys.stdout.write(f"\n{name:<20} {median(found[name]):6.0f} µs CPU a request of 602 KB ({spread})")
    pairs = [
        ("http", "FastHttpUser"), ("http", "perf_analyzer http"), ("grpc", "perf_analyzer grpc"),
        ("shm", "perf_analyzer shm"), ("shm, new inputs", "perf_analyzer shm"),
    ]  # fmt: skip
    ratios = {pair: median(a / b for a, b in zip(found[pair[0]], found[pair[1]], strict=True)) for pair in pairs}
    for (ours, theirs), ratio in ratios.items():
        sys.stdout.write(f"\nour {ours} / {theirs}: {ratio:.2f}")
    sys.stdout.write("\n")
    assert ratios["http", "FastHttpUser"] <= FAST_HTTP_LIMIT
    assert ratios["http", "perf_analyzer http"] <= PERF_ANALYZER_LIMIT
    assert ratios["grpc", "perf_analyzer grpc"] <= PERF_ANALYZER_LIMIT
    assert ratios["shm", "perf_analyzer shm"] <= SHARED_MEMORY_LIMIT
