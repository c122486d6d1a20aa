"""How much longer the native server takes until it is ready than its engine until it is warm.

    python -m pytest tests/benchmarks/test_cold_start.py -m benchmark -s

A fresh interpreter imports the engine's libraries, loads the default model with random weights and warms it up, as the
server's engine does; its time begins with its first statement. A server's time begins before its process is started and
ends when `/v2/health/ready` is 200. The three take turns; the ratio is the median over rounds. One start before them
fills the page cache. Run it alone: front ends need other cores than the engine, and a busy machine has none. There the
ratio of the CPU times until ready, of all processes of a server, says more.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import pytest

from tests.benchmarks.test_native_cpu import cpu_us
from tests.integration.native.conftest import free_port

ROUNDS = 5
FRONTS = (0, 3)
MOST = 1.15
"""Of the engine's own time, with every number of front ends."""
SETTINGS = {"weights": "random:0", "engine": "torch", "log_level": "warning"}
ENVIRONMENT = {**os.environ, "ABSERVE_PROFILE_AT_START": "0"}

ENGINE = """
import time
start = time.perf_counter()
import sys
from servers.engines.batches import warm_up_sizes
from servers.engines.factory import build_engine
from servers.models.registry import get_variants
from servers.models.weights import parse_weights
from servers.native.server import imported_first
from servers.options.command_line import from_argument
from servers.options.libraries import import_library
from servers.native.shared.settings import NativeSettings
given = from_argument(NativeSettings, sys.argv[1:])
(specification,) = get_variants(given.model, given.payloads)
settings = given.resolved(specification)
for library in imported_first(settings.engine, specification):
    import_library(library)
imported = time.perf_counter()
weights = parse_weights(settings.weights, specification.default_weights)
engine = build_engine(specification, weights, settings.engine_settings(), None)
engine.load()
loaded = time.perf_counter()
engine.warm_up(warm_up_sizes(settings.max_batch_size))
print(imported - start, loaded - imported, time.perf_counter() - loaded, time.process_time())
"""


@dataclass(frozen=True)
class Start:
    """Seconds until warm or ready, and the CPU time until then."""

    seconds: float
    cpu_s: float


def start_engine() -> tuple[Start, list[float]]:
    """With the seconds for imports, weights and warm-up."""
    command = [sys.executable, "-P", "-c", ENGINE, json.dumps(SETTINGS)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    *parts, cpu_s = map(float, done.stdout.split())
    return Start(sum(parts), cpu_s), parts


def start_server(fronts: int) -> Start:
    """Until it is ready; it is stopped then."""
    port = free_port()
    settings = {"http_port": port, "grpc_port": free_port(), "fronts": fronts, **SETTINGS}
    command = [sys.executable, "-P", "-m", "servers.native", json.dumps(settings)]
    start = time.perf_counter()
    server = subprocess.Popen(command, env=ENVIRONMENT)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60).close()
                return Start(time.perf_counter() - start, cpu_us(server.pid) / 1e6)
            except (urllib.error.URLError, ConnectionError):
                assert server.poll() is None, "the server has exited"
                time.sleep(0.1)  # a question takes the interpreter from the import
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.benchmark
@pytest.mark.timeout(540)
def test_a_server_is_ready_soon_after_its_engine_could_be() -> None:
    start_engine()
    rounds = []
    for index in range(ROUNDS):
        servers = {fronts: start_server(fronts) for fronts in FRONTS[:: 1 if index % 2 else -1]}
        engine, parts = start_engine()
        rounds.append((servers, engine))
        said = ", ".join(f"fronts={fronts} {one.seconds:.2f} s" for fronts, one in sorted(servers.items()))
        imports, weights, warm_up = parts
        sys.stdout.write(
            f"\nimports {imports:.2f} s, weights {weights:.2f} s, warm-up {warm_up:.2f} s: "
            f"{engine.seconds:.2f} s; until ready: {said}"
        )
        sys.stdout.flush()
    ratios = {}
    for fronts in FRONTS:
        ratios[fronts] = statistics.median(servers[fronts].seconds / engine.seconds for servers, engine in rounds)
        cpu = statistics.median(servers[fronts].cpu_s / engine.cpu_s for servers, engine in rounds)
        sys.stdout.write(f"\nfronts={fronts}: ready after {ratios[fronts]:.2f} of it; CPU time {cpu:.2f} of it")
    sys.stdout.write(f"\n{os.cpu_count()} CPUs, Python {sys.version.split()[0]}\n")
    assert max(ratios.values()) <= MOST
