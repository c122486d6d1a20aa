"""CPU time per request of our Locust user beside Locust's own FastHttpUser, for the same bodies.

    python -m pytest tests/benchmarks/client_cpu.py -m benchmark -s

Both run inside one gevent-patched process against one sink on loopback that reads the body and answers 2 KB, in
alternating rounds: one user, one connection, a body of one FP32 image (602 KB) and one UINT8 image (150 KB). The figure
is the process's user and system time divided by the requests of the round; the ratio is the median over rounds. Our
user records its samples to a file as in a measured block; FastHttpUser feeds Locust's statistics, as it always does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark

LIMIT = 0.5
BODIES = {"602 KB": 602_112, "150 KB": 150_528}

SINK = """
import asyncio
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2048\\r\\n\\r\\n" + bytes(2048)
class Sink(asyncio.BufferedProtocol):
    def __init__(self):
        self.buffer = bytearray(1 << 20); self.left = 0; self.head = b""
    def connection_made(self, transport):
        self.transport = transport
    def get_buffer(self, hint):
        return self.buffer
    def buffer_updated(self, count):
        if self.left == 0:
            self.head += bytes(self.buffer[:count])
            end = self.head.find(b"\\r\\n\\r\\n")
            if end < 0:
                return
            lines = self.head[:end].lower().split(b"\\r\\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self.left = length - (len(self.head) - end - 4)
            self.head = b""
        else:
            self.left -= count
        if self.left == 0:
            self.transport.write(ANSWER)
async def main():
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

CLIENTS = """
import locust  # patches
import gc, json, sys, time
from pathlib import Path
from statistics import median
from locust import FastHttpUser, task
from locust.env import Environment
from locust.exception import StopUser
from loadgen.clients.requests import Address, Request, request_head
from loadgen.sample_files import SampleWriter
from loadgen.users import InferenceUser, Traffic

port, folder, rounds, requests = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
address = Address("127.0.0.1", port)

def run(user_class):
    environment = Environment(user_classes=[user_class], host=address.url)
    environment.create_local_runner()
    gc.collect()
    environment.runner.start(1, spawn_rate=1)
    environment.runner.spawning_greenlet.join()
    environment.runner.user_greenlets.join()
    environment.runner.quit()
    return user_class.cpu_us

def measured(send):
    for _ in range(20):
        send()
    begun = time.process_time_ns()
    for _ in range(requests):
        send()
    return (time.process_time_ns() - begun) / requests / 1000

def figures(size):
    body = bytes(size)
    prepared = Request(request_head("POST", "/v2/models/m/infer", address, content_length=size), body)
    found = {"ours": [], "FastHttpUser": []}
    for number in range(rounds):
        writer = SampleWriter(folder / f"{size}-{number}.npy")
        class Ours(InferenceUser):
            fires_events = False
            traffic = Traffic(address, (prepared,), 1, writer)
            @task
            def load(self):
                type(self).cpu_us = measured(self.infer)
                raise StopUser
        class Fast(FastHttpUser):
            @task
            def load(self):
                type(self).cpu_us = measured(lambda: self.client.post("/v2/models/m/infer", data=body))
                raise StopUser
        order = (("ours", Ours), ("FastHttpUser", Fast))
        for name, user_class in order if number % 2 else order[::-1]:
            found[name].append(run(user_class))
        writer.close()
    ratio = median(a / b for a, b in zip(found["ours"], found["FastHttpUser"]))
    return {"ours": median(found["ours"]), "FastHttpUser": median(found["FastHttpUser"]), "ratio": ratio}

print(json.dumps({name: figures(size) for name, size in json.loads(sys.argv[5]).items()}))
"""


@pytest.fixture
def sink_port() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def test_our_user_costs_less_than_fast_http_user(sink_port: int, tmp_path: Path) -> None:
    arguments = [str(sink_port), str(tmp_path), "7", "400", json.dumps(BODIES)]
    done = subprocess.run([sys.executable, "-c", CLIENTS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    for name, found in figures.items():
        sys.stdout.write(
            f"\n{name}: ours {found['ours']:.0f} µs, FastHttpUser {found['FastHttpUser']:.0f} µs CPU a request, "
            f"ratio {found['ratio']:.2f}"
        )
    for name, found in figures.items():
        assert found["ratio"] <= LIMIT, name
