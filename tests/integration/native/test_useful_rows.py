"""How much of what the engine executes is for requests when more clients send than it can serve.

The engine is driven as one on a GPU is, with the buckets of CUDA graphs and two batches in flight, and executing a
batch takes a fixed time and one for each row of its bucket (see runner_server.py): so long that a busy machine changes
little. Each client sends one row at a time and the next one after its answer.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from tests.integration.native.conftest import wait_until
from tests.integration.native.test_driven_engine import ask, connected, in_flight

CLIENTS = (50, 80, 128)
SETTLING, MEASURED = 48, 48
"""Batches: those from which the server learns how clients come, and those that count."""
LEAST = 0.87
"""It was 0.90 to 1.00: up to eight requests of a front end are queued as one, which the batcher does not split, so a
full batch may lack up to seven rows."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("clients", CLIENTS)
def test_few_rows_only_fill_a_bucket(runner: Any, clients: int) -> None:
    server = runner("--fronts", "1", "--max-batch-size", "32")
    server.open("paced", "infer")
    server.wait_ready()
    ends = threading.Event()

    def send() -> None:
        connection = connected(server)
        while not ends.is_set():
            assert ask(connection, 1.0) == [2.0]
        connection.close()

    def counted() -> tuple[float, float, float]:
        names = ("items_total", "executed_items_total", "executions_total")
        useful, executed, batches = (server.metric(f"abserve_native_{name}") for name in names)
        return useful, executed, batches

    def wait_for(batches: int) -> None:
        wait_until(lambda: in_flight(server) >= batches, f"{batches} batches")

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        wait_for(SETTLING)
        before = counted()
        wait_for(SETTLING + MEASURED)
        useful, executed, batches = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    share, mean = useful / executed, useful / batches
    sys.stdout.write(f"\n{clients} clients: {share:.3f} of the executed rows are useful, {mean:.1f} per batch")
    assert share >= LEAST
