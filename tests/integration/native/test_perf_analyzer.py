"""NVIDIA's perf_analyzer drives the native server as it drives Triton, and prints the same full breakdown."""

from __future__ import annotations

import re

import pytest

MODEL = "openclip_vit_b32"
USERS = 2
OUTPUT_BYTES = 32 * 512 * 4
BREAKDOWN = re.compile(
    r"Avg request latency: (\d+) usec \(overhead (\d+) usec \+ queue (\d+) usec \+ compute input (\d+) usec \+ "
    r"compute infer (\d+) usec \+ compute output (\d+) usec\)"
)

pytestmark = pytest.mark.slow


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.parametrize("memory", ["none", "system"])
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_it_measures_and_prints_a_full_server_breakdown(open_server, perf_analyzer, protocol, batch, memory):
    before = open_server.model_stats()
    output = perf_analyzer.run(
        *("-m", MODEL, "-i", protocol, "-b", str(batch), "--concurrency-range", str(USERS)),
        *("-u", open_server.address if protocol == "http" else open_server.grpc_address),
        *("--shared-memory", memory, "--output-shared-memory-size", str(OUTPUT_BYTES)),
        # Whether this machine is quiet is not the question: take the first three windows whatever they are.
        *("--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"),
    )
    requests = number(r"Request count: (\d+)", output)
    assert requests >= 50
    assert number(r"throughput: ([\d.]+) infer/sec", output) > 0
    assert number(r"Successful request count: (\d+)", output) >= requests
    # It reads the statistics while both users' requests are under way: executed, but not yet answered.
    executed, answered = number(r"Inference count: (\d+)", output), number(r"Successful request count: (\d+)", output)
    assert abs(executed - batch * answered) <= USERS * batch
    parts = BREAKDOWN.search(output)
    assert parts is not None, output
    total, *stages = map(int, parts.groups())
    assert abs(total - sum(stages)) <= 3
    assert stages[1] > 0  # queue
    assert stages[3] > 0  # compute infer
    assert number(r"Avg latency: (\d+) usec", output) > total
    after = open_server.model_stats()
    assert after["inference_count"] - before["inference_count"] >= batch * requests
    assert after["inference_stats"]["fail"] == before["inference_stats"]["fail"]
